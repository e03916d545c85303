"""A trace system with a memory of filters over K steps; rules/pp_prop.py has the equations for one.

For K steps, `c_t = b_t · f̄_(t-1) / n_(t-1)` is a cotangent at the contact's output, and the filter
of `x` can act on it instead:

    c̃_(s-1) = c_s + alpha c̃_s                                        (c̃_K = 0)
    sum of c_t ⊗ x̄_(t-1)  =  sum of c̃_s ⊗ x_s  +  c̃_0 ⊗ x̄_0

so that there is one product over K·B for each weight, as in BPTT, and what runs step by step is
hidden-sized. Products that are only added up have one `f̄` together. The result does not depend on
K, so a chunk runs in blocks of steps, one after the other, and its buffers are those of one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge.compiler.graph import Leg
from etrace_bridge.rules.base import Carry, Chunk, ChunkResult
from etrace_bridge.rules.memory import (
    Channel,
    Factored,
    Presynaptic,
    contacts_with_data,
    find_channels,
)
from etrace_bridge.rules.trace_rule import TraceSystem
from etrace_bridge.schedule.blocks import run_blocks
from etrace_bridge.schedule.chunk_plan import block_steps
from etrace_bridge.schedule.contraction import in_view_order, view_gradients, weight_gradients
from etrace_bridge.schedule.presynaptic import PresynapticFilters, filter_features, spread_back
from etrace_bridge.schedule.traces import take_positions
from etrace_bridge.schedule.window import Window
from etrace_bridge.step.forward import run_forward
from etrace_bridge.step.linearise import Grouped
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.time import scan_time


def run_factored(window: Window) -> ChunkResult:
    """Run one chunk, block after block."""
    program, theta, rule, data = window.program, window.theta, window.rule, window.data
    size, for_loops = block_steps(program, window.length), program.loop_env(theta)
    is_whole = size == window.length
    fresh, final = window.fresh and is_whole, window.final and is_whole

    def block(before: Any, part: Any) -> tuple[Any, Any, Any]:
        hidden, other, trace = before
        part = replace(window, data=Chunk(*part, loss=data.loss))
        env = program.weight_env(theta) | for_loops
        forward = run_forward(program, env, hidden, other, part.data.args)
        steps = part.steps(env, forward)
        system, xs = rule.system(steps), steps.contact_data()
        filters = FILTERS[type(rule.memory)](program, rule.memory, trace, steps.length)
        at_taps, past_taps = filters.cotangents(system)
        summed = losses = None
        if window.has_loss:
            losses = system.direct.losses
            earlier = {} if fresh else {n: x[None] for n, x in trace["x"].items()}
            by_view = view_gradients(program, env, at_taps, xs, (past_taps, earlier))
            summed = system.direct.direct, by_view
        if not final:
            trace = filters.after(xs)
        after = forward.new_hidden, forward.new_other, trace
        return after, summed, (losses, system.direct.outputs)

    trace = rule.memory.computed(program, window.carry.trace)
    start = list(window.carry.hidden), list(window.carry.other), trace
    steps = list(data.args), data.targets, data.weights
    (hidden, other, trace), summed, (losses, outputs) = run_blocks(
        block, start, steps, size, reverse=False
    )
    grads = None
    if summed is not None:
        direct, by_contact = summed
        pulled = weight_gradients(program, theta, in_view_order(program, by_contact))
        grads = [d + g for d, g in zip(direct, pulled, strict=True)]
    return ChunkResult(grads, losses, outputs, Carry(hidden, other, rule.memory.stored(trace)))


class FactoredFilters:
    """The filters of one block of steps."""

    def __init__(
        self, program: StepProgram, memory: Factored, trace: dict[str, Any], length: int
    ) -> None:
        alpha = memory.alpha
        self.program, self.alpha, self.trace, self.length = program, alpha, trace, length
        self.products, self.others = find_channels(program)
        left = alpha ** np.arange(length + 1.0)
        # `n` before each of the K steps, and after the last
        self.norms = [
            jnp.asarray(left, n.dtype)[:, None] * n[None] + jnp.asarray(1 - left, n.dtype)[:, None]
            for n in trace["n"]
        ]

    def cotangents(self, system: TraceSystem) -> tuple[list[Any], list[Any]]:
        """Return cotangents (K, …) at the taps, and (1, …) those of what came before the block."""
        credit, elementwise, self.f, self.eps = self.over(system)
        at_taps = list(system.direct.at_taps)
        later, first = spread_back(credit, self.alpha, self.length)
        for channel, value in zip(self.products, later, strict=True):
            _add_at_taps(self.program, channel.legs, value, at_taps)
        return at_taps, self.past(elementwise, first)

    def after(self, xs: dict[int, jax.Array]) -> dict[str, Any]:
        """Return the memory after the block."""
        contacts = contacts_with_data(self.program)
        x = filter_features(contacts, self.trace["x"], xs, self.alpha, self.length)
        return {"x": x, "f": self.f, "n": [n[-1] for n in self.norms], "eps": self.eps}

    def over(self, system: TraceSystem) -> tuple[list, list, list, list]:
        """Run the filters over a block.

        Returns `c_t` of every product's channel, the sum of `b_t · eps_(t-1)` of every other, and
        `f̄` and `eps` after the block.
        """
        scaled = [
            [_divide_rows(x, n[:-1]) for x in rows]
            for rows, n in zip(system.b, self.norms, strict=True)
        ]
        drives = _drives(self.products, scaled, system), _drives(self.others, system.b, system)
        alpha, trace = self.alpha, self.trace

        def body(carry: Any, step: Any) -> tuple[Any, Any]:
            f, eps, sums = carry
            products_t, others_t = step
            credit = [_dot(b, old) for (b, _, _), old in zip(products_t, f, strict=True)]
            sums = [
                total + _dot(b, old).astype(total.dtype)
                for total, (b, _, _), old in zip(sums, others_t, eps, strict=True)
            ]
            f = [
                _next(old, D, df, alpha, 1 - alpha)
                for old, (_, D, df) in zip(f, products_t, strict=True)
            ]
            eps = [_next(old, D, df, 1, 1) for old, (_, D, df) in zip(eps, others_t, strict=True)]
            return (f, eps, sums), credit

        start = trace["f"], trace["eps"], [jnp.zeros_like(states[0]) for states in trace["eps"]]
        (f, eps, sums), credit = scan_time(body, start, drives, self.length)
        return credit, sums, f, eps

    def past(self, elementwise: list[Any], first: list[Any]) -> list[Any]:
        """Return cotangents (1, …) of what came before the block, as of one more step.

        They are `c̃_0`, to meet `x̄_0`; and the sums of element-wise contacts.
        """
        program = self.program
        at_taps: list[Any] = list(program.zero_taps((1,)).values())
        for channel, value in zip(self.others, elementwise, strict=True):
            _add_at_taps(program, channel.legs, value[None], at_taps)
        for channel, value in zip(self.products, first, strict=True):
            group = program.groups[channel.group]
            ones = self.trace["n"][channel.group] / (1 - self.alpha)
            ones = jnp.broadcast_to(
                ones.reshape(-1, *(1,) * (len(group.varshape) - 1)), group.varshape
            )
            inputs = [leg for leg in channel.legs if leg.contact.x is not None]
            _add_at_taps(program, inputs, value[None], at_taps)
            biases = [leg for leg in channel.legs if leg.contact.x is None]
            _add_at_taps(program, biases, (value * _at(channel, ones, 0))[None], at_taps)
        return at_taps


def _at(channel: Channel, array: jax.Array, lead: int) -> jax.Array:
    """Return values at the group's positions, at the piece's elements; `lead` axes are kept."""
    return take_positions(channel.legs[0], array, lead).reshape(*array.shape[:lead], *channel.shape)


def _drives(channels: Sequence[Channel], b: Grouped, system: TraceSystem) -> list[Any]:
    """For each channel `b_t`, `D_t` and `df_t`, all at the piece's elements."""
    return [
        (
            [_at(c, x, 1) for x in b[c.group]],
            [[None if d is None else _at(c, d, 1) for d in row] for row in system.D[c.group]],
            [system.df.units[c.colour][i][c.tap] for i in range(len(system.D[c.group]))],
        )
        for c in channels
    ]


def _add_at_taps(
    program: StepProgram, legs: Sequence[Leg], value: jax.Array, at_taps: list[Any]
) -> None:
    """Add a value to the cotangents at the taps of some legs, in place."""
    for leg in legs:
        n = program.tap_index(leg)
        at_taps[n] = at_taps[n] + value


def _dot(b: Sequence[Any], states: Sequence[Any]) -> Any:
    return sum(x * y for x, y in zip(b, states, strict=True))


def _next(
    f: Sequence[Any], D: Sequence[Sequence[Any]], df: Sequence[Any], keep: float, gain: float
) -> list[Any]:
    """Return `keep D f + gain df` for every state."""
    after = []
    for row, new in zip(D, df, strict=True):
        new = gain * new
        for d, old in zip(row, f, strict=True):
            if d is not None:
                new = new + keep * d * old
        after.append(new.astype(f[0].dtype))
    return after


def _divide_rows(b: jax.Array, n: jax.Array) -> jax.Array:
    """Return `b / n` by batch element; nothing has been seen where `n` is zero."""
    inverse = jnp.where(n > 0, 1 / jnp.where(n > 0, n, 1), 0)
    return b * inverse.reshape(*inverse.shape, *(1,) * (b.ndim - inverse.ndim))


FILTERS = {Factored: FactoredFilters, Presynaptic: PresynapticFilters}
