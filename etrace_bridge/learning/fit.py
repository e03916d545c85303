"""`fit`: epochs over any iterable, with history, validation, early stopping and checkpoints.

Whatever ends it, the learner and its history are left complete.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from etrace_bridge._errors import InputError
from etrace_bridge.learning.autosave import Autosave, Checkpoints
from etrace_bridge.learning.batches import ReadAhead, batch_shapes, count_batches
from etrace_bridge.learning.early_stopping import EarlyStopping, EpochComparison
from etrace_bridge.learning.filling import full_batch_size
from etrace_bridge.learning.history import History
from etrace_bridge.learning.metrics import (
    Metric,
    Metrics,
    as_number,
    evaluate_with,
    measure,
    named_metrics,
)
from etrace_bridge.learning.options import require_count
from etrace_bridge.learning.place_in_fit import (
    PlaceInFit,
    generator_states,
    scheduler_state,
    set_generator_states,
    set_scheduler_state,
)
from etrace_bridge.learning.progress import (
    COMPILING,
    TRAINING,
    VALIDATING,
    FitProgress,
    open_progress,
)
from etrace_bridge.learning.signals import Shield
from etrace_bridge.lowering import hushed

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner


# Called with the learner and the epoch's record after every epoch; `True` ends the training. A
# callback with a method `before_batch(learner, xs, targets, mask, carry)` is also called before
# every update, and may give numbers for the record: `{name: (value, weight in the epoch's mean)}`.
Callback = Callable[["OnlineLearner", dict[str, Any]], Any]


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `OnlineLearner.fit` besides data and epochs."""

    validation: Any = None
    metrics: Metrics = None
    callbacks: Sequence[Callback] = ()
    early_stopping: EarlyStopping | int | None = None
    scheduler: Any = None
    every: str = "sequence"
    carry: bool = False
    max_batches: int | None = None
    checkpoint: Checkpoints | str | PathLike | None = None
    resume: bool = False
    progress: bool | None = None


def run_fit(learner: OnlineLearner, batches: Any, epochs: int, options: FitOptions) -> History:
    """Train. The learner's `history` is filled meanwhile, so it survives an interruption."""
    require_count("epochs", epochs)
    if options.max_batches is not None:
        require_count("max_batches", options.max_batches)
    if epochs > 1 and options.max_batches is None and isinstance(batches, Iterator):
        raise InputError(
            f"`batches` is a {type(batches).__name__}, which can be read only once, but there are "
            f"{epochs} epochs. Pass a list, a DataLoader, or a function that makes a new iterator; "
            "or cut a stream into epochs with `max_batches`."
        )
    metrics = named_metrics(options.metrics)
    autosave = Autosave(learner, options.checkpoint)
    history, place = _begin(learner, options)
    if place.stage == "over":
        return history
    where = learner.runtime.store.placement
    shows = options.progress if where.is_first else False
    agree = where.largest if where.spans_processes else None
    with hushed(), open_progress(shows) as bar, Shield(bool(autosave), agree) as shield:
        try:
            run = _Run(
                learner, batches, epochs, options, metrics, history, place, bar, shield, autosave
            )
            run.all_epochs()
            with shield.busy():
                autosave.at_end()
        except BaseException as error:
            history.stopped = type(error).__name__
            with shield.busy():
                autosave.after_error(error, shield.is_agreed)
            raise
    return history


def _begin(learner: OnlineLearner, options: FitOptions) -> tuple[History, PlaceInFit]:
    """Return a new history and position, or those of the call of `fit` that is resumed."""
    place, history = learner.place_in_fit, learner.history
    if not options.resume or place is None or history is None:
        learner.history = History()
        learner.place_in_fit = PlaceInFit(scheduler=scheduler_state(options.scheduler))
        return learner.history, learner.place_in_fit
    if place.stage != "over":
        set_scheduler_state(options.scheduler, place.scheduler)
        history.stopped = ""
    return history, place


@dataclass
class _Run:
    """One call of `fit`."""

    learner: OnlineLearner
    batches: Any
    epochs: int
    options: FitOptions
    metrics: Mapping[str, Metric]
    history: History
    place: PlaceInFit
    bar: FitProgress
    shield: Shield
    autosave: Autosave

    def __post_init__(self) -> None:
        self.early = EpochComparison(
            self.options.early_stopping, self.options.validation is not None, self.place
        )
        self.shapes: set[tuple] = set()
        self.stream = iter(self.batches) if isinstance(self.batches, Iterator) else None
        self.full = full_batch_size(self.batches, self.learner.runtime.is_batch_first)

    def all_epochs(self) -> None:
        """Finish an interrupted epoch, then run the others."""
        place = self.place
        if place.stage in ("callbacks", "end") and place.generators:
            set_generator_states(place.generators, self.batches)
        while place.stage not in ("end", "over") or (
            place.stage == "end" and place.epoch < self.epochs
        ):
            self.one_epoch(resumed=place.stage != "end")
        self.early.restore(self.learner)

    def one_epoch(self, resumed: bool) -> None:
        """Run batches, validation, scheduler, callbacks and early stopping of one epoch."""
        place, options, shield = self.place, self.options, self.shield
        source = (
            self.stream
            if self.stream is not None
            else self.batches()
            if callable(self.batches)
            else self.batches
        )
        if not resumed:
            with shield.busy():
                place.start_epoch(source)
                self.history.epochs.append(
                    {
                        "epoch": place.epoch,
                        "loss": math.nan,
                        "batches": 0,
                        "steps": 0,
                        "complete": False,
                    }
                )
        record = self.history.epochs[-1]
        self.bar.start_epoch(
            place.epoch, self.epochs, count_batches(source, options.max_batches), record
        )
        if place.stage == "batches":
            self.all_batches(source, record, resumed)
            if options.validation is not None:
                self.bar.say(VALIDATING)
                record.update(run_validation(self.learner, options.validation, self.metrics))
            self.bar.end_epoch(record)
            with shield.busy():
                _step_scheduler(options.scheduler, record)
                place.scheduler, place.stage = scheduler_state(options.scheduler), "callbacks"
                place.generators = generator_states(source)
            shield.check()
        # every callback runs
        asked = [callback(self.learner, record) is True for callback in options.callbacks]
        with shield.busy():
            if any(asked):
                self.history.stopped = f"a callback asked for it after epoch {place.epoch}"
            elif self.early.is_over(self.learner, record):
                self.history.stopped = (
                    f"no improvement of {self.early.monitor} for {self.early.rule.patience} epochs"
                )
            place.stage = "over" if self.history.stopped else "end"
        shield.check()

    def all_batches(self, source: Any, record: dict[str, Any], resumed: bool) -> None:
        """Run the epoch's batches; batches that an interrupted call has done are read and skipped."""
        place, most = self.place, self.options.max_batches
        try:
            iterator = self._skip_done(source) if resumed and self.stream is None else iter(source)
            batches = ReadAhead(iterator, self.learner._unpacked)
            begun = time.perf_counter() - record.get("seconds", 0.0)
            first = self.learner.steps - record["steps"]
            while most is None or place.batch < most:
                given = batches.take()
                if given is None:
                    break
                with self.learner.runtime.filling.up_to(self.full):
                    self.one_batch(given, batches, record, begun, first)
        except BaseException as error:
            error.add_note(
                f"In `fit`: epoch {place.epoch}, after {place.batch} batches. The learner's state "
                "is that after the last whole batch."
            )
            raise
        if not place.batch:
            raise InputError(
                f"`batches` gave nothing in epoch {place.epoch}. An iterator can be read only "
                "once: pass a list or a DataLoader."
            )
        # Of several processes all must have had as many batches.
        self.learner.runtime.store.placement.together(
            f"end of epoch {place.epoch} after {place.batch} batches", lambda: None
        )
        record["complete"] = True

    def _skip_done(self, source: Any) -> Iterator[Any]:
        if self.place.generators:
            set_generator_states(self.place.generators, source)
        iterator = iter(source)
        for n in range(self.place.batch):
            try:
                next(iterator)
            except StopIteration:
                raise InputError(
                    f"The interrupted `fit` had done {self.place.batch} batches of epoch "
                    f"{self.place.epoch}, but `batches` now gives {n}. Resume with the same data."
                ) from None
        return iterator

    def one_batch(
        self, given: tuple, batches: ReadAhead, record: dict[str, Any], begun: float, first: int
    ) -> None:
        """Make one update and record its results; `batches` holds the batches to come."""
        learner, place, options = self.learner, self.place, self.options
        xs, targets, mask = given
        shapes = batch_shapes(given)
        if shapes not in self.shapes:
            self.bar.say(COMPILING)
        with self.shield.busy():
            self._ask_callbacks(xs, targets, mask)
            with learner.runtime.sequences.while_computing(
                (lambda: self._read_ahead(batches, shapes)) if self.reads_ahead else None
            ):
                result = learner.update(xs, targets, mask, carry=options.carry, every=options.every)
            place.batch += 1
            place.total += result.loss
            self.history.batch_losses.append(result.loss)
            self._add_numbers(result, targets, mask)
            seconds, steps = time.perf_counter() - begun, learner.steps - first
            record.update(
                loss=place.total / place.batch, batches=place.batch, steps=steps, seconds=seconds
            )
            record.update(
                steps_per_second=steps / seconds,
                **{name: total / weight for name, (total, weight) in place.sums.items()},
            )
            self.autosave.after_batch()
        if shapes not in self.shapes:
            self.shapes.add(shapes)
            self.bar.say(TRAINING)
        self.bar.advance(record)
        self.shield.check()

    @property
    def reads_ahead(self) -> bool:
        """Return whether the next batch may be read before the results of this one are known.

        Not from a stream, which would lose a batch at an interruption and may have none yet; not
        from the user's own generator, which may look at the learner; and not where callbacks run
        between two batches.
        """
        return (
            isinstance(self.batches, (DataLoader, list, tuple))
            and self.learner.runtime.store.placement.is_single
            and not any(hasattr(callback, "before_batch") for callback in self.options.callbacks)
        )

    def _read_ahead(self, batches: ReadAhead, shapes: tuple) -> None:
        """Read the next batch while the device computes this one, of these shapes."""
        most = self.options.max_batches
        if most is not None and self.place.batch + 1 >= most:
            return
        batches.fetch()
        if batches.next is not None and batch_shapes(batches.next) == shapes:
            xs, targets, mask = batches.next
            self.learner.runtime.sequences.stage(xs, targets, mask, self.options.carry)

    def _ask_callbacks(self, xs: Any, targets: Any, mask: Any) -> None:
        for callback in self.options.callbacks:
            before_batch = getattr(callback, "before_batch", None)
            if before_batch is not None:
                numbers = before_batch(self.learner, xs, targets, mask, self.options.carry) or {}
                self._add((name, *pair) for name, pair in numbers.items())

    def _add_numbers(self, result: Any, targets: Any, mask: Any) -> None:
        found = []
        if self.metrics:
            numbers, count = measure(
                self.metrics, result.raw_outputs, targets, mask, self.learner.runtime
            )
            found += [(name, value, count) for name, value in numbers.items()]
        norm = self.learner.gradient_norm
        if norm is not None:
            found.append(("gradient_norm", norm, 1))
        self._add(found)

    def _add(self, numbers: Iterable[tuple[str, float, float]]) -> None:
        """Add numbers with their weights to the epoch's means."""
        for name, value, count in numbers:
            total, weight = self.place.sums.get(name, (0.0, 0))
            self.place.sums[name] = [total + value * count, weight + count]


def run_validation(
    learner: OnlineLearner, validation: Any, metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Return the numbers of a validation: from a function of the learner, or loss and metrics over
    some batches.
    """
    if callable(validation):
        found = validation(learner)
        found = found if isinstance(found, Mapping) else {"validation_loss": found}
        return {name: as_number(name, value) for name, value in found.items()}
    return {
        f"validation_{name}": value
        for name, value in evaluate_with(learner, validation, metrics).items()
    }


def _step_scheduler(scheduler: Any, record: dict[str, Any]) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(record.get("validation_loss", record["loss"]))
    else:
        scheduler.step()
