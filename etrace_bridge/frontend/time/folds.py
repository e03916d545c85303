"""Reductions over time, step by step: sums, extrema, running totals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._jax_compat import ClosedJaxpr, JaxprEqn, keep_source
from etrace_bridge.frontend.ops.reductions import argmax, argmin, pick_extremum
from etrace_bridge.frontend.time.graph import Node
from etrace_bridge.frontend.time.rows import Reduced, Row, Rows, Value

_JOIN: dict[str, Callable] = {
    "reduce_sum": lax.add,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_prod": lax.mul,
}
_BEATS: dict[str, Callable] = {"reduce_max": lax.gt, "reduce_min": lax.lt}


def _reduce(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row, name = cast(Row, operands[0]), eqn.primitive.name
    axes = eqn.params["axes"]
    if row.axis not in axes:
        axis = row.axis - sum(a < row.axis for a in axes)
        return rows.each(eqn, [row.parts], axis, row.outer, row.parts[0].shape[row.axis])
    if name not in _JOIN:
        return None
    parts = [rows.graph.apply(eqn, [p])[0] for p in row.parts]
    if name in _BEATS and jnp.issubdtype(parts[0].dtype, jnp.inexact):
        return [_shared_extremum(rows, eqn, row, parts)]
    total = parts[0]
    for part in parts[1:]:
        total = rows.graph.make(_JOIN[name], total, part, source=eqn)
    if name == "reduce_sum":
        rows.reductions[id(total)] = Reduced("sum", tuple(parts))
    return [total]


# ---- extrema


def _shared_extremum(rows: Rows, eqn: JaxprEqn, row: Row, parts: list[Node]) -> Node:
    """Return an extremum over time whose gradient is shared evenly among equals, as torch's `amax`
    has it: the number of equals so far is carried along.
    """
    beats, axes = _BEATS[eqn.primitive.name], eqn.params["axes"]

    def count(part: Any, top: Any) -> Any:
        spread = lax.broadcast_in_dim(
            top, part.shape, [d for d in range(part.ndim) if d not in axes]
        )
        return lax.reduce_sum(lax.convert_element_type(lax.eq(part, spread), np.int32), axes)

    def joined(top: Any, equals: Any, new: Any, others: Any) -> Any:
        tie = lax.bitwise_and(lax.eq(new, top), lax.is_finite(new))
        share = lax.div(
            lax.convert_element_type(others, new.dtype),
            lax.convert_element_type(lax.add(equals, others), new.dtype),
        )
        # zero in value, and the new one's share in the derivative
        move = lax.select(tie, lax.sub(new, top), lax.full_like(new, 0))
        return lax.select(_wins(beats, new, top), new, lax.add(top, lax.mul(share, move)))

    def counted(top: Any, equals: Any, new: Any, others: Any) -> Any:
        also = lax.select(lax.eq(new, top), others, lax.full_like(others, 0))
        return lax.select(_wins(beats, new, top), others, lax.add(equals, also))

    alone = all(row.parts[0].shape[axis] == 1 for axis in axes)
    none, one = (rows.graph.constant(np.full(parts[0].shape, n, np.int32)) for n in (0, 1))
    numbers = [
        one if alone else rows.graph.make(count, whole, part, source=eqn)
        for whole, part in zip(row.parts, parts, strict=True)
    ]
    top, equals = _worst(rows, beats, parts[0]), none
    for new, others in zip(parts, numbers, strict=True):
        operands = (top, equals, new, others)
        top = rows.graph.make(joined, *operands, source=eqn)
        equals = rows.graph.make(counted, *operands, source=eqn)
    return top


def _worst(rows: Rows, beats: Callable, like: Node) -> Node:
    """The value that every other one beats: extrema start from it, so their first step is like the
    others.
    """
    if jnp.issubdtype(like.dtype, jnp.inexact):
        ends: tuple[Any, Any] = (-np.inf, np.inf)
    elif like.dtype == np.bool_:
        ends = (False, True)
    else:
        ends = (jnp.iinfo(like.dtype).min, jnp.iinfo(like.dtype).max)
    return rows.graph.constant(np.full(like.shape, ends[beats is lax.lt], like.dtype))


def _wins(beats: Callable, new: Any, top: Any) -> Any:
    """Return whether a new value takes the place of the extremum so far; NaN stays."""
    is_nan = lax.bitwise_and(lax.ne(new, new), lax.eq(top, top))
    return lax.bitwise_or(beats(new, top), is_nan)


PICKS: dict[str, tuple[Callable, Callable]] = {
    "max_along": (argmax, lax.gt),
    "min_along": (argmin, lax.lt),
}


def pick(rows: Rows, eqn: JaxprEqn, row: Row, read: Callable) -> list[Value] | None:
    """Return the extremum along an axis and its index, as torch's `max(dim)` does: of equals, the
    first one is picked.

    Over time, the index is that of the whole sequence, since no step knows its number.

    Args:
        rows: Where the parts are made.
        eqn: The call of one of the `PICKS`.
        row: What it is called on.
        read: Reads a jaxpr.
    """
    name = eqn.params["name"]
    find, beats = PICKS[name]
    inner = eqn.params["jaxpr"].jaxpr.eqns
    axis = next(e.params["axes"][0] for e in inner if e.primitive.name in ("argmax", "argmin"))

    def body(shape: tuple[int, ...]) -> ClosedJaxpr:
        x = jax.ShapeDtypeStruct(shape, row.parts[0].dtype)
        with keep_source(eqn):
            return jax.make_jaxpr(pick_extremum(name, find, axis))(x)

    if axis != row.axis:
        of_part = body(row.parts[0].shape)
        columns = zip(*[read(of_part, [p]) for p in row.parts], strict=True)
        return [Row(row.axis, row.outer, tuple(column)) for column in columns]
    if row.outer != 1 or row.inner != 1:
        return None

    def first(top: Any, new: Any) -> Any:
        return lax.select(_wins(beats, new, top), new, top)

    top = _worst(rows, beats, row.parts[0])
    for new in row.parts:
        top = rows.graph.make(first, top, new, source=eqn)
    return [top, read(body(row.shape), [row])[1]]


# ---- running totals


def _add_logarithms(a: Any, b: Any) -> Any:
    """The logarithm of a sum of exponentials."""
    top = lax.max(a, b)
    return lax.add(top, lax.log(lax.add(lax.exp(lax.sub(a, top)), lax.exp(lax.sub(b, top)))))


_RUNNING: dict[str, Callable] = {
    "cumsum": lax.add, "cumprod": lax.mul, "cummax": lax.max, "cummin": lax.min, "cumlogsumexp": _add_logarithms,
}  # fmt: skip


def _running(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    if eqn.params["axis"] != row.axis:
        return rows.each(eqn, [row.parts], row.axis, row.outer, row.parts[0].shape[row.axis])
    if row.outer != 1 or row.inner != 1 or eqn.primitive.name not in _RUNNING:
        return None
    parts = row.parts[::-1] if eqn.params["reverse"] else row.parts
    sums = [parts[0]]
    for part in parts[1:]:
        sums.append(rows.graph.make(_RUNNING[eqn.primitive.name], sums[-1], part, source=eqn))
    return [Row(row.axis, 1, tuple(sums[::-1] if eqn.params["reverse"] else sums))]


RULES = {
    **dict.fromkeys(
        ["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"],
        _reduce,
    ),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _running),
}
