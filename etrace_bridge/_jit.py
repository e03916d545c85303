"""Compiling: the one call of `jax.jit` in the package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

# Loops over time are what most programs of this package are made of. In XLA's CPU compiler as it comes, each of a loop's arrays that
# two kernels read is copied at every step, which the analysis by regions finds needless.
OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}
# It fills half of a register, too; the whole is faster, though not in the short kernels of a single step.
SEQUENCE_OPTIONS = {"xla_cpu_prefer_vector_width": 512}
# XLA's fusion emitters for the CPU (jaxlib 0.10.2) hand LLVM loops over a few columns that it turns into vectors of, say, twenty
# doubles, and their x86 code can be wrong: the gates' cotangents of a GRU with 5 units and batch 4, concatenated, were. Without
# these emitters float64 is right, and a little slower; no float32 program was found wrong, so those keep them.
FLOAT64_OPTIONS = {"xla_cpu_use_fusion_emitters": False}


def jit(function: Callable, one_step: bool = False, **options: Any) -> Any:
    """`jax.jit` with the compiler's options that this package wants; not for use inside another jitted function.

    Args:
        function: what to compile.
        one_step: it is a single step, not a sequence.
        options: of `jax.jit`.
    """
    wanted = OPTIONS | ({} if one_step else SEQUENCE_OPTIONS) | (FLOAT64_OPTIONS if jax.config.jax_enable_x64 else {})
    known = {name: value for name, value in wanted.items() if _is_known(name, value)}
    return jax.jit(function, compiler_options=known, **options)


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    """Whether this XLA, for the device in use, has the option: what another one lacks, it has no need of."""
    try:
        jax.jit(lambda: 0.0, compiler_options={name: value})()
    except jax.errors.JaxRuntimeError:
        return False
    return True
