"""The time axis of models that consume sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from etrace_bridge.frontend.state_values import flatten_state, unflatten_state


@dataclass(frozen=True)
class TimeAxis:
    """Where the steps of an output are: along one axis, which is read as `(outer, steps, inner)`.

    Models that flatten time and batch to one axis (`y.view(-1, classes)`) have an `outer` or
    `inner` of the batch size.
    """

    axis: int
    outer: int = 1
    inner: int = 1

    def select(self, value: Any, step: int) -> Any:
        """Return one step of a tensor or array."""
        before = value.shape[: self.axis]
        after = value.shape[self.axis + 1 :]
        width = self.outer * self.inner
        if value.shape[self.axis] == width:  # the only step
            return value.squeeze(self.axis) if width == 1 else value
        if width == 1:
            return value[(slice(None),) * self.axis + (step,)]
        split = value.reshape(
            *before, self.outer, value.shape[self.axis] // width, self.inner, *after
        )
        return split[(slice(None),) * (self.axis + 1) + (step,)].reshape(*before, width, *after)


def time_axis_of(layout: str | None) -> int | None:
    """Return the time axis of a layout; None for one step."""
    return None if layout is None else int(layout == "batch_first")


def add_time_axis(inputs: tuple, layout: str | None) -> tuple:
    """Make a sequence of length one of each input tensor."""
    if layout is None:
        return inputs
    return tuple(
        x.unsqueeze(_time_axis(x, layout)) if isinstance(x, torch.Tensor) else x for x in inputs
    )


def _time_axis(x: torch.Tensor, layout: str) -> int:
    return 1 if layout == "batch_first" and x.dim() >= 1 else 0


def remove_time_axis(output: Any, layout: str | None, axes: tuple[TimeAxis | None, ...]) -> Any:
    """Take the only step out of each output tensor that has a time axis."""
    if layout is None:
        return output
    leaves, skeleton = flatten_state(output)
    tensors = [
        t if axis is None else axis.select(t, 0) for (_, t), axis in zip(leaves, axes, strict=True)
    ]
    return unflatten_state(skeleton, tensors)
