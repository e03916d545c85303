"""The house: which way imports point, what the packages are, what is shipped, and what must not be
in any file.
"""

from __future__ import annotations

import ast
import email
import email.message
import functools
import importlib
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from docs import dist

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "etrace_bridge"
ADDRESS = "https://example.org/you/etrace_bridge"  # a public address to build for
# Source folder of each package whose folder is not its dotted name.
FOLDERS = {f"{PACKAGE}.adapters": "adapters"}

# What each room of the house may import, itself aside. Everything that is not listed here (cli,
# plot, the public names in `__init__`) stands on top and may import all of them.
GROUND = {"_bytes", "_errors", "_jax_compat", "_precision", "_tables"}
MAY_IMPORT = {
    "_bytes": {"_errors"},
    "_errors": set(),
    "_jax_compat": {"_errors"},
    "_precision": set(),
    "_tables": set(),
    "compiler": GROUND,
    "lowering": GROUND | {"compiler"},
    "step": GROUND | {"compiler", "lowering"},
    "rules": GROUND | {"compiler", "step"},
    "schedule": GROUND | {"compiler", "lowering", "step", "rules"},
    "frontend": GROUND | {"compiler", "lowering", "adapters"},
    "adapters": GROUND | {"compiler", "frontend"},
    "learning": GROUND | {"compiler", "lowering", "step", "rules", "schedule", "frontend"},
    "check": GROUND | {"compiler", "lowering", "step", "rules", "schedule", "frontend", "learning"},
}
WITHOUT_TORCH = GROUND | {"compiler", "lowering", "step", "rules", "schedule"}
# `lowering` has two doors: what its package gives, and nothing behind them.
DOORS = {"lowering": f"{PACKAGE}.lowering"}
# What only `lowering` may speak of, in code and comments. `optimization_barrier` is also a
# primitive that a user's model may have.
BACKEND = re.compile(
    r"\bXLA|\bCPU|xla_|\bbarrier|lax\.optimization_barrier|default_backend|\bLLVM\b"
)
# A decision by the kind of device: only `lowering` may lay a program out for one.
DEVICE_QUESTION = re.compile(r"(?<!sys\.)(?<!for )platform\w* *(==|!=|in\b|not in\b)")
# Where it is not the engine's backend: the devices that a user names, the files of an export, and
# whether torch and JAX can share memory.
BACKEND_ALLOWED = {
    Path(PACKAGE, "learning", name) for name in ("placement.py", "exported.py", "torch_reader.py")
}
JAX_INTERNALS = ("jax._src", "jax.core", "jax.extend", "jax.interpreters", "jaxlib")
JAX_INTERNALS_FILE = Path(PACKAGE, "_jax_compat.py")

MACHINE_PATH = re.compile(r"(?<![\w.~$)}-])/(work|root|home|tmp|opt|Users)/\w")
REGISTRY_HOST = re.compile(r"\b(pypi|pythonhosted|npmjs|debian)\.(org|com)\b")


@dataclass(frozen=True)
class Import:
    """One imported module, with the place that imports it."""

    name: str
    where: str
    relative: bool


def python_files(*folders: str) -> list[Path]:
    """List the Python files under folders of the repository, relative to it."""
    return sorted(
        file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).rglob("*.py")
    )


def tracked_files() -> list[Path]:
    """List what git tracks or would add, relative to the repository."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file()]


def module_name(file: Path) -> str:
    """Give the dotted name under which a file of the package is imported."""
    parts = list(file.with_suffix("").parts)
    for package, folder in FOLDERS.items():
        if parts[0] == folder:
            parts[:1] = package.split(".")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_in(
    source: str, file: Path, package_modules: frozenset[str] = frozenset()
) -> Iterator[Import]:
    """Yield every import of a file, also those inside functions and under TYPE_CHECKING."""
    here = module_name(file).split(".")
    if file.name != "__init__.py":
        here = here[:-1]
    for node in ast.walk(ast.parse(source)):
        where = f"{file}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, where, relative=False)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            for alias in node.names:
                full = f"{module}.{alias.name}"
                # `from jax import core` is the module jax.core; `from etrace_bridge import wrap` is
                # a name of the top.
                is_module = full in package_modules or not module.startswith(PACKAGE)
                yield Import(full if is_module else module, where, relative=bool(node.level))


def package_imports(file: Path) -> list[Import]:
    modules = frozenset(module_name(other) for other in python_files(PACKAGE, "adapters"))
    return list(imports_in((ROOT / file).read_text(), file, modules))


def room_of(module: str) -> str:
    """Name the room of a module: `compiler` for etrace_bridge.compiler.weight_views; the package itself is
    the top.
    """
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def wrong_way(file: Path, imports: list[Import]) -> list[str]:
    """List the imports of a package file that do not point down."""
    room = room_of(module_name(file))
    if room not in MAY_IMPORT:
        return []
    wrong = []
    for found in imports:
        top = found.name.split(".")[0]
        into = room_of(found.name)
        if top == PACKAGE and into != room and into in DOORS and found.name != DOORS[into]:
            wrong.append(f"{found.where}: {room} imports {found.name}, not {DOORS[into]}")
        if top == PACKAGE and into not in MAY_IMPORT[room] | {room}:
            wrong.append(f"{found.where}: {room} imports {found.name}")
        if top in {"torch", "torch2jax"} and room in WITHOUT_TORCH:
            wrong.append(f"{found.where}: {room} imports {found.name}")
    return wrong


def is_internal(dotted: str) -> bool:
    return any(dotted == name or dotted.startswith(f"{name}.") for name in JAX_INTERNALS)


def dotted_name(node: ast.expr) -> str:
    """Spell out an attribute chain such as jax.core.Jaxpr, or give an empty string."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def jax_internals(source: str, file: Path) -> list[str]:
    """List the uses of JAX internals, and the decisions by version, in a file."""
    found = [
        f"{use.where}: {use.name}" for use in imports_in(source, file) if is_internal(use.name)
    ]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and dotted_name(node) in JAX_INTERNALS:
            found.append(f"{file}:{node.lineno}: {dotted_name(node)}")
        if isinstance(node, ast.Compare):
            inside = [part for part in ast.walk(node) if isinstance(part, ast.Attribute)]
            found += [
                f"{file}:{part.lineno}: {dotted_name(part)}"
                for part in inside
                if "__version" in part.attr
            ]
    return found


def assert_none(findings: list[str]) -> None:
    """Fail with every finding on a line of its own (pytest shortens long lists)."""
    assert not findings, "\n" + "\n".join(findings)


def test_imports_point_down():
    files = python_files(PACKAGE, "adapters")
    assert len(files) > 8
    assert_none([line for file in files for line in wrong_way(file, package_imports(file))])


@pytest.mark.parametrize(
    ("file", "line", "is_wrong"),
    [
        ("etrace_bridge/compiler/graph.py", "from etrace_bridge.rules import base", True),
        ("etrace_bridge/compiler/graph.py", "from ..rules import base", True),
        ("etrace_bridge/compiler/graph.py", "from .. import wrap", True),
        ("etrace_bridge/compiler/graph.py", "def f():\n    import torch.nn", True),
        (
            "etrace_bridge/compiler/graph.py",
            "from . import views\nfrom .._errors import BridgeError",
            False,
        ),
        ("etrace_bridge/rules/base.py", "from etrace_bridge.step import steps\nimport jax", False),
        ("etrace_bridge/rules/base.py", "from etrace_bridge.schedule.chunk import run_chunk", True),
        ("etrace_bridge/rules/base.py", "from etrace_bridge.lowering import Tuning", True),
        ("etrace_bridge/step/program.py", "from etrace_bridge.lowering import Tuning", False),
        ("etrace_bridge/step/program.py", "from etrace_bridge.lowering.cpu import CPUTuning", True),
        ("etrace_bridge/rules/base.py", "from etrace_bridge.frontend.names import path", True),
        (
            "etrace_bridge/frontend/trace.py",
            "import torch\nfrom etrace_bridge.frontend import ops",
            False,
        ),
        (
            "etrace_bridge/frontend/trace.py",
            "from etrace_bridge.schedule.chunk_plan import divide",
            True,
        ),
        ("adapters/norse.py", "import etrace_bridge.rules", True),
        ("adapters/norse.py", "from etrace_bridge.frontend.adapter import register", False),
        (
            "etrace_bridge/learning/learner.py",
            "import torch\nfrom etrace_bridge.rules import base",
            False,
        ),
    ],
)
def test_import_rule_sees(file, line, is_wrong):
    assert bool(wrong_way(Path(file), list(imports_in(line, Path(file))))) is is_wrong


def test_adapters_use_absolute_imports():
    assert_none(
        [
            found.where
            for file in python_files("adapters")
            for found in package_imports(file)
            if found.relative
        ]
    )


def test_jax_internals_live_in_one_file():
    files = python_files(PACKAGE, "adapters", "tests", "examples", "benchmarks")
    files = [file for file in files if file != JAX_INTERNALS_FILE]
    assert_none([line for file in files for line in jax_internals((ROOT / file).read_text(), file)])


def test_the_package_compiles_in_one_place():
    """`jax.jit` without the options of `lowering.jit` can compute wrong numbers in float64."""
    files = [
        file
        for file in python_files(PACKAGE, "adapters")
        if file != Path(PACKAGE, "lowering", "compile.py")
    ]
    assert_none(
        [
            str(file)
            for file in files
            if re.search(
                r"\bjax\.jit\(|@jax\.jit|from jax import .*\bjit\b", (ROOT / file).read_text()
            )
        ]
    )


def backend_words(source: str, file: Path) -> list[str]:
    """List the lines of a file that speak of a backend or its compiler, or decide by a device."""
    return [
        f"{file}:{n}: {line.strip()}"
        for n, line in enumerate(source.splitlines(), 1)
        if BACKEND.search(line) or DEVICE_QUESTION.search(line)
    ]


def test_one_folder_knows_the_backend():
    files = [
        file
        for file in python_files(PACKAGE, "adapters")
        if room_of(module_name(file)) != "lowering" and file not in BACKEND_ALLOWED
    ]
    assert len(files) > 200
    assert_none([line for file in files for line in backend_words((ROOT / file).read_text(), file)])


def test_backend_rule_sees():
    for line in (
        "# faster on XLA",
        "x = lax.optimization_barrier(x)",
        "jax.default_backend()",
        "the barrier",
        "on a CPU",
        "xla_cpu_x",
        'if device.platform == "cpu":',
        'large = 2**20 if platform in ("cpu", "tpu") else 0',
    ):
        assert backend_words(line, Path("x.py")), line
    for line in ("optimization_barrier polygamma pow", '_CPU = torch.device("cpu")', "a carrier"):
        assert not backend_words(line, Path("x.py")), line


def rule_questions(source: str, file: Path) -> list[str]:
    """List the places of a file that ask for the class of a rule."""
    asking = [
        n
        for n in ast.walk(ast.parse(source))
        if isinstance(n, ast.Call) and dotted_or_plain(n.func) in ("isinstance", "type")
    ]
    asking += [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Compare)]
    names = {n.id for call in asking for n in ast.walk(call) if isinstance(n, ast.Name)}
    names |= {n.attr for call in asking for n in ast.walk(call) if isinstance(n, ast.Attribute)}
    return [f"{file}: {name}" for name in sorted(names & rule_classes())]


@functools.cache
def rule_classes() -> set[str]:
    """Name every class of the package that is a rule, the base `Rule` aside."""
    bases: dict[str, set[str]] = {}
    for file in python_files(f"{PACKAGE}/rules"):
        for node in ast.parse((ROOT / file).read_text()).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {b.id for b in node.bases if isinstance(b, ast.Name)}
    found: set[str] = set()
    while more := {n for n, b in bases.items() if b & (found | {"Rule"})} - found:
        found |= more
    return found


def dotted_or_plain(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else dotted_name(node)


def test_nothing_outside_rules_asks_for_the_class_of_a_rule():
    files = [file for file in python_files(PACKAGE) if room_of(module_name(file)) != "rules"]
    asked = [line for file in files for line in rule_questions((ROOT / file).read_text(), file)]
    # `recommend` leaves the reference out by its name.
    assert_none(
        [line for line in asked if not line.startswith(f"{PACKAGE}/check/recommend.py: BPTT")]
    )


def test_class_question_rule_sees():
    for line in (
        "isinstance(rule, BPTT)",
        "isinstance(rule, (rules.RTRL, Other))",
        "type(rule) in (DRTRL, SnAp1)",
        "isinstance(rule, LowRankRTRL)",
    ):
        assert rule_questions(line, Path("x.py")), line
    assert not rule_questions("rule = BPTT()\nisinstance(rule, Rule)", Path("x.py"))


@pytest.mark.parametrize("rule", ["rflo", "ottt", "immediate", "three_factor", "d_rtrl", "snap1"])
def test_a_trace_rule_is_one_short_file(rule):
    """An equation and little else; docs/extending/rule.md shows the first."""
    file = Path(PACKAGE, "rules", f"{rule}.py")
    inside = {found.name for found in package_imports(file) if found.name.startswith(PACKAGE)}
    assert len((ROOT / file).read_text().splitlines()) < 80 and len(inside) <= 5, inside


def test_files_have_unique_names():
    rooms = {
        room: [f.stem for f in python_files(f"{PACKAGE}/{room}")]
        for room in ("step", "rules", "schedule", "lowering", "check")
    }
    names = [name for stems in rooms.values() for name in stems if name != "__init__"]
    others = {
        f.stem for f in python_files(PACKAGE, "adapters") if room_of(module_name(f)) not in rooms
    } - {"__init__"}
    assert sorted(names) == sorted(set(names)) and not set(names) & others, set(names) & others


@pytest.mark.parametrize(
    ("line", "is_internal_use"),
    [
        ("from jax import core", True),
        ("from jax._src import ad_util", True),
        ("import jax.extend as jex", True),
        ("import jax\nx = jax.core.Jaxpr", True),
        ("import jax\nif jax.__version_info__ >= (0, 10): pass", True),
        ("import torch\nif torch.__version__ < '3': pass", True),
        ("import torch\nmeta = {'torch': torch.__version__}", False),
        ("import jax.numpy as jnp\nfrom jax import lax", False),
    ],
)
def test_internals_rule_sees(line, is_internal_use):
    assert bool(jax_internals(line, Path("etrace_bridge/learning/learner.py"))) is is_internal_use


def test_every_package_is_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert declared["package-dir"] == FOLDERS
    folders = {file.parent for file in python_files(PACKAGE, "adapters")}
    assert sorted(declared["packages"]) == sorted(
        module_name(folder / "__init__.py") for folder in folders
    )
    assert_none(
        [str(folder) for folder in folders if not (ROOT / folder / "__init__.py").is_file()]
    )


def test_adapters_is_refused_as_a_top_level_package(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    with pytest.raises(ImportError, match=r"import it by that name.*pip install -e"):
        importlib.import_module("adapters")
    assert importlib.import_module("etrace_bridge.adapters").__file__ == str(
        ROOT / "adapters" / "__init__.py"
    )


@pytest.mark.skipif(
    not (ROOT / ".git").exists(),
    reason="not a git checkout: what belongs to the project is unknown",
)
def test_no_machine_paths_or_registry_hosts():
    found = []
    for file in tracked_files():
        try:
            text = (ROOT / file).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            found += [
                f"{file}:{number}: {line.strip()}"
                for rule in (MACHINE_PATH, REGISTRY_HOST)
                if rule.search(line)
            ]
    assert_none(found)


def test_machine_path_rule_sees():
    slash = "/"  # spelled apart, or this file would be its own finding
    for text in (
        f"{slash}home/someone",
        f'open("{slash}tmp/x")',
        f"cd {slash}work/main",
        f"file://{slash}root/x",
    ):
        assert MACHINE_PATH.search(text), text
    for text in (
        "https://host/home/page",
        "tests/tmp/x",
        "$HOME/work/x",
        "../work/x",
        "a /tmp folder",
        "./opt/x",
    ):
        assert not MACHINE_PATH.search(text), text


def assert_extras_serve_demo_and_adapters(metadata: email.message.Message) -> None:
    """`pip install etrace-bridge[snn,plot]` installs what `demo` and the adapters import."""
    needed: dict[str, set[str]] = {"": set(), "snn": set(), "plot": set()}
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        for extra, names in needed.items():
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                names.add(requirement.name)
    assert {"snn", "plot"} <= set(metadata.get_all("Provides-Extra", []))
    found = importlib.metadata.packages_distributions()
    for extra, files in (
        (
            "plot",
            [
                "etrace_bridge/cli/demo.py",
                "etrace_bridge/cli/demo_report.py",
                "etrace_bridge/plot.py",
            ],
        ),
        ("snn", [f"adapters/{name}.py" for name in ("snntorch", "norse", "spikingjelly", "ncps")]),
    ):
        for module in sorted({name for file in files for name in imported_libraries(ROOT / file)}):
            names = {name.replace("_", "-").lower() for name in found[module]}
            assert names & needed[extra], f"`{module}` is not in the extra `{extra}`"


def imported_libraries(file: Path) -> set[str]:
    """The top-level packages that a file imports, anywhere in it, apart from Python's and ours."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {PACKAGE}


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the sdist that `make dist` builds."""
    wheel, sdist = dist.build(ADDRESS, tmp_path_factory.mktemp("dist"))
    return wheel, sdist


def test_wheel_built_from_the_sdist_holds_every_package_file(distribution):
    wheel, _ = distribution
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
        (license_file,) = (name for name in archive.namelist() if name.endswith("licenses/LICENSE"))
        assert archive.read(license_file) == (ROOT / "LICENSE").read_bytes()
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        assert_extras_serve_demo_and_adapters(email.message_from_bytes(archive.read(metadata)))

    expected = set()
    for folder, package in ((PACKAGE, PACKAGE), ("adapters", f"{PACKAGE}/adapters")):
        files = (
            file.relative_to(ROOT / folder)
            for file in (ROOT / folder).rglob("*")
            if file.is_file() and "__pycache__" not in file.parts
        )
        expected |= {f"{package}/{file.as_posix()}" for file in files}
    assert f"{PACKAGE}/py.typed" in expected
    assert shipped == expected


def test_the_package_index_shows_links_that_lead_somewhere(distribution):
    wheel, sdist = distribution
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    with tarfile.open(sdist) as archive:
        (member,) = (
            m
            for m in archive.getmembers()
            if m.name.count("/") == 1 and m.name.endswith("PKG-INFO")
        )
        in_sdist = email.message_from_bytes(archive.extractfile(member).read())
    assert metadata.get_payload() == in_sdist.get_payload()
    assert metadata.get_all("Project-URL") == in_sdist.get_all("Project-URL")
    urls = dict(line.split(", ", 1) for line in metadata.get_all("Project-URL"))
    assert urls["Homepage"] == ADDRESS and {"Documentation", "Changelog", "Issues"} < set(urls)

    links = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert len(links) > 10
    for link in links:
        assert link.startswith("https://")
    ours = [
        link.removeprefix(f"{ADDRESS}/")
        for link in [*links, *urls.values()]
        if link.startswith(f"{ADDRESS}/")
    ]
    tag = "v" + metadata["Version"]
    assert f"raw/{tag}/docs/pictures/benchmarks.png" in ours and f"tree/{tag}/examples" in ours
    for kind, there, path in (link.split("/", 2) for link in ours if link != "issues"):
        assert there == tag
        assert (ROOT / path).is_dir() if kind == "tree" else (ROOT / path).is_file(), path


@pytest.mark.parametrize(
    "url", ["", "http://example.org/you/project", "example.org", "https://example.org"]
)
def test_dist_asks_for_the_public_address(url, tmp_path):
    with pytest.raises(SystemExit, match=r"must look like https://host/owner/project"):
        dist.build(url, tmp_path)
    assert not list(tmp_path.iterdir())
