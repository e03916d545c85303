"""The learner's state: one object that every program takes and returns."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from etrace_bridge.rules import Carry


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LearnerState:
    """Everything that changes while a learner learns; a pytree.

    Attributes:
        theta: weights.
        opt: the update's state.
        hidden: hidden states.
        other: other arrays that a step carries: running statistics, random keys.
        trace: the rule's memory; None until a step needs it.
        alarm: what the guard found, see `guard`.
    """

    theta: list[Any]
    opt: Any
    hidden: list[Any]
    other: list[Any]
    trace: Any
    alarm: Any

    def replace(self, **changes: Any) -> LearnerState:
        """Return a state with some fields changed."""
        return replace(self, **changes)

    @property
    def carry(self) -> Carry:
        """What goes from one chunk to the next: hidden states, other arrays and trace."""
        return Carry(self.hidden, self.other, self.trace)

    def with_carry(self, carry: Carry) -> LearnerState:
        """Return the state after a chunk."""
        return replace(self, hidden=carry.hidden, other=carry.other, trace=carry.trace)
