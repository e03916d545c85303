"""OSTL: online spatio-temporal learning (Bohnstingl et al. 2022), exact in each layer by itself.

    J_t = (dh_t/dh_(t-1)) J_(t-1) + dh_t/dtheta         for the states h of a layer and its own weights
    g_t = dl_t/dtheta |_(h_(t-1) fixed)  +  (dl_t/dh_(t-1)) J_(t-1)

The derivative of the states of a layer by the old ones goes through its recurrent weights too. What
a lower layer did to an upper one in earlier steps is dropped; within a step the loss reaches it
through the layers above. A layer is a hidden group. For one layer this is RTRL; for layers without
recurrent weights it is D-RTRL, at more memory. `rules/sparse_influence.py` has the recursion by
unit: the set of a unit are all states of its layer.

Memory: B·H·S·P for a layer of H positions with S states. Time per step: n vjps of the step and
(H·S)²·B·P. Exact for a single layer, and where D-RTRL is. Weights that reach a state only through
other weights, as an encoder's, have credit inside the chunk alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from etrace_bridge.rules.base import register_rule
from etrace_bridge.rules.sparse_influence import SparseInfluence
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.units import Layout, state_numbers


@register_rule
@dataclass(frozen=True)
class OSTL(SparseInfluence):
    """Layers by themselves."""

    name: ClassVar[str] = "ostl"

    def sets(self, program: StepProgram, layout: Layout) -> list[np.ndarray]:
        numbers = state_numbers(program, layout.rows, layout.size)
        found = []
        for family in layout.families:
            states = [numbers[g] for g in dict.fromkeys(g for g, _ in family.groups)]
            flat = [s[: len(s) // layout.rows] for group in states for s in group]
            own = np.concatenate([np.zeros(0, int), *flat])
            found.append(np.tile(own, (family.units // layout.rows, 1)))
        return found

    @property
    def dropped(self) -> str:
        return "OSTL drops what one layer did to another in earlier steps"
