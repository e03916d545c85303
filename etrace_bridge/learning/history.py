"""What a call of `fit` recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from etrace_bridge._tables import html_table


@dataclass(repr=False)
class History:
    """What happened in a call of `fit`.

    Attributes:
        epochs: one record per epoch: `epoch`, `loss`, `batches`, `steps`, `seconds`,
            `steps_per_second`, `complete`, and the numbers of the validation, as `validation_loss`
            or under the names that a validation function gave them.
        batch_losses: the loss of every batch.
        stopped: why training ended before the last epoch; empty if it did not.
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)
    batch_losses: list[float] = field(default_factory=list)
    stopped: str = ""

    def __getitem__(self, key: str) -> list[Any]:
        """Return one number of every epoch that has it."""
        return [record[key] for record in self.epochs if key in record]

    def __len__(self) -> int:
        return len(self.epochs)

    def _headline(self) -> str:
        losses = (
            f", loss {self.epochs[0]['loss']:.4g} → {self.epochs[-1]['loss']:.4g}"
            if self.epochs
            else ""
        )
        stopped = f"; stopped: {self.stopped}" if self.stopped else ""
        epochs = "1 epoch" if len(self.epochs) == 1 else f"{len(self.epochs)} epochs"
        batches = len(self.batch_losses)
        return (
            f"History of {epochs}, {batches} batch{'' if batches == 1 else 'es'}{losses}{stopped}"
        )

    def __repr__(self) -> str:
        return self._headline()

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for record in self.epochs for name in record))
        rows = [[_shown(record.get(name, "")) for name in names] for record in self.epochs]
        return html_table(self._headline(), names, rows)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
