"""Values with time in them, as rows of single-step parts.

A `Row` is a value's parts, one for each step, along one axis. A part keeps that axis, with size
`outer * m`: the axis is read as `(outer, parts, m)`, so `(T, B)` and `(B, T)` flattened to one axis
are rows too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn
from etrace_bridge.compiler.primitives import is_elementwise
from etrace_bridge.frontend.time.graph import Graph, Node


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


class Rows:
    """Makes the parts of rows, and joins them.

    Attributes:
        graph: Where the parts are nodes.
        length: The number of steps of the sequence that is read.
        reductions: Reductions over time, by the `id` of their result.
        joins: For arrays that join all steps of a row, by `id`: the array, and the equation that
            reads all of it at once.
        calls: Calls with a derivative of their own that were applied to parts of rows, and to how
            many at once, by what they compute.
    """

    def __init__(self, graph: Graph, length: int) -> None:
        self.graph, self.length = graph, length
        self.reductions: dict[int, Reduced] = {}
        self.joins: dict[int, tuple[Node, JaxprEqn]] = {}
        self.calls: dict[Any, tuple[JaxprEqn, int]] = {}

    def whole(self, value: Value, reader: JaxprEqn | None = None) -> Node:
        """Join the parts of a row, for the equation that reads it."""
        if isinstance(value, Node):
            return value
        joined = self._joined(value)
        if reader is not None and joined.level and len(value.parts) == self.length:
            self.joins.setdefault(id(joined), (joined, reader))
        return joined

    def _joined(self, value: Row) -> Node:
        parts, axis, outer = value.parts, value.axis, value.outer
        if outer == 1:
            return self.graph.make(lambda *p: lax.concatenate(p, axis), *parts)

        def join(*p: Any) -> Any:
            split = [x.reshape(*x.shape[:axis], outer, -1, *x.shape[axis + 1 :]) for x in p]
            return jnp.stack(split, axis + 1).reshape(value.shape)

        return self.graph.make(join, *parts)

    def part(self, node: Node, axis: int, outer: int, count: int, index: int) -> Node:
        """Return one part of an array; what is constant along the axis stays free of the index."""
        size = node.shape[axis] // count
        shape = (*node.shape[:axis], size, *node.shape[axis + 1 :])
        if node.kind == "broadcast_in_dim":
            dims = list(node.params["broadcast_dimensions"])
            source = node.operands[0]
            if axis not in dims or source.shape[dims.index(axis)] == 1:
                return self.graph.apply(
                    node.equation, [source], [shape], {**node.params, "shape": shape}
                )[0]
            inner = self.part(source, dims.index(axis), outer, count, index)
            return self.graph.apply(
                node.equation, [inner], [shape], {**node.params, "shape": shape}
            )[0]
        if node.kind == "constant":
            rows = node.value.reshape(
                *node.shape[:axis], outer, count, -1, *node.shape[axis + 1 :]
            ).take(index, axis + 1)
            return self.graph.constant(rows.reshape(shape))
        if (
            node.level == 0
            and node.eqn is not None
            and acts_by_element(node.eqn)
            and node.kind[:6] != "custom"
        ):
            operands = [
                o
                if o.shape == () or o.shape[axis] == 1
                else self.part(o, axis, outer, count, index)
                for o in node.operands
            ]
            return self.graph.apply(node.equation, operands, [shape], node.params)[0]
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
            self.graph.apply(node.operands[0].equation, [key])[0]
            if node.operands[0].kind == "random_wrap"
            else key
        )
        return self.graph.apply(node.equation, [wrapped], [shape], {**node.params, "shape": shape})[
            0
        ]

    def aligned(self, value: Value, like: Row) -> list[Node] | None:
        """Return the parts of a value along another row's axis; None if it is a row of another
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


def acts_by_element(eqn: JaxprEqn) -> bool:
    """Return whether an equation keeps the elements apart."""
    same_width = (
        eqn.primitive.name == "bitcast_convert_type"
        and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    )
    return same_width or is_elementwise(eqn)
