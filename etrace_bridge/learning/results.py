"""What the learner gives back; values leave the device when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np
import torch

from etrace_bridge.frontend import to_torch


class StepInfo:
    """What one online step gave.

    Attributes:
        raw_loss: the loss on the device; None for a step without a target.
        raw_output: the model's output on the device.
    """

    __slots__ = ("_check", "raw_loss", "raw_output")

    def __init__(self, raw_loss: Any, raw_output: Any, check: Callable[[], None]) -> None:
        self.raw_loss = raw_loss
        self.raw_output = raw_output
        self._check = check

    @property
    def loss(self) -> float | None:
        """The step's loss as a float; None for a step without a target."""
        if self.raw_loss is None:
            return None
        loss = self.raw_loss.item()  # `float()` of a JAX scalar takes 30 µs longer
        if loss - loss != 0:  # NaN or infinite
            self._check()
        return loss

    @property
    def output(self) -> Any:
        """The model's output as torch tensors."""
        return jax.tree.map(to_torch, self.raw_output)

    def __repr__(self) -> str:
        return f"StepInfo(loss={self.loss})"


class SequenceResult:
    """What a sequence gave.

    Attributes:
        raw_losses: (T,) losses of the steps, on the device.
        raw_outputs: the model's outputs on the device, time on the first axis.
        raw_weights: (T,) factors with which the losses are summed.
    """

    def __init__(self, raw_losses: Any, raw_outputs: Any, raw_weights: Any, batch_first: bool) -> None:
        self.raw_losses, self.raw_outputs, self.raw_weights = raw_losses, raw_outputs, raw_weights
        self._batch_first = batch_first

    @cached_property
    def loss(self) -> float:
        """The sequence's loss."""
        losses, weights = np.asarray(self.raw_losses), np.asarray(self.raw_weights)
        return float(np.sum(np.where(weights != 0, losses, 0) * weights))

    @cached_property
    def losses(self) -> torch.Tensor:
        """The loss of each step."""
        return to_torch(self.raw_losses)

    @cached_property
    def outputs(self) -> Any:
        """The model's outputs as torch tensors, laid out as the model lays out sequences."""
        return jax.tree.map(lambda x: sequence_to_torch(x, self._batch_first), self.raw_outputs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(loss={self.loss})"


class GradientResult(SequenceResult):
    """Gradients of a sequence's loss, nothing updated.

    Attributes:
        raw_grads: JAX arrays by torch name, without the parameters' hooks.
    """

    def __init__(self, raw_grads: Mapping[str, Any], finish: Callable[[Mapping[str, torch.Tensor]], dict], *rest: Any) -> None:
        super().__init__(*rest)
        self.raw_grads, self._finish = raw_grads, finish

    @cached_property
    def grads(self) -> dict[str, torch.Tensor]:
        """Gradients by torch parameter name, after the parameters' hooks; zero for a parameter that the step does not use."""
        return self._finish({name: to_torch(g) for name, g in self.raw_grads.items()})


def sequence_to_torch(array: Any, batch_first: bool) -> torch.Tensor:
    """A time-major array as a torch tensor in the model's own layout."""
    tensor = to_torch(array)
    return tensor.transpose(0, 1).contiguous() if batch_first and tensor.dim() > 1 else tensor
