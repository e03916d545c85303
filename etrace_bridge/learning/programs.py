"""The learner's programs as pure functions: a step, the gradients of a sequence, an update from a
sequence.

Each takes and returns a `LearnerState`. The learner jits them on a flat list of arrays, which it
donates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp

from etrace_bridge.learning.guard import (
    choose,
    full_verdict,
    hold_back,
    is_bad,
    quick_verdict,
    to_watch,
)
from etrace_bridge.learning.online_core import OnlineCore
from etrace_bridge.learning.optimizers import Updater
from etrace_bridge.learning.sequence_loss import SequenceLoss
from etrace_bridge.learning.state import LearnerState
from etrace_bridge.lowering import Tuning
from etrace_bridge.rules import Carry, Chunk
from etrace_bridge.schedule.chunk_plan import ChunkPlan
from etrace_bridge.schedule.sequence import add_trees, run_sequence, step_weights
from etrace_bridge.step.reverse import scan_steps

Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class ProgramSpec:
    """What the programs of a learner have in common.

    Attributes:
        core: the compiled step and its rule.
        loss: `(output, target) -> scalar` on JAX arrays; None where no loss is needed.
        updater: gradients to new weights; None if they leave the program.
        reduction: `"mean"` or `"sum"` over steps.
        guard: keep the old state when the new one is not finite.
    """

    core: OnlineCore
    loss: Loss | None
    updater: Updater | None
    reduction: str
    guard: bool

    def data(self, args: Sequence[Any], targets: Any, weights: Any) -> Chunk:
        """Return steps with this learner's loss."""
        return Chunk(list(args), targets, weights, self.loss)

    def one_step(self, theta: Sequence[Any], args: Sequence[Any], target: Any) -> Chunk:
        """Return a single time step, given without a time axis."""
        return self.data(
            [a[None] for a in args],
            jax.tree.map(lambda t: t[None], target),
            jnp.ones(1, theta[0].dtype),
        )

    def prepare(
        self, theta: Sequence[Any], before: Carry, args: Sequence[Any], targets: Any
    ) -> tuple[Any, Any]:
        """Return the targets of the steps, and the steps' losses if those are known before.

        They are known for a loss over the whole sequence.
        """
        if not isinstance(self.loss, SequenceLoss):
            return targets, None
        outputs, _, _ = scan_steps(
            self.core.program, theta, before.hidden, before.other, list(args)
        )
        value, cotangents = self.loss.differentiate(outputs, targets)
        return cotangents, self.loss.in_place(value, args[0].shape[0])

    def apply(self, grads: Sequence[Any], opt: Any, theta: Sequence[Any]) -> tuple[list[Any], Any]:
        """Return new weights and optimizer state."""
        if self.updater is None:
            return list(theta), opt
        compiled = self.core.compiled
        named, opt = self.updater.update(
            compiled.by_weight_name(grads),
            opt,
            compiled.by_weight_name(theta),
            compiled.unreached_by(self.loss),
        )
        return [named[name] for name in compiled.weight_names], opt

    def checked(
        self, old: LearnerState, new: LearnerState, losses: Any, grads: Sequence[Any]
    ) -> LearnerState:
        """Return `new`; or `old`, for good, once a loss, gradient, new weight or hidden state was
        not finite.
        """
        if not self.guard:
            return new
        fine, alarm = full_verdict(
            old.alarm, [losses, *zip(grads, new.theta, strict=True), *new.hidden]
        )
        return hold_back(fine, new.replace(alarm=alarm), old.replace(alarm=alarm))

    def after_sequence(self, before: LearnerState, after: LearnerState) -> LearnerState:
        """Return the state after a sequence that started anew.

        Hidden states and trace are as before; what belongs to the model has advanced.
        """
        other = self.core.compiled.join_other(before.other, after.other)
        return after.replace(hidden=before.hidden, other=other, trace=before.trace)


def make_step(spec: ProgramSpec, own_update: bool, observe: Callable | None = None) -> Callable:
    """Return `(state, args, target, *more) -> (state, loss, output, seen)`, one time step.

    `seen` are the gradients if they leave the program. Otherwise it is what `observe` returns or,
    without it, what the rule discarded from the gradients, as in `discarded_share`.

    Args:
        spec: what to run.
        own_update: the update is part of the program; otherwise the gradients leave it.
        observe: a function of `(theta, carry before the step, step, gradients, *more)`. It runs
            beside the step, not after it, so that nothing is computed twice.
    """

    is_product, tuning = spec.core.program.only_traced, spec.core.program.tuning

    def step(state: LearnerState, args: Sequence[Any], target: Any, *more: Any):
        theta, before = state.theta, state.carry
        data = spec.one_step(theta, args, target)
        result = spec.core.chunk(theta, before, data, False, False)
        grads, after = result.grads, result.carry
        seen = (
            discarded_share(tuning, result.discarded, grads)
            if observe is None
            else observe(theta, before, data, grads, *more)
        )
        loss = None if result.losses is None else result.losses[0]
        output = jax.tree.map(lambda o: o[0], result.outputs)
        new = state.with_carry(after)
        if not own_update:
            return new, loss, output, grads
        if not spec.guard:
            if grads is not None:
                theta, opt = spec.apply(grads, state.opt, theta)
                trace = choose(tuning.order_after(True, theta), after.trace, before.trace)
                new = new.replace(theta=theta, opt=opt, trace=trace)
            return new, loss, output, seen
        watched = (loss, after.hidden, to_watch(grads, before.trace, result.factors, is_product))
        fine, alarm = quick_verdict(state.alarm, watched, tuning)
        if grads is not None:
            updated = spec.apply(grads, state.opt, theta)
            theta, opt = hold_back(fine, updated, (theta, state.opt))
            new, fine = new.replace(theta=theta, opt=opt), tuning.order_after(fine, theta)
        kept = hold_back(
            fine,
            (after.hidden, after.other, after.trace),
            (before.hidden, before.other, before.trace),
        )
        return new.with_carry(Carry(*kept)).replace(alarm=alarm), loss, output, seen

    return step


def discarded_share(tuning: Tuning, discarded: Any, grads: Sequence[Any] | None) -> Any:
    """Return what a rule discarded from gradients: the squared estimate, the bound, and the
    gradients' squared norm.

    None if the rule does not know.
    """
    if discarded is None or grads is None:
        return None
    square = sum(jnp.sum(tuning.inner_products(g, g, min(g.ndim, 1))) for g in grads)
    return jnp.append(discarded, square.astype(discarded.dtype))


def make_gradients(spec: ProgramSpec, plan: ChunkPlan, carry: bool) -> Callable:
    """Return the program of a sequence's gradients.

    `(theta, (hidden, other, trace), args, targets, mask) -> (gradients, losses, outputs, weights,
    discarded, state, bad)`.

    `discarded` is as in `discarded_share`. Without `carry` the trace before the sequence is new,
    and the state after it has only what belongs to the model. `bad` says for each hidden state,
    each other array and the trace whether NaN or infinity in it would be stored; None without a
    guard.
    """

    def run(theta: Sequence[Any], state: tuple, args: Sequence[Any], targets: Any, mask: Any):
        weights = step_weights(args[0].shape[0], mask, spec.reduction).astype(theta[0].dtype)
        before = Carry(*state) if carry else Carry(*state[:2], trace=spec.core.zero_trace())
        targets, whole = spec.prepare(theta, before, args, targets)
        data = spec.data(args, targets, weights)
        grads, losses, outputs, new, lost = spec.core.sequence(
            theta, before, data, plan, not carry, not carry
        )
        discarded = discarded_share(spec.core.program.tuning, lost, grads)
        losses = losses if whole is None else whole
        trace, bad = new.trace if carry else None, None
        if spec.guard:
            resets = spec.core.compiled.resets
            kept = [(h, carry) for h in new.hidden] + [
                (o, carry or not r) for o, r in zip(new.other, resets, strict=True)
            ]
            bad = jnp.stack(
                [is_bad(x) if is_kept else jnp.asarray(False) for x, is_kept in kept]
                + [is_bad(trace)]
            )
        return grads, losses, outputs, weights, discarded, (new.hidden, new.other, trace), bad

    return run


def make_update(spec: ProgramSpec, plan: ChunkPlan, carry: bool, by_chunk: bool) -> Callable:
    """Return `(state, start, args, targets, mask) -> (state, losses, outputs, weights)`: gradients
    and updates of a sequence.

    Args:
        spec: what to run.
        plan: how the sequence is divided.
        carry: start from the state's own hidden states and trace, and keep those at the end;
            `start` is then None. Otherwise start from `start` (hidden, other); the state's own
            hidden states and trace stay as they are.
        by_chunk: one update per chunk, from the mean or sum over its steps; otherwise one for the
            whole sequence.
    """

    def run(state: LearnerState, start: Any, args: Sequence[Any], targets: Any, mask: Any):
        before = state.carry if carry else spec.core.begin(start, state.other)
        ones = jnp.ones(args[0].shape[0], state.theta[0].dtype)
        steps = ones if mask is None else mask.astype(ones.dtype)
        weights = step_weights(len(ones), mask, spec.reduction).astype(ones.dtype)
        if by_chunk:
            data = spec.data(args, targets, steps)
            new, losses, outputs = _update_by_chunk(
                spec, state.with_carry(before), data, plan, carry
            )
            return new if carry else spec.after_sequence(state, new), losses, outputs, weights
        targets, whole = spec.prepare(state.theta, before, args, targets)
        data = spec.data(args, targets, weights)
        grads, losses, outputs, after, _ = spec.core.sequence(
            state.theta, before, data, plan, not carry, not carry
        )
        losses = losses if whole is None else whole
        theta, opt = spec.apply(grads, state.opt, state.theta)
        new = state.with_carry(after).replace(theta=theta, opt=opt)
        new = spec.checked(state, new if carry else spec.after_sequence(state, new), losses, grads)
        return new, losses, outputs, weights

    return run


def make_part(spec: ProgramSpec) -> Callable:
    """Return the program of one chunk of a sequence that starts anew.

    `(theta, hidden, other, kept, args, targets, weights) -> (hidden, other, kept, (losses, outputs,
    discarded))`. `kept` is the trace, the gradients so far, and the sum of the losses that count.
    """

    def run(theta: Sequence[Any], hidden: Any, other: Any, kept: tuple, *data: Any):
        trace, grads, total = kept
        chunk = spec.data(*data)
        result = spec.core.chunk(theta, Carry(hidden, other, trace), chunk, False, False)
        new = result.carry
        total = total + jnp.sum(jnp.where(chunk.weights != 0, result.losses, 0))
        kept = new.trace, add_trees(grads, result.grads), total
        return new.hidden, new.other, kept, (result.losses, result.outputs, result.discarded)

    return run


def make_finish(spec: ProgramSpec) -> Callable:
    """Return `(state, gradients, sum of the losses) -> (state,)`: the update after a sequence's
    chunks.
    """

    def run(state: LearnerState, grads: Sequence[Any], total: Any) -> tuple[LearnerState]:
        theta, opt = spec.apply(grads, state.opt, state.theta)
        return (spec.checked(state, state.replace(theta=theta, opt=opt), total, grads),)

    return run


def _update_by_chunk(
    spec: ProgramSpec, state: LearnerState, data: Chunk, plan: ChunkPlan, carry: bool
):
    """Make one update per chunk; return the state after all of them, losses and outputs."""

    def chunk(now: LearnerState, part: Any, fresh: bool, final: bool):
        args, targets, steps = part
        weights = steps
        if spec.reduction == "mean":  # a chunk that is masked altogether has no mean
            weights = steps / jnp.maximum(jnp.sum(steps), jnp.finfo(steps.dtype).tiny)
        result = spec.core.chunk(
            now.theta, now.carry, spec.data(args, targets, weights), fresh, final
        )
        grads = cast(list[jax.Array], result.grads)  # an update has a loss
        theta, opt = spec.apply(grads, now.opt, now.theta)
        new = now.with_carry(result.carry).replace(theta=theta, opt=opt)
        return None, result.losses, result.outputs, spec.checked(now, new, result.losses, grads)

    arrays = list(data.args), data.targets, data.weights
    _, losses, outputs, done = run_sequence(chunk, state, arrays, plan, not carry, not carry)
    return done, losses, outputs
