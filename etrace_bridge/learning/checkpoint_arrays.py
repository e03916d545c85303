"""Converts a learner's arrays to the tensors of a checkpoint and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import torch

from etrace_bridge._errors import StateError
from etrace_bridge.frontend import to_jax, to_torch


def as_tensor(x: Any) -> torch.Tensor:
    """Copy a JAX array to a torch tensor; a random key becomes its numbers."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return to_torch(x)


def like(x: Any, saved: torch.Tensor) -> Any:
    """Convert a tensor to an array of the same kind as `x`."""
    array = to_jax(saved)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(x))
    return array.astype(x.dtype)


def compare(
    own: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], kind: str
) -> list[str]:
    """Return one line for each name, shape or dtype that differs."""
    lines = [f"{kind}{n}: missing in the checkpoint" for n in sorted(set(own) - set(saved))]
    lines += [f"{kind}{n}: in the checkpoint only" for n in sorted(set(saved) - set(own))]
    for n in sorted(set(own) & set(saved)):
        a, b = own[n], saved[n]
        if a.shape != b.shape or a.dtype != b.dtype:
            show = lambda t: f"{str(t.dtype).removeprefix('torch.')}{tuple(t.shape)}"
            lines.append(f"{kind}{n}: {show(b)} in the checkpoint, {show(a)} here")
    return lines


def raise_differences(lines: list[str]) -> None:
    """Raise a `CheckpointError` that lists the differences, if there are any."""
    if lines:
        raise StateError(
            "The checkpoint does not fit:\n" + "\n".join(f"  {line}" for line in lines)
        )
