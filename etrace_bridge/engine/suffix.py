"""The backward scan over a chunk, on hidden-sized arrays.

    a_(t-1) = b_t + D_t^T a_t        (a_K = 0)
    M_(t-1) = M_t D_t                (M_K = I)

`a_t` is what later steps of the chunk ask of the new states `h_t`; `M_t` is how `h_K` depends on `h_t` position by
position. All as [group][state] (and [group][row][state]) lists.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from etrace_bridge.engine.loop import scan_time

Grouped = list[list[Any]]


def suffix_start(states: Grouped, with_products: bool) -> tuple[Grouped, Any]:
    """`a_K = 0` and `M_K = I`, for states of these shapes."""
    zeros = jax.tree.map(jnp.zeros_like, states)
    eye = [[[jnp.ones_like(h) if i == j else jnp.zeros_like(h) for j, h in enumerate(hs)] for i in range(len(hs))] for hs in zeros]
    return zeros, eye if with_products else None


def suffix_scan(b: Grouped, D: list[list[list[Any]]], with_products: bool, start: tuple[Grouped, Any] | None = None):
    """Runs the scan.

    Args:
        b: cotangents of old states at each step, (K, …).
        D: per-position Jacobians at each step; None for entries that are always zero.
        with_products: whether `M` is wanted.
        start: `a_K` and `M_K`, where later steps follow; 0 and I otherwise.

    Returns:
        `a_t` for every step, `a_0`, `M_t` for every step, `M_0`; the last two are None without products.
    """
    start = suffix_start(jax.tree.map(lambda x: x[0], b), with_products) if start is None else start
    if not jax.tree.leaves(b):  # no state matters later
        return b, start[0], start[1], start[1]

    def body(carry: Any, step: Any) -> tuple[Any, Any]:
        a, M = carry
        b_t, D_t = step
        before = [_times(bs, a_g, D_g) for bs, a_g, D_g in zip(b_t, a, D_t, strict=True)]
        M_before = None
        if M is not None:
            M_before = [[_times([None] * len(row), row, D_g, like=row) for row in M_g] for M_g, D_g in zip(M, D_t, strict=True)]
        return (before, M_before), (a, M)

    (a0, M0), (a, M) = scan_time(body, start, (b, D), jax.tree.leaves(b)[0].shape[0], reverse=True)
    return a, a0, M, M0


def _times(first: list[Any], row: list[Any], D: list[list[Any]], like: list[Any] | None = None) -> list[Any]:
    """`first[j] + sum over i of row[i] D[i][j]`, skipping what is absent; in each state's own dtype."""
    result = []
    for j in range(len(row)):
        total = first[j]
        for i in range(len(row)):
            if D[i][j] is not None:
                term = row[i] * D[i][j]
                total = term if total is None else total + term
        result.append(jnp.zeros_like(like[j]) if total is None else total.astype(row[j].dtype))
    return result
