"""Outputs that are, or are made of, a sum or a mean over time: what they add up, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from etrace_bridge.frontend.time.graph import Graph, Node
from etrace_bridge.frontend.time.rows import Reduced

_LINEAR = frozenset(
    "dot_general reshape squeeze expand_dims broadcast_in_dim transpose slice "
    "convert_element_type neg mul div "
    "concatenate copy conv_general_dilated".split()
)
_AFFINE = frozenset(("add", "sub"))


def find_addends(
    graph: Graph, node: Node, reductions: dict[int, Reduced], length: int, batch: float = 1
) -> Reduced | None:
    """Return a sum or mean over time as its addends, if all that follows the sum is linear in it;
    else None.

    A total that a loop adds up is `"total"` until it is divided by the length, which makes it a
    mean. A mean over time and other axes divides by `batch` times the length, where `batch` is the
    number of their elements; if that is infinite, nothing is a mean.
    """
    known = reductions.get(id(node)) or _running_total(node, length)
    if known is not None:
        return _as_mean(known, length * batch) if len(known.parts) == length else None
    timed = [i for i, o in enumerate(node.operands) if o.level]
    if len(timed) != 1 or node.eqn is None or node.kind not in _LINEAR | _AFFINE:
        return None
    found = find_addends(graph, node.operands[timed[0]], reductions, length, batch)
    if found is None or (node.kind == "div" and timed[0] != 0):
        return None
    kind = found.kind
    if kind != "mean" and _divides_by(node, length * batch):
        share = np.asarray(1 / batch, node.dtype)
        return Reduced(
            "mean",
            found.parts
            if batch == 1
            else tuple(graph.make(lambda x: x * share, p, source=node.eqn) for p in found.parts),
        )
    if node.kind in _AFFINE and kind != "mean":
        return None
    parts = []
    for part in found.parts:
        operands = [part if i == timed[0] else o for i, o in enumerate(node.operands)]
        parts.append(graph.apply(node.eqn, operands, [node.shape], node.params)[0])
    return Reduced(kind, tuple(parts))


def _running_total(node: Node, length: int) -> Reduced | None:
    """Return what a loop adds to a total, one addend a step; None if a node is not such a total.

    The total stands at the same side of every addition, and starts at zero or at the first addend.
    """
    for side in (0, 1):
        total, parts = node, []
        while total.kind == "add" and len(parts) < length - 1:
            parts.append(total.operands[1 - side])
            total = total.operands[side]
        if len(parts) < length - 1:
            continue
        start = [i for i, o in enumerate(total.operands) if total.kind == "add" and _is_zero(o)]
        parts.append(total.operands[1 - start[0]] if start else total)
        parts.reverse()
        if any(part.level for part in parts) and all(
            part.level <= step and part.shape == node.shape for step, part in enumerate(parts, 1)
        ):
            return Reduced("total", tuple(parts))
    return None


def _as_mean(known: Reduced, length: float) -> Reduced:
    """Return a sum of addends that are divided by the length as a mean."""
    if not all(_divides_by(part, length) for part in known.parts):
        return known
    sides = [0 if part.operands[0].level else 1 for part in known.parts]
    parts = [part.operands[side] for part, side in zip(known.parts, sides, strict=True)]
    return Reduced("mean", tuple(parts))


def divisors(node: Node, length: int) -> list[int]:
    """Return the multiples of the length by which a chain of linear operations divides a sum, as
    multiples; most often one or none.
    """
    found = []
    while (
        node.eqn is not None
        and node.kind in _LINEAR | _AFFINE
        and sum(o.level > 0 for o in node.operands) == 1
    ):
        if node.kind in ("div", "mul") and (value := _constant_factor(node)) is not None:
            multiple = (value if node.kind == "div" else 1 / value if value else 0.0) / length
            if multiple > 1 and abs(multiple - round(multiple)) < 1e-6 * multiple:
                found.append(round(multiple))
        node = next(o for o in node.operands if o.level)
    return found


def _constant_factor(node: Node) -> float | None:
    """Return the one number by which a node multiplies or divides."""
    return _constant_value(node.operands[1 if node.operands[0].level else 0])


def _constant_value(node: Node) -> float | None:
    """Return the number that a constant repeats."""
    while node.kind in ("broadcast_in_dim", "convert_element_type", "reshape"):
        node = node.operands[0]
    if node.kind != "constant" or not node.value.size or np.ptp(node.value):
        return None
    return float(node.value.flat[0])


def _is_zero(node: Node) -> bool:
    return _constant_value(node) == 0


def _divides_by(node: Node, length: float) -> bool:
    """Return whether a node divides by the number of steps."""
    if node.kind not in ("div", "mul") or (node.kind == "div" and not node.operands[0].level):
        return False
    value = _constant_factor(node)
    return value is not None and bool(
        np.isclose(value, length if node.kind == "div" else 1 / length, rtol=1e-6)
    )


# ---- means whose result is used further


def divide_by_count(
    graph: Graph, outputs: Mapping[int, Node], reductions: dict[int, Reduced], clock: Sequence[Node]
) -> dict[int, Node]:
    """Let an output divide its sums over time by the number of steps so far where it divides them
    by the length, so that sequences of all lengths are computed alike.

    Args:
        graph: Where the nodes are.
        outputs: The output for sequences of several lengths, by length.
        reductions: Sums over time, by `id`.
        clock: One step of an input, for each step.
    """
    lengths = tuple(outputs)
    wanted = _leading_to_means(graph, outputs[max(lengths)], reductions, max(lengths))
    known: dict[tuple[int, ...], tuple[Node, ...]] = {}

    def visit(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        key = tuple(id(node) for node in nodes)
        if key not in known:
            known[key] = rebuilt(nodes)
        return known[key]

    def rebuilt(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        last = nodes[lengths.index(max(lengths))]
        if id(last) not in wanted or not all(last.like(node) for node in nodes):
            return nodes
        factor = _common_factor(nodes, lengths)
        if factor is not None:
            return tuple(
                _divided(graph, node, clock[:length], factor)
                for node, length in zip(nodes, lengths, strict=True)
            )
        columns = [visit(row) for row in zip(*[node.operands for node in nodes], strict=True)]
        return tuple(
            graph.reapply(node, operands)
            for node, operands in zip(nodes, zip(*columns, strict=True), strict=True)
        )

    return dict(zip(lengths, visit(tuple(outputs.values())), strict=True))


def _leading_to_means(
    graph: Graph, output: Node, reductions: dict[int, Reduced], length: int
) -> set[int]:
    """Return the `id`s of an output's nodes from which a mean over time can be reached, and of the
    means.
    """
    readers: dict[int, list[Node]] = {}
    seen, stack, means = {id(output)}, [output], []
    while stack:
        node = stack.pop()
        operand = _scaled_operand(node)
        if operand is not None and find_addends(graph, operand, reductions, length) is not None:
            means.append(node)
            continue
        for o in node.operands:
            readers.setdefault(id(o), []).append(node)
            if o.level and id(o) not in seen:
                seen.add(id(o))
                stack.append(o)
    found: set[int] = set()
    while means:
        node = means.pop()
        if id(node) not in found:
            found.add(id(node))
            means.extend(readers.get(id(node), []))
    return found


def _scaled_operand(node: Node) -> Node | None:
    """Return what a node divides by, or multiplies with, a number; None if it does neither."""
    if node.kind not in ("div", "mul") or sum(o.level > 0 for o in node.operands) != 1:
        return None
    operand = next(o for o in node.operands if o.level)
    if operand.shape != node.shape or (node.kind == "div" and operand is not node.operands[0]):
        return None
    return None if _constant_factor(node) is None else operand


def _common_factor(nodes: Sequence[Node], lengths: Sequence[int]) -> float | None:
    """Return k if all nodes divide by k times their sequence's length."""
    factors = []
    for node, length in zip(nodes, lengths, strict=True):
        value = None if _scaled_operand(node) is None else _constant_factor(node)
        if not value:
            return None
        factors.append((value if node.kind == "div" else 1 / value) / length)
    return factors[0] if np.allclose(factors, factors[0], rtol=1e-6, atol=0) else None


def _divided(graph: Graph, node: Node, clock: Sequence[Node], factor: float) -> Node:
    """Divide what a node divides by the number of steps."""
    total = next(o for o in node.operands if o.level)
    count = graph.constant(np.zeros(total.shape, np.int32))
    for x in clock:
        count = graph.make(_count_on, count, x, source=node.eqn)
    scale = np.asarray(factor, total.dtype)
    return graph.make(
        lambda x, n: lax.div(
            x, lax.mul(lax.convert_element_type(n, x.dtype), lax.full_like(x, scale))
        ),
        total,
        count,
        source=node.eqn,
    )


def _count_on(count: Any, x: Any) -> Any:
    """Add one; `x` is read so that the count belongs to a step, and does not matter."""
    first = lax.reshape(lax.slice(x, (0,) * x.ndim, (1,) * x.ndim), ())
    nothing = lax.mul(lax.convert_element_type(lax.eq(first, first), np.int32), np.int32(0))
    return lax.add(count, lax.add(lax.full_like(count, 1), lax.broadcast(nothing, count.shape)))
