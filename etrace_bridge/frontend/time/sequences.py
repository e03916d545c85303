"""Taking a whole-sequence program apart into single steps: which values are a row of steps, and
what each equation does to rows.

A value with time in it is a `Row`: its parts, one for each step, along one axis. A part keeps that
axis, with size `outer * m`: the axis is read as `(outer, parts, m)`, so `(T, B)` and `(B, T)`
flattened to one axis are rows too. Every rule gives the parts of an equation's results from the
parts of its operands. An equation without a rule joins the parts to one array again, whose level is
that of the last step; what reads it looks ahead, and is refused later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._jax_compat import ClosedJaxpr, JaxprEqn, Literal
from etrace_bridge.compiler.primitives import is_elementwise
from etrace_bridge.frontend.time.graph import Graph, Node, keys_of


@dataclass(frozen=True)
class Row:
    """A value as parts along one axis, which is read as `(outer, len(parts), m)`."""

    axis: int
    outer: int
    parts: tuple[Node, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole value."""
        part = self.parts[0].shape
        return (*part[: self.axis], part[self.axis] * len(self.parts), *part[self.axis + 1 :])

    @property
    def inner(self) -> int:
        """The size `m` of a part within one entry of `outer`."""
        return self.parts[0].shape[self.axis] // self.outer

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """What two rows must share to be read side by side."""
        return self.axis, self.outer, len(self.parts), self.parts[0].shape[self.axis]


Value = Node | Row


@dataclass
class Reduced:
    """A reduction over time: which one, and what it reduces, step by step."""

    kind: str
    parts: tuple[Node, ...]


class Reader:
    """Reads jaxprs of whole sequences into a graph."""

    def __init__(self, graph: Graph, length: int) -> None:
        self.graph, self.length = graph, length
        self.reductions: dict[int, Reduced] = {}
        self.names: dict[int, list[str]] = {}
        self.nodes: dict[int, Node] = {}

    def read(self, closed: ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Give the outputs of a jaxpr for these inputs."""
        env: dict[Any, Value] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[variable] = self.graph.constant(value)
        get = lambda v: self.graph.constant(v.val) if isinstance(v, Literal) else env[v]
        for eqn in closed.jaxpr.eqns:
            operands = [get(v) for v in eqn.invars]
            for variable, value in zip(eqn.outvars, self.equation(eqn, operands), strict=True):
                env[variable] = value
        return [get(v) for v in closed.jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Give the results of one equation."""
        name = eqn.primitive.name
        if name == "name":
            return self._note_name(eqn, operands)
        if name in ("jit", "pjit", "closed_call", "core_call"):
            return self.read(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), operands)
        if (
            name == "slice"
            and isinstance(operands[0], Node)
            and (drawn := self._drawn_step(eqn, operands[0])) is not None
        ):
            return [drawn]
        rule = _RULES.get(name)
        rows = [o for o in operands if isinstance(o, Row)]
        if name == "concatenate" or (rule is not None and rows):
            found = (rule or _concatenate)(self, eqn, operands)
            if found is not None:
                return found
        elif rows and _acts_by_element(eqn):
            found = _elementwise(self, eqn, operands)
            if found is not None:
                return found
        return list(self.graph.apply(eqn, [self.whole(o) for o in operands]))

    def _drawn_step(self, eqn: JaxprEqn, node: Node) -> Node | None:
        """Give one step of random numbers that were drawn for the whole sequence; None if an
        equation slices anything else.
        """
        start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
        cut = [a for a, size in enumerate(node.shape) if (start[a], limit[a]) != (0, size)]
        if len(cut) != 1 or node.shape[cut[0]] != self.length or limit[cut[0]] - start[cut[0]] != 1:
            return None
        if node.level or not any(keys_of([node])):
            return None
        return self.part(node, cut[0], 1, self.length, start[cut[0]])

    def _note_name(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        if isinstance(operands[0], Node):
            self.names.setdefault(id(operands[0]), []).append(eqn.params["name"])
            self.nodes[id(operands[0])] = operands[0]
        return operands

    def whole(self, value: Value) -> Node:
        """Join the parts of a row."""
        if isinstance(value, Node):
            return value
        parts, axis, outer = value.parts, value.axis, value.outer
        if outer == 1:
            return self.graph.make(lambda *p: lax.concatenate(p, axis), *parts)

        def join(*p: Any) -> Any:
            split = [x.reshape(*x.shape[:axis], outer, -1, *x.shape[axis + 1 :]) for x in p]
            return jnp.stack(split, axis + 1).reshape(value.shape)

        return self.graph.make(join, *parts)

    def part(self, node: Node, axis: int, outer: int, count: int, index: int) -> Node:
        """Give one part of an array; what is constant along the axis stays free of the index."""
        size = node.shape[axis] // count
        shape = (*node.shape[:axis], size, *node.shape[axis + 1 :])
        if node.kind == "broadcast_in_dim":
            dims = list(node.params["broadcast_dimensions"])
            source = node.operands[0]
            if axis not in dims or source.shape[dims.index(axis)] == 1:
                return self.graph.apply(
                    node.eqn, [source], [shape], {**node.params, "shape": shape}
                )[0]
            inner = self.part(source, dims.index(axis), outer, count, index)
            return self.graph.apply(node.eqn, [inner], [shape], {**node.params, "shape": shape})[0]
        if node.kind == "constant":
            rows = node.value.reshape(
                *node.shape[:axis], outer, count, -1, *node.shape[axis + 1 :]
            ).take(index, axis + 1)
            return self.graph.constant(rows.reshape(shape))
        if (
            node.level == 0
            and node.eqn is not None
            and _acts_by_element(node.eqn)
            and node.kind[:6] != "custom"
        ):
            operands = [
                o
                if o.shape == () or o.shape[axis] == 1
                else self.part(o, axis, outer, count, index)
                for o in node.operands
            ]
            return self.graph.apply(node.eqn, operands, [shape], node.params)[0]
        if node.kind == "random_bits":
            return self._random_part(node, shape, index)
        inner = size // outer

        def take(x: Any) -> Any:
            if outer == 1:
                return lax.slice_in_dim(x, index * inner, (index + 1) * inner, axis=axis)
            split = x.reshape(*x.shape[:axis], outer, count, inner, *x.shape[axis + 1 :])
            return lax.index_in_dim(split, index, axis + 1, keepdims=False).reshape(shape)

        return self.graph.make(take, node, source=node.eqn)

    def _random_part(self, node: Node, shape: tuple[int, ...], index: int) -> Node:
        """Draw the random numbers of one part by themselves, with a key of their own."""
        key = self.graph.random_key((node.number, index))
        wrapped = (
            self.graph.apply(node.operands[0].eqn, [key])[0]
            if node.operands[0].kind == "random_wrap"
            else key
        )
        return self.graph.apply(node.eqn, [wrapped], [shape], {**node.params, "shape": shape})[0]

    def aligned(self, value: Value, like: Row) -> list[Node] | None:
        """Give the parts of a value along another row's axis; None if it is a row of another
        layout.
        """
        if isinstance(value, Row):
            return list(value.parts) if value.layout == like.layout else None
        # spread over the axis by the equation itself
        if value.shape == () or value.shape[like.axis] == 1:
            return [value] * len(like.parts)
        return [
            self.part(value, like.axis, like.outer, len(like.parts), i)
            for i in range(len(like.parts))
        ]

    def each(
        self,
        eqn: JaxprEqn,
        columns: Sequence[Sequence[Node]],
        axis: int,
        outer: int,
        size: int,
        params: Callable | dict | None = None,
    ) -> list[Value]:
        """Apply an equation to each part: `columns` are the operands' parts, the results are rows
        along `axis`.
        """
        shapes = [(*v.aval.shape[:axis], size, *v.aval.shape[axis + 1 :]) for v in eqn.outvars]
        own = params(shapes[0]) if callable(params) else params
        parts = [
            self.graph.apply(eqn, operands, shapes, own) for operands in zip(*columns, strict=True)
        ]
        return [Row(axis, outer, tuple(column)) for column in zip(*parts, strict=True)]


def _acts_by_element(eqn: JaxprEqn) -> bool:
    same_width = (
        eqn.primitive.name == "bitcast_convert_type"
        and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    )
    return same_width or is_elementwise(eqn)


# ---- rules: `rule(reader, eqn, operands) -> results`, or None if the equation joins the parts


def _elementwise(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = next(o for o in operands if isinstance(o, Row))
    columns = [reader.aligned(o, row) for o in operands]
    if any(c is None for c in columns):
        return None
    if eqn.primitive.name[:6] == "custom":
        return _custom(reader, eqn, row, columns)  # type: ignore[arg-type]
    return reader.each(eqn, columns, row.axis, row.outer, row.parts[0].shape[row.axis])  # type: ignore[arg-type]


def _custom(reader: Reader, eqn: JaxprEqn, row: Row, columns: list[list[Node]]) -> list[Value]:
    """Apply a call with a derivative of its own, whose program has a fixed shape: on copies of a
    part, of which one is read.
    """
    axis, count, size = row.axis, len(row.parts), row.parts[0].shape[row.axis]
    results = []
    for operands in zip(*columns, strict=True):
        copies = [
            o
            if o.shape == ()
            else reader.graph.make(lambda x: lax.concatenate([x] * count, axis), o, source=eqn)
            for o in operands
        ]
        outputs = reader.graph.apply(eqn, copies)
        results.append(
            [
                reader.graph.make(lambda x: lax.slice_in_dim(x, 0, size, axis=axis), o, source=eqn)
                for o in outputs
            ]
        )
    return [Row(axis, row.outer, tuple(column)) for column in zip(*results, strict=True)]


def _concatenate(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    axis = eqn.params["dimension"]
    along = [o for o in operands if isinstance(o, Row) and o.axis == axis]
    across = [o for o in operands if isinstance(o, Row) and o.axis != axis]
    if across:
        columns = [reader.aligned(o, across[0]) for o in operands]
        if any(c is None for c in columns):
            return None
        row = across[0]
        return reader.each(eqn, columns, row.axis, row.outer, row.parts[0].shape[row.axis])  # type: ignore[arg-type]
    if any(o.outer != 1 for o in along):
        return None
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
            parts += [reader.part(operand, axis, 1, count, i) for i in range(count)]
        else:
            return None
    if len(parts) == 1:
        return [parts[0]]
    if not along and len(parts) < reader.length - 1:
        return None
    return [Row(axis, 1, tuple(parts))]


def _reshape(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
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
                reader.graph.make(lambda x, new=new: lax.reshape(x, new), p, source=eqn)
                if p.shape != new
                else p
                for p in row.parts
            ]
            return [Row(axis, outer, tuple(parts))]
    return None


def _transpose(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    axis = list(eqn.params["permutation"]).index(row.axis)
    return reader.each(eqn, [row.parts], axis, row.outer, row.parts[0].shape[row.axis])


def _broadcast(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    axis = eqn.params["broadcast_dimensions"][row.axis]
    size = row.parts[0].shape[row.axis]
    return reader.each(
        eqn, [row.parts], axis, row.outer, size, lambda shape: {**eqn.params, "shape": shape}
    )


def _slice(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
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
        kept = tuple(reader.graph.apply(eqn, [p], [shape], params)[0] for p in kept)
    return [kept[0] if len(kept) == 1 else Row(axis, row.outer, tuple(kept))]


def _split(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    part = row.parts[0].shape
    if axis != row.axis:
        shapes = [(*part[:axis], size, *part[axis + 1 :]) for size in sizes]
        columns = zip(*[reader.graph.apply(eqn, [p], shapes) for p in row.parts], strict=True)
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


def _rev(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    dimensions = tuple(d for d in eqn.params["dimensions"] if d != row.axis)
    if len(dimensions) == len(eqn.params["dimensions"]):
        return reader.each(eqn, [row.parts], row.axis, row.outer, row.parts[0].shape[row.axis])
    if row.outer != 1 or row.inner != 1 or dimensions:
        return None
    return [Row(row.axis, 1, row.parts[::-1])]


def _pad(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
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
        parts = tuple(reader.graph.apply(eqn, [p, fill], [shape], params)[0] for p in parts)
    empty = [
        reader.graph.make(lambda f: lax.broadcast_in_dim(f, parts[0].shape, ()), fill, source=eqn)
    ]
    parts = parts[max(0, -low) : len(parts) - max(0, -high)]
    return [Row(row.axis, row.outer, (*empty * max(0, low), *parts, *empty * max(0, high)))]


_JOIN: dict[str, tuple[str, Callable]] = {
    "reduce_sum": ("sum", lax.add),
    "reduce_max": ("max", lax.max),
    "reduce_min": ("min", lax.min),
    "reduce_prod": ("prod", lax.mul),
}


def _reduce(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    axes = eqn.params["axes"]
    if row.axis not in axes:
        axis = row.axis - sum(a < row.axis for a in axes)
        return reader.each(eqn, [row.parts], axis, row.outer, row.parts[0].shape[row.axis])
    if eqn.primitive.name not in _JOIN:
        return None
    kind, join = _JOIN[eqn.primitive.name]
    parts = [reader.graph.apply(eqn, [p])[0] for p in row.parts]
    total = parts[0]
    for part in parts[1:]:
        total = reader.graph.make(join, total, part, source=eqn)
    reader.reductions[id(total)] = Reduced(kind, tuple(parts))
    return [total]


def _add_logarithms(a: Any, b: Any) -> Any:
    """The logarithm of a sum of exponentials."""
    top = lax.max(a, b)
    return lax.add(top, lax.log(lax.add(lax.exp(lax.sub(a, top)), lax.exp(lax.sub(b, top)))))


_RUNNING: dict[str, Callable] = {
    "cumsum": lax.add, "cumprod": lax.mul, "cummax": lax.max, "cummin": lax.min, "cumlogsumexp": _add_logarithms,
}  # fmt: skip


def _running(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row = cast(Row, operands[0])
    if eqn.params["axis"] != row.axis:
        return reader.each(eqn, [row.parts], row.axis, row.outer, row.parts[0].shape[row.axis])
    if row.outer != 1 or row.inner != 1 or eqn.primitive.name not in _RUNNING:
        return None
    parts = row.parts[::-1] if eqn.params["reverse"] else row.parts
    sums = [parts[0]]
    for part in parts[1:]:
        sums.append(reader.graph.make(_RUNNING[eqn.primitive.name], sums[-1], part, source=eqn))
    return [Row(row.axis, 1, tuple(sums[::-1] if eqn.params["reverse"] else sums))]


def _dot_general(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
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
                reader.part(other, axis, row.outer, len(row.parts), i)
                for i in range(len(row.parts))
            ]
        return reader.each(
            eqn, [row.parts, rest] if side == 0 else [rest, row.parts], place, row.outer, size
        )
    other = reader.whole(operands[1 - side])
    free = [d for d in range(len(row.shape)) if d not in contract[side] and d not in batch[side]]
    axis = len(batch[0]) + free.index(row.axis)
    if side == 1:
        axis += len(other.shape) - len(contract[0]) - len(batch[0])
    rest = [other] * len(row.parts)
    return reader.each(
        eqn, [row.parts, rest] if side == 0 else [rest, row.parts], axis, row.outer, size
    )


def _convolution(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
    row, kernel = operands[0], reader.whole(operands[1])
    if not isinstance(row, Row):
        return None
    numbers, params = eqn.params["dimension_numbers"], eqn.params
    if row.axis == numbers.lhs_spec[0] and params["batch_group_count"] == 1:
        rest = [kernel] * len(row.parts)
        return reader.each(
            eqn, [row.parts, rest], numbers.out_spec[0], row.outer, row.parts[0].shape[row.axis]
        )
    if row.axis not in numbers.lhs_spec[2:] or row.outer != 1 or row.inner != 1:
        return None
    place = numbers.lhs_spec[2:].index(row.axis)
    if params["lhs_dilation"][place] != 1:
        return None
    reach = (kernel.shape[numbers.rhs_spec[2 + place]] - 1) * params["rhs_dilation"][place] + 1
    low, high = params["padding"][place]
    zeros = reader.graph.constant(np.zeros(row.parts[0].shape, row.parts[0].dtype))
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
            else reader.graph.make(lambda *p: lax.concatenate(p, row.axis), *window, source=eqn)
        )
        parts.append(reader.graph.apply(eqn, [joined, kernel], [shape], own)[0])
    return [parts[0] if len(parts) == 1 else Row(axis, 1, tuple(parts))]


def _gather(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
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
    return reader.each(
        eqn, [[table] * len(indices.parts), indices.parts], axis, indices.outer, size
    )


def _on_other_axes(axes: Callable[[dict], Sequence[int]]) -> Callable:
    """The rule of equations that work along some axes and leave the others apart (sort, argmax,
    top_k).
    """

    def rule(reader: Reader, eqn: JaxprEqn, operands: list[Value]) -> list[Value] | None:
        row = next(o for o in operands if isinstance(o, Row))
        columns = [reader.aligned(o, row) for o in operands]
        if row.axis in axes(eqn.params) or any(c is None for c in columns):
            return None
        removed = (
            axes(eqn.params)
            if eqn.outvars[0].aval.shape != row.shape
            and len(eqn.outvars[0].aval.shape) < len(row.shape)
            else ()
        )
        axis = row.axis - sum(a < row.axis for a in removed)
        return reader.each(eqn, columns, axis, row.outer, row.parts[0].shape[row.axis])  # type: ignore[arg-type]

    return rule


_RULES: dict[str, Callable] = {
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
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "sort": _on_other_axes(lambda p: (p["dimension"],)),
    "argmax": _on_other_axes(lambda p: p["axes"]),
    "argmin": _on_other_axes(lambda p: p["axes"]),
    **dict.fromkeys(
        ["reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"],
        _reduce,
    ),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], _running),
}
