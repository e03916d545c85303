"""SnAp-n: the influence matrix, kept where a weight reaches a hidden value within n steps.

    J_t = P_n ∘ (F_t J_(t-1) + dh_t/dtheta),      P_n = pattern of (I + F + … + F^(n-1)) dh/dtheta
    g_t = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t J_(t-1)

(Menick et al. 2021.) `F_t = dh_t/dh_(t-1)` is the Jacobian of the whole step. The pattern is that
of the step's connections (`step.connectivity`): masks that are constants or buffers leave entries
out, weights that merely happen to be zero do not. For dense recurrent weights n = 2 is all of RTRL;
the rule pays where connections are sparse. `rules/sparse_influence.py` has the recursion by unit.

`snap1` is another simplification for n = 1: within a hidden group, position by position. Here a
weight of a lower layer also reaches, within a step, the layers above it.

Memory: m·B·P, with m the most hidden values that a unit reaches in n steps. Time per step: n vjps
of the step and m²·B·P. Exact when the pattern is saturated: one step more reaches nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge.rules.base import register_rule
from etrace_bridge.rules.sparse_influence import SparseInfluence
from etrace_bridge.step.connectivity import family_reach, step_connectivity
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.units import Layout


@register_rule
@dataclass(frozen=True)
class SnApN(SparseInfluence):
    """SnAp-n.

    Attributes:
        n: steps within which a weight's influence is followed, at least 1.
        trace_dtype: dtype in which the influence is stored, e.g. `"bfloat16"`.
    """

    n: int = 2
    name: ClassVar[str] = "snap_n"

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 1:
            raise InputError(f"`n` is {self.n!r}; it must be a number of steps, at least 1.")

    def sets(self, program: StepProgram, layout: Layout) -> list[np.ndarray]:
        F, by_sum = step_connectivity(program, layout)
        found = []
        for family in layout.families:
            reach = family_reach(family, by_sum, layout.size)
            for _ in range(self.n - 1):
                reach = reach | (reach @ F.T)
            found.append(_as_numbers(reach))
        return found

    @property
    def dropped(self) -> str:
        return f"SnAp-{self.n} drops what takes more than {self.n} steps to arrive"


def _as_numbers(reach: np.ndarray) -> np.ndarray:
    """Set of hidden values as their numbers, (units, size of the largest), -1 for none."""
    width = int(reach.sum(1).max(initial=0))
    order = np.argsort(~reach, axis=1, kind="stable")[:, :width]
    return np.where(np.take_along_axis(reach, order, 1), order, -1)
