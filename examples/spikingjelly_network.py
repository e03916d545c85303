"""Train a SpikingJelly network online; its neurons keep their membrane in the module, and stay as
they are.

pip install spikingjelly
python examples/spikingjelly_network.py
"""

import argparse

import optax
import torch
from spikingjelly.activation_based import neuron, surrogate
from torch import nn

import etrace_bridge as eb


def make_network(hidden: int) -> nn.Module:
    """Two spiking layers with learnable time constants, called one step at a time."""
    return nn.Sequential(
        nn.Linear(8, hidden),
        neuron.ParametricLIFNode(
            init_tau=2.0, surrogate_function=surrogate.ATan(), detach_reset=True
        ),
        nn.Linear(hidden, hidden),
        neuron.LIFNode(tau=2.0, surrogate_function=surrogate.ATan(), detach_reset=True),
        nn.Linear(hidden, 2),
    )


def make_batch(steps: int, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A noisy constant input; the class is the sign of its first two channels' sum."""
    means = torch.randn(batch, 8)
    labels = (means[:, :2].sum(-1) > 0).long()
    return 2 * means + 0.3 * torch.randn(steps, batch, 8), labels.expand(steps, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few seconds, for tests")
    hidden, steps, batches = (10, 8, 12) if parser.parse_args().small else (64, 20, 60)

    torch.manual_seed(0)
    model = make_network(hidden)
    loss = nn.functional.cross_entropy
    learner = eb.OnlineLearner(model, rule="d_rtrl", loss=loss, optimizer=optax.adam(1e-2), chunk=4)
    history = learner.fit([make_batch(steps, 32) for _ in range(batches)], epochs=3)
    print("loss by epoch:", ", ".join(f"{value:.3f}" for value in history["loss"]))
    print(learner.graph.report())

    learner.sync_to_torch()  # the weights are in the SpikingJelly model again
    xs, labels = make_batch(steps, 128)
    with torch.no_grad():
        outputs = eb.run_torch(model, xs).stacked()
    right = (outputs.mean(0).argmax(-1) == labels[0]).float().mean()
    print(f"right in torch, on new inputs: {right:.0%}")
    assert history["loss"][-1] < history["loss"][0]


if __name__ == "__main__":
    main()
