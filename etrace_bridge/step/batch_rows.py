"""Whether a step keeps its batch elements apart.

Each element of a value has a *row*: the batch element whose hidden states and weight products it
depends on (-1: none). Element-wise equations keep rows, structural ones carry them along, sums and
products keep them where they sum over one row only. Where a value would depend on two rows, the
batch is one element as far as derivatives go.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.primitives import (
    index_maps,
    is_elementwise,
    is_structural,
    passes_derivative,
)
from etrace_bridge.step.program import StepProgram

Rows = dict[Var, np.ndarray]


def independent_rows(program: StepProgram, sources: list[Var]) -> int:
    """The number of batch elements, if hidden states and `sources` have them first and the step
    never mixes them; else 1.

    Args:
        program: the step.
        sources: outputs of contacts, whose influence on new states must stay in their row too.
    """
    sizes = {leaf.invar.aval.shape[:1] for leaf in program.leaves} | {
        v.aval.shape[:1] for v in sources
    }
    if len(sizes) != 1 or sizes == {()}:
        return 1
    (count,) = next(iter(sizes))
    start = [*(leaf.invar for leaf in program.leaves), *sources]
    rows: Rows = {v: _first_axis(v.aval.shape) for v in start}
    for eqn in program.eqns:
        if not passes_derivative(eqn) or not any(v in rows for v in variables(eqn.invars)):
            continue
        found = _rows_of(eqn, rows, program.constants)
        if found is None:
            return 1
        for v, array in zip(eqn.outvars, found, strict=True):
            if v in rows and not _agree(rows[v], array):
                return 1
            rows.setdefault(v, array)
    kept = all(
        isinstance(leaf.outvar, Literal)
        or leaf.outvar not in rows
        or _agree(rows[leaf.outvar], _first_axis(leaf.outvar.aval.shape))
        for leaf in program.leaves
    )
    return count if kept else 1


def _first_axis(shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1)), shape)


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(((a == b) | (a < 0) | (b < 0)).all())


def _rows_of(eqn: JaxprEqn, rows: Rows, constants: dict[Var, Any]) -> list[np.ndarray] | None:
    """Rows of an equation's results; None where they mix, or the primitive is not known."""
    operands: list[Any] = [None if isinstance(v, Literal) else rows.get(v) for v in eqn.invars]
    name, params = eqn.primitive.name, eqn.params
    if is_elementwise(eqn):
        total = np.full(eqn.outvars[0].aval.shape, -1)
        for array in operands:
            if array is None:
                continue
            if not _agree(total, array):
                return None
            total = np.maximum(total, array)
        return [total] * len(eqn.outvars)
    if is_structural(eqn):
        maps = index_maps(eqn, constants)
        if maps is None:
            return None
        flat = np.concatenate(
            [
                np.full(v.aval.size, -1) if a is None else a.reshape(-1)
                for v, a in zip(eqn.invars, operands, strict=True)
            ]
        )
        return [np.where(m >= 0, flat[np.maximum(m, 0)], -1) for m in maps]
    if name.startswith("reduce_") and "axes" in params and len(operands) == 1:
        return (
            [_reduced(operands[0], tuple(params["axes"]))] * len(eqn.outvars)
            if _constant(operands[0], params["axes"])
            else None
        )
    if name.startswith("cum") and "axis" in params:
        return [operands[0]] if _constant(operands[0], (params["axis"],)) else None
    if name == "dot_general":
        return _product(eqn, operands)
    if name == "conv_general_dilated" and operands[1] is None:
        spec, shape = params["dimension_numbers"], eqn.outvars[0].aval.shape
        rest = tuple(d for d in range(operands[0].ndim) if d != spec.lhs_spec[0])
        if not _constant(operands[0], rest):
            return None
        lead = _reduced(operands[0], rest).reshape(
            [-1 if d == spec.out_spec[0] else 1 for d in range(len(shape))]
        )
        return [np.broadcast_to(lead, shape)]
    return None


def _constant(array: Any, axes: Any) -> bool:
    """Whether rows are the same along these axes."""
    return array.size > 0 and bool((array == array.max(tuple(axes), keepdims=True)).all())


def _reduced(array: Any, axes: tuple[int, ...]) -> np.ndarray:
    return array.max(axes)


def _product(eqn: JaxprEqn, operands: list[Any]) -> list[np.ndarray] | None:
    """Rows of a product: no operand may have several along what is summed, and where both have some
    they must agree.
    """
    contracted, batch = eqn.params["dimension_numbers"]
    shape, total = eqn.outvars[0].aval.shape, np.full(eqn.outvars[0].aval.shape, -1)
    free_before = len(batch[0])
    for side, array in enumerate(operands):
        ndim = len(eqn.invars[side].aval.shape)
        free = [d for d in range(ndim) if d not in contracted[side] and d not in batch[side]]
        first, free_before = free_before, free_before + len(free)
        if array is None:
            continue
        if not _constant(array, tuple(contracted[side])):
            return None
        out_axes = [*range(len(batch[side])), *range(first, first + len(free))]
        kept = _reduced(
            array.transpose([*batch[side], *free, *contracted[side]]),
            tuple(range(len(out_axes), ndim)),
        )
        wide = np.ones(len(shape), int)
        wide[out_axes] = kept.shape
        spread = np.broadcast_to(kept.reshape(wide), shape)
        if not _agree(total, spread):
            return None
        total = np.maximum(total, spread)
    return [total]
