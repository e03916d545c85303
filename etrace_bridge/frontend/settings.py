"""What a torch model's step depends on besides its tensors: modes, plain attributes, hooks."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn

from etrace_bridge.frontend.inside import PLAIN, Inside, is_container, names_in, show

_ABSENT = object()  # in place of an attribute that does not exist
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module()))  # attributes of every module, such as `_parameters`


class Settings:
    """The plain attributes (`training` is one) and forward hooks of a model's modules, and the plain
    values inside lists, dicts and objects that the modules' code names, as they were when this was
    made.

    A step is traced with them once. What has become a tensor or was one is not looked at: that is a
    state.

    Args:
        model: The model.
        leave_out: Ids of modules and names of attributes that the step itself changes.
    """

    def __init__(self, model: nn.Module, leave_out: Container[tuple[int, str]] = ()) -> None:
        self._leave_out = leave_out
        self._modules = [
            (path, m, len(m.__dict__), self._plain(m)) for path, m in model.named_modules()
        ]
        self._hook_dicts = [m.__dict__[name] for _, m, *_ in self._modules for name in _HOOKS]
        self._hooks = list(map(tuple, self._hook_dicts))
        self._insides = [
            (f"{path}.{name}" if path else name, m.__dict__, name, Inside(value, names_in(type(m))))
            for path, m, *_ in self._modules
            for name, value in m.__dict__.items()
            if name in names_in(type(m)) and name not in _OF_TORCH and is_container(value)
            if (id(m), name) not in leave_out
        ]

    def _plain(self, module: nn.Module) -> dict[str, Any]:
        return {
            name: value
            for name, value in module.__dict__.items()
            if isinstance(value, PLAIN) and (id(module), name) not in self._leave_out
        }

    def hold(self) -> bool:
        """Return whether nothing has changed."""
        try:
            for _, m, size, plain in self._modules:
                if len(m.__dict__) != size or not plain.items() <= m.__dict__.items():
                    return not self.differences()
            for _, attributes, name, inside in self._insides:
                if not inside.holds(attributes.get(name)):
                    return not self.differences()
        except Exception:  # a number has become an array, which does not compare
            return not self.differences()
        return list(map(tuple, self._hook_dicts)) == self._hooks

    def differences(self) -> list[str]:
        """Return what has changed, one phrase per change."""
        found = []
        for path, m, _, plain in self._modules:
            for name in dict.fromkeys((*plain, *self._plain(m))):
                # An attribute of the instance may hide one of its class
                old = plain.get(name, getattr(type(m), name, _ABSENT))
                new = getattr(m, name, _ABSENT)
                if isinstance(old, PLAIN) and isinstance(new, PLAIN) and old != new:
                    full = f"{path}.{name}" if path else name
                    found.append(f"`{full}` is {show(new)} and was {show(old)}")
        for full, attributes, name, inside in self._insides:
            found += inside.differences(full, attributes.get(name))
        hooked = [m for _, m, *_ in self._modules for _ in _HOOKS]
        for m, old, new in zip(hooked, self._hooks, map(tuple, self._hook_dicts), strict=True):
            if old != new:
                found.append(f"`{type(m).__name__}` has other forward hooks")
        return found
