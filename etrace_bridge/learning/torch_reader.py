"""Reading torch tensors for JAX: their own memory, or copies that torch does not reach."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence

import jax
import numpy as np
import torch

from etrace_bridge.frontend import to_jax, to_real_jax

Array = np.ndarray | jax.Array

_ALIGNMENT = 64  # bytes; JAX's programs take an array that begins there as it is
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
    """Reads some parameters or buffers again and again.

    Args:
        tensors: the tensors. Complex ones are read as the step holds them, in pairs.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        count = len(self.tensors)
        self._views: list[Array] = [np.empty(0)] * count
        self._origins: list[tuple | None] = [None] * count
        self._copies: list[Array] = []
        self._versions: list[int] | None = None

    def views(self) -> list[Array]:
        """The tensors' own memory as far as NumPy can show it: for programs that have ended before
        torch goes on.
        """
        for n, tensor in enumerate(self.tensors):
            origin = tensor.data_ptr(), tensor.dtype, tensor.shape
            if self._origins[n] != origin or not tensor.is_contiguous():
                self._origins[n] = origin if is_plain(tensor) else None
                self._views[n] = to_real_jax(tensor) if tensor.is_complex() else view_tensor(tensor)
        return list(self._views)

    def copies(self) -> list[Array]:
        """The tensors' values of now, in memory that nothing writes to; the same arrays as long as
        torch changes none of the tensors.

        Version counters alone do not tell: torch's fused optimizers and writes through `.data`
        leave them as they are. So tensors whose counters have not moved are compared with their
        copies. Tensors that are not plain are copied every time.
        """
        versions = [tensor._version for tensor in self.tensors]
        views = self.views()
        if versions != self._versions or not self._are_current(views):
            self._versions, self._copies = versions, copy_arrays(views)
        return self._copies

    def _are_current(self, views: Sequence[Array]) -> bool:
        return None not in self._origins and all(
            view.shape == copy.shape
            and view.dtype == copy.dtype
            and not _compare(tensor.data_ptr(), copy.ctypes.data, copy.nbytes)
            for tensor, view, copy in zip(self.tensors, views, self._copies, strict=True)
        )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are those that JAX wants, in the order of its elements."""
    return (
        _has_plain_dtype(tensor.dtype, jax.config.jax_enable_x64)
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


@functools.cache
def _has_plain_dtype(dtype: torch.dtype, x64: bool) -> bool:
    """Whether NumPy has this dtype, and JAX in this mode too."""
    return dtype in _PLAIN and (x64 or dtype not in (torch.float64, torch.int64))


def view_tensor(tensor: torch.Tensor) -> Array:
    """A tensor's memory for JAX, where it is plain; a copy elsewhere."""
    return tensor.detach().numpy() if is_plain(tensor) else to_jax(tensor)


def copy_arrays(arrays: Sequence[Array]) -> list[Array]:
    """Copies of NumPy arrays in one block of memory, aligned so that a jitted function takes them
    as they are. JAX arrays do not change and are given back.
    """
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        if isinstance(array, np.ndarray):
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    block = np.empty(end + _ALIGNMENT, np.uint8)
    first = -block.ctypes.data % _ALIGNMENT
    copies = []
    for array, start in zip(arrays, starts, strict=True):
        if isinstance(array, np.ndarray):
            copy = np.ndarray(array.shape, array.dtype, block, first + start)
            copy[...] = array
            array = copy
        copies.append(array)
    return copies
