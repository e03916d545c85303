"""Online gradients of zoo modules, for comparison with torch's BPTT on the same sequence and loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import etrace_bridge as eb
from etrace_bridge.compiler.certificate import ParameterCertificate
from etrace_bridge.learning.session import Session
from etrace_bridge.rules import Carry, Chunk, Rule
from zoo.case import STEPS, Case, Reference, reference

# Each program runs once on tiny arrays: compiling it is all of the cost.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


def step_loss(output: Any, weights: list[Any]) -> Any:
    """The zoo's loss of one step, `Σ (w·y + y²/4) / numel` over the output's tensors."""
    return sum(((w.astype(y.dtype) + y / 4) * y).mean() for w, y in zip(weights, jax.tree.leaves(output), strict=True))


def after_hooks(module: torch.nn.Module, name: str, grad: Any) -> np.ndarray:
    """Apply the hooks on a parameter, which torch runs on the final gradient and the bridge does not trace."""
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
        session: the compiled step.
    """

    case: Case
    ref: Reference = field(init=False)
    module: torch.nn.Module = field(init=False)
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        self.ref = reference(self.case, torch.float64)
        self.module = self.case.build(torch.float64)
        self.xs = self.case.inputs(torch.float64)
        net = eb.wrap(self.module, self.case.state, example_input=self.xs[0])
        net.init_state(batch_size=self.case.batch_size)
        self.session = Session(net, [self.xs[0].numpy()])

    @property
    def influence_size(self) -> int:
        """Elements of RTRL's influence matrix."""
        theta, hidden, _ = self.session.read()
        return sum(math.prod(h.shape) for h in hidden) * sum(math.prod(w.shape) for w in theta)

    def certificates(self) -> dict[str, ParameterCertificate]:
        """The certificate of every parameter, by torch name."""
        found = self.session.program.graph.certificate()
        return {".".join(map(str, path)): entry for path, entry in found.items()}

    def gradients(self, rule: Rule, chunk: int) -> dict[str, np.ndarray]:
        """The rule's gradients of the whole sequence in chunks, by torch name, after the parameters' hooks."""
        program = self.session.program
        theta, hidden, other = self.session.read()
        targets = [np.stack(column) for column in zip(*self.ref.weights, strict=True)]

        def run(theta, hidden, other, trace, xs, targets):
            data = Chunk([xs], targets, jnp.ones(xs.shape[0]), step_loss)
            done = rule.chunk(program, theta, Carry(hidden, other, trace), data, False, False)
            return done.grads, (done.carry.hidden, done.carry.other, done.carry.trace)

        call = jax.jit(run, compiler_options=QUICK_COMPILE)
        carry, total = (hidden, other, rule.init(program)), None
        for at in range(0, STEPS, chunk):
            some = slice(at, at + chunk)
            grads, carry = call(theta, *carry, self.xs[some].numpy(), [t[some] for t in targets])
            total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
        named = dict(zip(self.session.weight_names, total or [], strict=True))
        return {name: after_hooks(self.module, name, grad) for name, grad in named.items()}

    def errors(self, grads: dict[str, np.ndarray]) -> dict[str, float]:
        """Largest difference to torch BPTT by parameter, relative to the largest gradient value of the parameter."""
        wanted = {name: g.numpy() for name, g in self.ref.grads.items() if name in grads}
        return {name: float(np.abs(grads[name] - g).max() / np.abs(g).max()) for name, g in wanted.items()}

    def cosine(self, grads: dict[str, np.ndarray]) -> float:
        """Cosine to torch BPTT of all parameters that enter the recurrence, together."""
        certificates = self.certificates()
        names = [n for n in grads if certificates[n].kind in ("traced", "upstream")]
        a = np.concatenate([grads[n].ravel() for n in names])
        b = np.concatenate([self.ref.grads[n].numpy().ravel() for n in names])
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))
