"""What a step of a torch loop with `OnlineModule` costs, next to the learner's and torch's own.

    python -m benchmarks.torch_loop_cost [--clock cpu]

A step of `OnlineModule` is the call, the loss and `backward()`; one of torch is the same through
the plain model, from a detached state; one of the learner is `OnlineLearner.step` with its update.
The torch loops also run SGD after every step, untimed, so that every step meets new weights.
Targets (GRU, 128 units, batch 1): at most 2.0 times the learner's step, and less than torch's. Each
program runs in turns of its own. On a machine that others use,
`OMP_NUM_THREADS=1 taskset -c 0 python -m benchmarks.torch_loop_cost --clock cpu` still gives fair
ratios.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from benchmarks.baselines import RATE
from benchmarks.harness import CLOCKS
from benchmarks.workloads import WORKLOADS, data, torch_model

WORKLOAD = next(w for w in WORKLOADS if w.name == "online-step")
RATIO = 2.0
STEPS = 400  # of a turn


def learner_step(clock: Callable[[], float]) -> Callable[[], list[float]]:
    """Return a step of the learner; it gives the seconds that it took."""
    xs, targets = data(WORKLOAD)
    learner = eb.OnlineLearner(
        torch_model(WORKLOAD), rule="d_rtrl", loss=mse_loss, optimizer=optax.sgd(RATE)
    )

    def run() -> list[float]:
        start = clock()
        jax.block_until_ready(learner.step(xs[0], targets[0]).raw_loss)
        return [clock() - start]

    return run


def torch_step(clock: Callable[[], float], online: bool) -> Callable[[], list[float]]:
    """Return a step of a torch loop; it gives the seconds of the call, the loss and `backward`."""
    model, (xs, targets) = torch_model(WORKLOAD), data(WORKLOAD)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    module: Any = eb.OnlineModule(model, rule="d_rtrl") if online else model
    hidden = torch.zeros(1, WORKLOAD.batch, WORKLOAD.hidden)

    def run() -> list[float]:
        nonlocal hidden
        times = [clock()]
        if online:
            output = module(xs[0])
        else:
            output, hidden = module.gru(xs, hidden)
            output = module.readout(output)[0]
        times.append(clock())
        loss = mse_loss(output, targets[0])
        times.append(clock())
        loss.backward()
        hidden = hidden.detach()
        times.append(clock())
        optimizer.step()
        optimizer.zero_grad()
        return [end - start for start, end in zip(times, times[1:], strict=False)]

    return run


def least(run: Callable[[], list[float]]) -> list[float]:
    """Run a turn, and return the parts of its 20th fastest step: fast, and not a lucky one."""
    times = sorted((run() for _ in range(STEPS)), key=sum)
    return times[STEPS // 20]


def main() -> int:
    """Print the rows; 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="Cost of a step in a torch loop.")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time")
    parser.add_argument("--turns", type=int, default=8, help="turns of each program (default 8)")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    runs = {
        "learner": learner_step(clock),
        "OnlineModule": torch_step(clock, online=True),
        "torch": torch_step(clock, online=False),
    }
    best: dict[str, list[float]] = {}
    for _ in range(1 + options.turns):  # the first warms up
        turn = {name: least(run) for name, run in runs.items()}
        best = {name: min(turn[name], best.get(name, turn[name]), key=sum) for name in runs}
    seconds = {name: sum(parts) for name, parts in best.items()}
    for name, parts in best.items():
        split = ", ".join(
            f"{what} {1e6 * part:.0f}"
            for what, part in zip(("call", "loss", "backward"), parts, strict=False)
            if len(parts) > 1
        )
        print(
            f"{name:<14}{1e6 * seconds[name]:6.0f} µs   {seconds[name] / seconds['learner']:5.2f} "
            f"of the learner   {seconds[name] / seconds['torch']:5.2f} of torch   {split}"
        )
    ratio = seconds["OnlineModule"] / seconds["learner"]
    missed = ratio > RATIO or seconds["OnlineModule"] >= seconds["torch"]
    print(f"targets: at most {RATIO} of the learner, below torch: {'missed' if missed else 'met'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
