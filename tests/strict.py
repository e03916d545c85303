"""Tests run without implicit promotion: JAX promotes neither dtypes nor ranks by itself.

In the package either would be an oversight. Users may write `x @ w + b`, so a brainstate module
that is not the package's own is made and runs with JAX's defaults.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import brainstate
import jax
import optax


@contextlib.contextmanager
def promotion(*, implicit: bool) -> Iterator[None]:
    """Let JAX promote dtypes and ranks in this context, or make it an error."""
    dtypes, ranks = ("standard", "allow") if implicit else ("strict", "raise")
    with jax.numpy_dtype_promotion(dtypes), jax.numpy_rank_promotion(ranks):
        yield


def run_tests_strictly() -> None:
    """Make implicit promotion an error in this process, except in code of users and libraries."""
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    made_by: Any = type(brainstate.nn.Module)
    made_by.__call__ = _as_users_run_it(made_by.__call__)
    brainstate.nn.Module.__call__ = _as_users_run_it(brainstate.nn.Module.__call__)
    # Adam raises a float to an integer power
    optax.tree.bias_correction = promotion(implicit=True)(optax.tree.bias_correction)


def _as_users_run_it(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        kind = module if isinstance(module, type) else type(module)
        is_ours = kind.__module__.split(".")[0] == "etrace_bridge"
        with promotion(implicit=not is_ours):
            return call(module, *args, **kwargs)

    return run
