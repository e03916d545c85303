"""Recurrent cells as users write them: every container of state, every way of building a weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Case, Runner, carried, returned

BATCH, INPUT, HIDDEN = 2, 3, 4


def zeros(batch_size: int) -> Tensor:
    """The usual initial state."""
    return torch.zeros(batch_size, HIDDEN)


# Containers of state.


class TensorState(nn.Module):
    """A tanh cell that makes its own zero state and returns `(out, state)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.readout = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if h is None:
            h = x.new_zeros(x.shape[0], HIDDEN)
        h = torch.tanh(self.inp(x) + self.rec(h))
        return self.readout(h), h


class OnlyState(TensorState):
    """The same cell returning its state alone, with a state that has to be given."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:  # type: ignore[override]
        h = torch.tanh(self.inp(x) + self.rec(h))
        return h + 0.1 * F.pad(self.readout(h), (0, HIDDEN - 2))


class TupleState(nn.Module):
    """A hand-written LSTM with peepholes; the state is a tuple `(h, c)`."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(INPUT + HIDDEN, 4 * HIDDEN)
        self.peephole = nn.Parameter(0.5 * torch.randn(3, HIDDEN))

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if state is None:
            state = (
                torch.zeros(len(x), HIDDEN, dtype=x.dtype),
                torch.zeros(len(x), HIDDEN, dtype=x.dtype),
            )
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], dim=-1)).chunk(4, dim=-1)
        c = (
            torch.sigmoid(f + self.peephole[0] * c) * c
            + torch.sigmoid(i + self.peephole[1] * c) * g.tanh()
        )
        h = torch.sigmoid(o + self.peephole[2] * c) * c.tanh()
        return h, (h, c)


class DictState(nn.Module):
    """A fast and a slow state in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mix = nn.Linear(INPUT, HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(
        self, x: Tensor, state: dict[str, Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if state is None:
            zero = x.new_zeros((x.size(0), HIDDEN))
            state = {"fast": zero, "slow": zero}
        fast = torch.tanh(self.inp(x) + self.mix(torch.cat((state["fast"], state["slow"]), 1)))
        slow = torch.lerp(state["slow"], fast, 0.2)
        return fast * slow, {"fast": fast, "slow": slow}


class AdaptState(NamedTuple):
    v: Tensor
    a: Tensor


class NamedTupleState(nn.Module):
    """A rate neuron with adaptation; the state is a NamedTuple that the caller makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(INPUT, HIDDEN)
        self.rec = nn.Parameter(0.5 * torch.randn(HIDDEN, HIDDEN))
        self.strength = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x: Tensor, state: AdaptState) -> tuple[Tensor, AdaptState]:
        rate = F.softplus(state.v)
        v = 0.8 * state.v + self.inp(x) + rate @ self.rec - self.strength * state.a
        return rate, AdaptState(v=v, a=state.a * 0.9 + 0.1 * rate)


@dataclass
class PairState:
    h: Tensor
    m: Tensor


class DataclassState(nn.Module):
    """A gated cell whose state is a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(INPUT, 2 * HIDDEN), nn.Linear(HIDDEN, 2 * HIDDEN)

    def forward(self, x: Tensor, state: PairState) -> tuple[Tensor, PairState]:
        gate, new = (self.inp(x) + self.rec(state.h)).split(HIDDEN, dim=1)
        m = torch.where(state.m.abs() > 0.3, state.m * 0.5, state.m + 0.2 * new)
        h = torch.addcmul(m, gate.sigmoid(), new.tanh())
        return h, PairState(h, m)


class NestedState(nn.Module):
    """Two cells of torch in a list, their states in a nested tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(INPUT, HIDDEN), nn.LSTMCell(HIDDEN, 3)])

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        h0, (h1, c1) = state
        h0 = self.cells[0](x, h0)
        h1, c1 = self.cells[1](h0, (h1, c1))
        return torch.cat([h0, h1], -1), (h0, (h1, c1))


class PackedState(nn.Module):
    """A second-order cell with position and velocity packed in one `(B, 2H)` state."""

    def __init__(self) -> None:
        super().__init__()
        self.force = nn.Linear(INPUT + HIDDEN, HIDDEN)
        self.damping = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, p = state[:, :HIDDEN], state[:, HIDDEN:]
        p = p + 0.5 * (torch.tanh(self.force(torch.cat([x, q], 1))) - self.damping * p - 0.3 * q)
        q = q + 0.5 * p
        return q, torch.cat([q, p], dim=1)


# Recurrences of the literature.


class MinGRU(nn.Module):
    """minGRU: `h = (1 - z) h + z h~`, gates from the input alone."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(INPUT, HIDDEN), nn.Linear(INPUT, HIDDEN)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        z = torch.sigmoid(self.gate(x))
        return (1 - z) * h + z * self.value(x)


class DiagonalLinear(nn.Module):
    """A linear recurrent unit with a real diagonal: `h = λ h + γ B x`, read out with a skip
    connection.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_decay = nn.Parameter(torch.randn(HIDDEN))
        self.B = nn.Parameter(torch.randn(HIDDEN, INPUT))
        self.C = nn.Parameter(torch.randn(2, HIDDEN))
        self.D = nn.Parameter(torch.randn(2, INPUT))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        decay = torch.exp(-torch.exp(self.log_decay))
        h = decay * h + torch.sqrt(1 - decay**2) * (x @ self.B.T)
        return h @ self.C.mT + F.linear(x, self.D), h


class LeakyIntegrator(nn.Module):
    """A leaky integrator with one learnable decay a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(INPUT, HIDDEN)
        self.decay = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, x: Tensor, v: Tensor) -> Tensor:
        a = self.decay.clamp(0.0, 1.0)
        return a * v + (1.0 - a) * self.fc(x)


class LayerNormRNN(nn.Module):
    """A tanh RNN with LayerNorm on the pre-activation."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(INPUT, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.inp(x) + self.rec(h)))


class MGU(nn.Module):
    """The minimal gated unit: one gate, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.forget, self.new = nn.Linear(INPUT + HIDDEN, HIDDEN), nn.Linear(INPUT + HIDDEN, HIDDEN)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        f = self.forget(torch.hstack([x, h])).sigmoid()
        return (1 - f) * h + f * self.new(torch.hstack([x, f * h])).tanh()


class IndRNN(nn.Module):
    """Element-wise recurrence with relu, then a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(INPUT, HIDDEN)
        self.u = nn.Parameter(torch.rand(HIDDEN) + 0.2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        z = self.fc(x)
        h = F.relu(torch.addcmul(z, self.u, h))
        return h + F.gelu(z), h


class FastWeights(nn.Module):
    """A matrix state `(B, H, H)` of outer products, read by a query."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(INPUT, 3 * HIDDEN)
        self.decay = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = torch.tensor_split(self.qkv(x), 3, dim=-1)
        memory = torch.sigmoid(self.decay) * memory + torch.einsum("bi,bj->bij", v, F.elu(k) + 1)
        return torch.bmm(memory, q.unsqueeze(-1)).squeeze(-1), memory


class SlotMemory(nn.Module):
    """Attention over memory slots `(B, M, H)`: softmax read, gated write."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.write = nn.Linear(INPUT, HIDDEN), nn.Linear(INPUT, HIDDEN)
        self.start = nn.Parameter(torch.randn(3, HIDDEN))

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        slots = memory + self.start
        scores = torch.matmul(slots, self.query(x)[:, :, None]).squeeze(2) / HIDDEN**0.5
        weights = F.softmax(scores, dim=-1)[..., None]
        read = (weights * slots).sum(dim=1)
        return read, memory * 0.9 + weights * self.write(x)[:, None]


class DelayLine(nn.Module):
    """A shift register `(B, K, I)` with learned taps."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(5, INPUT))
        self.out = nn.Linear(INPUT, 2)

    def forward(self, x: Tensor, line: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.out((line * self.taps).sum(1)))
        fed_back = F.pad(y, (0, INPUT - 2))
        return y, torch.cat([(x + 0.5 * fed_back).unsqueeze(1), line[:, :-1]], dim=1)


class EulerODE(nn.Module):
    """Three Euler substeps of an antisymmetric flow a time step."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.inp = nn.Linear(INPUT, HIDDEN)
        self.register_buffer("eye", torch.eye(HIDDEN))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        flow = self.w - self.w.t() - 0.1 * self.eye
        drive = self.inp(x)
        for _ in range(3):
            h = h + 0.2 * torch.tanh(h @ flow + drive)
        return h


class MultiplicativeRNN(nn.Module):
    """An intermediate state that multiplies input and recurrent products, and a bilinear readout."""

    def __init__(self) -> None:
        super().__init__()
        self.mx, self.mh = nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.new = nn.Linear(HIDDEN, HIDDEN)
        self.read = nn.Bilinear(INPUT, HIDDEN, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.new(self.mx(x) * self.mh(h)) + 0.5 * h)
        return self.read(x, h), h


class ConvGRU(nn.Module):
    """A convolutional GRU on `(B, C, 4, 4)` maps."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv2d(2 + 3, 6, 3, padding=1)
        self.new = nn.Conv2d(2 + 3, 3, 3, padding=1)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        r, z = torch.sigmoid(self.gates(torch.cat([x, h], dim=1))).chunk(2, 1)
        return (1 - z) * h + z * torch.tanh(self.new(torch.cat([x, r * h], dim=1)))


class ConvLSTM(nn.Module):
    """A convolutional LSTM with separate, strided and grouped convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv2d(2, 8, 3, stride=2, padding=1, bias=False)
        self.rec = nn.Conv2d(2, 8, 3, padding="same", groups=2)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = state
        i, f, o, g = torch.split(self.inp(x) + self.rec(h), 2, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return F.avg_pool2d(h, 2).flatten(1), (h, c)


def cell_case(
    make: Callable[[], nn.Module],
    run: Callable[[Callable[[int], Any]], Runner] = returned,
    state: Callable[[int], Any] = zeros,
    shape: tuple[int, ...] = (BATCH, INPUT),
    **options: Any,
) -> Case:
    """A case of a cell that needs its initial state."""
    name = f"torch-cell-{make.__name__}"
    return Case(name, "torch", make, shape, run(state), state=state, **options)


CASES = (
    Case("torch-cell-TensorState", "torch", TensorState, (BATCH, INPUT), carried()),
    cell_case(OnlyState),
    Case("torch-cell-TupleState", "torch", TupleState, (BATCH, INPUT), carried()),
    Case("torch-cell-DictState", "torch", DictState, (BATCH, INPUT), carried()),
    cell_case(NamedTupleState, carried, lambda b: AdaptState(zeros(b), zeros(b))),
    cell_case(DataclassState, carried, lambda b: PairState(zeros(b), zeros(b))),
    cell_case(NestedState, carried, lambda b: (zeros(b), (torch.zeros(b, 3), torch.zeros(b, 3)))),
    cell_case(PackedState, carried, lambda b: torch.zeros(b, 2 * HIDDEN)),
    cell_case(MinGRU),
    cell_case(DiagonalLinear, carried),
    cell_case(LeakyIntegrator),
    cell_case(LayerNormRNN),
    cell_case(MGU),
    cell_case(IndRNN, carried),
    cell_case(FastWeights, carried, lambda b: torch.zeros(b, HIDDEN, HIDDEN)),
    cell_case(SlotMemory, carried, lambda b: torch.zeros(b, 3, HIDDEN)),
    cell_case(DelayLine, carried, lambda b: torch.zeros(b, 5, INPUT)),
    cell_case(EulerODE),
    cell_case(MultiplicativeRNN, carried),
    cell_case(ConvGRU, state=lambda b: torch.zeros(b, 3, 4, 4), shape=(BATCH, 2, 4, 4)),
    cell_case(
        ConvLSTM,
        carried,
        lambda b: (torch.zeros(b, 2, 2, 2), torch.zeros(b, 2, 2, 2)),
        shape=(BATCH, 2, 4, 4),
    ),
)
