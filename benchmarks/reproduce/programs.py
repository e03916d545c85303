"""Compiled programs that several runs share, and the time that runs take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

_KEPT: dict[str, Any] = {}


def kept(key: str, make: Callable[[], Any]) -> Any:
    """What `make` gave for this key, until `forget`."""
    if key not in _KEPT:
        _KEPT[key] = make()
    return _KEPT[key]


def forget() -> None:
    """Drop all compiled programs."""
    _KEPT.clear()
    jax.clear_caches()


class Stopwatch:
    """The processor time of training, without its first unit, which waits for compiling."""

    def __init__(self) -> None:
        self.laps = 0

    def lap(self) -> None:
        """Note that another unit is done."""
        self.now = time.process_time()
        if not self.laps:
            self.first = self.now
        self.laps += 1

    @property
    def seconds(self) -> float:
        """The time of all units, the first one taken to be as long as the others."""
        return (self.now - self.first) * self.laps / max(self.laps - 1, 1)
