"""Low-rank RTRL by its definition, with dense matrices and an SVD, in torch and numpy, without the
compiler or the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import etrace_bridge as eb
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.rules import Carry, Chunk, Rule
from etrace_bridge.schedule.chunk import run_chunk
from quick_jit import quick_jit

INPUTS = 3


class Spike(torch.autograd.Function):
    """A step function with a smooth surrogate derivative."""

    @staticmethod
    def forward(ctx, v):
        ctx.save_for_backward(v)
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + 2 * v.abs()) ** 2


class LIF(nn.Module):
    """Layers of leaky neurons, recurrent or not; each layer's spike is the next one's input; a
    readout of the last.
    """

    def __init__(
        self, hidden: int, layers: int, recurrent: bool = True, decay: float | None = 0.85
    ):
        super().__init__()
        self.ff = nn.ModuleList(
            nn.Linear(INPUTS if k == 0 else hidden, hidden) for k in range(layers)
        )
        self.rec = (
            nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))
            if recurrent
            else None
        )
        self.out = nn.Linear(hidden, 2)
        decays = (
            torch.full((layers, hidden), decay)
            if decay is not None
            else torch.rand(layers, hidden) * 0.4 + 0.55
        )
        self.register_buffer("decay", decays.double())

    def forward(self, x, state=None):
        held = getattr(self, "held", False)
        state = (
            [torch.zeros(x.shape[0], self.out.in_features, dtype=x.dtype) for _ in self.ff]
            if state is None
            else state
        )
        new = []
        for k, layer in enumerate(self.ff):
            v = state[k]
            drive = layer(x.detach() if held else x)
            if self.rec is not None:
                spikes = Spike.apply(v - 0.3)
                drive = drive + self.rec[k](spikes.detach() if held else spikes)
            v = self.decay[k] * v + drive
            x = Spike.apply(v - 0.3)
            new.append(v)
        return self.out(x), new


class GRU(nn.Module):
    """A stack of GRU layers, written out so that products can be held."""

    def __init__(self, hidden: int, layers: int, scale: float = 1.0):
        super().__init__()
        self.ih = nn.ModuleList(
            nn.Linear(INPUTS if k == 0 else hidden, 3 * hidden) for k in range(layers)
        )
        self.hh = nn.ModuleList(nn.Linear(hidden, 3 * hidden) for _ in range(layers))
        self.out = nn.Linear(hidden, 2)
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(scale)

    def forward(self, x, state=None):
        held = getattr(self, "held", False)
        state = (
            [torch.zeros(x.shape[0], self.out.in_features, dtype=x.dtype) for _ in self.ih]
            if state is None
            else state
        )
        new = []
        for ih, hh, h in zip(self.ih, self.hh, state, strict=True):
            i_r, i_z, i_n = ih(x.detach() if held else x).chunk(3, -1)
            h_r, h_z, h_n = hh(h.detach() if held else h).chunk(3, -1)
            z = torch.sigmoid(i_z + h_z)
            x = (1 - z) * torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n) + z * h
            new.append(x)
        return self.out(x), new


class Encoded(nn.Module):
    """An encoder whose weights feed no state directly, before one layer of plain RNN."""

    def __init__(self, hidden: int):
        super().__init__()
        self.encoder = nn.Linear(INPUTS, 4)
        self.w = nn.Linear(4, hidden)
        self.u = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, 2)

    def forward(self, x, state=None):
        held = getattr(self, "held", False)
        h = (
            torch.zeros(x.shape[0], self.out.in_features, dtype=x.dtype)
            if state is None
            else state[0]
        )
        x = torch.tanh(self.encoder(x))
        h = torch.tanh(
            self.w(x.detach() if held else x) + self.u(h.detach() if held else h) + 0.5 * h
        )
        return self.out(h), [h]


@dataclass(frozen=True)
class Dense:
    """One batch element's steps as dense matrices; weights flat, hidden values of all layers in one
    vector.

    Attributes:
        F, J: derivatives of the new states by old states and by weights.
        D, C: the same with every product's data held constant.
        l_h, l_w: derivatives of the step's loss.
    """

    F: np.ndarray
    J: np.ndarray
    D: np.ndarray
    C: np.ndarray
    l_h: np.ndarray
    l_w: np.ndarray


def jacobian(outputs: torch.Tensor, inputs: list[torch.Tensor]) -> list[np.ndarray]:
    """Rows of derivatives, one reverse pass per output."""
    rows: list[list[torch.Tensor]] = [[] for _ in inputs]
    for y in outputs:
        grads = torch.autograd.grad(y, inputs, retain_graph=True, allow_unused=True)
        for row, x, g in zip(rows, inputs, grads, strict=True):
            row.append((torch.zeros_like(x) if g is None else g).reshape(-1))
    return [torch.stack(row).numpy() for row in rows]


class Reference:
    """A model, data, and the rule by definition."""

    def __init__(
        self, build: Callable[[], nn.Module], seed: int = 3, steps: int = 10, batch: int = 2
    ):
        torch.manual_seed(seed)
        self.model = build().double()
        self.xs = torch.randn(steps, batch, INPUTS, dtype=torch.float64)
        self.targets = torch.randn(steps, batch, 2, dtype=torch.float64)
        self.named = dict(self.model.named_parameters())
        self.sizes = [p.numel() for p in self.named.values()]
        self.steps = [self._linearise(b) for b in range(batch)]
        self.units = self._units()

    def loss(self, output, target):
        return ((output - target) ** 2).sum()

    def _linearise(self, b: int) -> list[Dense]:
        weights, steps = list(self.named.values()), []
        state = [s.detach() for s in self.model(self.xs[0, b : b + 1])[1]]
        state = [torch.zeros_like(s) for s in state]
        for x, target in zip(self.xs[:, b : b + 1], self.targets[:, b : b + 1], strict=True):
            old = [s.detach().requires_grad_() for s in state]
            found = []
            for held in (False, True):
                self.model.held = held
                output, new = self.model(x, old)
                by = jacobian(torch.cat([s.reshape(-1) for s in new]), [*old, *weights])
                found += [np.concatenate(by[: len(old)], 1), np.concatenate(by[len(old) :], 1)]
                if not held:
                    state = new
                    by_loss = jacobian(self.loss(output, target).reshape(1), [*old, *weights])
            del self.model.held
            l_h = np.concatenate(by_loss[: len(old)], 1)[0]
            l_w = np.concatenate(by_loss[len(old) :], 1)[0]
            steps.append(Dense(*found, l_h, l_w))
        return steps

    def _units(self) -> list[np.ndarray]:
        """The weights of each unit: a unit feeds the states that its weights reach with products
        held, or only its own output.
        """
        feeds: dict[tuple, list[int]] = {}
        starts = dict(zip(self.named, np.cumsum([0, *self.sizes[:-1]]), strict=True))
        hidden = self.steps[0][0].F.shape[0]
        layer_size = self.model.out.in_features
        for name, p in self.named.items():
            if name.startswith("out"):
                continue
            rows = p.shape[0]
            layer = int(name.split(".")[1]) if name.split(".")[1].isdigit() else 0
            for row in range(rows):
                private = name.startswith("encoder")
                key = ("encoder", row) if private else ("unit", layer, row % layer_size)
                width = p[row].numel()
                feeds.setdefault(key, []).extend(
                    range(starts[name] + row * width, starts[name] + (row + 1) * width)
                )
        assert hidden % layer_size == 0
        return [np.array(v) for v in feeds.values()]

    def gradient(
        self, rank: int, hops: int | None = None, plain: bool = False
    ) -> dict[str, np.ndarray]:
        """`eps` and `R` by the equations of the rule's docstring; `plain`: cut in the plain norm."""
        total = np.zeros(sum(self.sizes))
        for steps in self.steps:
            eps, R = np.zeros_like(steps[0].J), np.zeros_like(steps[0].J)
            w = np.ones(len(R))
            for s in steps:
                total += s.l_w + s.l_h @ (eps + R)
                R = (s.F if hops is None else s.D) @ R + (s.F - s.D) @ eps + (s.J - s.C)
                w = (w + 1 + (s.D**2 + (s.F - s.D) ** 2).T @ w) / 2
                root = np.ones((len(w), 1)) if plain else np.sqrt(w)[:, None]
                for unit in self.units:
                    U, sigma, V = np.linalg.svd(root * R[:, unit], full_matrices=False)
                    R[:, unit] = (U[:, :rank] * sigma[:rank]) @ V[:rank] / root
                eps = s.D @ eps + s.C
        split = np.split(total, np.cumsum(self.sizes)[:-1])
        return {n: g.reshape(p.shape) for (n, p), g in zip(self.named.items(), split, strict=True)}

    def bptt(self) -> dict[str, np.ndarray]:
        return bptt(self.model, self.xs, self.targets)


def bptt(model: nn.Module, xs: torch.Tensor, targets: torch.Tensor) -> dict[str, np.ndarray]:
    """torch's gradients of the summed squared error of a sequence."""
    state, total, named = None, 0.0, dict(model.named_parameters())
    for x, target in zip(xs, targets, strict=True):
        output, state = model(x, state)
        total = total + ((output - target) ** 2).sum()
    grads = torch.autograd.grad(total, list(named.values()))
    return {n: g.numpy() for n, g in zip(named, grads, strict=True)}


def joined(grads: dict[str, np.ndarray], readout: bool = False) -> np.ndarray:
    """All gradients in one vector, by default without the readout's, which every rule has exactly."""
    return np.concatenate(
        [g.ravel() for n, g in sorted(grads.items()) if readout or not n.startswith("out")]
    )


def relative(found: dict, wanted: dict, readout: bool = False) -> float:
    """Relative error of all gradients together."""
    difference = joined(found, readout) - joined(wanted, readout)
    return float(np.linalg.norm(difference) / np.linalg.norm(joined(wanted, readout)))


def squared_error(output: Any, target: Any) -> Any:
    """The reference's loss, on JAX arrays."""
    return ((jax.tree.leaves(output)[0] - target) ** 2).sum()


class Engine:
    """The engine's gradients under a rule, compiled once for a model and a shape of input.

    Args:
        model: the torch module.
        x: one step's input.
        rule: the rule.
    """

    def __init__(self, model: nn.Module, x: torch.Tensor, rule: Rule) -> None:
        net = eb.wrap(model, example_input=x)
        net.init_state(batch_size=len(x))
        self.session, self.rule = CompiledStep(net, [x.numpy()]), rule
        self.call = quick_jit(self._run)

    def _run(self, theta, hidden, other, trace, xs, targets):
        data = Chunk([xs], targets, jnp.ones(xs.shape[0]), squared_error)
        before = Carry(hidden, other, trace)
        done = run_chunk(self.rule, self.session.program, theta, before, data, False, False)
        return done.grads, (done.carry.hidden, done.carry.other, done.carry.trace), done.discarded

    def gradients(
        self, named: dict[str, nn.Parameter], xs: torch.Tensor, targets: torch.Tensor, chunk: int
    ) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
        """Gradients of a sequence with these weights, and what the rule says to have discarded:
        squared estimate and bound.
        """
        names = self.session.weight_names
        theta = [jnp.asarray(named[name].detach().numpy()) for name in names]
        _, hidden, other = self.session.read()
        carry, total, lost = (hidden, other, self.rule.init(self.session.program)), None, []
        for t in range(0, len(xs), chunk):
            some = slice(t, t + chunk)
            grads, carry, discarded = self.call(
                theta, *carry, xs[some].numpy(), targets[some].numpy()
            )
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
            lost.append(discarded)
        found = {n: np.asarray(g) for n, g in zip(names, total or [], strict=True)}
        return found, None if lost[0] is None else np.sum(lost, 0)


def engine(
    ref: Reference, rule: Rule, chunk: int = 1
) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """The engine's gradients of the reference's sequence, and what it says to have discarded."""
    return Engine(ref.model, ref.xs[0], rule).gradients(ref.named, ref.xs, ref.targets, chunk)
