"""As users call it: every public call, on arrays of every dtype, layout and source, in both JAX
modes, against a plain torch loop.

The models are tiny and one learner sees many kinds of arrays; which call gets which kind is drawn
with a fixed seed.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import etrace_bridge as eb
from etrace_bridge.cli import commands as cli
from share import FULL

T, B, IN, H, CLASSES, LR = 8, 3, 3, 4, 5, 0.5


class Dense(nn.Module):
    """A GRU and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(IN, H), nn.Linear(H, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0])


class Tokens(Dense):
    """The same on the embeddings of token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, IN)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embed(x))


@dataclass(frozen=True)
class Task:
    """A model, a loss, and how to draw data."""

    make: type[nn.Module]
    loss: Callable
    ids: bool = False
    labels: bool = True

    def data(self, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        made = torch.Generator().manual_seed(seed)
        real = lambda *shape: torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)
        whole = lambda below: torch.randint(0, below, (T, B), generator=made)
        return whole(7) if self.ids else real(T, B, IN), whole(CLASSES) if self.labels else real(
            T, B, CLASSES
        )


TASKS = {
    "classification": Task(Dense, F.cross_entropy),
    "regression": Task(Dense, F.mse_loss, labels=False),
    "tokens": Task(Tokens, F.cross_entropy, ids=True),
}


# ---- kinds of arrays: each gives the same numbers in another form


def strided(t: Tensor) -> Tensor:
    """Every other element of a larger tensor."""
    wide = torch.full((*t.shape, 2), 99, dtype=t.dtype) if t.dim() else t
    wide[..., 0] = t
    return wide[..., 0]


def turned(t: Tensor) -> Tensor:
    """A tensor whose memory runs the other way."""
    return t.permute(*reversed(range(t.dim()))).contiguous().permute(*reversed(range(t.dim())))


def of_larger(t: Tensor) -> Tensor:
    """A contiguous part of a larger storage, which does not start at its beginning."""
    return torch.cat([t.new_full((1, *t.shape[1:]), 77), t])[1:]


LAYOUTS = (torch.clone, strided, turned, of_larger)
FLOATS: dict[str, Callable[[Tensor], Any]] = {
    **{f"torch {layout.__name__}": layout for layout in LAYOUTS},
    "torch with grad": lambda t: t.clone().requires_grad_(),
    "torch float64": lambda t: t.double(),
    "numpy": lambda t: t.numpy().copy(),
    "numpy float64": lambda t: t.double().numpy(),
    "numpy strided": lambda t: strided(t).numpy(),
    "numpy Fortran": lambda t: np.asfortranarray(t.numpy()),
    "numpy reversed": lambda t: t.flip(0).numpy().copy()[::-1],
    "jax": lambda t: jnp.asarray(t.numpy()),
}
WHOLE: dict[str, Callable[[Tensor], Any]] = {
    **{f"torch int64 {layout.__name__}": layout for layout in LAYOUTS},
    "numpy int64": lambda t: t.numpy().copy(),
    "numpy int32": lambda t: t.numpy().astype(np.int32),
    "numpy uint8": lambda t: t.numpy().astype(np.uint8),
    "numpy strided": lambda t: strided(t).numpy(),
    "numpy Fortran": lambda t: np.asfortranarray(t.numpy()),
    "jax": lambda t: jnp.asarray(t.numpy()),
    "jax uint8": lambda t: jnp.asarray(t.numpy().astype(np.uint8)),
}
IDS = {
    **{kind: form for kind, form in WHOLE.items() if "uint8" not in kind},
    "torch int32": lambda t: t.int(),
    "torch int32 strided": lambda t: strided(t.int()),
}
LABELS = {**WHOLE, "torch uint8": lambda t: t.byte()}


def kinds(task: Task) -> tuple[dict, dict]:
    """The kinds of arrays for a task's inputs and targets."""
    return IDS if task.ids else FLOATS, LABELS if task.labels else FLOATS


# ---- torch's side


@dataclass
class Loop:
    """A plain torch training loop on a model of its own."""

    model: nn.Module
    loss: Callable
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)

    def losses(self, xs: Tensor, ys: Tensor) -> Tensor:
        return torch.stack([self.loss(o, y) for o, y in zip(self.model(xs), ys, strict=True)])

    def gradients(self, xs: Tensor, ys: Tensor) -> dict[str, Tensor]:
        self.model.zero_grad()
        self.losses(xs, ys).mean().backward()
        return {name: p.grad.clone() for name, p in self.model.named_parameters()}

    def update(self, xs: Tensor, ys: Tensor) -> float:
        self.gradients(xs, ys)
        self.optimizer.step()
        return float(self.losses(xs, ys).detach().mean())


def weights(learner: eb.OnlineLearner) -> dict[str, Tensor]:
    """A learner's weights, read without lending them out."""
    runtime = learner.runtime
    return {
        n: torch.tensor(np.asarray(v))
        for n, v in zip(runtime.store.compiled.weight_names, runtime.store.state.theta, strict=True)
    }


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        close(found[name], wanted, name)
        assert wanted.abs().max() > 1e-6


def close(found: Tensor, wanted: Tensor, what: str = "") -> None:
    wanted = wanted.detach()
    limit = 1e-9 if wanted.dtype == torch.float64 else 1e-5
    found = found.detach().reshape(wanted.shape)
    assert found.dtype == wanted.dtype, what
    assert (found - wanted).abs().max() <= limit * max(1.0, float(wanted.abs().max())), what


# Every task in JAX's default mode, and one of each kind of input in float64 mode; all of them in
# `make test-full`.
MODES = [
    *(
        pytest.param(name, torch.float32, marks=pytest.mark.x32, id=f"{name}, default mode")
        for name in TASKS
    ),
    *(
        pytest.param(name, torch.float64, id=f"{name}, float64 mode")
        for name in TASKS
        if FULL or name != "classification"
    ),
]


def start(task: Task, dtype: torch.dtype, **options: Any) -> tuple[eb.OnlineLearner, Loop]:
    """A learner by exact RTRL, whose gradients are BPTT's, and torch's loop from the same weights."""
    model = task.make().to(dtype)
    loop = Loop(model, task.loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    return eb.OnlineLearner(model, "rtrl", task.loss, optimizer, chunk=3, **options), loop


def run_steps(task: Task, dtype: torch.dtype, forms: list[tuple[Callable, Callable]]) -> None:
    """Take one step with each pair of forms, and demand torch's loss and output each time, and its
    update at the end.
    """
    learner, loop = start(task, dtype, accumulate=T)
    xs, ys = task.data(1, dtype)
    outputs, losses = loop.model(xs).detach(), loop.losses(xs, ys).detach()
    for t, (as_input, as_target) in enumerate(forms):
        info = learner.step(as_input(xs[t]), as_target(ys[t]))
        close(info.output, outputs[t], f"output of step {t}")
        assert info.loss == pytest.approx(float(losses[t]), rel=1e-5), f"step {t}"
    loop.update(xs, ys)
    same(weights(learner), dict(loop.model.named_parameters()))


# ---- step


@pytest.mark.parametrize("name, dtype", MODES)
def test_steps_on_arrays_of_changing_kinds(name: str, dtype: torch.dtype) -> None:
    task, draw = TASKS[name], random.Random(1)
    inputs, targets = kinds(task)
    # A stream keeps its dtype; in default mode all whole numbers are int32
    if task.ids and dtype == torch.float64:
        inputs = {kind: form for kind, form in inputs.items() if "int32" not in kind}
    forms = [
        (draw.choice(list(inputs.values())), draw.choice(list(targets.values()))) for _ in range(T)
    ]
    run_steps(task, dtype, forms)


def read_step_after_step(task: Task, dtype: torch.dtype, pairs: list[tuple[str, str]]) -> list[str]:
    """Four steps for each pair of kinds, of which the later ones are read the quick way; give the
    pairs that torch contradicts.
    """
    model = task.make().to(dtype)
    learner = eb.OnlineLearner(
        model, "d_rtrl", task.loss, torch.optim.SGD(model.parameters(), lr=0.0)
    )
    inputs, targets = kinds(task)
    wrong = []
    for n, (x_kind, y_kind) in enumerate(pairs):
        xs, ys = task.data(n, dtype)
        outputs = model(xs).detach()
        learner.reset()
        for t in range(4):
            info = learner.step(inputs[x_kind](xs[t]), targets[y_kind](ys[t]))
            expected = task.loss(outputs[t], ys[t]).item()
            fine = (
                torch.allclose(info.output, outputs[t], rtol=1e-5, atol=1e-6)
                and abs(info.loss - expected) < 1e-5
            )
            if not fine:
                wrong.append(
                    f"input {x_kind}, target {y_kind}, step {t}: loss {info.loss}, torch {expected}"
                )
    return wrong


@pytest.mark.parametrize("name, dtype", MODES)
def test_every_kind_of_array_step_after_step(name: str, dtype: torch.dtype) -> None:
    task = TASKS[name]
    inputs, targets = (list(table) for table in kinds(task))
    count = max(len(inputs), len(targets))
    pairs = [(inputs[k % len(inputs)], targets[(k + 1) % len(targets)]) for k in range(count)]
    assert {x for x, _ in pairs} == set(inputs) and {y for _, y in pairs} == set(targets)
    assert read_step_after_step(task, dtype, pairs) == []


@pytest.mark.x32
@pytest.mark.parametrize(
    "name, pair",
    [
        ("classification", ("torch clone", "torch int64 clone")),
        ("classification", ("torch clone", "torch int64 of_larger")),
        ("tokens", ("torch int64 clone", "numpy int64")),
        ("tokens", ("torch int64 clone", "torch int64 clone")),
        ("regression", ("torch clone", "torch float64")),
    ],
)
def test_eight_byte_tensors_in_default_mode(name: str, pair: tuple[str, str], monkeypatch) -> None:
    """The main call in its most common use: torch's labels and token ids are int64."""
    monkeypatch.setitem(FLOATS, "torch float64", lambda t: t.double())
    assert read_step_after_step(TASKS[name], torch.float32, [pair]) == []


# ---- sequences

# Each task once, in turn in the two modes: every call compiles a program of its own.
ONCE = MODES if FULL else [MODES[0], MODES[2], MODES[3]]


class Drawn:
    """Arrays of kinds drawn with a fixed seed."""

    def __init__(self, task: Task, dtype: torch.dtype) -> None:
        self.task, self.dtype, self.draw, self.count = task, dtype, random.Random(2), 0
        self.inputs, self.targets = (list(table.values()) for table in kinds(task))

    def __call__(self) -> tuple[Any, Any, Tensor, Tensor]:
        """Inputs and targets in some form, and as plain tensors."""
        self.count += 1
        xs, ys = self.task.data(self.count, self.dtype)
        return self.draw.choice(self.inputs)(xs), self.draw.choice(self.targets)(ys), xs, ys


@pytest.mark.parametrize("name, dtype", ONCE)
def test_sequence_calls(name: str, dtype: torch.dtype, tmp_path) -> None:
    """gradients, update, predict, evaluate, fit, save, load: after each, torch's numbers."""
    task = TASKS[name]
    (learner, loop), drawn = start(task, dtype), Drawn(task, dtype)
    for _ in range(3):
        given_x, given_y, xs, ys = drawn()
        result = learner.gradients(given_x, given_y)
        same(result.grads, loop.gradients(xs, ys))
        close(result.outputs, loop.model(xs))
    for _ in range(2):
        given_x, given_y, xs, ys = drawn()
        expected = float(loop.losses(xs, ys).detach().mean())
        assert learner.update(given_x, given_y).loss == pytest.approx(expected, rel=1e-5)
        loop.update(xs, ys)
        same(weights(learner), dict(loop.model.named_parameters()))
    for _ in range(2):
        given_x, given_y, xs, ys = drawn()
        close(learner.predict(given_x), loop.model(xs))
        assert learner.evaluate([(given_x, given_y)]) == pytest.approx(
            float(loop.losses(xs, ys).detach().mean()), rel=1e-5
        )
    batches = [drawn() for _ in range(3)]
    learner.fit([(x, y) for x, y, _, _ in batches], epochs=2)
    for _ in range(2):
        for _, _, xs, ys in batches:
            loop.update(xs, ys)
    same(weights(learner), dict(loop.model.named_parameters()))
    fresh = task.make().to(dtype)
    path = learner.save(tmp_path / "learner")
    again = eb.OnlineLearner.load(
        path, fresh, loss=task.loss, optimizer=torch.optim.SGD(fresh.parameters(), lr=LR)
    )
    given_x, given_y, xs, ys = drawn()
    again.update(given_x, given_y)
    loop.update(xs, ys)
    same(weights(again), dict(loop.model.named_parameters()))
    again.sync_to_torch()
    same(dict(fresh.named_parameters()), dict(loop.model.named_parameters()))


@pytest.mark.x32
@pytest.mark.parametrize("name", ["regression", "tokens"])
@pytest.mark.usefixtures("without_single_steps")
def test_check_gradients_in_default_mode(name: str) -> None:
    task = TASKS[name]
    for n, (x_kind, y_kind) in enumerate([("numpy Fortran", "jax"), ("jax", "numpy strided")]):
        (inputs, targets), (xs, ys) = kinds(task), task.data(n, torch.float32)
        model = task.make()
        report = eb.check_gradients(
            model,
            inputs[x_kind](xs),
            targets[y_kind](ys),
            task.loss,
            rule="rtrl",
            dtype=None if n else "float64",
        )
        assert report.ok, report
        wanted = Loop(model, task.loss).gradients(xs, ys)
        assert all(
            np.allclose(p.online_gradient, wanted[p.name].numpy(), rtol=1e-4, atol=1e-6)
            for p in report
        )


# ---- the command line, and what the README says


COMMAND_MODEL = """
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(3, 4), nn.Linear(4, 5)

    def forward(self, x):
        return self.out(self.gru(x)[0])
"""


@pytest.mark.x32
@pytest.mark.parametrize(
    "labels", [np.int64, np.int32, None], ids=["int64 labels", "int32 labels", "float64 targets"]
)
def test_train_command_is_torchs_loop(labels: Any, tmp_path, monkeypatch, capsys) -> None:
    """One batch an epoch, so that the order does not matter; exact RTRL, so that torch's loop gives
    the same weights.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(COMMAND_MODEL)
    task = TASKS["classification" if labels else "regression"]
    xs, ys = task.data(0, torch.float32)
    targets = ys.numpy().astype(labels) if labels else ys.double().numpy()
    np.savez("data.npz", xs=xs.double().numpy(), targets=targets)
    flags = [
        "--loss",
        "cross_entropy" if labels else "mse",
        "--rule",
        "rtrl",
        "--optimizer",
        "sgd",
        "--lr",
        str(LR),
        "--epochs",
        "4",
    ]
    assert (
        cli.main(["train", "models.py:Net", "--data", "data.npz", "--state-dict", "w.pt", *flags])
        == 0
    ), capsys.readouterr().err
    torch.manual_seed(0)
    scope: dict[str, Any] = {}
    exec(COMMAND_MODEL, scope)
    loop = Loop(scope["Net"](), task.loss)
    first = {name: p.detach().clone() for name, p in loop.model.named_parameters()}
    for _ in range(4):
        loop.update(xs, ys)
    trained = dict(loop.model.named_parameters())
    same(torch.load("w.pt"), trained)
    assert all((trained[name] - first[name]).abs().max() > 1e-3 for name in first)


@pytest.mark.x32
def test_readme_loop_has_torchs_losses(capsys) -> None:
    """The README's first block, run as printed; with the learning rate at 0, its losses must be
    those of the torch model.
    """
    from test_docs import blocks

    source = next(
        text for kind, _, text in blocks("README.md") if kind == "python" and "learner.step" in text
    )
    scope: dict[str, Any] = {}
    exec(compile(source, "README.md", "exec", dont_inherit=True), scope)
    model, xs, targets, loss = (scope[name] for name in ("model", "xs", "targets", "loss"))
    assert "cosine" in capsys.readouterr().out
    learner = eb.OnlineLearner(
        model, rule="d_rtrl", loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)
    )
    found = [learner.step(x, target).loss for x, target in zip(xs, targets, strict=True)]
    expected = [loss(o, t).item() for o, t in zip(model(xs), targets, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
