"""What products, convolutions and look-ups do to rows, and equations that work along one axis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn
from etrace_bridge.frontend.time.graph import Node
from etrace_bridge.frontend.time.rows import Row, Rows, Value


def _dot_general(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    (contract, batch) = eqn.params["dimension_numbers"]
    sides = [i for i, o in enumerate(operands) if isinstance(o, Row)]
    row = cast(Row, operands[sides[0]])
    side = sides[0]
    if row.axis in contract[side]:
        return None
    size = row.parts[0].shape[row.axis]
    if row.axis in batch[side]:
        place = list(batch[side]).index(row.axis)
        other = operands[1 - side]
        axis = batch[1 - side][place]
        if isinstance(other, Row):
            if (other.axis, other.outer, len(other.parts)) != (axis, row.outer, len(row.parts)):
                return None
            rest: Sequence[Node] = other.parts
        else:
            rest = [
                rows.part(other, axis, row.outer, len(row.parts), i) for i in range(len(row.parts))
            ]
        return rows.each(
            eqn, [row.parts, rest] if side == 0 else [rest, row.parts], place, row.outer, size
        )
    other = rows.whole(operands[1 - side], eqn)
    free = [d for d in range(len(row.shape)) if d not in contract[side] and d not in batch[side]]
    axis = len(batch[0]) + free.index(row.axis)
    if side == 1:
        axis += len(other.shape) - len(contract[0]) - len(batch[0])
    rest = [other] * len(row.parts)
    return rows.each(
        eqn, [row.parts, rest] if side == 0 else [rest, row.parts], axis, row.outer, size
    )


def _convolution(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row, kernel = operands[0], rows.whole(operands[1], eqn)
    if not isinstance(row, Row):
        return None
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    if row.axis == numbers.lhs_spec[0] and params["batch_group_count"] == 1:
        rest = [kernel] * len(row.parts)
        return rows.each(
            eqn, [row.parts, rest], numbers.out_spec[0], row.outer, row.parts[0].shape[row.axis]
        )
    if row.axis not in numbers.lhs_spec[2:] or row.outer != 1 or row.inner != 1:
        return None
    place = numbers.lhs_spec[2:].index(row.axis)
    if params["lhs_dilation"][place] != 1:
        return None
    reach = (kernel.shape[numbers.rhs_spec[2 + place]] - 1) * params["rhs_dilation"][place] + 1
    low, high = params["padding"][place]
    zeros = rows.graph.constant(np.zeros(row.parts[0].shape, row.parts[0].dtype))
    padded = (
        [zeros] * max(0, low)
        + list(row.parts[max(0, -low) : len(row.parts) - max(0, -high)])
        + [zeros] * max(0, high)
    )
    own = {
        **params,
        "padding": tuple((0, 0) if i == place else p for i, p in enumerate(params["padding"])),
    }
    own["window_strides"] = tuple(
        1 if i == place else s for i, s in enumerate(params["window_strides"])
    )
    axis = numbers.out_spec[2 + place]
    shape = (*eqn.outvars[0].aval.shape[:axis], 1, *eqn.outvars[0].aval.shape[axis + 1 :])
    parts = []
    for start in range(0, len(padded) - reach + 1, params["window_strides"][place]):
        window = padded[start : start + reach]
        joined = (
            window[0]
            if reach == 1
            else rows.graph.make(lambda *p: lax.concatenate(p, row.axis), *window, source=eqn)
        )
        parts.append(rows.graph.apply(eqn, [joined, kernel], [shape], own)[0])
    return [parts[0] if len(parts) == 1 else Row(axis, 1, tuple(parts))]


def _gather(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    table, indices = operands
    if (
        not isinstance(table, Node)
        or not isinstance(indices, Row)
        or indices.axis == len(indices.shape) - 1
    ):
        return None
    numbers = eqn.params["dimension_numbers"]
    if getattr(numbers, "operand_batching_dims", ()):
        return None
    free = [d for d in range(len(eqn.outvars[0].aval.shape)) if d not in numbers.offset_dims]
    axis = free[indices.axis]
    size = indices.parts[0].shape[indices.axis]
    return rows.each(eqn, [[table] * len(indices.parts), indices.parts], axis, indices.outer, size)


def _on_other_axes(axes: Callable[[dict], Sequence[int]]) -> Callable:
    """The rule of equations that work along some axes and leave the others apart (sort, argmax,
    top_k).
    """

    def rule(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
        row = next(o for o in operands if isinstance(o, Row))
        columns = [rows.aligned(o, row) for o in operands]
        if row.axis in axes(eqn.params) or any(c is None for c in columns):
            return None
        removed = (
            axes(eqn.params)
            if eqn.outvars[0].aval.shape != row.shape
            and len(eqn.outvars[0].aval.shape) < len(row.shape)
            else ()
        )
        axis = row.axis - sum(a < row.axis for a in removed)
        return rows.each(eqn, columns, axis, row.outer, row.parts[0].shape[row.axis])  # type: ignore[arg-type]

    return rule


RULES = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "sort": _on_other_axes(lambda p: (p["dimension"],)),
    "argmax": _on_other_axes(lambda p: p["axes"]),
    "argmin": _on_other_axes(lambda p: p["axes"]),
}
