"""The smallest set of values that carries the past across the border between two steps: a minimum
vertex cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import jax.numpy as jnp

from etrace_bridge.frontend.time.graph import Node

_UNIT = 16  # one element of state; preferences below are smaller than that
_INFINITE = 1 << 60
_RESHAPES = ("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim")


def find_cut(
    demands: Sequence[Node], step: int, named: Collection[int], avoided: Collection[int] = ()
) -> list[Node] | None:
    """Find the values of earlier steps from which, with the inputs from `step` on, everything
    demanded can be computed.

    The cut has the fewest elements; among equals it prefers values that the code holds in variables
    (`named`, by `id`), does not end in a product with a weight, and lies as late as possible.

    Args:
        demands: What has to be computed at this step and later ones.
        step: The first step after the border.
        named: `id`s of nodes that have a name in the code.
        avoided: `id`s of nodes that must not be in the cut, in whatever shape (`origin_of`).

    Returns:
        The nodes of the cut, in the order in which they were made; None if the first step itself is
        needed.
    """
    past, late = _earlier(demands, step)
    network = _Network()
    for node in past:
        weighs = any(o.trained and o.level == 0 for o in node.operands)
        preference = (0 if id(node) in named else 1) + (3 if weighs else 0)
        # Indices are small, but what they stand for at the start is often no entry of the table:
        # zeros before an embedding, say.
        unit = _UNIT if jnp.issubdtype(node.dtype, jnp.inexact) else 1000 * _UNIT
        # The first step stands for an endless past: to carry all inputs along instead of a state is
        # no way out. So does the second one where code leaves the first out (`x[1:]`, padded).
        fixed = node.level <= 2 or id(origin_of(node)) in avoided
        room = _INFINITE if fixed else max(1, node.size) * unit + preference
        network.edge((id(node), 0), (id(node), 1), room)
        if node.kind == "input":
            network.edge("source", (id(node), 0), _INFINITE)
        for operand in node.operands:
            if operand.level:
                network.edge((id(operand), 1), (id(node), 0), _INFINITE)
        if id(node) in late:
            network.edge((id(node), 1), "sink", _INFINITE)
    if not network.fill():
        return None
    behind = network.reaching("sink")
    return [node for node in past if (id(node), 1) in behind and (id(node), 0) not in behind]


def origin_of(node: Node) -> Node:
    """Return the node with the same elements in the shape in which they were computed."""
    while node.kind in _RESHAPES and node.size == node.operands[0].size:
        node = node.operands[0]
    return node


def _earlier(demands: Sequence[Node], step: int) -> tuple[list[Node], set[int]]:
    """Return the nodes of earlier steps that are needed, and which of them are read from this step
    on.
    """
    past: dict[int, Node] = {}
    late: set[int] = set()
    seen: set[int] = set()
    stack = list(demands)
    late.update(id(node) for node in demands if 0 < node.level < step)
    while stack:
        node = stack.pop()
        if id(node) in seen or node.level == 0:
            continue
        seen.add(id(node))
        if node.level < step:
            past[id(node)] = node
        else:
            late.update(id(o) for o in node.operands if 0 < o.level < step)
        stack.extend(node.operands)
    return sorted(past.values(), key=lambda node: node.number), late


class _Network:
    """Edmonds and Karp's maximum flow."""

    def __init__(self) -> None:
        self.room: dict[object, dict[object, int]] = {}

    def edge(self, a: object, b: object, room: int) -> None:
        forward = self.room.setdefault(a, {})
        forward[b] = forward.get(b, 0) + room
        self.room.setdefault(b, {}).setdefault(a, 0)

    def fill(self) -> bool:
        """Fill the network; False if the flow has no bound."""
        while (path := self._path()) is not None:
            flow = min(self.room[a][b] for a, b in path)
            if flow >= _INFINITE // 2:
                return False
            for a, b in path:
                self.room[a][b] -= flow
                self.room[b][a] += flow
        return True

    def _path(self) -> list[tuple[object, object]] | None:
        came: dict[object, object] = {"source": None}
        waiting: deque[object] = deque(["source"])
        while waiting:
            here = waiting.popleft()
            if here == "sink":
                path = []
                while here != "source":
                    path.append((came[here], here))
                    here = came[here]
                return path
            for there, room in self.room.get(here, {}).items():
                if room > 0 and there not in came:
                    came[there] = here
                    waiting.append(there)
        return None

    def reaching(self, end: object) -> set[object]:
        """Return what can still reach a vertex."""
        found, stack = {end}, [end]
        while stack:
            here = stack.pop()
            for there in self.room.get(here, {}):
                if there not in found and self.room[there].get(here, 0) > 0:
                    found.add(there)
                    stack.append(there)
        return found
