"""What `fit` shows: one live line on a terminal or in a notebook, and one plain line per finished
epoch.
"""

from __future__ import annotations

import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from etrace_bridge._tables import in_notebook

try:
    import resource
except ImportError:  # Windows
    resource = None

PLAIN = ("epoch", "loss", "batches", "steps", "seconds", "steps_per_second", "complete")
COMPILING, TRAINING, VALIDATING = "compiling …", "", "validating …"


def resident_memory() -> int:
    """Return the bytes of memory that this process holds.

    Its peak, where the system does not tell the current value; 0 where it tells nothing.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # pyright: ignore[reportOptionalMemberAccess]
    except (OSError, ValueError, IndexError, AttributeError):
        if resource is None:
            return 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def describe(record: dict[str, Any]) -> str:
    """Show a record's numbers to people."""
    shown = [f"loss {record['loss']:.4g}"]
    shown += [
        f"{name} {value:.4g}"
        for name, value in record.items()
        if name not in PLAIN and isinstance(value, float)
    ]
    shown.append(f"{record.get('steps_per_second', 0):,.0f} steps/s")
    if held := resident_memory():
        shown.append(f"{held / 2**20:,.0f} MB")
    return "  ".join(shown)


def describe_epoch(record: dict[str, Any], epochs: int) -> str:
    """Return the line of a finished epoch."""
    return f"epoch {record['epoch']}/{epochs}  {describe(record)}  {record.get('seconds', 0):.1f} s"


class FitProgress(AbstractContextManager):
    """A progress display that shows nothing; the base of the others.

    Its methods are cheap: a display draws a few times a second at most.
    """

    epochs = 0

    def __exit__(self, *_: Any) -> None:
        return None

    def start_epoch(
        self, epoch: int, epochs: int, batches: int | None, record: dict[str, Any]
    ) -> None:
        """Start an epoch, whose record changes as it goes."""
        self.epochs = epochs

    def say(self, stage: str) -> None:
        """Show which of the stages above runs now."""

    def advance(self, record: dict[str, Any]) -> None:
        """Count one batch."""

    def end_epoch(self, record: dict[str, Any]) -> None:
        """End the epoch."""


class PlainLog(FitProgress):
    """Prints plain lines, for files and pipes."""

    def __init__(self) -> None:
        self._said = False

    def say(self, stage: str) -> None:
        """Say once that programs are compiled."""
        if stage == COMPILING and not self._said:
            self._said = True
            self._print(COMPILING)

    def end_epoch(self, record: dict[str, Any]) -> None:
        """Print the epoch's line."""
        self._print(describe_epoch(record, self.epochs))

    def _print(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class _Numbers(ProgressColumn):
    """The epoch's numbers, read when the line is drawn."""

    def render(self, task: Task) -> Text:
        record, stage = task.fields["record"], task.fields["stage"]
        return Text(
            "  ".join(
                part for part in (stage, describe(record) if record.get("batches") else "") if part
            )
        )


class TerminalLine(FitProgress):
    """Draws one live line at the bottom of a terminal, below the finished epochs.

    Args:
        console: where to draw.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        # a second line would be left behind when it goes
        numbers = _Numbers(Column(no_wrap=True, overflow="ellipsis"))
        columns = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(12),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            numbers,
        )
        self._bar = Progress(*columns, console=console, transient=True)
        self._task = self._bar.add_task(
            "", total=None, visible=False, epoch="", stage="", record={}
        )

    def __enter__(self) -> TerminalLine:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def start_epoch(
        self, epoch: int, epochs: int, batches: int | None, record: dict[str, Any]
    ) -> None:
        """Start the line anew."""
        self.epochs = epochs
        # Not `reset`, which would draw at once.
        fields = {"epoch": f"{epoch}/{epochs}", "record": record, "stage": TRAINING}
        self._bar.update(self._task, total=batches, completed=0, visible=True, **fields)

    def say(self, stage: str) -> None:
        """Show the stage at the end of the line."""
        self._bar.update(self._task, stage=stage)

    def advance(self, record: dict[str, Any]) -> None:
        """Advance the bar."""
        self._bar.update(self._task, completed=record["batches"])

    def end_epoch(self, record: dict[str, Any]) -> None:
        """Print the epoch's line above the live one."""
        self._console.print(
            describe_epoch(record, self.epochs), highlight=False, markup=False, soft_wrap=True
        )


class NotebookLine(PlainLog):
    """Redraws one line of a notebook, and prints a plain line per finished epoch.

    Args:
        display: `IPython.display.display`.
        seconds: least time between two drawings.
    """

    def __init__(self, display: Any, seconds: float = 0.25) -> None:
        super().__init__()
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)
        self._seconds, self._drawn, self._start, self._total = seconds, 0.0, "", "?"

    def __exit__(self, *_: Any) -> None:
        self._draw("")

    def start_epoch(
        self, epoch: int, epochs: int, batches: int | None, record: dict[str, Any]
    ) -> None:
        """Start the line anew."""
        self.epochs = epochs
        self._start = f"epoch {epoch}/{epochs}"
        self._total = str(batches or "?")

    def say(self, stage: str) -> None:
        """Show the stage at once, because it takes its time."""
        if stage:
            self._draw(f"{self._start}  {stage}")

    def advance(self, record: dict[str, Any]) -> None:
        """Redraw, if the last drawing is old enough."""
        now = time.monotonic()
        if now - self._drawn >= self._seconds:
            self._drawn = now
            self._draw(f"{self._start}  {record['batches']}/{self._total}  {describe(record)}")

    def _draw(self, line: str) -> None:
        self._handle.update({"text/plain": line}, raw=True)

    def _print(self, line: str) -> None:
        print(line, flush=True)


def notebook_display() -> Any:
    """Return the `display` function of the notebook that this runs in; None elsewhere."""
    if not in_notebook():
        return None
    from IPython.display import display  # pyright: ignore[reportMissingImports]

    return display


def open_progress(show: bool | None) -> FitProgress:
    """Open a progress display.

    None shows it where somebody can see it; True also in a log file.
    """
    if show is False:
        return FitProgress()
    display = notebook_display()
    if display is not None:
        return NotebookLine(display)
    console = Console(stderr=True)
    if console.is_terminal:
        return TerminalLine(console)
    return PlainLog() if show else FitProgress()
