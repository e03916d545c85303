"""The backward scan over a chunk, on hidden-sized arrays.

    a_(t-1) = b_t + D_t^T a_t        (a_K = 0)
    M_(t-1) = M_t D_t                (M_K = I)

`a_t` is the cotangent that later steps of the chunk give the rows after step t; `M_t` is how the
rows after step K depend on them, position by position. All as [group][row] (and [group][row][row])
lists, with None for what is always zero.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge.step.linearise import Blocks, Grouped
from etrace_bridge.step.time import scan_time

Start = tuple[Grouped, Blocks | None]


def suffix_start(rows: Grouped, D: Blocks | None, with_products: bool) -> Start:
    """Return `a_K = 0` and `M_K = I`, for rows of these shapes.

    Where `D` is given, `M` has no entry where products of any number of them have none.
    """
    zeros = jax.tree.map(jnp.zeros_like, rows)
    if not with_products:
        return zeros, None
    M = []
    for g, likes in enumerate(zeros):
        reach = [[True] * len(likes)] * len(likes)
        if D is not None:
            reach = _closure([[entry is not None for entry in row] for row in D[g]])
        M.append(
            [
                [_entry(i == j, reach[i][j], x) for j, x in enumerate(likes)]
                for i in range(len(likes))
            ]
        )
    return zeros, M


def _entry(is_diagonal: bool, is_reached: bool, like: Any) -> Any:
    if is_diagonal:
        return jnp.ones_like(like)
    return jnp.zeros_like(like) if is_reached else None


def _closure(reach: list[list[bool]]) -> list[list[bool]]:
    """Return which rows reach which in any number of steps."""
    for k in range(len(reach)):
        reach = [[to or (row[k] and reach[k][j]) for j, to in enumerate(row)] for row in reach]
    return reach


def suffix_scan(b: Grouped, D: Blocks, with_products: bool, start: Start | None = None):
    """Run the scan.

    Args:
        b: cotangents of old rows at each step, (K, …).
        D: per-position Jacobians at each step; None for entries that are always zero.
        with_products: whether `M` is wanted.
        start: `a_K` and `M_K`, where later steps follow; 0 and I otherwise.

    Returns:
        `a_t` for every step, `a_0`, `M_t` for every step, `M_0`; the last two are None without
        products.
    """
    length = len(jax.tree.leaves(b)[0]) if jax.tree.leaves(b) else 0
    is_alone = start is None and length == 1
    start = (
        suffix_start(jax.tree.map(lambda x: x[0], b), D, with_products) if start is None else start
    )
    if not length:  # no state matters later
        return b, start[0], start[1], start[1]

    def body(carry: Any, step: Any) -> tuple[Any, Any]:
        a, M = carry
        b_t, D_t = step
        before = [_times(a_g, D_g, bs, a_g) for bs, a_g, D_g in zip(b_t, a, D_t, strict=True)]
        M_before = None
        if M is not None:
            M_before = [
                # A loop keeps every entry that it starts with; a single step has those of D alone.
                [
                    _times(row, D_g, [None] * len(row), [None] * len(row) if is_alone else row)
                    for row in M_g
                ]
                for M_g, D_g in zip(M, D_t, strict=True)
            ]
        return (before, M_before), (a, M)

    (a0, M0), (a, M) = scan_time(body, start, (b, D), length, reverse=True)
    return a, a0, M, M0


def _times(row: list[Any], D: Any, first: list[Any], like: list[Any]) -> list[Any]:
    """Return `first[j] + sum over i of row[i] D[i][j]`, skipping what is absent.

    Zeros like `like[j]` where all of it is.
    """
    result = []
    for j in range(len(row)):
        total = first[j]
        for i in range(len(row)):
            if D[i][j] is not None and row[i] is not None:
                term = row[i] * D[i][j]
                total = term if total is None else total + term
        if total is None:
            result.append(None if like[j] is None else jnp.zeros_like(like[j]))
        else:
            result.append(total if like[j] is None else total.astype(like[j].dtype))
    return result
