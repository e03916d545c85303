"""Put a torch module back exactly as it was, after its code ran on other tensors than the user's."""

from __future__ import annotations

import contextlib
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_CONTAINERS = (dict, list, set, deque)


@contextlib.contextmanager
def restored(model: nn.Module, *, values: bool = True) -> Iterator[None]:
    """Restore attributes, buffers, containers and tensor values of a module and its children at the
    end, also on failure.

    Args:
        model: The module.
        values: Also copy parameter values, for runs on real tensors; a traced run cannot write to
            them.
    """
    saved = [_save(module, values) for module in model.modules()]
    rng = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(rng)
        for restore in reversed(saved):
            restore()


def _save(module: nn.Module, values: bool) -> Any:
    attributes = dict(module.__dict__)
    containers: list[tuple[Any, Any]] = []
    tensors: list[tuple[torch.Tensor, torch.Tensor, int, bool]] = []
    seen: set[int] = set()

    def visit(value: Any, depth: int) -> None:
        if id(value) in seen or isinstance(value, nn.Module):
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and (values or not isinstance(value, nn.Parameter)):
                tensors.append((value, value.detach().clone(), value._version, value.requires_grad))
        elif isinstance(value, _CONTAINERS) and depth < 5:
            containers.append((value, value.copy()))
            for item in list(value.values() if isinstance(value, dict) else value):
                visit(item, depth + 1)
        elif isinstance(value, tuple) and depth < 5:
            for item in value:
                visit(item, depth + 1)
        elif _is_plain_object(value) and depth < 5:
            containers.append((value.__dict__, value.__dict__.copy()))
            for item in list(value.__dict__.values()):
                visit(item, depth + 1)

    for value in attributes.values():
        visit(value, 0)

    def restore() -> None:
        module.__dict__.clear()
        module.__dict__.update(attributes)
        for container, content in containers:
            if isinstance(container, dict) and _same_items(container, content):
                continue
            container.clear()
            container.extend(content) if isinstance(container, (list, deque)) else container.update(
                content
            )
        with torch.no_grad():
            for tensor, value, version, requires_grad in tensors:
                if tensor._version != version or not torch.equal(tensor, value):
                    tensor.copy_(value)
                if tensor.requires_grad and not requires_grad:
                    # an in-place write made the tensor part of a graph, or a library set the flag
                    # on a shared constant
                    tensor.requires_grad_(False) if tensor.is_leaf else tensor.detach_()

    return restore


def _is_plain_object(value: Any) -> bool:
    """Return whether a value is an object of a Python class with attributes, such as a counter or a
    config.
    """
    return (
        hasattr(value, "__dict__")
        and isinstance(value.__dict__, dict)
        and not isinstance(value, (type, *_CODE))
    )


_CODE = (types.FunctionType, types.MethodType, types.ModuleType, types.BuiltinFunctionType)


def _same_items(now: dict, then: dict) -> bool:
    return len(now) == len(then) and all(
        key in now and now[key] is value for key, value in then.items()
    )
