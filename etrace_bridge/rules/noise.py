"""Where the signs of random rules come from: a seed, the draws before, and the data.

The memory of a random rule holds two whole numbers: how many draws were made, and a digest of the
data, which every draw extends by the inputs of its steps. So sequences that all begin with an empty
memory do not share their noise, not even from the point on where their inputs are the same (a blank
after a cue). The digest begins with the weights, because a learner sees the same sequence again
after each update: with the same noise every time, the errors would not cancel over the updates.

The digest is a sum of whole numbers, so it is the same on any number of devices, to which the order
of a sum is a matter of chance. Hidden states are not in it: rounding changes their bits. A sequence
that begins with the same weights draws the same signs on any number of devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Draws = dict[str, jax.Array]  # "count": draws made; "data": digest of what came before


def no_draws() -> Draws:
    """Return the numbers before the first draw."""
    return {"count": jnp.zeros((), jnp.uint32), "data": jnp.zeros((), jnp.uint32)}


def read_data(draws: Draws, theta: Sequence[jax.Array], args: Sequence[jax.Array]) -> Draws:
    """Return the numbers for a draw after the inputs of its steps."""
    is_first = draws["count"] == 0
    before = lax.cond(is_first, lambda: digest(theta), lambda: draws["data"])
    return {**draws, "data": _mixed(before) + digest(args)}


def after_draw(draws: Draws) -> Draws:
    """Return the numbers for the next draw."""
    return {**draws, "count": draws["count"] + jnp.uint32(1)}


def draw_key(seed: int, draws: Draws) -> jax.Array:
    """Return the random key of a draw."""
    key = jax.random.fold_in(jax.random.PRNGKey(seed), draws["count"])
    return jax.random.fold_in(key, draws["data"])


def digest(arrays: Sequence[jax.Array]) -> jax.Array:
    """Return a number that changes with any element of the arrays, or with its place."""
    total = jnp.zeros((), jnp.uint32)
    for x in arrays:
        place = jnp.arange(1, x.size + 1, dtype=jnp.uint32).reshape(x.shape)
        mixed = _mixed(_bits(x) + _mixed(place))
        total = _mixed(total) + jnp.sum(mixed, dtype=jnp.uint32)
    return total


def _bits(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.uint32)
    return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def _mixed(x: Any) -> Any:
    """Return whole numbers whose every bit depends on all bits of x (Appleby's finaliser)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
