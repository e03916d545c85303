"""State-space models and modern recurrences, complex ones among them, learned online.

Eleven cells as their papers write one time step. Each is plain torch; `forward(x, state=None)`
gives the output and the new state. The script learns a memory task with the linear recurrent unit,
whose state and weights are complex, by D-RTRL: its recurrence is diagonal, so the online gradient
is exact and its memory does not grow with time. Then it prints, for every cell, which parameters
are certified exact and what was measured against torch's backpropagation through time.

    python examples/state_space.py
"""

from __future__ import annotations

import argparse
import math

import optax
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import etrace_bridge as eb


def _uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    return low + (high - low) * torch.rand(*shape)


def _complex(*shape: int) -> Tensor:
    return torch.complex(torch.randn(*shape), torch.randn(*shape)) / math.sqrt(2 * shape[-1])


class LRU(nn.Module):
    """The linear recurrent unit (Orvieto et al. 2023): `h = λ h + γ B x`, `y = Re(C h) + D x`,
    complex and diagonal.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        size, turn = _uniform(hidden, low=0.6, high=0.95), _uniform(hidden, low=0.1, high=1.5)
        self.nu_log = nn.Parameter((-size.log()).log())
        self.theta_log = nn.Parameter(turn.log())
        self.gamma_log = nn.Parameter((1 - size**2).sqrt().log())
        self.B, self.C = (
            nn.Parameter(_complex(hidden, inputs)),
            nn.Parameter(_complex(outputs, hidden)),
        )
        self.D = nn.Parameter(torch.randn(outputs, inputs) / math.sqrt(inputs))

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if h is None:
            h = torch.zeros(x.shape[0], self.B.shape[0], dtype=self.B.dtype)
        decay = torch.exp(torch.complex(-self.nu_log.exp(), self.theta_log.exp()))
        h = decay * h + self.gamma_log.exp() * (x.to(self.B.dtype) @ self.B.T)
        return (h @ self.C.T).real + x @ self.D.T, h


class S4D(nn.Module):
    """The diagonal S4 layer (Gu et al. 2022) in step form: N complex modes for each channel,
    zero-order hold.
    """

    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.log_dt = nn.Parameter(_uniform(channels, low=-2.0, high=-0.5))
        self.A_log = nn.Parameter(torch.full((channels, modes), math.log(0.5)))
        self.A_imag = nn.Parameter(math.pi * torch.arange(1, modes + 1).float().repeat(channels, 1))
        self.C = nn.Parameter(torch.view_as_real(_complex(channels, modes)))
        self.D = nn.Parameter(torch.randn(channels))

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        dt, A = self.log_dt.exp()[:, None], torch.complex(-self.A_log.exp(), self.A_imag)
        if h is None:
            h = torch.zeros(x.shape[0], *A.shape, dtype=A.dtype)
        decay = torch.exp(dt * A)
        h = decay * h + (decay - 1) / A * x[..., None]
        y = 2 * torch.einsum("bcn,cn->bc", h, torch.view_as_complex(self.C)).real
        return F.gelu(y + self.D * x), h


class S5(nn.Module):
    """The S5 layer (Smith et al. 2023) in step form: one complex diagonal state for all channels."""

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.Lambda = nn.Parameter(
            torch.complex(-_uniform(states, low=0.3), torch.linspace(0.5, 3.0, states))
        )
        self.B = nn.Parameter(torch.view_as_real(_complex(states, channels)))
        self.C = nn.Parameter(torch.view_as_real(_complex(channels, states)))
        self.D, self.log_step = (
            nn.Parameter(torch.randn(channels)),
            nn.Parameter(_uniform(states, low=-2.0, high=-0.5)),
        )

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if h is None:
            h = torch.zeros(x.shape[0], len(self.Lambda), dtype=self.Lambda.dtype)
        decay = torch.exp(self.Lambda * self.log_step.exp())
        B = ((decay - 1) / self.Lambda)[:, None] * torch.view_as_complex(self.B)
        h = decay * h + torch.einsum("sc,bc->bs", B, x.to(B.dtype))
        return (
            2 * torch.einsum("cs,bs->bc", torch.view_as_complex(self.C), h)
        ).real + self.D * x, h


class ComplexRetention(nn.Module):
    """Retention (Sun et al. 2023) with a complex decay: `S = γ e^{iθ} S + k ⊗ v`, `y = Re(q S)`."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(inputs, width, bias=False) for _ in range(3))
        self.decay, self.turn = (
            nn.Parameter(_uniform(width, low=1.0, high=2.0)),
            nn.Parameter(_uniform(width, low=0.1, high=1.0)),
        )

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        turn = torch.polar(self.decay.sigmoid(), self.turn)[:, None]
        S = torch.zeros(*k.shape, v.shape[-1], dtype=turn.dtype) if state is None else state
        S = turn * S + k[..., None] * v[..., None, :]
        return torch.einsum("bd,bde->be", q.to(S.dtype), S).real, S


class Retention(nn.Module):
    """Retention as RetNet has it: a fixed real decay."""

    def __init__(self, inputs: int, width: int, decay: float = 0.9) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(inputs, width, bias=False) for _ in range(3))
        self.decay = decay

    def forward(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        S = torch.zeros(*k.shape, v.shape[-1], dtype=x.dtype) if state is None else state
        S = self.decay * S + k.unsqueeze(-1) * v.unsqueeze(-2)
        return torch.einsum("bd,bde->be", q, S), S


class Selective(nn.Module):
    """The selective state-space step of Mamba (Gu & Dao 2023): step size, input and output weights
    depend on the input.
    """

    def __init__(self, channels: int, states: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.arange(1, states + 1).float().log().repeat(channels, 1))
        self.select, self.dt, self.D = (
            nn.Linear(channels, 2 * states),
            nn.Linear(channels, channels),
            nn.Parameter(torch.ones(channels)),
        )

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        B, C = self.select(x).chunk(2, dim=-1)
        dt, A = F.softplus(self.dt(x)), -self.A_log.exp()
        h = torch.zeros(x.shape[0], *A.shape, dtype=x.dtype) if h is None else h
        h = torch.exp(dt[..., None] * A) * h + (dt * x)[..., None] * B[:, None, :]
        return (h * C[:, None, :]).sum(-1) + self.D * x, h


class RWKV(nn.Module):
    """The time-mixing step of RWKV-4 (Peng et al. 2023), with the running maximum that keeps its
    exponentials finite.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(_uniform(3, width))
        self.decay, self.bonus = (
            nn.Parameter(_uniform(width, low=-1.0)),
            nn.Parameter(torch.randn(width)),
        )
        self.key, self.value, self.receptance, self.output = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if state is None:
            state = (
                torch.zeros_like(x),
                torch.zeros_like(x),
                torch.zeros_like(x),
                torch.full_like(x, -30.0),
            )
        last, top, bottom, most = state
        xk, xv, xr = (x * m + last * (1 - m) for m in self.mix)
        k, v, r = self.key(xk), self.value(xv), self.receptance(xr).sigmoid()
        here = torch.maximum(most, self.bonus + k)
        old, new = torch.exp(most - here), torch.exp(self.bonus + k - here)
        y = self.output(r * (old * top + new * v) / (old * bottom + new))
        faded = most - self.decay.exp()
        later = torch.maximum(faded, k)
        old, new = torch.exp(faded - later), torch.exp(k - later)
        return y, (x, old * top + new * v, old * bottom + new, later)


class RGLRU(nn.Module):
    """The real-gated linear recurrent unit of Griffin (De et al. 2024)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.Lambda, self.gates = (
            nn.Parameter(_uniform(width, low=-2.0, high=0.0)),
            nn.Linear(width, 2 * width),
        )

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        recurrence, entry = self.gates(x).sigmoid().chunk(2, dim=-1)
        log_a = -4.0 * recurrence * F.softplus(self.Lambda)
        h = torch.zeros_like(x) if h is None else h
        h = log_a.exp() * h + torch.sqrt(-torch.expm1(2 * log_a)) * (entry * x)
        return h, h


class MinGRU(nn.Module):
    """The minimal GRU (Feng et al. 2024): its gates do not see the state."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.both = nn.Linear(inputs, 2 * hidden)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        gate, candidate = self.both(x).chunk(2, dim=-1)
        z = gate.sigmoid()
        h = torch.zeros_like(z) if h is None else h
        h = (1 - z) * h + z * candidate
        return h, h


class SLSTM(nn.Module):
    """The scalar cell of xLSTM (Beck et al. 2024): exponential gates and their stabiliser, with
    recurrent weights.
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.W, self.R = nn.Linear(inputs, 4 * hidden), nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if state is None:
            zero = x.new_zeros(x.shape[0], self.R.in_features)
            state = (zero, zero.clone(), zero.clone(), zero.clone())
        h, c, n, m = state
        z, i, f, o = (self.W(x) + self.R(h)).chunk(4, dim=-1)
        log_f = F.logsigmoid(f)
        new_m = torch.maximum(log_f + m, i)
        entry, keep = torch.exp(i - new_m), torch.exp(log_f + m - new_m)
        c, n = keep * c + entry * torch.tanh(z), keep * n + entry
        h = torch.sigmoid(o) * c / n.clamp(min=1e-6)
        return h, (h, c, n, new_m)


class MLSTM(nn.Module):
    """The matrix cell of xLSTM: `C = f C + i v ⊗ k`, read by a query, normalised and stabilised."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(inputs, width) for _ in range(3))
        self.gates, self.o = nn.Linear(inputs, 2), nn.Linear(inputs, width)

    def forward(
        self, x: Tensor, state: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, k, v = self.q(x), self.k(x) / math.sqrt(self.k.out_features), self.v(x)
        if state is None:
            state = (
                x.new_zeros(*v.shape, k.shape[-1]),
                torch.zeros_like(k),
                x.new_zeros(x.shape[0], 1),
            )
        C, n, m = state
        i, f = self.gates(x).chunk(2, dim=-1)
        log_f = F.logsigmoid(f)
        new_m = torch.maximum(log_f + m, i)
        entry, keep = torch.exp(i - new_m), torch.exp(log_f + m - new_m)
        C = keep[..., None] * C + entry[..., None] * (v[..., None] * k[:, None, :])
        n = keep * n + entry * k
        bottom = torch.maximum((n * q).sum(-1, keepdim=True).abs(), torch.exp(-new_m))
        return torch.sigmoid(self.o(x)) * torch.einsum("bvk,bk->bv", C, q) / bottom, (C, n, new_m)


CELLS = {
    "LRU": lambda: LRU(3, 4, 3),
    "S4D": lambda: S4D(3, 2),
    "S5": lambda: S5(3, 4),
    "complex retention": lambda: ComplexRetention(3, 3),
    "retention": lambda: Retention(3, 3),
    "selective": lambda: Selective(3, 2),
    "RWKV": lambda: RWKV(3),
    "RG-LRU": lambda: RGLRU(3),
    "minGRU": lambda: MinGRU(3, 4),
    "sLSTM": lambda: SLSTM(3, 4),
    "mLSTM": lambda: MLSTM(3, 3),
}


def learn(updates: int, batch: int = 16, length: int = 12, delay: int = 3) -> tuple[float, float]:
    """Learn to repeat the input of some steps ago, online, with the complex LRU; give the loss at
    the beginning and at the end.
    """
    model = LRU(3, 16, 3)
    learner = eb.OnlineLearner(model, rule="d_rtrl", loss=F.mse_loss, optimizer=optax.adam(0.02))
    losses = []
    for _ in range(updates):
        xs = torch.randn(length, batch, 3)
        targets = torch.cat([torch.zeros(delay, batch, 3), xs[:-delay]])
        losses.append(learner.update(xs, targets).loss)
    learner.sync_to_torch()
    print(
        f"LRU, repeating the input of {delay} steps ago: loss {losses[0]:.3f} -> {losses[-1]:.3f}; "
        f"B is {model.B.dtype}{tuple(model.B.shape)}"
    )
    return losses[0], losses[-1]


def compare(name: str, steps: int = 6, batch: int = 2) -> eb.GradientReport:
    """Compare the online gradient of one cell with torch's backpropagation through time."""
    model = CELLS[name]()
    xs = torch.randn(steps, batch, 3)
    with torch.no_grad():
        outputs = model(xs[0])[0].shape[-1]
    return eb.check_gradients(
        model, xs, torch.randn(steps, batch, outputs), loss=F.mse_loss, rule="d_rtrl"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer updates and cells, for tests")
    small = parser.parse_args().small
    torch.manual_seed(0)
    first, last = learn(updates=40 if small else 300)
    assert last < (0.95 if small else 0.5) * first
    print(f"\n{'cell':18} {'cosine':>8} {'rel. error':>11}   certified exact")
    for name in ("LRU", "mLSTM") if small else CELLS:
        report = compare(name)
        exact = [n for n, p in report.parameters.items() if p.verdict == "exact"]
        shown = (
            "all parameters"
            if len(exact) == len(report.parameters)
            else f"{len(exact)} of {len(report.parameters)} parameters"
        )
        print(f"{name:18} {report.cosine:8.4f} {report.relative_error:11.1e}   {shown}")
        assert report.ok, str(report)


if __name__ == "__main__":
    main()
