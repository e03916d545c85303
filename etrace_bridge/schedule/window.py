"""One chunk of steps to run: the arguments of every way of running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from etrace_bridge._jax_compat import Var
from etrace_bridge.rules.base import Carry, Chunk
from etrace_bridge.step.forward import Forward
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.steps import Steps, no_loss


@dataclass(frozen=True)
class Window:
    """K steps under a rule, with fixed weights.

    Attributes:
        rule: the rule.
        program: the step.
        theta: the weights.
        carry: states and memory before the chunk.
        data: the K steps.
        fresh: the memory is zero, so it need not be read.
        final: the memory is not used afterwards, so it need not be written.
    """

    rule: Any
    program: StepProgram
    theta: Sequence[jax.Array]
    carry: Carry
    data: Chunk
    fresh: bool
    final: bool

    @property
    def length(self) -> int:
        """K."""
        return self.data.args[0].shape[0]

    @property
    def has_loss(self) -> bool:
        """Whether a gradient is wanted."""
        return self.data.loss is not None

    def steps(self, env: dict[Var, Any], forward: Forward) -> Steps:
        """Return the chunk's steps after their forward pass."""
        data = self.data
        values = data.args, data.targets, data.weights, data.loss or no_loss
        return Steps(self.program, self.theta, env, forward, *values)
