"""The learner's programs as pure functions: a step, the gradients of a sequence, an update from a sequence, a prediction.

Each takes and gives `Values`. The learner jits them on the flat list of arrays, which it donates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from etrace_bridge.engine.chunk_bptt import scan_steps
from etrace_bridge.engine.plan import ChunkPlan
from etrace_bridge.engine.program import StepProgram
from etrace_bridge.engine.sequence import run_sequence, step_weights
from etrace_bridge.learning.guard import after, choose, full_verdict, hold_back, quick_verdict, to_watch
from etrace_bridge.learning.optimizers import Updater
from etrace_bridge.rules import Carry, Chunk, ChunkResult, Rule


class Values(NamedTuple):
    """Everything that changes while a learner learns.

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


@dataclass(frozen=True)
class Recipe:
    """What the programs of a learner have in common.

    Attributes:
        program: the compiled step.
        rule: the learning rule.
        loss: `(output, target) -> scalar` on JAX arrays; None where no loss is needed.
        updater: gradients to new weights; None if they leave the program.
        names: names of the weights.
        resets: for each of the other arrays, whether it starts anew with a sequence.
        reduction: `"mean"` or `"sum"` over steps.
        guard: keep the old values when the new ones are not finite.
    """

    program: StepProgram
    rule: Rule
    loss: Callable[[Any, Any], Any] | None
    updater: Updater | None
    names: tuple[str, ...]
    resets: tuple[bool, ...]
    reduction: str
    guard: bool

    def run(self, theta: Sequence[Any], state: Any, data: Any, fresh: bool, final: bool) -> ChunkResult:
        """Runs the rule on one chunk from (hidden, other, trace)."""
        args, targets, weights = data
        return self.rule.chunk(self.program, theta, Carry(*state), Chunk(args, targets, weights, self.loss), fresh, final)

    def chunk(self, *chunk: Any):
        """The same: gradients, losses, outputs, new (hidden, other, trace)."""
        result = self.run(*chunk)
        new = result.carry
        return result.grads, result.losses, result.outputs, (new.hidden, new.other, new.trace)

    def apply(self, grads: Sequence[Any], opt: Any, theta: Sequence[Any]) -> tuple[list[Any], Any]:
        """New weights and optimizer state."""
        if self.updater is None:
            return list(theta), opt
        named, opt = self.updater.update(self.named(grads), opt, self.named(theta))
        return [named[name] for name in self.names], opt

    def named(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Arrays by weight name."""
        return dict(zip(self.names, arrays, strict=True))

    def checked(self, old: Values, new: Values, losses: Any, grads: Sequence[Any]) -> Values:
        """`new`, or `old` for good once a loss, gradient, new weight or hidden state was not finite."""
        if not self.guard:
            return new
        fine, alarm = full_verdict(old.alarm, [losses, *zip(grads, new.theta, strict=True), *new.hidden])
        return hold_back(fine, new._replace(alarm=alarm), old._replace(alarm=alarm))

    def begin(self, start: Any, other: Sequence[Any]) -> tuple[Any, Any, Any]:
        """States and trace before a sequence of its own: what belongs to the model (running statistics, keys) is current."""
        hidden, first = start
        return hidden, [s if r else o for s, o, r in zip(first, other, self.resets, strict=True)], self.rule.init(self.program)

    def end(self, before: Sequence[Any], after: Sequence[Any]) -> list[Any]:
        """The other arrays after such a sequence: what belongs to the model has moved on."""
        return [b if r else a for b, a, r in zip(before, after, self.resets, strict=True)]

    def after_sequence(self, before: Values, after: Values) -> Values:
        """What such a sequence leaves of all values: hidden states and trace are as before."""
        return after._replace(hidden=before.hidden, other=self.end(before.other, after.other), trace=before.trace)


def make_step(recipe: Recipe, own_update: bool) -> Callable:
    """`(values, args, target) -> (values, loss, output, gradients)`, one time step.

    Args:
        recipe: what to run.
        own_update: the update is part of the program; otherwise the gradients leave it.
    """

    is_product = recipe.program.only_traced

    def step(values: Values, args: Sequence[Any], target: Any):
        theta = values.theta
        data = ([a[None] for a in args], jax.tree.map(lambda t: t[None], target), jnp.ones(1, theta[0].dtype))
        state = (values.hidden, values.other, values.trace)
        result = recipe.run(theta, state, data, False, False)
        grads, after_it = result.grads, result.carry
        hidden, other, trace = after_it.hidden, after_it.other, after_it.trace
        loss, output = None if result.losses is None else result.losses[0], jax.tree.map(lambda o: o[0], result.outputs)
        new = Values(theta, values.opt, hidden, other, trace, values.alarm)
        if not own_update:
            return new, loss, output, grads
        if not recipe.guard:
            if grads is not None:
                theta, opt = recipe.apply(grads, values.opt, theta)
                new = new._replace(theta=theta, opt=opt, trace=choose(after(True, theta), trace, values.trace))
            return new, loss, output, None
        fine, alarm = quick_verdict(values.alarm, (loss, hidden, to_watch(grads, values.trace, result.factors, is_product)))
        if grads is not None:
            updated = recipe.apply(grads, values.opt, theta)
            theta, opt = hold_back(fine, updated, (theta, values.opt))
            new, fine = new._replace(theta=theta, opt=opt), after(fine, theta)
        kept = hold_back(fine, (hidden, other, trace), state)
        return Values(new.theta, new.opt, *kept, alarm), loss, output, None

    return step


def make_gradients(recipe: Recipe, plan: ChunkPlan, carry: bool) -> Callable:
    """`(theta, (hidden, other, trace), args, targets, mask) -> (gradients, losses, outputs, weights, state)`.

    Without `carry` the trace before the sequence is new, and the one after it is not wanted.
    """

    def run(theta: Sequence[Any], state: Any, args: Sequence[Any], targets: Any, mask: Any):
        weights = step_weights(args[0].shape[0], mask, recipe.reduction).astype(theta[0].dtype)
        if not carry:
            state = (*state[:2], recipe.rule.init(recipe.program))
        grads, losses, outputs, new = run_sequence(
            lambda *chunk: recipe.chunk(theta, *chunk), state, (list(args), targets, weights), plan, not carry, not carry
        )
        return grads, losses, outputs, weights, new if carry else (new[0], new[1], None)

    return run


def make_update(recipe: Recipe, plan: ChunkPlan, carry: bool, by_chunk: bool) -> Callable:
    """`(values, start, args, targets, mask) -> (values, losses, outputs, weights)`: gradients and updates of a sequence.

    Args:
        recipe: what to run.
        plan: how the sequence is divided.
        carry: start from the values' own states and trace, and keep those at the end; `start` is then None. Otherwise start from
            `start` (hidden, other); the values' own hidden states and trace stay as they are.
        by_chunk: one update a chunk, from the mean or sum over its steps; otherwise one for the whole sequence.
    """

    def run(values: Values, start: Any, args: Sequence[Any], targets: Any, mask: Any):
        state = (values.hidden, values.other, values.trace) if carry else recipe.begin(start, values.other)
        ones = jnp.ones(args[0].shape[0], values.theta[0].dtype)
        steps = ones if mask is None else mask.astype(ones.dtype)
        weights = step_weights(len(ones), mask, recipe.reduction).astype(ones.dtype)
        if by_chunk:
            new, losses, outputs = _update_by_chunk(recipe, values, state, (list(args), targets, steps), plan, carry)
        else:
            grads, losses, outputs, state = run_sequence(
                lambda *chunk: recipe.chunk(values.theta, *chunk), state, (list(args), targets, weights), plan, not carry, not carry
            )
            theta, opt = recipe.apply(grads, values.opt, values.theta)
            new = Values(theta, opt, *state, values.alarm)
            new = recipe.checked(values, new if carry else recipe.after_sequence(values, new), losses, grads)
        return new, losses, outputs, weights

    return run


def _update_by_chunk(recipe: Recipe, values: Values, state: Any, data: Any, plan: ChunkPlan, carry: bool):
    def chunk(now: Values, part: Any, fresh: bool, final: bool):
        args, targets, steps = part
        weights = steps
        if recipe.reduction == "mean":  # a chunk that is masked altogether has no mean
            weights = steps / jnp.maximum(jnp.sum(steps), jnp.finfo(steps.dtype).tiny)
        state = (now.hidden, now.other, now.trace)
        grads, losses, outputs, (hidden, other, trace) = recipe.chunk(now.theta, state, (args, targets, weights), fresh, final)
        theta, opt = recipe.apply(grads, now.opt, now.theta)
        new = recipe.checked(now, Values(theta, opt, hidden, other, trace, now.alarm), losses, grads)
        return None, losses, outputs, new

    begun = values._replace(hidden=state[0], other=state[1], trace=state[2])
    _, losses, outputs, done = run_sequence(chunk, begun, data, plan, not carry, not carry)
    return done if carry else recipe.after_sequence(values, done), losses, outputs


def make_prediction(program: StepProgram) -> Callable:
    """`(theta, hidden, other, args) -> outputs` of a sequence."""

    def run(theta: Sequence[Any], hidden: Sequence[Any], other: Sequence[Any], args: Sequence[Any]) -> Any:
        return scan_steps(program, theta, hidden, other, list(args))[0]

    return run
