"""A learner's programs for a device that is not there: made, lowered or compiled, and not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.guard import new_alarm
from etrace_bridge.learning.online_core import OnlineCore
from etrace_bridge.learning.optimizers import make_updater
from etrace_bridge.learning.programs import ProgramSpec, make_gradients, make_step
from etrace_bridge.learning.state import LearnerState
from etrace_bridge.rules import Rule
from etrace_bridge.schedule.chunk_plan import divide


class Squares:
    """The mean squared error, as a learner's loss."""

    reads = None  # all outputs

    def __call__(self, output: Any, target: Any) -> Any:
        """Return the loss of one step."""
        return jnp.mean((output - target) ** 2)


class Programs:
    """The programs of one learner and the shapes that they take.

    Args:
        compiled: the compiled model, of one input and one output.
        rule: the learning rule.
        optimizer: for the updates.
    """

    def __init__(self, compiled: CompiledStep, rule: Rule, optimizer: Any = None) -> None:
        updater = make_updater(optimizer or optax.adam(1e-3), None, None, None, 1, None, False)
        self.spec = ProgramSpec(OnlineCore(compiled, rule), Squares(), updater, "mean", True)
        theta, hidden, other = compiled.read()
        self.state = jax.eval_shape(
            lambda: LearnerState(
                list(theta),
                updater.init(compiled.by_weight_name(theta)),
                list(hidden),
                list(other),
                rule.init(compiled.program),
                jnp.asarray(new_alarm(0, 1 + len(theta) + len(hidden))),
            )
        )
        shape, kind = compiled.signature[0]
        output = compiled.program.out_vars[0].aval
        self.input = jax.ShapeDtypeStruct(shape, jnp.dtype(kind))
        self.target = jax.ShapeDtypeStruct(output.shape, self.input.dtype)

    def step(self) -> tuple[Callable, tuple]:
        """An online step with its update."""
        return make_step(self.spec, True), (self.state, [self.input], self.target)

    def gradients(self, steps: int, chunk: int) -> tuple[Callable, tuple]:
        """The gradients of a sequence."""
        carry = (self.state.hidden, self.state.other, self.state.trace)
        many = lambda x: jax.ShapeDtypeStruct((steps, *x.shape), x.dtype)
        run = make_gradients(self.spec, divide(steps, chunk), True)
        return run, (self.state.theta, carry, [many(self.input)], many(self.target), None)
