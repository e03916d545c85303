"""Linear recurrent units, whose recurrence is a diagonal matrix of complex numbers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Recurrence(nn.Module):
    """`h' = λ h + γ B u` with `|λ|` in 0.9 to 0.999 before training.

    Args:
        inputs: elements of `u`.
        states: complex elements of `h`.
    """

    def __init__(self, inputs: int, states: int) -> None:
        super().__init__()
        size = torch.rand(states) * 0.099 + 0.9
        self.nu_log = nn.Parameter((-size.log()).log())
        self.theta_log = nn.Parameter((torch.rand(states) * math.pi / 10 + 1e-3).log())
        self.B = nn.Parameter(complex_normal(states, inputs) / math.sqrt(2 * inputs))

    def forward(self, h: Tensor, u: Tensor) -> Tensor:
        """The next state."""
        decay = torch.exp(torch.complex(-self.nu_log.exp(), self.theta_log.exp()))
        gamma = (1 - decay.abs() ** 2).sqrt()
        return decay * h + gamma * (u.to(self.B.dtype) @ self.B.T)

    def start(self, xs: Tensor) -> Tensor:
        """A state of zeros."""
        return torch.zeros(xs.shape[1], self.B.shape[0], dtype=self.B.dtype)


def complex_normal(*shape: int) -> Tensor:
    """Complex numbers whose parts are normal."""
    return torch.complex(torch.randn(*shape), torch.randn(*shape))


class LRULayer(nn.Module):
    """A linear recurrent unit with a gated readout and a residual."""

    def __init__(self, width: int, states: int) -> None:
        super().__init__()
        self.recurrence = Recurrence(width, states)
        self.C = nn.Parameter(complex_normal(width, states) / math.sqrt(states))
        self.D = nn.Parameter(torch.randn(width))
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, 2 * width)

    def forward(self, xs: Tensor) -> Tensor:
        """(T, batch, width) to the same."""
        h = self.recurrence.start(xs)
        outputs = []
        for x in xs:
            u = self.norm(x)
            h = self.recurrence(h, u)
            y = (h @ self.C.T).real + self.D * u
            outputs.append(x + F.glu(self.gate(F.gelu(y))))
        return torch.stack(outputs)


class LRUStack(nn.Module):
    """Linear recurrent units one above the other."""

    def __init__(self, inputs: int, width: int, states: int, outputs: int, layers: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(LRULayer(width, states) for _ in range(layers))
        self.decoder = nn.Linear(width, outputs)

    def forward(self, xs: Tensor) -> Tensor:
        """Logits of a sequence."""
        xs = self.encoder(xs)
        for layer in self.layers:
            xs = layer(xs)
        return self.decoder(xs)


class LRUReadout(nn.Module):
    """A linear recurrent unit that sees the inputs, read out by a layer of rectified units.

    No weight comes before the recurrence but those into it, so D-RTRL is exact.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.recurrence = Recurrence(inputs, hidden)
        self.hidden, self.out = nn.Linear(2 * hidden, hidden), nn.Linear(hidden, outputs)

    def forward(self, xs: Tensor) -> Tensor:
        """Outputs of a sequence."""
        h = self.recurrence.start(xs)
        outputs = []
        for x in xs:
            h = self.recurrence(h, x)
            outputs.append(self.out(F.relu(self.hidden(torch.cat([h.real, h.imag], -1)))))
        return torch.stack(outputs)
