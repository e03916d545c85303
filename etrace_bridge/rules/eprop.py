"""e-prop: eligibility traces met by a learning signal, smoothed in time, symmetric or random.

    eps_t = D_t eps_(t-1) + df_t ⊗ x_t                                  (as in D-RTRL)
    e_t   = U_t eps_(t-1) + du_t ⊗ x_t
    ē_t  = kappa ē_(t-1) + e_t
    g_t   = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t · eps_(t-1)  +  kappa L_t · ē_(t-1)

`u_t` are the *exits*: the values by which the rest of the step reads the hidden group (a new state,
a spike; see `step.exits`). `U_t = du_t/dh_(t-1)` and `du_t` (by a contact's output) are their
position by position derivatives, `e_t` their eligibility, `L_t = dl_t/du_t` the learning signal,
`b_t = dl_t/dh_(t-1)` through the core. The first two terms of `g_t` are `L_t · e_t` for the weights
of the recurrence and the plain gradient for all others, so that

    sum of g_t = sum over t, s <= t of  kappa^(t-s) L_t · e_s  +  the plain gradient of weights
    outside the recurrence,

which is e-prop (Bellec et al. 2020) with `kappa` the decay of the readout. With `kappa = 0` and
symmetric feedback it is `DRTRL(credit="core")`. `feedback="random"` replaces `L_t` by
`dl_t/doutput_t` times a fixed random matrix, one for each exit and output, with entries of variance
1 / outputs; nothing else of what the exits feed is then differentiated, and layers that only pass
their values on for a later step have a signal too. An exit that is an output itself, as that of a
leaky readout, needs no weights to know its error and keeps it.

With the filtered traces as further rows beside the states this is one trace system:

    D = [[D, 0], [U, kappa]],   df = [df; du],   b = [b, kappa L]

Memory: B·P·S for each contact as in D-RTRL, and as much again for each exit if `kappa > 0`. Time
per step: that of D-RTRL, plus that of its trace for each exit. Exact when D-RTRL is, with `kappa =
0` and symmetric feedback.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge._jax_compat import Var
from etrace_bridge.compiler.primitives import is_float
from etrace_bridge.rules.base import APPROXIMATE, Promise, check_choice, check_decay, register_rule
from etrace_bridge.rules.d_rtrl import DRTRL
from etrace_bridge.rules.feedback import feedback_matrix, project
from etrace_bridge.rules.trace_rule import TraceSystem
from etrace_bridge.step.exits import (
    GroupExits,
    at_exit,
    exit_cotangents,
    find_exits,
    signal_gradient,
)
from etrace_bridge.step.filtered_rows import with_filtered_rows
from etrace_bridge.step.linearise import (
    linearise_core,
    loss_gradient,
    output_gradient,
)
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.steps import Steps


@register_rule
@dataclass(frozen=True)
class EProp(DRTRL):
    """e-prop.

    Attributes:
        kappa: how much of an eligibility is left for the next step's learning signal; 0 to below 1.
        feedback: `"symmetric"` (the loss's own derivative) or `"random"` (a fixed random projection
            of the outputs').
        seed: of the random matrices; refused with `"symmetric"`, which has none.
        upstream: as in `DRTRL`.
        trace_dtype: as in `DRTRL`.
    """

    credit: str = "core"
    kappa: float = 0.0
    feedback: str = "symmetric"
    seed: int = 0
    name: ClassVar[str] = "eprop"
    follows_states: ClassVar[bool] = False  # the filters of the exits continue

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("credit", self.credit, ("core",))
        check_choice("feedback", self.feedback, ("symmetric", "random"))
        check_decay("kappa", self.kappa)
        if self.seed and not self.own_signal:
            raise InputError(
                f"`seed={self.seed}` would have no effect: with `feedback='symmetric'` there are no "
                "random matrices. Leave `seed` out, or use `feedback='random'`."
            )

    @property
    def own_signal(self) -> bool:
        return self.feedback != "symmetric"

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        if not self.kappa and not self.own_signal:
            return super().promise(certificate, length, chunk)
        reason = (
            f"e-prop with kappa={self.kappa:g} and {self.feedback} feedback; {certificate.reason}"
        )
        return Promise(APPROXIMATE, reason)

    def exits(self, program: StepProgram) -> list[GroupExits]:
        """Return where the signal comes in.

        A random one also where nothing is passed on to the outputs within the step.
        """
        return find_exits(program, broadcast=self.own_signal)

    def filtered_exits(self, program: StepProgram) -> list[GroupExits]:
        """Return the exits whose eligibility is filtered."""
        return self.exits(program)

    def rows(self, program: StepProgram) -> Sequence[int]:
        states = super().rows(program)
        if not self.kappa:
            return states
        pairs = zip(states, self.filtered_exits(program), strict=True)
        return [n + len(of_group.exits) for n, of_group in pairs]

    def system(self, steps: Steps) -> TraceSystem:
        core, exits = linearise_core(steps), self.exits(steps.program)
        signals = self.signals(steps, exits) if self.own_signal else None
        direct = (
            loss_gradient(steps, "core")
            if signals is None
            else signal_gradient(steps, exits, signals)
        )
        if not self.kappa:
            return TraceSystem(core.D, core.df, direct.b, direct)
        filtered = self.filtered_exits(steps.program)
        if signals is None:
            L = exit_cotangents(steps, filtered)
        else:
            at = lambda g, e: at_exit(steps.program, g, e, signals[e.var])
            L = [[at(g, e) for e in of_group.exits] for g, of_group in enumerate(filtered)]
        b = [
            [*bs, *(self.kappa * signal for signal in Ls)]
            for bs, Ls in zip(direct.b, L, strict=True)
        ]
        D, df = with_filtered_rows(steps, core, filtered, self.kappa)
        return TraceSystem(D, df, b, direct)

    def signals(self, steps: Steps, exits: Sequence[GroupExits]) -> dict[Var, Any]:
        """Return `dl_t/doutput_t` projected to each exit, or itself where the exit is the output."""
        by_output = output_gradient(steps)
        signals = {
            e.var: sum(by_output[n] for n in e.outputs)
            for own in exits
            for e in own.exits
            if e.outputs
        }
        for (var, n), matrix in self.feedback_matrices(steps.program).items():
            signal = project(by_output[n], matrix, var.aval.shape)
            signals[var] = signals[var] + signal if var in signals else signal
        return signals

    def feedback_matrices(self, program: StepProgram) -> dict[tuple[Var, int], jax.Array]:
        """Return the fixed random matrices by exit and index of the output.

        Their shape is (outputs, elements of the exit).
        """
        rng = np.random.default_rng(self.seed)
        matrices: dict[tuple[Var, int], jax.Array] = {}
        for of_group in self.exits(program):
            for e in of_group.exits:
                for n, out in enumerate(program.out_vars):
                    if not e.outputs and is_float(out) and (e.var, n) not in matrices:
                        matrices[e.var, n] = feedback_matrix(rng, out.aval.shape, e.var.aval.shape)
        return matrices
