"""Products of data and weights in loops over time, for XLA's CPU compiler.

torch's weights are (out, in), and the product of a few rows with such a matrix takes up to twice as
long as necessary. It is faster with the transposed matrix, made once before all loops, or with the
matrix on the left and the small result transposed. The second way is for large matrices and outside
of loops. Neither helps with a single row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn, Var

LARGEST_TRANSPOSED = 2**20  # elements of a matrix


@dataclass(frozen=True)
class Transposed:
    """The key of a weight's transpose among values by variable."""

    var: Var


def transposed_weights(eqns: Sequence[JaxprEqn], env: dict[Any, Any]) -> dict[Any, Any]:
    """Return the transposes that products in loops may want.

    The compiler drops those that none does.
    """
    met = dict.fromkeys(v for eqn in eqns if (v := _matrix_of(eqn)) is not None and v in env)
    return {Transposed(v): env[v].T for v in met if v.aval.size <= LARGEST_TRANSPOSED}


def multiply_in_loop(
    eqn: JaxprEqn, operands: list[Any], env: dict[Any, Any], length: int
) -> list[Any] | None:
    """Return the result of a product with a weight, inside a loop; None for any other equation."""
    matrix = _matrix_of(eqn)
    if matrix is None or matrix not in env:
        return None
    (left, right), batch = eqn.params["dimension_numbers"]
    transposed = env.get(Transposed(matrix))
    if length > 1 and transposed is not None:
        params = {**eqn.params, "dimension_numbers": ((left, (0,)), batch)}
        return [eqn.primitive.bind(operands[0], transposed, **params)]
    params = {**eqn.params, "dimension_numbers": ((right, left), batch)}
    result = eqn.primitive.bind(operands[1], operands[0], **params)
    # Without the barrier XLA would take the transpose into the product again.
    return [jnp.moveaxis(lax.optimization_barrier(result), 0, -1)]


def _matrix_of(eqn: JaxprEqn) -> Var | None:
    """Return the matrix if an equation is a product of several rows of data with its rows."""
    if eqn.primitive.name != "dot_general":
        return None
    matrix = eqn.invars[1]
    (_, right), (_, batch) = eqn.params["dimension_numbers"]
    if not isinstance(matrix, Var) or matrix.aval.ndim != 2 or tuple(right) != (1,) or batch:
        return None
    return matrix if eqn.invars[0].aval.size > matrix.aval.shape[1] else None
