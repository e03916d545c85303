"""Delayed copy with a GRU: remember a symbol for some steps, then say it.

Every step shows one of a few symbols; the target is the symbol shown some steps before. The GRU has
to hold several symbols at once, so credit must reach back in time. The model is trained twice from
the same weights, on the same batches, with the same optimizer and the same number of updates:
online by `etrace_bridge`, and by torch's backpropagation through time.

    python examples/delayed_copy_gru.py
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch.nn.functional import cross_entropy, one_hot

import etrace_bridge as eb

SYMBOLS = 4


class Copier(torch.nn.Module):
    """A GRU with a readout."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gru = torch.nn.GRU(SYMBOLS, hidden)
        self.out = torch.nn.Linear(hidden, SYMBOLS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(x)[0])


def make_batch(
    seed: int, steps: int, batch: int, delay: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs (T, B, symbols), the symbols of `delay` steps before (T, B), and the steps that count
    (T,).
    """
    shown = torch.randint(
        SYMBOLS, (steps + delay, batch), generator=torch.Generator().manual_seed(seed)
    )
    mask = (torch.arange(steps) >= delay).float()
    shown[:delay] = 0
    return one_hot(shown[delay:], SYMBOLS).float(), shown[:-delay], mask


def accuracy(outputs: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> float:
    """The part of the counted symbols that is right."""
    return float((outputs.argmax(-1) == targets)[mask > 0].float().mean())


def train_torch(model: Copier, batches: list, learning_rate: float) -> None:
    """torch's own loop, by BPTT."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    for xs, targets, mask in batches:
        losses = cross_entropy(
            model(xs).flatten(0, 1), targets.flatten(), reduction="none"
        ).reshape(targets.shape)
        optimizer.zero_grad()
        ((losses.mean(1) * mask).sum() / mask.sum()).backward()
        optimizer.step()


def run(
    updates: int,
    hidden: int,
    steps: int,
    batch: int,
    delay: int,
    learning_rate: float = 0.01,
    seed: int = 0,
) -> tuple[float, float]:
    """Accuracy on new sequences after online training, and after torch's BPTT."""
    torch.manual_seed(seed)
    model = Copier(hidden)
    reference = copy.deepcopy(model)
    batches = [make_batch(1000 * seed + n, steps, batch, delay) for n in range(updates)]
    xs, targets, mask = make_batch(1000 * seed + 999_999, steps, 256, delay)

    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    learner = eb.OnlineLearner(model, rule="d_rtrl", loss=cross_entropy, optimizer=optimizer)
    learner.fit(batches, epochs=1)
    learner.sync_to_torch()
    train_torch(reference, batches, learning_rate)
    with torch.no_grad():
        return accuracy(model(xs), targets, mask), accuracy(reference(xs), targets, mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a run of a few seconds")
    options = parser.parse_args()
    setting = {"updates": 120, "hidden": 24, "steps": 12, "batch": 16, "delay": 2}
    if not options.small:
        setting = {"updates": 800, "hidden": 64, "steps": 24, "batch": 32, "delay": 3}
    print(
        f"Copy one of {SYMBOLS} symbols after {setting['delay']} steps; chance is "
        f"{1 / SYMBOLS:.2f}."
    )
    online, bptt = run(**setting)
    print(
        f"Accuracy after {setting['updates']} updates: online (D-RTRL) {online:.4f}, torch BPTT "
        f"{bptt:.4f}."
    )
    print(f"Online reaches {100 * online / bptt:.1f}% of BPTT.")


if __name__ == "__main__":
    main()
