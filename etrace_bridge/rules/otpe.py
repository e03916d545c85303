"""OTPE: online training with postsynaptic estimates (Summe et al. 2023), for stacks of spiking
layers.

    eps_t = D_t eps_(t-1) + df_t ⊗ x_t                        (as in D-RTRL)
    e_t   = ds_t/dtheta  =  U_t eps_(t-1) + du_t ⊗ x_t
    R_t   = leak R_(t-1) + e_t
    g_t   = L_t · R_t,        L_t = dl_t/ds_t

`s_t` is what a layer sends to the next one, its spike. The membrane of the next layer adds up what
it gets and loses all but `leak` of it in a step, so `R_t` estimates how a weight has moved that
membrane, where D-RTRL, e-prop and OTTT count the last spike alone. What leads to the output without
another layer in between, as from the last layer, is not filtered. So this is `EProp(kappa=leak)`
for what a layer sends to another, and `EProp()` otherwise.

Memory: B·P·S for each contact as in D-RTRL, and as much again for each way to a next layer. Time
per step: that of e-prop. Exact when D-RTRL is.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from etrace_bridge.rules.base import APPROXIMATE, EXACT, Promise, check_decay, register_rule
from etrace_bridge.rules.eprop import EProp
from etrace_bridge.step.exits import Exit, GroupExits
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.taps import derivative_sources


@register_rule
@dataclass(frozen=True)
class OTPE(EProp):
    """Eligibilities filtered by the next layer's leak; other options as in `EProp`.

    Attributes:
        leak: decay per step of the next layers' membranes, at least 0 and below 1.
    """

    leak: float = 0.9
    kappa: float = field(init=False, default=0.0)
    name: ClassVar[str] = "otpe"

    def __post_init__(self) -> None:
        check_decay("leak", self.leak)
        object.__setattr__(self, "kappa", self.leak)
        super().__post_init__()

    def filtered_exits(self, program: StepProgram) -> list[GroupExits]:
        """Return the exits that lead to another layer, by the edges that do."""
        filtered = []
        for group, of_group in zip(program.groups, self.exits(program), strict=True):
            others = [v for g in program.groups if g is not group for v in g.hidden_outvars]
            ahead = derivative_sources(program.eqns, others)

            def onward(exit_: Exit, ahead=ahead) -> Exit:
                eqns = program.eqns
                edges = (e for e in exit_.edges if any(v in ahead for v in eqns[e[0]].outvars))
                return replace(exit_, edges=tuple(edges), outputs=())

            pairs = [(onward(e), s) for e, s in zip(of_group.exits, of_group.shared, strict=True)]
            kept = [(e, s) for e, s in pairs if e.edges]
            exits, shared = tuple(e for e, _ in kept), tuple(s for _, s in kept)
            filtered.append(GroupExits(exits, shared, of_group.held))
        return filtered

    def promise(self, certificate, length: int, chunk: int) -> Promise:
        if length == 1:
            return Promise(EXACT, "one step has no past")
        reason = f"OTPE takes the next layer's decay for {self.leak:g}; {certificate.reason}"
        return Promise(APPROXIMATE, reason)
