"""DECOLLE: deep continuous local learning (Kaiser et al. 2020), a local loss for every layer.

    eps_t = D_t eps_(t-1) + df_t ⊗ x_t
    e_t   = U_t eps_(t-1) + du_t ⊗ x_t
    g_t   = L_t · e_t,        L_t = d/du_t  l(G u_t, target_t)

`u_t` are the values by which the rest of the step reads a layer (`step.exits`: spikes, new states),
`e_t` their eligibility along the layer itself, as in e-prop. Each layer has a readout `G` of its
own from `u_t` to something of the output's shape: random, fixed, with entries of variance 1 /
inputs. Its loss is the learner's loss on the learner's target. No derivative passes from layer to
layer. A value that is the model's output already keeps the loss's derivative, and weights
outside the recurrence, such as the readout's, get their plain gradient.

Memory and time per step: those of e-prop without a filter, and a readout per layer. Never exact:
every layer has a loss of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._jax_compat import Var
from etrace_bridge.rules.base import APPROXIMATE, Promise, register_rule
from etrace_bridge.rules.eprop import EProp
from etrace_bridge.rules.feedback import feedback_matrix, project
from etrace_bridge.step.exits import GroupExits
from etrace_bridge.step.linearise import output_gradient
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.steps import Steps


@register_rule
@dataclass(frozen=True)
class DECOLLE(EProp):
    """Local losses; `seed` is that of the local readouts, other options as in `EProp`."""

    feedback: str = field(init=False, default="random")
    name: ClassVar[str] = "decolle"
    needs_loss: ClassVar[bool] = True

    def signals(self, steps: Steps, exits: Sequence[GroupExits]) -> dict[Var, Any]:
        program, flat = steps.program, jax.tree.leaves(steps.outputs())
        variables = list(dict.fromkeys(e.var for own in exits for e in own.exits))
        readouts, by_output = self.readouts(program), output_gradient(steps)
        outputs = {e.var: e.outputs for own in exits for e in own.exits if e.outputs}

        def local_loss(values: Sequence[Any]) -> Any:
            total = jnp.zeros((), steps.weights.dtype)
            for v, u in zip(variables, values, strict=True):
                if v not in outputs:
                    local = list(flat)
                    for n in by_output:
                        local[n] = project(u, readouts[v, n], flat[n].shape[1:])
                    losses = jax.vmap(steps.loss)(program.output_tree(local), steps.targets)
                    total = total + jnp.sum(losses * steps.weights)
            return total

        values = steps.each(lambda start, saved: program.values(start, saved, variables))
        signals = dict(zip(variables, jax.grad(local_loss)(values), strict=True))
        return signals | {v: sum(by_output[n] for n in ns) for v, ns in outputs.items()}

    def readouts(self, program: StepProgram) -> dict[tuple[Var, int], Any]:
        """Return `G` (elements of the exit, outputs), by exit and index of the output."""
        rng, matrices = np.random.default_rng(self.seed), {}
        for own in self.exits(program):
            for e in own.exits:
                for n, out in enumerate(program.out_vars):
                    if (e.var, n) not in matrices:
                        matrices[e.var, n] = feedback_matrix(rng, e.var.aval.shape, out.aval.shape)
        return matrices

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        return Promise(APPROXIMATE, "DECOLLE gives every layer a loss of its own")
