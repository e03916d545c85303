"""How large the compiled online step is: lines of optimised HLO for 1 to 50 stacked GRU layers.

    python benchmarks/step_size.py [layers ...]

The target is linear growth: every layer adds the same number of lines. The time is the CPU time of
the first `step`, which traces the model, builds its graph and compiles the program; other programs
on the machine do not count.
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax
import torch

import etrace_bridge as eb

BATCH, WIDTH = 4, 8


def measure(layers: int, cell: type[torch.nn.RNNBase] = torch.nn.GRU) -> tuple[int, float]:
    """Lines of the largest program that the first online step compiles, and the seconds of CPU
    time that the step takes.
    """
    learner = eb.OnlineLearner(
        cell(WIDTH, WIDTH, layers), loss=torch.nn.functional.mse_loss, optimizer=optax.adam(1e-3)
    )
    client = jax.devices()[0].client
    # Held, so that no new program can get the identity of an old one
    known = client.live_executables()
    start = time.process_time()
    learner.step(torch.ones(BATCH, WIDTH), torch.zeros(BATCH, WIDTH))
    seconds = time.process_time() - start
    new = [
        program for program in client.live_executables() if all(program is not old for old in known)
    ]
    texts = [module.to_string() for program in new for module in program.hlo_modules()]
    return max(len(text.splitlines()) for text in texts), seconds


def main(counts: list[int]) -> int:
    measure(1)  # imports and first-call costs of JAX itself
    print(f"{'layers':>6}  {'lines of HLO':>12}  {'lines per layer':>15}  {'CPU time (s)':>14}")
    for layers in counts:
        lines, seconds = measure(layers)
        print(f"{layers:>6}  {lines:>12,}  {lines / layers:>15,.0f}  {seconds:>14.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main([int(n) for n in sys.argv[1:]] or [1, 5, 10, 20, 50]))
