"""`fit`: epochs over any iterable, with history, validation, early stopping and an orderly end whatever happens."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.learning.placement import private_copy
from etrace_bridge.learning.progress import open_progress

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner


@dataclass
class History:
    """What happened in a call of `fit`.

    Attributes:
        epochs: one record an epoch: `epoch`, `loss`, `batches`, `steps`, `seconds`, `steps_per_second`, `complete`, and the numbers
            of the validation, as `validation_loss` or under the names that a validation function gave them.
        batch_losses: the loss of every batch.
        stopped: why training ended before the last epoch; empty if it did not.
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)
    batch_losses: list[float] = field(default_factory=list)
    stopped: str = ""

    def __getitem__(self, key: str) -> list[Any]:
        """One number of every epoch that has it."""
        return [record[key] for record in self.epochs if key in record]

    def __len__(self) -> int:
        return len(self.epochs)


@dataclass(frozen=True)
class EarlyStopping:
    """Ends training when a number has not improved for some epochs.

    Attributes:
        patience: epochs without an improvement that are allowed.
        monitor: the number in the epochs' records; by default the validation loss, or the loss without a validation.
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


Callback = Callable[["OnlineLearner", dict[str, Any]], Any]


@dataclass(frozen=True)
class FitOptions:
    """The arguments of `OnlineLearner.fit` besides data and epochs."""

    validation: Any = None
    callbacks: Sequence[Callback] = ()
    early_stopping: EarlyStopping | int | None = None
    scheduler: Any = None
    every: str = "sequence"
    carry: bool = False
    max_batches: int | None = None
    progress: bool | None = None


def run_fit(learner: OnlineLearner, batches: Any, epochs: int, options: FitOptions) -> History:
    """Trains; the learner's `history` is filled as it goes, so it survives whatever ends the training."""
    if epochs < 1:
        raise InputError(f"`epochs` is {epochs}; there must be one at least.")
    if epochs > 1 and options.max_batches is None and isinstance(batches, Iterator):
        raise InputError(
            f"`batches` is a {type(batches).__name__}, which can be read only once, but there are {epochs} epochs. Pass a list, a "
            "DataLoader, or a function that makes a new iterator; or cut a stream into epochs with `max_batches`."
        )
    history = learner.history = History()
    best = _Best(_early(options.early_stopping), options.validation is not None)
    stream = iter(batches) if options.max_batches is not None and isinstance(batches, Iterator) else None
    try:
        with open_progress(options.progress) as bar, Shield() as shield:
            for epoch in range(1, epochs + 1):
                source = stream if stream is not None else batches() if callable(batches) else batches
                record = _run_epoch(learner, source, epoch, epochs, options, history, bar, shield)
                if options.validation is not None:
                    record.update(run_validation(learner, options.validation))
                bar.end_epoch(record)
                _step_scheduler(options.scheduler, record)
                asked = [callback(learner, record) is True for callback in options.callbacks]  # every callback runs
                if any(asked):
                    history.stopped = f"a callback asked for it after epoch {epoch}"
                elif best.is_over(learner, record):
                    history.stopped = f"no improvement of {best.monitor} for {best.rule.patience} epochs"
                if history.stopped:
                    break
            best.restore(learner)
    except BaseException as error:
        history.stopped = type(error).__name__
        raise
    return history


def _run_epoch(learner, source: Iterable, epoch: int, epochs: int, options: FitOptions, history: History, bar, shield):
    record: dict[str, Any] = {"epoch": epoch, "loss": math.nan, "batches": 0, "steps": 0, "complete": False}
    history.epochs.append(record)
    begun, first, total = time.perf_counter(), learner.steps, 0.0
    bar.start_epoch(epoch, epochs, _length(source, options.max_batches))
    batch = 0
    try:
        iterator = iter(source)
        while options.max_batches is None or batch < options.max_batches:
            try:
                item = next(iterator)
            except StopIteration:
                break
            xs, targets, mask = split_batch(item)
            with shield.busy():
                loss = learner.update(xs, targets, mask, options.carry, options.every).loss
                batch += 1
                total += loss
                history.batch_losses.append(loss)
                seconds = time.perf_counter() - begun
                steps = learner.steps - first
                record.update(loss=total / batch, batches=batch, steps=steps, seconds=seconds, steps_per_second=steps / seconds)
            bar.advance(record)
            shield.check()
    except BaseException as error:
        error.add_note(f"In `fit`: epoch {epoch}, after {batch} batches. The learner's state is that after the last whole batch.")
        raise
    if not batch:
        raise InputError(f"`batches` gave nothing in epoch {epoch}. An iterator can be read only once: pass a list or a DataLoader.")
    record["complete"] = True
    return record


def run_validation(learner: OnlineLearner, validation: Any) -> dict[str, float]:
    """The numbers of a validation: from a function of the learner, or the loss over some batches."""
    if callable(validation):
        found = validation(learner)
        return dict(found) if isinstance(found, Mapping) else {"validation_loss": float(found)}
    return {"validation_loss": learner.evaluate(validation)}


def split_batch(item: Any) -> tuple[Any, Any, Any]:
    """Inputs, targets and mask of a batch: `(xs, targets)` or `(xs, targets, mask)`, or a dict with these keys."""
    if isinstance(item, Mapping) and "xs" in item and "targets" in item:
        return item["xs"], item["targets"], item.get("mask")
    if isinstance(item, (tuple, list)) and len(item) in (2, 3):
        return item[0], item[1], item[2] if len(item) == 3 else None
    found = f"{type(item).__name__} of {len(item)}" if hasattr(item, "__len__") else type(item).__name__
    raise InputError(
        f"A batch is a {found}; it must be `(xs, targets)` or `(xs, targets, mask)`, or a dict with the keys 'xs', 'targets' and, if "
        "wanted, 'mask'. Several inputs are a tuple: `((x1, x2), targets)`."
    )


def _length(source: Any, most: int | None) -> int | None:
    try:
        length = len(source)
    except TypeError:
        return most
    return length if most is None else min(length, most)


def _early(rule: EarlyStopping | int | None) -> EarlyStopping | None:
    return EarlyStopping(patience=rule) if isinstance(rule, int) else rule


def _step_scheduler(scheduler: Any, record: dict[str, Any]) -> None:
    if scheduler is None:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        scheduler.step(record.get("validation_loss", record["loss"]))
    else:
        scheduler.step()


class _Best:
    """The best epoch so far, and how long ago it was."""

    def __init__(self, rule: EarlyStopping | None, validated: bool) -> None:
        self.rule = rule or EarlyStopping()
        self.active = rule is not None
        self.monitor = self.rule.monitor or ("validation_loss" if validated else "loss")
        self.value, self.since, self.kept = math.inf, 0, None

    def is_over(self, learner: OnlineLearner, record: dict[str, Any]) -> bool:
        if not self.active:
            return False
        if self.monitor not in record:
            raise InputError(f"Early stopping watches {self.monitor!r}, but an epoch's record has only: {', '.join(record)}.")
        value = record[self.monitor] * (1 if self.rule.mode == "min" else -1)
        if value < self.value - self.rule.min_delta:
            self.value, self.since = value, 0
            if self.rule.restore:
                values = learner._runtime.values
                self.kept = jax.tree.map(private_copy, (values.theta, values.other))
        else:
            self.since += 1
        return self.since >= self.rule.patience

    def restore(self, learner: OnlineLearner) -> None:
        if self.kept is not None and self.since:
            runtime = learner._runtime
            theta, other = runtime.placement.put(self.kept)
            same = [k.shape for k in other] == [o.shape for o in runtime.values.other]
            runtime.values = runtime.values._replace(theta=theta, other=other if same else runtime.values.other)


class Shield(AbstractContextManager):
    """Holds Ctrl-C back while arrays are being replaced, so that the learner is never left without them."""

    def __enter__(self) -> Shield:
        self._busy = self._waiting = False
        self._old = None
        if threading.current_thread() is threading.main_thread():
            self._old = signal.getsignal(signal.SIGINT)
            if callable(self._old):
                signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: Any) -> None:
        if callable(self._old):
            signal.signal(signal.SIGINT, self._old)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._busy:
            self._waiting = True
        else:
            self._old(number, frame)  # pyright: ignore[reportOptionalCall, reportCallIssue]

    def busy(self) -> _Busy:
        """Within this, Ctrl-C waits."""
        return _Busy(self)

    def check(self) -> None:
        """Lets a Ctrl-C that waited happen."""
        if self._waiting:
            self._waiting = False
            raise KeyboardInterrupt


class _Busy(AbstractContextManager):
    def __init__(self, shield: Shield) -> None:
        self.shield = shield

    def __enter__(self) -> None:
        self.shield._busy = True

    def __exit__(self, *_: Any) -> None:
        self.shield._busy = False
