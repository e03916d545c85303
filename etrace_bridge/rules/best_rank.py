"""The best rank r of a product `L Z^T`, from `L` and the small matrix `Z^T Z`.

With `Z^T Z = V s V^T` and `B = s^½ V^T`, the right singular vectors of `L Z^T` are `Z B^-1 W`,
where `W` are the eigenvectors of `B (L^T L) B^T`. So `L Z^T = (L X) (Z Y)^T` with `X = B^T W`, `Y =
B^-1 W`: the columns of `Z Y` are orthonormal, and those of `L X` are as long as the singular
values. Leaving out all but the first r of both is the best rank r (Eckart and Young).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_SMALL = 3  # up to this size, matrices are diagonalised by rotations of whole arrays
_SWEEPS = 7  # from the first two or three on, each squares what is left off the diagonal


def singular_columns(left: Any, right: Any) -> tuple[Any, Any]:
    """`X` and `Y`, (q, q, …), by falling singular value.

    Args:
        left: `L^T L`, (q, q, …).
        right: `Z^T Z`, (q, q, …).
    """
    s, V = _eigen(right)
    live = s > jnp.finfo(s.dtype).eps * len(s) * jnp.max(s, 0, keepdims=True)
    root = jnp.sqrt(jnp.where(live, s, 0))
    inverse = jnp.where(live, 1 / jnp.where(live, root, 1), 0)
    B_transposed = V * root[None]
    B = jnp.swapaxes(B_transposed, 0, 1)
    _, W = _eigen(_times(_times(B, left), B_transposed))
    return _times(B_transposed, W), _times(V * inverse[None], W)


def _times(a: Any, b: Any) -> Any:
    """Product of many small matrices; for tiny ones as sums of whole arrays."""
    if len(a) > _SMALL:
        return jnp.einsum("ik...,kj...->ij...", a, b)
    return sum(a[:, k, None] * b[None, k] for k in range(len(b)))


def _eigen(matrices: Any) -> tuple[Any, Any]:
    """Eigenvalues of symmetric matrices, falling, and eigenvectors as columns."""
    if len(matrices) > _SMALL:
        values, vectors = jnp.linalg.eigh(jnp.moveaxis(matrices, (0, 1), (-2, -1)))
        return (
            jnp.moveaxis(values[..., ::-1], -1, 0),
            jnp.moveaxis(vectors[..., ::-1], (-2, -1), (0, 1)),
        )
    return _jacobi(matrices)


def _jacobi(matrices: Any) -> tuple[Any, Any]:
    """Jacobi's method, all matrices at once; two by two, one rotation is exact."""
    q = len(matrices)
    pairs = [(i, j) for i in range(q) for j in range(i + 1, q)]
    M = [[matrices[i, j] for j in range(q)] for i in range(q)]
    V = [[jnp.full_like(M[i][j], i == j) for j in range(q)] for i in range(q)]

    def sweep(_: Any, state: Any) -> Any:
        M, V = [list(row) for row in state[0]], [list(row) for row in state[1]]
        for i, j in pairs:
            _rotate(M, V, i, j)
        return M, V

    M, V = sweep(0, (M, V)) if q <= 2 else jax.lax.fori_loop(0, _SWEEPS, sweep, (M, V))
    values = [M[i][i] for i in range(q)]
    for i, j in pairs:  # the larger of the two first
        swap = values[j] > values[i]
        for row in (values, *V):
            row[i], row[j] = jnp.where(swap, row[j], row[i]), jnp.where(swap, row[i], row[j])
    return jnp.stack(values), jnp.stack([jnp.stack(row) for row in V])


def _rotate(M: list, V: list, i: int, j: int) -> None:
    """Turns rows and columns i and j so that `M[i][j]` is zero."""
    off, gap = M[i][j], M[j][j] - M[i][i]
    safe = jnp.where(off == 0, 1, off)
    theta = gap / (2 * safe)
    t = jnp.where(theta < 0, -1, 1) / (jnp.abs(theta) + jnp.sqrt(theta * theta + 1))
    t = jnp.where(off == 0, 0, t)
    c = jax.lax.rsqrt(t * t + 1)
    s = t * c
    for rows in (M, V):
        for row in rows:
            row[i], row[j] = c * row[i] - s * row[j], s * row[i] + c * row[j]
    M[i], M[j] = (
        [c * a - s * b for a, b in zip(M[i], M[j], strict=True)],
        [s * a + c * b for a, b in zip(M[i], M[j], strict=True)],
    )
