"""Runs a trace system with a dense memory: the trace is read and written once per chunk.

For K steps with fixed weights the sum of `g_t` is, exactly,

    a_(t-1) = b_t + D_t^T a_t,   M_(t-1) = M_t D_t          (a_K = 0, M_K = I)
    sum of g_t = direct + sum of (a_t df_t) ⊗ x_t + a_0 · eps_0
    eps_K      = M_0 eps_0 + sum of (M_t df_t) ⊗ x_t

`a_t` is the cotangent that later steps of the chunk give the rows after step t, `M_t` how the rows
after step K depend on them. The passes run in blocks of steps, latest first (`schedule.blocks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge.rules.base import Carry, ChunkResult
from etrace_bridge.rules.trace_rule import TraceRule, TraceSystem
from etrace_bridge.schedule.blocks import forward_in_blocks, run_blocks
from etrace_bridge.schedule.chunk_plan import block_steps
from etrace_bridge.schedule.contraction import (
    add_contacts,
    in_view_order,
    view_gradients,
    weight_gradients,
)
from etrace_bridge.schedule.suffix import suffix_scan, suffix_start
from etrace_bridge.schedule.traces import TraceRows, advance_traces, read_traces
from etrace_bridge.schedule.window import Window
from etrace_bridge.step.linearise import Grouped, group_states, upstream_gradient
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.reverse import chunk_gradient
from etrace_bridge.step.steps import Steps


@dataclass(frozen=True)
class _Backward:
    """What the backward pass over a chunk gives.

    Attributes:
        a0: cotangent of the rows before the chunk.
        M0: how the rows after the chunk depend on those before it; None if not wanted.
        summed: gradients of weights outside traced contacts, and of views by contact; None if not
            wanted.
        losses: (K,) losses.
        outputs: outputs of the K steps.
        rows: `M_t df_t`; None if not wanted.
        at_taps: of a single step, the direct term at the taps.
    """

    a0: Grouped
    M0: Any
    summed: tuple[list[Any], dict[int, jax.Array]] | None
    losses: Any
    outputs: Any
    rows: TraceRows | None
    at_taps: list[Any] | None


def run_dense(window: Window) -> ChunkResult:
    """Run one chunk."""
    program, rule, size = window.program, window.rule, block_steps(window.program, window.length)
    whole = _forward(window, size)
    back = _backward(window, whole, size)
    if window.has_loss and rule.reverse_inside:
        back = _with_reverse_mode(window, back)
    grads, M0 = None, back.M0
    if back.summed is not None:
        direct, by_contact = back.summed[0], in_view_order(program, back.summed[1])
        if not window.fresh:
            past, M0 = read_traces(program, back.a0, window.carry.trace, M0)
            by_contact = add_contacts(by_contact, past)
        pulled = weight_gradients(program, window.theta, by_contact)
        grads = [x + y for x, y in zip(direct, pulled, strict=True)]
    memory, factors = window.carry.trace, None
    if back.rows is not None:
        xs = whole.contact_data()
        memory = advance_traces(program, memory, back.rows, xs, M0, window.fresh)
        if window.length == 1 and not rule.reverse_inside:
            factors = (back.a0, back.at_taps, M0, back.rows, xs)
    carry = Carry(whole.forward.new_hidden, whole.forward.new_other, memory)
    return ChunkResult(grads, back.losses, back.outputs, carry, factors)


def _forward(window: Window, size: int) -> Steps:
    """Return the chunk's steps after their forward pass."""
    program, theta, carry = window.program, window.theta, window.carry
    env = program.weight_env(theta)
    loop_env, args = env | program.loop_env(theta), window.data.args
    forward = forward_in_blocks(program, loop_env, carry.hidden, carry.other, args, size)
    return window.steps(env, forward)


def _backward(window: Window, whole: Steps, size: int) -> _Backward:
    """Return the passes over the steps, in blocks, latest first."""
    rule, wants_trace = window.rule, not window.final
    by_system = window.has_loss and not rule.reverse_inside

    def block(later: Any, part: Any):
        """Run steps whose later ones are done: (a, M) before them; sums; arrays by step."""
        steps = whole.part(*part)
        system = rule.system(steps)
        direct = system.direct
        b = system.b if by_system else jax.tree.map(jnp.zeros_like, system.b)
        a, a0, M, M0 = suffix_scan(b, system.D, wants_trace, later)
        alone = later is None and steps.length == 1  # nothing follows, so a = 0 and M = I
        summed = _gradient(rule, steps, system, None if alone else a) if by_system else None
        rows = _trace_rows(system, M, alone) if wants_trace else None
        losses = direct.losses if by_system else None
        outputs = None if window.has_loss and rule.reverse_inside else direct.outputs
        at_taps = direct.at_taps if window.length == 1 else None
        return (a0, M0), summed, (losses, outputs, rows, at_taps)

    start = None
    if size < window.length:
        rows = _rows_after(rule, whole.program, whole.forward.new_hidden)
        start = suffix_start(rows, None, wants_trace)
    (a0, M0), summed, made = run_blocks(block, start, whole.parts(), size, reverse=True)
    return _Backward(a0, M0, summed, *made)


def _with_reverse_mode(window: Window, back: _Backward) -> _Backward:
    """Return the gradient inside the chunk, and `a_0` of the states, by exact reverse mode."""
    exact = chunk_gradient(window.program, window.theta, window.carry, window.data)
    pairs = zip(exact.a0, back.a0, strict=True)
    a0 = [[*states, *rows[len(states) :]] for states, rows in pairs]
    inside = {"summed": (exact.grads, {}), "losses": exact.losses, "outputs": exact.outputs}
    return replace(back, a0=a0, **inside)


def _rows_after(rule: TraceRule, program: StepProgram, hidden: Sequence[jax.Array]) -> Grouped:
    """Return arrays of the shape of every row: the states, and more like the first of them."""
    states = group_states(program, hidden)
    return [
        [*rows, *[rows[0]] * (count - len(rows))]
        for rows, count in zip(states, rule.rows(program), strict=True)
    ]


def _gradient(
    rule: TraceRule, steps: Steps, system: TraceSystem, a: Grouped | None
) -> tuple[list[Any], dict[int, jax.Array]]:
    """Return the direct gradient and credit within the chunk.

    Of the weights outside traced contacts, and of views by contact.
    """
    program, direct, at_taps = steps.program, system.direct.direct, list(system.direct.at_taps)
    if a is not None:
        at_taps = [
            y if p is None else y + p for y, p in zip(at_taps, system.df.pull(a), strict=True)
        ]
        if rule.follows_upstream and program.upstream:
            states = [
                rows[: group.num_state] for rows, group in zip(a, program.groups, strict=True)
            ]
            more, taps = upstream_gradient(steps, states)
            direct = [x + y for x, y in zip(direct, more, strict=True)]
            at_taps = [
                y + taps[n] if n in program.upstream_taps else y for n, y in enumerate(at_taps)
            ]
    return direct, view_gradients(program, steps.env, at_taps, steps.contact_data())


def _trace_rows(system: TraceSystem, M: Any, M_is_identity: bool) -> TraceRows:
    """Return `M_t df_t` for every step."""
    df, like = system.df, system.b
    distinct = sorted({n for n in df.first_taps if n is not None})

    def row(r: int) -> Grouped:
        """Return row r of every group's `M_t`; zeros for groups with fewer rows."""
        rows = [M_g[r] if r < len(M_g) else [None] * len(M_g) for M_g in M]
        pairs = [
            zip(entries, likes, strict=True) for entries, likes in zip(rows, like, strict=True)
        ]
        return [[jnp.zeros_like(x) if m is None else m for m, x in group] for group in pairs]

    values = []
    for pull, units in zip(df.pulls, df.units, strict=True):
        pulled = units if M_is_identity else [pull(row(r)) for r in range(len(units))]
        values.append([{n: at[n] for n in distinct if at[n] is not None} for at in pulled])
    return TraceRows(values, df.first_taps)
