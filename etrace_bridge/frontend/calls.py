"""Intercept every call of a torch module in this thread, without changing the module."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# Patching `nn.Module.__call__` is global: one thread at a time, and others pass straight through.
LOCK = threading.RLock()
Handler = Callable[[nn.Module, tuple, dict], Any]
_local = threading.local()
plain_call = nn.Module.__call__


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    handler = getattr(_local, "handler", None)
    return plain_call(module, *args, **kwargs) if handler is None else handler(module, args, kwargs)


@contextlib.contextmanager
def intercepted_calls(handler: Handler) -> Iterator[None]:
    """Send module calls of this thread to `handler(module, args, kwargs)`, which may use
    `plain_call` to go on.
    """
    with LOCK:
        outer_call, outer_handler = nn.Module.__call__, getattr(_local, "handler", None)
        nn.Module.__call__, _local.handler = _call, handler
        try:
            yield
        finally:
            nn.Module.__call__, _local.handler = outer_call, outer_handler


def as_written() -> contextlib.AbstractContextManager:
    """Run code that `torch.compile` has compiled as it was written.

    Does nothing where `torch.compile` was never used, because importing it takes long.
    """
    return (
        torch.compiler.set_stance("force_eager")
        if "torch._dynamo" in sys.modules
        else contextlib.nullcontext()
    )


class DefinedMemory(TorchFunctionMode):
    """Fills uninitialised tensors with NaN, so that two runs of a model can be compared even if it
    returns memory that it never writes.
    """

    _CREATE = {
        torch.empty,
        torch.empty_like,
        torch.empty_strided,
        torch.Tensor.new_empty,
        torch.Tensor.new_empty_strided,
    }

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self._CREATE and type(out) is torch.Tensor and out.device.type != "meta":
            with torch.no_grad():
                out.fill_(float("nan") if out.is_floating_point() or out.is_complex() else 0)
        return out
