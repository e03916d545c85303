"""Wrap a torch GRU as it is, read what the compiler found, and check its online gradients against
torch BPTT.

python examples/wrap_and_check_gru.py
"""

import argparse

import torch
from torch import nn

import etrace_bridge as eb


class Net(nn.Module):
    """A GRU with a readout, as anyone would write it."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gru, self.readout = nn.GRU(inputs, hidden), nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(self.gru(x)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few seconds, for tests")
    hidden, steps = (6, 9) if parser.parse_args().small else (32, 60)

    torch.manual_seed(0)
    model = Net(4, hidden)
    net = eb.wrap(model)
    net.init_state(batch_size=5)
    print("parameters:", ", ".join(net.parameter_names), "\n")
    print(eb.compile_etrace_graph(net, eb.to_jax(torch.randn(5, 4))).report(), "\n")

    xs, targets = torch.randn(steps, 5, 4), torch.randn(steps, 5, 3)
    comparison = eb.check_gradients(
        model, xs, targets, loss=nn.functional.mse_loss, rule=["rtrl", "d_rtrl"]
    )
    print(comparison)
    assert comparison.ok


if __name__ == "__main__":
    main()
