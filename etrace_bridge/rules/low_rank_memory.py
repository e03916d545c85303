"""The memory of low-rank RTRL: how it begins, how it is cut, and how gradients leave it.

A family of units has `A` (r, rows, n, units per row); for each of its blocks, `E` (r, …) and
D-RTRL's trace `eps` (S, …).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge.compiler.primitives import is_structural
from etrace_bridge.rules.best_rank import singular_columns
from etrace_bridge.step.influence import weights_of_views
from etrace_bridge.step.linearise import CoreLinear
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.unit_arrays import (
    at_elements,
    at_positions,
    by_row,
    df_of,
    inner_products,
    spread_features,
    to_view,
)
from etrace_bridge.step.units import Block, Family, Layout


def family_ranks(layout: Layout, rank: int, max_bytes: int) -> list[int]:
    """The rank of each family: `rank`, at most n; 0 for the largest ones that do not fit."""
    r, left = min(rank, layout.size), max_bytes
    ranks = [0] * len(layout.families)
    sizes = [_bytes(layout, f) * r for f in layout.families]
    for n in np.argsort(sizes, kind="stable"):
        if sizes[n] <= left:
            ranks[n], left = r, left - sizes[n]
    return ranks


def _bytes(layout: Layout, family: Family) -> int:
    traces = sum(block.form.trace_size for block in family.blocks)
    return (family.units * layout.size + traces) * family.sums[0].var.aval.dtype.itemsize


def new_family(layout: Layout, family: Family, r: int) -> dict[str, Any]:
    """Zeros."""
    dtype = family.sums[0].var.aval.dtype
    shapes = [block.form.shape(block.form.trace) for block in family.blocks]
    return {
        "A": jnp.zeros((r, layout.rows, layout.size, family.units // layout.rows), dtype),
        "E": [jnp.zeros((r, *shape), dtype) for shape in shapes],
        "eps": [jnp.zeros((len(family.groups), *shape), dtype) for shape in shapes],
    }


def reset_family(layout: Layout, family: Family, old: dict[str, Any], keep: Any) -> dict[str, Any]:
    """The memory without the rows of some batch elements."""
    units = jnp.repeat(keep, family.units // layout.rows).astype(old["A"].dtype)
    masks = [at_elements(block, units) for block in family.blocks]
    cleared = {
        name: [x * mask for x, mask in zip(old[name], masks, strict=True)] for name in ("E", "eps")
    }
    return {"A": old["A"] * by_row(layout, units)[:, None], **cleared}


def advance_eps(
    program: StepProgram, family: Family, core: CoreLinear, eps: list[Any], data: dict[int, Any]
) -> list[Any]:
    """`eps = D eps + df ⊗ x` of every block."""
    new = []
    for block, old in zip(family.blocks, eps, strict=True):
        phi, columns = spread_features(block, data)[None].astype(old.dtype), []
        for i, (g, k) in enumerate(family.groups):
            df = [df_of(program, family, summed, core, i) for summed, _ in block.pieces]
            total = at_elements(block, df)[None] * phi
            for j, (h, m) in enumerate(family.groups):
                if h == g and core.D[g][k][m] is not None:
                    D = at_elements(block, at_positions(family, i, core.D[g][k][m]))
                    total = total + D[None] * old[j : j + 1]
            columns.append(total.astype(old.dtype))
        new.append(jnp.concatenate(columns) if columns else old)
    return new


# -- the cut ---------------------------------------------------------------------------------------


def cut_to_rank(
    program: StepProgram,
    layout: Layout,
    family: Family,
    L: list[Any],
    Z: list,
    r: int,
    weights: Any,
) -> tuple[Any, list[Any], Any, Any]:
    """The best rank r of `L Z^T`: new `A`, for each block new `E`, and what is kept and cut off.

    Best with the squares of the rows of hidden values times `weights`, (rows, n). The last two
    results are (rows, n), squared norms over all units and weights of a row.
    """
    n, q = layout.size, len(L)
    dtype = family.sums[0].var.aval.dtype
    nothing = jnp.zeros((layout.rows, n), dtype)
    if q == 0:
        empty = new_family(layout, family, r)
        return empty["A"], empty["E"], nothing, nothing
    if r == n:  # A is the identity
        A = jnp.broadcast_to(jnp.eye(n, dtype=dtype)[:, None, :, None], (n, *L[0].shape[1:]))
        Y = [jnp.swapaxes(x[0], 0, 1).reshape(n, family.units) for x in L]
    else:
        right = _gram_right(program, family, Z, q, dtype)
        A, Y, kept, lost = _best_rank(program, layout, L, right, r, weights.astype(L[0].dtype))
    E = []
    for block, columns in zip(family.blocks, Z, strict=True):
        terms = [at_elements(block, _pick(Y, number)) * x[None] for number, x in columns]
        E.append(sum(terms).astype(dtype))
    if r == n:
        squares = [jnp.sum(x * x, tuple(range(1, x.ndim))) for x in E]
        kept, lost = nothing + sum(squares, jnp.zeros(n, dtype))[None], nothing
    return A.astype(dtype), E, kept, lost


def _pick(Y: Any, number: int | list[int | None]) -> Any:
    """Factors of a column for all pieces, or a list with those of each."""
    if isinstance(number, int):
        return Y[number]
    return [jnp.zeros_like(Y[0]) if n is None else Y[n] for n in number]


def _best_rank(
    program: StepProgram, layout: Layout, L: list[Any], right: Any, r: int, weights: Any
) -> tuple[Any, Any, Any, Any]:
    """`A = L X`, the factors `Y` (q, r, units) of `E = Z Y`, and squares of what is kept and lost.

    Of `L` only products of two columns are needed: summed over n with their weights they are `L^T w
    L`; summed over units, with `X X^T` as factors, the squares of the rows of `L X`.
    """
    tuning, q = program.tuning, len(L)
    products = {(a, b): x[0] * y[0] for a, x in enumerate(L) for b, y in enumerate(L[: a + 1])}
    dots = {ab: jnp.einsum("ej,eju->eu", weights, x).reshape(-1) for ab, x in products.items()}
    grams = tuning.computed_once((_symmetric(dots, q, None), right))
    X, Y = tuning.computed_once(singular_columns(*grams))

    def squares(mixed: Any) -> Any:
        total = jnp.zeros_like(weights)
        for (a, b), x in products.items():
            factor = mixed[a, b] if a == b else 2 * mixed[a, b]
            total = total + jnp.einsum("eju,eu->ej", x, by_row(layout, factor))
        return jnp.maximum(total, 0)

    keep, lose = (jnp.einsum("ak...,bk...->ab...", x, x) for x in (X[:, :r], X[:, r:]))
    rounding = (
        16 * q * q * jnp.finfo(X.dtype).eps * (keep + lose) * jnp.eye(q, dtype=X.dtype)[..., None]
    )
    factors = by_row(layout, X)[:, :, :, None]
    columns = [sum(x * factors[a, k][None] for a, x in enumerate(L)) for k in range(r)]
    A = jnp.concatenate(columns) if columns else jnp.zeros((0, *L[0].shape[1:]), X.dtype)
    return A, Y[:, :r], squares(keep), squares(lose + rounding)


def _gram_right(program: StepProgram, family: Family, Z: list, q: int, dtype: Any) -> Any:
    """`Z^T Z` of every unit: (q, q, units)."""
    dots: dict[tuple[int, int], Any] = {}
    for block, columns in zip(family.blocks, Z, strict=True):
        for a, (number, x) in enumerate(columns):
            for other, y in columns[: a + 1]:
                for n, found in enumerate(inner_products(program, block, x, y)):
                    i, j = (k if isinstance(k, int) else k[n] for k in (number, other))
                    if i is not None and j is not None:
                        dots[i, j] = dots.get((i, j), 0) + found
    return _symmetric(dots, q, jnp.zeros(family.units, dtype))


def _symmetric(dots: dict[tuple[int, int], Any], q: int, zero: Any) -> Any:
    rows = [[dots.get((max(i, j), min(i, j)), zero) for j in range(q)] for i in range(q)]
    return jnp.stack([jnp.stack(row) for row in rows])


# -- from pieces to weights ------------------------------------------------------------------------


def weight_gradients(
    program: StepProgram, theta: Sequence[Any], by_block: Sequence[tuple[Block, Any]]
) -> dict[int, Any]:
    """From gradients of the blocks' views to those of the weights."""
    by_part = {}
    for block, gradient in by_block:
        starts = [piece.part.start for _, piece in block.pieces[1:]]
        axis = block.form.view.index(block.letter)
        parts = jnp.split(gradient, starts, axis) if starts else [gradient]
        by_part |= {p.part.var: g for (_, p), g in zip(block.pieces, parts, strict=True)}
    return weights_of_views(program, theta, by_part)


def gradient_norm_factor(program: StepProgram, layout: Layout) -> float:
    """How much longer a gradient of the weights can be than that of one row's pieces, taken apart.

    A weight that several elements of a row's traces share gets the sum of theirs; m of them give a
    factor of √m at most. Infinite where a weight is not used as it is (a product or a norm of
    weights), or reaches a state in a way that no trace follows: then nothing is known.
    """
    blocks = [block for family in layout.families for block in family.blocks]
    certificates = program.graph.structure.certificates.values()
    used_as_it_is = all(is_structural(e) for b in blocks for e in b.contact.view.eqns)
    carried = any(drop.cut.primitive == "state" for c in certificates for drop in c.drops)
    if not used_as_it_is or carried or layout.untraced:
        return math.inf
    with jax.ensure_compile_time_eval():
        counts = []
        for block in blocks:
            ones = jnp.ones(block.form.shape(block.form.trace))
            counts.append((block, to_view(block, ones) / layout.rows))
        theta = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in program.weight_vars]
        found = weight_gradients(program, theta, counts).values()
        return math.sqrt(max(float(jnp.max(c)) if c.size else 0.0 for c in found))
