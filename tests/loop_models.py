"""Models that loop over time inside `forward`, written as people write them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class Shifted(Inline):
    """Reads the step before too, so that no layer has the size of an input."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(2 * IN, H)

    def forward(self, x: Tensor) -> Tensor:
        old = torch.zeros_like(x[:, :1])
        return super().forward(torch.cat([x, torch.cat([old, x[:, :-1]], 1)], -1))


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
