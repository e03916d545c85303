"""Checkpoints that `fit` writes by itself: at intervals, at its end, and when something interrupts
it.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from os import PathLike, fspath
from typing import TYPE_CHECKING

from etrace_bridge._errors import CheckpointError, InputError, NonFiniteError
from etrace_bridge.learning.checkpoint_files import check_writable, weights_file

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often `fit` saves.

    It also saves at its end, at Ctrl-C, at SIGTERM and when a loader fails.

    Attributes:
        path: the file, as for `OnlineLearner.save`.
        minutes: save after so many minutes; None for never.
        updates: save after so many updates; None for never.
    """

    path: str | PathLike
    minutes: float | None = 10.0
    updates: int | None = None

    def __post_init__(self) -> None:
        for name in ("minutes", "updates"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"`{name}` is {value!r}; it must be positive, or None for never.")


class Autosave:
    """Saves a learner at the intervals of a plan.

    Args:
        learner: the learner.
        plan: where and when; None for never. A path alone means every ten minutes.
    """

    def __init__(self, learner: OnlineLearner, plan: Checkpoints | str | PathLike | None) -> None:
        self.learner = learner
        self.plan = plan if plan is None or isinstance(plan, Checkpoints) else Checkpoints(plan)
        self._place = learner.runtime.store.placement
        if self.plan is not None and not self._place.spans_processes:
            check_writable(weights_file(self.plan.path))
        self._begin()

    def __bool__(self) -> bool:
        return self.plan is not None

    def _begin(self) -> None:
        self._since, self._updates = time.monotonic(), self.learner.updates

    def after_batch(self) -> None:
        """Save if it is time.

        A disk that is full or gone does not end the training.
        """
        plan = self.plan
        if plan is None:
            return
        late = plan.minutes is not None and time.monotonic() - self._since >= 60 * plan.minutes
        late = self._place.largest(late) if plan.minutes is not None else late  # clocks differ
        if not late and (
            plan.updates is None or self.learner.updates - self._updates < plan.updates
        ):
            return
        self._begin()
        try:
            self.learner.save(plan.path)
        except CheckpointError as error:
            warnings.warn(
                f"{error} Training goes on; the next checkpoint is tried as planned.",
                RuntimeWarning,
                stacklevel=2,
            )

    def at_end(self) -> None:
        """Save the trained learner."""
        if self.plan is not None:
            self.learner.save(self.plan.path)

    def after_error(self, error: BaseException, is_shared: bool) -> None:
        """Save the state after the last complete batch, and add a note about it to the error.

        Args:
            error: what ends the training.
            is_shared: it ends all processes, after the same batch.
        """
        place = self.learner.place_in_fit
        if self.plan is None or place is None or isinstance(error, NonFiniteError):
            return
        if self._place.spans_processes and not is_shared:  # saving takes all processes
            error.add_note(
                "The last checkpoint, if there is one, is as it was. Go on with "
                "`OnlineLearner.load` and `fit(..., resume=True)`."
            )
            return
        try:
            path = self.learner.save(self.plan.path)
        except Exception as problem:  # the error that ended the training is the one to see
            error.add_note(f"The learner could not be saved: {problem}")
        else:
            error.add_note(
                f"Saved in {fspath(path)!r}, epoch {place.epoch}, after {place.batch} batches. Go "
                "on with `OnlineLearner.load` and `fit(..., resume=True)`."
            )
