"""Reads dense traces once per chunk, and advances them over K steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge.compiler.contacts import ContactForm
from etrace_bridge.compiler.graph import Leg
from etrace_bridge.schedule.contraction import TIME, features, join_outputs, join_pieces
from etrace_bridge.step.linearise import Grouped
from etrace_bridge.step.program import StepProgram

Traces = list[list[jax.Array]]  # [trace][row]


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["values"], meta_fields=["first_taps"]
)
@dataclass(frozen=True)
class TraceRows:
    """`M_t df_t` at the taps.

    Attributes:
        values: [colour][row] and by tap, only the first of taps with the same rows.
        first_taps: for each tap, the first tap with the same rows.
    """

    values: list[list[dict[int, jax.Array]]]
    first_taps: tuple[int | None, ...]

    def at(self, colour: int, row: int, tap: int) -> Any:
        """Return the value at a tap."""
        first: Any = self.first_taps[tap]
        return self.values[colour][row][first]


def read_traces(
    program: StepProgram, a0: Grouped, traces: Traces, needed_after: Any
) -> tuple[dict[int, jax.Array], Any]:
    """Return `a_0 · eps_0` by contact.

    And `needed_after`, arrays to be used only after the traces were read.
    """
    legs = program.traces
    cotangents = [[at_positions(leg, a) for a in a0[program.group_index(leg)]] for leg in legs]
    sums, needed_after = _contract(program, cotangents, traces, needed_after)
    by_contact: dict[int, list[tuple[Leg, jax.Array]]] = {}
    for leg, total in zip(legs, sums, strict=True):
        by_contact.setdefault(leg.contact.index, []).append((leg, total))
    return {n: _sum_of_view(program, found) for n, found in by_contact.items()}, needed_after


def _sum_of_view(program: StepProgram, found: Sequence[tuple[Leg, jax.Array]]) -> Any:
    """Return gradient of a contact's view, from those of its traces."""
    taps = program.taps_of(found[0][0].contact)
    if all(len(program.taps_of(leg)) == len(taps) for leg, _ in found):
        return sum(total for _, total in found)
    pieces = []
    for t in taps:
        zero = jnp.zeros(t.part.form.shape(t.part.form.view), t.part.var.aval.dtype)
        pieces.append(sum((total for leg, total in found if leg.part is t.part), zero))
    return join_pieces(taps, pieces)


def advance_traces(
    program: StepProgram,
    traces: Traces,
    rows: TraceRows,
    xs: dict[int, jax.Array],
    M0: Any,
    fresh: bool,
) -> Traces:
    """Return `eps_K = M_0 eps_0 + sum of (M_t df_t) ⊗ x_t`.

    Args:
        program: the step.
        traces: `eps_0`.
        rows: `M_t df_t` at the taps.
        xs: data of the K steps, by contact.
        M0: `M_0`, [group][row][row].
        fresh: `eps_0` is zero.
    """
    new: Traces = []
    for leg, old_rows in zip(program.traces, traces, strict=True):
        g, colour, taps = program.group_index(leg), program.colour_of(leg), program.taps_of(leg)
        new_rows = []
        for r, like in enumerate(old_rows):
            row = join_outputs(taps, [rows.at(colour, r, t.index) for t in taps])
            eps = outer_sum(leg, row, xs.get(leg.contact.index))
            if not fresh:
                for m, old in zip(M0[g][r], old_rows, strict=True):
                    if m is not None:
                        eps = eps + _wide(leg, at_positions(leg, m)) * old.astype(eps.dtype)
            new_rows.append(eps.astype(like.dtype))
        new.append(new_rows)
    return new


def at_positions(leg: Leg, array: jax.Array, lead: int = 0) -> jax.Array:
    """Bring values at a group's positions to the piece's elements, in the trace's order.

    `lead` axes are kept.
    """
    form = leg.part.form
    spread = take_positions(leg, array, lead).reshape(*array.shape[:lead], *form.shape(form.out))
    return _to_trace_order(form, spread, lead)


def take_positions(leg: Leg, array: jax.Array, lead: int) -> jax.Array:
    """Bring values at a group's positions to the piece's elements.

    An element that feeds no position gets zero; `lead` axes are kept.
    """
    positions = leg.positions.reshape(-1)
    size = int(np.prod(array.shape[lead:], dtype=np.int64))
    if positions.size == size and (positions == np.arange(size)).all():
        return array
    flat = array.reshape(*array.shape[:lead], size)
    return jnp.where(positions >= 0, jnp.take(flat, np.maximum(positions, 0), axis=lead), 0)


def _to_trace_order(form: ContactForm, array: jax.Array, lead: int) -> jax.Array:
    order = [form.out.index(c) + lead for c in form.trace_out]
    return jnp.transpose(array, [*range(lead), *order])


def _contract(
    program: StepProgram, a: Traces, traces: Traces, needed_after: Any
) -> tuple[list[Any], Any]:
    """Return `a · trace`, summed over rows and to each view's letters.

    `needed_after` comes back unchanged.

    Where the program's tuning wants it, traces are read one batch element after the other.
    `needed_after` travels through that loop, so that what is computed from it and overwrites the
    traces visibly comes after they were read.
    """
    legs = program.traces
    counts = {leg.part.form.shape(leg.part.form.trace)[0] for leg in legs}
    batched = all(
        leg.part.form.trace[0] not in leg.part.form.view for leg in legs if leg.part.form.trace
    )
    size = sum(x.size for rows in traces for x in rows)
    if len(counts) != 1 or not batched or min(counts) < 2 or not program.tuning.reads_by_row(size):
        return [
            _contract_leg(leg, x, eps) for leg, x, eps in zip(legs, a, traces, strict=True)
        ], needed_after
    (count,) = counts

    def add(n: jax.Array, carry: tuple[list[Any], Any]) -> tuple[list[Any], Any]:
        sums, carried = carry
        sums = [
            total
            + sum(
                _wide(leg, x[n]) * eps[n].astype(x.dtype) for x, eps in zip(xs, rows, strict=True)
            ).astype(total.dtype)
            for leg, total, xs, rows in zip(legs, sums, a, traces, strict=True)
        ]
        return sums, jax.tree.map(lambda new, old: new.at[n].set(old[n]), carried, needed_after)

    zeros = [jnp.zeros(rows[0].shape[1:], xs[0].dtype) for xs, rows in zip(a, traces, strict=True)]
    travels = all(x.ndim and x.shape[0] == count for x in jax.tree.leaves(needed_after))
    start = jax.tree.map(jnp.zeros_like, needed_after) if travels else None
    sums, carried = lax.fori_loop(0, count, add, (zeros, start))
    sums = [
        _to_view(leg, total, leg.part.form.trace[1:]) for leg, total in zip(legs, sums, strict=True)
    ]
    return sums, carried if travels else needed_after


def _contract_leg(leg: Leg, a: Sequence[Any], traces: Sequence[jax.Array]) -> jax.Array:
    terms = [_wide(leg, x) * eps.astype(x.dtype) for x, eps in zip(a, traces, strict=True)]
    return _to_view(leg, functools.reduce(jnp.add, terms), leg.part.form.trace)


def _wide(leg: Leg, x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape, *(1 for _ in leg.part.form.contracted))


def _to_view(leg: Leg, array: jax.Array, letters: str) -> jax.Array:
    """Sum an array with these letters to those of the view, in the view's order."""
    form = leg.part.form
    axes = tuple(n for n, c in enumerate(letters) if c not in form.view)
    left = [c for c in letters if c in form.view]
    return jnp.transpose(jnp.sum(array, axis=axes), [left.index(c) for c in form.view])


def outer_sum(leg: Leg, g: jax.Array, x: jax.Array | None) -> jax.Array:
    """Return `sum over t of g_t ⊗ phi(x_t)`: what K steps add to a trace."""
    form = leg.part.form
    g = _to_trace_order(form, g.reshape(g.shape[0], *form.shape(form.out)), 1)
    if x is None:
        return jnp.sum(g, axis=0)
    phi = features(form, x)
    shared = [c for c in form.out if c in form.feature]
    rest = [c for c in form.trace_out if c not in shared]
    if g.shape[0] == 1:
        return jnp.einsum(f"{form.trace_out},{form.feature}->{form.trace}", g[0], phi[0])
    # Batched products want the shared axes first, then time: (B, K, ·).
    g = jnp.moveaxis(g, 0, len(shared))
    order = (
        [form.feature.index(c) + 1 for c in shared]
        + [0]
        + [form.feature.index(c) + 1 for c in form.contracted]
    )
    phi = jnp.transpose(phi, order)
    head = "".join(shared)
    return jnp.einsum(
        f"{head}{TIME}{''.join(rest)},{head}{TIME}{form.contracted}->{form.trace}", g, phi
    )
