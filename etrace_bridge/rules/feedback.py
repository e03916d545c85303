"""Fixed random feedback: a step's error at its outputs, projected to values inside."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def feedback_matrix(
    rng: np.random.Generator, output: tuple[int, ...], inside: tuple[int, ...]
) -> Any:
    """Return a random matrix (outputs, elements inside) with entries of variance 1 / outputs."""
    batch = output[0] if len(inside) > 1 and output[:1] == inside[:1] else 1
    size = (math.prod(output) // batch, math.prod(inside) // batch)
    return jnp.asarray(rng.standard_normal(size) / math.sqrt(size[0]))


def project(error: jax.Array, matrix: jax.Array, inside: tuple[int, ...]) -> jax.Array:
    """Multiply the error (K, …) at an output by the matrix: (K, *inside)."""
    rows = error.reshape(error.shape[0], -1, matrix.shape[0])
    return (rows @ matrix.astype(error.dtype)).reshape(error.shape[0], *inside)
