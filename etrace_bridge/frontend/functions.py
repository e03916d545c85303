"""Intercept every call of a `torch.autograd.Function` while tracing, however its `apply` was bound.

Which class defines `apply`, and whether it is Python or C, differs between torch versions, and
`spike = Spike.apply` keeps the method it was given. What every version does inside `apply` is the
contract of a Function: look up `cls._backward_cls` and make `ctx` from it, turn gradients off, look
up `cls.forward` and call it, then `cls.setup_context` if the class defines it. So the bridge
answers these lookups on the class and leaves `apply` alone. `canary.py` checks that torch still
makes them.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import Function

from etrace_bridge.frontend.autograd import apply_function, defines_setup_context, plain_attribute
from etrace_bridge.frontend.tracer import Tracer, current, tensors_in

_meta = type(Function)
_local = threading.local()


@contextlib.contextmanager
def intercepted_functions() -> Iterator[None]:
    """Send Functions that are applied to traced tensors to `apply_function`; the caller holds
    `calls.LOCK`.
    """
    if _meta.__getattribute__ is _lookup:  # a trace inside a trace
        yield
        return
    _meta.__getattribute__ = _lookup
    try:
        yield
    finally:
        del _meta.__getattribute__


def _lookup(cls: type, name: str) -> Any:
    """Return a class attribute of a Function; in a thread that is tracing, the bridge's version of
    what `apply` calls.
    """
    value = plain_attribute(cls, name)
    tracer = current() if name in ("_backward_cls", "forward", "setup_context") else None
    if tracer is None:
        return value
    if name == "_backward_cls":
        # Of the caller: torch turns gradients off next
        _local.applied = cls, torch.is_grad_enabled()
        return value
    if name == "forward":
        return _bridged_forward(tracer, cls, value)
    return _bridged_setup(tracer, value) if defines_setup_context(cls) else value


def _bridged_forward(tracer: Tracer, cls: type, forward: Callable) -> Callable:
    """Replace `forward`: if `apply` calls it with a traced tensor, run the whole call on JAX
    values.
    """

    @functools.wraps(forward)
    def bridged(*args: Any, **kwargs: Any) -> Any:
        applied, grad_enabled = getattr(_local, "applied", (None, False))
        _local.applied = None, False
        given = args if defines_setup_context(cls) else args[1:]
        # called by its name, or on constants
        if applied is not cls or not _any_traced(tracer, given):
            return forward(*args, **kwargs)
        with torch.set_grad_enabled(grad_enabled):
            result = apply_function(cls, given, kwargs)
        if not defines_setup_context(cls):
            args[0].mark_non_differentiable(*tensors_in(result))
        return result

    return bridged


def _bridged_setup(tracer: Tracer, setup_context: Callable) -> Callable:
    """Replace `setup_context`, which `apply_function` has already run on its own `ctx`."""

    @functools.wraps(setup_context)
    def bridged(ctx: Any, inputs: tuple, output: Any) -> None:
        if isinstance(ctx, torch.autograd.function.FunctionCtx) and _any_traced(tracer, inputs):
            # torch need not record what JAX differentiates
            ctx.mark_non_differentiable(*tensors_in(output))
        else:
            setup_context(ctx, inputs, output)

    return bridged


def _any_traced(tracer: Tracer, args: tuple) -> bool:
    return any(isinstance(a, torch.Tensor) and tracer.find(a) is not None for a in args)
