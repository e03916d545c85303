"""What equations that act on single elements, or move them, do to rows.

Every rule is `rule(rows, eqn, operands) -> results`: it gives the parts of an equation's results
from the parts of its operands, or None if the equation has to read all steps at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from jax import lax

from etrace_bridge._jax_compat import JaxprEqn
from etrace_bridge.frontend.time.graph import Node
from etrace_bridge.frontend.time.rows import Row, Rows, Value


def elementwise(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    """Apply an equation that acts on single elements to each part."""
    row = next(o for o in operands if isinstance(o, Row))
    columns = [rows.aligned(o, row) for o in operands]
    if any(c is None for c in columns):
        return None
    if eqn.primitive.name[:6] == "custom":
        return _custom(rows, eqn, row, columns)  # type: ignore[arg-type]
    return rows.each(eqn, columns, row.axis, row.outer, row.parts[0].shape[row.axis])  # type: ignore[arg-type]


def _custom(rows: Rows, eqn: JaxprEqn, row: Row, columns: list[list[Node]]) -> list[Value]:
    """Apply a call with a derivative of its own, whose program has a fixed shape: on copies of a
    part, of which one is read.

    A call that an earlier sequence of another length had too is that sequence's call, so that
    sequences of all lengths are computed alike.
    """
    text = rows.graph.text_of(eqn)
    for whole in (f"[{','.join(map(str, row.shape))}]", str(row.shape)):
        text = text.replace(whole, "[part]")
    known = (text, row.axis, row.outer, row.parts[0].shape)
    eqn, count = rows.calls.setdefault(known, (eqn, len(row.parts)))
    axis, size = row.axis, row.parts[0].shape[row.axis]
    results = []
    for operands in zip(*columns, strict=True):
        copies = [
            o
            if o.shape == ()
            else rows.graph.make(lambda x: lax.concatenate([x] * count, axis), o, source=eqn)
            for o in operands
        ]
        outputs = rows.graph.apply(eqn, copies)
        results.append(
            [
                rows.graph.make(lambda x: lax.slice_in_dim(x, 0, size, axis=axis), o, source=eqn)
                for o in outputs
            ]
        )
    return [Row(axis, row.outer, tuple(column)) for column in zip(*results, strict=True)]


def _concatenate(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    axis = eqn.params["dimension"]
    along = [o for o in operands if isinstance(o, Row) and o.axis == axis]
    across = [o for o in operands if isinstance(o, Row) and o.axis != axis]
    if across:
        columns = [rows.aligned(o, across[0]) for o in operands]
        if any(c is None for c in columns):
            return None
        row = across[0]
        return rows.each(eqn, columns, row.axis, row.outer, row.parts[0].shape[row.axis])  # type: ignore[arg-type]
    if any(o.outer != 1 for o in along):
        return None
    operands = _grown(operands, axis)
    unit = min(
        [o.parts[0].shape[axis] for o in along]
        + [o.shape[axis] for o in operands if isinstance(o, Node) and o.shape[axis]]
    )
    parts: list[Node] = []
    for operand in operands:
        if isinstance(operand, Row):
            if operand.parts[0].shape[axis] != unit:
                return None
            parts += operand.parts
        elif operand.shape[axis] == 0:
            continue
        elif operand.shape[axis] == unit:
            parts.append(operand)
        elif operand.shape[axis] % unit == 0 and operand.level == 0:
            count = operand.shape[axis] // unit
            parts += [rows.part(operand, axis, 1, count, i) for i in range(count)]
        else:
            return None
    if len(parts) == 1:
        return [parts[0]]
    if not along and len(parts) < rows.length - 1:
        return None
    return [Row(axis, 1, tuple(parts))]


def _grown(operands: Sequence[Value], axis: int) -> list[Value]:
    """Replace values that were joined along an axis by what they were joined from: outputs may be
    collected by `torch.cat([outputs, y])`.
    """
    found: list[Value] = []
    for operand in operands:
        is_joined = isinstance(operand, Node) and operand.kind == "concatenate"
        if is_joined and operand.params["dimension"] == axis:
            found += _grown(operand.operands, axis)
        else:
            found.append(operand)
    return found


def _reshape(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    if eqn.params.get("dimensions") is not None and eqn.primitive.name == "reshape":
        return None
    shape, count = eqn.outvars[0].aval.shape, len(row.parts)
    before = math.prod(row.shape[: row.axis]) * row.outer
    after = row.inner * math.prod(row.shape[row.axis + 1 :])
    for axis, size in enumerate(shape):
        left, right = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        if left == 0 or right == 0 or before % left or after % right:
            continue
        outer, inner = before // left, after // right
        if size == outer * count * inner:
            new = (*shape[:axis], outer * inner, *shape[axis + 1 :])
            parts = [
                rows.graph.make(lambda x, new=new: lax.reshape(x, new), p, source=eqn)
                if p.shape != new
                else p
                for p in row.parts
            ]
            return [Row(axis, outer, tuple(parts))]
    return None


def _transpose(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    axis = list(eqn.params["permutation"]).index(row.axis)
    return rows.each(eqn, [row.parts], axis, row.outer, row.parts[0].shape[row.axis])


def _broadcast(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    axis = eqn.params["broadcast_dimensions"][row.axis]
    size = row.parts[0].shape[row.axis]
    return rows.each(
        eqn, [row.parts], axis, row.outer, size, lambda shape: {**eqn.params, "shape": shape}
    )


def _slice(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    axis, size = row.axis, row.parts[0].shape[row.axis]
    start, limit = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    strides = list(eqn.params["strides"] or [1] * len(start))
    first, last, stride = start[axis], limit[axis], strides[axis]
    whole = first == 0 and last == row.shape[axis] and stride == 1
    if not whole and (
        row.outer != 1
        or first % size
        or (stride != 1 and size != 1)
        or (last % size and stride == 1)
    ):
        return None
    kept = row.parts if whole else row.parts[first // size : -(-last // size) : stride]
    if not kept:
        return None
    start[axis], limit[axis], strides[axis] = 0, size, 1
    shape = (*eqn.outvars[0].aval.shape[:axis], size, *eqn.outvars[0].aval.shape[axis + 1 :])
    if shape != kept[0].shape:
        params = {
            **eqn.params,
            "start_indices": tuple(start),
            "limit_indices": tuple(limit),
            "strides": tuple(strides),
        }
        kept = tuple(rows.graph.apply(eqn, [p], [shape], params)[0] for p in kept)
    return [kept[0] if len(kept) == 1 else Row(axis, row.outer, tuple(kept))]


def _split(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    part = row.parts[0].shape
    if axis != row.axis:
        shapes = [(*part[:axis], size, *part[axis + 1 :]) for size in sizes]
        columns = zip(*[rows.graph.apply(eqn, [p], shapes) for p in row.parts], strict=True)
        return [Row(row.axis, row.outer, tuple(column)) for column in columns]
    if row.outer != 1 or any(size % part[axis] for size in sizes):
        return None
    results: list[Value] = []
    position = 0
    for size in sizes:
        kept = row.parts[position : position + size // part[axis]]
        position += size // part[axis]
        results.append(kept[0] if len(kept) == 1 else Row(axis, 1, kept))
    return results


def _rev(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    dimensions = tuple(d for d in eqn.params["dimensions"] if d != row.axis)
    if len(dimensions) == len(eqn.params["dimensions"]):
        return rows.each(eqn, [row.parts], row.axis, row.outer, row.parts[0].shape[row.axis])
    if row.outer != 1 or row.inner != 1 or dimensions:
        return None
    return [Row(row.axis, 1, row.parts[::-1])]


def _pad(rows: Rows, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row, fill = operands
    if not isinstance(row, Row) or not isinstance(fill, Node):
        return None
    config = list(eqn.params["padding_config"])
    low, high, inside = config[row.axis]
    if (low, high, inside) != (0, 0, 0) and (inside or row.outer != 1 or row.inner != 1):
        return None
    parts = row.parts
    config[row.axis] = (0, 0, 0)
    if any(c != (0, 0, 0) for c in config):
        params = {**eqn.params, "padding_config": tuple(config)}
        padded = eqn.outvars[0].aval.shape
        shape = (*padded[: row.axis], parts[0].shape[row.axis], *padded[row.axis + 1 :])
        parts = tuple(rows.graph.apply(eqn, [p, fill], [shape], params)[0] for p in parts)
    empty = [
        rows.graph.make(lambda f: lax.broadcast_in_dim(f, parts[0].shape, ()), fill, source=eqn)
    ]
    parts = parts[max(0, -low) : len(parts) - max(0, -high)]
    return [Row(row.axis, row.outer, (*empty * max(0, low), *parts, *empty * max(0, high)))]


RULES = {
    "concatenate": _concatenate,
    "reshape": _reshape,
    "squeeze": _reshape,
    "expand_dims": _reshape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "split": _split,
    "rev": _rev,
    "pad": _pad,
}
