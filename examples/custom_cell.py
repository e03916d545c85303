"""A cell of your own: a gated leaky integrator with two states, one of them fast and one slow.

Its gates see the input only and its states meet position by position, so D-RTRL is exact for every
weight. The compiler finds that out.

    python examples/custom_cell.py
"""

import argparse

import optax
import torch
from torch import nn

import etrace_bridge as eb


class TwoSpeeds(nn.Module):
    """`fast` follows the input, `slow` follows `fast`; the state is a dict, and must be given."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(inputs, hidden), nn.Linear(inputs, hidden)
        self.slowness = nn.Parameter(torch.linspace(0.0, 4.0, hidden))

    def forward(self, x, state):
        gate, keep = torch.sigmoid(self.gate(x)), torch.sigmoid(self.slowness)
        fast = (1 - gate) * state["fast"] + gate * torch.tanh(self.value(x))
        slow = keep * state["slow"] + (1 - keep) * fast
        return slow, {"fast": fast, "slow": slow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few seconds, for tests")
    steps = 60 if parser.parse_args().small else 2000

    torch.manual_seed(0)
    cell = TwoSpeeds(1, 8)
    start = lambda batch_size: {
        "fast": torch.zeros(batch_size, 8),
        "slow": torch.zeros(batch_size, 8),
    }
    net = eb.wrap(cell, state=start)
    net.init_state(batch_size=4)
    graph = eb.compile_etrace_graph(net, eb.to_jax(torch.randn(4, 1)))
    print(graph.report())
    assert all(certificate.exact for certificate in graph.certificate().values())

    report = eb.check_gradients(
        cell,
        torch.randn(12, 4, 1),
        torch.randn(12, 4, 8),
        nn.functional.mse_loss,
        rule="d_rtrl",
        state=start,
    )
    assert report.ok and all(row.verdict == "exact" for row in report)

    # One value comes in at a time; what is wanted is its running mean, which needs memory.
    learner = eb.OnlineLearner(
        net, rule="d_rtrl", loss=nn.functional.mse_loss, optimizer=optax.adam(1e-2)
    )
    mean, losses = torch.zeros(4, 1), []
    for _ in range(steps):
        x = torch.randn(4, 1)
        mean = 0.9 * mean + 0.1 * x
        losses.append(learner.step(x, mean.expand(4, 8)).loss)
    tenth = len(losses) // 10
    first, last = sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth
    print(f"\nloss of the first tenth of {steps} steps: {first:.4f}, of the last: {last:.4f}")


if __name__ == "__main__":
    main()
