"""OTTT: online training through time (Xiao et al. 2022), filtered inputs in place of a trace.

    x̄_t = leak x̄_(t-1) + x_t
    g_t  = δ_t ⊗ x̄_t,        δ_t = dl_t/dy_t with old states fixed

`y_t` is what a weight adds to the membrane, `x_t` its input, `δ_t` the derivative of the step's
loss by `y_t`: through the spike of the layer and the layers above it within the step, not through
reset or recurrent weights. For a layer whose membrane decays by a constant, `u_t = leak u_(t-1) +
y_t`, `x̄_t` is the same for every unit, so this is D-RTRL with `core` credit, whose trace `eps_t =
leak eps_(t-1) + 1 ⊗ x_t` has only one row that matters. A bias is a column of its product with an
input of 1. A decay, a threshold and weights without a trace get the direct term.

`leak` is the membrane's decay per step. It is an option, not read from the model: one number for
all layers, and whatever else happens to the membrane between steps (a reset that is differentiated)
is left out, as in the paper.

Memory: B·I for each product. Time per step: that of BPTT's single step. Exact for one step, and
where D-RTRL is if all units decay by `leak` and by nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from etrace_bridge.rules.base import APPROXIMATE, EXACT, Promise, check_decay, register_rule
from etrace_bridge.rules.memory import Presynaptic
from etrace_bridge.rules.trace_rule import TraceRule, TraceSystem
from etrace_bridge.step.linearise import loss_gradient
from etrace_bridge.step.steps import Steps


@register_rule
@dataclass(frozen=True)
class OTTT(TraceRule):
    """Filtered inputs.

    Attributes:
        leak: the membrane's decay per step, at least 0 and below 1.
        trace_dtype: as in `PPProp`.
    """

    leak: float = 0.9
    trace_dtype: str | None = None
    name: ClassVar[str] = "ottt"

    def __post_init__(self) -> None:
        check_decay("leak", self.leak)

    @property
    def memory(self) -> Presynaptic:
        return Presynaptic(self.leak, self.trace_dtype)

    def system(self, steps: Steps) -> TraceSystem:
        return TraceSystem.without_rows(loss_gradient(steps, "core"))

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        if length == 1:
            return Promise(EXACT, "one step has no past")
        reason = f"OTTT takes every unit's decay for {self.leak:g}; {certificate.reason}"
        return Promise(APPROXIMATE, reason)
