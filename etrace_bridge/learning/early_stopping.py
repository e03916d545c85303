"""Early stopping: when training ends because a number does not improve any more."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etrace_bridge._errors import InputError
from etrace_bridge.learning.options import require_count
from etrace_bridge.learning.place_in_fit import BestEpoch, PlaceInFit

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner


@dataclass(frozen=True)
class EarlyStopping:
    """Ends training when a number has not improved for some epochs.

    Attributes:
        patience: epochs without an improvement that are allowed.
        monitor: the number in the epochs' records; by default the validation loss, or the loss
            without a validation.
        min_delta: least change that counts as an improvement.
        mode: `"min"` or `"max"`.
        restore: put the weights of the best epoch back at the end.
    """

    patience: int = 3
    monitor: str | None = None
    min_delta: float = 0.0
    mode: str = "min"
    restore: bool = True

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise InputError(f"`mode` is {self.mode!r}; it must be 'min' or 'max'.")
        require_count("patience", self.patience)


class EpochComparison:
    """Compares each epoch with the best one, whose weights it can restore.

    Args:
        rule: when to end; a number means the patience, None never.
        validates: whether the epochs have a validation.
        place: the position in `fit`, which stores the best epoch.
    """

    def __init__(
        self, rule: EarlyStopping | int | None, validates: bool, place: PlaceInFit
    ) -> None:
        self.active = rule is not None
        self.rule = (
            EarlyStopping(patience=rule) if isinstance(rule, int) else rule or EarlyStopping()
        )
        self.monitor = self.rule.monitor or ("validation_loss" if validates else "loss")
        self.place = place
        if self.active and place.best is None:
            place.best = BestEpoch(math.inf)

    def is_over(self, learner: OnlineLearner, record: dict[str, Any]) -> bool:
        """Return whether training ends after the epoch of this record."""
        best = self.place.best if self.active else None
        if best is None:
            return False
        if self.monitor not in record:
            raise InputError(
                f"Early stopping watches {self.monitor!r}, but an epoch's record has only: "
                f"{', '.join(record)}."
            )
        value = record[self.monitor] * (1 if self.rule.mode == "min" else -1)
        if value < best.value - self.rule.min_delta:
            best.value, best.since = value, 0
            if self.rule.restore:
                best.keep(learner.runtime.store)
        else:
            best.since += 1
        return best.since >= self.rule.patience

    def restore(self, learner: OnlineLearner) -> None:
        """Put the weights of the best epoch back, if they are stored."""
        best = self.place.best if self.active else None
        if best is not None and best.kept and best.since:
            best.restore(learner.runtime.store)
