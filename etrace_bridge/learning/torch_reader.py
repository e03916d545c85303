"""Read torch tensors for JAX: their own memory, or copies that torch does not reach."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable

import jax
import numpy as np
import torch

from etrace_bridge.frontend import to_jax, to_real_jax

Array = np.ndarray | jax.Array

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
_compare = ctypes.CDLL(None).memcmp
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class TensorReader:
    """Reads the same parameters or buffers again and again.

    Args:
        tensors: the tensors. Complex ones are read as the step holds them, in pairs.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        count = len(self.tensors)
        self._views: list[Array] = [np.empty(0)] * count
        self._origins: list[tuple | None] = [None] * count
        self._kept: list[Array] = []
        self._states: list[tuple] | None = None

    def views(self) -> list[Array]:
        """Return arrays that show what the tensors' memory holds at any time, or copies where that
        is impossible.

        They are for programs that end before torch continues.
        """
        for n, tensor in enumerate(self.tensors):
            origin = tensor.data_ptr(), tensor.dtype, tensor.shape
            if self._origins[n] != origin or not tensor.is_contiguous():
                self._origins[n] = origin if is_plain(tensor) else None
                self._views[n] = (
                    to_real_jax(tensor) if tensor.is_complex() else _share(view_tensor(tensor))
                )
        return list(self._views)

    def copies(self) -> list[Array]:
        """Return the tensors' current values, in memory that nothing writes to.

        The arrays are the same objects as long as torch changes none of the tensors.
        """
        return self.kept() or self.keep([np.array(view) for view in self.views()])

    def keep(self, copies: list[Array]) -> list[Array]:
        """Store copies of the tensors' current values and return them."""
        self._kept, self._states = copies, list(map(_state, self.tensors))
        return copies

    def kept(self) -> list[Array] | None:
        """Return the copies that `keep` stored, if torch has changed none of the tensors since.

        Version counters alone do not tell: torch's fused optimizers and writes through `.data`
        leave them as they are. So tensors whose counters are unchanged are compared with their
        copies. Only plain tensors and copies in host memory are compared; others count as changed.
        """
        if self._states != list(map(_state, self.tensors)):
            return None
        for tensor, copy in zip(self.tensors, self._kept, strict=True):
            memory = _host_memory_of(copy) if is_plain(tensor) else None
            if memory is None or _compare(tensor.data_ptr(), *memory):
                return None
        return self._kept


def _state(tensor: torch.Tensor) -> tuple:
    return tensor._version, tensor.dtype, tensor.shape


def _share(view: Array) -> Array:
    """Return a NumPy array as a JAX array with the same memory, which programs accept faster.

    Where JAX would copy it, the NumPy array is returned.
    """
    if not isinstance(view, np.ndarray):
        return view
    shared = jax.device_put(view, may_alias=True)
    return shared if _host_memory_of(shared) == _host_memory_of(view) else view


def _host_memory_of(array: Array) -> tuple[int, int] | None:
    """Return address and number of bytes; None for an array in another device's memory."""
    if isinstance(array, np.ndarray):
        return array.ctypes.data, array.nbytes
    if any(device.platform != "cpu" for device in array.devices()):
        return None
    return array.unsafe_buffer_pointer(), array.nbytes


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether JAX can use a tensor's bytes as they are, in the order of its elements."""
    return (
        _has_plain_dtype(tensor.dtype, jax.config.jax_enable_x64)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


@functools.cache
def _has_plain_dtype(dtype: torch.dtype, x64: bool) -> bool:
    """Return whether NumPy has this dtype, and JAX too in the current mode."""
    return dtype in _PLAIN and (x64 or dtype not in (torch.float64, torch.int64))


def view_tensor(tensor: torch.Tensor) -> Array:
    """Return a tensor's memory as an array for JAX where it is plain, a copy elsewhere."""
    return tensor.detach().numpy() if is_plain(tensor) else to_jax(tensor)
