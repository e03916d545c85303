"""Run a torch model and its bridged form in another floating precision, then restore both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import brainstate
import jax
import torch
from torch import nn

from etrace_bridge._errors import InputError

_NAMES = {"float32": torch.float32, "float64": torch.float64}
_DEPTH = 5  # containers in containers that are searched for tensors


def torch_dtype(dtype: Any) -> torch.dtype | None:
    """Read `float32` or `float64`, by name or as a dtype of torch, NumPy or JAX; None stays None."""
    if dtype is None:
        return None
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name not in _NAMES:
        raise InputError(
            f"`dtype` is {dtype!r}; it must be 'float64', 'float32', or None for the model's own."
        )
    return _NAMES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without `torch.`."""
    return str(dtype).removeprefix("torch.")


def float_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's first floating parameter or buffer.

    Of a complex one it is the dtype of its real part.
    """
    tensors = (*model.parameters(), *model.buffers())
    return next(
        (t.dtype.to_real() for t in tensors if t.is_floating_point() or t.is_complex()),
        torch.get_default_dtype(),
    )


@contextlib.contextmanager
def in_precision(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Set the model's floating tensors, torch's default dtype and JAX to one precision in this
    context.

    The tensors keep their identity, so closures, tied weights and the user's references see the
    same precision, and a model that cannot be copied can be cast. Afterwards every tensor has its
    old memory again, bit for bit.

    Args:
        model: the torch model.
        dtype: `torch.float32` or `torch.float64`.
    """
    kinds = (
        {True: torch.complex128, False: dtype}
        if dtype == torch.float64
        else {True: torch.complex64, False: dtype}
    )
    default, saved = torch.get_default_dtype(), []
    with _jax_precision(dtype):
        try:
            for tensor in _floating_tensors(model):
                if tensor.dtype != kinds[tensor.is_complex()]:
                    saved.append((tensor, tensor.data))
                    tensor.data = tensor.data.to(kinds[tensor.is_complex()])
            torch.set_default_dtype(dtype)
            yield
        finally:
            torch.set_default_dtype(default)
            for tensor, data in saved:
                tensor.data = data


@contextlib.contextmanager
def _jax_precision(dtype: torch.dtype) -> Iterator[None]:
    """Set JAX's x64 mode and brainstate's precision; float32 needs neither changed."""
    if dtype != torch.float64:
        yield
        return
    before = jax.config.jax_enable_x64
    try:
        with brainstate.environ.context(precision=64):
            yield
    finally:
        if jax.config.jax_enable_x64 != before:  # brainstate restores its own idea of the precision
            jax.config.update("jax_enable_x64", before)


def _floating_tensors(model: nn.Module) -> list[torch.Tensor]:
    """List parameters, buffers and tensors in attributes of a model, each once."""
    found: dict[int, torch.Tensor] = {}

    def visit(value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and (value.is_floating_point() or value.is_complex()):
                found.setdefault(id(value), value)
        elif depth < _DEPTH and isinstance(value, dict):
            for item in list(value.values()):
                visit(item, depth + 1)
        elif depth < _DEPTH and isinstance(value, (list, tuple, set)):
            for item in list(value):
                visit(item, depth + 1)

    for module in model.modules():
        visit(vars(module), 0)
    return list(found.values())
