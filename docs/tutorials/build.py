"""Makes the page and the notebook of every tutorial from one source, and runs the code.

A source is a Python file in percent form: `# %% [markdown]` starts a cell of text, `# %%` a cell of
code. The page shows what each cell prints and draws; the notebook has the same cells, without
output.

    python docs/tutorials/build.py            # all of them
    python docs/tutorials/build.py drift      # those whose name has "drift" in it
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
TEXT, CODE = "# %% [markdown]", "# %%"


@dataclass(frozen=True)
class Cell:
    """One cell: its text or code, and which of the two it is."""

    is_code: bool
    content: str


def sources() -> list[Path]:
    """The sources, in the order of the tutorials."""
    return sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)


def read_cells(source: Path) -> list[Cell]:
    """The cells of a source."""
    cells: list[Cell] = []
    lines: list[str] = []
    is_code = True

    def close() -> None:
        content = "\n".join(lines).strip("\n")
        if content:
            cells.append(Cell(is_code, content))
        lines.clear()

    for line in source.read_text(encoding="utf-8").splitlines():
        if line in (TEXT, CODE):
            close()
            is_code = line == CODE
        else:
            lines.append(line if is_code else line.removeprefix("#").removeprefix(" "))
    close()
    return cells


def notebook(cells: list[Cell]) -> str:
    """The cells as a Jupyter notebook."""
    made = []
    for n, cell in enumerate(cells):
        extra = {"execution_count": None, "outputs": []} if cell.is_code else {}
        kind = "code" if cell.is_code else "markdown"
        content = cell.content.splitlines(keepends=True)
        made.append(
            {"cell_type": kind, "id": f"cell-{n}", "metadata": {}, "source": content} | extra
        )
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {
        "cells": made,
        "metadata": {"kernelspec": kernel},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def page(name: str, cells: list[Cell], outputs: list[str]) -> str:
    """The cells as a page, each cell of code followed by its output."""
    note = f"*This page as a notebook: [{name}.ipynb]({name}.ipynb).*"
    title, _, rest = cells[0].content.partition("\n")
    parts = [title, note, rest.strip("\n")]
    for cell, output in zip(cells[1:], outputs[1:], strict=True):
        parts.append(f"```python\n{cell.content}\n```" if cell.is_code else cell.content)
        parts.append(output)
    return "\n\n".join(part for part in parts if part) + "\n"


def run(name: str, cells: list[Cell], pictures: Path) -> list[str]:
    """Runs the code; for each cell, what it printed and drew as Markdown."""
    import matplotlib.pyplot as plt

    scope: dict = {"__name__": "tutorial"}
    found, count = [], 0
    for cell in cells:
        shown = io.StringIO()
        if cell.is_code:
            with contextlib.redirect_stdout(shown):
                exec(compile(cell.content, f"{name}.py", "exec", dont_inherit=True), scope)
        parts = [f"```text\n{shown.getvalue().rstrip()}\n```"] if shown.getvalue().strip() else []
        for number in plt.get_fignums():
            count += 1
            figure = plt.figure(number)
            title = figure.get_label() or f"picture {count}"
            figure.savefig(
                pictures / f"{name}-{count}.png",
                dpi=110,
                bbox_inches="tight",
                metadata={"Software": None},
            )
            parts.append(f"![{title}]({name}-{count}.png)")
        plt.close("all")
        found.append("\n\n".join(parts))
    return found


def main(wanted: str = "") -> None:
    """Builds the tutorials whose name has `wanted` in it."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    for source in sources():
        if wanted in source.stem:
            cells = read_cells(source)
            outputs = run(source.stem, cells, HERE)
            files = {".md": page(source.stem, cells, outputs), ".ipynb": notebook(cells)}
            for ending, text in files.items():
                source.with_suffix(ending).write_text(text, encoding="utf-8")
            print(f"{source.stem}: {sum(bool(o) for o in outputs)} outputs", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:2])
