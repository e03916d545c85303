"""Forms that a user's model may have: reparametrised and frozen weights, structured outputs,
several inputs, half precision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import etrace_bridge as eb
from share import FULL

pytestmark = pytest.mark.usefixtures("without_single_steps")
IN, H, B, T = 3, 4, 2, 6


class Symmetric(nn.Module):
    """A parametrization: the upper triangle makes the matrix."""

    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT


class Net(nn.Module):
    """A cell and a readout; `pack` puts the output into some structure."""

    def __init__(self, cell: nn.Module, pack: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.cell, self.out, self.pack = cell, nn.Linear(H, 2), pack

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Any, Tensor]:
        h = self.cell(x, h)
        return self.pack(self.out(h)), h


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(IN + 2, H), nn.Linear(H, 2)

    def forward(self, x: Tensor, u: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.cell(torch.cat([x, u], -1), h)
        return self.out(h), h


def frozen() -> nn.Module:
    net = Net(nn.GRUCell(IN, H))
    net.cell.weight_hh.requires_grad_(False)
    return net


def symmetric() -> nn.Module:
    net = Net(nn.RNNCell(IN, H))
    parametrize.register_parametrization(net.cell, "weight_hh", Symmetric())
    return net


def spectral(training: bool) -> nn.Module:
    return Net(parametrizations.spectral_norm(nn.RNNCell(IN, H), "weight_hh")).train(training)


@dataclasses.dataclass
class Answer:
    """An output of a tensor and a note, as a dataclass."""

    y: Tensor
    note: str = "text"


class Both(NamedTuple):
    """The same as a named tuple."""

    y: Tensor
    number: int


WEIGHTS = {
    "frozen": frozen,
    "parametrization": symmetric,
    "weight_norm": lambda: Net(parametrizations.weight_norm(nn.RNNCell(IN, H), "weight_hh")),
    "old weight_norm": lambda: Net(nn.utils.weight_norm(nn.RNNCell(IN, H), "weight_hh")),
    "spectral_norm": lambda: spectral(False),
    "spectral_norm in training": lambda: spectral(True),
    "old spectral_norm": lambda: Net(nn.utils.spectral_norm(nn.RNNCell(IN, H), "weight_hh")).eval(),
    "two inputs": TwoInputs,
}


@pytest.mark.filterwarnings("ignore:.*(weight|spectral)_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_trained_through_their_form(name: str) -> None:
    model = WEIGHTS[name]()
    xs = torch.randn(T, B, IN)
    report = eb.check_gradients(
        model,
        (xs, torch.randn(T, B, 2)) if name == "two inputs" else xs,
        torch.randn(T, B, 2),
        loss=F.mse_loss,
        rule="rtrl",
    )
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert report.ok and set(report.parameters) == trained, str(report)
    assert all(p.relative_error < 1e-9 and p.norm > 1e-4 for p in report.parameters.values())
    assert ("cell.weight_hh" in report.parameters) == (name == "two inputs")


OUTPUTS = {
    "dict": (lambda y: {"y": y, "note": "text", "number": 3}, lambda o, t: F.mse_loss(o["y"], t)),
    "dataclass": (Answer, lambda o, t: F.mse_loss(o.y, t)),
    "named tuple": (lambda y: Both(y, 3), lambda o, t: F.mse_loss(o.y, t)),
    "list": (lambda y: [y, None, ("text", 2 * y)], lambda o, t: F.mse_loss(o[0] + o[2][1], t)),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_structured_outputs_reach_the_loss(name: str) -> None:
    pack, loss = OUTPUTS[name]
    model = Net(nn.GRUCell(IN, H), pack)
    report = eb.check_gradients(
        model, torch.randn(T, B, IN), torch.randn(T, B, 2), loss=loss, rule="d_rtrl"
    )
    assert report.ok, str(report)


def test_outputs_that_are_not_tensors_become_none() -> None:
    net = eb.wrap(Net(nn.GRUCell(IN, H), lambda y: {"y": Answer(y), "number": 3}))
    net.init_state(batch_size=B)
    output = net(torch.randn(B, IN))
    assert isinstance(output["y"], Answer) and output["y"].y.shape == (B, 2)
    assert output["number"] is None and output["y"].note is None


_types = (torch.bfloat16, torch.float16)
_rules = ("d_rtrl", "rtrl", "snap1", "eprop", "pp_prop", "bptt")
# Every rule in one of the two, the default rule in both.
HALF = [
    (d, r)
    for m, d in enumerate(_types)
    for n, r in enumerate(_rules)
    if FULL or n % 2 == m or r == "d_rtrl"
]
HALF += [(torch.bfloat16, "low_rank"), (torch.float16, "rflo")]


@pytest.mark.x32
@pytest.mark.parametrize(("dtype", "rule"), HALF, ids=lambda v: str(v).removeprefix("torch."))
def test_half_precision_learns_with_every_rule(dtype: torch.dtype, rule: str) -> None:
    """Gradients of a half-precision model are those of the float32 model up to its rounding, and an
    update moves its weights.
    """
    model = Net(nn.GRUCell(IN, H))
    half = Net(nn.GRUCell(IN, H))
    half.load_state_dict(model.state_dict())
    half.to(dtype)
    xs, targets = torch.randn(4, B, IN), torch.randn(4, B, 2)
    wanted = (
        eb.OnlineLearner(model, rule=rule, loss=F.mse_loss, chunk=2).gradients(xs, targets).grads
    )
    learner = eb.OnlineLearner(half, rule=rule, loss=F.mse_loss, optimizer=optax.sgd(0.1), chunk=2)
    found = learner.gradients(xs.to(dtype), targets.to(dtype)).grads
    for name, grad in wanted.items():
        assert found[name].dtype == dtype and grad.norm() > 1e-4
        assert (found[name].float() - grad).norm() < 0.1 * grad.norm(), name
    before = half.out.weight.detach().clone()
    learner.step(xs[0].to(dtype), targets[0].to(dtype))
    learner.sync_to_torch()
    assert half.out.weight.dtype == dtype and not torch.equal(before, half.out.weight)


def test_dropout_in_training_mode_draws_anew_at_each_step() -> None:
    """The expected gradient is that of the masks drawn: with every mask kept, the model without
    dropout.
    """

    class Drops(Net):
        def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
            h = F.dropout(self.cell(x, h), self.p, self.training)
            return self.out(h), h

    model = Drops(nn.GRUCell(IN, H)).double().train()
    model.p = 0.5
    xs, targets = torch.randn(T, B, IN).double(), torch.randn(T, B, 2).double()
    net = eb.wrap(model)
    net.init_state(batch_size=B)
    states = []
    for _ in range(8):
        net(xs[0])
        states.append(np.asarray(net.hidden_values()[0]))
    zeros = [float(np.mean(s == 0)) for s in states]
    assert 0.1 < sum(zeros) / len(zeros) < 0.9 and len({s.tobytes() for s in states}) == 8
    model.p = 0.0
    report = eb.check_gradients(model, xs, targets, loss=F.mse_loss, rule="rtrl")
    assert report.ok, str(report)


def lazy() -> nn.Module:
    """A lazy layer that has seen its first input; one that has not has no weights to wrap."""
    net = Net(nn.GRUCell(IN, H))
    net.out = nn.LazyLinear(2)
    net(torch.zeros(1, IN))
    return net


WRAPPERS = {
    "DataParallel": lambda: nn.DataParallel(Net(nn.GRUCell(IN, H))),
    "torch.compile": lambda: torch.compile(Net(nn.GRUCell(IN, H))),
    "LazyLinear": lazy,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of `torch.compile`
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_model_inside_a_wrapper_gives_what_it_gives_alone(name: str) -> None:
    model, x = WRAPPERS[name](), torch.randn(B, IN)
    alone = getattr(model, "module", getattr(model, "_orig_mod", model))
    net = eb.wrap(model)
    net.init_state(batch_size=B)
    first, second = net(x), net(2 * x)
    y, h = alone(x)
    torch.testing.assert_close(torch.tensor(np.asarray(first)), y.detach())
    torch.testing.assert_close(torch.tensor(np.asarray(second)), alone(2 * x, h)[0].detach())
    assert set(net.parameter_names) == {n for n, _ in alone.named_parameters()}


class KeywordOnly(Net):
    def forward(self, x: Tensor, *, gain: Tensor) -> Tensor:  # type: ignore[override]
        return self.out(self.cell(gain * x))


class StateNeeded(Net):
    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h = torch.tanh(self.cell(x, 2 * h))
        return self.out(h), h


def test_arguments_that_a_step_cannot_fill_are_named() -> None:
    net = eb.wrap(KeywordOnly(nn.GRUCell(IN, H)))
    net.init_state(batch_size=B)
    with pytest.raises(eb.InputError, match=r"needs `gain` as a keyword"):
        net(torch.zeros(B, IN))
    net = eb.wrap(StateNeeded(nn.GRUCell(IN, H)))
    with pytest.raises(eb.StateError, match=r"state in `h`.*wrap\(model, state=lambda batch_size"):
        net.init_state(batch_size=B)
