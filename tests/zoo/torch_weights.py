"""Recurrent cells over every way of building a weight, and with spikes of the user's own making."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

from .case import carried
from .torch_cells import BATCH, HIDDEN, INPUT, cell_case, zeros


class _Weighted(nn.Module):
    """A tanh cell over `self.weights() -> (input, recurrent)`."""

    def weights(self) -> tuple[Tensor, Tensor]:
        raise TypeError("abstract")

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        w_in, w_rec = self.weights()
        return torch.tanh(F.linear(x, w_in) + F.linear(h, w_rec))


class Sliced(_Weighted):
    """Both weights are slices of one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, INPUT + HIDDEN))

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.weight[:, :INPUT], self.weight[:, INPUT:]


class Summed(_Weighted):
    """The recurrent weight is a sum of two parameters, one of them diagonal."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(HIDDEN, INPUT))
        self.w1 = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.diagonal = nn.Parameter(torch.randn(HIDDEN))

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.w_in, self.w1 + torch.diag(self.diagonal)


class LowRank(_Weighted):
    """The recurrent weight is a product of two thin ones."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(HIDDEN, INPUT))
        self.left = nn.Parameter(torch.randn(HIDDEN, 2))
        self.right = nn.Parameter(torch.randn(2, HIDDEN))

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.w_in, self.left @ self.right


class Masked(_Weighted):
    """A fixed sparse mask on the recurrent weight, frozen input weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(HIDDEN, INPUT), requires_grad=False)
        self.w_rec = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.register_buffer("mask", torch.rand(HIDDEN, HIDDEN) > 0.4)

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.w_in, self.w_rec * self.mask


class Dale(_Weighted):
    """Dale's law: positive magnitudes with a fixed sign a column."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.randn(HIDDEN, INPUT))
        self.w_rec = nn.Parameter(torch.randn(HIDDEN, HIDDEN))
        self.register_buffer("sign", torch.tensor([1.0, 1.0, -1.0, 1.0]))

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.w_in, self.w_rec.abs() * self.sign


class WeightNormed(nn.Module):
    """`torch.nn.utils.parametrizations.weight_norm` on the recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(INPUT, HIDDEN)
        self.rec = weight_norm(nn.Linear(HIDDEN, HIDDEN, bias=False))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.inp(x) + self.rec(h))


class Orthogonal(nn.Module):
    """`torch.nn.utils.parametrizations.orthogonal` on the recurrent layer, by one of torch's three
    maps.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inp = nn.Linear(INPUT, HIDDEN)
        self.rec = orthogonal(nn.Linear(HIDDEN, HIDDEN, bias=False), orthogonal_map=form)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.inp(x) + self.rec(h))


def orthogonal_matrix_exp() -> nn.Module:
    return Orthogonal("matrix_exp")


def orthogonal_cayley() -> nn.Module:
    return Orthogonal("cayley")


def orthogonal_householder() -> nn.Module:
    return Orthogonal("householder")


class Tied(nn.Module):
    """One square weight, registered under two names and used for input and recurrence."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(HIDDEN, HIDDEN)
        self.rec = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.rec.weight = self.inp.weight

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.inp(x) + self.rec(h))


class EchoState(nn.Module):
    """A frozen reservoir with a trained readout and a trained leak."""

    def __init__(self) -> None:
        super().__init__()
        self.reservoir = nn.RNNCell(INPUT, HIDDEN).requires_grad_(False)
        self.leak = nn.Parameter(torch.tensor(0.3))
        self.readout = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.leak * h + (1 - self.leak) * self.reservoir(x, h)
        return self.readout(h), h


class _Fire(torch.autograd.Function):
    """A spike with a triangular surrogate gradient."""

    @staticmethod
    def forward(ctx: Any, v: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (v,) = ctx.saved_tensors
        return grad * torch.clamp(1 - v.abs(), min=0)


fire = _Fire.apply  # bound before any tracing starts, as user code does


class AdaptiveLIF(nn.Module):
    """A recurrent adaptive LIF with a user-written surrogate; the state is `(v, a, z)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.threshold = nn.Parameter(torch.full((HIDDEN,), 0.6))

    def forward(self, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        v, a, z = state
        v = 0.9 * v + self.inp(x) + self.rec(z) - z.detach() * self.threshold
        a = 0.95 * a + z
        z = fire(v - self.threshold - 0.2 * a)
        return z, (v, a, z)


class StraightThrough(nn.Module):
    """A binary RNN by the detach trick: `soft + (hard - soft).detach()`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(INPUT, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        v, b = state
        v = 0.7 * v + self.inp(x) + self.rec(b)
        soft = v.sigmoid()
        b = soft + (v.gt(0).type_as(v) - soft).detach()
        return b, (v, b)


CASES = (
    cell_case(Sliced),
    cell_case(Summed),
    cell_case(LowRank),
    cell_case(Masked),
    cell_case(Dale),
    cell_case(WeightNormed),
    cell_case(orthogonal_matrix_exp),
    cell_case(orthogonal_cayley),
    cell_case(orthogonal_householder),
    cell_case(Tied, shape=(BATCH, HIDDEN)),
    cell_case(EchoState, carried),
    cell_case(AdaptiveLIF, carried, lambda b: (zeros(b), zeros(b), zeros(b)), spikes=True),
    cell_case(StraightThrough, carried, lambda b: (zeros(b), zeros(b)), spikes=True),
)
