"""What a loss depends on besides output and target, as it was when the loss was traced."""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from etrace_bridge.frontend import PLAIN, Settings

_LIBRARIES = ("torch", "jax", "optax", "numpy")


class LossSettings:
    """Plain values and tensors that a loss reads: module attributes, closure variables, globals,
    arguments of a `partial`.

    A loss is traced with them once. Values inside lists, dicts and other objects are not compared.

    Args:
        loss: the loss as the user gave it.
    """

    def __init__(self, loss: Any) -> None:
        self._modules: list[Settings] = []
        self._values: list[tuple[str, Callable[[], Any], Any, int]] = []
        self._seen: set[int] = set()
        self._add("loss", lambda: loss)

    def hold(self) -> bool:
        """Return whether nothing has changed."""
        return all(m.hold() for m in self._modules) and not any(self._changed())

    def differences(self) -> list[str]:
        """Return what has changed, one phrase per change."""
        found = [phrase for m in self._modules for phrase in m.differences()]
        return found + [f"`{name}` has changed" for name in self._changed()]

    def _changed(self) -> Iterator[str]:
        for name, read, old, version in self._values:
            new = read()
            if (
                new is not old
                and not (isinstance(new, PLAIN) and new == old)
                or isinstance(new, torch.Tensor)
                and new._version != version
            ):
                yield name

    def _add(self, name: str, read: Callable[[], Any]) -> None:
        """Add a value, and what it reads itself if it is a module or a function."""
        try:
            value = read()
        except (AttributeError, ValueError):  # a name of something else, an empty cell
            return
        if isinstance(value, (torch.Tensor, *PLAIN)) and name != "loss":
            self._values.append((name, read, value, getattr(value, "_version", 0)))
        if id(value) in self._seen or isinstance(value, (torch.Tensor, types.ModuleType)):
            return
        self._seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            self._modules.append(Settings(value))
            for path, module in value.named_modules():
                for table in (module._parameters, module._buffers):
                    for key in table:
                        full = f"{path}.{key}" if path else key
                        self._add(full, functools.partial(table.get, key))
            if not type(value).__module__.startswith(_LIBRARIES):
                self._add("forward", lambda: type(value).forward)
        elif isinstance(value, functools.partial):
            self._add(name, lambda: value.func)
            for n, argument in enumerate(value.args):
                self._add(f"argument {n}", functools.partial(lambda x: x, argument))
            for key in value.keywords:
                self._add(key, functools.partial(value.keywords.get, key))
        elif isinstance(value, types.MethodType):
            self._add(name, lambda: value.__func__)
            self._add(name, lambda: value.__self__)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif name == "loss" and hasattr(value, "__dict__"):
            for key in vars(value):
                self._add(key, functools.partial(vars(value).get, key))

    def _add_function(self, function: types.FunctionType) -> None:
        """Add what a function's code reads: closure variables, globals, defaults."""
        if (function.__module__ or "").startswith(_LIBRARIES):
            return
        code = function.__code__
        for key, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add(key, functools.partial(getattr, cell, "cell_contents"))
        for key in _globals_of(code):
            if key in function.__globals__:
                self._add(key, functools.partial(function.__globals__.get, key))
        for key, default in (function.__kwdefaults__ or {}).items():
            self._add(key, functools.partial(lambda x: x, default))
        for default in function.__defaults__ or ():
            self._add("a default", functools.partial(lambda x: x, default))


def _globals_of(code: types.CodeType) -> Iterator[str]:
    """Return the names of the globals that code reads, including functions defined inside it."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _globals_of(constant)
