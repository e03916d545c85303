"""Exact RTRL and D-RTRL on a stack of recurrent layers: what D-RTRL drops, in numbers.

In a stack, credit for a lower layer also passes through the upper layers' pasts. D-RTRL drops it,
RTRL keeps it at the cost of an influence matrix; a longer chunk brings D-RTRL closer, because
inside a chunk `credit="chunk"` is exact.

    python examples/rtrl_and_d_rtrl_on_a_stack.py
"""

import argparse

import torch
from torch import nn

import etrace_bridge as eb
from etrace_bridge.rules import DRTRL


class Stack(nn.Module):
    """A stack of GRU layers with a readout."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.gru, self.readout = nn.GRU(3, hidden, num_layers=layers), nn.Linear(hidden, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(self.gru(x)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few seconds, for tests")
    layers, hidden, steps = (2, 4, 12) if parser.parse_args().small else (3, 16, 48)

    torch.manual_seed(0)
    model = Stack(layers, hidden)
    xs, targets = torch.randn(steps, 4, 3), torch.randn(steps, 4, 2)
    mask = torch.zeros(steps)
    mask[-1] = 1  # a loss at the end only: all credit for earlier steps passes through time
    loss = nn.functional.mse_loss

    print(f"{layers} layers, {steps} steps, loss at the last one; cosine to torch BPTT\n")
    print(f"{'rule':30s} {'all':>8s}  " + "  ".join(f"layer {n}" for n in range(layers)))
    rules = {"rtrl, chunk 4": ("rtrl", 4), "d_rtrl, chunk 4": ("d_rtrl", 4)}
    rules |= {
        f"d_rtrl, credit='chunk', chunk {k}": (DRTRL(credit="chunk"), k) for k in (4, steps // 2)
    }
    exact = {}
    for name, (rule, chunk) in rules.items():
        report = eb.check_gradients(model, xs, targets, loss, rule=rule, chunk=chunk, mask=mask)
        assert report.ok, report
        by_layer = [report[f"gru.weight_hh_l{n}"].cosine for n in range(layers)]
        print(
            f"{name:30s} {report.cosine:8.5f}  " + "  ".join(f"{value:7.4f}" for value in by_layer)
        )
        exact[name] = all(row.verdict == "exact" for row in report)
    assert exact["rtrl, chunk 4"] and not exact["d_rtrl, chunk 4"]


if __name__ == "__main__":
    main()
