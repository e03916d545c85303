"""Models that loop over time inside `forward`, written as people write them: the step found equals
the whole sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import etrace_bridge as eb
from etrace_bridge.frontend.time.comparison import _Pair

pytestmark = pytest.mark.usefixtures("without_single_steps")
B, IN, H, T = 2, 3, 4, 9


class Spike(torch.autograd.Function):
    """The surrogate gradient of the tutorials."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (v,) = ctx.saved_tensors
        return grad / (1 + 10 * v.abs()) ** 2


class FlatSpike(Spike):
    """The same spikes with another surrogate."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (v,) = ctx.saved_tensors
        return grad / (1 + v.abs()) ** 2


class Inline(nn.Module):
    """An inline loop, batch-first."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(IN, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], H, dtype=x.dtype)
        out = []
        for t in range(x.shape[1]):
            h = torch.tanh(self.inp(x[:, t]) + self.rec(h))
            out.append(h)
        return torch.stack(out, 1)


class NoneFirst(Inline):
    """A loop over `x` itself, with no state at the first step."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = None, []
        for x_t in x:
            h = torch.tanh(self.inp(x_t)) if h is None else torch.tanh(self.inp(x_t) + self.rec(h))
            out.append(h)
        return torch.stack(out)


class CellInLoop(nn.Module):
    """An `LSTMCell` in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(IN, H), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.size(0), H, dtype=x.dtype)
        out = []
        for t in range(x.size(1)):
            h, c = self.cell(x[:, t, :], (h, c))
            out.append(self.out(h))
        return torch.stack(out, dim=1)


class Projected(nn.Module):
    """One projection of the whole sequence before the loop, an output written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec, self.out = nn.Linear(IN, 3 * H), nn.Linear(H, 3 * H), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        steps, batch, _ = x.shape
        gates = self.inp(x.reshape(steps * batch, -1)).view(steps, batch, -1)
        h = x.new_zeros(batch, H)
        out = torch.zeros(steps, batch, H, dtype=x.dtype)
        for t, g in enumerate(gates.unbind(0)):
            r, z, n = g.chunk(3, -1)
            hr, hz, hn = self.rec(h).chunk(3, -1)
            z = torch.sigmoid(z + hz)
            h = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * h
            out[t] = h
        return self.out(out)


class TwoLoops(nn.Module):
    """Two loops one after the other, the first in a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mid = NoneFirst(), nn.Linear(H, H)
        self.decay = nn.Parameter(torch.rand(H))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.mid(self.first(x)))
        v, out = torch.zeros_like(y[0]), []
        for t in range(len(y)):
            v = torch.sigmoid(self.decay) * v + y[t]
            out.append(v)
        return torch.stack(out)


class TwoStepsAgo(Inline):
    """A state of two steps ago."""

    def forward(self, x: Tensor) -> Tensor:
        old = older = torch.zeros(x.shape[0], H, dtype=x.dtype)
        out = []
        for t in range(x.shape[1]):
            new = torch.tanh(self.inp(x[:, t]) + self.rec(older) - 0.3 * old)
            older, old = old, new
            out.append(new)
        return torch.stack(out, 1)


class Tutorial(nn.Module):
    """The surrogate-gradient tutorial: weights as parameters, synapse and membrane, einsum,
    recordings in lists.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.empty(IN, H)), nn.Parameter(torch.empty(H, 2))
        nn.init.normal_(self.w1, std=2.0)
        nn.init.normal_(self.w2)

    def forward(self, inputs: Tensor) -> Tensor:
        batch, steps = inputs.shape[:2]
        h1 = torch.einsum("abc,cd->abd", (inputs, self.w1))
        syn = torch.zeros(batch, H, dtype=inputs.dtype)
        mem = torch.zeros(batch, H, dtype=inputs.dtype)
        spikes = []
        for t in range(steps):
            out = Spike.apply(mem - 1.0)
            rst = out.detach()
            syn, mem = 0.8 * syn + h1[:, t], (0.9 * mem + syn) * (1.0 - rst)
            spikes.append(out)
        h2 = torch.einsum("abc,cd->abd", (torch.stack(spikes, dim=1), self.w2))
        flt = torch.zeros(batch, 2, dtype=inputs.dtype)
        out = torch.zeros(batch, 2, dtype=inputs.dtype)
        recorded = [out]
        for t in range(steps):
            flt, out = 0.8 * flt + h2[:, t], 0.9 * out + flt
            recorded.append(out)
        return torch.stack(recorded[1:], dim=1)


class TwoSurrogates(nn.Module):
    """Two surrogates of one membrane: equal values, other derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.sharp, self.flat = nn.Linear(IN, H), nn.Linear(H, 2), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        v, out = torch.zeros(x.shape[0], H, dtype=x.dtype), []
        for t in range(x.shape[1]):
            v = 0.8 * v + self.inp(x[:, t])
            out.append(self.sharp(Spike.apply(v - 0.2)) + self.flat(FlatSpike.apply(v - 0.2)))
        return torch.stack(out, 1)


class Selective(nn.Module):
    """A selective state space: everything before the recurrence is computed for the whole sequence."""

    def __init__(self, states: int = 3) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.rand(H, states))
        self.inp, self.delta, self.bc = nn.Linear(IN, H), nn.Linear(H, H), nn.Linear(H, 2 * states)
        self.skip, self.states = nn.Parameter(torch.ones(H)), states

    def forward(self, x: Tensor) -> Tensor:
        u = F.silu(self.inp(x))
        delta = F.softplus(self.delta(u))
        b, c = self.bc(u).split(self.states, dim=-1)
        a = torch.exp(-delta.unsqueeze(-1) * torch.exp(self.log_a))
        bu = delta.unsqueeze(-1) * b.unsqueeze(2) * u.unsqueeze(-1)
        h = torch.zeros(x.shape[0], H, self.states, dtype=x.dtype)
        ys = []
        for i in range(x.shape[1]):
            h = a[:, i] * h + bu[:, i]
            ys.append(torch.einsum("bhn,bn->bh", h, c[:, i]))
        return torch.stack(ys, 1) + u * self.skip


@dataclass
class Carry:
    """A state in a dataclass."""

    h: Tensor
    trace: Tensor


class Packed(Inline):
    """State in a dataclass inside a dict, `permute`, `torch.cat`."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(1, 0, 2)
        state = {
            "s": Carry(
                torch.zeros_like(x[0] @ x[0].T @ self.inp(x[0])),
                torch.full((x.shape[1], H), 0.5, dtype=x.dtype),
            )
        }
        out = []
        for x_t in x:
            old = state["s"]
            h = torch.tanh(self.inp(x_t) + self.rec(old.h) * old.trace)
            state = {"s": Carry(h, 0.7 * old.trace + h)}
            out.append(h[None])
        return torch.cat(out, 0).permute(1, 0, 2)


class LearnedStart(Inline):
    """An initial state that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.randn(1, H))

    def forward(self, x: Tensor) -> Tensor:
        h, out = self.h0.expand(x.shape[0], H), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.inp(x[:, t]) + self.rec(h))
            out.append(h)
        return torch.stack(out, 1)


class StartsFromInput(Inline):
    """An initial state computed from the first input, and an `if t == 0`."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(IN, H)

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.sin(self.start(x[:, 0])), []
        for t in range(x.shape[1]):
            h = torch.tanh(self.inp(x[:, t]) + self.rec(h))
            out.append(h if t > 0 else h + 0)
        return torch.stack(out, 1)


class FirstDiffers(Inline):
    """A first step with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(IN, H)

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for t, x_t in enumerate(x):
            h = torch.sin(self.start(x_t)) if t == 0 else torch.tanh(self.inp(x_t) + self.rec(h))  # noqa: F821
            out.append(h)
        return torch.stack(out)


class TokenShift(nn.Module):
    """The last input mixed in before a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.mix = nn.GRU(IN, H), nn.Parameter(torch.rand(IN))

    def forward(self, x: Tensor) -> Tensor:
        last = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
        return self.gru(x + self.mix * (last - x))[0]


class CausalConvolution(nn.Module):
    """A causal convolution over time before a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.rec = nn.Conv1d(IN, H, 3), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        u = self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        h, out = torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            h = torch.tanh(u[:, t] + self.rec(h))
            out.append(h)
        return torch.stack(out, 1)


class TwoConvolutions(nn.Module):
    """Two causal convolutions: past inputs are fewer numbers than past features, but before the
    first step the features are zeros, and not what the first convolution makes of zeros.
    """

    def __init__(self, bias: float = 0.5) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(IN, H, 3), nn.Conv1d(H, H, 2, dilation=2)
        nn.init.constant_(self.first.bias, bias)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(F.pad(x.mT, (2, 0))))
        return self.second(F.pad(y, (2, 0))).mT


class Mixed(nn.Module):
    """`nn.GRU`, an own loop and an `nn.LSTM`."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(IN, IN, batch_first=True)
        self.own = Inline()
        self.lstm = nn.LSTM(H, 2, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.own(self.gru(x)[0]))[0]


class LayerStartsFromInput(nn.Module):
    """A layer whose initial state is computed from the first input."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.rnn = nn.Linear(IN, H), nn.GRU(IN, H)

    def forward(self, xs: Tensor) -> Tensor:
        return self.rnn(xs, self.start(xs[0])[None])[0]


class Running(nn.Module):
    """A running sum, without a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(IN, H)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inp(x).cumsum(1))


class SinceSpike(nn.Module):
    """A refractory neuron that counts the steps since its last spike, from a start that is not
    zero; the smallest state, without the spike, has no start that the first step shows.
    """

    def __init__(self, width: int = H) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(IN, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        v = x.new_zeros(x.shape[1], self.inp.out_features)
        spk, since, out = torch.zeros_like(v), torch.full_like(v, 99.0), []
        for t in range(len(x)):
            since = torch.where(spk > 0, 0.0, since + 1)
            v = 0.9 * v * (1 - spk) + self.inp(x[t]) + self.rec(spk)
            spk = Spike.apply(v - 0.1) * (since > 1).to(v)
            out.append(spk * v)
        return torch.stack(out)


class Grows(Inline):
    """Collects its outputs by `torch.cat`, and counts in tensors."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros(x.shape[0], H, dtype=x.dtype), torch.empty(x.shape[0], 0, H)
        for t in torch.arange(x.shape[1]):
            h = torch.tanh(self.inp(x[:, t]) + self.rec(h))
            out = torch.cat([out.to(x), h.unsqueeze(1)], 1)
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], bool, set[str]]] = {
    "inline": (Inline, True, {"h"}),
    "none first": (NoneFirst, False, {"h"}),
    "cell in loop": (CellInLoop, True, {"h", "c"}),
    "projected": (Projected, False, {"h"}),
    "two loops": (TwoLoops, False, {"first.h", "v"}),
    "two steps ago": (TwoStepsAgo, True, set()),
    "tutorial": (Tutorial, True, {"syn", "mem", "flt", "out"}),
    "two surrogates": (TwoSurrogates, True, {"v"}),
    "selective": (Selective, True, {"h"}),
    "packed": (Packed, True, {"h", "old.trace"}),
    "learned start": (LearnedStart, True, {"h"}),
    "starts from input": (StartsFromInput, True, {"h"}),
    "first differs": (FirstDiffers, False, {"h"}),
    "token shift": (TokenShift, False, set()),
    "causal convolution": (CausalConvolution, True, set()),
    "two convolutions": (TwoConvolutions, True, set()),
    "mixed": (Mixed, True, set()),
    "layer starts from input": (LayerStartsFromInput, False, set()),
    "running": (Running, True, set()),
    "since spike": (SinceSpike, False, set()),
    "grows": (Grows, True, {"h"}),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    kind, batch_first, _ = MODELS[name]
    return kind().double(), torch.randn(
        *((B, T) if batch_first else (T, B)), IN, dtype=torch.float64
    )


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


# ---- outputs that are reduced over time


class Ends(Inline):
    """A classifier that ends in a reduction over time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.out, self.how = nn.Linear(H, 2), how

    def forward(self, x: Tensor) -> Tensor:
        return REDUCTIONS[self.how][1](self.out, super().forward(x))


def in_a_loop(out: nn.Module, ys: Tensor) -> Tensor:
    total = torch.zeros(ys.shape[0], 2, dtype=ys.dtype)
    for t in range(ys.shape[1]):
        total = total + out(ys[:, t])
    return total


def in_place(out: nn.Module, ys: Tensor) -> Tensor:
    total = torch.zeros(ys.shape[0], 2, dtype=ys.dtype)
    for y in ys.unbind(1):
        total += out(y)
    return total / len(ys.unbind(1))


def from_the_first(out: nn.Module, ys: Tensor) -> Tensor:
    total = None
    for y in ys.unbind(1):
        total = y if total is None else y + total
    return out(total / ys.size(1))


def spikes_of(ys: Tensor) -> Tensor:
    return torch.stack([Spike.apply(y) for y in ys.unbind(1)], 1)


REDUCTIONS: dict[str, tuple[str, Callable[[nn.Module, Tensor], Tensor]]] = {
    "last": ("last", lambda out, ys: out(ys[:, -1])),
    "mean": ("mean", lambda out, ys: out(ys.mean(1))),
    "sum of logits": ("sum", lambda out, ys: out(ys).sum(1)),
    "a sum by six": ("sum", lambda out, ys: out(ys).sum(1) / 6),
    "total": ("last", in_a_loop),
    "total by length": ("mean", lambda out, ys: in_a_loop(out, ys) / ys.shape[1]),
    "total in place": ("mean", in_place),
    "total from the first": ("mean", from_the_first),
    "total of shares": ("mean", lambda out, ys: sum(out(y) / ys.shape[1] for y in ys.unbind(1))),
    "Python's sum": ("mean", lambda out, ys: sum(map(out, ys.unbind(1))) / ys.shape[1]),
    "amax": ("last", lambda out, ys: out(ys).amax(1)),
    "max": ("last", lambda out, ys: out(ys).max(1)[0]),
    "min": ("last", lambda out, ys: torch.min(out(ys), dim=1, keepdim=True).values.squeeze(1)),
    "max over units and time": (
        "last",
        lambda out, ys: out(ys.max(2)[0].max(1, True)[0].expand(B, H)),
    ),
    "amax of spikes": ("last", lambda out, ys: out(spikes_of(ys).amax(1))),
    "amax of all spikes": (
        "last",
        lambda out, ys: out(spikes_of(ys).amax((1, 2), True).expand(B, 1, H))[:, 0],
    ),
    "max of spikes": ("last", lambda out, ys: out(spikes_of(ys).max(dim=1).values)),
    "max of spikes made at once": ("last", lambda out, ys: out(Spike.apply(ys).max(1)[0])),
    "head of a mean": ("last", lambda out, ys: out(torch.relu(ys.mean(1)))),
    "softmax of a total by length": (
        "last",
        lambda out, ys: F.softmax(in_a_loop(out, ys) / ys.shape[1], -1),
    ),
    "deviation": ("last", lambda out, ys: out(((ys**2).mean(1) - ys.mean(1) ** 2 + 0.1).sqrt())),
    "mean over units too": ("last", lambda out, ys: torch.tanh(out(ys).mean((1, 2)))[:, None]),
    "mean and last": ("last", lambda out, ys: torch.tanh(out(ys.mean(1) + ys[:, -1]))),
    "mean beside last": (
        "last",
        lambda out, ys: torch.tanh(out(torch.cat([ys.mean(1), ys[:, -1]], 1)[:, 2 : 2 + H])),
    ),
    "tanh of a sum by six": ("last", lambda out, ys: torch.tanh(out(ys).sum(1) / 6)),
}


@pytest.mark.parametrize("how", list(REDUCTIONS))
def test_a_reduction_over_time_is_known(how: str) -> None:
    torch.manual_seed(2)
    model, x = Ends(how).double(), torch.randn(B, T, IN, dtype=torch.float64)
    net = eb.wrap(model)
    net.init_state(B)
    outputs = np.stack([np.asarray(net(x[:, t])) for t in range(T)])
    assert net.reduction == REDUCTIONS[how][0]
    found = {"last": outputs[-1], "sum": outputs.sum(0), "mean": outputs.mean(0)}[net.reduction]
    np.testing.assert_allclose(found, model(x).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "how",
    ["total by length", "total of shares", "max over units and time", "amax of spikes",
     "amax of all spikes", "max of spikes", "max of spikes made at once", "head of a mean",
     "softmax of a total by length", "deviation", "mean over units too", "mean and last",
     "mean beside last", "tanh of a sum by six"],
)  # fmt: skip
def test_gradients_of_a_reduced_output_equal_torchs(how: str) -> None:
    """Extrema of spikes have equals in most samples; torch shares the gradient of `amax` among
    them, and gives that of `max` to the first.
    """
    torch.manual_seed(2)
    model, x = Ends(how).double(), torch.randn(B, T, IN, dtype=torch.float64)
    learner = eb.OnlineLearner(model, "rtrl", F.mse_loss, chunk=5, loss_at="model")
    wanted = model(x)
    target = torch.randn_like(wanted)
    found = learner.gradients(x, target).grads
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(F.mse_loss(wanted, target), parameters)
    for name, grad in zip(names, grads, strict=True):
        assert grad.abs().max() > 1e-6, name
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=1e-9 * grad.abs().max())


ALL_AT_ONCE: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda ys: ys.topk(2, 1)[0].sum(1),
    "sort": lambda ys: ys.sort(1)[0][:, -1],
    "argmax": lambda ys: ys.max(1)[1] * ys[:, -1],
    "median": lambda ys: ys.median(1).values,
}


@pytest.mark.parametrize("how", list(ALL_AT_ONCE))
def test_what_needs_all_steps_at_once_is_refused_with_the_line(how: str) -> None:
    class AtOnce(Inline):
        def forward(self, x: Tensor) -> Tensor:
            return ALL_AT_ONCE[how](super().forward(x))

    with pytest.raises(
        eb.NotSupportedError, match=r"test_frontend_loops\.py:\d+.* reads all steps of the sequence"
    ):
        eb.wrap(AtOnce().double()).init_state(B)


READS_AGAIN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "variance": (lambda ys: ys.var(1), "`sub` at"),
    "softmax": (lambda ys: (ys.softmax(1) * ys).sum(1), "`sub` at"),
    "logsumexp": (lambda ys: ys.logsumexp(1), "`sub` at"),
    "first and last": (lambda ys: torch.cat([ys[:, 0], ys[:, -1]], -1), "`concatenate` at"),
    "first": (lambda ys: ys[:, 0], "that of step 1 at"),
    "third": (lambda ys: 2 * ys[:, 2], "that of step 3 at"),
}


@pytest.mark.parametrize("how", list(READS_AGAIN))
def test_what_reads_early_steps_at_the_end_is_refused_with_the_line(how: str) -> None:
    reads, reason = READS_AGAIN[how]

    class ReadsAgain(Inline):
        def forward(self, x: Tensor) -> Tensor:
            return reads(super().forward(x))

    with pytest.raises(eb.NotSupportedError, match=rf"{reason} .*test_frontend_loops\.py:\d+"):
        eb.wrap(ReadsAgain().double()).init_state(B)


def test_no_reduction_where_every_step_is_given() -> None:
    net = eb.wrap(Inline().double())
    net.init_state(B)
    assert net.reduction is None


@pytest.mark.parametrize("how", ["last", "mean", "max"])
def test_online_gradients_of_a_reduced_output_equal_bptt(how: str) -> None:
    torch.manual_seed(2)
    model, x = Ends(how).double(), torch.randn(B, T, IN, dtype=torch.float64)
    mask = torch.zeros(T)
    mask[-1] = 1
    targets = torch.randn(B, T, 2, dtype=torch.float64)
    report = eb.check_gradients(
        model, x, targets, loss=F.mse_loss, rule="rtrl", mask=mask if how != "mean" else None
    )
    assert report.ok, report
    assert report["rec.weight"].norm > 1e-6
    assert report["rec.weight"].relative_error < 1e-9


# ---- what cannot be one step


class Normalised(Inline):
    """Looks ahead in one of several ways before the loop."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.how(x))


LOOK_AHEAD: dict[str, Callable[[Tensor], Tensor]] = {
    "statistics": lambda x: x - x.mean(1, keepdim=True),
    "reversed": lambda x: x.flip(1),
    "centred convolution": lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "attention": lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
}


@pytest.mark.parametrize("how", list(LOOK_AHEAD))
def test_a_loop_that_looks_ahead_is_refused_with_the_line(how: str) -> None:
    with pytest.raises(
        eb.NotSupportedError, match=r"depends on later inputs.*test_frontend_loops\.py:\d+"
    ):
        eb.wrap(Normalised(LOOK_AHEAD[how]).double()).init_state(B)


class Clocked(Inline):
    """Every other step is different."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros(x.shape[0], H, dtype=x.dtype), []
        for t in range(x.shape[1]):
            h = (
                torch.tanh(self.inp(x[:, t]) + self.rec(h))
                if t % 2
                else 0.5 * h + self.inp(x[:, t])
            )
            out.append(h)
        return torch.stack(out, 1)


class Positions(Inline):
    """A table of positions is added."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(30, IN))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table[: x.shape[1]])


@pytest.mark.parametrize(
    ("kind", "reason"), [(Clocked, "not alike"), (Positions, "not alike|depends on its number")]
)
def test_steps_that_differ_are_refused(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(eb.NotSupportedError, match=reason):
        eb.wrap(kind().double()).init_state(B)


class Shifted(Inline):
    """Reads the step before too, so that no layer has the size of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(2 * IN, H)

    def forward(self, x: Tensor) -> Tensor:
        old = torch.zeros_like(x[:, :1])
        return super().forward(torch.cat([x, torch.cat([old, x[:, :-1]], 1)], -1))


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


def test_a_layout_that_was_assumed_wrong_is_not_trained_on() -> None:
    learner = eb.OnlineLearner(Shifted().double(), rule="d_rtrl", loss=F.mse_loss)
    assert not learner.runtime.batch_first  # nothing tells yet
    with pytest.raises(eb.InputError, match=r"batch_first=True"):
        learner.gradients(
            torch.randn(B, T, IN, dtype=torch.float64), torch.randn(B, T, H, dtype=torch.float64)
        )


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


def test_a_loop_that_writes_running_statistics_is_refused_in_training_mode():
    """The step that is found in a loop carries no buffers, so the statistics would silently stay as
    they are.
    """

    class Measuring(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.cell = nn.BatchNorm1d(3), nn.GRUCell(3, 4)

        def forward(self, x):
            h, outputs = torch.zeros(x.shape[1], 4, dtype=x.dtype), []
            for x_t in x:
                h = self.cell(self.norm(x_t), h)
                outputs.append(h)
            return torch.stack(outputs)

    model = Measuring().double()
    x = torch.randn(5, 3).double()
    with pytest.raises(
        eb.NotSupportedError, match="writes to `norm.running_mean`, `norm.running_var`"
    ):
        eb.wrap(model, example_input=x).init_state(batch_size=5)
    net = eb.wrap(model.eval(), example_input=x)
    net.init_state(batch_size=5)
    expected = model(x[None])[0]
    torch.testing.assert_close(eb.to_torch(net(x)), expected, rtol=1e-9, atol=1e-12)


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


class TimeMajor(Inline):
    """Time-major loops that also run on one step `(batch, ...)`, sample by sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def cell(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.inp(x) + self.rec(h))

    def forward(self, x: Tensor) -> Tensor:
        h, past, out = x.new_zeros(x.shape[1], H), [], []
        if self.how == "both directions":
            for x_t in x.flip(0):
                h = self.cell(x_t, h)
                past.insert(0, h)
            h = torch.zeros_like(h)
        for t, x_t in enumerate(x):
            h = self.cell(x_t, h)
            if self.how == "both directions":
                out.append(h + past[t])
                continue
            past.append(h)
            seen = torch.stack(past)
            weights = torch.softmax((seen * h).sum(-1, keepdim=True), 0)
            out.append((weights * seen).sum(0))
        return torch.stack(out)


@pytest.mark.parametrize(
    ("how", "reason"), [("both directions", "later inputs"), ("attention", "the state would grow")]
)
def test_the_reason_is_that_of_the_layout_that_keeps_samples_apart(how: str, reason: str) -> None:
    """In the other layout the loop runs over samples, and what fails there says nothing."""
    net = eb.wrap(TimeMajor(how).double())
    with pytest.raises(eb.NotSupportedError, match=reason):
        net.init_state(B)
        net(torch.randn(B, IN, dtype=torch.float64))


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


# ---- time on the third axis


class ChannelsFirst(nn.Module):
    """A loop over `(batch, channels, time)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(IN, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), H), []
        for x_t in x.unbind(2):
            h = torch.tanh(self.inp(x_t) + self.rec(h))
            out.append(h)
        return torch.stack(out, 2)


class ChannelsFirstMaps(nn.Module):
    """A leaky sum over `(batch, channels, time, width)` that also runs on one step."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, :, 0]), []
        for t in range(x.shape[2]):
            h = self.decay * h + x[:, :, t]
            out.append(h)
        return torch.stack(out, 2)


@pytest.mark.parametrize("shown", [True, False])
def test_time_on_the_third_axis_is_refused_with_the_axis(shown: bool) -> None:
    model, x = ChannelsFirst().double(), torch.randn(B, IN, T, dtype=torch.float64)
    with pytest.raises(eb.NotSupportedError, match=r"loops over axis 2.*movedim\(1, 2\)"):
        if shown:
            eb.wrap(model, example_input=x[:, :, 0]).init_state(B)
        else:
            learner = eb.OnlineLearner(model, "bptt", F.mse_loss)
            learner.gradients(x, torch.randn(B, H, T, dtype=torch.float64))


def test_a_stateless_step_with_time_on_the_third_axis_warns() -> None:
    net = eb.wrap(ChannelsFirstMaps().double(), example_input=torch.randn(B, 2, 5).double())
    with pytest.warns(UserWarning, match="loops over axis 2 of its input"):
        net.init_state(B)
    assert not net.hidden_paths


class Transformed(Inline):
    """A transform of `torch.func` inside a loop."""

    def __init__(self, transform: Callable) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros(x.shape[0], H, dtype=x.dtype), []
        for x_t in x.unbind(1):
            h = self.transform(lambda h: torch.tanh(self.rec.weight @ h))(h) + self.inp(x_t)
            out.append(h)
        return torch.stack(out, 1)


TRANSFORMS: dict[str, Callable] = {
    "vmap": torch.vmap,
    "grad": lambda f: torch.vmap(torch.func.grad(lambda h: f(h).sum())),
}


@pytest.mark.parametrize("how", list(TRANSFORMS))
def test_a_transform_of_torch_func_is_refused_with_the_line(how: str) -> None:
    with pytest.raises(eb.NotSupportedError, match=r"torch\.vmap.*test_frontend_loops\.py:\d+"):
        eb.wrap(Transformed(TRANSFORMS[how]).double()).init_state(B)
