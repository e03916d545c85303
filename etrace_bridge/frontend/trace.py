"""Run torch's own code on JAX values: the trace of a piece of torch code, and a torch function as a
JAX function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from etrace_bridge._jax_compat import evaluate_jaxpr
from etrace_bridge.frontend.borders import to_jax
from etrace_bridge.frontend.calls import LOCK, as_written, intercepted_calls
from etrace_bridge.frontend.complex import is_complex, split_complex
from etrace_bridge.frontend.dispatch import BridgeMode
from etrace_bridge.frontend.functions import intercepted_functions
from etrace_bridge.frontend.ops import registry
from etrace_bridge.frontend.tensor import TracedTensor
from etrace_bridge.frontend.tracer import Tracer, activated, map_tensors


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Keep torch from oneDNN's float32 layers, each of which is one op that it cannot take apart.

    `torch.backends.mkldnn` may forbid to set its flag alone, and warns where all are set.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


@contextlib.contextmanager
def tracing(tracer: Tracer) -> Iterator[Tracer]:
    """Send this thread's torch calls to the tracer in this context.

    Gradients are on, and calls of modules and of `autograd.Function` are intercepted.
    """
    with LOCK, contextlib.ExitStack() as stack:
        stack.enter_context(activated(tracer))
        stack.enter_context(intercepted_calls(tracer.call_module))
        stack.enter_context(intercepted_functions())
        stack.enter_context(torch.enable_grad())
        # TorchScript's optimised programs run with gradients off and differentiate by themselves:
        # every step would be constant.
        stack.enter_context(torch.jit.optimized_execution(False))
        stack.enter_context(_without_onednn())
        stack.enter_context(as_written())
        if tracer.make_key is not None:
            stack.enter_context(registry.key_source(tracer.make_key))
        stack.enter_context(BridgeMode())
        yield tracer


def trace_function(function: Callable) -> Callable:
    """Turn a torch callable on tensors into a JAX callable on arrays.

    For losses and other stateless torch code: `F.mse_loss`, an `nn.CrossEntropyLoss()`, a lambda.
    Inputs that are arrays or tensors are traced; everything else is passed as it is. Parameters of
    a module are constants.

    Args:
        function: The torch callable.

    Returns:
        A function of JAX arrays (nested in tuples, lists, dicts) that gives JAX arrays in the
        structure torch returned.
    """

    def run(args: Any, kwargs: Any) -> Any:
        tracer = Tracer()
        if isinstance(function, nn.Module):
            for parameter in function.parameters():
                tracer.track(parameter, TracedTensor(to_jax(parameter)))
        wrap = lambda x: TracedTensor(x) if isinstance(x, jax.Array) else x
        with tracing(tracer):
            result = function(*jax.tree.map(wrap, args), **jax.tree.map(wrap, kwargs))
            return map_tensors(tracer.read, result)

    def traced(*args: Any, **kwargs: Any) -> Any:
        as_array = lambda x: (
            to_jax(x) if isinstance(x, (jax.Array, np.ndarray, torch.Tensor)) else x
        )
        args, kwargs = jax.tree.map(
            as_array, (args, kwargs), is_leaf=lambda x: isinstance(x, torch.Tensor)
        )
        if any(isinstance(x, jax.Array) and is_complex(x) for x in jax.tree.leaves((args, kwargs))):
            return _in_real_numbers(run, args, kwargs)
        return run(args, kwargs)

    return traced


def _in_real_numbers(run: Callable, args: Any, kwargs: Any) -> Any:
    """Run a traced function of complex arrays by real and imaginary parts, so that its derivatives
    are torch's.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    found: list[Any] = []

    def flat(*values: Any) -> list[Any]:
        given = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            given[i] = value
        results, structure = jax.tree.flatten(run(*jax.tree.unflatten(tree, given)))
        found[:] = [structure, [None if isinstance(r, jax.Array) else r for r in results]]
        return [r for r in results if isinstance(r, jax.Array)]

    values = [leaves[i] for i in arrays]
    closed = jax.make_jaxpr(flat)(*values)
    closed = split_complex(closed, [False] * len(values), [False] * len(closed.jaxpr.outvars))
    waiting, (structure, results) = iter(evaluate_jaxpr(closed, *values)), found
    return jax.tree.unflatten(structure, [next(waiting) if r is None else r for r in results])
