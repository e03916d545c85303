"""Lists every error message of the package on the page of error messages: a hook of mkdocs.

The messages are read from the source, so that the page cannot differ from what the package says.
What a message fills in stands as `…`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE, MARK = "error-messages.md", "<!-- messages -->"
# The first of these that a file's path starts with says which part of the page its messages go to.
PARTS = {
    "The model": ("adapters/", "etrace_bridge/frontend/"),
    "The compiler": ("etrace_bridge/compiler/", "etrace_bridge/_jax_compat.py"),
    "Learning rules": ("etrace_bridge/rules/", "etrace_bridge/step/", "etrace_bridge/schedule/"),
    "Checkpoints and export": (
        "etrace_bridge/learning/checkpoint",
        "etrace_bridge/learning/autosave.py",
        "etrace_bridge/learning/export",
    ),
    "Devices and processes": (
        "etrace_bridge/learning/place",
        "etrace_bridge/learning/processes.py",
    ),
    "Data and training": ("etrace_bridge/learning/",),
    "Checks and recommendations": ("etrace_bridge/check/",),
    "The command line": ("etrace_bridge/cli/",),
    "Everything else": ("etrace_bridge/",),
}


class Message(NamedTuple):
    """One error that the package raises.

    Attributes:
        file: where, relative to the repository.
        error: the name of its class.
        text: what it says.
    """

    file: str
    error: str
    text: str


def error_names() -> set[str]:
    """The package's own errors, and that of its command line."""
    tree = ast.parse((ROOT / "etrace_bridge/_errors.py").read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.ClassDef)} | {"UsageError"}


def read_text(node: ast.expr, known: dict[str, ast.expr]) -> list[str]:
    """What an expression of text can be; `known` has the values of its variables."""
    match node:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            texts = [""]
            for part in parts:
                ends = read_text(part, known)
                texts = [text + end for text in texts for end in ends]
            return texts
        case ast.FormattedValue(value=ast.IfExp() | ast.Name() as value):
            return read_text(value, known)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in read_text(left, known) for b in read_text(right, known)]
        case ast.IfExp(body=one, orelse=other):
            return read_text(one, known) + read_text(other, known)
        case ast.Name(id=name) if name in known:
            return read_text(known[name], {k: v for k, v in known.items() if k != name})
        case ast.Call(func=ast.Attribute(value=value, attr="format")):
            return [re.sub(r"\{\w*\}", "…", text) for text in read_text(value, known)]
    return ["…"]


def assigned_texts(tree: ast.AST) -> dict[str, ast.expr]:
    """Return the variables that are assigned once in a scope, by name, and their values."""
    found: dict[str, list[ast.expr]] = {}
    waiting = list(ast.iter_child_nodes(tree))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            continue  # a scope of its own
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {
        name: values[0]
        for name, values in found.items()
        if len(values) == 1
        and isinstance(values[0], ast.Constant | ast.JoinedStr | ast.IfExp | ast.BinOp)
    }


def find_messages() -> list[Message]:
    """Every message, in the order of files and lines."""
    names, found = error_names(), []
    files = [*(ROOT / "etrace_bridge").rglob("*.py"), *(ROOT / "adapters").rglob("*.py")]
    for path in sorted(files):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        file = path.relative_to(ROOT).as_posix()
        for node, known in calls_in(tree, assigned_texts(tree)):
            if isinstance(node.func, ast.Name) and node.func.id in names and node.args:
                texts = dict.fromkeys(read_text(node.args[0], known))
                found += [Message(file, node.func.id, " ".join(t.split())) for t in texts]
    return [message for message in found if re.search(r"\w", message.text)]


def calls_in(
    scope: ast.AST, known: dict[str, ast.expr]
) -> Iterator[tuple[ast.Call, dict[str, ast.expr]]]:
    """Yield every call within a scope, and the values of the variables that it sees."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.FunctionDef):
            inside = list(ast.walk(node))
            own = {n.id for n in inside if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            own |= {n.arg for n in inside if isinstance(n, ast.arg)}
            outer = {name: value for name, value in known.items() if name not in own}
            yield from calls_in(node, outer | assigned_texts(node))
            continue
        if isinstance(node, ast.Call):
            yield node, known
        yield from calls_in(node, known)


def part_of(file: str) -> str:
    """The part of the page that a file's messages belong to."""
    return next(part for part, starts in PARTS.items() if file.startswith(starts))


def split(text: str) -> tuple[str, str]:
    """What happened, and the rest: why, and what to do."""
    found = re.match(r"(.+?(?:[.;]|:(?= [^…])))\s+(.+)", text)
    return (found[1], found[2]) if found else (text, "")


def write_page(messages: list[Message]) -> str:
    """The parts of the page, each a table."""
    lines = []
    for part in PARTS:
        rows = dict.fromkeys((m.text, m.error) for m in messages if part_of(m.file) == part)
        if rows:
            lines += [
                f"## {part}",
                "",
                "| message | cause, and what to do | error |",
                "|---|---|---|",
            ]
        for text, error in sorted(rows):
            cells = (cell.replace("|", "\\|") for cell in split(text))
            lines.append(f"| {' | '.join(cells)} | {error} |")
        lines.append("")
    return "\n".join(lines)


def on_page_markdown(markdown: str, *, page, **_) -> str:
    """What mkdocs calls with the text of every page."""
    return (
        markdown.replace(MARK, write_page(find_messages()))
        if page.file.src_uri == PAGE
        else markdown
    )
