"""The traced tensor: a torch tensor by shape and dtype, a JAX array by value, with torch's views
and in-place writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch2jax

from etrace_bridge.frontend.ops.dtypes import to_torch_dtype
from etrace_bridge.frontend.views import (
    distinct,
    needs_copy,
    read_positions,
    write_numbers,
    write_positions,
)

ViewFunction = Callable[[Any], Any]
STATE, INPUT = 1, 2
_CPU = torch.device("cpu")


class TracedTensor(torch.Tensor, torch2jax.Torchish):
    """A torch tensor without memory whose value is a JAX array.

    Torch sees a tensor of the right shape and dtype, so user code and torch's own Python run on it
    unchanged; every operation on it arrives at `dispatch.dispatch`, which computes on `value`.

    Attributes:
        base: The tensor this one is a view of, or None.
        origin: What the value depends on: `STATE`, `INPUT`, both or neither; parameters and
            constants do not count.
        differentiable: Torch would say `requires_grad`: floating and not detached.
    """

    base: TracedTensor | None
    origin: int
    differentiable: bool

    @staticmethod
    def __new__(cls, value: Any, **_: Any) -> TracedTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, value.shape, dtype=torch_dtype(value.dtype), device=_CPU
        )

    def __init__(
        self,
        value: Any,
        *,
        base: TracedTensor | None = None,
        view: ViewFunction | None = None,
        may_copy: str | None = None,
        origin: int = 0,
        differentiable: bool = True,
    ) -> None:
        self._value = value
        self._version_seen = 0
        self._writes = 0
        self._view = view
        self._may_copy = may_copy
        self.base = base
        self.origin = origin
        self.differentiable = differentiable and jnp.issubdtype(value.dtype, jnp.inexact)
        if base is not None:
            self._version_seen = base.root._writes

    @property
    def value(self) -> Any:
        """The JAX array; a view reads its base again after the base was written."""
        if (
            self.base is not None
            and self._view is not None
            and self._version_seen != self.root._writes
        ):
            self._part_from_copied()
            if self.base is not None:
                self._value = self._view(self.base.value)
                self._version_seen = self.root._writes
        return self._value

    def _part_from_copied(self) -> None:
        """Let this view, and those that it is a view of, be tensors of their own where torch copied
        the elements: that is asked when memory was written, since else it makes no difference.
        """
        if self.base is None:
            return
        self.base._part_from_copied()
        if self._may_copy is not None and self._is_copied():
            self.base = self._view = None
            self._version_seen = 0
        self._may_copy = None

    def _is_copied(self) -> bool:
        """Return whether torch copied this view's elements, by where they lie in memory."""
        base = cast(TracedTensor, self.base)
        root, shown = base.root._value, base._value
        if jnp.iscomplexobj(root) != jnp.iscomplexobj(shown):  # every other number in memory
            return self._may_copy == "contiguous"
        with jax.ensure_compile_time_eval():
            places = np.asarray(base._follow(jnp.arange(root.size).reshape(root.shape)))
        first = (0,) * places.ndim
        strides = [
            int(places[(*first[:i], 1, *first[i + 1 :])] - places[first]) if size > 1 else 0
            for i, size in enumerate(places.shape)
        ]
        wanted = None if self._may_copy == "contiguous" else self._value.shape
        return needs_copy(strides, shown.shape, wanted)

    @property
    def root(self) -> TracedTensor:
        """The tensor that owns the memory."""
        tensor = self
        while tensor.base is not None:
            tensor = tensor.base
        return tensor

    def write(self, value: Any, *, origin: int = 0) -> None:
        """Replace the value in place; through a view, write the positions that it shows into the
        owner of the memory.
        """
        self._part_from_copied()
        root = self.root
        root.origin |= origin
        self.origin |= origin
        if root is self:
            self._value = value
        elif jnp.iscomplexobj(root._value) or jnp.iscomplexobj(self._value):
            root._value = write_numbers(root.value, self._follow, value)
        else:
            root._value = write_positions(root.value, self._positions(root), value)
        root._writes += 1
        if root is not self:
            self._value, self._version_seen = value, root._writes

    def _positions(self, root: TracedTensor) -> np.ndarray:
        """Give, for each element of this view, its position in the flat root."""
        with jax.ensure_compile_time_eval():
            positions = np.asarray(
                self._follow(jnp.arange(root._value.size).reshape(root._value.shape))
            )
        return distinct(positions)

    def _follow(self, array: Any) -> Any:
        """Apply to an array in the place of the root the operations that lead from there to this
        view.
        """
        chain, tensor = [], self
        while tensor.base is not None:
            chain.append(tensor._view)
            tensor = tensor.base
        for view in reversed(chain):
            array = view(array)
        return array

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        from etrace_bridge.frontend.dispatch import dispatch  # which imports this class

        return dispatch(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        from etrace_bridge.frontend.dispatch import dispatch_aten

        return dispatch_aten(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"TracedTensor(shape={tuple(self._value.shape)}, dtype={self._value.dtype})"


def strided_view(
    tensor: torch.Tensor, owner: TracedTensor, stop_gradient: bool = False
) -> TracedTensor:
    """Make the traced view of `owner` (the whole storage, flat) that corresponds to a plain
    tensor's view of its storage.
    """
    positions = (
        torch.arange(owner._value.size)
        .as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        .numpy()
    )

    def view(flat: Any) -> Any:
        value = read_positions(flat, positions)
        return jax.lax.stop_gradient(value) if stop_gradient else value

    return TracedTensor(
        view(owner.value),
        base=owner,
        view=view,
        origin=owner.origin,
        differentiable=not stop_gradient,
    )


def torch_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype that a traced value has; without x64, JAX's default integer stands for
    torch's `int64`.
    """
    found = to_torch_dtype(dtype)
    if found == torch.int32 and not jax.config.jax_enable_x64:
        return torch.int64
    return found
