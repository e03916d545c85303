"""Callbacks that log epochs, and the folder of compiled programs."""

from __future__ import annotations

import json
import subprocess
import sys
import types

import jax
import optax
import pytest
import torch
from torch import nn

import etrace_bridge as eb

pytestmark = pytest.mark.x32


class Writer:
    """Stands for TensorBoard's `SummaryWriter`."""

    def __init__(self, folder: str = "") -> None:
        self.folder, self.rows, self.flushed = folder, [], 0

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))

    def flush(self) -> None:
        self.flushed += 1


class Run:
    """Stands for what `wandb.init` returns."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.rows.append((step, numbers))


def test_loggers_get_the_numbers_of_every_epoch(monkeypatch, tmp_path):
    """Both at once, on one short run; TensorBoard by folder, through a package of the same form."""
    package = types.ModuleType("torch.utils.tensorboard")
    package.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", package)
    board, run = eb.TensorBoardLogger(tmp_path / "runs"), Run()
    assert isinstance(board.writer, Writer) and board.writer.folder == str(tmp_path / "runs")
    xs, targets = torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    learner = eb.OnlineLearner(
        nn.GRU(3, 3), loss=nn.functional.mse_loss, optimizer=optax.sgd(0.1), track_norm=True
    )
    history = learner.fit(
        [(xs, targets)], 2, validation=[(xs, targets)], callbacks=[board, eb.WandbLogger(run)]
    )
    for epoch, record in enumerate(history.epochs, 1):
        wanted = {"loss", "validation_loss", "gradient_norm", "seconds", "steps_per_second"}
        step, numbers = run.rows[epoch - 1]
        assert step == epoch and wanted <= set(numbers) and "complete" not in numbers
        assert all(numbers[name] == record[name] for name in wanted)
        logged = {name: value for name, value, at in board.writer.rows if at == epoch}
        assert logged == numbers
    assert board.writer.flushed == 2 and history.epochs[0]["loss"] != history.epochs[1]["loss"]


def test_what_loggers_refuse(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(eb.InputError, match="pip install tensorboard"):
        eb.TensorBoardLogger("runs")
    with pytest.raises(eb.InputError, match="wandb.init"):
        eb.WandbLogger("my project")


TRAIN = """
import json, sys
import jax, torch
found = {"cache_hits": 0, "cache_misses": 0}

def count(event, **_):
    name = event.removeprefix("/jax/compilation_cache/")
    if name in found:
        found[name] += 1

jax.monitoring.register_event_listener(count)
import optax
import etrace_bridge as eb

torch.manual_seed(0)
xs = torch.randn(4, 2, 3)
learner = eb.OnlineLearner(torch.nn.GRU(3, 3), "d_rtrl", torch.nn.functional.mse_loss, optax.sgd(0.1), cache_dir=sys.argv[1])
loss = learner.update(xs, xs).loss, float(learner.step(xs[0], xs[0]).loss)
print(json.dumps(found | {"loss": loss}))
"""


def test_a_second_process_compiles_nothing(tmp_path):
    """By the number of programs that JAX finds in the folder and of those that it does not."""
    folder = str(tmp_path / "programs")
    first, second = (
        json.loads(
            subprocess.run(
                [sys.executable, "-c", TRAIN, folder], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(2)
    )
    assert first["cache_misses"] >= 2, "nothing was compiled"
    assert (second["cache_misses"], second["cache_hits"] >= 2) == (0, True)
    assert second["loss"] == first["loss"]


def test_a_folder_for_programs_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    before = jax.config.jax_compilation_cache_dir
    with pytest.raises(eb.InputError, match="`cache_dir` is"):
        eb.OnlineLearner(nn.GRU(3, 3), cache_dir=tmp_path / "file" / "programs")
    assert jax.config.jax_compilation_cache_dir == before
