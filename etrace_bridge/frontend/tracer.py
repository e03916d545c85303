"""What is known while torch code is traced: which tensors stand for traced ones, and the current
module.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

from etrace_bridge.frontend import locate, messages
from etrace_bridge.frontend.borders import to_jax
from etrace_bridge.frontend.calls import plain_call
from etrace_bridge.frontend.masked import MaskedTensor
from etrace_bridge.frontend.ops.dtypes import cast
from etrace_bridge.frontend.tensor import TracedTensor, strided_view

_active = threading.local()


def current() -> Tracer | None:
    """Return the tracer of this thread, or None if nothing is being traced."""
    return getattr(_active, "tracer", None)


def active() -> Tracer:
    """Return the tracer of this thread, which must be tracing."""
    tracer = current()
    if tracer is None:
        raise messages.escaped_tensor("a traced operation")
    return tracer


@contextlib.contextmanager
def activated(tracer: Tracer) -> Iterator[None]:
    """Make a tracer this thread's current one."""
    previous, _active.tracer = current(), tracer
    try:
        yield
    finally:
        _active.tracer = previous


class Tracer:
    """What is known while one piece of torch code is traced.

    Attributes:
        paths: Module path by `id(module)`.
        on_module_call: Called as `(module, *args, **kwargs)` in place of a module's plain call.
        make_key: Gives random ops their keys, or None.
    """

    def __init__(
        self,
        paths: dict[int, str] | None = None,
        on_module_call: Callable = plain_call,
        make_key: Callable[[], Any] | None = None,
    ) -> None:
        self.paths = paths or {}
        self.on_module_call = on_module_call
        self.make_key = make_key
        self.scope: list[str] = []
        self.functions: dict[Any, Any] = {}  # autograd Functions traced so far
        self.comparisons: dict[Any, Any] = {}  # comparisons computed so far
        # by `id`: a value, and the same without gradient (`x.data`)
        self.data_values: dict[int, tuple[Any, Any]] = {}
        # An autograd Function gives its own gradient: no need to stop one inside
        self.inside_function = False
        self._tracked: dict[int, tuple[torch.Tensor, TracedTensor]] = {}
        self._storages: dict[int, tuple[torch.Tensor, TracedTensor]] = {}
        self._read_only: dict[int, str] = {}
        self._used_constants: set[int] = set()  # storages of plain tensors that were read

    def track(
        self, tensor: torch.Tensor, traced: TracedTensor, *, read_only: str | None = None
    ) -> None:
        """Register a plain tensor (a parameter, a buffer) as standing for a traced one; `read_only`
        names a parameter.
        """
        self._tracked[id(tensor)] = (tensor, traced)
        storage = _storage(tensor)
        if storage is not None:
            self._storages.setdefault(storage, (tensor, traced))
        if read_only is not None:
            self._read_only[id(traced)] = read_only

    def find(self, tensor: torch.Tensor) -> TracedTensor | None:
        """Return the traced tensor that a tensor is or stands for, or None for a constant."""
        if isinstance(tensor, TracedTensor):
            return tensor
        found = self._tracked.get(id(tensor))
        if found is not None:
            return found[1]
        try:
            storage = _storage(tensor) if self._storages else None
        except NotImplementedError as error:
            raise messages.inside_a_transform(self.place()) from error
        owner = None if storage is None else self._storages.get(storage)
        return None if owner is None else self._alias(tensor, *owner)

    def traced(self, tensor: torch.Tensor) -> TracedTensor:
        """Return the traced tensor that a tensor is or stands for; a constant becomes one."""
        found = self.find(tensor)
        return self.promote(tensor) if found is None else found

    def _alias(
        self, tensor: torch.Tensor, plain: torch.Tensor, owner: TracedTensor
    ) -> TracedTensor:
        """Make the traced tensor of a plain one that shares the memory of a tracked one
        (`weight.data`, an old view).
        """
        with torch._C.DisableTorchFunction():
            return self._make_alias(tensor, plain, owner)

    def _make_alias(
        self, tensor: torch.Tensor, plain: torch.Tensor, owner: TracedTensor
    ) -> TracedTensor:
        if tensor.dtype != plain.dtype or not plain.is_contiguous() or plain.storage_offset() != 0:
            raise messages.unfollowed_view(
                "a tensor shares the memory of a parameter or buffer in another layout",
                self.place(),
            )
        flat = TracedTensor(
            lax.reshape(owner.value, (owner.value.size,)),
            base=owner,
            origin=owner.origin,
            view=lambda v: v.reshape(-1),
        )
        # `weight.data`, `weight.detach()`
        constant_alias = isinstance(plain, nn.Parameter) and not tensor.requires_grad
        alias = strided_view(tensor, flat, stop_gradient=constant_alias)
        self._tracked[id(tensor)] = (tensor, alias)
        return alias

    def promote(self, tensor: torch.Tensor) -> TracedTensor:
        """Make a constant tensor traced because traced values are written into it."""
        with torch._C.DisableTorchFunction():
            return self._make_traced(tensor)

    def _make_traced(self, tensor: torch.Tensor) -> TracedTensor:
        if (
            tensor.is_contiguous()
            and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        ):
            self.track(
                tensor,
                TracedTensor(
                    constant(tensor),
                    differentiable=tensor.is_floating_point() or tensor.is_complex(),
                ),
            )
            return self._tracked[id(tensor)][1]
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = torch.as_strided(tensor.detach(), (size,), (1,), 0)
        self.track(
            whole,
            TracedTensor(
                constant(whole), differentiable=tensor.is_floating_point() or tensor.is_complex()
            ),
        )
        view = strided_view(tensor, self._tracked[id(whole)][1])
        self._tracked[id(tensor)] = (tensor, view)
        return view

    def read(self, tensor: torch.Tensor) -> Any:
        """Return the JAX value of any tensor."""
        traced = self.find(tensor)
        if isinstance(traced, MaskedTensor):
            raise messages.masked_selection("the model", traced.place, self.place())
        if traced is not None:
            return traced.value
        with torch._C.DisableTorchFunction():
            requires_grad = tensor.requires_grad
        if requires_grad:
            raise messages.captured_tensor(tensor, self.place())
        self.note_constants(tensor)
        return constant(tensor)

    def note_constants(self, value: Any) -> None:
        """Note that torch computes with plain tensors."""
        self._used_constants.update(
            storage for t in tensors_in(value) if (storage := _storage(t)) is not None
        )

    def used_constant(self, tensor: torch.Tensor) -> bool:
        """Return whether a plain tensor was read as a constant."""
        return _storage(tensor) in self._used_constants

    def refuse_parameter_write(self, target: TracedTensor) -> None:
        """Raise if an in-place write would change a parameter."""
        name = self._read_only.get(id(target.root))
        if name is not None:
            raise messages.parameter_write(name, self.place())

    def call_module(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        """Call a module inside the JAX name scope of its torch path; scopes nest, so each adds only
        its last part.
        """
        path = self.paths.get(id(module))
        if path is None:
            return plain_call(module, *args, **kwargs)
        outer = self.scope[-1] + "." if self.scope and self.scope[-1] else ""
        self.scope.append(path)
        try:
            with jax.named_scope(path.removeprefix(outer)) if path else contextlib.nullcontext():
                return self.on_module_call(module, *args, **kwargs)
        finally:
            self.scope.pop()

    def place(self) -> str:
        """Describe where in the model the trace is: the module's path and the user's line."""
        return (
            f"module `{self.scope[-1] or '(root)'}`, {locate.user_line()}"
            if self.scope
            else locate.user_line()
        )


def _storage(tensor: torch.Tensor) -> int | None:
    """Return the address of a tensor's memory, or None if it has none."""
    with torch._C.DisableTorchFunction():
        if tensor.layout != torch.strided or tensor.numel() == 0:
            return None
        return tensor.untyped_storage().data_ptr()


def constant(tensor: torch.Tensor) -> Any:
    """Turn a plain tensor into a JAX constant.

    A tensor of one repeated value becomes a fill, not an array in the program.
    """
    with torch._C.DisableTorchFunction():
        return _constant(tensor)


def _constant(tensor: torch.Tensor) -> Any:
    value = (
        np.asarray(tensor.detach().resolve_conj().numpy(force=True))
        if tensor.dtype != torch.bfloat16
        else None
    )
    if value is None or value.size == 0:
        return to_jax(tensor)
    dtype = jnp.dtype(cast(value.flat[0].item(), tensor.dtype).dtype)
    first = value.flat[0]
    if value.size > 1 and np.all(value == first):
        return lax.full(value.shape, np.asarray(first, dtype), dtype)
    return jnp.array(value, dtype=dtype)


# ---- tensors nested in arguments


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step))


def map_tensors(function: Callable, value: Any) -> Any:
    """Replace the tensors in nested arguments."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[map_tensors(function, item) for item in value])
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(function, item) for item in value])
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(
            *[map_tensors(function, item) for item in (value.start, value.stop, value.step)]
        )
    return value
