"""Compiles programs: the only module that calls `jax.jit`."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any

import jax

from etrace_bridge._errors import InputError
from etrace_bridge.lowering.notice import Program

# Options of XLA's CPU compiler; other backends reject them.
# By default, every array of a loop over time that two kernels read is copied at every step. The
# analysis by regions avoids that.
OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}
# By default only half of a vector register is used. The whole is faster, but not in the short
# kernels of a single step.
SEQUENCE_OPTIONS = {"xla_cpu_prefer_vector_width": 512}
# The fusion emitters (jaxlib 0.10.2) hand LLVM loops over a few columns that it turns into vectors
# of, say, twenty doubles, and their x86 code can be wrong: the gates' cotangents of a GRU with 5
# units and batch 4, concatenated, were. Without these emitters float64 is right, and a little
# slower. No wrong float32 program is known, so float32 programs use them.
FLOAT64_OPTIONS = {"xla_cpu_use_fusion_emitters": False}


def jit(
    function: Callable, one_step: bool = False, platform: str | None = None, **options: Any
) -> Program:
    """Call `jax.jit` with this package's compiler options.

    A line on the terminal says when it compiles.

    Args:
        function: what to compile.
        one_step: it is a single step, not a sequence.
        platform: the kind of device that it runs on; None: JAX's default.
        options: of `jax.jit`.
    """
    known = compiler_options(one_step, platform)
    options |= {"compiler_options": known} if known else {}
    return Program(function, lambda traced: jax.jit(traced, **options))


def as_call(function: Callable) -> Callable:
    """Make a function one call of its name in the program that is being traced, with which it is
    compiled.
    """
    return jax.jit(function)


def traced_once(function: Callable) -> Callable:
    """Make a function that is traced once for each kind of arguments, however often a program
    calls it; its operations become part of the program.
    """
    return jax.jit(function, inline=True)


def keep_programs(folder: str | PathLike) -> None:
    """Keep compiled programs in a folder, from which later processes read them.

    For every JAX program of this process.
    """
    path = Path(folder).expanduser()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(
            f"`cache_dir` is `{path}`, in which no file can be made: {error.strerror}. Name a "
            "folder of your own."
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(path.resolve()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compiler_options(one_step: bool = False, platform: str | None = None) -> dict[str, Any]:
    """Return the compiler's options for a single step or a sequence.

    None for devices that they do not tune.

    Arguments as in `jit`.
    """
    if (platform or jax.default_backend()) != "cpu":
        return {}
    wanted = (
        OPTIONS
        | ({} if one_step else SEQUENCE_OPTIONS)
        | (FLOAT64_OPTIONS if jax.config.jax_enable_x64 else {})
    )
    return {name: value for name, value in wanted.items() if _is_known(name, value)}


@functools.cache
def _is_known(name: str, value: Any) -> bool:
    """Return whether this version of XLA has the option for a CPU.

    Others are skipped, since they only tune.
    """
    cpu = jax.local_devices(backend="cpu")[0]
    try:
        jax.jit(
            lambda: 0.0,
            compiler_options={name: value},
            out_shardings=jax.sharding.SingleDeviceSharding(cpu),
        )()
    except jax.errors.JaxRuntimeError:
        return False
    return True
