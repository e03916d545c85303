"""pp-prop: a factored trace, two low-pass filters in place of one trace of weight size.

    x̄_t = alpha x̄_(t-1) + x_t
    f̄_t = alpha D_t f̄_(t-1) + (1 - alpha) df_t
    n_t  = alpha n_(t-1) + (1 - alpha)                                 (= 1 - alpha^t from zero)
    g_t  = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t · (f̄_(t-1) / n_(t-1)) ⊗ x̄_(t-1)

The system is D-RTRL's: `x_t` are a contact's features, `df_t` how the group's new states depend on
the contact's output, `D_t` the core's Jacobian, which acts on the states of the group at each
position, `b_t = dl_t/dh_(t-1)` through the `core` or the whole `step`. The memory differs: in place
of `eps` it holds two factors, each with the decay `alpha`. Both start at zero; dividing by `n` removes
the bias of `f̄`'s start, so that after one step the factored trace is exactly `df_1 ⊗ x_1`,
D-RTRL's.

A bias that is only added to a product is a column of that product's weight, with a feature that is
always 1: it has the same `f̄`, and its `x̄_t` is `n_t / (1 - alpha)`. An element-wise contact of
its own (a decay, a threshold) has no `x`, and its D-RTRL trace is as small as `f̄`, so the trace
itself is stored, `eps_t = D_t eps_(t-1) + df_t`; its gradient is the sum of `b_t · eps_(t-1)` and the direct
term. Weights without a trace that reach a state through another weight get the direct term only.

Memory: B·(I + S·H) for each contact; convolutions keep the patches of `x`. Time per step: with
`core` less than that of BPTT by the product that goes back through the recurrent weights, with
`step` that of BPTT. Exact for one step; with `step`, for two steps from a zero trace.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from etrace_bridge._errors import InputError
from etrace_bridge.rules.base import check_choice, register_rule
from etrace_bridge.rules.memory import Factored
from etrace_bridge.rules.trace_rule import TraceRule, TraceSystem
from etrace_bridge.step.linearise import linearise_core, loss_gradient
from etrace_bridge.step.steps import Steps


@register_rule
@dataclass(frozen=True)
class PPProp(TraceRule):
    """Factored traces.

    Attributes:
        decay: `alpha`, between 0 and 1: how much of the filters is left after a step.
        time_constant: the same in steps, `alpha = exp(-1 / time_constant)`; replaces `decay` when
            given.
        credit: `"core"` or `"step"`, as in `DRTRL`. `"auto"` is `core`, since `step` costs a
            product more and the factored trace is the larger error; but `step` for a model with a
            layer whose core is empty, as a plain RNN's, where `core` has no credit to give.
        trace_dtype: dtype in which the filters are stored between chunks, e.g. `"bfloat16"`; None
            keeps the states' dtype.
    """

    decay: float = 0.9
    time_constant: float | None = None
    credit: str = "auto"
    trace_dtype: str | None = None
    name: ClassVar[str] = "pp_prop"

    def __post_init__(self) -> None:
        check_choice("credit", self.credit, ("auto", "core", "step"))
        if self.time_constant is not None and not self.time_constant > 0:
            raise InputError(
                f"`time_constant` is {self.time_constant}; it is a number of steps and must be "
                "positive."
            )
        if not 0 <= self.decay < 1:
            raise InputError(
                f"`decay` is {self.decay}; it must be at least 0 and below 1. A time constant in "
                "steps goes into `time_constant=`."
            )

    @property
    def alpha(self) -> float:
        """What is left of a filter after one step."""
        return self.decay if self.time_constant is None else math.exp(-1 / self.time_constant)

    @property
    def memory(self) -> Factored:
        return Factored(self.alpha, self.trace_dtype)

    def system(self, steps: Steps) -> TraceSystem:
        core = linearise_core(steps)
        empty = any(all(d is None for row in D for d in row) for D in core.D)
        credit = ("step" if empty else "core") if self.credit == "auto" else self.credit
        direct = loss_gradient(steps, credit)
        return TraceSystem(core.D, core.df, direct.b, direct)
