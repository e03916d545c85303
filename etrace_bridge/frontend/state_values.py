"""State values as flat, named tensors: any nesting of tuple, list, dict, NamedTuple and dataclass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from etrace_bridge.frontend.names import Path


def flatten_state(value: Any) -> tuple[list[tuple[Path, torch.Tensor]], Any]:
    """Flatten a state value into its tensors with their paths, and a skeleton for
    `unflatten_state`.

    A path is made of field names, dict keys and positions; a bare tensor has the path `()`.
    Everything that is not a tensor (None, numbers, strings) stays in the skeleton.
    """
    leaves: list[tuple[Path, torch.Tensor]] = []

    def visit(node: Any, path: Path) -> Any:
        if isinstance(node, torch.Tensor):
            leaves.append((path, node))
            return _Hole(len(leaves) - 1)
        items = children(node)
        if items is None:
            return node
        return rebuild(node, [visit(child, (*path, key)) for key, child in items])

    skeleton = visit(value, ())
    return leaves, skeleton


def unflatten_state(skeleton: Any, tensors: Sequence[Any]) -> Any:
    """Fill the skeleton of `flatten_state` with tensors or other values."""
    if isinstance(skeleton, _Hole):
        return tensors[skeleton.index]
    items = children(skeleton)
    if items is None:
        return skeleton
    return rebuild(skeleton, [unflatten_state(child, tensors) for _, child in items])


def count_tensors(skeleton: Any) -> int:
    """Count the holes of a skeleton."""
    if isinstance(skeleton, _Hole):
        return 1
    return sum(count_tensors(child) for _, child in children(skeleton) or ())


@dataclasses.dataclass(frozen=True)
class _Hole:
    index: int


def is_hole(node: Any) -> bool:
    """Return whether a node of a skeleton stands for a tensor."""
    return isinstance(node, _Hole)


def children(node: Any) -> list[tuple[str, Any]] | None:
    """List the named children of a container, or None for anything else."""
    if isinstance(node, _Hole):
        return None
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, (tuple, list)):
        return [(str(i), child) for i, child in enumerate(node)]
    if isinstance(node, dict):
        return [(str(key), child) for key, child in node.items()]
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return [(f.name, getattr(node, f.name)) for f in dataclasses.fields(node)]
    return None


def rebuild(node: Any, values: list[Any]) -> Any:
    """Make a container like `node` with other children, in the order of `children(node)`."""
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return type(node)._make(values)  # not the constructor, which may check its arguments
    if isinstance(node, (tuple, list)):
        return type(node)(values)
    if isinstance(node, dict):
        try:
            return type(node)(zip(node, values, strict=True))
        except TypeError:  # a dict subclass with its own constructor, such as defaultdict
            return dict(zip(node, values, strict=True))
    # a dataclass may compute or check in __init__: copy the fields as they are
    fresh = object.__new__(type(node))
    fresh.__dict__.update(getattr(node, "__dict__", {}))
    for field, value in zip(dataclasses.fields(node), values, strict=True):
        object.__setattr__(fresh, field.name, value)
    return fresh


def state_names(argument: str, paths: Sequence[Path]) -> list[Path]:
    """Name the tensors of one state argument: by field or key where there are any, else by argument
    and position.
    """
    if list(paths) == [()]:
        return [(argument,)]
    positions_only = all(key.isdigit() for path in paths for key in path)
    return [(argument, *path) if positions_only else path for path in paths]
