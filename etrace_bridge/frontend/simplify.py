"""Tidy the jaxpr of a traced step: axes that were added and removed again, inputs that nothing
reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from etrace_bridge._jax_compat import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    remove_dead_equations,
    sub_jaxpr,
)


def simplify(
    closed: ClosedJaxpr, optional_inputs: Sequence[bool], state_outputs: range
) -> tuple[ClosedJaxpr, list[bool]]:
    """Cancel reshapes that undo each other, drop dead equations, and drop optional inputs that are
    never read.

    Args:
        closed: The jaxpr.
        optional_inputs: For each input, whether it may be dropped.
        state_outputs: The outputs that are new states: an input that is only handed through to one
            of them is not read.

    Returns:
        The new jaxpr, and for each old input whether something reads it.
    """
    jaxpr = closed.jaxpr
    eqns, outvars = _cancel_reshapes(jaxpr)
    jaxpr = remove_dead_equations(sub_jaxpr(jaxpr, eqns, jaxpr.invars, outvars, jaxpr.constvars))
    read = {id(v) for eqn in jaxpr.eqns for v in eqn.invars}
    read |= {id(v) for i, v in enumerate(jaxpr.outvars) if i not in state_outputs}
    given = {id(v) for v in jaxpr.outvars}
    used = [id(v) in read for v in jaxpr.invars]
    kept = [
        v
        for v, optional in zip(jaxpr.invars, optional_inputs, strict=True)
        if not optional or id(v) in read | given
    ]
    constants = [
        (v, c) for v, c in zip(jaxpr.constvars, closed.consts, strict=True) if id(v) in read | given
    ]
    jaxpr = sub_jaxpr(jaxpr, jaxpr.eqns, kept, jaxpr.outvars, [v for v, _ in constants])
    return ClosedJaxpr(jaxpr, [c for _, c in constants]), used


def _cancel_reshapes(jaxpr: Any) -> tuple[list[JaxprEqn], list[Any]]:
    """Let readers of a reshaped value read an earlier value that has the same elements in the same
    shape.
    """
    # variable -> earliest variable with the same elements in the same order
    source: dict[Any, Any] = {}
    alias: dict[Any, Any] = {}  # variable -> variable of the same shape to read instead
    resolve = lambda v: v if isinstance(v, Literal) else alias.get(v, v)
    eqns = []
    for eqn in jaxpr.eqns:
        operands = [resolve(v) for v in eqn.invars]
        if _keeps_elements(eqn):
            (out,) = eqn.outvars
            first = source.get(operands[0], operands[0])
            source[out] = first
            if first.aval.shape == out.aval.shape:
                alias[out] = first
                continue
        eqns.append(eqn if operands == list(eqn.invars) else eqn.replace(invars=operands))
    return eqns, [resolve(v) for v in jaxpr.outvars]


def _keeps_elements(eqn: JaxprEqn) -> bool:
    """Return whether an equation only adds or removes axes of size one, or otherwise keeps the
    row-major order of elements.
    """
    name = eqn.primitive.name
    if name not in ("squeeze", "reshape", "expand_dims", "broadcast_in_dim") or isinstance(
        eqn.invars[0], Literal
    ):
        return False
    if len(eqn.invars) != 1 or math.prod(eqn.invars[0].aval.shape) != math.prod(
        eqn.outvars[0].aval.shape
    ):
        return False
    if name == "reshape":
        return eqn.params.get("dimensions") is None
    return name != "broadcast_in_dim" or list(eqn.params["broadcast_dimensions"]) == sorted(
        eqn.params["broadcast_dimensions"]
    )
