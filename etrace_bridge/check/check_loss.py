"""Where the loss of a check is: at the steps, at the end, or over all outputs of a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from etrace_bridge._errors import InputError
from etrace_bridge.learning.masks import check_loss_at, last_of


@dataclass(frozen=True)
class CheckLoss:
    """A loss, and the outputs that it reads.

    Attributes:
        function: `(output, target) -> scalar`.
        at: as `loss_at` of `OnlineLearner`; None if every step has a target of its own.
        over_time: the function reads the outputs of all steps, as `seq_loss`.
    """

    function: Callable[[Any, Any], Any]
    at: str | None = None
    over_time: bool = False

    @property
    def per_sequence(self) -> bool:
        """Whether there is one target for each sequence, without a time axis."""
        return self.over_time or self.at is not None

    @property
    def reads_sequence(self) -> bool:
        """Whether the loss is one number of the whole sequence, rather than a sum over steps."""
        return self.over_time or self.at == "model"

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `OnlineLearner`."""
        if self.over_time:
            return {"seq_loss": self.function}
        return {"loss": self.function, "loss_at": self.at}

    def mask(self, mask: Any, length: int) -> Any:
        """Return the steps' weights before normalisation: the user's, or that of the last step."""
        if self.reads_sequence and mask is not None:
            raise InputError(
                "A loss over the whole sequence takes no `mask`: leave out what should not count "
                "within the loss itself."
            )
        return last_of(mask, length) if self.at == "last" else mask


def read_loss(loss: Any, loss_at: str | None, seq_loss: Any) -> CheckLoss:
    """Return the loss of a check, from the arguments of `check_gradients`."""
    if loss is not None and seq_loss is not None:
        raise InputError(
            "`loss` and `seq_loss` were both given; a check has one loss. Leave one out."
        )
    if seq_loss is not None and loss_at is not None:
        raise InputError(
            "`loss_at` says where `loss` is, but `seq_loss` reads every step. Leave `loss_at` out."
        )
    given = loss if seq_loss is None else seq_loss
    if not callable(given):
        name = "loss" if seq_loss is None else "seq_loss"
        raise InputError(
            f"`{name}` is a {type(given).__name__}; it must be a callable `(output, target) -> "
            "scalar`."
        )
    check_loss_at(loss_at)
    return CheckLoss(given, loss_at, seq_loss is not None)
