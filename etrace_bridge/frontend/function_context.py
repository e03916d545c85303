"""The `ctx` of an `autograd.Function` while its code is traced."""

from __future__ import annotations

from typing import Any

import torch

from etrace_bridge.frontend import messages
from etrace_bridge.frontend.tracer import active


class Context:
    """Replaces the `ctx` of an `autograd.Function`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()
        self.materialize_grads = True
        self.non_differentiable: tuple = ()
        self.dirty: tuple = ()
        self.output_grad_dtypes: tuple[torch.dtype | None, ...] = ()

    def __getattr__(self, name: str) -> Any:
        """Raise for attributes that torch's `ctx` has and this one does not; any other missing name
        is an ordinary AttributeError.
        """
        if hasattr(torch.autograd.function.BackwardCFunction, name):
            raise messages.context_attribute(name, active().place())
        raise AttributeError(name)

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep tensors for `backward`."""
        self.saved_tensors = tensors

    @property
    def saved_variables(self) -> tuple:
        """The old name of `saved_tensors`."""
        return self.saved_tensors

    @property
    def input_grad_buffers(self) -> tuple[None, ...]:
        """Buffers to add gradients to: none here, so `backward` returns them, as it does in torch
        when it runs first.
        """
        return (None,) * len(self.needs_input_grad)

    def save_for_forward(self, *tensors: Any) -> None:
        """Ignore tensors for `jvp`, which is not used: the gradient comes from `backward`."""

    def mark_dirty(self, *tensors: Any) -> None:
        """Note inputs that `forward` wrote in place."""
        self.dirty = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Note outputs without gradient."""
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Choose between zeros and None for missing gradients; here they are always zeros."""
        self.materialize_grads = value

    def set_output_grad_dtype(self, *dtypes: torch.dtype | None) -> None:
        """Choose the dtype in which `backward` gets the gradient of each returned value; None for
        that of the gradient.
        """
        self.output_grad_dtypes = dtypes
