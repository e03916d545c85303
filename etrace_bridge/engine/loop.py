"""Loops over time: none where there is one step, and weights laid out for the products inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn, Var
from etrace_bridge.engine.convolution import as_product

LARGEST_TURNED = 2**18  # elements of a matrix


def scan_time(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, length: int, reverse: bool = False) -> tuple[Any, Any]:
    """`lax.scan(body, carry, xs)`, with the body run in place for one step: the online step has no use for a loop's overhead."""
    if length > 1:
        return lax.scan(body, carry, xs, length=length, reverse=reverse)
    carry, ys = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda y: y[None], ys)


def products_in_loop(eqns: Sequence[JaxprEqn], env: dict[Var, Any], length: int) -> Callable[[JaxprEqn, list[Any]], list[Any] | None]:
    """How `evaluate` runs products inside a loop over time.

    torch's weights are (out, in), and XLA's CPU product of a small batch with such a matrix, if it is small too, takes longer
    than with its transpose: so that is made once, before the loop. One row, or a large matrix, is not faster with it.

    Args:
        eqns: the loop's equations.
        env: values from outside the loop.
        length: how often the loop runs; once is not worth it.
    """
    turned = {eqn.invars[1]: env[eqn.invars[1]].T for eqn in eqns if length > 1 and _meets_rows(eqn) and eqn.invars[1] in env}

    def on_equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if not (_meets_rows(eqn) and eqn.invars[1] in turned):
            return as_product(eqn, operands)
        (left, _), batch = eqn.params["dimension_numbers"]
        params = {**eqn.params, "dimension_numbers": ((left, (0,)), batch)}
        return [eqn.primitive.bind(operands[0], turned[eqn.invars[1]], **params)]

    return on_equation


def _meets_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product of several rows of data with the rows of a small matrix."""
    if eqn.primitive.name != "dot_general" or not isinstance(eqn.invars[1], Var):
        return False
    (_, right), (_, batch) = eqn.params["dimension_numbers"]
    data, matrix = eqn.invars[0].aval, eqn.invars[1].aval
    if matrix.ndim != 2 or tuple(right) != (1,) or batch:
        return False
    return data.size > matrix.shape[1] and matrix.size <= LARGEST_TURNED
