"""Which new hidden values a step can make depend on which old ones, and on which units.

Read from the step's equations, element by element, not from derivatives at one point: an activation
that happens to be flat there still connects. A product connects where the matrix is not zero by
declaration: by a mask that is a constant of the step or a buffer that it does not change. Weights
may take any value. An unknown operation connects everything.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var, bind_equation, is_concrete
from etrace_bridge.compiler.primitives import (
    index_maps,
    is_elementwise,
    is_structural,
    passes_derivative,
)
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.units import Family, Layout

Planes = dict[
    Var, np.ndarray
]  # by variable: (sources, *shape), whether an element depends on a source


def step_connectivity(program: StepProgram, layout: Layout) -> tuple[np.ndarray, dict[Var, Any]]:
    """For the first row: (new, old) of its hidden values, and (new, elements) of every sum."""
    sums = [s.var for family in layout.families for s in family.sums]
    leaves = [leaf.invar for leaf in program.leaves]
    counts = [v.aval.size // layout.rows for v in (*leaves, *sums)]
    starts = np.cumsum([0, *counts])
    total = int(starts[-1])
    given = {
        v: _source_planes(v, start, count, total)
        for v, start, count in zip((*leaves, *sums), starts, counts, strict=False)
    }
    planes: Planes = {v: given[v] for v in leaves}
    with jax.ensure_compile_time_eval():
        known = _known_values(program)
        for eqn in program.eqns:
            found = _follow(eqn, planes, known, program.constants)
            for v, plane in zip(eqn.outvars, found, strict=True):
                if v in given:
                    plane = given[v] if plane is None else np.maximum(plane, given[v])
                if plane is not None:
                    planes[v] = plane
    new = np.concatenate(
        [_first_row(planes, leaf.outvar, layout, total) for leaf in program.leaves]
    )
    bounds = zip(sums, starts[len(leaves) :], counts[len(leaves) :], strict=False)
    return new[:, : layout.size], {v: new[:, start : start + count] for v, start, count in bounds}


def family_reach(family: Family, by_sum: dict[Var, Any], size: int) -> np.ndarray:
    """Return the hidden values that a row's units reach within the step: (units, values)."""
    reach = np.zeros((family.units // family.rows, size), bool)
    for summed in family.sums:
        elements = by_sum[summed.var].shape[1]
        np.logical_or.at(reach, summed.unit[:elements], by_sum[summed.var].T)
    return reach


def _source_planes(v: Var, start: int, count: int, total: int) -> np.ndarray:
    """Return the elements of a variable's first row as sources."""
    plane = np.zeros((total, v.aval.size), np.float32)
    plane[start + np.arange(count), np.arange(count)] = 1
    return plane.reshape(total, *v.aval.shape)


def _first_row(planes: Planes, v: Any, layout: Layout, total: int) -> np.ndarray:
    """Return (elements of the first row, sources)."""
    count = v.aval.size // layout.rows
    if isinstance(v, Literal) or v not in planes:
        return np.zeros((count, total), bool)
    return planes[v].reshape(total, -1)[:, :count].T > 0


def _known_values(program: StepProgram) -> dict[Var, Any]:
    """Return the values that show what is zero by declaration.

    Weights are random; constants and unchanged buffers have their values.
    """
    rng, info = np.random.default_rng(0), program.graph.module_info
    known: dict[Var, Any] = dict(program.constants)
    for v in program.weight_vars:
        known[v] = jnp.asarray(rng.standard_normal(v.aval.shape), v.aval.dtype)
    kept = {i for i, o in program.other_vars if i is o}
    for state, variables in zip(info.compiled_model_states, info.state_tree_invars, strict=True):
        for v, value in zip(variables, jax.tree.leaves(state.value), strict=True):
            if v in kept and is_concrete(value):
                known[v] = jnp.asarray(value)
    for eqn in program.eqns:
        if all(isinstance(v, Literal) or v in known for v in eqn.invars):
            operands = [v.val if isinstance(v, Literal) else known[v] for v in eqn.invars]
            known.update(zip(eqn.outvars, bind_equation(eqn, operands), strict=True))
    return known


def _follow(eqn: JaxprEqn, planes: Planes, known: dict, constants: dict) -> list[Any]:
    """Return planes of an equation's results; None where they depend on no source."""
    ins = [None if isinstance(v, Literal) else planes.get(v) for v in eqn.invars]
    live = [p for p in ins if p is not None]
    if not live or not passes_derivative(eqn):
        return [None] * len(eqn.outvars)
    total, shape = len(live[0]), eqn.outvars[0].aval.shape
    name = eqn.primitive.name
    if is_elementwise(eqn):
        if name == "mul":
            others = [v.val if isinstance(v, Literal) else known.get(v) for v in eqn.invars]
            ins = [_masked(p, o) for p, o in zip(ins, reversed(others), strict=True)]
        spread = [
            np.broadcast_to(p.reshape(total, *(p.shape[1:] or (1,) * len(shape))), (total, *shape))
            for p in ins
            if p is not None
        ]
        return [np.maximum.reduce(spread)] * len(eqn.outvars)
    maps = index_maps(eqn, constants) if is_structural(eqn) else None
    if maps is not None:
        flat = [
            np.zeros((total, v.aval.size), np.float32) if p is None else p.reshape(total, -1)
            for v, p in zip(eqn.invars, ins, strict=True)
        ]
        joined = np.concatenate([*flat, np.zeros((total, 1), np.float32)], 1)
        return [joined[:, m] for m in maps]  # -1, a fill value, is the last column
    if name in ("dot_general", "conv_general_dilated"):
        return [_product(eqn, ins, known)]
    if name.startswith("reduce_") and "axes" in eqn.params and len(ins) == 1:
        return [live[0].max(tuple(a + 1 for a in eqn.params["axes"]))] * len(eqn.outvars)
    mixed = np.maximum.reduce([p.reshape(total, -1).max(1) for p in live])
    wide = [mixed.reshape(total, *(1,) * len(v.aval.shape)) for v in eqn.outvars]
    return [
        np.broadcast_to(w, (total, *v.aval.shape)) for w, v in zip(wide, eqn.outvars, strict=True)
    ]


def _masked(plane: np.ndarray | None, factor: Any) -> np.ndarray | None:
    return plane if plane is None or factor is None else plane * (np.asarray(factor) != 0)


def _product(eqn: JaxprEqn, ins: list[Any], known: dict) -> np.ndarray:
    """Return planes of a product, each operand in turn meeting where the other one is not zero."""
    others = [
        np.asarray(known[v] != 0 if v in known else np.ones(v.aval.shape), np.float32)
        for v in eqn.invars
    ]
    through = _dot if eqn.primitive.name == "dot_general" else _convolve
    found = [
        through(eqn, side, plane, others) for side, plane in enumerate(ins) if plane is not None
    ]
    return (np.maximum.reduce(found) > 0).astype(np.float32)


def _dot(eqn: JaxprEqn, side: int, plane: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    """Return `dot_general` of planes with the other operand.

    0 numbers the planes, the rest the axes.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    numbers = itertools.count(1)
    together = [next(numbers) for _ in batch[0]]
    summed = [next(numbers) for _ in contracted[0]]
    axes, out = [], [0, *together]
    for k, x in enumerate(others):
        known = dict(zip(batch[k], together, strict=True))
        known |= zip(contracted[k], summed, strict=True)
        free = {d: next(numbers) for d in range(x.ndim) if d not in known}
        out += free.values()
        axes.append([(known | free)[d] for d in range(x.ndim)])
    operands = list(others)
    operands[side], axes[side] = plane, [0, *axes[side]]
    return np.einsum(operands[0], axes[0], operands[1], axes[1], out, optimize=True)


def _convolve(eqn: JaxprEqn, side: int, plane: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    dtypes = [v.aval.dtype for v in eqn.invars]

    def one(p: Any) -> Any:
        operands: list[Any] = [p if k == side else x for k, x in enumerate(others)]
        cast = [jnp.asarray(x, dtype) for x, dtype in zip(operands, dtypes, strict=True)]
        return bind_equation(eqn, cast)[0]

    return np.asarray(jax.vmap(one)(jnp.asarray(plane)))
