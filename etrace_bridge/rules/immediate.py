"""Immediate: the gradient of each step alone, the baseline that every other rule must beat.

    g_t = dl_t/dtheta |_(h_(t-1) fixed)

No trace: what a weight did to the states in earlier steps gets no credit. The states
themselves still advance. This is BPTT truncated to one step, for chunks of any size.

Memory: none. Time per step: forward and backward of the step. Exact for one step, and for weights
that reach no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from etrace_bridge.rules.base import EXACT, TRUNCATED, Promise, register_rule
from etrace_bridge.rules.memory import Presynaptic
from etrace_bridge.rules.trace_rule import TraceRule, TraceSystem
from etrace_bridge.step.linearise import loss_gradient
from etrace_bridge.step.steps import Steps


@register_rule
@dataclass(frozen=True)
class Immediate(TraceRule):
    """No trace."""

    name: ClassVar[str] = "immediate"

    @property
    def memory(self) -> Presynaptic:
        return Presynaptic(0.0)

    def system(self, steps: Steps) -> TraceSystem:
        return TraceSystem.without_rows(loss_gradient(steps, "step"))

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        if length == 1:
            return Promise(EXACT, "one step has no past")
        return Promise(TRUNCATED, "credit stops at every step")
