"""Converts between arrays of units, of hidden values, and of the elements of traces."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge.step.linearise import CoreLinear
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.units import Block, Family, Layout, Sum, state_numbers


def flat_rows(layout: Layout, leaves: Sequence[jax.Array], lead: int = 0) -> jax.Array:
    """Return hidden leaves as (…, rows, n)."""
    return jnp.concatenate([x.reshape(*x.shape[:lead], layout.rows, -1) for x in leaves], axis=-1)


def by_row(layout: Layout, values: jax.Array) -> jax.Array:
    """Return (…, units) as (…, rows, units per row)."""
    return values.reshape(*values.shape[:-1], layout.rows, values.shape[-1] // layout.rows)


def take(array: jax.Array, index: np.ndarray, axis: int) -> jax.Array:
    """Return `jnp.take` that is a slice where the index is a range."""
    if len(index) and np.array_equal(index, index[0] + np.arange(len(index))):
        return jax.lax.slice_in_dim(array, int(index[0]), int(index[0]) + len(index), axis=axis)
    return jnp.take(array, index, axis=axis)


def join(parts: Sequence[tuple[np.ndarray, jax.Array]], zero: jax.Array, axis: int) -> jax.Array:
    """Return arrays put together along an axis, each with its places there; `zero` elsewhere."""
    if not parts:
        return zero
    places = np.concatenate([at for at, _ in parts])
    rest = np.setdiff1d(np.arange(zero.shape[axis]), places)
    arrays = [x for _, x in parts] + ([take(zero, rest, axis)] if len(rest) else [])
    whole = jnp.concatenate(arrays, axis) if len(arrays) > 1 else arrays[0]
    return take(whole, np.argsort(np.concatenate([places, rest])), axis)


def to_units(summed: Sum, array: jax.Array) -> jax.Array:
    """Return values of a sum's elements (…, elements), at their units (…, units)."""
    return take(array, np.argsort(summed.unit), array.ndim - 1)


def at_elements(block: Block, values: jax.Array | list[jax.Array]) -> jax.Array:
    """Return values of units (…, units) at a block's elements, to multiply its trace with."""
    form = block.form
    each = values if isinstance(values, list) else [values] * len(block.pieces)
    lead = each[0].ndim - 1
    spread = [
        take(v, s.unit, lead).reshape(*v.shape[:lead], *p.part.form.shape(form.out))
        for v, (s, p) in zip(each, block.pieces, strict=True)
    ]
    if block.letter:
        spread = [jnp.concatenate(spread, lead + form.out.index(block.letter))]
    order = [*range(lead), *(form.out.index(c) + lead for c in form.trace_out)]
    whole = jnp.transpose(spread[0], order)
    return whole.reshape(*whole.shape, *(1 for _ in form.contracted))


def inner_products(
    program: StepProgram, block: Block, x: jax.Array, y: jax.Array
) -> list[jax.Array]:
    """Multiply two arrays of a trace's shape, sum over features, and return the units of each
    piece.
    """
    form = block.form
    array = program.tuning.inner_products(x, y, len(form.trace_out))
    array = jnp.transpose(array, [form.trace_out.index(c) for c in form.out])
    parts = [array]
    if block.letter:
        starts = [p.part.start for _, p in block.pieces[1:]]
        parts = jnp.split(array, starts, form.out.index(block.letter))
    return [to_units(s, x.reshape(-1)) for x, (s, _) in zip(parts, block.pieces, strict=True)]


def spread_features(block: Block, data: dict[int, jax.Array]) -> jax.Array:
    """Return the features of a block's contact at every element of its trace."""
    form, x = block.form, data.get(block.contact.index)
    ones = jnp.ones(form.shape(form.trace_out), block.contact.y.aval.dtype)
    if x is None:
        return ones.reshape(form.shape(form.trace))
    terms = f"{form.trace_out},{form.feature}->{form.trace}"
    return jnp.einsum(terms, ones, form.features(x))


def to_view(block: Block, array: jax.Array) -> jax.Array:
    """Return an array of a trace's shape, summed to the letters of the block's view."""
    form = block.form
    axes = tuple(n for n, c in enumerate(form.trace) if c not in form.view)
    left = [c for c in form.trace if c in form.view]
    return jnp.transpose(jnp.sum(array, axis=axes), [left.index(c) for c in form.view])


def contact_data(
    program: StepProgram, layout: Layout, start: dict, saved: Sequence[jax.Array]
) -> dict[int, jax.Array]:
    """Return the data operand of every contact that feeds a unit, in one step, by contact."""
    contacts = {b.contact.index: b.contact.x for f in layout.families for b in f.blocks}
    contacts = {n: x for n, x in contacts.items() if x is not None}
    return dict(zip(contacts, program.values(start, saved, list(contacts.values())), strict=True))


# -- the core at units -----------------------------------------------------------------------------


def df_of(program: StepProgram, family: Family, summed: Sum, core: CoreLinear, i: int) -> jax.Array:
    """Return how state i of the units depends on a sum that feeds them, through the core: (units,)."""
    g, k = family.groups[i]
    leg = next(leg for leg in summed.pieces[0].legs if program.group_index(leg) == g)
    rows = core.df.units[program.colour_of(leg)][k]
    return to_units(summed, rows[program.tap_index(leg)].reshape(-1))


def at_positions(family: Family, s: int, values: jax.Array) -> jax.Array:
    """Return values at a group's positions (1, …), at the units whose state s they belong to.

    0 where none.
    """
    at = family.positions[:, s]
    if (at >= 0).all():
        return take(values.reshape(-1), at, 0)
    return jnp.where(at >= 0, take(values.reshape(-1), np.maximum(at, 0), 0), 0)


def core_times(
    program: StepProgram, layout: Layout, core: CoreLinear, A: jax.Array, axis: int = -2
) -> jax.Array:
    """Return `D A` for (…, rows, n, columns), or for (…, rows, n) with the axis -1."""
    parts, shape = [], (*(1,) * (A.ndim + axis - 1), layout.rows, -1, *(1,) * (-1 - axis))
    for g, states in enumerate(state_numbers(program, layout.rows, layout.size)):
        numbers = [state[: len(state) // layout.rows] for state in states]
        for i, target in enumerate(numbers):
            terms = [
                core.D[g][i][j].reshape(shape) * take(A, source, A.ndim + axis)
                for j, source in enumerate(numbers)
                if core.D[g][i][j] is not None
            ]
            if terms:
                parts.append((target, sum(terms).astype(A.dtype)))
    return join(parts, jnp.zeros_like(A), A.ndim + axis)
