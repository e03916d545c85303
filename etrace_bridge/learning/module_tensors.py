"""A torch module's tensors by name, and the settings that its step depends on."""

from __future__ import annotations

import operator
from typing import Any

import jax
import torch
from torch import nn

from etrace_bridge.frontend import Settings, to_torch
from etrace_bridge.learning.torch_reader import TensorReader


class ModuleTensors:
    """Locates a torch module's tensors by name, and notices when the module has changed.

    Args:
        model: the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._readers: dict[tuple[str, ...], TensorReader] = {}
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}
        self._links: list[tuple[dict[str, Any], str, Any]] = []
        self._parameters: list[nn.Parameter] = []
        self._find()

    def _find(self) -> None:
        """Record where every tensor lives, under its first name, as `named_parameters` does."""
        self._homes, self._links = {}, []
        self._parameters = list(self._model.parameters())
        self._settings, self._met = [Settings(self._model)], 0
        seen: set[int] = set()
        for prefix, module in self._model.named_modules():
            self._links += [
                (module._modules, name, child) for name, child in module._modules.items()
            ]
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        self._homes[f"{prefix}.{name}" if prefix else name] = (tensors, name)
                        if tensors is module._parameters:
                            self._links.append((tensors, name, tensor))

    def find_again(self) -> bool:
        """Return whether modules or parameters were replaced since the last call; locate them anew
        if so.
        """
        for home, name, value in self._links:
            if home.get(name) is not value:
                self._find()
                self._readers.clear()
                return True
        return False

    def kind(self) -> tuple:
        """Return what a step depends on besides the tensors' values.

        The model's settings, as a number for each that was met; dtypes; which parameters are
        trained.
        """
        if not self._settings[self._met].hold():
            self._met = next((n for n, s in enumerate(self._settings) if s.hold()), -1)
            if self._met < 0:
                self._met = len(self._settings)
                self._settings.append(Settings(self._model))
        return (
            self._met,
            *[p.requires_grad for p in self._parameters],
            *[p.dtype for p in self._parameters],
        )

    def reader(self, names: tuple[str, ...]) -> TensorReader:
        """Return the reader of the current tensors with these names."""
        tensors = [home[key] for home, key in map(self._homes.__getitem__, names)]
        reader = self._readers.get(names)
        if reader is None or any(map(operator.is_not, reader.tensors, tensors)):
            reader = self._readers[names] = TensorReader(tensors)
        return reader

    def write(self, name: str, array: jax.Array) -> None:
        """Write a value into a torch tensor in place."""
        home, key = self._homes[name]
        tensor = home[key]
        with torch.no_grad():
            tensor.copy_(to_torch(array, like=tensor))
