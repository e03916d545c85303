"""Callbacks for `fit` that send an epoch's numbers to TensorBoard or Weights & Biases."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from etrace_bridge._errors import InputError

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner


def epoch_numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in an epoch's record, except the epoch's own number."""
    return {
        name: float(v)
        for name, v in record.items()
        if name != "epoch" and not isinstance(v, bool) and isinstance(v, (int, float))
    }


class TensorBoardLogger:
    """Writes an epoch's loss, metrics and speed to TensorBoard.

    `fit(..., callbacks=[TensorBoardLogger("runs/first")])`

    Args:
        target: a folder, which needs `pip install tensorboard`; or a writer with `add_scalar(name,
            value, step)`.
    """

    def __init__(self, target: str | PathLike | Any) -> None:
        if not isinstance(target, (str, PathLike)):
            self.writer = target
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError(
                "`TensorBoardLogger` needs TensorBoard to write into a folder: `pip install "
                "tensorboard`."
            ) from error
        self.writer = SummaryWriter(str(target))

    def __call__(self, learner: OnlineLearner, record: dict[str, Any]) -> None:
        """Log one epoch."""
        for name, value in epoch_numbers(record).items():
            self.writer.add_scalar(name, value, record["epoch"])
        if hasattr(self.writer, "flush"):
            self.writer.flush()


class WandbLogger:
    """Sends an epoch's loss, metrics and speed to Weights & Biases.

    `fit(..., callbacks=[WandbLogger(wandb.init(project="p"))])`

    Args:
        run: what `wandb.init` gave; or anything with `log(numbers, step=...)`.
    """

    def __init__(self, run: Any) -> None:
        if not hasattr(run, "log"):
            raise InputError(
                f"`run` is a {type(run).__name__}; it must be what `wandb.init(...)` gave, with a "
                "method `log`."
            )
        self.run = run

    def __call__(self, learner: OnlineLearner, record: dict[str, Any]) -> None:
        """Log one epoch."""
        self.run.log(epoch_numbers(record), step=record["epoch"])
