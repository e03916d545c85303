"""A learner's step for any batch size: the step of a batch of one, mapped over batch elements.

A model is traced for inputs of one shape, so its step has one batch size. If batch elements do not
interact, and the loss is the mean or the sum of theirs, the step of a batch of one under `vmap` is
the same step for any number of elements. Both conditions are tested before anything is written, on
a batch of three over two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import NotSupportedError
from etrace_bridge.frontend import BridgedModule, wrap
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.losses import JaxLoss
from etrace_bridge.learning.modes import evaluation_mode
from etrace_bridge.learning.online_core import OnlineCore
from etrace_bridge.learning.programs import ProgramSpec
from etrace_bridge.learning.state import LearnerState
from etrace_bridge.lowering import jit
from etrace_bridge.rules import Carry
from etrace_bridge.step.reverse import scan_steps

if TYPE_CHECKING:
    from etrace_bridge.learning.runtime import Runtime

TRIAL = 3  # elements of the batch on which the mapped step is tested
WHY = "A step for any batch size needs batch elements that do not depend on each other, and {}. Export it for one batch size."


@dataclass(frozen=True)
class MappedStep:
    """A step of a batch of one, mapped over the batch.

    Attributes:
        spec: what it runs.
        evaluation: the step in evaluation mode.
        reduce: mean or sum over batch elements.
    """

    spec: ProgramSpec
    evaluation: CompiledStep
    reduce: Callable[..., Any]

    def tuned_for(self, platform: str) -> MappedStep:
        """Return the same step for another kind of device."""
        spec = replace(self.spec, core=self.core.tuned_for(platform))
        return replace(self, spec=spec, evaluation=self.evaluation.tuned_for(platform))

    @property
    def core(self) -> OnlineCore:
        """The step of a batch of one, with its rule."""
        return self.spec.core

    def start(self) -> tuple[list[Any], list[Any], Any]:
        """Return hidden states, other arrays and trace of one element."""
        hidden, other = self.core.compiled.initial
        return hidden, other, jax.tree.map(np.asarray, self.core.zero_trace())

    def gradients(self, theta: Sequence[Any], carry: Carry, args: Sequence[Any], target: Any):
        """Return gradients, loss, output and carry after one step; every array of `carry` has a
        batch axis in front.
        """
        other_axes = _axes(self.core.compiled)

        def one(hidden: Any, other: Any, trace: Any, args_b: Any, target_b: Any):
            data = self.spec.one_step(
                theta, [a[None] for a in args_b], jax.tree.map(lambda t: t[None], target_b)
            )
            result = self.core.chunk(theta, Carry(hidden, other, trace), data, False, False)
            new = result.carry
            output = jax.tree.map(lambda o: o[0, 0], result.outputs)
            return (
                result.grads or [],
                result.losses[0],  # pyright: ignore[reportOptionalSubscript] - a learning step has a loss
                output,
                new.hidden,
                _only(new.other, other_axes),
                new.trace,
            )

        arrays = carry.hidden, carry.other, carry.trace, list(args), target
        mapped = jax.vmap(one, in_axes=(0, other_axes, 0, 0, 0))(*arrays)
        grads, losses, output, hidden, moved, trace = mapped
        grads = [self.reduce(g, axis=0) for g in grads]
        return (
            grads,
            self.reduce(losses, axis=0),
            output,
            Carry(hidden, _moved(carry.other, moved, other_axes), trace),
        )

    def learn(
        self, state: LearnerState, args: Sequence[Any], target: Any
    ) -> tuple[LearnerState, Any, Any]:
        """Run one step with update and guard."""
        grads, loss, output, carry = self.gradients(state.theta, state.carry, args, target)
        theta, opt = self.spec.apply(grads, state.opt, state.theta)
        new = state.with_carry(carry).replace(theta=theta, opt=opt)
        return self.spec.checked(state, new, loss, grads), loss, output

    def infer(self, state: LearnerState, args: Sequence[Any]) -> tuple[LearnerState, Any]:
        """Run one step in evaluation mode; the trace is zero afterwards."""
        other_axes = _axes(self.core.compiled)

        def one(hidden: Any, other: Any, args_b: Any):
            outputs, hidden, new = scan_steps(
                self.evaluation.program, state.theta, hidden, other, [a[None, None] for a in args_b]
            )
            return jax.tree.map(lambda o: o[0, 0], outputs), hidden, _only(new, other_axes)

        output, hidden, moved = jax.vmap(one, in_axes=(0, other_axes, 0))(
            state.hidden, state.other, list(args)
        )
        trace = jax.tree.map(jnp.zeros_like, state.trace)
        return state.with_carry(
            Carry(hidden, _moved(state.other, moved, other_axes), trace)
        ), output


def _axes(compiled: CompiledStep) -> list[int | None]:
    """Return 0 for each of the other arrays that every batch element has for itself, else None."""
    return [0 if resets else None for resets in compiled.resets]


def _only(arrays: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Return the mapped arrays, with zeros in place of the others, which no element changes."""
    return [a if axis == 0 else jnp.zeros(()) for a, axis in zip(arrays, axes, strict=True)]


def _moved(before: Sequence[Any], after: Sequence[Any], axes: Sequence[int | None]) -> list[Any]:
    """Return all other arrays after a step: new values of the mapped ones, old ones of the rest."""
    return [a if axis == 0 else b for b, a, axis in zip(before, after, axes, strict=True)]


def map_step(runtime: Runtime, loss: JaxLoss, target: Any) -> MappedStep:
    """Return the learner's step for any batch size, tested on a step of three elements."""
    net, own = runtime.net, runtime.store.compiled
    if not isinstance(net, BridgedModule):
        raise NotSupportedError(
            "A step for any batch size is made for torch models only. Export it for one batch size."
        )
    if any(not t.shape or t.shape[0] != own.batch for t in jax.tree.leaves(target)):
        raise NotSupportedError(WHY.format("the target has no batch axis"))

    def compile_for(batch: int) -> CompiledStep:
        return CompiledStep(
            wrap(net.model),
            [np.zeros((batch, *shape[1:]), dtype) for shape, dtype in own.signature],
        )

    single, several = compile_for(1), compile_for(TRIAL)
    with evaluation_mode(net):
        quiet = compile_for(1)
    changed = [
        n
        for n, r, (i, o) in zip(
            single.other_names, single.resets, single.program.other_vars, strict=True
        )
        if not r and o is not i
    ]
    if changed:
        raise NotSupportedError(
            WHY.format(
                f"a step changes {', '.join(f'`{n}`' for n in changed)}, which all elements share"
            )
        )
    names = [(step.weight_names, step.hidden_names, step.other_names) for step in (single, quiet)]
    if names[0] != names[1]:
        raise NotSupportedError(
            WHY.format("the model has other weights or states in evaluation mode")
        )
    spec, rule = runtime.programs.spec(loss), runtime.store.rule
    for reduce in (jnp.mean, jnp.sum):
        made = MappedStep(replace(spec, core=OnlineCore(single, rule)), quiet, reduce)
        if _agrees(made, replace(spec, core=OnlineCore(several, rule)), target):
            return made
    raise NotSupportedError(
        WHY.format(
            "here outputs or gradients of three elements together are not those of three single "
            "ones"
        )
    )


def _agrees(mapped: MappedStep, spec: ProgramSpec, target: Any) -> bool:
    """Return whether both ways give the same outputs, losses and gradients in two steps of three
    random elements.
    """
    draw, compiled = np.random.default_rng(0), spec.core.compiled

    def like(shape: Any, dtype: Any) -> np.ndarray:
        drawn = (
            draw.standard_normal(shape)
            if jnp.issubdtype(dtype, jnp.floating)
            else draw.integers(0, 2, shape)
        )
        return drawn.astype(dtype)

    def repeat(x: Any) -> np.ndarray:
        return np.broadcast_to(x, (TRIAL, *np.shape(x)))

    theta = compiled.read()[0]
    together = (*map(list, compiled.initial), spec.core.zero_trace())
    hidden, other, trace = mapped.start()
    other = [
        repeat(x) if resets else x
        for x, resets in zip(other, mapped.core.compiled.resets, strict=True)
    ]
    apart = [repeat(x) for x in hidden], other, jax.tree.map(repeat, trace)

    def both(together: tuple, apart: tuple, args: Any, targets: Any):
        result = spec.core.chunk(
            theta, Carry(*together), spec.one_step(theta, args, targets), False, False
        )
        grads, loss, output, new = mapped.gradients(theta, Carry(*apart), args, targets)
        expected = [
            *(result.grads or ()),
            result.losses[0],  # pyright: ignore[reportOptionalSubscript] - a learning step has a loss
            jax.tree.map(lambda o: o[0], result.outputs),
        ]
        carries = [(c.hidden, c.other, c.trace) for c in (result.carry, new)]
        return *carries, expected, [*grads, loss, output]

    run = jit(both)
    for _ in range(2):
        args = [like(shape, dtype) for shape, dtype in compiled.signature]
        targets = jax.tree.map(lambda t: like((TRIAL, *t.shape[1:]), t.dtype), target)
        together, apart, expected, found = run(together, apart, args, targets)
        for e, f in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            e, f = np.asarray(e), np.asarray(f)
            if e.shape != f.shape or not np.allclose(
                e, f, rtol=1e-4, atol=1e-5 * max(float(np.abs(e).max(initial=0)), 1e-3)
            ):
                return False
    return True
