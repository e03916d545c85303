"""Latency-coded digits with spiking neurons of snnTorch, against torch's backpropagation through
time.

Each of the 64 pixels of scikit-learn's digits spikes once: the brighter, the earlier. Two layers of
leaky integrate-and-fire neurons hear the spikes; the output neuron with the highest membrane
potential over time is the answer. The model's own code is the same for both: online training wraps
it as it is, and torch runs it step by step and goes back through all of them.

    python examples/digits_snntorch.py
"""

from __future__ import annotations

import argparse
import copy

import snntorch
import torch
from sklearn.datasets import load_digits
from snntorch import spikegen, surrogate
from torch.nn.functional import cross_entropy

import etrace_bridge as eb

STEPS, BATCH, LEARNING_RATE = 12, 50, 0.005


class Spiking(torch.nn.Module):
    """Two layers of leaky neurons; the second does not spike, its membrane is the output."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.fc1 = torch.nn.Linear(64, hidden)
        self.lif1 = snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid(slope=10))
        self.fc2 = torch.nn.Linear(hidden, 10)
        self.lif2 = snntorch.Leaky(beta=0.9, reset_mechanism="none")

    def forward(self, x, mem1=None, mem2=None):
        if mem1 is None:
            mem1, mem2 = self.lif1.reset_mem(), self.lif2.reset_mem()
        spikes, mem1 = self.lif1(self.fc1(x), mem1)
        _, mem2 = self.lif2(self.fc2(spikes), mem2)
        return mem2, mem1, mem2


def load() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Spikes (T, N, 64) and classes (N,) of the training and of the test digits."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    pixels = torch.tensor(digits.data / 16, dtype=torch.float32)[order]
    spikes = spikegen.latency(
        pixels, num_steps=STEPS, threshold=0.05, normalize=True, linear=True, clip=True
    )
    labels = torch.tensor(digits.target)[order]
    return [spikes[:, :1400], spikes[:, 1400:]], [labels[:1400], labels[1400:]]


def make_batches(
    spikes: torch.Tensor, labels: torch.Tensor, epochs: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches in one fixed order, with the class as the target of every step."""
    made = torch.Generator().manual_seed(1)
    picked = [
        part
        for _ in range(epochs)
        for part in torch.randperm(len(labels), generator=made).split(BATCH)
    ]
    return [(spikes[:, part], labels[part].expand(STEPS, -1)) for part in picked]


def run_torch(model: Spiking, spikes: torch.Tensor) -> torch.Tensor:
    """The membranes of the output neurons at every step."""
    outputs, states = [], ()
    for x in spikes:
        out, *states = model(x, *states)
        outputs.append(out)
    return torch.stack(outputs)


def train_torch(model: Spiking, batches: list) -> None:
    """torch's own loop, by BPTT."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for spikes, labels in batches:
        optimizer.zero_grad()
        cross_entropy(run_torch(model, spikes).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()


def run(epochs: int, hidden: int, seed: int = 0) -> tuple[float, float]:
    """Test accuracy after online training, and after torch's BPTT."""
    (seen, unseen), (labels, wanted) = load()
    batches = make_batches(seen, labels, epochs)
    torch.manual_seed(seed)
    model = Spiking(hidden)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    learner = eb.OnlineLearner(model, rule="d_rtrl", loss=cross_entropy, optimizer=optimizer)
    learner.fit(batches)
    learner.sync_to_torch()
    train_torch(reference, batches)
    with torch.no_grad():
        online, bptt = (
            float((run_torch(m, unseen).sum(0).argmax(-1) == wanted).float().mean())
            for m in (model, reference)
        )
    return online, bptt


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a run of a few seconds")
    options = parser.parse_args()
    epochs, hidden = (2, 32) if options.small else (15, 100)
    online, bptt = run(epochs, hidden)
    print(
        f"Latency-coded digits, {hidden} spiking neurons, {epochs} epochs of 28 updates; 397 test "
        "digits, chance is 0.10."
    )
    print(f"Test accuracy: online (D-RTRL) {online:.4f}, torch BPTT {bptt:.4f}.")
    print(f"Online reaches {100 * online / bptt:.1f}% of BPTT.")


if __name__ == "__main__":
    main()
