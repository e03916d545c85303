"""Functions of whole matrices: exponential, solution of linear systems, product of reflections
(orthogonal weights use them).
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import jax.scipy.linalg
import numpy as np
from jax import lax

from etrace_bridge.frontend.ops.registry import implements


@implements("matrix_exp", "linalg_matrix_exp")
def matrix_exp(input: Any) -> Any:
    """The exponential of each square matrix."""
    return jax.scipy.linalg.expm(input)


@implements("linalg_solve")
def solve(A: Any, B: Any, *, left: bool = True) -> Any:
    """`X` of `A X = B`, or of `X A = B`; a `B` with one dimension less than `A` is a vector."""
    if not left:
        return jnp.swapaxes(solve(jnp.swapaxes(A, -1, -2), jnp.swapaxes(B, -1, -2)), -1, -2)
    if np.ndim(B) == np.ndim(A) - 1 and np.shape(B) == np.shape(A)[:-1]:
        return jnp.linalg.solve(A, B[..., None])[..., 0]
    return jnp.linalg.solve(A, B)


@implements("linalg_solve_ex")
def solve_ex(A: Any, B: Any, *, left: bool = True, check_errors: bool = False) -> tuple[Any, Any]:
    """`solve`, with torch's report of success: zeros, since a value cannot be looked at while
    tracing.
    """
    return solve(A, B, left=left), lax.full(np.shape(A)[:-2], np.int32(0))


@implements("linalg_householder_product")
def householder_product(input: Any, tau: Any) -> Any:
    """The product of the reflections `1 - tau v v^H`, `v` below the diagonal of `input`, by hand:
    JAX's has no derivative.
    """
    (rows, columns), count = np.shape(input)[-2:], np.shape(tau)[-1]
    vectors = jnp.tril(input, -1)[..., :count] + jnp.eye(rows, count, dtype=input.dtype)
    product = jnp.broadcast_to(jnp.eye(rows, columns, dtype=input.dtype), np.shape(input))
    for n in reversed(range(count)):
        v = vectors[..., n, None]
        product = product - tau[..., n, None, None] * v * (
            jnp.conj(jnp.swapaxes(v, -1, -2)) @ product
        )
    return product


def _success(A: Any) -> Any:
    """torch's report of success: zeros, since a value cannot be looked at while tracing."""
    return lax.full(np.shape(A)[:-2], np.int32(0))


implements("linalg_inv", "inverse")(lambda A: jnp.linalg.inv(A))
implements("linalg_inv_ex")(lambda A, *, check_errors=False: (jnp.linalg.inv(A), _success(A)))


@implements("linalg_cholesky", "cholesky")
def cholesky(input: Any, upper: bool = False) -> Any:
    """The triangular factor of a positive definite matrix."""
    lower = jnp.linalg.cholesky(input)
    return jnp.conj(jnp.swapaxes(lower, -1, -2)) if upper else lower


implements("linalg_cholesky_ex")(
    lambda A, *, upper=False, check_errors=False: (cholesky(A, upper), _success(A))
)


@implements("linalg_solve_triangular")
def solve_triangular(
    A: Any, B: Any, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    """`X` of `A X = B`, or of `X A = B`, for a triangular `A`."""
    batch = np.broadcast_shapes(np.shape(A)[:-2], np.shape(B)[:-2])
    A, B = (jnp.broadcast_to(m, (*batch, *np.shape(m)[-2:])) for m in (A, B))
    return lax.linalg.triangular_solve(
        A, B, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )
