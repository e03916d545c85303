"""A learner's options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge.learning.masks import check_loss_at


@dataclass(frozen=True)
class Options:
    """A learner's options besides model, rule, loss and optimizer; `OnlineLearner` describes them."""

    chunk: int | str = "auto"
    reduction: str = "mean"
    budget: int | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    schedule: Callable[[Any], Any] | None = None
    guard: bool = True
    check_inputs: bool = False
    track_norm: bool = False
    loss_at: str | None = None
    freeze: bool = False
    any_length: bool = False

    def __post_init__(self) -> None:
        check_loss_at(self.loss_at)
        if self.reduction not in ("mean", "sum"):
            raise InputError(f"`reduction` is {self.reduction!r}; it must be 'mean' or 'sum'.")
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise InputError(
                f"`accumulate` is {self.accumulate!r}; it must be a positive number of gradients."
            )
        for name, value in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if value is not None and not value > 0:
                raise InputError(
                    f"`{name}` is {value!r}; it must be positive, or None for no clipping."
                )


def require_count(name: str, value: Any) -> None:
    """Raise unless an argument is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InputError(f"`{name}` is {value!r}; it must be a whole number, 1 or more.")
