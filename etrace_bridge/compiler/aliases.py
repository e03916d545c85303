"""Aliases: variables that are only a rearrangement of others.

A state's own variable is often not what the rest of the step reads: torch's `h_n` is a reshape of
the output, a packed state is a concatenation of what the output reads. The *roots* of a variable
are the values it rearranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.primitives import is_float

_REARRANGING = frozenset(
    {
        "reshape",
        "squeeze",
        "expand_dims",
        "transpose",
        "rev",
        "copy",
        "concatenate",
        "stack",
        "convert_element_type",
    }
)


def is_alias(eqn: JaxprEqn) -> bool:
    """Return whether the output is the operands' elements, each exactly once."""
    if not all(is_float(v) for v in (*eqn.invars, *eqn.outvars)):
        return False
    if eqn.primitive.name == "broadcast_in_dim":  # how JAX adds axes of size 1
        return np.prod(eqn.invars[0].aval.shape) == np.prod(eqn.outvars[0].aval.shape)
    return eqn.primitive.name in _REARRANGING


def producers(eqns: Sequence[JaxprEqn]) -> dict[Var, JaxprEqn]:
    """Return the equation that makes each variable."""
    return {v: eqn for eqn in eqns for v in eqn.outvars}


def alias_equations(made_by: dict[Var, JaxprEqn], var: Any) -> list[JaxprEqn]:
    """Return the rearranging equations that make `var`, operands before their readers."""
    eqn = None if isinstance(var, Literal) else made_by.get(var)
    if eqn is None or not is_alias(eqn):
        return []
    before = [e for operand in eqn.invars for e in alias_equations(made_by, operand)]
    return [*before, eqn]


def alias_roots(made_by: dict[Var, JaxprEqn], var: Any) -> list[Var]:
    """Return the variables, made by other equations, that `var` is or rearranges."""
    chain = alias_equations(made_by, var)
    through = {v for eqn in chain for v in eqn.outvars}
    reads = dict.fromkeys(variables([*(v for eqn in chain for v in eqn.invars), var]))
    return [v for v in reads if v not in through and v in made_by]
