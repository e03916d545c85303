"""D-RTRL: real-time recurrent learning with the per-position part of the recurrent Jacobian.

    eps_t = D_t eps_(t-1) + df_t ⊗ x_t
    g_t   = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t · eps_(t-1)

`credit` says how `b_t = dl_t/dh_(t-1)` is computed: through the `core` only (the textbook rule),
through the whole unmodified `step` (default), or, with `chunk`, by exact reverse mode inside each
chunk, the trace being used only for what came before it.

Weights without a trace that reach a state through another weight: `upstream="chunk"` (default)
gives them credit within the chunk, `<a_t, h_t>` differentiated through the whole step;
`upstream="step"` gives them the direct term only.

Memory: B·P·S for each contact. Time per step: that of BPTT plus (B·P·S²)/K for the trace and B·P·S
for its outer products. Exact when the certificate says so: diagonal recurrences, or one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from etrace_bridge.rules.base import APPROXIMATE, EXACT, Promise, check_choice, register_rule
from etrace_bridge.rules.trace_rule import TraceRule, TraceSystem
from etrace_bridge.step.linearise import linearise_core, loss_gradient
from etrace_bridge.step.steps import Steps


@register_rule
@dataclass(frozen=True)
class DRTRL(TraceRule):
    """D-RTRL with a choice of credit.

    Attributes:
        credit: `"core"`, `"step"` or `"chunk"`.
        upstream: `"chunk"` or `"step"`.
        trace_dtype: dtype in which traces are stored, e.g. `"bfloat16"`; None keeps the states'
            dtype.
    """

    credit: str = "step"
    upstream: str = "chunk"
    trace_dtype: str | None = None
    name: ClassVar[str] = "d_rtrl"
    follows_states: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_choice("credit", self.credit, ("core", "step", "chunk"))
        check_choice("upstream", self.upstream, ("chunk", "step"))

    @property
    def reverse_inside(self) -> bool:
        return self.credit == "chunk"

    @property
    def follows_upstream(self) -> bool:
        return self.upstream == "chunk"

    def system(self, steps: Steps) -> TraceSystem:
        core, direct = linearise_core(steps), loss_gradient(steps, self.credit)
        return TraceSystem(core.D, core.df, direct.b, direct)

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        if length == 1:
            return Promise(EXACT, "one step has no past")
        if self.reverse_inside and chunk >= length:
            return Promise(EXACT, "exact credit inside the one chunk")
        if self.trace_dtype is not None and certificate.kind == "traced":
            return Promise(APPROXIMATE, f"the trace is stored as {self.trace_dtype}")
        return Promise(EXACT if certificate.exact else APPROXIMATE, certificate.reason)
