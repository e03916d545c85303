"""Loops over time: none where there is one step, and weights laid out for the products inside.

torch's weights are (out, in), and XLA's CPU product of a few rows with such a matrix takes up to twice as long as it need. It is
faster with the transpose, made once before all loops, or with the matrix on the left and the small result transposed: the latter where
the matrix is large, or there is no loop. A single row is not faster either way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn, Var
from etrace_bridge.engine.convolution import as_product

LARGEST_TURNED = 2**20  # elements of a matrix


def scan_time(body: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, length: int, reverse: bool = False) -> tuple[Any, Any]:
    """`lax.scan(body, carry, xs)`, with the body run in place for one step: the online step has no use for a loop's overhead."""
    if length > 1:
        return lax.scan(body, carry, xs, length=length, reverse=reverse)
    carry, ys = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda y: y[None], ys)


@dataclass(frozen=True)
class Turned:
    """The place of a weight's transpose among values by variable."""

    var: Var


def turn_weights(eqns: Sequence[JaxprEqn], env: dict[Any, Any]) -> dict[Any, Any]:
    """The transposes that products in loops may want; XLA drops those that none does."""
    met = dict.fromkeys(eqn.invars[1] for eqn in eqns if _meets_rows(eqn) and eqn.invars[1] in env)
    return {Turned(v): env[v].T for v in met if v.aval.size <= LARGEST_TURNED}


def products_in_loop(env: dict[Any, Any], length: int) -> Callable[[JaxprEqn, list[Any]], list[Any] | None]:
    """How `evaluate` runs products inside a loop over time.

    Args:
        env: values from outside the loop, transposes among them or not.
        length: how often the loop runs.
    """

    def on_equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if not (_meets_rows(eqn) and eqn.invars[1] in env):
            return as_product(eqn, operands)
        (left, right), batch = eqn.params["dimension_numbers"]
        transpose = env.get(Turned(eqn.invars[1]))
        if length > 1 and transpose is not None:
            return [eqn.primitive.bind(operands[0], transpose, **{**eqn.params, "dimension_numbers": ((left, (0,)), batch)})]
        result = eqn.primitive.bind(operands[1], operands[0], **{**eqn.params, "dimension_numbers": ((right, left), batch)})
        # Without the barrier XLA would take the transpose into the product again.
        return [jnp.moveaxis(lax.optimization_barrier(result), 0, -1)]

    return on_equation


def _meets_rows(eqn: JaxprEqn) -> bool:
    """Whether an equation is a product of several rows of data with the rows of a matrix."""
    if eqn.primitive.name != "dot_general" or not isinstance(eqn.invars[1], Var):
        return False
    (_, right), (_, batch) = eqn.params["dimension_numbers"]
    data, matrix = eqn.invars[0].aval, eqn.invars[1].aval
    return matrix.ndim == 2 and tuple(right) == (1,) and not batch and data.size > matrix.shape[1]
