"""Outputs that are a sum or a mean over time: what they add up, step by step."""

from __future__ import annotations

import numpy as np

from etrace_bridge.frontend.time.graph import Graph, Node
from etrace_bridge.frontend.time.sequences import Reduced

_LINEAR = frozenset(
    "dot_general reshape squeeze expand_dims broadcast_in_dim transpose slice "
    "convert_element_type neg mul div "
    "concatenate copy conv_general_dilated".split()
)
_AFFINE = frozenset(("add", "sub"))


def find_addends(
    graph: Graph, node: Node, reductions: dict[int, Reduced], length: int, batch: int = 1
) -> Reduced | None:
    """Give a sum or mean over time as its addends, if all that follows the sum is linear in it;
    else None.

    A mean over time and other axes divides by `batch` times the length, where `batch` is the number
    of their elements.
    """
    known = reductions.get(id(node))
    if known is not None:
        return known if known.kind == "sum" and len(known.parts) == length else None
    timed = [i for i, o in enumerate(node.operands) if o.level]
    if len(timed) != 1 or node.eqn is None or node.kind not in _LINEAR | _AFFINE:
        return None
    found = find_addends(graph, node.operands[timed[0]], reductions, length, batch)
    if found is None or (node.kind == "div" and timed[0] != 0):
        return None
    kind = found.kind
    if kind == "sum" and _divides_by(node, length * batch):
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


def divisors(node: Node, length: int) -> list[int]:
    """Give the multiples of the length by which a chain of linear operations divides a sum, as
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
    """Give the one number by which a node multiplies or divides."""
    other = node.operands[1 if node.operands[0].level else 0]
    while other.kind in ("broadcast_in_dim", "convert_element_type", "reshape"):
        other = other.operands[0]
    return (
        float(other.value.flat[0])
        if other.kind == "constant" and np.ptp(other.value) == 0
        else None
    )


def _divides_by(node: Node, length: int) -> bool:
    """Whether a node divides by the number of steps."""
    if node.kind not in ("div", "mul"):
        return False
    value = _constant_factor(node)
    return value is not None and bool(
        np.isclose(value, length if node.kind == "div" else 1 / length, rtol=1e-6)
    )
