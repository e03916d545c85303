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
import numpy as np

_SMALL = 3  # up to this size, matrices are diagonalised by rotations of whole arrays
_SWEEPS = 7  # from the first two or three on, each squares what is left off the diagonal


def singular_columns(left: Any, right: Any) -> tuple[Any, Any]:
    """`X` and `Y`, (…, q, q), by falling singular value.

    Args:
        left: `L^T L`, (…, q, q).
        right: `Z^T Z`, (…, q, q).
    """
    s, V = _eigen(right)
    live = s > jnp.finfo(s.dtype).eps * s.shape[-1] * jnp.max(s, -1, keepdims=True)
    root = jnp.sqrt(jnp.where(live, s, 0))
    inverse = jnp.where(live, 1 / jnp.where(live, root, 1), 0)
    B = root[..., :, None] * jnp.swapaxes(V, -1, -2)
    _, W = _eigen(_times(_times(B, left), jnp.swapaxes(B, -1, -2)))
    return _times(jnp.swapaxes(B, -1, -2), W), _times(V * inverse[..., None, :], W)


def _times(a: Any, b: Any) -> Any:
    """Product of many small matrices; for tiny ones as sums of whole arrays."""
    if a.shape[-1] > _SMALL:
        return a @ b
    return sum(a[..., :, k, None] * b[..., None, k, :] for k in range(a.shape[-1]))


def _eigen(matrices: Any) -> tuple[Any, Any]:
    """Eigenvalues of symmetric matrices, falling, and eigenvectors as columns."""
    q = matrices.shape[-1]
    if q > _SMALL:
        values, vectors = jnp.linalg.eigh(matrices)
        return values[..., ::-1], vectors[..., ::-1]
    values, vectors = _jacobi(matrices)
    order = [[_before(values, j, k) for j in range(q)] for k in range(q)]
    rank = jnp.stack([sum(row, jnp.zeros(values.shape[:-1], int)) for row in order], -1)
    hot = (rank[..., :, None] == np.arange(q)).astype(values.dtype)
    return jnp.sum(values[..., None] * hot, -2), _times(vectors, hot)


def _before(values: Any, j: int, k: int) -> Any:
    """Whether value j comes before value k."""
    x, y = values[..., j], values[..., k]
    return ((x > y) | ((x == y) & (j < k))).astype(int)


def _jacobi(matrices: Any) -> tuple[Any, Any]:
    """Jacobi's method, all matrices at once; two by two, one rotation is exact."""
    q = matrices.shape[-1]
    M = [[matrices[..., i, j] for j in range(q)] for i in range(q)]
    one, zero = jnp.ones_like(M[0][0]) if q else None, jnp.zeros_like(M[0][0]) if q else None
    V = [[one if i == j else zero for j in range(q)] for i in range(q)]

    def sweep(_: Any, state: Any) -> Any:
        M, V = [list(row) for row in state[0]], [list(row) for row in state[1]]
        for i in range(q):
            for j in range(i + 1, q):
                _rotate(M, V, i, j)
        return M, V

    M, V = sweep(0, (M, V)) if q <= 2 else jax.lax.fori_loop(0, _SWEEPS, sweep, (M, V))
    values = jnp.stack([M[i][i] for i in range(q)], -1)
    return values, jnp.stack([jnp.stack(row, -1) for row in V], -2)


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
