"""The demo: memory against the length of a sequence, and a torch GRU that learns from a stream
online, compared with torch BPTT.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections import deque
from collections.abc import Iterator
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

_BATCH, _HIDDEN, _TAPS, _WINDOW, _RATE = 16, 32, 6, 16, 0.05
# Other work on the machine does not count as a way's own. Windows counts in ticks of 16 ms.
_FINE = time.get_clock_info("process_time").resolution < 1e-4
_clock = time.process_time if _FINE else time.perf_counter
_MEASURED, _SCALED = (10, 100, 1000), (10_000, 100_000)  # lengths of sequences
_YOURS = """\
Now your model, from a file with a function `make_model` that returns it (8: batch, 32: inputs):
  python -m etrace_bridge explain my_model.py:make_model --input 8,32
  python -m etrace_bridge check my_model.py:make_model --input 8,32 --rule rtrl,d_rtrl
  python -m etrace_bridge train my_model.py:make_model --data data.npz"""


class Filter(nn.Module):
    """A GRU that receives a signal and predicts what comes out of a channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, _HIDDEN)
        self.readout = nn.Linear(_HIDDEN, 1)

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
        errors: squared error of every sample, before its update.
        seconds: processor time of every sample but the first, which compiles.
        memory: bytes that it keeps of the past.
    """

    name: str
    errors: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: int = 0


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
    folder: str | Path = "demo-report", steps: int = 3000, console: Console | None = None
) -> Path:
    """Run the demo and write its report.

    Args:
        folder: where the report goes.
        steps: samples of the stream; the channel changes half-way.
        console: where to print.

    Returns:
        The report's path.
    """
    console = console or Console()
    torch.manual_seed(0)
    model = Filter()
    net = wrap(model)
    net.init_state(batch_size=_BATCH)
    graph = compile_etrace_graph(net, to_jax(torch.zeros(_BATCH, 1)))

    console.rule("1. memory against the length of the sequence")
    memory = memory_by_length(model, graph)
    console.print(_memory_table(memory))

    console.rule("2. the model, read by the compiler")
    console.print(graph.report(), highlight=False, soft_wrap=True)

    console.rule("3. its online gradients, next to torch BPTT")
    xs, targets = (torch.stack(part) for part in zip(*channel(24, 24, batch=4), strict=True))
    comparison = check_gradients(
        model, xs, targets, nn.functional.mse_loss, ["rtrl", "d_rtrl"], chunk=4
    )
    console.print(str(comparison), highlight=False, soft_wrap=True)

    console.rule("4. learning from a stream that changes half-way, one sample at a time")
    runs, power = learn_from_stream(model, graph, steps, console)
    console.print(_stream_table(runs, power, steps))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    table = ([_COLUMNS, *(_cells(run, power, steps) for run in runs)], _CAPTION)
    curves = {run.name: explained(run, power, max(steps // 30, 1)) for run in runs}
    page = write_report(target, graph, comparison, memory, curves, table, _YOURS)
    console.print(f"\nThe report: [bold]{page}[/bold]\n")
    console.print(_YOURS, highlight=False, soft_wrap=True)
    return page


# -- memory ---------------------------------------------------------------------------------------


def memory_by_length(model: nn.Module, graph: ETraceGraph) -> dict[int, tuple[int, int]]:
    """Return the bytes of the trace and of what torch saves for its backward pass, by length.

    The longest ones are scaled up from the last that was measured.
    """
    trace = trace_of(graph)
    saved = {n: saved_bytes(model, torch.zeros(n, _BATCH, 1)) for n in _MEASURED}
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


def channel(
    steps: int, change_at: int, batch: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield samples that go into a channel with an echo and come out of it; the echo changes its
    sign.
    """
    made = torch.Generator().manual_seed(1)
    past, response = torch.zeros(batch, _TAPS), 0.7 ** torch.arange(_TAPS)
    for n in range(steps):
        past = torch.cat([torch.randn(batch, 1, generator=made), past[:, :-1]], 1)
        sign = torch.full((_TAPS,), 1.0 if n < change_at else -1.0)
        sign[0] = 1.0
        yield past[:, :1], torch.tanh(0.5 * (past @ (sign * response)))[:, None]


class WindowedBPTT:
    """Updates a torch model for each sample, by BPTT through a window of the last samples."""

    def __init__(self, model: Filter) -> None:
        self._model = model
        self._optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        self._past: deque = deque(maxlen=_WINDOW)  # inputs, and the state before each
        self._state = torch.zeros(1, 1, _HIDDEN)

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Learn from one sample."""
        self._past.append((x, self._state))
        outputs, _ = self._model(torch.stack([each for each, _ in self._past]), self._past[0][1])
        loss = nn.functional.mse_loss(outputs[-1], y)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        with torch.no_grad():
            self._state = self._model(x[None], self._state)[1]
        return loss.item()


def learn_from_stream(
    model: Filter, graph: ETraceGraph, steps: int, console: Console
) -> tuple[list[Run], list[float]]:
    """Learn both ways, sample by sample in turn, so that other work on the machine affects both;
    return the runs and the power of the output.
    """
    windowed = WindowedBPTT(copy.deepcopy(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    learner = OnlineLearner(model, "d_rtrl", nn.functional.mse_loss, optimizer)
    runs = [Run("online, d_rtrl"), Run(f"torch BPTT, window {_WINDOW}")]
    window = torch.zeros(_WINDOW, 1, 1)
    runs[0].memory, runs[1].memory = trace_of(graph) // _BATCH, saved_bytes(model, window)
    calls, power = (lambda x, y: cast(float, learner.step(x, y).loss), windowed.step), []
    samples = track(channel(steps, steps // 2), "stream", steps, console=console)
    for n, (x, y) in enumerate(samples):
        power.append(float(y**2))
        for run, call in zip(runs, calls, strict=True):
            begin = _clock()
            run.errors.append(call(x, y))
            if n:
                run.seconds.append(_clock() - begin)
    return runs, power


def explained(run: Run, power: list[float], window: int) -> np.ndarray:
    """Return the part of the output's power that is predicted, over the last `window` samples; NaN
    for the first samples.
    """
    ones = np.ones(min(window, len(power)))
    found = 1 - np.convolve(run.errors, ones, "valid") / np.convolve(power, ones, "valid")
    return np.concatenate([np.full(len(ones) - 1, np.nan), found])


_COLUMNS = ("", "explained before the change", "at the end", "a sample, with update", "kept")


def _cells(run: Run, power: list[float], steps: int) -> tuple[str, ...]:
    half, window = steps // 2, max(steps // 15, 1)
    before = explained(Run("", run.errors[:half]), power[:half], window)[-1] if half else np.nan
    after = explained(run, power, window)[-1]
    each = np.median(run.seconds) if run.seconds else np.nan
    return (
        run.name, f"{before:.3f}", f"{after:.3f}", f"{1e3 * each:.2f} ms", f"{run.memory / 1e3:,.0f} kB",
    )  # fmt: skip


def _stream_table(runs: list[Run], power: list[float], steps: int) -> Table:
    table = Table(caption=_CAPTION)
    for n, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if n else "left")
    for run in runs:
        table.add_row(*_cells(run, power, steps))
    return table


_CAPTION = (
    "explained: part of the output's power that is predicted before each update. Times are medians "
    f"{'of processor time, ' if _FINE else ''}taken in turn. kept: the trace, or what torch saves for "
    "its window. Online, credit reaches back without a window."
)
