"""What all rules of one gradient check share: model, data, loss, precision and tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import brainstate
import numpy as np
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.check.check_loss import CheckLoss
from etrace_bridge.check.torch_reference import TORCH_BPTT, CheckData
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.learning.masks import check_mask, split_mask
from etrace_bridge.learning.results import GradientResult
from etrace_bridge.rules import Rule

_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 1e-1, "float16": 1e-2}


@dataclass(frozen=True)
class CheckSetup:
    """What all rules of one check share.

    Attributes:
        net: the bridged model, or a brainstate module.
        data: the sequence.
        loss: the loss.
        reduction: `"mean"` or `"sum"` over the steps' losses.
        mask: weights of the steps' losses as the user gave them, or None.
        dtype: the name of the precision in which both sides run.
        tolerance: relative error that counts as equal.
        allow_zero: names of parameters whose gradient may be zero.
        notes: lines for the end of the report.
        reference: what the rules are compared with.
    """

    net: brainstate.nn.Module
    data: CheckData
    loss: CheckLoss
    reduction: str
    mask: Any
    dtype: str
    tolerance: float
    allow_zero: frozenset[str]
    notes: tuple[str, ...]
    reference: str = TORCH_BPTT

    @property
    def length(self) -> int:
        """Number of steps of the sequence."""
        return len(self.data.weights)

    def learner(self, rule: Rule, chunk: int) -> OnlineLearner:
        """Make a learner that computes gradients only."""
        options = self.loss.options
        return OnlineLearner(
            self.net, rule=rule, chunk=chunk, reduction=self.reduction, guard=False, **options
        )

    def gradients(self, learner: OnlineLearner) -> GradientResult:
        """Compute a learner's gradients of the sequence."""
        return learner.gradients(self.data.xs, self.data.targets, self.mask)


def default_tolerance(dtype: str) -> float:
    """Return the relative error that counts as equal in a precision."""
    return _TOLERANCE.get(dtype, 1e-5)


def read_mask(
    mask: Any, loss: CheckLoss, length: int, batch: int, batch_first: bool = False
) -> tuple[Any, Any]:
    """Return the steps' weights, and factors of the batch elements for a mask of single sequences."""
    if mask is not None:
        mask = np.asarray(as_tensor(mask, torch.float64))
        mask = mask.T if batch_first and mask.ndim == 2 else mask
        check_mask(mask, length, batch)
    mask = loss.mask(mask, length)
    return (None, None) if mask is None else split_mask(mask)


def step_weights(mask: Any, reduction: str, length: int) -> np.ndarray:
    """Return the (T,) factors of the steps' losses."""
    weights = np.ones(length) if mask is None else mask
    if reduction == "mean":
        if not weights.sum() > 0:
            raise InputError("`mask` has no step with a positive weight, so there is no mean loss.")
        weights = weights / weights.sum()
    return weights


def chunk_size(chunk: int | str, length: int) -> int:
    """Return the number of steps in a chunk; `"auto"` divides the sequence into three chunks."""
    if chunk == "auto":
        return max(1, math.ceil(length / 3))
    if isinstance(chunk, bool) or not isinstance(chunk, (int, np.integer)) or chunk < 1:
        raise InputError(f"`chunk` is {chunk!r}; it must be 'auto' or a positive number of steps.")
    return min(int(chunk), length)


def as_tensor(x: Any, precision: torch.dtype) -> torch.Tensor:
    """Copy an array to a host tensor; floating and complex values get the given precision."""
    tensor = (
        x.detach().cpu() if isinstance(x, torch.Tensor) else torch.tensor(np.array(x, order="C"))
    )
    if tensor.is_complex():
        return tensor.to(precision.to_complex())
    return tensor.to(precision) if tensor.is_floating_point() else tensor.clone()
