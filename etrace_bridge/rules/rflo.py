"""RFLO: random feedback local online learning (Murray 2019), for any recurrent layer.

    eps_t = D_t eps_(t-1) + df_t ⊗ x_t
    g_t   = s_t · eps_t  =  (s_t df_t) ⊗ x_t + (s_t D_t) · eps_(t-1),      s_t = dl_t/dy_t F

The trace is D-RTRL's; for a leaky layer `h_t = (1 - 1/tau) h_(t-1) + (1/tau) phi(u_t)`, `D_t` is
the leak `1 - 1/tau`. The signal `s_t` of a hidden state is the derivative of the loss by the
outputs `y_t`, times a fixed random matrix `F` (entries of variance 1 / outputs): no derivative goes
back through readout or upper layers. Weights outside the recurrence, such as the readout's, get
their plain gradient.

Memory: that of D-RTRL. Time per step: that of D-RTRL. Never exact for weights of the recurrence,
whose signal differs from the derivative.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge.rules.base import APPROXIMATE, Promise, register_rule
from etrace_bridge.rules.feedback import feedback_matrix, project
from etrace_bridge.rules.trace_rule import TraceRule, TraceSystem, times_blocks
from etrace_bridge.step.linearise import (
    Grouped,
    group_states,
    linearise_core,
    loss_gradient,
    output_gradient,
)
from etrace_bridge.step.steps import Steps

Key = tuple[int, int, int]  # group, state, output


@register_rule
@dataclass(frozen=True)
class RFLO(TraceRule):
    """Random feedback to every hidden state.

    Attributes:
        seed: of the random matrices.
        trace_dtype: as in `DRTRL`.
    """

    seed: int = 0
    trace_dtype: str | None = None
    name: ClassVar[str] = "rflo"

    def system(self, steps: Steps) -> TraceSystem:
        core, direct, s = linearise_core(steps), loss_gradient(steps, "core"), self.signals(steps)
        pairs = zip(direct.at_taps, core.df.pull(s), strict=True)
        direct = replace(direct, at_taps=[y if p is None else p for y, p in pairs])
        return TraceSystem(core.D, core.df, times_blocks(s, core.D), direct)

    def signals(self, steps: Steps) -> Grouped:
        """Return `s_t`, by group and state."""
        errors, groups = output_gradient(steps), steps.program.groups
        s = jax.tree.map(jnp.zeros_like, group_states(steps.program, steps.forward.hidden))
        shapes = {n: error.shape[1:] for n, error in errors.items()}
        for (g, i, n), F in self.matrices(groups, shapes).items():
            s[g][i] += project(errors[n], F, groups[g].varshape).astype(s[g][i].dtype)
        return s

    def matrices(self, groups: Any, outputs: dict[int, tuple[int, ...]]) -> dict[Key, Any]:
        """Return `F` by group, state and output, from the shapes of the outputs."""
        rng = np.random.default_rng(self.seed)
        states = [(g, i) for g, group in enumerate(groups) for i in range(group.num_state)]
        keys = [(g, i, n) for g, i in states for n in outputs]
        return {(g, i, n): feedback_matrix(rng, outputs[n], groups[g].varshape) for g, i, n in keys}

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        reason = f"RFLO replaces the loss's derivative by random feedback; {certificate.reason}"
        return Promise(APPROXIMATE, reason)
