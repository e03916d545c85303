"""Tables for people: as text for a terminal, and as HTML for a notebook; and which of them this is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html import escape

_CELL = "padding:.15em .8em .15em 0;text-align:left;vertical-align:top;border-bottom:1px solid #ddd"


def in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return hasattr(shell, "kernel")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of a table whose columns are as wide as their longest entry."""
    widths = [max(len(row[n]) for row in (header, *rows)) for n in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    ]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def html_table(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    """Return a table for a notebook, with a title above and notes below.

    Everything in it is escaped.
    """

    def line(cells: Sequence[str], tag: str) -> str:
        inner = (f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in cells)
        return f"<tr>{''.join(inner)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    below = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return (
        f"<div><p><b>{escape(title)}</b></p>"
        f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>{below}</div>"
    )
