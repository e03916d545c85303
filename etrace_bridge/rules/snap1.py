"""SnAp-1: D-RTRL that also keeps the diagonal of the mixing products in the recurrent Jacobian.

    eps_t = D'_t eps_(t-1) + df_t ⊗ x_t
    g_t   = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t · eps_(t-1)
    D'_t  = D_t + diag( df_t · V · dx_t/dh_(t-1) )

`D_t` is D-RTRL's: the core, position by position. The second term is new: for a contact `y = V x`
whose data `x` is a function of the group's old states, position by position, `V` has an entry from
the element of `x` that belongs to position p to each element of `y` that feeds position p; only
these entries are followed. `df_t` is how the new states depend on `y`, `dx_t/dh_(t-1)`
the derivative of `x` at its position. For one layer `h_t = tanh(W x_t + U h_(t-1))` this is SnAp-1
of Menick et al. (2021): `D'_t = diag(1 - h_t²) diag(U)`. In a convolution the kept entries are the
kernel's centre, channel by channel. Paths through two products in one step are dropped, as they are
in `D_t`.

`credit` is D-RTRL's; with `"core"`, `b_t` passes through the core and the kept entries, which is
the textbook rule.

Memory: that of D-RTRL. Time per step: that of D-RTRL plus S products of B·H entries. Exact when
D-RTRL is, and for products whose weight view is diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from etrace_bridge.rules.base import register_rule
from etrace_bridge.rules.d_rtrl import DRTRL
from etrace_bridge.rules.trace_rule import TraceSystem
from etrace_bridge.step.kept_products import kept_products, pull_through
from etrace_bridge.step.steps import Steps


@register_rule
@dataclass(frozen=True)
class SnAp1(DRTRL):
    """SnAp-1; options as in `DRTRL`."""

    name: ClassVar[str] = "snap1"

    def system(self, steps: Steps) -> TraceSystem:
        system = super().system(steps)
        D, b = list(system.D), list(system.b)
        for kept in kept_products(steps.program):
            g = kept.group
            colour = next(
                c for c, members in enumerate(steps.program.colours) if kept.group in members
            )
            pull = pull_through(steps, kept)
            units = system.df.units[colour][: len(D[g])]
            D[g] = [_add(row, pull(df), kept.states) for row, df in zip(D[g], units, strict=True)]
            if self.credit == "core":
                b[g] = _add(b[g], pull(system.direct.at_taps), kept.states)
        return replace(system, D=D, b=b)


def _add(row: Sequence[Any], added: Sequence[Any], states: Sequence[int]) -> list[Any]:
    """Add to the entries of the given states; None stands for zero."""
    return [
        (added[j] if old is None else old + added[j]) if j in states else old
        for j, old in enumerate(row)
    ]
