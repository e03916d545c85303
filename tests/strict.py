"""The engine without implicit promotion."""

from __future__ import annotations

from typing import Any

import jax

from etrace_bridge.rules import ChunkResult
from etrace_bridge.schedule.chunk import run_chunk


def run_strictly(*args: Any) -> ChunkResult:
    """`run_chunk` where JAX promotes neither dtypes nor ranks by itself: in the engine and in rules
    either would be an oversight.

    A model's own code is traced outside of it: users may write `x @ w + b`.
    """
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        return run_chunk(*args)
