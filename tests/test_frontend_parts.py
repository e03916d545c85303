"""Parts of models that took some care: attention, scripted modules, orthogonal and complex weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb

pytestmark = pytest.mark.usefixtures("without_single_steps")
B, H = 2, 4


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.fc(x) + h)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_modules() -> None:
    with pytest.raises(
        eb.NotSupportedError,
        match=r"`\(root\)` is a `Scripted` compiled by TorchScript.*Wrap the model with the module that was",
    ):
        eb.wrap(torch.jit.script(Scripted()))
    for part in (nn.GRU(H, H), nn.Sequential(nn.Linear(H, H), nn.Tanh())):
        with pytest.raises(
            eb.NotSupportedError, match="`0` is a `(GRU|Sequential)` compiled by TorchScript"
        ):
            eb.wrap(nn.Sequential(torch.jit.script(part), nn.RNN(H, H)))


class Complex(nn.Module):
    """A rotating, decaying state, as state-space models have; read out as a real or as a complex
    number.
    """

    def __init__(self, real: bool) -> None:
        super().__init__()
        self.turn = nn.Parameter(
            0.8 * torch.exp(1j * torch.linspace(0.1, 1.0, H)).to(torch.complex128)
        )
        self.inp = nn.Parameter(torch.randn(H, H, dtype=torch.complex128))
        self.real, self.h = real, None

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(x.shape[0], H, dtype=torch.complex128) if self.h is None else self.h
        self.h = self.turn * h + x.to(torch.complex128) @ self.inp
        return self.h.real if self.real else self.h


@pytest.mark.parametrize("real", [True, False])
def test_complex_parameters_follow_torchs_convention(real: bool) -> None:
    report = eb.verify(Complex(real), torch.randn(B, H).double(), tolerance=1e-10)
    assert report.ok and not report.dead and set(report.gradients) == {"turn", "inp", "input"}


@pytest.mark.parametrize("form", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_weights_are_trained_through_their_map(form: str) -> None:
    cell = nn.utils.parametrizations.orthogonal(nn.RNNCell(H, H), "weight_hh", orthogonal_map=form)
    data = torch.randn(6, B, H), torch.randn(6, B, H)
    report = eb.check_gradients(
        cell, *data, loss=nn.functional.mse_loss, rule="rtrl", allow_zero=[]
    )
    assert report.ok and report["parametrizations.weight_hh.original"].norm > 1e-3


def test_attention_over_the_state_learns_online() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(H, 2, batch_first=True)
            self.cell = nn.GRUCell(H, 2 * H)
            self.h = None

        def forward(self, x: Tensor) -> Tensor:
            tokens = (x.new_zeros(x.shape[0], 2 * H) if self.h is None else self.h).view(-1, 2, H)
            mixed = tokens + self.attention(tokens, tokens, tokens)[0]
            self.h = self.cell(x, mixed.reshape(-1, 2 * H))
            return self.h

    data = torch.randn(6, B, H), torch.randn(6, B, 2 * H)
    report = eb.check_gradients(Attends(), *data, loss=nn.functional.mse_loss, rule="rtrl")
    assert report.ok and report["attention.in_proj_weight"].norm > 1e-4


@torch.jit.script
def scripted_decay(v: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.8 * v + x * torch.sigmoid(x))


def test_scripted_functions_keep_their_gradient_after_they_were_optimised() -> None:
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.v = nn.Linear(H, H).double(), None

        def forward(self, x: Tensor) -> Tensor:
            v = x.new_zeros(x.shape[0], H) if self.v is None else self.v
            self.v = scripted_decay(v, self.fc(x))
            return self.v

    module, x = Calls(), torch.randn(B, H).double()
    for _ in range(5):
        module(x)
    module.v = None
    report = eb.verify(module, x)
    assert report.ok and not report.dead
