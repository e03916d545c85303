"""Copy and compare the values that calls of a model return."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from etrace_bridge.frontend.state_values import flatten_state, unflatten_state


def copied_state(value: Any) -> Any:
    """Copy a value and detach its tensors from torch's graph."""
    leaves, skeleton = flatten_state(value)
    return unflatten_state(skeleton, [tensor.detach().clone() for _, tensor in leaves])


def is_same_object(a: Any, b: Any) -> bool:
    """Return whether two values hold the same tensor objects."""
    x, y = flatten_state(a)[0], flatten_state(b)[0]
    return bool(x) and len(x) == len(y) and all(s is t for (_, s), (_, t) in zip(x, y, strict=True))


def output_of_state(value: Any) -> Any:
    """Return the output of a cell that returns only its state: `h` of `(h, c)`, and a list, one
    state for each layer, as a whole.
    """
    return value if isinstance(value, list) else flatten_state(value)[0][0][1]


def same_structure(a: Any, b: Any) -> bool:
    """Return whether two values have the same structure and shapes."""
    (x, left), (y, right) = flatten_state(a), flatten_state(b)
    shapes = [(p, tuple(t.shape)) for p, t in x] == [(p, tuple(t.shape)) for p, t in y]
    return shapes and type(unflatten_state(left, [0] * len(x))) is type(
        unflatten_state(right, [0] * len(y))
    )


def same_numbers(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    """Return whether two lists of tensors agree."""
    return len(a) == len(b) and all(
        s.shape == t.shape and torch.allclose(s, t, rtol=1e-4, atol=1e-6, equal_nan=True)
        for s, t in zip(a, b, strict=True)
    )


def same_tensors(a: Any, b: Any) -> bool:
    """Return whether two outputs hold the same numbers."""
    return same_numbers([t for _, t in flatten_state(a)[0]], [t for _, t in flatten_state(b)[0]])


def last_part(whole: torch.Tensor, part: torch.Tensor, parts: int) -> torch.Tensor | None:
    """Return the end of a tensor that is, along one axis, as long as some parts; None if there is
    none.
    """
    if whole.dim() != part.dim():
        return None
    longer = [i for i, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if len(longer) != 1 or whole.shape[longer[0]] != parts * part.shape[longer[0]]:
        return None
    size = part.shape[longer[0]]
    return whole.narrow(longer[0], (parts - 1) * size, size)
