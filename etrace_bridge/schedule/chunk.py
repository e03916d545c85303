"""Runs one chunk of K steps under a rule; K = 1 is the online step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax

from etrace_bridge.rules.base import Carry, Chunk, ChunkResult, Rule
from etrace_bridge.schedule.dense import run_dense
from etrace_bridge.schedule.factored import run_factored
from etrace_bridge.schedule.window import Window
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.reverse import chunk_gradient, scan_steps


def run_chunk(
    rule: Rule,
    program: StepProgram,
    theta: Sequence[jax.Array],
    carry: Carry,
    data: Chunk,
    fresh: bool,
    final: bool,
) -> ChunkResult:
    """Advance K steps: their gradient, losses and outputs, and states and memory after them.

    The arguments are those of `Window`.
    """
    window = Window(rule, program, theta, carry, data, fresh, final)
    return _RUN[rule.schedule](window)


def _run_reverse(window: Window) -> ChunkResult:
    rule, program, theta = window.rule, window.program, window.theta
    carry, data = window.carry, window.data
    grads = losses = discarded = None
    if not window.has_loss:
        outputs, hidden, other = scan_steps(program, theta, carry.hidden, carry.other, data.args)
    else:
        after = None if window.fresh else partial(rule.future, program, carry.trace)
        inside = chunk_gradient(program, theta, carry, data, after)
        grads, losses, outputs = list(inside.grads), inside.losses, inside.outputs
        hidden, other = inside.hidden, inside.other
        past = None if window.fresh else carry.trace
        discarded = rule.discarded(program, past, inside.h0)
        if not window.fresh:
            for n, gradient in rule.past(program, theta, carry.trace, inside.h0).items():
                grads[n] = grads[n] + gradient.astype(grads[n].dtype)
    memory = carry.trace
    if not window.final:
        memory = rule.advance(program, theta, carry, data, None if window.fresh else memory)
    new = Carry(list(hidden), list(other), memory)
    return ChunkResult(grads, losses, outputs, new, discarded=discarded)


_RUN = {"reverse": _run_reverse, "backward": run_dense, "forward": run_factored}
