"""Online learning by definition, in plain torch: dense Jacobians of a small cell, and an update at
every step.

A cell is one function `(parameters, x, state, seen) -> (exit, new state)`. `state` and `seen` are
the same old state, (S, batch, units), read twice: by element-wise code, and by recurrent products.
What separates the rules is which of the two they follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

B, I, H, OUT = 2, 3, 4, 3  # noqa: E741
KAPPA, ALPHA = 0.6, 0.8
Parameters = dict[str, Tensor]


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


class Spike(torch.autograd.Function):
    """A step with the derivative of a fast sigmoid."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        return grad / (1 + 2 * ctx.saved_tensors[0].abs()) ** 2


# ---- families: a torch module for the learner, and its cell as a function


class Recurrent(nn.Module):
    """One of torch's recurrent layers and a readout, over whole sequences."""

    def __init__(self, layer: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.out = layer(I, H), nn.Linear(H, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


class Leaky(nn.Module):
    """Leaky integrators without recurrent weights."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out, self.v = nn.Linear(I, H), nn.Linear(H, OUT), None

    def forward(self, x: Tensor) -> Tensor:
        v = torch.zeros(x.shape[0], H) if self.v is None else self.v
        self.v = 0.8 * v + self.fc(x)
        return self.out(torch.tanh(self.v))


class Spiking(nn.Module):
    """Recurrent leaky integrate-and-fire units with a surrogate, reset by subtraction."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(I, H)
        self.rec = nn.Linear(H, H)
        self.out = nn.Linear(H, OUT)
        self.v = None

    def forward(self, x: Tensor) -> Tensor:
        v = torch.zeros(x.shape[0], H) if self.v is None else self.v
        z = Spike.apply(v - 0.3)
        self.v = 0.9 * v + self.fc(x) + self.rec(z) - 0.3 * z.detach()
        return self.out(Spike.apply(self.v - 0.3))


Products = list[tuple[str, str, Tensor, Tensor]]  # weight, bias, feature, output


def _linear(p: Parameters, made: Products, weight: str, bias: str, x: Tensor) -> Tensor:
    y = x @ p[weight].T + p[bias]
    made.append((weight, bias, x, y))
    return y


def _torch_layer(p: Parameters, made: Products, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    return (
        _linear(p, made, "rnn.weight_ih_l0", "rnn.bias_ih_l0", x),
        _linear(p, made, "rnn.weight_hh_l0", "rnn.bias_hh_l0", h),
    )


def gru(
    p: Parameters, made: Products, x: Tensor, state: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """`nn.GRU`'s equations."""
    (r, z, n), (hr, hz, hn) = (y.chunk(3, -1) for y in _torch_layer(p, made, x, seen[0]))
    z = torch.sigmoid(z + hz)
    h = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * state[0]
    return h, h[None]


def lstm(
    p: Parameters, made: Products, x: Tensor, state: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """`nn.LSTM`'s equations."""
    given, kept = _torch_layer(p, made, x, seen[0])
    i, f, g, o = (given + kept).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, torch.stack([h, c])


def rnn(
    p: Parameters, made: Products, x: Tensor, state: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """`nn.RNN`'s equation; its element-wise part reads no old state."""
    given, kept = _torch_layer(p, made, x, seen[0])
    h = torch.tanh(given + kept)
    return h, h[None]


def leaky(
    p: Parameters, made: Products, x: Tensor, state: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """`Leaky` as a function."""
    v = 0.8 * state[0] + _linear(p, made, "fc.weight", "fc.bias", x)
    return torch.tanh(v), v[None]


def spiking(
    p: Parameters, made: Products, x: Tensor, state: Tensor, seen: Tensor
) -> tuple[Tensor, Tensor]:
    """`Spiking` as a function."""
    current = _linear(p, made, "fc.weight", "fc.bias", x)
    current = current + _linear(p, made, "rec.weight", "rec.bias", Spike.apply(seen[0] - 0.3))
    v = 0.9 * state[0] + current - 0.3 * Spike.apply(state[0] - 0.3).detach()
    return Spike.apply(v - 0.3), v[None]


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        make: the torch module that the learner gets.
        cell: its cell as a function.
        states: names of its states as the learner has them.
    """

    make: Callable[[], nn.Module]
    cell: Callable[..., tuple[Tensor, Tensor]]
    states: tuple[str, ...]


FAMILIES = {
    "GRU": Family(lambda: Recurrent(nn.GRU), gru, ("rnn.h_l0",)),
    "LSTM": Family(lambda: Recurrent(nn.LSTM), lstm, ("rnn.h_l0", "rnn.c_l0")),
    "RNN": Family(lambda: Recurrent(nn.RNN), rnn, ("rnn.h_l0",)),
    "leaky": Family(Leaky, leaky, ("v",)),
    "spiking": Family(Spiking, spiking, ("v",)),
}


# ---- one step, taken apart


@dataclass
class Step:
    """Values and dense derivatives of one step; N = numbers in the state, P = numbers in the cell's
    parameters.

    Attributes:
        loss: the step's loss.
        exit: what the readout reads.
        state: the new state.
        products: weight, bias, feature and output of each product.
        direct: gradients of the loss by name, old state held.
        signal: `dl/dexit`.
        core: `d new state / d old state` through element-wise code, (N, N).
        whole: the same through products too.
        b_core, b_whole: `dl/d old state`, likewise.
        by_theta: `d new state / dθ`, (N, P).
        exit_by_state, exit_by_theta: derivatives of the exit, through element-wise code.
        by_output: `d new state / dy` for each product, (N, B, rows).
    """

    loss: Tensor
    exit: Tensor
    state: Tensor
    products: Products
    direct: Parameters
    signal: Tensor
    core: Tensor
    whole: Tensor
    b_core: Tensor
    b_whole: Tensor
    by_theta: Tensor
    exit_by_state: Tensor
    exit_by_theta: Tensor
    by_output: list[Tensor]


def _rows(values: Tensor, by: list[Tensor]) -> list[Tensor]:
    """`d values / d by` for each of several tensors, as (numbers in values, numbers in it)."""
    rows = [
        [
            _zero().expand(t.numel()) if g is None else g.reshape(-1)
            for t, g in zip(
                by, torch.autograd.grad(v, by, retain_graph=True, allow_unused=True), strict=True
            )
        ]
        for v in values.reshape(-1)
    ]
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def take_apart(
    cell: Callable, p: Parameters, x: Tensor, old: Tensor, loss: Callable[[Tensor], Tensor]
) -> Step:
    """Run one step and differentiate it."""
    state, seen = old.detach().requires_grad_(), old.detach().requires_grad_()
    made: Products = []
    exit_, new = cell(p, made, x, state, seen)
    value = loss(exit_ @ p["out.weight"].T + p["out.bias"])
    grads = torch.autograd.grad(
        value, [exit_, state, seen, *p.values()], retain_graph=True, allow_unused=True
    )
    signal, by_state, by_seen, *direct = (_zero() if g is None else g for g in grads)
    b_core, b_seen = (b.expand_as(old).reshape(-1) for b in (by_state, by_seen))
    theta = [t for name, t in p.items() if not name.startswith("out.")]
    outputs = [y for *_, y in made]
    core, through, *rest = _rows(new, [state, seen, *outputs, *theta])
    exit_by_state, *exit_rest = _rows(exit_, [state, *theta])
    return Step(
        value.detach(), exit_.detach(), new.detach(), [(w, b, f.detach(), y.detach()) for w, b, f, y in made],
        {name: g.expand_as(t) for (name, t), g in zip(p.items(), direct, strict=True)}, signal, core, core + through, b_core, b_core + b_seen,
        torch.cat(rest[len(outputs) :], 1), exit_by_state, torch.cat(exit_rest, 1),
        [r.reshape(new.numel(), *y.shape) for r, y in zip(rest, outputs, strict=False)],
    )  # fmt: skip


# ---- the rules


@dataclass
class Influence:
    """Rules whose memory is `J ≈ dh/dθ`, (N, P).

    RTRL: `J ← A J + ∂h/∂θ` and `g = direct + b J`, A and b of the whole step. D-RTRL: the same with
    A of the element-wise code. SnAp-1: A of the whole step, J only where a parameter reaches a unit
    within one step.
    """

    follow: str
    credit: str
    mask: Tensor | None = None
    J: Tensor = field(default_factory=_zero)

    def gradients(self, s: Step) -> Parameters:
        b = s.b_whole if self.credit == "step" else s.b_core
        J = self.J.expand_as(s.by_theta)
        past = b @ J
        self.J = (s.whole if self.follow == "whole" else s.core) @ J + s.by_theta
        if self.mask is not None:
            self.J = self.J * self.mask
        return _added(s.direct, past)


@dataclass
class Filtered:
    """e-prop: `g = L_t ē_t`, `ē_t = κ ē_(t-1) + e_t`, e_t the exit's derivative along element-wise
    code; the readout's own gradient.
    """

    J: Tensor = field(default_factory=_zero)
    e: Tensor = field(default_factory=_zero)

    def gradients(self, s: Step) -> Parameters:
        J = self.J.expand_as(s.by_theta)
        self.e = KAPPA * self.e + s.exit_by_state @ J + s.exit_by_theta
        self.J = s.core @ J + s.by_theta
        readout = {
            name: g if name.startswith("out.") else torch.zeros_like(g)
            for name, g in s.direct.items()
        }
        return _added(readout, s.signal.reshape(-1) @ self.e)


@dataclass
class Factored:
    """pp-prop: `f ← α D f + (1-α) dh/dy`, `x̄ ← α x̄ + x`, `g_W = direct + (b f / n)ᵀ x̄`; a bias
    is a column with feature 1.
    """

    credit: str
    f: list[Tensor] = field(default_factory=list)
    x_bar: list[Tensor] = field(default_factory=list)
    n: float = 0.0

    def gradients(self, s: Step) -> Parameters:
        b, grads = (s.b_whole if self.credit == "step" else s.b_core), dict(s.direct)
        self.f = self.f or [torch.zeros_like(d) for d in s.by_output]
        self.x_bar = self.x_bar or [torch.zeros_like(x) for _, _, x, _ in s.products]
        for k, (weight, bias, x, _) in enumerate(s.products):
            if self.n:
                asked = torch.einsum("n,nbr->br", b, self.f[k]) / self.n
                grads[weight] = grads[weight] + asked.T @ self.x_bar[k]
                grads[bias] = grads[bias] + asked.sum(0) * self.n / (1 - ALPHA)
            self.f[k] = (
                ALPHA * torch.einsum("nm,mbr->nbr", s.core, self.f[k])
                + (1 - ALPHA) * s.by_output[k]
            )
            self.x_bar[k] = ALPHA * self.x_bar[k] + x
        self.n = ALPHA * self.n + 1 - ALPHA
        return grads


class Forgetful:
    """BPTT in chunks of one step: nothing of the past."""

    def gradients(self, s: Step) -> Parameters:
        return dict(s.direct)


def _added(grads: Parameters, flat: Tensor) -> Parameters:
    """Gradients of the cell's parameters, and a flat vector of the same, added."""
    names = [name for name in grads if not name.startswith("out.")]
    pieces = flat.split([grads[name].numel() for name in names])
    return {
        **grads,
        **{
            name: grads[name] + piece.view_as(grads[name])
            for name, piece in zip(names, pieces, strict=True)
        },
    }


def one_step_reach(cell: Callable, p: Parameters, states: int) -> Tensor:
    """Tell which parameters reach which units within one step, (N, P), at a random point where
    nothing is zero.
    """
    made = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.rand(*shape, generator=made, dtype=torch.float64) + 0.5
    reach = take_apart(cell, p, draw(B, I), draw(states, B, H), torch.sum).by_theta != 0
    units = reach.reshape(states, B, H, -1).any(0).any(0)
    return units.expand(states, B, H, -1).reshape(reach.shape)


def make_rule(
    name: str, family: Family, p: Parameters
) -> Influence | Filtered | Factored | Forgetful:
    """The rule of a name, with an empty memory."""
    if name == "snap1":
        return Influence("whole", "step", one_step_reach(family.cell, p, len(family.states)))
    return {
        "rtrl": lambda: Influence("whole", "step"), "d_rtrl step": lambda: Influence("core", "step"),
        "d_rtrl core": lambda: Influence("core", "core"), "d_rtrl chunk": lambda: Influence("core", "step"),
        "eprop": Filtered, "pp_prop": lambda: Factored("step" if family.cell is rnn else "core"), "bptt": Forgetful,
    }[name]()  # fmt: skip


# ---- a learner


class Online:
    """Learns online by definition, in float64.

    Args:
        model: a module of the family, whose weights are copied.
        family: the model's family.
        rule: name of the rule.
        optimizer: makes a torch optimizer of parameters.
    """

    def __init__(self, model: nn.Module, family: Family, rule: str, optimizer: Callable) -> None:
        self.p = {
            name: t.detach().double().requires_grad_() for name, t in model.named_parameters()
        }
        self.family, self.rule = family, make_rule(rule, family, self.p)
        self.optimizer = optimizer(list(self.p.values()))
        self.state = torch.zeros(len(family.states), B, H, dtype=torch.float64)

    def step(self, x: Tensor, target: Tensor) -> float:
        """One step with an update; gives its loss."""
        s = take_apart(
            self.family.cell,
            self.p,
            x.double(),
            self.state,
            lambda y: F.mse_loss(y, target.double()),
        )
        for name, grad in self.rule.gradients(s).items():
            self.p[name].grad = grad.detach()
        self.optimizer.step()
        self.state = s.state
        return s.loss.item()
