"""Running torch's own code on JAX values: the trace of a piece of torch code, and a torch function as a JAX function."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from etrace_bridge.frontend import autograd
from etrace_bridge.frontend.borders import to_jax
from etrace_bridge.frontend.calls import LOCK, intercepted_calls
from etrace_bridge.frontend.dispatch import BridgeMode
from etrace_bridge.frontend.ops import registry
from etrace_bridge.frontend.tensor import TracedTensor
from etrace_bridge.frontend.tracer import Tracer, activated, map_tensors


@contextlib.contextmanager
def tracing(tracer: Tracer) -> Iterator[Tracer]:
    """Send this thread's torch calls to the tracer; gradients on, module calls and `autograd.Function` seen."""
    with LOCK, contextlib.ExitStack() as stack:
        stack.enter_context(activated(tracer))
        stack.enter_context(intercepted_calls(tracer.call_module))
        stack.enter_context(autograd.intercepted())
        stack.enter_context(torch.enable_grad())
        # TorchScript's optimised programs run with gradients off and differentiate by themselves: every step would be constant.
        stack.enter_context(torch.jit.optimized_execution(False))
        if tracer.make_key is not None:
            stack.enter_context(registry.key_source(tracer.make_key))
        stack.enter_context(BridgeMode())
        yield tracer


def trace_function(function: Callable) -> Callable:
    """Turn a torch callable on tensors into a JAX callable on arrays.

    For losses and other stateless torch code: `F.mse_loss`, an `nn.CrossEntropyLoss()`, a lambda. Inputs that are arrays or
    tensors are traced; everything else is passed as it is. Parameters of a module are taken as constants.

    Args:
        function: The torch callable.

    Returns:
        A function of JAX arrays (nested in tuples, lists, dicts) that gives JAX arrays in the structure torch returned.
    """

    def traced(*args: Any, **kwargs: Any) -> Any:
        tracer = Tracer()
        if isinstance(function, nn.Module):
            for parameter in function.parameters():
                tracer.track(parameter, TracedTensor(to_jax(parameter)))
        as_array = lambda x: to_jax(x) if isinstance(x, (jax.Array, np.ndarray, torch.Tensor)) else x  # noqa: E731
        args, kwargs = jax.tree.map(as_array, (args, kwargs), is_leaf=lambda x: isinstance(x, torch.Tensor))
        wrap = lambda x: TracedTensor(x) if isinstance(x, jax.Array) else x  # noqa: E731
        with tracing(tracer):
            result = function(*jax.tree.map(wrap, args), **jax.tree.map(wrap, kwargs))
            return map_tensors(tracer.read, result)

    return traced
