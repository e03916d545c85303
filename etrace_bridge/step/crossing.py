"""What crosses a product within one step: the part of a step's derivative that D-RTRL drops.

    X = F - D,      X_y = G - e df

`F = dh_t/dh_(t-1)` and `G = dh_t/dy`, for a sum `y` of what weights make, are derivatives of the
whole step over all n hidden values; `D` and `df` are those of the core (`step.linearise`).

Old states reach new ones past the core by *routes*: a product `y = v x` whose output enters the
core. A new state depends on one element of `y`, so `dh_t/dx` is a row of the weight `v` times `df`,
and no product of matrices is needed to get there: `X = sum of (df v) (dx/dh_(t-1))`. Where all that
crosses does so by routes, one vmapped reverse pass from the `x` gives `X`, which costs nothing if
`x` is a state or made of one position by position. Otherwise n reverse passes of the whole step
give `F` and `G`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._jax_compat import Literal, Var
from etrace_bridge.compiler.graph import Leg
from etrace_bridge.compiler.jaxpr import read, variables
from etrace_bridge.compiler.primitives import is_float, passes_derivative
from etrace_bridge.step.linearise import CoreLinear
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.taps import SUMS, Tap
from etrace_bridge.step.unit_arrays import (
    by_row,
    core_times,
    df_of,
    flat_rows,
    join,
    take,
    to_units,
)
from etrace_bridge.step.units import Family, Layout, Sum, state_numbers


@dataclass(frozen=True)
class Crossing:
    """What crosses a product within one step.

    Attributes:
        X: `F - D`, (rows, n, n).
        of_sum: `G - e df` of each sum that crosses, at its units, in the order of `crossing_sums`:
            (rows, n, units per row).
    """

    X: Any
    of_sum: list[Any]


@dataclass(frozen=True)
class Route:
    """A product whose output enters the core at a group's positions.

    Attributes:
        tap: the piece of the product.
        leg: where it enters.
        order: its elements of one row, in the order of the group's positions there.
    """

    tap: Tap
    leg: Leg
    order: np.ndarray


def crossing_sums(layout: Layout) -> list[tuple[Family, Sum]]:
    """The sums that cross, with their families."""
    return [(f, s) for f in layout.families for s in f.sums if s.crosses]


def crossing_derivatives(
    program: StepProgram, layout: Layout, core: CoreLinear, start: dict, saved: Sequence[Any]
) -> Crossing:
    """`X` and `X_y` of one step.

    Args:
        program: the step.
        layout: its units.
        core: its linearised core, for one step.
        start: the values that the step starts from.
        saved: values of `saved_vars`.
    """
    crossing = crossing_sums(layout)
    routes = find_routes(program, layout, [s.var for _, s in crossing])
    if routes is None:
        return _by_whole_step(program, layout, core, start, saved, crossing)
    numbers = state_numbers(program, layout.rows, layout.size)
    by_hidden, by_sum = [], {s.var: [] for _, s in crossing}
    for g, own in routes.items():
        xs, at_x = _at_data(program, layout, core, start, own)
        pull = _pull(program, start, saved, xs, [s.var for _, s in crossing])
        h_bar, y_bar = jax.vmap(pull)(at_x)
        per_row = [n[: len(n) // layout.rows] for n in numbers[g]]
        target = np.concatenate(per_row)
        by_hidden.append((target, flat_rows(layout, h_bar, 1)))
        for (_, s), bar in zip(crossing, y_bar, strict=True):
            by_sum[s.var].append((target, to_units(s, bar.reshape(len(target), -1))))
    dtype = program.leaves[0].invar.aval.dtype
    X = join(by_hidden, jnp.zeros((layout.size, layout.rows, layout.size), dtype), 0)
    of_sum = [
        _rows_first(layout, join(by_sum[s.var], jnp.zeros((layout.size, f.units), dtype), 0))
        for f, s in crossing
    ]
    return Crossing(jnp.swapaxes(X, 0, 1), of_sum)


def _rows_first(layout: Layout, by_unit: Any) -> Any:
    """(n, units) as (rows, n, units per row)."""
    return jnp.swapaxes(by_row(layout, by_unit), 0, 1)


# -- by routes -------------------------------------------------------------------------------------


def find_routes(
    program: StepProgram, layout: Layout, crossing: Sequence[Var]
) -> dict[int, list[Route]] | None:
    """The routes into each group; None where something crosses in another way."""
    moving = _moving(program, [*(leaf.invar for leaf in program.leaves), *crossing])
    core, entries = program.core, set(program.core_inputs)
    old = {leaf.invar for leaf in program.leaves}
    held = [eqn.invars[k] for eqn in core.eqns for k in core.held.get(id(eqn), ())]
    beside = [v for v in core.reads if v not in old and v not in entries]
    grouped = {leaf.index for g in program.groups for leaf in g.leaves}
    ungrouped = [leaf.outvar for leaf in program.leaves if leaf.index not in grouped]
    if any(v in moving for v in variables([*held, *beside, *ungrouped])):
        return None
    taps, found = {t.part.var: t for t in program.taps}, {}
    made_by = {v: eqn for eqn in program.eqns for v in eqn.outvars}
    waiting = list(entries)
    while waiting:
        v = waiting.pop()
        if isinstance(v, Literal) or v not in moving:
            continue
        if v not in taps:
            if v not in made_by or made_by[v].primitive.name not in SUMS:
                return None
            waiting += made_by[v].invars
            continue
        if taps[v].contact.x is None or taps[v].contact.x not in moving:
            continue
        for leg in taps[v].legs:
            route = _route(program, layout, taps[v], leg)
            if route is None:
                return None
            found.setdefault(program.group_index(leg), []).append(route)
    return found


def _moving(program: StepProgram, sources: Sequence[Var]) -> set[Var]:
    """Variables with a derivative by one of the sources."""
    moving = {v for v in sources if is_float(v)}
    for eqn in program.eqns:
        if passes_derivative(eqn) and not moving.isdisjoint(variables(eqn.invars)):
            moving.update(v for v in eqn.outvars if is_float(v))
    return moving


def _route(program: StepProgram, layout: Layout, tap: Tap, leg: Leg) -> Route | None:
    """A route, if the piece is a plain product with one unit per element and fills the group."""
    form, contact = tap.part.form, tap.contact
    is_plain = contact.eqn.primitive.name == "dot_general" and contact.form is not None
    is_slice = bool(tap.part.letter) or tap.part.var is contact.y
    if not (is_plain and is_slice) or set(form.out) & set(form.view) & set(form.feature):
        return None
    units = [c for c in form.out if c in form.view]
    rows = [c for c in form.out if c not in form.view]
    places = np.transpose(
        leg.positions.reshape(form.shape(form.out)), [form.out.index(c) for c in (*rows, *units)]
    )
    size = np.prod(program.groups[program.group_index(leg)].varshape)
    if np.prod(form.shape("".join(rows))) != layout.rows or places.size != size:
        return None
    places, per_row = places.reshape(layout.rows, -1), places.size // layout.rows
    order = np.argsort(places[0])
    expected = np.arange(places.size).reshape(layout.rows, per_row)
    return Route(tap, leg, order) if np.array_equal(places[:, order], expected) else None


def _at_data(
    program: StepProgram, layout: Layout, core: CoreLinear, start: dict, routes: Sequence[Route]
) -> tuple[list[Any], list[Any]]:
    """`dh_t/dx` for the data `x` of a group's routes: (states of a row, *x), one array per `x`."""
    found: dict[Any, Any] = {}
    for route in routes:
        form, part, contact = route.tap.part.form, route.tap.part, route.tap.contact
        view = read(start, contact.view.var).reshape(
            contact.traced_form.shape(contact.traced_form.view)
        )
        if part.letter:
            end, axis = part.start + form.sizes[part.letter], form.view.index(part.letter)
            view = lax.slice_in_dim(view, part.start, end, axis=axis)
        units = "".join(c for c in form.out if c in form.view)
        seeds = []
        for rows in core.df.units[program.colour_of(route.leg)][: _states(program, route.leg)]:
            df = rows[route.tap.index].reshape(form.shape(form.out))
            seed = jnp.einsum(f"{form.out},{form.view}->{units}{form.feature}", df, view)
            seeds.append(take(seed.reshape(-1, *contact.x.aval.shape), route.order, 0))
        seed = jnp.concatenate(seeds) if len(seeds) > 1 else seeds[0]
        found[contact.x] = found[contact.x] + seed if contact.x in found else seed
    return list(found), list(found.values())


def _states(program: StepProgram, leg: Leg) -> int:
    return program.groups[program.group_index(leg)].num_state


def _pull(
    program: StepProgram,
    start: dict,
    saved: Sequence[Any],
    targets: Sequence[Any],
    taps: Sequence[Var],
) -> Any:
    """Cotangents of `targets` in one step -> those of old states, and of what is tapped."""
    old_vars = [leaf.invar for leaf in program.leaves]

    def run(hidden: Sequence[Any], deltas: Sequence[Any]) -> list[Any]:
        env = {**start, **dict(zip(old_vars, hidden, strict=True))}
        done = program.run_step(env, saved, dict(zip(taps, deltas, strict=True)), targets)
        return [read(done, v) for v in targets]

    zeros = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in taps]
    return jax.vjp(run, [start[v] for v in old_vars], zeros)[1]


# -- by the whole step -----------------------------------------------------------------------------


def _by_whole_step(
    program: StepProgram,
    layout: Layout,
    core: CoreLinear,
    start: dict,
    saved: Sequence[Any],
    crossing: Sequence[tuple[Family, Sum]],
) -> Crossing:
    """By n reverse passes, since surrogate gradients have no forward mode."""
    new_vars = [leaf.outvar for leaf in program.leaves]
    pull = _pull(program, start, saved, new_vars, [s.var for _, s in crossing])
    sizes = [leaf.invar.aval.size // layout.rows for leaf in program.leaves]
    basis = jnp.eye(layout.size, dtype=program.leaves[0].invar.aval.dtype)
    seeds = []
    for leaf, own in zip(program.leaves, jnp.split(basis, np.cumsum(sizes)[:-1], 1), strict=True):
        spread = jnp.broadcast_to(own[:, None], (layout.size, layout.rows, own.shape[1]))
        aval = leaf.invar.aval
        seeds.append(spread.reshape(layout.size, *aval.shape).astype(aval.dtype))
    h_bar, y_bar = jax.vmap(pull)(seeds)
    F = jnp.moveaxis(flat_rows(layout, h_bar, 1), 0, 1)
    identity = jnp.broadcast_to(basis, (layout.rows, layout.size, layout.size))
    D = core_times(program, layout, core, identity)
    of_sum = []
    for (family, s), bar in zip(crossing, y_bar, strict=True):
        column = to_units(s, bar.reshape(layout.size, -1))
        own = _own(program, family, s, core, layout.size)
        of_sum.append(_rows_first(layout, column - own))
    return Crossing(F - D, of_sum)


def _own(program: StepProgram, family: Family, summed: Sum, core: CoreLinear, size: int) -> Any:
    """`e df` of a sum: (n, units)."""
    total = jnp.zeros((size, family.units), summed.var.aval.dtype)
    for i in range(len(family.groups)):
        hot = (np.arange(size)[:, None] == family.states[:, i]).astype(total.dtype)
        total = total + np.tile(hot, family.rows) * df_of(program, family, summed, core, i)[None]
    return total
