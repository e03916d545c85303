"""Reads what users pass to a learner: inputs, targets and masks of one step or of a sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from etrace_bridge.frontend import check_ranges, input_name
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.inputs import (
    as_array,
    as_targets,
    check_batch,
    check_finite,
    read_mask,
    sequence_length,
)
from etrace_bridge.learning.losses import JaxLoss
from etrace_bridge.learning.masks import blank_masked, check_mask
from etrace_bridge.learning.processes import own_part
from etrace_bridge.learning.sequence_loss import LossInTorch
from etrace_bridge.learning.store import Store


@dataclass(frozen=True)
class StepData:
    """One time step as arrays.

    Attributes:
        args: the inputs.
        target: the target as the user gave it, with numbers as arrays; None for a step without a
            loss.
        wanted: the target as arrays.
    """

    args: list[Any]
    target: Any
    wanted: Any


@dataclass(frozen=True)
class SequenceData:
    """A sequence as arrays, time on the first axis.

    Attributes:
        args: the inputs.
        target: the first time step's target as the user gave it, or that of the sequence; None
            without a loss.
        targets: the targets.
        mask: weights of the steps; None if all count alike.
        length: time steps.
        rows: batch elements of the user's, where the batch is that of `filling.fill_batch`; the
            others count nothing. None: it is not.
    """

    args: list[Any]
    target: Any
    targets: Any
    mask: Any
    length: int
    rows: int | None = None


class DataReader:
    """Reads a learner's data.

    Args:
        store: the learner's store, which knows the model and the dtype of its parameters.
        check_values: raise where inputs or targets are not finite.
    """

    def __init__(self, store: Store, check_values: bool) -> None:
        self._store, self._check_values = store, check_values

    @property
    def batch_first(self) -> bool:
        """Whether sequences come as (batch, time, …)."""
        return bool(getattr(self._store.net, "batch_first", False))

    def step(self, inputs: Sequence[Any], target: Any) -> StepData:
        """Return one time step, checked."""
        args = self._inputs(inputs)
        check_batch(args, 0)
        target = as_targets(target)
        wanted = self._targets(target)
        self._check(args, wanted)
        return StepData(args, target, wanted)

    def sequence(
        self, inputs: Sequence[Any], targets: Any, mask: Any, per_sequence: bool
    ) -> SequenceData:
        """Return a sequence, checked.

        `per_sequence`: there is one target for each sequence, without a time axis.
        """
        targets = as_targets(targets)
        args = list(map(self._time_first, self._inputs(inputs)))
        mask = None if mask is None else self._time_first(self.mask(mask))
        check_batch(args, 1)
        arrays = self._targets(targets)
        if not per_sequence:
            arrays = jax.tree.map(self._time_first, arrays)
        length = sequence_length(args, None if per_sequence else arrays, mask, self.batch_first)
        if mask is not None:
            check_mask(mask, length, np.shape(args[0])[1])
        self._check(
            args, jax.tree.map(lambda t: t if per_sequence else blank_masked(t, mask), arrays)
        )
        target = (
            targets if per_sequence or targets is None else jax.tree.map(self._first_step, targets)
        )
        return SequenceData(args, target, arrays, mask, length)

    def mask(self, mask: Any) -> Any:
        """Return a mask as an array."""
        return read_mask(mask, self._store.float_dtype)

    def _time_first(self, array: Any) -> Any:
        if not self.batch_first or np.ndim(array) < 2:
            return array
        return (
            array.swapaxes(0, 1)
            if isinstance(array, jax.Array)
            else np.ascontiguousarray(array.swapaxes(0, 1))
        )

    def _first_step(self, target: Any) -> Any:
        """Return the first time step of a target as the user gave it."""
        if isinstance(target, (torch.Tensor, np.ndarray, jax.Array)):
            return target[:, 0] if self.batch_first and target.ndim > 1 else target[0]
        return np.asarray(target)[0]

    def _inputs(self, args: Sequence[Any]) -> list[Any]:
        return [
            as_array(a, self._store.float_dtype, input_name("input", n, len(args)))
            for n, a in enumerate(args)
        ]

    def _targets(self, targets: Any) -> Any:
        """Return a tree of targets as arrays; None stays None."""
        leaves, tree = jax.tree.flatten(targets)
        return tree.unflatten(
            [as_array(t, name=input_name("target", n, len(leaves))) for n, t in enumerate(leaves)]
        )

    def _check(self, args: Sequence[Any], targets: Any) -> None:
        if self._check_values:
            named = {f"input {n}" if n else "input": a for n, a in enumerate(args)}
            named |= {
                f"target {n}" if n else "target": t for n, t in enumerate(jax.tree.leaves(targets))
            }
            check_finite(named)


def check_indices(
    compiled: CompiledStep,
    args: Sequence[Any],
    loss: JaxLoss | LossInTorch | None,
    targets: Any,
) -> None:
    """Raise if an input or a target of this process that is used as an index is out of range."""
    parts, inputs = 1, list(map(own_part, args))
    if compiled.ranges or (loss is not None and loss.ranges):
        whole, part = compiled.signature[0][0], np.shape(inputs[0])
        parts = math.prod(whole) // max(math.prod(part[len(part) - len(whole) :]), 1)
    check_ranges(compiled.ranges, inputs, "input", parts)
    if loss is not None:
        check_ranges(loss.ranges, list(map(own_part, jax.tree.leaves(targets))), "target", parts)
