"""Train a network of Norse's recurrent LIF cells online: the class of a pattern of input spikes.

pip install norse
python examples/norse_cell.py
"""

import argparse

import norse.torch as norse
import optax
import torch
from torch import nn

import etrace_bridge as eb


class Net(nn.Module):
    """Recurrent spiking neurons and a leaky readout; Norse passes their state from call to call."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.neurons = norse.LIFRecurrentCell(12, hidden)
        self.readout = nn.Linear(hidden, 2)

    def forward(self, spikes, state=None):
        out, state = self.neurons(spikes, state)
        return self.readout(out), state


def make_batch(steps: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Class 0 has spikes on the first half of the channels, class 1 on the second half."""
    labels = torch.randint(0, 2, (batch,))
    rates = torch.full((batch, 12), 0.1)
    rates[labels == 0, :6] = 0.6
    rates[labels == 1, 6:] = 0.6
    return torch.bernoulli(rates.expand(steps, batch, 12)), labels.expand(steps, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few seconds, for tests")
    hidden, steps, batches = (8, 12, 10) if parser.parse_args().small else (48, 40, 100)

    torch.manual_seed(0)
    model = Net(hidden)
    loss = nn.functional.cross_entropy
    learner = eb.OnlineLearner(model, rule="eprop", loss=loss, optimizer=optax.adam(2e-2), chunk=4)
    history = learner.fit([make_batch(steps, 16) for _ in range(batches)], epochs=3)
    print("loss by epoch:", ", ".join(f"{value:.3f}" for value in history["loss"]))

    xs, labels = make_batch(steps, 64)
    right = (learner.predict(xs)[steps // 2 :].mean(0).argmax(-1) == labels[0]).float().mean()
    print(f"right on new patterns: {right:.0%}")
    assert history["loss"][-1] < history["loss"][0]


if __name__ == "__main__":
    main()
