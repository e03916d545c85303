"""Compiling: the one call of `jax.jit` in the package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

# XLA's fusion emitters for the CPU (jaxlib 0.10.2) hand LLVM loops over a few columns that it turns into vectors of, say, twenty
# doubles, and their x86 code can be wrong: the gates' cotangents of a GRU with 5 units and batch 4, concatenated, were. Without
# these emitters float64 is right, and a little slower; no float32 program was found wrong, so those keep them.
FLOAT64_OPTIONS = {"xla_cpu_use_fusion_emitters": False}


def jit(function: Callable, **options: Any) -> Any:
    """`jax.jit` with the compiler's options that this package needs; not for use inside another jitted function.

    Args:
        function: what to compile.
        options: of `jax.jit`.
    """
    if jax.config.jax_enable_x64 and _are_known():
        options["compiler_options"] = FLOAT64_OPTIONS
    return jax.jit(function, **options)


@functools.cache
def _are_known() -> bool:
    """Whether this XLA still has the options; one that does not have them has no such emitters to turn off."""
    try:
        jax.jit(lambda: 0.0, compiler_options=FLOAT64_OPTIONS)()
    except jax.errors.JaxRuntimeError:
        return False
    return True
