"""Whether a step keeps its batch elements apart.

Each element of a value has a *row*: the batch element whose hidden states and weight products it
depends on (-1: none). Element-wise equations keep rows, structural ones carry them along, sums and
products keep them where they sum over one row only. Where a value would depend on two rows, the
batch is one element as far as derivatives go (`independent_rows`).

`is_same_for_any_batch` requires more: the values themselves of a batch element must be the same in
a batch of any size. It reads two traces of the step, one of them with one element more.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.primitives import (
    index_maps,
    is_elementwise,
    is_structural,
    passes_derivative,
)
from etrace_bridge.step.program import StepProgram

Rows = dict[Var, np.ndarray]


def independent_rows(program: StepProgram, sources: list[Var]) -> int:
    """Return the number of batch elements if the step never mixes them, else 1.

    Hidden states must have the batch first, and `sources` too, but for axes of length one: torch's
    layers give what stands before them a time axis.

    Args:
        program: the step.
        sources: outputs of contacts, whose influence on new states must stay in their row too.
    """
    sizes = {leaf.invar.aval.shape[:1] for leaf in program.leaves}
    if len(sizes) != 1 or not sizes.isdisjoint({(), (1,)}):
        return 1
    (count,) = next(iter(sizes))
    if any([n for n in v.aval.shape if n > 1][:1] != [count] for v in sources):
        return 1
    rows: Rows = {leaf.invar: _first_axis(leaf.invar.aval.shape) for leaf in program.leaves}
    for v in sources:
        flat = np.repeat(np.arange(count), v.aval.size // count)
        rows[v] = flat.reshape(v.aval.shape)
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


def is_same_for_any_batch(one: ModuleInfo, other: ModuleInfo) -> bool:
    """Return whether a batch element's results depend on neither the others nor their number.

    False where that is not certain.

    Args:
        one: the step.
        other: the same step, traced for a batch that is one element larger.
    """
    a, b = one.jaxpr, other.jaxpr
    sizes = [j.invars[0].aval.shape[:1] for j in (a, b)]
    if sizes[0] == () or not _same_text(a, b, sizes[0][0], sizes[1][0]):
        return False
    known = dict(zip(a.constvars, one.closed_jaxpr.consts, strict=True))
    rows: Rows = {}
    for (v, x), y in zip(known.items(), other.closed_jaxpr.consts, strict=True):
        if np.shape(x) != np.shape(y):
            if not _is_spread(x, y):
                return False
            rows[v] = _first_axis(v.aval.shape)
        elif not np.array_equal(x, y):
            return False
    for v, w in zip(a.invars, b.invars, strict=True):
        if v.aval.shape != w.aval.shape:
            if v.aval.shape[1:] != w.aval.shape[1:]:
                return False
            rows[v] = _first_axis(v.aval.shape)
    for eqn, larger in zip(a.eqns, b.eqns, strict=True):
        if any(v in rows for v in variables(eqn.invars)):
            found = _rows_of(eqn, rows, known)
            if found is None:
                return False
            rows.update(zip(eqn.outvars, found, strict=True))
        elif not _add_spread(eqn, larger, rows):
            return False
    return all(
        _is_by_row(v, w, rows, n < one.num_var_out)
        for n, (v, w) in enumerate(zip(a.outvars, b.outvars, strict=True))
    )


def _same_text(a: Any, b: Any, size: int, larger: int) -> bool:
    """Return whether two programs differ only in the size of the batch and its multiples."""
    texts = [re.sub(r"0x[0-9a-f]+", "", " ".join(str(jaxpr).split())) for jaxpr in (a, b)]
    literals = [re.findall(r"(\S+):[a-z]+\d*\[\]", text) for text in texts]
    tokens = [re.findall(r"\d+\.[\de+-]*|\d+|\D+", text) for text in texts]
    return (
        literals[0] == literals[1]
        and len(tokens[0]) == len(tokens[1])
        and all(
            x == y or (x.isdigit() and y.isdigit() and int(x) * larger == int(y) * size)
            for x, y in zip(*tokens, strict=True)
        )
    )


def _is_spread(x: Any, y: Any) -> bool:
    """Return whether constants for two sizes of the batch have the same values for every element."""
    is_first = np.shape(x)[1:] == np.shape(y)[1:]
    return is_first and bool((np.asarray(y) == np.asarray(x)[:1]).all() and (x == x[:1]).all())


def _add_spread(eqn: JaxprEqn, larger: JaxprEqn, rows: Rows) -> bool:
    """Give rows to a value that is spread over the batch without depending on it.

    False if it was made in another way, as random numbers are.
    """
    for v, w in zip(eqn.outvars, larger.outvars, strict=True):
        axes = [
            n for n, (x, y) in enumerate(zip(v.aval.shape, w.aval.shape, strict=True)) if x != y
        ]
        if not axes:
            continue
        if len(axes) > 1 or eqn.primitive.name not in ("broadcast_in_dim", "iota"):
            return False
        shape = [-1 if n == axes[0] else 1 for n in range(len(v.aval.shape))]
        count = np.arange(v.aval.shape[axes[0]]).reshape(shape)
        rows[v] = np.broadcast_to(count, v.aval.shape)
    return True


def _is_by_row(v: Any, w: Any, rows: Rows, is_output: bool) -> bool:
    """Return whether a result has the batch first, each row from its own.

    A state may be without it.
    """
    if v.aval.shape == w.aval.shape:
        return not is_output and (isinstance(v, Literal) or v not in rows)
    return v in rows and bool((rows[v] == _first_axis(v.aval.shape)).all())


def _first_axis(shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1)), shape)


def _agree(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(((a == b) | (a < 0) | (b < 0)).all())


def _rows_of(eqn: JaxprEqn, rows: Rows, constants: dict[Var, Any]) -> list[np.ndarray] | None:
    """Return rows of an equation's results; None where they mix, or the primitive is not known."""
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
            return _looked_up(eqn, operands)
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


def _looked_up(eqn: JaxprEqn, operands: list[Any]) -> list[np.ndarray] | None:
    """Return rows of a look-up: of the indices, in a table that has none."""
    if eqn.primitive.name != "gather" or operands[0] is not None:
        return None
    numbers = eqn.params["dimension_numbers"]
    indices = operands[1]
    shape = eqn.outvars[0].aval.shape
    if numbers.operand_batching_dims or not _constant(indices, (indices.ndim - 1,)):
        return None
    lead = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    wide = np.ones(len(shape), int)
    wide[lead] = indices.shape[:-1]
    return [np.broadcast_to(_reduced(indices, (indices.ndim - 1,)).reshape(wide), shape)]


def _constant(array: Any, axes: Any) -> bool:
    """Return whether rows are the same along these axes."""
    return array.size > 0 and bool((array == array.max(tuple(axes), keepdims=True)).all())


def _reduced(array: Any, axes: tuple[int, ...]) -> np.ndarray:
    return array.max(axes)


def _product(eqn: JaxprEqn, operands: list[Any]) -> list[np.ndarray] | None:
    """Return the rows of a product.

    No operand may have several along a summed axis, and where both have some they must agree.
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
