"""Handwritten digits, read row by row by an LSTM, against torch's backpropagation through time.

scikit-learn's bundled digits are 8 × 8 pixels: eight steps of eight inputs, and the class is asked
for after the last row. The LSTM is trained twice from the same weights, on the same batches, with
the same optimizer and the same number of updates: online, and by BPTT.

    python examples/digits_lstm.py
"""

from __future__ import annotations

import argparse
import copy

import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import etrace_bridge as eb

ROWS = 8


class Reader(torch.nn.Module):
    """An LSTM with a readout; `batch_first`, as torch's data sets come."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(ROWS, hidden, batch_first=True)
        self.out = torch.nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])


def load() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Training digits with a target a row, and test digits: images (N, 8, 8) and their classes."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.images / 16, dtype=torch.float32)[order]
    labels = torch.tensor(digits.target)[order]
    every_row = labels[:, None].expand(-1, ROWS)
    return TensorDataset(images[:1400], every_row[:1400]), images[1400:], labels[1400:]


def batches_of(data: TensorDataset, seed: int, batch: int = 50) -> DataLoader:
    """Batches in an order that depends on the seed only."""
    return DataLoader(data, batch, shuffle=True, generator=torch.Generator().manual_seed(seed))


def train_torch(
    model: Reader, data: TensorDataset, epochs: int, learning_rate: float, seed: int
) -> None:
    """torch's own loop, by BPTT."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    loader = batches_of(data, seed)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images)[:, -1], labels[:, -1]).backward()
            optimizer.step()


def train_online(
    model: Reader, data: TensorDataset, epochs: int, learning_rate: float, seed: int
) -> None:
    """The same by D-RTRL: the loss counts at the last row only."""
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    learner = eb.OnlineLearner(model, rule="d_rtrl", loss=cross_entropy, optimizer=optimizer)
    last_row = torch.eye(ROWS)[-1]
    loader = batches_of(data, seed)
    learner.fit(lambda: ((images, labels, last_row) for images, labels in loader), epochs)
    learner.sync_to_torch()


def run(epochs: int, hidden: int, learning_rate: float, seed: int = 0) -> tuple[float, float]:
    """Test accuracy after online training, and after torch's BPTT."""
    data, images, labels = load()
    torch.manual_seed(seed)
    model = Reader(hidden)
    reference = copy.deepcopy(model)
    train_online(model, data, epochs, learning_rate, seed)
    train_torch(reference, data, epochs, learning_rate, seed)
    with torch.no_grad():
        online, bptt = (
            float((m(images)[:, -1].argmax(-1) == labels).float().mean())
            for m in (model, reference)
        )
    return online, bptt


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a run of a few seconds")
    options = parser.parse_args()
    epochs, hidden, learning_rate = (4, 24, 0.01) if options.small else (25, 64, 0.005)
    online, bptt = run(epochs, hidden, learning_rate)
    print(
        f"Digits row by row, LSTM of {hidden}, {epochs} epochs of 28 updates; 397 test digits, "
        "chance is 0.10."
    )
    print(f"Test accuracy: online (D-RTRL) {online:.4f}, torch BPTT {bptt:.4f}.")
    print(f"Online reaches {100 * online / bptt:.1f}% of BPTT.")


if __name__ == "__main__":
    main()
