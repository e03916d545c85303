"""The demo: memory against the length of a sequence, and a torch GRU that learns online, from a
stream, to remember a cue, next to torch BPTT.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import jax
import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from etrace_bridge.check.gradients import check_gradients
from etrace_bridge.cli.arguments import OK, at_least_one
from etrace_bridge.cli.demo_report import write_report
from etrace_bridge.compiler.graph import ETraceGraph, compile_etrace_graph
from etrace_bridge.frontend import to_jax, wrap
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.rules import make_rule
from etrace_bridge.schedule.chunk_plan import trace_bytes
from etrace_bridge.step.program import make_program

_BATCH, _HIDDEN, _DELAY, _RATE, _CLIP = 16, 32, 60, 0.01, 0.3
_WINDOWS = (13, _DELAY + 1)  # of torch: as much memory as the trace; from the cue to the question
# Other work on the machine does not count as a way's own. Windows counts in ticks of 16 ms.
_FINE = time.get_clock_info("process_time").resolution < 1e-4
_clock = time.process_time if _FINE else time.perf_counter
_MEASURED, _SCALED = (10, 100, 1000), (10_000, 100_000)  # lengths of sequences
_YOURS = """\
Now your model, from a file with a function `make_model` that returns it (8: batch, 32: inputs):
  python -m etrace_bridge explain my_model.py:make_model --input 8,32
  python -m etrace_bridge check my_model.py:make_model --input 8,32 --rule rtrl,d_rtrl
  python -m etrace_bridge train my_model.py:make_model --data data.npz"""


class Listener(nn.Module):
    """A GRU that answers yes or no. Its update gates start so that its units remember for different
    times, the longest for twice the delay, or nothing would be left of the cue.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, _HIDDEN)
        self.readout = nn.Linear(_HIDDEN, 1)
        with torch.no_grad():
            times = torch.linspace(1.0, 2.0 * _DELAY, _HIDDEN)
            _, update, _ = cast(torch.Tensor, self.gru.bias_ih_l0).chunk(3)
            update += times.log()

    def forward(
        self, x: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, new_state = self.gru(x, state)
        return self.readout(y), new_state


@dataclass
class Run:
    """One way of learning from the stream.

    Attributes:
        name: what it is called.
        memory: bytes that it keeps of the past.
        step: learns from one sample; returns the output.
        right: share of right answers to each question, before the update by it.
        seconds: processor time of every sample but the first ones, which compile.
    """

    name: str
    memory: int
    step: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    right: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def run_demo_command(args: argparse.Namespace) -> int:
    """Run `demo`."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # torch's threads and JAX's would fight for the cores
    try:
        page = run_demo(args.folder, at_least_one(args.steps, "--steps"))
    finally:
        torch.set_num_threads(threads)
    if args.json:
        print(json.dumps({"report": str(page)}))
    return OK


def run_demo(
    folder: str | Path = "demo-report", steps: int = 24_400, console: Console | None = None
) -> Path:
    """Run the demo and write its report.

    Args:
        folder: where the report goes.
        steps: samples of the stream.
        console: where to print.

    Returns:
        The report's path.
    """
    console = console or Console()
    torch.manual_seed(0)
    model = Listener()
    net = wrap(model)
    net.init_state(batch_size=_BATCH)
    graph = compile_etrace_graph(net, to_jax(torch.zeros(_BATCH, 3)))

    console.rule("1. memory against the length of the sequence")
    memory = memory_by_length(model, graph)
    console.print(_memory_table(memory))

    console.rule("2. the model, read by the compiler")
    console.print(graph.report(), highlight=False, soft_wrap=True)

    console.rule("3. its online gradients, next to torch BPTT")
    samples = list(cued_stream(_DELAY + 1))
    xs = torch.stack([x for x, _ in samples])
    targets = torch.stack([y for _, y in samples if y is not None] * len(samples))
    asked = torch.tensor([y is not None for _, y in samples])
    comparison = check_gradients(model, xs, targets, _loss, ["rtrl", "d_rtrl"], chunk=4, mask=asked)
    console.print(str(comparison), highlight=False, soft_wrap=True)

    console.rule("4. learning from an endless stream, one sample at a time")
    console.print(_TASK, highlight=False)
    runs = learn_from_stream(model, graph, steps, console)
    console.print(_stream_table(runs))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    table = ([_COLUMNS, *map(_cells, runs)], _CAPTION)
    curves = {run.name: smoothed(run.right) for run in runs}
    page = write_report(target, graph, comparison, memory, (_TASK, curves), table, _YOURS)
    console.print(f"\nThe report: [bold]{page}[/bold]\n")
    console.print(_YOURS, highlight=False, soft_wrap=True)
    return page


# -- memory ---------------------------------------------------------------------------------------


def memory_by_length(model: nn.Module, graph: ETraceGraph) -> dict[int, tuple[int, int]]:
    """Return the bytes of the trace and of what torch saves for its backward pass, by length.

    The longest ones are scaled up from the last that was measured.
    """
    trace = trace_of(graph)
    saved = {n: saved_bytes(model, torch.zeros(n, _BATCH, 3)) for n in _MEASURED}
    last = _MEASURED[-1]
    saved |= {n: saved[last] * n // last for n in _SCALED}
    return {n: (trace, size) for n, size in saved.items()}


def trace_of(graph: ETraceGraph) -> int:
    """Return the bytes of D-RTRL's trace."""
    program = make_program(graph)
    return trace_bytes(jax.eval_shape(lambda: make_rule("d_rtrl").init(program)))


def saved_bytes(model: nn.Module, xs: torch.Tensor) -> int:
    """Return the bytes that torch saves for the backward pass of one sequence."""
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(xs)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    del outputs  # alive until here, so that no address was used twice
    return sum(size for pointer, size in sizes.items() if pointer not in own)


def _memory_table(memory: dict[int, tuple[int, int]]) -> Table:
    table = Table(caption=f"GRU, {_HIDDEN} hidden units, batch {_BATCH}. *: scaled up")
    for n, column in enumerate(("steps", "online: the trace", "torch BPTT: saved for backward")):
        table.add_column(column, justify="right" if n else "left", no_wrap=True)
    for n, (trace, saved) in memory.items():
        mark = "*" if n in _SCALED else ""
        table.add_row(f"{n:,}", f"{trace / 1e6:.2f} MB", f"{saved / 1e6:,.2f} MB{mark}")
    return table


# -- the stream -----------------------------------------------------------------------------------


def cued_stream(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Yield inputs, and answers where there is a question: a cue of 1 or -1, then noise, then a
    question, whose answer is whether the cue was 1.
    """
    made = torch.Generator().manual_seed(1)
    for n in range(steps):
        place = n % (_DELAY + 1)
        if place == 0:
            cue = torch.randint(0, 2, (_BATCH, 1), generator=made).float()
        x = torch.zeros(_BATCH, 3)
        x[:, 1] = 0.5 * torch.randn(_BATCH, generator=made)
        if place == 0:
            x[:, :1] = 2 * cue - 1
        x[:, 2] = float(place == _DELAY)
        yield x, cue if place == _DELAY else None


class WindowedBPTT:
    """Updates a torch model at each question, by BPTT through a window of the last samples."""

    def __init__(self, model: nn.Module, window: int) -> None:
        self._model = model
        self._optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
        self._past: deque = deque(maxlen=window)  # inputs, and the state before each
        self._state = torch.zeros(1, _BATCH, _HIDDEN)

    def step(self, x: torch.Tensor, y: torch.Tensor | None) -> torch.Tensor:
        """Learn from one sample."""
        self._past.append((x, self._state))
        with torch.no_grad():
            output, self._state = self._model(x[None], self._state)
        if y is not None:
            outputs, _ = self._model(torch.stack([x for x, _ in self._past]), self._past[0][1])
            self._optimizer.zero_grad()
            _loss(outputs[-1], y).backward()
            nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP)
            self._optimizer.step()
        return output[0]


def learn_from_stream(
    model: nn.Module, graph: ETraceGraph, steps: int, console: Console
) -> list[Run]:
    """Learn each way, sample by sample in turn, so that other work on the machine affects all."""
    runs = []
    for window in _WINDOWS:
        other = WindowedBPTT(copy.deepcopy(model), window)
        saved = saved_bytes(model, torch.zeros(window, _BATCH, 3))
        runs.append(Run(f"torch BPTT, window {window}", saved, other.step))
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)
    learner = OnlineLearner(model, "d_rtrl", _loss, optimizer, clip_norm=_CLIP)
    online = lambda x, y: cast(torch.Tensor, learner.step(x, y).output)
    runs.insert(0, Run("online, d_rtrl", trace_of(graph), online))
    for n, (x, y) in enumerate(track(cued_stream(steps), "stream", steps, console=console)):
        for run in runs:
            begin = _clock()
            output = run.step(x, y)
            if n > _DELAY:  # both kinds of steps are compiled
                run.seconds.append(_clock() - begin)
            if y is not None:
                run.right.append(float(((output > 0) == (y > 0)).float().mean()))
    return runs


def smoothed(right: list[float], window: int = 20) -> np.ndarray:
    """Return the mean of the last answers at each question; NaN for the first ones."""
    ones = np.ones(max(min(window, len(right)), 1))
    means = np.convolve(right or [np.nan], ones / len(ones), "valid")
    return np.concatenate([np.full(len(ones) - 1, np.nan), means])


_COLUMNS = ("", "right answers at first", "at the end", "a sample, with updates", "kept")


def _cells(run: Run) -> tuple[str, ...]:
    means = smoothed(run.right)
    first, last = means[np.isfinite(means)][[0, -1]] if run.right else (np.nan, np.nan)
    each = np.mean(run.seconds) if run.seconds else np.nan
    return (
        run.name, f"{first:.0%}", f"{last:.0%}", f"{1e3 * each:.2f} ms", f"{run.memory / 1e3:,.0f} kB",
    )  # fmt: skip


def _stream_table(runs: list[Run]) -> Table:
    table = Table(caption=_CAPTION)
    for n, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if n else "left")
    for run in runs:
        table.add_row(*_cells(run))
    return table


_loss = nn.functional.binary_cross_entropy_with_logits
_TASK = (
    f"A cue, 1 or -1, then noise, and after {_DELAY} samples a question: which cue was it? The "
    "stream goes on with the next cue and is never cut."
)
_CAPTION = (
    f"Right answers: of the first and the last 20 questions, before the update; guessing gives 50%. "
    f"Times are means {'of processor time, ' if _FINE else ''}taken in turn. kept: the trace, or what "
    f"torch saves for its window. A window that does not reach the cue, {_DELAY} samples ago, cannot "
    "learn; one that does needs memory that grows with the delay. The trace does not grow."
)
