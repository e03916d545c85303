"""What docs/architecture.md shows is what the code prints."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "architecture.md"


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
