"""Ctrl-C and SIGTERM during training: they wait while arrays are being replaced or saved."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

TERMINATED = 128 + signal.SIGTERM  # the exit status of a process that SIGTERM has ended


class Shield(AbstractContextManager):
    """Delays Ctrl-C while the learner is busy, so that it is never left without its arrays.

    Args:
        terminate: treat SIGTERM likewise, as a `SystemExit`; a handler of the user's own stays.
        agree: for several processes, the largest of their numbers. A signal to one of them then
            waits for `check`, where all stop together; the same signal again does not wait.

    Attributes:
        is_agreed: all processes stop, at the same `check`.
    """

    def __init__(self, terminate: bool = False, agree: Callable[[int], int] | None = None) -> None:
        self.is_agreed = False
        self._terminate = terminate
        self._agree = agree
        self._busy = False
        self._waiting: set[int] = set()
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Shield:
        if threading.current_thread() is not threading.main_thread():
            return self
        if callable(signal.getsignal(signal.SIGINT)):
            self._old[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_signal)
        if self._terminate and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._busy or (self._agree is not None and number not in self._waiting):
            self._waiting.add(number)
        elif number == signal.SIGTERM:
            raise SystemExit(TERMINATED)
        else:
            self._old[number](number, frame)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Delay signals in this context."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def check(self) -> None:
        """Deliver a signal that was delayed."""
        number = max(self._waiting, default=0)
        if self._agree is not None:
            number = self._agree(number)
            self.is_agreed = number != 0
        self._waiting.clear()
        if number == signal.SIGTERM:
            raise SystemExit(TERMINATED)
        if number:
            raise KeyboardInterrupt
