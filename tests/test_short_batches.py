"""A short last batch runs through the programs of the full ones and gives what it gives by itself."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import etrace_bridge as eb
from etrace_bridge.cli import main
from etrace_bridge.learning import store
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.filling import full_batch_size
from etrace_bridge.rules import rule_names
from learner_models import I, O, T, make_data, make_net
from share import in_turn
from test_any_length import count_programs

FULL, SHORT = 5, 2


def make_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [make_data(batch=size, seed=n) for n, size in enumerate((FULL, FULL, SHORT))]


def make_learner(model: nn.Module | None = None, **options: Any) -> eb.OnlineLearner:
    given = {"rule": "d_rtrl", "loss": mse_loss, "optimizer": optax.adam(0.05), "chunk": 3}
    return eb.OnlineLearner(make_net() if model is None else model, **given | options)


def weights_of(learner: eb.OnlineLearner) -> list[np.ndarray]:
    return [np.array(w) for w in learner.runtime.store.state.theta]


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


class CountPrograms:
    """How many programs there are before every batch."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def before_batch(self, *_: Any) -> None:
        self.counts.append(len(jax.devices()[0].client.live_executables()))

    def __call__(self, *_: Any) -> None:
        self.before_batch()


def size_of_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).abs().mean()


def test_a_short_last_batch_compiles_nothing() -> None:
    """In `fit` and in `evaluate`; losses, metrics and weights are those of the batches one by one."""
    data, counter = make_batches(), CountPrograms()
    learner, by_hand = make_learner(), make_learner()
    history = learner.fit(data, metrics=size_of_error, callbacks=[counter], progress=False)
    assert counter.counts[1] == counter.counts[-1] > counter.counts[0]
    results = [by_hand.update(*batch) for batch in data]
    assert_close(history.batch_losses, [result.loss for result in results])
    assert_close(weights_of(learner), weights_of(by_hand))
    errors = [(r.outputs - y).abs().flatten() for r, (_, y) in zip(results, data, strict=True)]
    assert_close([history["size_of_error"][0]], [torch.cat(errors).mean()])
    learner.evaluate(data)
    found, made = count_programs(learner.evaluate, data)
    assert made == 0
    assert_close([found], [np.mean([by_hand.evaluate([batch]) for batch in data])])


def labels_of(ys: torch.Tensor) -> torch.Tensor:
    return (ys[..., 0] > 0).long()


def with_ignored(ys: torch.Tensor) -> torch.Tensor:
    labels = labels_of(ys)
    labels[1:3, 1] = -100
    return labels


def sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).sum()


WEIGHTED = functools.partial(cross_entropy, weight=torch.tensor([0.3, 2.0], dtype=torch.float64))
STEPS = torch.arange(T, dtype=torch.float64) % 3

CASES: dict[str, tuple[dict[str, Any], Any, Any, dict[str, Any]]] = {
    "sum over steps": ({"reduction": "sum"}, None, None, {}),
    "sum over the batch, masked steps": ({"loss": sum_of_squares}, None, lambda b: STEPS, {}),
    "masked sequences, every chunk": (
        {},
        None,
        lambda b: (torch.arange(T)[:, None] + torch.arange(b) < 5).double(),
        {"every": "chunk"},
    ),
    "class weights": ({"loss": WEIGHTED}, labels_of, None, {}),
    "class weights, ignored labels": ({"loss": WEIGHTED}, with_ignored, None, {}),
    "one label a sequence": (
        {"loss": cross_entropy, "loss_at": "last"},
        lambda ys: labels_of(ys)[0],
        None,
        {},
    ),
    "update in torch": ({"optimizer": "torch"}, None, None, {}),
}


@pytest.mark.parametrize("case", in_turn(list(CASES), 3))
def test_a_filled_batch_gives_what_the_short_one_gives(case: str) -> None:
    given_options, target, mask, how = CASES[case]
    found = []
    for size in (FULL, None):
        model, options = make_net(), given_options
        if options.get("optimizer") == "torch":
            options = options | {"optimizer": torch.optim.Adamax(model.parameters(), lr=0.05)}
        learner, results = make_learner(model, **options), []
        with learner.runtime.filling.up_to(size):
            for xs, ys in make_batches()[1:]:
                given = xs, ys if target is None else target(ys), mask and mask(xs.shape[1])
                results.append(learner.update(*given, **how))
        assert len(learner.runtime.store._cores) == (1 if size else 2), "filled, and not"
        found.append((results, weights_of(learner)))
    (filled, weights), (short, expected) = found
    assert_close(weights, expected)
    for a, b in zip(filled, short, strict=True):
        assert_close([a.loss, a.losses, a.outputs], [b.loss, b.losses, b.outputs])


@pytest.mark.parametrize("rule", in_turn(rule_names(), 6))
def test_every_rule(rule: str) -> None:
    """Rules that draw random numbers for the batch, or read the loss, run on it as it is."""
    found = []
    for size in (FULL, None):
        learner = make_learner(rule=rule)
        with learner.runtime.filling.up_to(size):
            result = learner.gradients(*make_batches()[-1])
        found.append([result.loss, *result.grads.values()])
    assert_close(*found)


# -- what stays as it is --------------------------------------------------------------------------


class Step(nn.Module):
    """A recurrent layer with a function of its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.table = function, nn.Embedding(3, 4)
        self.norm, self.noise = nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout(0.5)
        self.running, self.lift = nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.function(self, x) + self.lift(h))
        return h, h


APART = {
    "nothing": lambda m, x: x,
    "by feature": lambda m, x: m.lift(torch.relu(x)) - x.mean(1, keepdim=True),
    "softmax": lambda m, x: torch.softmax(x, 1) * torch.ones(x.shape[0], 1),
    "look-up": lambda m, x: m.table((x[:, 0] > 0).long()),
    "by head": lambda m, x: x.reshape(x.shape[0], 2, 2).transpose(1, 2).reshape(x.shape[0], 4),
}
MIXED = {
    "batch statistics": lambda m, x: m.norm(x),
    "running statistics": lambda m, x: m.running(x),
    "noise": lambda m, x: m.noise(x),
    "mean": lambda m, x: x - x.mean(0),
    "first": lambda m, x: x - x[:1],
    "order": lambda m, x: x.flip(0),
    "comparison": lambda m, x: torch.where(x > x.mean(0).detach(), x, -x),
    "number of elements": lambda m, x: x / x.shape[0],
    "number of ones": lambda m, x: x * torch.ones(x.shape[0], 1).sum(),
    "counted from the end": lambda m, x: x * torch.arange(x.shape[0]).flip(0)[:, None],
}


@pytest.mark.parametrize("name", [*APART, *MIXED])
def test_which_steps_serve_batches_of_any_size(name: str) -> None:
    start = lambda batch: torch.zeros(batch, 4)
    net = eb.wrap(Step((APART | MIXED)[name]), state=start, sequence=False)
    step = CompiledStep(net, [np.zeros((4, 4), np.float32)])  # as many elements as units
    assert step.serves_any_batch == (name in APART)
    assert net.hidden_values()[0].shape[0] == 4, "the model's states are as before"


def spread_of_batch(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of small numbers a mean of squares; of large ones it depends on the batch."""
    return mse_loss(output, target) + torch.relu(output.std(0).mean() - 1.5)


class Normalised(nn.Module):
    """A recurrent layer of inputs that are normalised over the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.cell = nn.BatchNorm1d(I), nn.RNNCell(I, O)
        self.double()

    def forward(self, x: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
        return self.cell(self.norm(x), h)


@pytest.mark.parametrize("kind", ["statistics", "loss"])
def test_what_mixes_the_batch_runs_as_it_is(kind: str) -> None:
    """To the last bit."""
    data, found = make_batches(), []
    for fits in (True, False):
        if kind == "loss":
            learner = make_learner(loss=spread_of_batch)
        else:
            learner = make_learner(Normalised())
        if fits:
            losses = learner.fit(data, progress=False).batch_losses
        else:
            losses = [learner.update(*batch).loss for batch in data]
        found.append([*losses, *weights_of(learner)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_where_a_short_batch_is_expected() -> None:
    xs, ys = make_data(batch=12)
    rows = TensorDataset(xs.transpose(0, 1), ys.transpose(0, 1))
    assert full_batch_size(DataLoader(rows, batch_size=5), lambda xs: True) == 5
    for size, drop in ((4, False), (5, True), (20, False)):
        assert (
            full_batch_size(DataLoader(rows, batch_size=size, drop_last=drop), lambda xs: True)
            is None
        )
    data = make_batches()
    assert full_batch_size(data, lambda xs: False) == FULL
    unequal = [
        data[:2],
        data[::-1],
        [data[0], data[2], data[2]],
        data[:1],
        iter(data),
        lambda: data,
    ]
    assert all(full_batch_size(given, lambda xs: False) is None for given in unequal)


def test_the_commands_fill_their_last_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`train` with a validation, and `evaluate`: 5 and 3 sequences in batches of 2."""
    (tmp_path / "model.py").write_text(
        "import torch\n\n\ndef make():\n    torch.manual_seed(0)\n    return torch.nn.RNN(2, 2)\n"
    )
    xs, ys = make_data(batch=8, dtype=torch.float32)
    np.savez(tmp_path / "data.npz", xs=xs.numpy(), targets=ys.numpy())
    sizes, real = [], store.compile_or_explain

    def compile_step(net: Any, args: Any, *rest: Any) -> Any:
        sizes.append(args[0].shape[0])
        return real(net, args, *rest)

    monkeypatch.setattr(store, "compile_or_explain", compile_step)
    given = [f"{tmp_path / 'model.py'}:make", "--data", str(tmp_path / "data.npz"), "--batch", "2"]
    output = str(tmp_path / "model")
    assert main(["train", *given, "--validation", "0.4", "--output", output, "--json"]) == 0
    assert sizes == [2]
    assert main(["evaluate", *given, "--batch", "3", "--checkpoint", output, "--json"]) == 0
    assert sizes[1:] == [2, 3], "the checkpoint's, and that of the command"
    capsys.readouterr()
