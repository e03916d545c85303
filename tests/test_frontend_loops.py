"""Models that loop over time inside `forward`: the step found equals the whole sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import etrace_bridge as eb
from etrace_bridge.frontend.time.comparison import _Pair
from loop_models import (
    IN,
    MODELS,
    B,
    H,
    Inline,
    Shifted,
    SinceSpike,
    Spike,
    T,
    TwoConvolutions,
    make,
)

pytestmark = pytest.mark.usefixtures("without_single_steps")


def hidden(net: eb.BridgedModule) -> set[str]:
    return {".".join(path) for path in net.hidden_paths}


@pytest.mark.parametrize("name", list(MODELS))
def test_the_step_of_a_loop_equals_the_whole_sequence(name: str) -> None:
    model, x = make(name)
    _, batch_first, names = MODELS[name]
    net = eb.wrap(model)
    net.init_state(B)
    time = 1 if batch_first else 0
    found = np.stack([np.asarray(net(x.select(time, t))) for t in range(T)], time)
    assert net.batch_first is batch_first
    wanted = model(x).detach().numpy()
    assert np.abs(np.diff(wanted, axis=time)).max() > 1e-3
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    if names:
        assert hidden(net) == names


@pytest.mark.parametrize(("width", "batch"), [(8, B), (450, 10)])
def test_the_step_does_not_depend_on_sizes(width: int, batch: int) -> None:
    """States larger than the input, and constants of each step that are large arrays."""
    torch.manual_seed(1)
    model, x = SinceSpike(width).double(), torch.randn(T, batch, IN, dtype=torch.float64)
    net = eb.wrap(model)
    net.init_state(batch)
    found = np.stack([np.asarray(net(x[t])) for t in range(T)])
    wanted = model(x).detach().numpy()
    assert np.abs(np.diff(wanted, axis=0)).max() > 1e-3
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(MODELS))
def test_online_gradients_of_a_loop_equal_bptt(name: str) -> None:
    model, x = make(name)
    with torch.no_grad():
        target = torch.randn_like(model(x))
    report = eb.check_gradients(model, x, target, loss=F.mse_loss, rule="rtrl")
    assert report.ok, report
    for name, parameter in model.named_parameters():
        row = report[name]
        assert row.norm > 1e-6, f"the gradient of {name} vanishes"
        assert row.relative_error < 1e-9, report
        assert row.torch_gradient.shape == tuple(parameter.shape)


def test_a_start_that_is_right_while_a_bias_is_negative_is_not_taken() -> None:
    """`relu(bias)` is zero at first, and another number once the bias was trained."""
    torch.manual_seed(1)
    model, x = TwoConvolutions(bias=-3.0).double(), torch.randn(B, T, IN, dtype=torch.float64)
    net = eb.wrap(model, example_input=x[:, 0])
    net.init_state(B)
    with torch.no_grad():
        model.first.bias.fill_(0.5)
        wanted = model(x).numpy()
    net.load_state_dict(model.state_dict())
    found = np.stack([np.asarray(net(x[:, t])) for t in range(T)], 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


class Permuted(nn.Module):
    """Brings its sequences into the layout of its layer, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(IN, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x.permute(1, 0, 2))[0].permute(1, 0, 2)


@pytest.mark.parametrize("kind", [Shifted, Permuted])
def test_a_layout_that_no_layer_tells_is_seen_on_the_first_sequence(kind: type[nn.Module]) -> None:
    torch.manual_seed(1)
    model, x = kind().double(), torch.randn(B, T, IN, dtype=torch.float64)
    target = torch.randn(B, T, H, dtype=torch.float64)
    learner = eb.OnlineLearner(model, rule="rtrl", loss=F.mse_loss, chunk=5)
    found = learner.gradients(x, target).grads
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(F.mse_loss(model(x), target), parameters)
    for name, grad in zip(names, grads, strict=True):
        assert grad.abs().max() > 1e-6, name
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=1e-9 * grad.abs().max())


@pytest.mark.x32
def test_a_loop_in_default_precision() -> None:
    torch.manual_seed(1)
    model, x = Inline(), torch.randn(B, T, IN)
    net = eb.wrap(model)
    net.init_state(B)
    found = np.stack([np.asarray(net(x[:, t])) for t in range(T)], 1)
    np.testing.assert_allclose(found, model(x).detach(), rtol=1e-5, atol=1e-5)


def test_dropout_in_a_loop_draws_new_numbers_at_each_step() -> None:
    class Noisy(Inline):
        def forward(self, x: Tensor) -> Tensor:
            h, out = torch.zeros(x.shape[0], H, dtype=x.dtype), []
            for t in range(x.shape[1]):
                h = 0.9 * h + F.dropout(self.inp(x[:, t]), 0.5, self.training)
                out.append(h)
            return F.dropout(torch.stack(out, 1), 0.5, self.training)

    net = eb.wrap(Noisy().double())
    net.init_state(64)
    x = torch.ones(64, IN, dtype=torch.float64)
    outputs = np.stack([np.asarray(net(x)) for _ in range(3)])
    dropped = outputs == 0
    # an output is zero if it is dropped itself, or if all inputs so far were
    np.testing.assert_allclose(dropped.mean((1, 2)), [0.75, 0.625, 0.5625], atol=0.1)
    assert (dropped[1] != dropped[2]).any()
    eb.wrap(Noisy().double().eval()).init_state(B)


def test_a_loop_that_is_random_in_evaluation_mode_is_compared_by_its_draws() -> None:
    class Noisy(Inline):
        def forward(self, x: Tensor) -> Tensor:
            h, out = torch.zeros(x.shape[0], H, dtype=x.dtype), []
            for t in range(x.shape[1]):
                h = 0.9 * h + self.inp(x[:, t]) + 0.1 * torch.randn_like(h)
                out.append(h)
            return torch.stack(out, 1)

    net = eb.wrap(Noisy().double().eval())
    net.init_state(B)
    x = np.ones((B, IN))
    first, second = net(x), net(x)
    assert not np.allclose(first, second)  # fresh noise in every step


class Pooled(nn.Module):
    """A loop whose input size no layer tells: the states cannot be made before the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u = nn.Parameter(torch.randn(IN, H)), nn.Parameter(torch.randn(H, H) / 2)

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(x.shape[0], H), []
        for t in range(x.shape[1]):
            h = torch.tanh(x[:, t] @ self.w + h @ self.u)
            out.append(h)
        return torch.stack(out, 1)


def test_a_module_that_has_run_is_reset_before_a_sequence() -> None:
    torch.manual_seed(0)
    model = Pooled().double()
    x = torch.randn(B, 5, IN, dtype=torch.float64)
    net = eb.wrap(model)
    net.init_state(batch_size=B)
    first = np.asarray(net(x[:, 0]))
    net(x[:, 1])
    learner = eb.OnlineLearner(net, rule="bptt", loss=F.mse_loss, reduction="sum")
    found = learner.gradients(x, torch.zeros(B, 5, H, dtype=torch.float64)).grads
    loss = sum((y**2).mean() for y in model(x).unbind(1))
    for (name, _), wanted in zip(
        model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        assert wanted.abs().max() > 0
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=1e-12)
    net.reset_state()
    np.testing.assert_array_equal(np.asarray(net(x[:, 0])), first)
    net.init_state(batch_size=B)
    assert np.asarray(net(x[:, 0])).shape == (B, H)


class RunningMaximum(nn.Module):
    """The largest value of spikes so far: from zeros it has the same values as from the first
    spikes, and other derivatives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        v, most = x.new_zeros(x.shape[0], 4), None
        for t in range(x.shape[1]):
            v = 0.8 * v + self.inp(x[:, t])
            spikes = Spike.apply(v - 0.3)
            v = v - 0.3 * spikes
            most = spikes if most is None else torch.maximum(most, spikes)
        return self.out(most)


def test_a_first_step_with_equal_values_and_other_derivatives() -> None:
    model, xs, target = RunningMaximum(), torch.randn(5, 7, 3).double(), torch.randn(5, 2).double()
    expected = torch.autograd.grad(F.mse_loss(model(xs), target), list(model.parameters()))
    learner = eb.OnlineLearner(model, "rtrl", F.mse_loss, loss_at="last")
    found = learner.gradients(xs, target).grads
    for (name, _), grad in zip(model.named_parameters(), expected, strict=True):
        assert grad.abs().max() > 0.1
        torch.testing.assert_close(found[name], grad, rtol=1e-9, atol=1e-12)


class SpikesFromAFraction(nn.Module):
    """Starts from a fraction of a spike, which no membrane potential explains; gives rates."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(IN, H), nn.Linear(H, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        v = spk = torch.full((x.shape[1], H), 0.01, dtype=x.dtype)
        rates = []
        for x_t in x:
            v = 0.9 * (v - spk) + 0.1 * (self.inp(x_t) + self.rec(spk))
            spk = Spike.apply(v - 1)
            rates.append(spk)
        return torch.stack(rates).mean(0)


def test_a_start_that_spikes_hide_is_compared_in_the_states(monkeypatch) -> None:
    """Derivatives tell it too, unless the surrogate is zero there; here they are not compared."""
    monkeypatch.setattr(_Pair, "difference_of_derivatives", lambda self, steps: None)
    torch.manual_seed(1)
    model, x = SpikesFromAFraction().double(), torch.randn(T, B, IN, dtype=torch.float64) * 3
    net = eb.wrap(model)
    net.init_state(B)
    net(x[0])
    v = 0.1 * (model.inp(x[0]) + model.rec(torch.full((B, H), 0.01, dtype=x.dtype)))
    found = dict(zip(net.hidden_paths, net.hidden_values(), strict=False))
    np.testing.assert_allclose(found["v",], v.detach(), rtol=0, atol=1e-12)


class Bottleneck(nn.Module):
    """A running sum from the second step on, of values that are functions of one number each: to
    carry those of all steps is no state, however few they are.
    """

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(IN, 1, bias=False), nn.Linear(1, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(self.wide(self.narrow(x))[:, 1:], (0, 0, 1, 0)).cumsum(1)


def test_the_inputs_of_all_steps_but_the_first_are_no_state() -> None:
    model, x = Bottleneck().double(), torch.randn(B, T, IN, dtype=torch.float64)
    net = eb.wrap(model)
    net.init_state(B)
    found = np.stack([np.asarray(net(x[:, t])) for t in range(T)], 1)
    np.testing.assert_allclose(found, model(x).detach(), rtol=0, atol=1e-12)


def test_a_state_that_forward_itself_resets_does_not_hide_the_loop() -> None:
    """The step of a batch has a state in an attribute, but nothing reads it: `forward` takes whole
    sequences.
    """
    model, x = ResetsItself().double(), torch.randn(T, B, IN, dtype=torch.float64)
    net = eb.wrap(model)
    net.init_state(B)
    outputs = np.stack([np.asarray(net(x[t])) for t in range(T)])
    assert net.takes_sequences
    assert net.reduction == "mean"
    np.testing.assert_allclose(outputs.mean(0), model(x).detach(), rtol=1e-12, atol=1e-12)


def test_a_state_behind_a_gate_that_zeros_close_is_a_state() -> None:
    """With an input of zeros nothing reads the state; any other input tells."""
    example = {"x": torch.zeros(B, IN), "gate": torch.zeros(B, H)}
    net = eb.wrap(GatedCell(), example_input=example)  # a warning would fail the test
    net.init_state(B)
    assert net.hidden_paths == (("h",),)
    assert not net.takes_sequences


class GatedCell(nn.Module):
    """A cell whose recurrence an input multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(IN, H), nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor | None = None, *, gate: Tensor) -> tuple:
        h = torch.zeros_like(gate) if h is None else h
        h = torch.tanh(self.inp(x) + gate * self.rec(h))
        return h, h


class ResetsItself(nn.Module):
    """A neuron with its state in an attribute, reset at the beginning of `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(IN, H), nn.Linear(H, 2)
        self.v: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.v, total = torch.zeros(x[0].shape[:-1] + (H,), dtype=x.dtype), 0
        for x_t in x:
            self.v = 0.8 * self.v + self.inp(x_t)
            total = total + self.out(torch.tanh(self.v))
        return total / len(x)
