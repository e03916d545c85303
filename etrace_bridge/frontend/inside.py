"""What is inside the lists, dicts and objects in a module's attributes, as far as its code reads it."""

from __future__ import annotations

import functools
import operator
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

# Types of values that can be compared with those of another time.
PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    torch.dtype,
    torch.device,
    types.FunctionType,
    types.BuiltinFunctionType,
)
_ABSENT = object()  # in place of what does not exist
_STATE = object()  # in place of what is not plain
_SEQUENCES = (list, tuple, deque)
_LEAVES = (torch.Tensor, np.ndarray, nn.Module, type, types.ModuleType, types.MethodType)
_DEEPEST = 4  # containers within containers


class Inside:
    """The plain values in a list, a dict or an object, and where they are.

    Args:
        value: The container.
        names: Of an object, attributes with these names are looked at.
    """

    def __init__(self, value: Any, names: frozenset[str]) -> None:
        self._value, self._names = value, names
        self._containers: list[tuple[Any, list[Any], list[Any]]] = []
        self._leaves = dict(self._walk(value))

    def holds(self, value: Any) -> bool:
        """Whether the very same objects are in the same places; if not, nothing plain need differ."""
        if value is not self._value:
            return False
        for container, keys, before in self._containers:
            now = container if isinstance(container, _SEQUENCES) else self._inside(container)
            if len(now) != len(before) or not all(map(operator.is_, _values(now), before)):
                return False
            if keys and list(now) != keys:
                return False
        return True

    def _inside(self, container: Any) -> dict[Any, Any]:
        """Give what a dict, or an object as far as it is looked at, has in it."""
        if isinstance(container, dict):
            return container
        return {key: value for key, value in vars(container).items() if key in self._names}

    def differences(self, name: str, value: Any) -> Iterator[str]:
        """Tell which plain values are others; what is or was a state is left alone."""
        now = dict(Inside(value, self._names)._leaves) if is_container(value) else {}
        for where in dict.fromkeys((*self._leaves, *now)):
            old, new = self._leaves.get(where, _ABSENT), now.get(where, _ABSENT)
            if _STATE in (old, new) or old is new or old == new:
                continue
            if _ABSENT in (old, new):
                yield f"`{name}{where}` is new" if old is _ABSENT else f"`{name}{where}` is gone"
            else:
                yield f"`{name}{where}` is {show(new)} and was {show(old)}"

    def _walk(self, value: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
        """Give the leaves below a container; note all containers."""
        if any(value is known for known, *_ in self._containers):
            return
        of_object = not isinstance(value, (*_SEQUENCES, dict))
        now = value if isinstance(value, _SEQUENCES) else self._inside(value)
        keys = list(now) if isinstance(now, dict) else []
        self._containers.append((value, keys, list(_values(now))))
        for key, entry in zip(keys or range(len(now)), _values(now), strict=True):
            label = f".{key}" if of_object else f"[{key!r}]"
            if is_container(entry) and depth < _DEEPEST:
                yield from self._walk(entry, where + label, depth + 1)
            else:
                yield where + label, entry if isinstance(entry, PLAIN) else _STATE


def is_container(value: Any) -> bool:
    """Whether a value is a list, a dict, or an object of a class that is not a library's."""
    if isinstance(value, (*PLAIN, *_LEAVES)):
        return False
    return isinstance(value, (*_SEQUENCES, dict)) or (
        isinstance(getattr(value, "__dict__", None), dict) and not _of_library(type(value))
    )


def show(value: Any) -> str:
    """Show a plain value in a message."""
    return f"`{value.__name__}`" if callable(value) else repr(value)


@functools.cache
def names_in(kind: type) -> frozenset[str]:
    """The names that the code of a class mentions, with that of the classes above it."""
    functions = [
        f
        for cls in kind.__mro__
        if not _of_library(cls)
        for f in vars(cls).values()
        if isinstance(f, types.FunctionType)
    ]
    return frozenset(name for f in functions for name in names_of(f.__code__))


def names_of(code: types.CodeType) -> Iterator[str]:
    """Names of globals and attributes that code mentions, and the code of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_of(constant)


def _values(now: Any) -> Any:
    return now.values() if isinstance(now, dict) else now


def _of_library(kind: type) -> bool:
    return kind.__module__.split(".")[0] in (
        "torch",
        "jax",
        "jaxlib",
        "numpy",
        "brainstate",
        "builtins",
    )
