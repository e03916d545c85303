"""Taking a whole-sequence program apart into single steps: the parts of every value with time in
it.

Each equation has a rule that gives the parts of its results from the parts of its operands (`moves`,
`mixing`, `folds`). An equation without a rule joins the parts to one array again, whose level is
that of the last step; what reads it looks ahead, and is refused later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from etrace_bridge._jax_compat import ClosedJaxpr, JaxprEqn, Literal, called_jaxpr
from etrace_bridge.frontend.time import folds, mixing, moves
from etrace_bridge.frontend.time.graph import Graph, Node, keys_of
from etrace_bridge.frontend.time.rows import Row, Rows, Value, acts_by_element


class Reader(Rows):
    """Reads jaxprs of whole sequences into a graph."""

    def __init__(self, graph: Graph, length: int) -> None:
        super().__init__(graph, length)
        self.names: dict[int, list[str]] = {}
        self.nodes: dict[int, Node] = {}

    def read(self, closed: ClosedJaxpr, inputs: Sequence[Value]) -> list[Value]:
        """Return the outputs of a jaxpr for these inputs."""
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
        """Return the results of one equation."""
        name = eqn.primitive.name
        if name == "name":
            return self._note_name(eqn, operands)
        if name in _CALLS:
            return self._call(eqn, operands)
        if (
            name == "slice"
            and isinstance(operands[0], Node)
            and (drawn := self._drawn_step(eqn, operands[0])) is not None
        ):
            return [drawn]
        rule = _RULES.get(name)
        rows = [o for o in operands if isinstance(o, Row)]
        if rule is not None and (rows or name == "concatenate"):
            found = rule(self, eqn, operands)
            if found is not None:
                return found
        elif rows and acts_by_element(eqn):
            found = moves.elementwise(self, eqn, operands)
            if found is not None:
                return found
        return list(self.graph.apply(eqn, [self.whole(o, eqn) for o in operands]))

    def _call(self, eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
        """Return the results of a call."""
        if eqn.params.get("name") in folds.PICKS and isinstance(operands[0], Row):
            found = folds.pick(self, eqn, operands[0], self.read)
            if found is not None:
                return found
        return self.read(called_jaxpr(eqn), operands)

    def _drawn_step(self, eqn: JaxprEqn, node: Node) -> Node | None:
        """Return one step of random numbers that were drawn for the whole sequence; None if an
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


_RULES: dict[str, Callable] = {**moves.RULES, **mixing.RULES, **folds.RULES}
_CALLS = ("jit", "pjit", "closed_call", "core_call")
