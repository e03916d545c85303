"""What a loss depends on besides output and target, as it was when the loss was traced."""

from __future__ import annotations

import dis
import functools
import inspect
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from etrace_bridge.frontend import PLAIN, Settings, names_of

_LIBRARIES = ("torch", "jax", "optax", "numpy", "etrace_bridge", "brainstate")
_SEQUENCES = (list, tuple, deque)
_ROOT = "the loss"  # the name of the loss itself
_LARGEST = 10_000  # elements of a NumPy array that are compared one by one
_ABSENT = object()  # in place of what cannot be read
# Reading a value and comparing it with what it was: whether it is still the same.
_Same = Callable[[Any], bool]


class LossSettings:
    """Everything that a loss reads: attributes of a module or an object, variables of the function
    around it, globals, arguments of a `partial`, and what is inside lists, dicts and objects there.

    A loss is traced with them once. Of an object, the attributes are watched whose names occur in the
    loss's code. Changes inside NumPy arrays of more than 10,000 elements are not seen.

    Args:
        loss: the loss as the user gave it.
    """

    def __init__(self, loss: Any) -> None:
        self._names: set[str] = set()  # that the loss's code mentions
        # A second walk knows the names of all code, also of what the first found after an object.
        for _ in range(2):
            self._modules: list[Settings] = []
            self._values: list[tuple[str, Callable[[], Any], _Same]] = []
            self._seen: dict[int, Any] = {}
            self._add(_ROOT, lambda: loss)

    def hold(self) -> bool:
        """Return whether nothing has changed."""
        return all(m.hold() for m in self._modules) and not any(self._changed())

    def differences(self) -> list[str]:
        """Return what has changed, one phrase per change."""
        found = [phrase for m in self._modules for phrase in m.differences()]
        return found + [f"`{name}` has changed" for name in dict.fromkeys(self._changed())]

    def _changed(self) -> Iterator[str]:
        for name, read, same in self._values:
            if not same(_try(read)):
                yield name

    def _add(self, name: str, read: Callable[[], Any]) -> None:
        """Add a value, and what it reads itself if it is a container, an object or a function."""
        value = _try(read)
        if value is _ABSENT or isinstance(value, types.BuiltinFunctionType):
            return
        if name != _ROOT and not isinstance(value, types.MethodType):
            self._values.append((name, read, _sameness(value)))
        if id(value) in self._seen or isinstance(value, (torch.Tensor, np.ndarray)):
            return
        self._seen[id(value)] = value
        if isinstance(value, torch.nn.Module):
            self._add_module(name, value)
        elif isinstance(value, functools.partial):
            self._add(name, lambda: value.func)
            for n, argument in enumerate(value.args):
                self._add(f"argument {n}", functools.partial(_itself, argument))
            for key in value.keywords:
                self._add(key, functools.partial(value.keywords.get, key))
        elif isinstance(value, types.MethodType):
            self._add(name, lambda: value.__func__)
            self._add(name, lambda: value.__self__)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, (*_SEQUENCES, dict)):
            for key in value if isinstance(value, dict) else range(len(value)):
                if not isinstance(value[key], PLAIN):
                    self._add(f"{name}[{key!r}]", functools.partial(operator.getitem, value, key))
        elif not isinstance(value, PLAIN) and not _is_library(value):
            self._add_object(name, value)

    def _add_module(self, name: str, module: torch.nn.Module) -> None:
        """Add a module's settings, parameters and buffers, and containers in its attributes."""
        self._modules.append(Settings(module))
        for path, part in module.named_modules():
            lead = f"{path}." if path else ""
            for table in (part._parameters, part._buffers):
                for key in table:
                    self._add(lead + key, functools.partial(table.get, key))
            forward = getattr(part.forward, "__func__", part.forward)
            self._add("forward", functools.partial(_itself, forward))
            if not _is_library(part):
                for key, value in vars(part).items():
                    if key in self._names and not isinstance(value, PLAIN):
                        self._add(lead + key, functools.partial(vars(part).get, key))

    def _add_function(self, function: types.FunctionType) -> None:
        """Add what a function's code reads: closure variables, globals, defaults."""
        if _is_of_library(function.__module__ or ""):
            return
        code = function.__code__
        self._names.update(names_of(code))
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add(key, functools.partial(getattr, cell, "cell_contents"))
        for key in _globals_of(code):
            if key in function.__globals__:
                self._add(key, functools.partial(function.__globals__.get, key))
        for key, default in (function.__kwdefaults__ or {}).items():
            self._add(key, functools.partial(_itself, default))
        for default in function.__defaults__ or ():
            self._add("a default", functools.partial(_itself, default))

    def _add_object(self, name: str, value: Any) -> None:
        """Add the attributes of an object, a class or a user's module that the loss's code names."""
        is_loss = name == _ROOT
        names = self._names | ({"__call__", *getattr(value, "__dict__", ())} if is_loss else set())
        for key in sorted(names):
            stored = inspect.getattr_static(value, key, _ABSENT)
            full = key if is_loss else f"{name}.{key}"
            if isinstance(stored, (staticmethod, classmethod)):
                stored = stored.__func__
            elif isinstance(stored, property):
                stored = stored.fget
            if isinstance(stored, types.FunctionType):
                self._add(full, functools.partial(_itself, stored))
            elif stored is not _ABSENT and not key.startswith("__") and _is_data(stored):
                self._add(full, functools.partial(getattr, value, key))


def _try(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (AttributeError, ValueError, LookupError):  # an empty cell, a shorter list
        return _ABSENT


def _itself(value: Any) -> Any:
    return value


def _is_library(value: Any) -> bool:
    """Whether a module, or an object's class, is part of a library that does not change by itself."""
    if isinstance(value, types.ModuleType):
        return _is_of_library(value.__name__)
    kind = value if isinstance(value, type) else type(value)
    return kind.__module__.split(".")[0] in _LIBRARIES  # `SimpleNamespace` is a user's object


def _is_of_library(module: str) -> bool:
    name = module.split(".")[0]
    return name in _LIBRARIES or name in sys.stdlib_module_names


def _is_data(stored: Any) -> bool:
    """Whether what a class or an object stores under a name is read as it is, or from a slot."""
    return isinstance(stored, types.MemberDescriptorType) or not hasattr(type(stored), "__get__")


def _sameness(value: Any) -> _Same:
    """Tell by what a value is known to be the one it is now."""
    if isinstance(value, PLAIN):
        return lambda new: new is value or isinstance(new, PLAIN) and new == value
    if isinstance(value, torch.Tensor):
        version = value._version
        return lambda new: new is value and new._version == version
    if isinstance(value, np.ndarray) and value.size <= _LARGEST:
        copy = value.tobytes()
        return lambda new: new is value and new.tobytes() == copy
    if isinstance(value, dict):
        keys, items = list(value), list(value.values())
        return lambda new: new is value and list(new) == keys and _are(list(new.values()), items)
    if isinstance(value, _SEQUENCES):
        items = list(value)
        return lambda new: new is value and _are(new, items)
    if isinstance(value, (set, bytearray)):
        content = value.copy()
        return lambda new: new is value and new == content
    return lambda new: new is value


def _are(new: Any, old: list[Any]) -> bool:
    """Whether a sequence has these very items."""
    return len(new) == len(old) and all(map(operator.is_, new, old))


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Return the names of the globals that code reads, including functions defined inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)
