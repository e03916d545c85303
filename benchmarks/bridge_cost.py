"""What the front-end costs: tracing time, and the steady step next to torch eager at batch 1.

    python benchmarks/bridge_cost.py

Targets: a 2-layer GRU with readout traced in at most 0.2 s, 50 stacked Linear + snnTorch Leaky
layers in at most 3 s, and the jitted step no slower than torch's. Times are the least of several;
the first trace of a process warms imports up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import brainstate
import jax
import torch
from torch import nn

import etrace_bridge as eb


class Reader(nn.Module):
    """Two GRU layers and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(32, 128, 2)
        self.out = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(x)[0])


def spiking_stack(layers: int = 50) -> nn.Module:
    """Linear and Leaky, many times."""
    import snntorch

    blocks = [
        (nn.Linear(16, 16), snntorch.Leaky(beta=0.9, init_hidden=True)) for _ in range(layers)
    ]
    return nn.Sequential(*(part for block in blocks for part in block))


def trace_seconds(make: Callable[[], nn.Module], x: torch.Tensor) -> float:
    """Wrap a fresh model, make its states and trace one step."""
    model = make()
    begin = time.perf_counter()
    net = eb.wrap(model, example_input=x)
    net.init_state(batch_size=x.shape[0])
    net.traced_step(eb.to_jax(x))
    return time.perf_counter() - begin


def step_times(repeats: int = 300) -> tuple[float, float, float]:
    """Return the microseconds of one step at batch 1, taken turn by turn: `steady_step`,
    `brainstate.transform.jit`, torch eager.

    `steady_step` gets the torch tensor that torch gets; brainstate's gets a JAX array.
    """
    model, x = Reader(), torch.randn(1, 32)
    net = eb.wrap(model)
    net.init_state(batch_size=1)
    steady, step, value = net.steady_step(x), brainstate.transform.jit(net), eb.to_jax(x)
    jax.block_until_ready((steady(x), step(value)))
    ours, theirs, torchs, state = [], [], [], None
    with torch.no_grad():
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(steady(x))
            ours.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            jax.block_until_ready(step(value))
            theirs.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            out, state = model.gru(x[None], state)
            model.out(out)
            torchs.append(time.perf_counter() - begin)
    return min(ours) * 1e6, min(theirs) * 1e6, min(torchs) * 1e6


def main() -> None:
    """Print the four rows."""
    trace_seconds(Reader, torch.randn(1, 32))
    gru = min(trace_seconds(Reader, torch.randn(1, 32)) for _ in range(3))
    print(f"trace 2-layer GRU + readout      {gru:6.3f} s   (at most 0.2)")
    stack = min(trace_seconds(spiking_stack, torch.randn(1, 16)) for _ in range(2))
    print(f"trace 50 x (Linear + Leaky)      {stack:6.3f} s   (at most 3)")
    ours, theirs, torchs = step_times()
    print(
        f"step at batch 1, ours / torch    {ours:6.0f} / {torchs:.0f} us = {ours / torchs:.2f}   "
        "(at most 1)"
    )
    print(
        f"  by brainstate.transform.jit    {theirs:6.0f} / {torchs:.0f} us = "
        f"{theirs / torchs:.2f}   (reads and writes every state)"
    )


if __name__ == "__main__":
    main()
