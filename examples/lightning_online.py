"""Online learning inside Lightning: the model is an `OnlineModule`, everything else is Lightning's.

With automatic optimisation `training_step` returns a loss, and Lightning calls `backward` and the
optimizer: one update for each sequence. With manual optimisation the loop over time is yours: one
update for each time step, in the middle of the sequence.

    python examples/lightning_online.py
"""

from __future__ import annotations

import argparse
import logging
import warnings

import lightning
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb


class Adder(torch.nn.Module):
    """A GRU with a readout."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(1, hidden)
        self.out = torch.nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(x)[0])


class LeakySums(torch.utils.data.Dataset):
    """Noise and its leaky sum, (T, 1) each."""

    def __init__(self, count: int, steps: int) -> None:
        self.xs = torch.randn(count, steps, 1, generator=torch.Generator().manual_seed(0))
        sums, total = [], torch.zeros(count, 1)
        for x in self.xs.unbind(1):
            total = 0.9 * total + 0.2 * x
            sums.append(total)
        self.sums = torch.stack(sums, 1)

    def __len__(self) -> int:
        return len(self.xs)

    def __getitem__(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.xs[n], self.sums[n]


class OnlineTask(lightning.LightningModule):
    """Learns online, by sequence or by step."""

    def __init__(self, hidden: int = 16, every_step: bool = False) -> None:
        super().__init__()
        self.online = eb.OnlineModule(Adder(hidden), rule="d_rtrl")
        self.automatic_optimization = not every_step
        self.losses: list[float] = []

    def training_step(
        self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
    ) -> torch.Tensor | None:
        xs, ys = (t.transpose(0, 1) for t in batch)
        self.online.reset()
        if self.automatic_optimization:
            loss = mse_loss(self.online(xs), ys)
            self.losses.append(loss.item())
            return loss
        optimizer, total = self.optimizers(), 0.0
        for x, y in zip(xs, ys, strict=True):
            loss = mse_loss(self.online(x), y)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            total += loss.item()
        self.losses.append(total / len(xs))
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2 if self.automatic_optimization else 1e-3)


def run(every_step: bool, epochs: int, count: int, steps: int = 10) -> OnlineTask:
    """Trains a task with Lightning's trainer."""
    torch.manual_seed(0)
    task = OnlineTask(every_step=every_step)
    loader = torch.utils.data.DataLoader(LeakySums(count, steps), batch_size=16, drop_last=True)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on data loaders
        lightning.Trainer(max_epochs=epochs, accelerator="cpu", **quiet).fit(task, loader)
    return task


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a run of a few seconds")
    options = parser.parse_args()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    epochs, count = (2, 64) if options.small else (20, 512)
    for every_step in (False, True):
        losses = run(every_step, epochs, count).losses
        kind = (
            "manual, an update for each step"
            if every_step
            else "automatic, an update for each sequence"
        )
        print(
            f"{kind}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} after {len(losses)} batches"
        )


if __name__ == "__main__":
    main()
