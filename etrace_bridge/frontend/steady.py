"""Run a bridged module step after step with the least overhead: values in plain lists, brainstate's
states written on request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.frontend.borders import to_jax
from etrace_bridge.frontend.ops.ranges import check_ranges
from etrace_bridge.frontend.step import TracedStep, pack_output


class SteadyStep:
    """The compiled step of a bridged module with its own copies of weights and states; made by
    `BridgedModule.steady_step`.

    Calling it runs one step. The module's own states stay as they were until `write_back`; the
    weights are those at the time it was made.
    """

    def __init__(
        self,
        step: TracedStep,
        tensors: Sequence[Any],
        states: Sequence[Any],
        key: Any,
        write: Callable[..., None],
    ) -> None:
        self._step, self._write = step, write
        self._tensors = list(tensors)
        self._states = list(states)
        self._key = [] if key is None else [key]
        inputs = step.jaxpr.in_avals[len(self._tensors) + len(self._states) + len(self._key) :]
        self._shapes = [aval.shape for aval in inputs]
        self._dtypes = [aval.dtype for aval in inputs]
        self._end = step.num_outputs + len(self._states)

    def __call__(self, *inputs: Any) -> Any:
        """Run one step on torch tensors, NumPy or JAX arrays, `(batch, ...)` each; return what
        `net(x)` returns.
        """
        # A copy: JAX may read the memory of a NumPy array after the call has returned, when torch
        # has changed it already.
        values = [_copied(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        if [v.shape for v in values] != self._shapes or [v.dtype for v in values] != self._dtypes:
            raise InputError(
                f"This step takes inputs of shapes {self._shapes} and dtypes "
                f"{[str(d) for d in self._dtypes]}, and got {[tuple(v.shape) for v in values]}, "
                f"{[str(v.dtype) for v in values]}. Make one for these with `net.steady_step(x)`."
            )
        if self._step.ranges:
            check_ranges(self._step.ranges, values, "input")
        results = self._step.compiled(*self._tensors, *self._states, *self._key, *values)
        self._states, self._key = results[self._step.num_outputs : self._end], results[self._end :]
        return pack_output(self._step, results[: self._step.num_outputs])

    def write_back(self) -> None:
        """Put the current states into the module."""
        self._write(self._states, self._key)

    @property
    def states(self) -> list[jax.Array]:
        """The current states, in the order of the step."""
        return list(self._states)


def _copied(x: torch.Tensor) -> Any:
    # What NumPy can read as it is
    plain = x.dtype != torch.bfloat16 and not x.is_conj() and not x.is_neg()
    return x.detach().numpy().copy() if plain else to_jax(x)
