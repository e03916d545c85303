"""Scan over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def scan_time(
    body: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    xs: Any,
    length: int,
    reverse: bool = False,
) -> tuple[Any, Any]:
    """Return `lax.scan(body, carry, xs)`, with the body run in place for one step.

    The online step needs no loop.
    """
    if length > 1:
        return lax.scan(body, carry, xs, length=length, reverse=reverse)
    carry, ys = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda y: y[None], ys)
