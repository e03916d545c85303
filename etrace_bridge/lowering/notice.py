"""A line on the terminal, or in a notebook, while something compiles.

The line comes after half a second, counts the seconds, and disappears when the work is done. It is
written to `sys.stderr`, only where somebody sees it at once, and by the first process only.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import jax

from etrace_bridge._tables import in_notebook

COMPILING = "compiling …"
DELAY, EVERY = 0.5, 0.5  # seconds before the line comes, and between two drawings
_HUSHED: ContextVar[bool] = ContextVar("hushed", default=False)


class _Line:
    """The one line, drawn by a thread while at least one piece of work is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._drawn = 0  # characters
        self._begun = self._ended = -DELAY
        self._stop = threading.Event()

    def open(self, text: str) -> None:
        """Work begins; if other work is open already, its text stays."""
        with self._lock:
            self._open += 1
            if self._open > 1 or not _is_seen():
                return
            now = time.monotonic()
            if now - self._ended > DELAY:  # otherwise it continues the line that has just ended
                self._begun = now
            self._stop = threading.Event()
            threading.Thread(target=self._draw, args=(text, self._stop), daemon=True).start()

    def close(self) -> None:
        """Work has ended; with the last one the line goes."""
        with self._lock:
            self._open -= 1
            if self._open:
                return
            self._stop.set()
            self._ended = time.monotonic()
            if self._drawn:
                self._write("\r" + " " * self._drawn + "\r")
                self._drawn = 0

    def _draw(self, text: str, stop: threading.Event) -> None:
        wait = max(0.0, self._begun + DELAY - time.monotonic())
        while not stop.wait(wait):
            wait = EVERY
            with self._lock:
                if stop.is_set():
                    return
                line = f"{text} {time.monotonic() - self._begun:.0f} s"
                self._write("\r" + line)
                self._drawn = len(line)

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError):  # the terminal was closed
            self._stop.set()


_LINE = _Line()


def _is_seen() -> bool:
    """Return whether somebody can see the line, and no other process shows it."""
    try:
        seen = sys.stderr.isatty() or in_notebook()
    except (AttributeError, ValueError):  # None, or closed
        return False
    return seen and not (jax.distributed.is_initialized() and jax.process_index())


@contextmanager
def announcing(text: str = COMPILING) -> Iterator[None]:
    """Within this, or in a function that it decorates, a line tells what takes so long."""
    if _HUSHED.get():
        yield
        return
    _LINE.open(text)
    try:
        yield
    finally:
        _LINE.close()


@contextmanager
def hushed() -> Iterator[None]:
    """Hide the line in this context: something else shows progress, or output must be quiet."""
    token = _HUSHED.set(True)
    try:
        yield
    finally:
        _HUSHED.reset(token)


class Program:
    """A jitted function whose calls are announced if they compile.

    JAX runs the Python function only to trace it, which is how a call is known to compile.

    Attributes:
        jitted: the jitted function itself; calls of it are not announced.

    Args:
        function: what to compile.
        make: jits it.
    """

    def __init__(self, function: Callable, make: Callable[[Callable], Any]) -> None:
        # Not in `self`, which would then be part of a cycle and stay until the next collection.
        announced = self._announced = _Announced()

        @wraps(function)
        def trace(*args: Any, **named: Any) -> Any:
            announced.begin()
            return function(*args, **named)

        self.jitted = make(trace)

    def __call__(self, *args: Any, **named: Any) -> Any:
        with self._announced:
            return self.jitted(*args, **named)

    def lower(self, *args: Any, **named: Any) -> Any:
        """Return the jitted function's `lower`."""
        with self._announced:
            return self.jitted.lower(*args, **named)


class _Announced:
    """The calls of a program: one that traces is announced until it returns."""

    def __init__(self) -> None:
        self._calls, self._begun = 0, 0

    def __enter__(self) -> None:
        self._calls += 1

    def __exit__(self, *_: Any) -> None:
        self._calls -= 1
        while self._begun and not self._calls:
            self._begun -= 1
            _LINE.close()

    def begin(self) -> None:
        """Return the function is traced."""
        if self._calls and not _HUSHED.get():
            _LINE.open(COMPILING)
            self._begun += 1
