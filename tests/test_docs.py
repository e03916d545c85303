"""README and documentation: every Python block runs as printed, shown output is real, commands
work, links lead somewhere.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import re
import runpy
import shlex
import sys
import textwrap
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest

import etrace_bridge as eb
from etrace_bridge.cli import main

ROOT = Path(__file__).parent.parent
DOCS = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", *DOCS]
# by test_architecture.py, which also compares its output letter by letter
RUN_ELSEWHERE = {"docs/architecture.md"}
COMMANDS_PAGE = "docs/howto/command-line.md"

# as a reader's process; the compiled code is not the subject
pytestmark = pytest.mark.x32


def blocks(page: str) -> list[tuple[str, str, str]]:
    """The page's code blocks: language, title, text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.findall(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", text, flags=re.M | re.S)
    return [tuple(part) for part in found]


def pages_with_python() -> list[str]:
    return [
        page
        for page in PAGES
        if page not in RUN_ELSEWHERE and any(kind == "python" for kind, _, _ in blocks(page))
    ]


def without_numbers(text: str) -> list[str]:
    """A text's words, for comparing output across machines: numbers, places in files and column
    widths aside.
    """
    text = re.sub(r"\S+\.(?:py|md):\d+", "FILE", text)
    text = re.sub(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?", "#", text)
    return re.sub(r"-{2,}", "-", text).split()


def test_there_is_code_to_run():
    assert len(pages_with_python()) >= 12 and "README.md" in pages_with_python()


@pytest.mark.implicit_promotion("as in a user's process")
@pytest.mark.parametrize("page", pages_with_python())
def test_code_runs_as_printed(page: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "docs_page"}
    printed = None
    for n, (kind, _, text) in enumerate(blocks(page)):
        if kind == "python":
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown):
                exec(compile(text, page, "exec", dont_inherit=True), scope)
            printed = shown.getvalue()
        elif kind == "text" and printed is not None:
            assert without_numbers(printed) == without_numbers(text), (
                f"{page}: what is shown after block {n - 1} is not what it prints"
            )
        if kind != "python":
            printed = None
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.mark.implicit_promotion("as in a user's process")
def test_commands_run_as_printed(tmp_path, monkeypatch, capsys) -> None:
    """The page's files are written and its commands run, in the order of the page."""
    monkeypatch.chdir(tmp_path)
    ran = []
    for kind, title, text in blocks(COMMANDS_PAGE):
        if title:
            (tmp_path / title).write_text(text)
            if title == "make_data.py":
                exec(compile(text, title, "exec", dont_inherit=True), {})
        elif kind == "sh":
            for line in text.replace("\\\n", "").splitlines():
                words = shlex.split(line)
                assert words[:3] == ["python", "-m", "etrace_bridge"], line
                assert main(words[3:]) == 0, f"{line}\n{capsys.readouterr().err}"
                ran.append(words[3])
    assert {"explain", "check", "recommend", "train", "bench"} <= set(ran)
    assert (tmp_path / "run" / "weights.pt").is_file() and (
        tmp_path / "run" / "model.safetensors"
    ).is_file()


def shell_lines() -> list[tuple[str, str]]:
    """(page, line) of every shell block that is not on the commands' own page."""
    found = [
        (page, text)
        for page in PAGES
        if page != COMMANDS_PAGE
        for kind, _, text in blocks(page)
        if kind in ("sh", "bash")
    ]
    return [
        (page, line.split("#")[0].strip()) for page, text in found for line in text.splitlines()
    ]


MODEL = """
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.readout = nn.GRU(32, 8), nn.Linear(8, 2)
    def forward(self, x):
        return self.readout(self.gru(x)[0])
make_model = Net
"""


@pytest.mark.implicit_promotion("as in a user's process")
def test_shell_lines_of_all_pages_work(tmp_path, monkeypatch, capsys) -> None:
    """Our own commands run on a model and data of the shape that the lines speak of; targets of
    make and extras of pip exist.
    """
    monkeypatch.chdir(tmp_path)
    for name in ("my_model.py", "path/to/file.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(MODEL)
    numbers = np.random.default_rng(0)
    np.savez("data.npz", xs=numbers.normal(size=(6, 8, 32)), targets=numbers.normal(size=(6, 8, 2)))
    make = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    ran = []
    for page, line in shell_lines():
        words = shlex.split(line)
        if words[:3] == ["python", "-m", "etrace_bridge"]:
            assert main(words[3:]) == 0, f"{page}: {line}\n{capsys.readouterr().err}"
            ran.append(words[3])
        elif words[0] == "make":
            assert words[1] in make, f"{page}: {line}"
        else:
            assert words[:2] == ["pip", "install"], f"{page}: {line}"
            asked = re.findall(r"\[([\w,]+)\]", line)
            assert set(",".join(asked).split(",")) - {""} <= set(extras), f"{page}: {line}"
    assert {"check", "train"} <= set(ran)


@pytest.fixture(scope="module")
def error_messages():
    """The hook that lists every error message on a page."""
    path = ROOT / "docs" / "error_messages.py"
    return types.SimpleNamespace(**runpy.run_path(str(path)))


def test_every_error_message_is_on_its_page(error_messages) -> None:
    """Also one that is put together from several parts, and none that is only names."""
    found = error_messages.find_messages()
    raised = {(m.file, m.error) for m in found}
    assert len(found) > 400 and {error for _, error in raised} >= error_messages.error_names() - {
        "BridgeError"
    }
    page = error_messages.write_page(found)
    for text in (
        "The batch of … cannot be divided over the mesh's … devices.",
        "There is no device … here; | JAX sees: ….",
        "and its axes are ….",
        "and there is no `mesh`.",
    ):
        assert text in page, text
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 400 and all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)


def test_troubleshooting_quotes_messages_that_exist(error_messages) -> None:
    texts = [message.text for message in error_messages.find_messages()]
    text = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\| message \|.*\n\|---.*\n((?:\|.*\n)+)", text, flags=re.M)
    quoted = [row.split("|")[1].strip() for table in tables for row in table.splitlines()]
    assert len(quoted) >= 15
    for quote in quoted:
        parts = [part.strip() for part in quote.split("…")]
        assert any(all(part in text for part in parts) for text in texts), quote


WIDEST = 121  # columns of code that the site shows without scrolling in a window of 1280 pixels


def test_code_fits_the_page() -> None:
    """Printed output is folded by the site, code is not."""
    code = [(page, text) for page in DOCS for kind, _, text in blocks(page) if kind != "text"]
    wide = [(p, line) for p, text in code for line in text.splitlines() if len(line) > WIDEST]
    assert len(code) > 60 and not wide, wide


def link_targets(page: str) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"<img[^>]* src=\"([^\"]+)\"", text)


def anchors(page: Path) -> set[str]:
    """The anchors that headings get, as mkdocs and GitHub make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {
        re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())
        for heading in headings
    }


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", *PAGES])
def test_relative_links_and_pictures_exist(page: str) -> None:
    broken = []
    for target in link_targets(page):
        if re.match(r"(https?:|mailto:)", target):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


def test_link_rule_sees(tmp_path, monkeypatch) -> None:
    (tmp_path / "page.md").write_text(
        "# One thing, `two`\n[a](other.md#x) ![b](p.svg)\n```text\n[c](no.md)\n```\n"
    )
    monkeypatch.setattr("test_docs.ROOT", tmp_path)
    assert link_targets("page.md") == ["other.md#x", "p.svg"] and anchors(tmp_path / "page.md") == {
        "one-thing-two"
    }


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: etrace_bridge\.([\w.]+)$", text, flags=re.M)
    # A function with the name of its module is listed where it is defined, or the page would show
    # the module.
    listed = [name if name.startswith("rules.") else name.split(".")[-1] for name in listed]
    assert sorted(set(listed)) == sorted(listed), "a name stands there twice"
    missing = sorted(set(eb.__all__) - {"rules"} - set(listed))
    missing += sorted(f"rules.{name}" for name in eb.rules.__all__ if f"rules.{name}" not in listed)
    assert missing == []
    known = {*eb.__all__, *eb.compiler.__all__, *(f"rules.{name}" for name in eb.rules.__all__)}
    assert sorted(set(listed) - known) == []


def test_result_types_are_public() -> None:
    """Whatever a public function or attribute gives can be imported for an annotation."""
    files = [*(ROOT / "etrace_bridge").rglob("*.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    ours = {n.name for tree in trees for n in tree.body if isinstance(n, ast.ClassDef)}
    # brainstate's State has the name of a class of the front-end; a traced step is for tests.
    unknown = ours - {"State", "TracedStep"}
    unknown -= {*eb.__all__, *eb.rules.__all__, *eb.compiler.__all__}
    found = []
    for name in eb.__all__:
        value = getattr(eb, name)
        members = {name: value, **(vars(value) if inspect.isclass(value) else {})}
        types = dict(getattr(value, "__annotations__", {})) if inspect.isclass(value) else {}
        for member, function in members.items():
            function = getattr(function, "fget", getattr(function, "func", function))
            if inspect.isroutine(function):
                given = getattr(inspect.unwrap(function), "__annotations__", {})
                types[f"{member}()"] = given.get("return", "")
        for member, text in types.items():
            if not member.startswith("_"):
                words = set(re.findall(r"\w+", str(text))) & unknown
                found += [f"{name}.{member} is a {word}" for word in words]
    assert found == []


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(
        r"^ +- ([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), flags=re.M
    )
    assert sorted(f"docs/{page}" for page in listed) == DOCS


@pytest.mark.implicit_promotion("as in a user's process")
def test_pictures_are_what_their_script_draws(tmp_path, monkeypatch) -> None:
    folder = ROOT / "docs" / "pictures"
    scope: dict = {"__name__": "pictures", "__file__": str(folder / "make_pictures.py")}
    exec(
        compile(
            (folder / "make_pictures.py").read_text(encoding="utf-8"), "make_pictures.py", "exec"
        ),
        scope,
    )
    scope["HERE"] = tmp_path
    for name in ("draw_memory", "draw_dropped", "draw_stack"):
        scope[name]()
    for path in sorted(tmp_path.iterdir()):
        assert path.read_text(encoding="utf-8") == (folder / path.name).read_text(encoding="utf-8")
    assert len(list(tmp_path.iterdir())) == 3


def test_the_rule_that_the_page_shows_is_the_real_one():
    page, file = (ROOT / name for name in ("docs/extending/rule.md", "etrace_bridge/rules/rflo.py"))
    shown = re.findall(r"```text\n(def system.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    assert len(shown) == 1 and textwrap.indent(shown[0], "    ") in file.read_text(encoding="utf-8")


BUILD = runpy.run_path(str(ROOT / "docs" / "tutorials" / "build.py"))


def tutorials() -> list[Path]:
    return BUILD["sources"]()


@pytest.mark.parametrize("source", tutorials(), ids=lambda path: path.stem)
def test_tutorials_are_what_their_source_says(source: Path) -> None:
    """Page and notebook have the source's cells; the page's output is compared where its code runs."""
    cells = BUILD["read_cells"](source)
    notebook = source.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert notebook == BUILD["notebook"](cells)
    page = source.with_suffix(".md").read_text(encoding="utf-8")
    code = [cell.content for cell in cells if cell.is_code]
    shown = blocks(source.with_suffix(".md").relative_to(ROOT).as_posix())
    on_page = [text.rstrip("\n") for kind, _, text in shown if kind == "python"]
    in_notebook = [
        "".join(cell["source"])
        for cell in json.loads(notebook)["cells"]
        if cell["cell_type"] == "code"
    ]
    # so `test_code_runs_as_printed`, which runs the page, runs the notebook
    assert on_page == in_notebook == code
    assert source.with_suffix(".md").relative_to(ROOT).as_posix() in pages_with_python()
    rest = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    rest = re.sub(r"^!\[.*\)$|^\*This page.*\*$", "", rest, flags=re.M)
    wanted = "\n".join(cell.content for cell in cells if not cell.is_code)
    assert rest.split() == wanted.split()
    pictures = re.findall(r"^!\[.+\]\((\S+\.png)\)$", page, flags=re.M)
    assert pictures and all((source.parent / name).is_file() for name in pictures)


def test_the_gallery_has_every_tutorial_and_example() -> None:
    text = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    examples = {f"`examples/{path.name}`" for path in (ROOT / "examples").glob("*.py")}
    assert set(re.findall(r"`examples/\w+\.py`", text)) == examples
    assert set(re.findall(r"\(tutorials/([\w-]+)\.md\)", text)) == {p.stem for p in tutorials()}
    drawn = re.findall(r"pictures/example-(\w+)\.png\)<br>`examples/(\w+)\.py`", text)
    assert len(drawn) >= 12 and all(picture == script for picture, script in drawn)
