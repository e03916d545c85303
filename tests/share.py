"""Which of many alike cases the suite runs: a share in turn, and all of them with `make test-full`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

TESTS = Path(__file__).parent
FULL = bool(os.environ.get("FULL_TESTS"))
Case = TypeVar("Case")


def in_turn(
    cases: Sequence[Case], every: int, always: Callable[[Case], Any] = lambda case: False
) -> list[Case]:
    """One in `every` of the cases, the first among them, and those that `always` names.

    Compiling is what tests cost, so a product of several lists is worth its time only where the
    parts act on each other.
    """
    return [case for n, case in enumerate(cases) if FULL or n % every == 0 or always(case)]


def path_of_scripts() -> str:
    """PYTHONPATH for scripts of this folder that a test starts: with it, and what is there now."""
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
