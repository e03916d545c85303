"""float64 stays float64: numbers that float32 cannot hold, in every op of the table and in whole
models, against torch.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import etrace_bridge as eb
from etrace_bridge.frontend.ops import lookup
from op_cases import THIRD, Call, compare

pytestmark = pytest.mark.usefixtures("users_compiler")

# ---- the op table; torch's own samples, with other numbers, are in test_ops.py


def _x(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.rand(shape, dtype=torch.float64, generator=generator) * 4 - 2).requires_grad_()


# the first is rounded by torch itself
_scalar32, _scalar64 = torch.tensor(THIRD), torch.tensor(THIRD, dtype=torch.float64)
_ARITHMETIC = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.remainder,
    torch.fmod,
    torch.maximum,
)
BY_HAND = [
    *[Call(f, (_x(7), other), {}) for f in _ARITHMETIC for other in (_scalar32, _scalar64)],
    *[Call(f, (_x(7), THIRD), {}) for f in (torch.mul, torch.div, torch.remainder, torch.fmod, torch.clamp_min, torch.float_power)],
    Call(torch.pow, (_x(7).abs(), 2 + THIRD), {}), Call(torch.pow, (1 + THIRD, _x(7)), {}), Call(torch.xlogy, (_x(7), 1 + THIRD), {}),
    Call(torch.clamp, (_x(7), -THIRD, 1 + THIRD), {}), Call(F.leaky_relu, (_x(7), THIRD), {}), Call(F.elu, (_x(7), 1 + THIRD), {}),
    Call(F.celu, (_x(7), 1 + THIRD), {}), Call(F.selu, (_x(7),), {}), Call(F.gelu, (_x(7),), {}), Call(F.hardsigmoid, (_x(7),), {}),
    Call(F.gelu, (_x(7),), {"approximate": "tanh"}), Call(F.hardswish, (_x(7),), {}), Call(F.mish, (_x(7),), {}),
    Call(F.softplus, (_x(7), 1 + THIRD, THIRD), {}), Call(torch.where, (_x(7) > 0, _x(7), THIRD), {}), Call(F.silu, (_x(7),), {}),
    Call(torch.masked_fill, (_x(7), _x(7) > 0, THIRD), {}), Call(torch.Tensor.fill_, (_x(7), THIRD), {}),
    Call(F.cross_entropy, (_x(3, 5), torch.tensor([1, 2, 0])), {"label_smoothing": THIRD}),
    Call(F.smooth_l1_loss, (_x(7), _x(1, 7)[0]), {"beta": 1 + THIRD}), Call(F.rrelu, (_x(7), THIRD, 0.3 + THIRD), {}),
    Call(torch.Tensor.__rsub__, (_x(7), THIRD), {}), Call(torch.Tensor.__rdiv__, (_x(7), THIRD), {}),
    Call(torch.add, (_x(7), _x(7)), {"alpha": THIRD}), Call(torch.lerp, (_x(7), _x(1, 7)[0], _scalar64), {}),
    Call(torch.nan_to_num, (_x(7), THIRD), {}), Call(torch.Tensor.__setitem__, (_x(7), slice(2, 4), THIRD), {}),
]  # fmt: skip


def test_numbers_and_scalar_tensors_in_arithmetic() -> None:
    compare([(lookup(c.function), c) for c in BY_HAND], with_grad=True)


# ---- whole models


class SGU(nn.Module):
    """The Simple Gated Unit of Gao and Glowacka, its state in a dict: softplus for the candidate, a
    hard sigmoid for the gate.
    """

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)
        self.wz = nn.Linear(4, 4) if deep else nn.Linear(3, 4)
        self.uz, self.deep, self.memory = nn.Linear(4, 4, bias=False), deep, {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.memory.get("h", torch.zeros(x.shape[0], 4, dtype=x.dtype))
        squashed = self.w1(x)
        g = (
            torch.tanh(self.w2(squashed * h))
            if self.deep
            else F.softplus(self.w2(squashed * h), 1.1, 0.3)
        )
        z = F.hardsigmoid(self.wz(g if self.deep else x) + self.uz(h))
        self.memory["h"] = (1 - z) * h + z * F.softplus(g, 0.9) * torch.tensor(THIRD * 20)
        return self.memory["h"]


class Constants(nn.Module):
    """Numbers from everywhere: Python floats, scalar tensors, buffers, tensors made of floats."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(3, 4)
        # `.double()` keeps its rounded values
        self.register_buffer("decay", torch.tensor([0.9, 0.8, 0.7, 0.6]) + THIRD)
        self.scale, self.gain, self.h = 1 + THIRD, torch.tensor(1.1), None

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], 4) if self.h is None else self.h
        drive = (
            self.w(x) * self.scale * self.gain
            + torch.full_like(h, THIRD)
            + x.new_tensor([0.1, 0.2, 0.3, 0.4])
        )
        steps = (
            torch.linspace(0.1, 1, 4, dtype=x.dtype)
            + torch.arange(0, 0.4, 0.1)[:4]
            + torch.tensor([0.1, 0.2, 0.3, 0.4])
        )
        self.h = (
            self.decay * h
            + torch.sigmoid(drive / 3) * steps
            - 0.1 * F.hardswish(drive).clamp(-THIRD, 0.7)
        )
        return self.h


@pytest.mark.parametrize(
    "make", [lambda: SGU(False), lambda: SGU(True), Constants], ids=["SGU", "DSGU", "constants"]
)
def test_models_in_float64(make: Any) -> None:
    """Public gated cells were 3e-8 off: the derivative of torch's `hardsigmoid` has a 1/6 of single
    precision.
    """
    model = make().double()
    xs, targets = torch.randn(6, 2, 3).double(), torch.randn(6, 2, 4).double()
    report = eb.check_gradients(
        model, xs, targets, F.mse_loss, rule="rtrl", chunk=2, tolerance=1e-13
    )
    assert report.ok, report
    assert all(p.past > 1e-3 for p in report if "w" in p.name), "the past takes part"
