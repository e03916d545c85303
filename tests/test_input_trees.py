"""Inputs as people's models take them: keyword-only arguments, dicts of tensors, nested trees."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import etrace_bridge as eb

pytestmark = pytest.mark.usefixtures("without_single_steps")
IN, H, B, T = 3, 4, 3, 4
Pair = tuple[Tensor, Tensor]


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.back, self.out = nn.Linear(IN, H), nn.Linear(H, H), nn.Linear(H, 2)
        self.double()

    def step(self, x: Tensor, gate: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + gate * self.back(h))

    def start(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), H)


class KeywordCell(Base):
    def forward(self, x: Tensor, h: Tensor | None = None, *, gate: Tensor) -> Pair:
        h = self.step(x, gate, self.start(x) if h is None else h)
        return self.out(h), h


class DictCell(Base):
    def forward(self, batch: dict, h: Tensor | None = None) -> Pair:
        h = self.step(batch["x"], batch["gate"], self.start(batch["x"]) if h is None else h)
        return self.out(h), h


class NestedCell(Base):
    """A dict beside a tuple by keyword; the state is in an attribute."""

    h: Tensor | None = None

    def forward(self, batch: dict, *, more: tuple) -> Tensor:
        gate = batch["gates"][0] + more[1]
        h = self.start(batch["x"]) if self.h is None else self.h
        self.h = self.step(batch["x"], gate, h)
        return self.out(self.h)


class KeywordLoop(Base):
    """Time first, state in a local variable."""

    def forward(self, x: Tensor, *, gate: Tensor) -> Tensor:
        h, outputs = self.start(x[0]), []
        for t in range(len(x)):
            h = self.step(x[t], gate[t], h)
            outputs.append(self.out(h))
        return torch.stack(outputs)


class DictLoop(Base):
    """Batch first."""

    def forward(self, batch: dict) -> Tensor:
        h, outputs = self.start(batch["x"]), []
        for t in range(batch["x"].shape[1]):
            h = self.step(batch["x"][:, t], batch["gate"][:, t], h)
            outputs.append(self.out(h))
        return torch.stack(outputs, 1)


class DictGRU(nn.Module):
    """A dict into a layer that the bridge knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(IN + H, H), nn.Linear(H, 2)
        self.double()

    def forward(self, batch: dict) -> Tensor:
        return self.out(self.gru(torch.cat([batch["x"], batch["gate"]], -1))[0])


def make_batch(axes: tuple[int, ...], seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    make = lambda size: torch.randn(*axes, size, generator=g, dtype=torch.float64)
    return {"x": make(IN), "gate": make(H)}


def as_nested(batch: dict) -> dict:
    return {
        "batch": {"x": batch["x"], "gates": [batch["gate"]]},
        "more": (batch["x"], 0.5 * batch["gate"]),
    }


def call(model: Any, batch: dict) -> Any:
    """The model, or its bridged form, called as its author would."""
    kind = type(getattr(model, "model", model))
    if kind is NestedCell:
        return model(**as_nested(batch))
    return model(**batch) if kind in (KeywordCell, KeywordLoop) else model(batch)


def run_cell(model: nn.Module, batch: dict) -> Tensor:
    """A cell over a time-major sequence, by torch alone."""
    outputs, h, model.h = [], None, None
    for t in range(T):
        now = {key: value[t] for key, value in batch.items()}
        if isinstance(model, KeywordCell):
            y, h = model(now["x"], h, gate=now["gate"])
        elif isinstance(model, DictCell):
            y, h = model(now, h)
        else:
            y = call(model, now)
        outputs.append(y)
    model.h = None
    return torch.stack(outputs)


CELLS: list[Callable[[], nn.Module]] = [KeywordCell, DictCell, NestedCell]
WHOLE: list[Callable[[], nn.Module]] = [KeywordLoop, DictLoop, DictGRU]
SOURCES = {
    "torch": lambda x: x,
    "numpy": lambda x: x.numpy(),
    "jax": lambda x: jnp.asarray(x.numpy()),
}


def sequences(model: nn.Module, seed: int = 0) -> tuple[Any, Tensor, Tensor]:
    """Inputs in the model's layout, targets, and torch's outputs with their graph."""
    batch = make_batch((B, T) if isinstance(model, DictLoop) else (T, B), seed)
    outputs = call(model, batch) if isinstance(model, tuple(WHOLE)) else run_cell(model, batch)
    xs = as_nested(batch) if isinstance(model, NestedCell) else batch
    targets = torch.randn(outputs.shape, dtype=torch.float64)
    return xs, targets, outputs


def torch_gradients(model: nn.Module, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    grads = torch.autograd.grad(F.mse_loss(outputs, targets), list(model.parameters()))
    return dict(zip(dict(model.named_parameters()), grads, strict=True))


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert value.abs().max() > 1e-6
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("make", [DictCell, NestedCell, KeywordLoop, DictGRU])
def test_gradients_are_those_of_torch(make: Callable) -> None:
    model = make()
    xs, targets, outputs = sequences(model)
    learner = eb.OnlineLearner(model, rule="bptt", loss=F.mse_loss, chunk=T)
    assert_same(learner.gradients(xs, targets).grads, torch_gradients(model, outputs, targets))


@pytest.mark.parametrize("make", [KeywordCell, DictLoop])
def test_a_learner_does_all_it_does(make: Callable) -> None:
    """From torch, NumPy and JAX; against torch's own training, step for step."""
    model, twin = make(), make()
    twin.load_state_dict(model.state_dict())
    xs, targets, outputs = sequences(model)
    axis = int(make is DictLoop)
    learner = eb.OnlineLearner(
        model, "rtrl", F.mse_loss, torch.optim.SGD(model.parameters(), 0.1), chunk=2
    )
    wanted = torch_gradients(model, outputs, targets)
    for source in SOURCES.values():
        result = learner.gradients(jax.tree.map(source, xs), source(targets))
        assert_same(result.grads, wanted)
    loss = F.mse_loss(outputs, targets).item()
    assert learner.evaluate([(xs, targets)]) == pytest.approx(loss, rel=1e-9)

    optimizer = torch.optim.SGD(twin.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        outputs = call(twin, xs) if make is DictLoop else run_cell(twin, xs)
        F.mse_loss(outputs, targets).backward()
        optimizer.step()
    learner.update(xs, targets)
    learner.fit([{"xs": xs, "targets": targets}], progress=False)
    learner.sync_to_torch()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)

    outputs = learner.predict(xs)
    for t in range(3):  # the second and third take the quick way in
        x = {key: value.select(axis, t) for key, value in reversed(xs.items())}
        torch.testing.assert_close(learner.step(x).output, outputs.select(axis, t))


@pytest.mark.parametrize("make", [KeywordCell, DictLoop])
def test_check_gradients_takes_them(make: Callable) -> None:
    xs, targets, _ = sequences(model := make())
    report = eb.check_gradients(model, xs, targets, F.mse_loss, rule="rtrl", chunk=2)
    assert report.ok, report


def test_verify_takes_them() -> None:
    assert eb.verify(DictCell(), make_batch((B,)), steps=2).ok


@pytest.mark.parametrize("make", CELLS)
def test_a_bridged_cell_is_called_like_the_model(make: Callable) -> None:
    model, batch = make(), make_batch((B,))
    net = eb.wrap(model)
    net.init_state(batch_size=B)
    found = [net(batch["x"], gate=batch["gate"]) if make is KeywordCell else call(net, batch)]
    # neither the order of keys nor the way of the first argument matters
    found.append(call(net, dict(reversed(batch.items()))))
    wanted = run_cell(model, {key: torch.stack([value] * T) for key, value in batch.items()})
    for y, expected in zip(found, wanted, strict=False):
        np.testing.assert_allclose(np.asarray(y), expected.detach().numpy(), rtol=1e-12)
    flat = [t.numpy() for t in net.read_inputs(as_nested(batch) if make is NestedCell else batch)]
    np.testing.assert_allclose(np.asarray(net(*flat)), wanted[2].detach().numpy(), rtol=1e-12)


def test_names_say_what_each_tensor_is() -> None:
    net = eb.wrap(NestedCell(), example_input=as_nested(make_batch((B,))))
    assert net.input_names == ("batch['gates'][0]", "batch['x']", "more[0]", "more[1]")
    net.init_state(batch_size=B)
    graph = eb.compile_etrace_graph(net, *net.read_inputs(as_nested(make_batch((B,)))))
    assert {p[0] for p in graph.certificate()} == {"inner", "back", "out"}


def test_torch_loop_and_pure_functions_take_them() -> None:
    model = KeywordCell()
    xs, targets, outputs = sequences(model)
    wanted = torch_gradients(model, outputs, targets)
    online = eb.OnlineModule(model, rule="rtrl")
    for t in range(T):
        y = online(xs["x"][t], gate=xs["gate"][t])
        (F.mse_loss(y, targets[t]) / T).backward()
    assert_same({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, wanted)

    first = {key: value[0] for key, value in xs.items()}
    run = eb.functional(model, first, rule="bptt")
    arrays = {key: jnp.asarray(value.numpy()) for key, value in xs.items()}
    goals = jnp.asarray(targets.numpy())

    def loss(params: Any) -> Any:
        ys, _ = run.chunk(params, run.init(params), arrays)
        return jnp.mean((ys - goals) ** 2)

    grads = jax.grad(loss)(run.params)
    assert_same({n: torch.tensor(np.asarray(g)) for n, g in grads.items()}, wanted)


def test_a_recommendation_takes_them() -> None:
    found = eb.recommend(DictCell(), make_batch((B,)), "1GB", rules=["d_rtrl"], steps=3)
    assert found.rule == "d_rtrl"


# ---- refusals


def test_what_is_missing_or_unknown_is_named() -> None:
    batch = make_batch((B,))
    net = eb.wrap(KeywordCell())
    net.init_state(batch_size=B)
    with pytest.raises(eb.InputError, match=r"needs `gate` as a keyword.*net\(x, gate="):
        net(batch["x"])
    with pytest.raises(eb.InputError, match=r"has no argument `gat`"):
        net(batch["x"], gat=batch["gate"])
    with pytest.raises(eb.InputError, match=r"needs `gate` as a keyword"):
        eb.OnlineLearner(KeywordCell(), loss=F.mse_loss).gradients(
            torch.zeros(T, B, IN, dtype=torch.float64), torch.zeros(T, B, 2)
        )
    net(**batch)  # the wrong calls left nothing behind
    with pytest.raises(eb.InputError, match=r"needs `gate` as a keyword"):
        eb.wrap(KeywordCell(), example_input=batch["x"])


def test_an_input_keeps_its_keys() -> None:
    batch = make_batch((B,))
    learner = eb.OnlineLearner(DictCell(), rule="d_rtrl", loss=F.mse_loss)
    learner.step(batch)
    with pytest.raises(
        eb.InputError,
        match=r"wrapped for the inputs `batch\['gate'\]`, `batch\['x'\]`;.*`batch\['y'\]`",
    ):
        learner.step({"x": batch["x"], "y": batch["gate"]})
    with pytest.raises(eb.InputError, match=r"keeps its arguments and keys"):
        learner.step(batch["x"])


def test_what_is_not_a_tensor_is_named() -> None:
    batch = make_batch((B,))
    net = eb.wrap(DictCell())
    net.init_state(batch_size=B)
    with pytest.raises(eb.InputError, match=r"Input `batch\['id'\]` is a `str`"):
        net({**batch, "id": "first"})
    with pytest.raises(eb.InputError, match=r"keys of a dict .* must be strings"):
        net({**batch, 3: batch["x"]})


class Plain(brainstate.nn.Module):
    def update(self, x: Any) -> Any:
        return x


def test_a_brainstate_module_takes_arrays_by_position() -> None:
    learner = eb.OnlineLearner(Plain(), loss=lambda y, t: jnp.mean((y - t) ** 2))
    with pytest.raises(eb.InputError, match=r"dict with the keys 'x'.*pass a tuple"):
        learner.step({"x": jnp.zeros((B, IN))}, jnp.zeros((B, 2)))


def test_the_guess_before_the_first_input_warns_of_nothing() -> None:
    """A model that wants a dict is tried with a tensor to tell its layout."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not eb.wrap(DictLoop()).batch_first
    assert not caught, caught[0].message
