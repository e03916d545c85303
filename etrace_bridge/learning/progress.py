"""The progress bar of `fit`: loss, steps a second, memory."""

from __future__ import annotations

import resource
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PAGE = resource.getpagesize()


def resident_memory() -> int:
    """Bytes of memory that this process holds (its peak, where the system does not tell)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def open_progress(show: bool | None) -> FitProgress:
    """A progress display; None shows it where somebody can see it."""
    console = Console(stderr=True)
    return FitProgress(console if (console.is_terminal if show is None else show) else None)


class FitProgress(AbstractContextManager):
    """One line an epoch; does nothing without a console."""

    def __init__(self, console: Console | None) -> None:
        self._bar: Progress | None = None
        if console is not None:
            self._bar = Progress(
                TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[numbers]}"), console=console,
            )  # fmt: skip
        self._task: Any = None

    def __enter__(self) -> FitProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start_epoch(self, epoch: int, epochs: int, batches: int | None) -> None:
        """A new line."""
        if self._bar is not None:
            self._task = self._bar.add_task("", total=batches, epoch=f"{epoch}/{epochs}", numbers="")

    def advance(self, record: dict[str, Any]) -> None:
        """One batch more."""
        if self._bar is not None:
            self._bar.update(self._task, completed=record["batches"], numbers=describe(record))

    def end_epoch(self, record: dict[str, Any]) -> None:
        """The epoch's last numbers."""
        if self._bar is not None:
            self._bar.update(self._task, total=record["batches"], completed=record["batches"], numbers=describe(record))


def describe(record: dict[str, Any]) -> str:
    """A record's numbers for people."""
    shown = [f"loss {record['loss']:.4g}"]
    plain = ("epoch", "loss", "batches", "steps", "seconds", "steps_per_second", "complete")
    shown += [f"{name} {value:.4g}" for name, value in record.items() if name not in plain and isinstance(value, float)]
    shown += [f"{record.get('steps_per_second', 0):,.0f} steps/s", f"{resident_memory() / 2**20:,.0f} MB"]
    return "  ".join(shown)
