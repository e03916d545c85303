"""What docs/architecture.md shows is what the code prints, and what it names is in the code."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import optax
import pytest
import torch
from torch.nn import functional as F

import etrace_bridge as eb

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
# Symbols of equations, names of torch's parameters in the example, and folders of before
NOT_IN_THE_CODE = {"a_0", "M_0", "g_t", "l", "h_l0", "weight_hh_l0", "weight_ih_l0", "engine"}


@pytest.mark.x32
@pytest.mark.implicit_promotion("as in a user's process")
def test_the_worked_example_is_real_output():
    blocks = re.findall(
        r"```python\n(.*?)```\n(?:\n```text\n(.*?)```\n)?", PAGE.read_text(), flags=re.DOTALL
    )
    assert len(blocks) >= 8
    names: dict = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        lines = [line.rstrip() for line in printed.getvalue().rstrip().splitlines()]
        assert "\n".join(lines) == shown.rstrip()


# -- names ----------------------------------------------------------------------------------------


def test_every_name_of_the_page_is_in_the_code():
    prose = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    names = {
        match[1].removesuffix(".py")
        for span in re.findall(r"`([^`\n]+)`", prose)
        if (match := re.fullmatch(r"([A-Za-z_][\w.]*)(?:\(.*\))?", span))
    }
    assert len(names) > 150
    assert {name for name in names if not is_in_the_code(name)} == NOT_IN_THE_CODE


def is_in_the_code(name: str) -> bool:
    """A dotted name that starts with a folder of the package is a path, down to the file."""
    first, *rest = name.split(".")
    folder = ROOT / "etrace_bridge" / first
    if rest and folder.is_dir():
        file = folder / f"{rest[0]}.py"
        return (file.exists() or (folder / rest[0]).is_dir()) and words() >= {*rest}
    return words() >= {first, *rest}


@cache
def words() -> frozenset[str]:
    """Files, folders, and all that the package defines or uses, short texts such as options too."""
    found = set()
    for folder in ("etrace_bridge", "adapters", "benchmarks", "tests", "examples", "docs"):
        found.add(folder)
        for path in (ROOT / folder).rglob("*.py"):
            found.update(path.relative_to(ROOT).with_suffix("").parts)
    for folder in ("etrace_bridge", "adapters"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                        found.add(name)
                    case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.Name(id=name):
                        found.add(name)
                    case ast.Constant(value=str(text)) if len(text) < 30:
                        found.add(text)
    return frozenset(found)


# -- the path of one step -------------------------------------------------------------------------


def test_one_step_takes_the_hops_of_the_page_in_their_order():
    """A first step runs all hops; a second one of its kind is the compiled call alone."""
    table = hops()
    assert len(table) == 12
    assert {"compile_etrace_graph", "make_program", "run_chunk", "system"} < set(sum(table, []))
    learner = eb.OnlineLearner(torch.nn.GRU(3, 4), "d_rtrl", F.mse_loss, optax.adam(1e-3))
    x, y = torch.randn(2, 3), torch.randn(2, 4)
    calls, position = calls_of(lambda: learner.step(x, y)), 0
    for hop in table:
        positions = []
        for name in hop:
            later = [n for n in range(position, len(calls)) if name in calls[n]]
            assert later, f"`{name}` is not called after the hop before it"
            positions.append(later[0])
        position = max(positions)
    again = set().union(*calls_of(lambda: learner.step(x, y)))
    assert {"QuickSteps.find", "Store.advance", "learning.results"} < again
    assert again & set(sum(table[:11], [])) == {"frontend"}  # which reads the input


def hops() -> list[list[str]]:
    """Return each hop's modules, and the functions of these that its text names."""
    found = []
    for number, where, what in re.findall(
        r"^\| (\d+) \| (.*?) \| (.*) \|$", PAGE.read_text(), re.M
    ):
        modules = re.findall(r"`([\w.]+)`", where)
        text = "".join(code for module in modules for code in sources(module))
        named = re.findall(r"`(\w+)(?:\(.*?\))?`", what)
        found.append([*modules, *(n for n in named if re.search(rf"^ *def {n}\(", text, re.M))])
        assert int(number) == len(found)
    return found


def sources(module: str) -> list[str]:
    path = ROOT / "etrace_bridge" / Path(*module.split("."))
    files = path.glob("*.py") if path.is_dir() else [path.with_suffix(".py")]
    return [file.read_text() for file in files]


def calls_of(run: Callable[[], Any]) -> list[set[str]]:
    """Return the names of every function of the package that runs, in order: its module, the
    folder of that, and its own name with and without its class.
    """
    calls = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("etrace_bridge."):
            module = module.removeprefix("etrace_bridge.")
            code = frame.f_code
            calls.append({module, module.split(".")[0], code.co_name, code.co_qualname})

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls
