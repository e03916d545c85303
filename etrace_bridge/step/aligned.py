"""Values of a step that follow the positions of a hidden group, and where they stop.

The core (`compiler.positions`) says what reaches the *new states* position by position. Two rules
need more: which operands of weight products are position by position functions of the old states
(`snap1`), and through which values the rest of the step reads a group (`eprop`). Both come from one
pass forward over the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var
from etrace_bridge.compiler.aligner import Edge
from etrace_bridge.compiler.core_equations import held_operands
from etrace_bridge.compiler.hidden_group import HiddenGroup
from etrace_bridge.compiler.primitives import (
    index_maps,
    is_elementwise,
    is_float,
    is_structural,
    passes_derivative,
)
from etrace_bridge.step.program import StepProgram


@dataclass(frozen=True)
class Aligned:
    """The result of the pass for one group.

    Attributes:
        positions: for each value reached, the group's position that each element belongs to (-1:
            none).
        origins: for each value reached, the old states (indices of `program.leaves`) that it
            depends on.
        ends: edges (equation, operand) at which a reached value is used otherwise: mixed, or moved
            to other positions.
        held: the same operands by equation id; with these held constant, reached values depend on
            the group's old states (and contact outputs) position by position.
    """

    positions: dict[Var, np.ndarray]
    origins: dict[Var, frozenset[int]]
    ends: tuple[Edge, ...]
    held: dict[int, tuple[int, ...]]


def follow_positions(
    program: StepProgram,
    group: HiddenGroup,
    with_contacts: bool,
    stops: frozenset[Edge] = frozenset(),
) -> Aligned:
    """Follow a group's positions from its old states.

    Contacts that feed it are followed too if requested; `stops` are not passed.
    """
    positions: dict[Var, np.ndarray] = {leaf.invar: leaf.positions() for leaf in group.leaves}
    if with_contacts:
        positions.update(
            (leg.part.var, leg.positions) for leg in program.legs if leg.group == group.index
        )
    origins = {leaf.invar: frozenset([leaf.index]) for leaf in group.leaves}
    structure = program.graph.structure
    ends: list[Edge] = []
    for i, eqn in enumerate(program.eqns):
        operands: list[Any] = list(eqn.invars)
        reached = [
            k for k, v in enumerate(operands) if not isinstance(v, Literal) and v in positions
        ]
        if not reached or not passes_derivative(eqn):
            continue
        going = [
            k for k in reached if (i, k) not in structure.alignment.cuts and (i, k) not in stops
        ]
        if i in structure.use.contact_of_eqn:
            found, agreeing = {}, []
        else:
            found, agreeing = _pass_on(
                eqn, {k: positions[operands[k]] for k in going}, program.constants
            )
        ends += [(i, k) for k in reached if k not in agreeing]
        for v, array in found.items():
            positions.setdefault(v, array)
            origins[v] = frozenset().union(
                *(origins.get(operands[k], frozenset()) for k in agreeing)
            )
    return Aligned(positions, origins, tuple(ends), held_operands(program.eqns, set(ends)))


def _pass_on(
    eqn: JaxprEqn, known: dict[int, np.ndarray], constants: dict
) -> tuple[dict[Var, np.ndarray], list[int]]:
    """Return positions of an equation's results, and the operands that they agree with."""
    outs = [v for v in eqn.outvars if is_float(v)]
    if is_elementwise(eqn):
        shape = eqn.outvars[0].aval.shape
        fitting = {k: p for k, p in known.items() if p.shape == shape}
        joined = np.full(shape, -1, dtype=np.int64)
        for p in fitting.values():
            joined = np.where(joined >= 0, joined, p)
        agreeing = [k for k, p in fitting.items() if ((p < 0) | (p == joined)).all()]
        return (dict.fromkeys(outs, joined) if agreeing else {}), agreeing
    maps = index_maps(eqn, constants) if is_structural(eqn) else None
    if maps is None:
        return {}, []
    flat = np.concatenate([_flat_positions(eqn, k, known) for k in range(len(eqn.invars))])
    return {
        v: np.where(m >= 0, flat[np.maximum(m, 0)], -1)
        for v, m in zip(eqn.outvars, maps, strict=True)
    }, [*known]


def _flat_positions(eqn: JaxprEqn, k: int, known: dict[int, np.ndarray]) -> np.ndarray:
    if k in known:
        return known[k].reshape(-1)
    return np.full(int(np.prod(eqn.invars[k].aval.shape, dtype=np.int64)), -1, dtype=np.int64)


def sheets(positions: np.ndarray, num_positions: int) -> Iterator[np.ndarray]:
    """Divide elements so that each position occurs at most once.

    For each position the element's number (-1: none).
    """
    left = positions.reshape(-1).copy()
    while (left >= 0).any():
        elements = np.nonzero(left >= 0)[0]
        chosen, first = np.unique(left[elements], return_index=True)
        sheet = np.full(num_positions, -1, dtype=np.int64)
        sheet[chosen] = elements[first]
        left[elements[first]] = -1
        yield sheet


def pairs_of_positions(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return all (element of left, element of right) with the same position."""
    left, right = left.reshape(-1), right.reshape(-1)
    order = np.argsort(left, kind="stable")
    ranked = left[order]
    low, high = np.searchsorted(ranked, right, "left"), np.searchsorted(ranked, right, "right")
    count = np.where(right >= 0, high - low, 0)
    right_of = np.repeat(np.arange(right.size), count)
    offset = np.arange(right_of.size) - np.repeat(np.cumsum(count) - count, count)
    return order[np.repeat(low, count) + offset], right_of
