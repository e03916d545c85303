"""The demo: a torch GRU wrapped, explained, checked and trained online, next to torch BPTT."""

from __future__ import annotations

import argparse
import base64
import html
import io
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from etrace_bridge._errors import BridgeError
from etrace_bridge.check.gradients import check_gradients
from etrace_bridge.cli.arguments import OK, at_least_one
from etrace_bridge.compiler.graph import compile_etrace_graph
from etrace_bridge.frontend import to_jax, wrap
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.plot import plot_graph
from etrace_bridge.schedule.chunk_plan import trace_bytes
from etrace_bridge.step.program import make_program

_CHUNK = 2  # of 8 rows, so that most credit passes through the trace
_BATCH = 64
_RATE = 1e-2


# the loss is at the last row, so everything before it is learned through time
_AT_THE_END = torch.tensor([0.0] * 7 + [1.0])


class RowReader(nn.Module):
    """Reads an image row by row and names the digit."""

    def __init__(self, pixels: int = 8, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.gru = nn.GRU(pixels, hidden)
        self.readout = nn.Linear(hidden, classes)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.readout(self.gru(rows)[0])


@dataclass
class Run:
    """One way of training: what it reached and what it took."""

    name: str
    accuracy: list[float] = field(default_factory=list)
    seconds: float = 0.0
    first: float = 0.0
    memory: int = 0


def run_demo_command(args: argparse.Namespace) -> int:
    """Runs `demo`."""
    page = run_demo(args.folder, at_least_one(args.epochs, "--epochs"))
    if args.json:
        print(json.dumps({"report": str(page)}))
    return OK


def run_demo(
    folder: str | Path = "demo-report", epochs: int = 10, console: Console | None = None
) -> Path:
    """Runs the demo and writes its report.

    Args:
        folder: where the report goes.
        epochs: passes over the training images.
        console: where to print.

    Returns:
        The report's path.
    """
    console = console or Console()
    train, test = load_digits()
    torch.manual_seed(0)
    model = RowReader()
    start = {name: value.clone() for name, value in model.state_dict().items()}

    console.rule("1. the model, read by the compiler")
    net = wrap(model)
    net.init_state(batch_size=_BATCH)
    graph = compile_etrace_graph(net, to_jax(train[0][0, :_BATCH]))
    console.print(graph.report(), highlight=False, soft_wrap=True)

    console.rule("2. its online gradients, next to torch BPTT")
    rows, labels = train[0][:, :4], train[1][:4].expand(8, 4)
    loss = nn.functional.cross_entropy
    comparison = check_gradients(
        model, rows, labels, loss=loss, rule=["rtrl", "d_rtrl"], chunk=_CHUNK, mask=_AT_THE_END
    )
    console.print(str(comparison), highlight=False, soft_wrap=True)

    console.rule("3. training on 8 x 8 digits, one row a step")
    online = train_online(model, train, test, epochs, console)
    model.load_state_dict(start)
    bptt = train_bptt(model, train, test, epochs, console)
    console.print(_summary(online, bptt))
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    page = _write_report(target, graph, comparison, online, bptt)
    console.print(f"\nThe report: [bold]{page}[/bold]")
    return page


def load_digits() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """scikit-learn's 1,797 digits as sequences of rows: (8, N, 8) and labels, for training and
    test.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise BridgeError(
            "The demo's images come with scikit-learn. Install it with `pip install scikit-learn`."
        ) from error
    data = datasets.load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    rows = torch.tensor(data.images[order] / 16, dtype=torch.float32).transpose(0, 1).contiguous()
    labels = torch.tensor(data.target[order])
    return (rows[:, :1408], labels[:1408]), (rows[:, 1408:], labels[1408:])


def train_online(model: nn.Module, train: Any, test: Any, epochs: int, console: Console) -> Run:
    """D-RTRL in chunks of two rows: the trace carries credit over the rest."""
    run = Run("online, d_rtrl")
    learner = OnlineLearner(
        model,
        rule="d_rtrl",
        loss=nn.functional.cross_entropy,
        optimizer=optax.adam(_RATE),
        chunk=_CHUNK,
    )

    def batch(rows: torch.Tensor, labels: torch.Tensor) -> None:
        learner.update(rows, labels.expand(8, len(labels)), _AT_THE_END)

    def accuracy() -> float:
        learner.sync_to_torch()
        return _accuracy(model, test)

    _train(run, batch, accuracy, train, epochs, console)
    program = make_program(learner.graph)
    run.memory = trace_bytes(jax.eval_shape(lambda: learner.rule.init(program)))
    return run


def train_bptt(model: nn.Module, train: Any, test: Any, epochs: int, console: Console) -> Run:
    """The same in torch."""
    run = Run("torch BPTT")
    optimizer = torch.optim.Adam(model.parameters(), lr=_RATE)

    def batch(rows: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows)[-1], labels).backward()
        optimizer.step()

    _train(run, batch, lambda: _accuracy(model, test), train, epochs, console)
    run.memory = saved_bytes(model, train[0][:, :_BATCH])
    return run


def saved_bytes(model: nn.Module, rows: torch.Tensor) -> int:
    """What torch keeps for the backward pass of one sequence."""
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(rows).sum()
    own = {p.data_ptr() for p in model.parameters()}
    return sum(size for pointer, size in sizes.items() if pointer not in own)


def _train(
    run: Run,
    batch: Callable,
    accuracy: Callable[[], float],
    train: Any,
    epochs: int,
    console: Console,
) -> None:
    order = torch.Generator().manual_seed(0)  # the same for every way of training
    for _ in track(range(epochs), description=f"{run.name:16s}", console=console):
        for rows, labels in _batches(train, order):
            begin = time.perf_counter()
            batch(rows, labels)
            taken = time.perf_counter() - begin
            if run.first:
                run.seconds += taken
            else:
                run.first = taken  # compilation
        run.accuracy.append(accuracy())


def _batches(data: Any, order: torch.Generator) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows, labels = data
    return [
        (rows[:, index], labels[index])
        for index in torch.randperm(len(labels), generator=order).split(_BATCH)
    ]


@torch.no_grad()
def _accuracy(model: nn.Module, test: Any) -> float:
    return (model(test[0])[-1].argmax(-1) == test[1]).float().mean().item()


_COLUMNS = ("", "accuracy", "first", "others", "kept", "at 1,000 steps")


def _cells(run: Run) -> tuple[str, ...]:
    longer = run.memory if run.name.startswith("online") else run.memory / 8 * 1000
    return (
        run.name, f"{run.accuracy[-1]:.1%}", f"{run.first:.1f} s", f"{run.seconds:.1f} s", f"{run.memory / 1e6:.1f} MB",
        f"{longer / 1e6:.1f} MB",
    )  # fmt: skip


def _summary(*runs: Run) -> Table:
    table = Table(title="8 x 8 digits, one row a step, loss at the last row", caption=_CAPTION)
    for n, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if n else "left", no_wrap=True)
    for run in runs:
        table.add_row(*_cells(run))
    return table


_CAPTION = (
    "first: time of the first batch, with compilation; others: of all other batches. kept: the "
    "trace, or what torch saves for its backward pass; at 1,000 steps: the same, scaled up for "
    "torch."
)


def _write_report(folder: Path, graph: Any, comparison: Any, online: Run, bptt: Run) -> Path:
    plot_graph(graph, folder / "graph.svg")
    picture = (folder / "graph.svg").read_text()
    body = [
        "<h1>A torch GRU, trained online</h1>",
        "<p>A torch GRU with a linear readout reads 8 x 8 digits row by row. It was trained twice "
        f"from the same weights on the same batches: online, by D-RTRL in chunks of {_CHUNK} rows, "
        "so that credit for earlier rows comes through the eligibility trace; and by torch's "
        "backpropagation through time.</p>",
        f"<h2>Test accuracy</h2>{_curves(online, bptt)}",
        f"<table>{_html_row(_COLUMNS, 'th')}{''.join(_html_row(_cells(run), 'td') for run in (online, bptt))}</table><p><small>{_CAPTION}</small></p>",
        f"<h2>Gradients next to torch BPTT</h2><pre>{html.escape(str(comparison))}</pre>",
        "<h2>What the compiler "
        f"read</h2>{picture[picture.index('<svg') :]}<pre>{html.escape(graph.report())}</pre>",
    ]
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 "
        "1em;color:#1a1a1a;background:#fff}pre{background:#f6f6f6;padding:1em;overflow-x:auto;font-size:12px}td,th{padding:.2em "
        "1.2em .2em 0;text-align:left;border-bottom:1px solid "
        "#ddd}svg,img{max-width:100%;height:auto}"
    )
    page = folder / "report.html"
    page.write_text(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>etrace_bridge demo</title>'
        f"<style>{style}</style></head><body>{''.join(body)}</body></html>",
        encoding="utf-8",
    )
    return page


def _html_row(cells: tuple[str, ...], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _curves(*runs: Run) -> str:
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.2))
    for run in runs:
        axes.plot(range(1, len(run.accuracy) + 1), run.accuracy, label=run.name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy")
    axes.legend()
    axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
    plt.close(figure)
    return f'<img alt="accuracy by epoch" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
