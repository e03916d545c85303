"""What the learner returns; values leave the device when they are read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch

from etrace_bridge.frontend import to_torch
from etrace_bridge.learning.processes import own_part, raise_if_lost


@dataclass(frozen=True)
class Discarded:
    """How far a gradient is from exact RTRL's because of what the rule discards, rounding aside.

    A rule that stores its memory in fewer bits than the states reports None instead.

    Norms are those of all weights' gradients together. Exact RTRL means the same states and weights
    at every step; while weights do not change, its gradient is that of BPTT.

    Attributes:
        estimate: the relative error to be expected.
        bound: a relative error that is never exceeded; infinite where what was cut off may be as
            large as the gradient, or where the rule cannot know (a weight that is computed from
            others).
        absolute_bound: the same as a norm, not divided by that of the exact gradient.
    """

    estimate: float
    bound: float
    absolute_bound: float


def read_discarded(raw: Any) -> Discarded | None:
    """Make a `Discarded` from the squared estimate, the bound and the squared norm of the
    gradients.
    """
    if raw is None:
        return None
    square, bound, squared_norm = (float(x) for x in np.asarray(raw, np.float64))
    norm = math.sqrt(squared_norm)
    left = norm - bound  # at least the norm of the exact gradient
    relative = bound / left if left > 0 else (0.0 if bound == 0 else math.inf)
    return Discarded(
        math.sqrt(square) / norm if norm else (0.0 if square == 0 else math.inf), relative, bound
    )


class StepInfo:
    """The result of one online step.

    Attributes:
        raw_loss: the loss on the device; None for a step without a target.
        raw_output: the model's output on the device.
    """

    __slots__ = ("_as_jax", "_check", "_discarded", "raw_loss", "raw_output")

    def __init__(
        self,
        raw_loss: Any,
        raw_output: Any,
        check: Callable[[], None],
        discarded: Any = None,
        as_jax: bool = False,
    ) -> None:
        self._discarded = discarded
        self.raw_loss = raw_loss
        self.raw_output = raw_output
        self._check, self._as_jax = check, as_jax

    @property
    def loss(self) -> float | None:
        """The step's loss as a float; None for a step without a target."""
        if self.raw_loss is None:
            return None
        try:
            loss = self.raw_loss.item()  # `float()` of a JAX scalar takes 30 µs longer
        except jax.errors.JaxRuntimeError as error:
            raise_if_lost(error)
            raise
        if loss - loss != 0:  # NaN or infinite
            self._check()
        return loss

    @property
    def output(self) -> Any:
        """The model's output as torch tensors; JAX arrays for a brainstate module.

        If there are several processes, only this process's part of the batch.
        """
        return (
            self.raw_output
            if self._as_jax
            else jax.tree.map(lambda x: to_torch(own_part(x)), self.raw_output)
        )

    @property
    def discarded(self) -> Discarded | None:
        """How far the step's gradient is from exact RTRL's.

        None for a rule that does not know, without a target, or where torch makes the update.
        """
        return read_discarded(self._discarded)

    def __repr__(self) -> str:
        return f"StepInfo(loss={self.loss})"


class SequenceResult:
    """The result of a sequence.

    Attributes:
        raw_losses: (T,) losses of the steps, on the device.
        raw_outputs: the model's outputs on the device, time on the first axis.
        raw_weights: (T,) factors with which the losses are summed.
    """

    def __init__(
        self,
        raw_losses: Any,
        raw_outputs: Any,
        raw_weights: Any,
        batch_first: bool,
        as_jax: bool = False,
    ) -> None:
        self.raw_losses, self.raw_outputs, self.raw_weights = raw_losses, raw_outputs, raw_weights
        self._batch_first, self._as_jax = batch_first, as_jax

    @cached_property
    def loss(self) -> float:
        """The sequence's loss."""
        losses, weights = np.asarray(self.raw_losses), np.asarray(self.raw_weights)
        return float(np.sum(np.where(weights != 0, losses, 0) * weights))

    @cached_property
    def losses(self) -> torch.Tensor:
        """The loss of each step."""
        return self.raw_losses if self._as_jax else to_torch(self.raw_losses)

    @cached_property
    def outputs(self) -> Any:
        """The model's outputs in the model's own layout, as torch tensors; JAX arrays for a
        brainstate module.

        If there are several processes, only this process's part of the batch.
        """
        if self._as_jax:
            return jax.tree.map(jax.numpy.asarray, self.raw_outputs)
        return jax.tree.map(lambda x: sequence_to_torch(x, self._batch_first), self.raw_outputs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loss={self.loss})"


class GradientResult(SequenceResult):
    """Gradients of a sequence's loss; the learner is not updated.

    Attributes:
        raw_grads: JAX arrays by torch name, without the parameters' hooks; of a complex parameter,
            real and imaginary part along a last axis.
        unreached: names of the parameters that the loss's gradient cannot reach, whatever the data.
    """

    def __init__(
        self,
        raw_grads: Mapping[str, Any],
        finish: Callable[[Mapping[str, Any]], dict],
        discarded: Any,
        unreached: frozenset[str],
        *rest: Any,
    ) -> None:
        super().__init__(*rest)
        self.unreached = unreached
        self.raw_grads, self._finish, self._discarded = raw_grads, finish, discarded

    @cached_property
    def discarded(self) -> Discarded | None:
        """How far the gradient is from exact RTRL's, before the parameters' hooks; None for a rule
        that does not know.
        """
        return read_discarded(self._discarded)

    @cached_property
    def grads(self) -> dict[str, Any]:
        """Gradients by torch parameter name, after the parameters' hooks; zero for a parameter that
        the step does not use.

        For a brainstate module: by the names of the report, each with the structure of the State's
        value, as JAX arrays.
        """
        return self._finish(self.raw_grads)


def sequence_to_torch(array: Any, batch_first: bool) -> torch.Tensor:
    """Return a time-major array as a torch tensor in the model's own layout."""
    tensor = to_torch(own_part(array))
    return tensor.transpose(0, 1).contiguous() if batch_first and tensor.dim() > 1 else tensor
