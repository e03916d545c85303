"""Online gradients of zoo modules, for comparison with torch's BPTT on the same sequence and loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import etrace_bridge as eb
from etrace_bridge.compiler.certificate import ParameterCertificate
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.rules import DRTRL, Carry, Chunk, Rule
from etrace_bridge.schedule.chunk import run_chunk
from etrace_bridge.step.slope import run_slope, zero_tangent
from quick_jit import quick_jit
from zoo.case import STEPS, Case, Reference, reference

# Inside these float64 modules snnTorch itself goes through float32 (a float32 spike times a 0-d
# float64 threshold is float32 in torch), so that the gradient depends on the order of a float32
# sum.
FLOAT32_INSIDE = (
    "snntorch-leaky_learn",
    "snntorch-synaptic_learn",
    "snntorch-rleaky_one_to_one",
    "snntorch-leaky_immediate_reset",
)


def step_loss(output: Any, weights: list[Any]) -> Any:
    """The zoo's loss of one step, `Σ (w·y + y²/4) / numel` over the output's tensors."""
    return sum(
        ((w.astype(y.dtype) + y / 4) * y).mean()
        for w, y in zip(weights, jax.tree.leaves(output), strict=True)
    )


def after_hooks(module: torch.nn.Module, name: str, grad: Any) -> np.ndarray:
    """Apply the hooks on a parameter, which torch runs on the final gradient and the bridge does
    not trace.
    """
    value = torch.tensor(np.asarray(grad))
    for hook in (module.get_parameter(name)._backward_hooks or {}).values():
        value = hook(value)
    return value.numpy()


@dataclass
class OnlineCase:
    """A zoo module, compiled, with torch's own result in float64.

    Attributes:
        case: the module.
        ref: torch's run and gradients.
        module: the torch module.
        compiled: the compiled step.
        prepare: what a rule's program goes through before it is run: compiled, or run in NumPy.
    """

    case: Case
    prepare: Callable[[Callable], Any] = quick_jit
    ref: Reference = field(init=False)
    module: torch.nn.Module = field(init=False)
    compiled: CompiledStep = field(init=False)

    def __post_init__(self) -> None:
        self.ref = reference(self.case, torch.float64)
        self.module = self.case.build(torch.float64)
        self.xs = self.case.inputs(torch.float64)
        net = eb.wrap(self.module, self.case.state, example_input=self.xs[0])
        net.init_state(batch_size=self.case.batch_size)
        self.compiled = CompiledStep(net, [self.xs[0].numpy()])

    @property
    def influence_size(self) -> int:
        """Elements of RTRL's influence matrix."""
        theta, hidden, _ = self.compiled.read()
        return sum(math.prod(h.shape) for h in hidden) * sum(math.prod(w.shape) for w in theta)

    def certificates(self) -> dict[str, ParameterCertificate]:
        """The certificate of every parameter, by torch name."""
        found = self.compiled.program.graph.certificate()
        return {".".join(map(str, path)): entry for path, entry in found.items()}

    def gradients(self, rule: Rule, chunk: int) -> dict[str, np.ndarray]:
        """The rule's gradients of the whole sequence in chunks, by torch name, after the
        parameters' hooks.
        """
        program = self.compiled.program
        theta, hidden, other = self.compiled.read()
        targets = [np.stack(column) for column in zip(*self.ref.weights, strict=True)]

        def run(theta, hidden, other, trace, xs, targets):
            data = Chunk([xs], targets, jnp.ones(xs.shape[0]), step_loss)
            done = run_chunk(rule, program, theta, Carry(hidden, other, trace), data, False, False)
            return done.grads, (done.carry.hidden, done.carry.other, done.carry.trace)

        call = self.prepare(run)
        carry, total = (hidden, other, rule.init(program)), None
        for at in range(0, STEPS, chunk):
            some = slice(at, at + chunk)
            grads, carry = call(theta, *carry, self.xs[some].numpy(), [t[some] for t in targets])
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        named = dict(zip(self.compiled.weight_names, total or [], strict=True))
        return {name: after_hooks(self.module, name, grad) for name, grad in named.items()}

    def errors(self, grads: dict[str, np.ndarray]) -> dict[str, float]:
        """Largest difference to torch BPTT by parameter, relative to the largest gradient value of
        the parameter.
        """
        wanted = {name: g.numpy() for name, g in self.ref.grads.items() if name in grads}
        return {
            name: float(np.abs(grads[name] - g).max() / np.abs(g).max())
            for name, g in wanted.items()
        }

    def _recurrent(self, grads: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The gradients of all parameters that enter the recurrence as one vector, and torch
        BPTT's.
        """
        certificates = self.certificates()
        names = [n for n in grads if certificates[n].kind in ("traced", "upstream")]
        a = np.concatenate([grads[n].ravel() for n in names])
        return a, np.concatenate([self.ref.grads[n].numpy().ravel() for n in names])

    def cosine(self, grads: dict[str, np.ndarray]) -> float:
        """Cosine to torch BPTT of all parameters that enter the recurrence, together."""
        a, b = self._recurrent(grads)
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    def relative_error(self, grads: dict[str, np.ndarray]) -> float:
        """Norm of the difference to torch BPTT over the norm of torch BPTT, of the same parameters."""
        a, b = self._recurrent(grads)
        return float(np.linalg.norm(a - b) / np.linalg.norm(b))

    def slopes(self, direction: dict[str, np.ndarray]) -> np.ndarray:
        """Slope of each step's loss along a direction, as the meter carries it forward."""
        program = self.compiled.program
        targets = [np.stack(column) for column in zip(*self.ref.weights, strict=True)]
        along = [jnp.asarray(direction[name]) for name in self.compiled.weight_names]

        def run(theta, hidden, other, along, xs, targets):
            data = [xs], targets, jnp.ones(xs.shape[0])
            return run_slope(
                program, theta, along, (hidden, other), zero_tangent(program), data, step_loss
            ).slopes

        call = self.prepare(run)
        return np.asarray(call(*self.compiled.read(), along, self.xs.numpy(), targets))

    def meter_error(self, rule: Rule | None = None) -> float:
        """Difference of the meter's slope along a rule's gradient to torch BPTT's, in units of both
        norms.

        Parameters with hooks are held: torch changes their gradient after BPTT.
        """
        grads = self.gradients(rule or DRTRL(), 4)
        for name in grads:
            if self.module.get_parameter(name)._backward_hooks:
                grads[name] = np.zeros_like(grads[name])
        a = np.concatenate([g.ravel() for g in grads.values()])
        b = np.concatenate([self.ref.grads[n].numpy().ravel() for n in grads])
        return float(abs(self.slopes(grads).sum() - a @ b) / np.linalg.norm(a) / np.linalg.norm(b))
