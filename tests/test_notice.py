"""On a terminal, no call compiles in silence; everywhere else, and later, nothing is written."""

from __future__ import annotations

import io
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optax
import pytest
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from etrace_bridge.lowering import announcing, jit, notice
from learner_models import make_data, make_net

pty = pytest.importorskip("pty")  # not on Windows


class Terminal:
    """A pseudo-terminal in place of `sys.stderr`, and what was written to it, with times."""

    def __init__(self) -> None:
        self._master, slave = pty.openpty()
        self.stream = open(slave, "w", encoding="utf-8")  # noqa: SIM115
        self._written: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while data := os.read(self._master, 1000):
                self._written.append((time.monotonic(), data.decode(errors="replace")))
        except OSError:  # its other end was closed
            os.close(self._master)

    def take(self) -> list[tuple[float, str]]:
        """What was written since the last call."""
        self.stream.flush()
        time.sleep(0.05)
        found, self._written = self._written, []
        return found

    def text(self) -> str:
        return "".join(text for _, text in self.take())

    def close(self) -> None:
        self.stream.close()
        self._reader.join(5)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    made = Terminal()
    # Not `sys.stderr` itself, which pytest sets anew between a fixture and its test.
    monkeypatch.setattr(notice, "sys", SimpleNamespace(stderr=made.stream))
    yield made
    made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announce short waits, and let every program take long enough to be announced: a small one that
    another test has compiled may be read from disk within the delay.
    """
    begin = notice._Announced.begin

    def begin_slowly(announced: notice._Announced) -> None:
        begin(announced)
        time.sleep(0.1)

    monkeypatch.setattr(notice._Announced, "begin", begin_slowly)
    monkeypatch.setattr(notice, "DELAY", 0.02)
    monkeypatch.setattr(notice, "EVERY", 0.02)


def is_erased(text: str) -> bool:
    """Whether nothing of the line is left, and the cursor is at its start."""
    last = text.rsplit("\r", 2)
    return text.endswith("\r") and last[-2].strip() == "" and len(last[-2]) >= len("working … 0 s")


def make_learner(**options: Any) -> eb.OnlineLearner:
    return eb.OnlineLearner(make_net(), loss=mse_loss, optimizer=optax.sgd(0.1), chunk=3, **options)


XS, YS = make_data()
CALLS: dict[str, Callable[[eb.OnlineLearner], Any]] = {
    "step": lambda learner: learner.step(XS[0], YS[0]),
    "update": lambda learner: learner.update(XS, YS),
    "gradients": lambda learner: learner.gradients(XS, YS),
    "predict": lambda learner: learner.predict(XS),
    "evaluate": lambda learner: learner.evaluate([(XS[:4], YS[:4])]),
}


def test_every_call_of_a_learner_that_compiles(terminal: Terminal, impatient: None) -> None:
    learner = make_learner()
    for name, call in CALLS.items():
        call(learner)
        text = terminal.text()
        assert "compiling … 0 s" in text and is_erased(text), (name, text)
        call(learner), call(learner)
        assert terminal.text() == "", f"{name}, again"


def test_other_calls(terminal: Terminal, impatient: None, tmp_path: Path) -> None:
    learner = make_learner()
    learner.step(XS[0], YS[0])
    terminal.take()
    module = eb.OnlineModule(make_net())

    def learn() -> None:
        mse_loss(module(XS[0]), YS[0]).backward()

    calls = {
        "compiling …": learn,
        "comparing gradients …": lambda: eb.check_gradients(make_net(), XS, YS, mse_loss),
        "comparing rules …": lambda: eb.recommend(make_net(), XS[0]),
        "exporting …": lambda: learner.export(tmp_path / "exported", platforms=["cpu"]),
    }
    for words, call in calls.items():
        call()
        text = terminal.text()
        assert words in text and is_erased(text), (words, text)
    learn()
    terminal.take()
    learn(), learn()
    assert terminal.text() == "", "later steps of a module"


def test_compiling_is_announced_within_a_second(terminal: Terminal) -> None:
    """Whether it is the tracing that takes long, or a sequence of short programs."""

    def slow_loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(1.2)
        return mse_loss(y, target)

    learner = eb.OnlineLearner(make_net(), loss=slow_loss, optimizer=optax.sgd(0.1))
    begun = time.monotonic()
    learner.step(XS[0], YS[0])
    ended = time.monotonic()
    times = [begun, *(at for at, _ in terminal.take()), ended]
    assert ended - begun > 1.2
    assert max(after - before for before, after in zip(times, times[1:], strict=False)) < 1.0


def test_short_waits_in_a_row_are_one(terminal: Terminal) -> None:
    time.sleep(notice.DELAY + 0.1)  # whatever was before this test
    for _ in range(5):
        with announcing("working …"):
            time.sleep(0.2)
    text = terminal.text()
    assert re.search("working … [1-9] s", text) and is_erased(text)
    time.sleep(notice.DELAY + 0.1)
    with announcing("working …"):
        time.sleep(0.2)
    assert terminal.text() == "", "half a second is not worth a word"


def test_an_error_ends_the_line(terminal: Terminal, impatient: None) -> None:
    def fails(x: Any) -> Any:
        time.sleep(0.1)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        jit(fails)(1.0)
    text = terminal.text()
    assert "compiling …" in text and is_erased(text)
    time.sleep(0.1)
    assert terminal.text() == "", "and it does not come back"


def test_fit_has_a_line_of_its_own(terminal: Terminal, impatient: None) -> None:
    make_learner().fit([(XS, YS)], epochs=1, progress=False)
    assert terminal.text() == ""


def test_a_notebook_has_the_line(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stderr is not a terminal, and it draws a line anew at a carriage return as one does."""
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(sys, "stderr", cell := io.StringIO())
    with announcing("working …"):
        time.sleep(notice.DELAY + 0.3)
    assert "\rworking … 0 s" in cell.getvalue() and is_erased(cell.getvalue())


def test_nothing_is_written_elsewhere(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into files and pipes, or where there is no stderr, as under pythonw."""
    log = io.StringIO()
    for stream in (log, None):
        monkeypatch.setattr(sys, "stderr", stream)
        make_learner().step(XS[0], YS[0])
    assert log.getvalue() == ""
