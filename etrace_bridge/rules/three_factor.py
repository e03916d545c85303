"""Three-factor learning (Gerstner et al. 2018): one scalar signal for all units.

    eps_t = D_t eps_(t-1) + df_t ⊗ x_t
    g_t   = m_t sum over states of eps_t,        m_t = l_t

The trace is D-RTRL's: the first two factors, what came in and how the unit answered. The third is
the value `m_t` of the step's (weighted) loss, not its derivative: minus a reward, say, which need
not depend on the outputs. Nothing tells one unit from another, so this is not the loss's gradient.
A descent step adds `-lr m_t eps_t`: with a loss below zero, a reward, weights move along the trace.
It is RFLO with the signal `m_t` in place of a random projection of the outputs' error. Weights
outside the recurrence, such as the readout's, get their plain gradient.

Memory and time per step: those of D-RTRL. Never exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import jax
import jax.numpy as jnp

from etrace_bridge.rules.base import APPROXIMATE, Promise, register_rule
from etrace_bridge.rules.rflo import RFLO
from etrace_bridge.step.linearise import Grouped, group_states
from etrace_bridge.step.steps import Steps


@register_rule
@dataclass(frozen=True)
class ThreeFactor(RFLO):
    """A scalar signal; `trace_dtype` as in `DRTRL`."""

    seed: int = field(init=False, default=0)  # nothing is drawn
    name: ClassVar[str] = "three_factor"
    needs_loss: ClassVar[bool] = True
    needs_slope: ClassVar[bool] = False

    def signals(self, steps: Steps) -> Grouped:
        m = jax.vmap(steps.loss)(steps.outputs(), steps.targets) * steps.weights

        def spread(state: jax.Array) -> jax.Array:
            signal = m.reshape(-1, *(1,) * (state.ndim - 1)).astype(state.dtype)
            return jnp.broadcast_to(signal, state.shape)

        return jax.tree.map(spread, group_states(steps.program, steps.forward.hidden))

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        return Promise(APPROXIMATE, "a scalar signal takes the place of the loss's derivative")
