"""OK-RTRL: a sum of r Kronecker products (Benzing et al. 2019), cut with the least possible noise.

As KF-RTRL, but `dh_t/dtheta` of a sum of products is stored as `sum over k of A_k ⊗ u_k`, k up to r.
A step adds one term,

    sum of F_t A_k ⊗ u_k  +  dh_t/dy_t ⊗ x_t  =  sum over i of sigma_i a_i ⊗ v_i,      i up to r + 1

with orthonormal `a_i` and `v_i` and falling `sigma_i`, and r terms must do. The largest ones stay.
From the first m on with `k sigma_m <= s`, where `k = r + 1 - m` and `s = sigma_m + … + sigma_(r+1)`,
`k + 1` terms are mixed to k:

    z_i = sqrt(1 - k sigma_i / s)                 (i >= m; of length one)
    A'_j = s/k sum of c_i Q_ij a_i,               u'_j = sum of c_i Q_ij v_i

`Q` has k orthonormal columns, orthogonal to `z`, and `c_i` are random signs, so the mean of `sum of
A'_j ⊗ u'_j` is the sum before, since `Q Q^T = 1 - z z^T` has the diagonal `k sigma_i / s`. No unbiased sum
of r terms has a smaller variance. `sigma`, `Q` and `c` are those of each sum and batch element.

The singular vectors come from triangular factors, `L^T L = R^T R`. Eigenvectors of `L^T L` itself would
keep half the digits, and which terms are mixed would hang on rounding.

Memory: r times KF-RTRL's. Time per step: r times its products, and singular vectors of matrices of
size r + 1. Exact in the mean, not for a single draw; rank 0 is not allowed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge._jax_compat import common_dtype
from etrace_bridge.rules.base import register_rule
from etrace_bridge.rules.kf_rtrl import KFRTRL, Factors, find_sums
from etrace_bridge.rules.noise import Draws, draw_key
from etrace_bridge.step.influence import Influence
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.units import Layout, Piece, Sum


@register_rule
@dataclass(frozen=True)
class OKRTRL(KFRTRL):
    """The optimal Kronecker sum.

    Attributes:
        seed: of the random signs.
        rank: r, the number of Kronecker products.
    """

    rank: int = 4
    name: ClassVar[str] = "ok_rtrl"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise InputError(f"`rank` is {self.rank!r}; it must be a whole number, 1 or more.")

    def variants(self) -> Iterator[OKRTRL]:
        """Return ranks from 16 down."""
        for rank in (16, 8, 4, 2, 1):
            yield replace(self, rank=rank)

    def init(self, program: StepProgram) -> dict[str, Any]:
        one = super().init(program)
        factors = jax.tree.map(lambda x: jnp.zeros((self.rank, *x.shape), x.dtype), one["factors"])
        return {**one, "factors": factors}

    def past(self, program: StepProgram, theta, memory: dict[str, Any], h0) -> dict[int, Any]:
        """Return `(b A_k) ⊗ u_k`, summed over k."""
        terms = []
        for k in range(self.rank):
            factors = jax.tree.map(lambda x, k=k: x[k], memory["factors"])
            terms.append(super().past(program, theta, {**memory, "factors": factors}, h0))
        return {n: sum(term[n] for term in terms) for n in terms[0]}

    def pairs(self, layout: Layout, draws: Draws) -> Any:
        """Return the signs `c` of every sum and row, (sums, rows, r + 1)."""
        shape = len(find_sums(layout)), layout.rows, self.rank + 1
        return jax.random.rademacher(draw_key(self.seed, draws), shape, layout.dtype)

    def letters(self, layout: Layout, summed: Sum, piece: Piece) -> str:
        """Return the letter of the rows first, also for a bias: every row has terms of its own."""
        form = piece.part.form
        row = _row_letter(layout, summed, piece)
        return row + "".join(c for c in form.feature if c != row)

    def move(
        self, layout: Layout, summed: Sum, made: Influence, old: Factors, signs: jax.Array
    ) -> Factors:
        wide = lambda x: x.astype(common_dtype(x.dtype, jnp.float32))  # as factorisations need it
        r, q, rows, signs = self.rank, self.rank + 1, layout.rows, wide(signs)
        if any(not _row_letter(layout, summed, piece) for piece in summed.pieces):
            rows, signs = 1, signs[:1]  # one row, or pieces that all rows share: mix them alike
        A = wide(old["A"].reshape(r, layout.size, layout.rows, -1))
        moved = jnp.einsum("ejk,rkeu->rjeu", wide(made.F), A)
        G = wide(made.G[summed.var]).reshape(1, *A.shape[1:])
        A = jnp.concatenate([moved, G]).reshape(q, layout.size, rows, -1)
        pairs = zip(old["u"], self.features(layout, summed, made), strict=True)
        u = [wide(jnp.concatenate([old, x[None]])).reshape(q, rows, -1) for old, x in pairs]
        left = triangular_factor(jnp.moveaxis(A, 2, 0))
        right = triangular_factor(jnp.moveaxis(jnp.concatenate(u, -1), 1, 0))
        X, Y = mixed_columns(left, right, signs)
        new = {
            "A": jnp.einsum("ineu,eij->jneu", A, X).reshape(old["A"].shape),
            "u": [
                jnp.einsum("ief,eij->jef", x, Y).reshape(like.shape)
                for x, like in zip(u, old["u"], strict=True)
            ],
        }
        return jax.tree.map(lambda x, like: x.astype(like.dtype), new, old)

    def reset(
        self, program: StepProgram, memory: dict[str, Any], keep: jax.Array
    ) -> dict[str, Any]:
        parts = [
            super(OKRTRL, self).reset(program, {**memory, "factors": factors}, keep)["factors"]
            for factors in (
                jax.tree.map(lambda x, k=k: x[k], memory["factors"]) for k in range(self.rank)
            )
        ]
        return {**memory, "factors": jax.tree.map(lambda *xs: jnp.stack(xs), *parts)}


def mixed_columns(
    left: jax.Array, right: jax.Array, signs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return `X` and `Y`, (…, r + 1, r), such that `(L X) (Z Y)^T` has the mean `L Z^T`.

    The mean is over the signs.

    Args:
        left: the triangular factor of `L`, (…, r + 1, r + 1).
        right: that of `Z`.
        signs: `c`, (…, r + 1).
    """
    _, s, V = jnp.linalg.svd(right)
    live = s > jnp.finfo(s.dtype).eps * s.shape[-1] * s[..., :1]
    root = jnp.where(live, s, 0)[..., None] * V  # root^T root = Z^T Z
    inverse = jnp.where(live, 1 / jnp.where(live, s, 1), 0)[..., None] * V
    _, sigma, W = jnp.linalg.svd(left @ _transposed(root))
    # Z Y is orthonormal, and the columns of L X are as long as sigma
    X, Y = _with_signs(_transposed(W @ root), _transposed(W @ inverse))
    r = sigma.shape[-1] - 1
    column = jax.lax.broadcasted_iota(sigma.dtype, sigma.shape, sigma.ndim - 1)
    tails = jnp.cumsum(sigma[..., ::-1], -1)[..., ::-1]  # s, by m
    m = jnp.argmax((r - column) * sigma <= tails, -1)[..., None]  # r - m is k
    s, k = jnp.take_along_axis(tails, m, -1), (r - m).astype(sigma.dtype)
    is_mixed = (r - column <= k) & (s > 0)
    s = jnp.where(s > 0, s, 1)
    z = jnp.where(is_mixed, jnp.sqrt(jnp.maximum(1 - k * sigma / s, 0)), 0)
    # A reflection takes z to the last axis; its other columns are orthogonal to z.
    v = z + (column == r).astype(z.dtype)
    reflected = 2 * v[..., :, None] * v[..., None, :] / jnp.sum(v * v, -1)[..., None, None]
    Q = jnp.broadcast_to(jnp.eye(r + 1, dtype=z.dtype), reflected.shape) - reflected
    Q = (signs[..., :, None] * Q)[..., :r]
    length = jnp.where(sigma > 0, sigma, 1)
    scale = jnp.where(is_mixed, s / (k * length), 1)
    return (X * scale[..., None, :]) @ Q, Y @ Q


def triangular_factor(columns: jax.Array) -> jax.Array:
    """Return `R` with `R^T R = L^T L` for the columns of `L`, by Gram and Schmidt.

    Args:
        columns: of every row, (rows, q, …).
    """
    q, rest, made = columns.shape[1], columns, []
    for n in range(q):
        first = rest[:, n]
        length = jnp.sqrt(jnp.sum(first * first, range(1, first.ndim), keepdims=True))
        unit = first / jnp.where(length > 0, length, 1)
        along = jnp.einsum("e...,eq...->eq", unit, rest)
        along = jnp.where(jnp.arange(q) >= n, along, 0)
        rest = rest - jnp.einsum("eq,e...->eq...", along, unit)
        made.append(along)
    return jnp.stack(made, 1)


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _with_signs(X: jax.Array, Y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the columns with signs that rounding does not decide, as an eigenvector's are.

    Of terms that are orthogonal already, all but one element of a column are rounding errors.
    A sum of all elements of a column with unlike factors is far from zero.
    """
    factors = 1 / (jnp.arange(X.shape[-2], dtype=X.dtype) + 1.618)
    sign = jnp.where(jnp.einsum("...qk,q->...k", X, factors) < 0, -1, 1).astype(X.dtype)
    return X * sign[..., None, :], Y * sign[..., None, :]


def _row_letter(layout: Layout, summed: Sum, piece: Piece) -> str:
    """Return the output letter that counts the rows; empty if there is none, or one row."""
    form = piece.part.form
    units = summed.unit.reshape(form.shape(form.out))
    rows = units // (summed.unit.size // layout.rows)
    for axis, letter in enumerate(form.out):
        if layout.rows > 1 and form.sizes[letter] == layout.rows:
            counted = np.arange(layout.rows).reshape(-1, *(1,) * (units.ndim - axis - 1))
            if np.array_equal(rows, np.broadcast_to(counted, units.shape)):
                return letter
    return ""
