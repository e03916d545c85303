"""Programs of the fidelity meter: the slope that the rule's gradient predicts along a direction,
and the true slope of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge.learning.programs import ProgramSpec, make_step
from etrace_bridge.rules import Carry, Chunk
from etrace_bridge.schedule.chunk_plan import ChunkPlan
from etrace_bridge.schedule.sequence import step_weights
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.slope import run_slope, zero_tangent


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeterState:
    """What the meter carries along a stream; a pytree.

    Attributes:
        direction: the direction `v`, of length one, one array per weight; zeros while there is
            none.
        tangent: how the states move along it.
        total: sum of the rule's gradients in this window, which gives the next direction.
        slope: sum of the true slopes along `v`.
        predicted: sum of the slopes that the rule's gradients give, `g · v`.
    """

    direction: list[Any]
    tangent: list[Any]
    total: list[Any]
    slope: Any
    predicted: Any


@dataclass(frozen=True)
class MeterWindow:
    """The state of a meter within a stream.

    Attributes:
        state: its state after the last steps; None before the first.
        begins: the next steps begin a window.
        counts: 1 if the next steps count, 0 if not.
    """

    state: MeterState | None
    begins: bool
    counts: float


def first_meter_state(program: StepProgram) -> MeterState:
    """Return the state before the first direction is known."""
    zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in program.weight_vars]
    zero = jnp.zeros((), program.weight_vars[0].aval.dtype)
    return MeterState(zeros, zero_tangent(program), list(zeros), zero, zero)


def next_window(program: StepProgram, meter: MeterState) -> MeterState:
    """Start a window along the last one's mean gradient; the old direction stays if that is zero."""
    size = _norm(meter.total)
    unit, used = _unit(meter.total, size), size > 0
    direction = [jnp.where(used, u, v) for u, v in zip(unit, meter.direction, strict=True)]
    start = first_meter_state(program)
    return MeterState(direction, start.tangent, start.total, start.slope, start.predicted)


def make_own_slope(spec: ProgramSpec, plan: ChunkPlan) -> Callable:
    """Return `(theta, (hidden, other), args, targets, mask) -> (slope, predicted)` of a sequence
    that starts anew.

    The direction is the rule's own gradient `g` of this sequence, so `predicted` is `|g|`.
    """

    def run(theta: Sequence[Any], states: tuple, args: Sequence[Any], targets: Any, mask: Any):
        weights = step_weights(args[0].shape[0], mask, spec.reduction).astype(theta[0].dtype)
        before = Carry(*states, trace=spec.core.zero_trace())
        targets, _ = spec.prepare(theta, before, args, targets)
        data = spec.data(args, targets, weights)
        grads = spec.core.sequence(theta, before, data, plan, True, True)[0]
        size = _norm(grads)
        program = spec.core.program
        arrays = list(args), targets, weights
        start = zero_tangent(program)
        along = run_slope(program, theta, _unit(grads, size), states, start, arrays, spec.loss)
        return jnp.sum(along.slopes), size

    return run


def make_stream_slope(spec: ProgramSpec, plan: ChunkPlan) -> Callable:
    """Return the program of a meter over steps of a stream.

    `(theta, (hidden, other, trace), meter, counts, args, targets, mask) -> meter`
    """

    def run(theta: Sequence[Any], carry: tuple, meter: MeterState, counts: Any, *steps: Any):
        args, targets, mask = steps
        weights = step_weights(args[0].shape[0], mask, spec.reduction).astype(theta[0].dtype)
        before = Carry(*carry)
        targets, _ = spec.prepare(theta, before, args, targets)
        data = spec.data(args, targets, weights)
        grads = spec.core.sequence(theta, before, data, plan, False, True)[0]
        return _observe(spec, theta, before, data, grads, meter, counts)

    return run


def make_metered_step(spec: ProgramSpec) -> Callable:
    """Return `(state, args, target, meter, counts) -> (state, loss, output, meter)`: a step
    together with its slope.
    """
    return make_step(spec, own_update=True, observe=partial(_observe, spec))


def _observe(
    spec: ProgramSpec,
    theta: Sequence[Any],
    before: Carry,
    data: Chunk,
    grads: Sequence[Any] | None,
    meter: MeterState,
    counts: Any,
) -> MeterState:
    """Return the meter's state after some steps; `counts` is 0 while the tangent warms up, then 1."""
    states, arrays = (before.hidden, before.other), (data.args, data.targets, data.weights)
    loss = None if grads is None else spec.loss
    along = run_slope(
        spec.core.program, theta, meter.direction, states, meter.tangent, arrays, loss
    )
    if grads is None:
        return MeterState(meter.direction, along.tangent, meter.total, meter.slope, meter.predicted)
    total = [t + g for t, g in zip(meter.total, grads, strict=True)]
    predicted = sum(jnp.vdot(g, v) for g, v in zip(grads, meter.direction, strict=True))
    dtype = meter.slope.dtype
    return MeterState(
        meter.direction,
        along.tangent,
        total,
        meter.slope + counts * jnp.sum(along.slopes).astype(dtype),
        meter.predicted + counts * jnp.asarray(predicted, dtype),
    )


def _norm(arrays: Sequence[Any]) -> Any:
    return jnp.sqrt(sum(jnp.sum(jnp.square(a)) for a in arrays))


def _unit(arrays: Sequence[Any], size: Any) -> list[Any]:
    scale = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1), 0)
    return [a * scale.astype(a.dtype) for a in arrays]
