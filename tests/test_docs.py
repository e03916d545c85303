"""Every Python block of the README and the documentation runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "docs/quickstart.md", "docs/rules.md", *(f"docs/howto/{p.name}" for p in sorted((ROOT / "docs/howto").glob("*.md")))]


def python_blocks(page: str) -> list[str]:
    """The page's Python code, block by block."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.mark.parametrize("page", PAGES)
def test_code_runs_as_printed(page: str) -> None:
    blocks = python_blocks(page)
    assert blocks, f"{page} has no Python block"
    scope: dict = {"__name__": "docs_page"}
    for n, block in enumerate(blocks):
        exec(compile(block, f"{page}, block {n}", "exec"), scope)
