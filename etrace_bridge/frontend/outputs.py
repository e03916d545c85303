"""What a step returns: the tensors of the model's output, in the model's own structure."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax

from etrace_bridge.frontend.state_values import children, is_hole, rebuild


def keep_tensors(skeleton: Any) -> Any:
    """Replace everything that is not a tensor in an output by None, and register its dataclasses
    with JAX.

    A step is traced once, so a number or text that the model returns would be that of the first
    step for ever.
    """
    items = children(skeleton)
    if items is None:
        return skeleton if is_hole(skeleton) else None
    if dataclasses.is_dataclass(skeleton) and not isinstance(skeleton, dict):
        _register(type(skeleton))
    return rebuild(skeleton, [keep_tensors(child) for _, child in items])


def _register(kind: type) -> None:
    """Make a dataclass a JAX pytree of its fields, unless it is one."""
    names = [field.name for field in dataclasses.fields(kind)]

    def flatten(value: Any) -> tuple[tuple, None]:
        return tuple(getattr(value, name) for name in names), None

    def unflatten(_: None, values: Any) -> Any:
        fresh = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(fresh, name, value)
        return fresh

    with contextlib.suppress(ValueError):  # JAX, or the library it comes from, knows it already
        jax.tree_util.register_pytree_node(kind, flatten, unflatten)
