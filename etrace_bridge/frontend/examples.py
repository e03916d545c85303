"""Inputs and initial states for trying a model: guessed from its layers, random, or given by the
user.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn

from etrace_bridge.frontend.state_values import flatten_state, unflatten_state


def guess_inputs(model: nn.Module, batch_size: int | None) -> tuple[torch.Tensor, ...] | None:
    """Make an input from the size of the first layer that states one; None if no layer does."""
    batch = () if batch_size is None else (batch_size,)
    dtype = next(
        (p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype()
    )
    first = next(
        (m for m in model.modules() if m is not model and next(m.children(), None) is None), None
    )
    for module in (first, *model.modules()) if isinstance(first, nn.Embedding) else model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            return None
        if isinstance(module, nn.Embedding):
            count = batch[0] if batch else 1
            return ((torch.arange(count) % module.num_embeddings).reshape(batch),)
        size = next(
            (
                s
                for name in ("in_features", "input_size")
                if isinstance(s := getattr(module, name, None), int)
            ),
            None,
        )
        if size is not None:
            return (example_tensor((*batch, size), dtype),)
    return None


def example_tensor(shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
    """Make an example of an input: ordinary numbers that do not repeat, or zeros for integers."""
    kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))
    if not (kind.is_floating_point or kind.is_complex):
        return torch.zeros(shape, dtype=kind)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(kind)


def random_like(x: Any, step: int) -> Any:
    """Return random numbers of an input's shape, different for each step.

    Indices are those of the example, shifted.
    """
    if not isinstance(x, torch.Tensor):
        return x
    if not (x.is_floating_point() or x.is_complex()):
        return x.roll(step, 0) if x.dim() else x
    return torch.randn(
        x.shape, generator=torch.Generator().manual_seed(step + 1), dtype=torch.float64
    ).to(x.dtype)


def scaled(inputs: tuple, scale: float) -> tuple:
    """Multiply the floating inputs of a step."""
    return tuple(
        x * scale
        if isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())
        else x
        for x in inputs
    )


def with_sample_changed(x: Any, axis: int, size: int, sample: int | None = 0) -> Any:
    """Change one sample of an input whose batch axis has this size; None changes nothing.

    Indices change to others in their range, numbers by different amounts: code that subtracts a mean
    does not see a change by the same amount everywhere.
    """
    if (
        sample is None
        or not isinstance(x, torch.Tensor)
        or x.dim() <= axis
        or x.shape[axis] != size
        or x.dtype == torch.bool
    ):
        return x
    changed = x.clone()
    part = changed.select(axis, sample)
    if x.is_floating_point() or x.is_complex():
        part.add_(1 + random_like(part.abs(), sample))
    else:
        part.add_(1).remainder_(max(int(x.max()), 1) + 1)
    return changed


def share_changed(a: list[torch.Tensor], b: list[torch.Tensor]) -> float:
    """Return the share of elements in which two lists of tensors differ; 1 if their shapes do."""
    if [t.shape for t in a] != [t.shape for t in b]:
        return 1.0
    return sum(int((s != t).sum()) for s, t in zip(a, b, strict=True)) / max(
        1, sum(s.numel() for s in a)
    )


def with_batch(x: torch.Tensor, batch_size: int | None) -> torch.Tensor:
    """Repeat or cut an example to a batch size."""
    if batch_size is None or x.dim() == 0 or x.shape[0] == batch_size:
        return x
    return x[torch.arange(batch_size) % x.shape[0]]


def given_state(state: Any, batch_size: int | None, dtype: torch.dtype, detach: bool = True) -> Any:
    """Return the user's initial state for a batch size.

    Floating-point tensors get the model's dtype. With `detach` all of them are constants.
    """
    if type(state) is dict and any(_is_maker(value) for value in state.values()):
        return {
            name: given_state(value, batch_size, dtype, detach) for name, value in state.items()
        }
    made = state(batch_size) if _is_maker(state) else state
    leaves, skeleton = flatten_state(made)
    tensors = [t.detach() if detach else t for _, t in leaves]
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    if state is made and batch_size is not None:
        tensors = [with_batch(t, batch_size) for t in tensors]
    return unflatten_state(skeleton, tensors)


def _is_maker(state: Any) -> TypeGuard[Callable[[int | None], Any]]:
    return callable(state) and not isinstance(state, (torch.Tensor, nn.Module))
