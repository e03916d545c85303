"""JAX copies of a torch module's tensors, renewed when torch has changed them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from etrace_bridge.frontend import Settings, to_jax, to_real_jax, to_torch

_compare = ctypes.CDLL(None).memcmp
_PLAIN = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.float32,
    torch.float64,
}
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _Copy:
    """A tensor as it was when it was copied.

    Args:
        tensor: the tensor.
        array: its values, in memory of our own that nothing writes to.
    """

    __slots__ = ("_tensor", "_version", "array")

    def __init__(self, tensor: torch.Tensor, array: np.ndarray | jax.Array) -> None:
        self._tensor, self._version, self.array = tensor, tensor._version, array

    def is_current(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor still has these values; only plain tensors are compared, and only with
        copies in the host's memory. Others are copied every time.
        """
        if self._tensor is not tensor or self._version != tensor._version or not is_plain(tensor):
            return False
        memory = _host_memory_of(self.array)
        return memory is not None and not _compare(tensor.data_ptr(), *memory)


class TensorMirror:
    """Gives a torch module's parameters and buffers as arrays for JAX.

    A changed tensor is copied anew; the arrays given before keep their values. Version counters
    alone do not tell: torch's fused optimizers and writes through `.data` leave them as they are.
    So a tensor whose counter has not moved is compared with its copy.

    Args:
        model: the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._copies: dict[str, _Copy] = {}
        self._views: dict[str, tuple[int | None, Any]] = {}  # memory of a tensor, and its address
        self._homes: dict[str, tuple[dict[str, Any], str]] = {}
        self._links: list[tuple[dict[str, Any], str, Any]] = []
        self._parameters: list[nn.Parameter] = []
        self._find()

    def _find(self) -> None:
        """Notes where every tensor lives, under its first name, as `named_parameters` does."""
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
        """Whether modules or parameters were replaced since the last look; they are then found
        anew.
        """
        for home, name, value in self._links:
            if home.get(name) is not value:
                self._find()
                self._copies.clear()
                self._views.clear()
                return True
        return False

    def kind(self) -> tuple:
        """What a step depends on besides the tensors' values: the model's settings, as a number for
        each that was met; dtypes; what is trained.
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

    def tensor(self, name: str) -> torch.Tensor | None:
        """The tensor of now; None if the model has none of this name."""
        home = self._homes.get(name)
        return None if home is None else home[0].get(home[1])

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray | jax.Array]:
        """The tensors' values of now."""
        return {name: self._read(name) for name in names}

    def _read(self, name: str) -> np.ndarray | jax.Array:
        home, key = self._homes[name]
        tensor = home[key]
        copy = self._copies.get(name)
        if copy is None or not copy.is_current(tensor):
            copy = self._copies[name] = _Copy(tensor, copy_tensor(tensor))
        return copy.array

    def held(self, names: Sequence[str]) -> dict[str, np.ndarray | jax.Array] | None:
        """The copies of these tensors, if torch has changed none of them since."""
        arrays = {}
        for name in names:
            home, key = self._homes[name]
            copy = self._copies.get(name)
            if copy is None or not copy.is_current(home[key]):
                return None
            arrays[name] = copy.array
        return arrays

    def views(self, names: Sequence[str]) -> dict[str, np.ndarray | jax.Array]:
        """The tensors' own memory as far as NumPy can show it: for programs that have ended before
        torch goes on.
        """
        arrays = {}
        for name in names:
            home, key = self._homes[name]
            tensor = home[key]
            address, view = self._views.get(name, (None, None))
            if (
                address != tensor.data_ptr()
                or view.shape != tensor.shape
                or not tensor.is_contiguous()
            ):
                view = _view_weight(tensor)
                self._views[name] = tensor.data_ptr() if is_plain(tensor) else None, view
            arrays[name] = view
        return arrays

    def hold(self, arrays: Mapping[str, jax.Array]) -> None:
        """Remembers copies that a program has made of the tensors' values of now."""
        for name, array in arrays.items():
            home, key = self._homes[name]
            self._copies[name] = _Copy(home[key], array)

    def write(self, name: str, array: jax.Array) -> None:
        """Puts a value into a torch tensor, in place."""
        home, key = self._homes[name]
        tensor = home[key]
        with torch.no_grad():
            tensor.copy_(to_torch(array, like=tensor))
        self._copies.pop(name, None)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are those that JAX wants, in the order of its elements."""
    dtype = _plain_dtype(tensor.dtype, jax.config.jax_enable_x64)
    return dtype is not None and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def view_tensor(tensor: torch.Tensor) -> np.ndarray | jax.Array:
    """A tensor's memory for JAX, where it is plain; a copy elsewhere."""
    return tensor.detach().numpy() if is_plain(tensor) else to_jax(tensor)


def _view_weight(tensor: torch.Tensor) -> np.ndarray | jax.Array:
    """`view_tensor` of a parameter or buffer; a complex one as the step holds it, in pairs."""
    return to_real_jax(tensor) if tensor.is_complex() else view_tensor(tensor)


def _host_memory_of(array: np.ndarray | jax.Array) -> tuple[int, int] | None:
    """Address and number of bytes; None for an array in another device's memory."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data, array.nbytes
    if any(device.platform != "cpu" for device in array.devices()):
        return None
    return array.unsafe_buffer_pointer(), array.nbytes


def copy_tensor(tensor: torch.Tensor) -> np.ndarray | jax.Array:
    """A copy of a parameter or buffer for JAX. Plain tensors become NumPy arrays, aligned so that a
    jitted function takes them without a second copy.
    """
    dtype = _plain_dtype(tensor.dtype, jax.config.jax_enable_x64)
    if dtype is None or not is_plain(tensor):
        return to_real_jax(tensor)
    size = tensor.nbytes
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    ctypes.memmove(memory.ctypes.data + start, tensor.data_ptr(), size)
    return memory[start : start + size].view(dtype).reshape(tuple(tensor.shape))


@functools.cache
def _plain_dtype(dtype: torch.dtype, x64: bool) -> np.dtype | None:
    """The dtype of NumPy whose bytes are those of torch's; None where JAX has another in this mode,
    or NumPy none.
    """
    if dtype not in _PLAIN or (not x64 and dtype in (torch.float64, torch.int64)):
        return None
    return np.dtype(str(dtype).removeprefix("torch."))
