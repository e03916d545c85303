"""What the fidelity meter costs: `python benchmarks/meter_cost.py`.

Times of a learner's step and of a metered one, and of an update from a sequence with and without
the meter, interleaved, the least of several rounds, as ratios within this run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import optax
import torch

import etrace_bridge as eb


def fastest(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the least time of each call, all in turn."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            begun = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begun)
    return best


def measure(hidden: int, batch: int, steps: int, rounds: int, rule: str) -> dict[str, float]:
    """Return the seconds of each program, for a GRU."""
    loss = torch.nn.functional.mse_loss
    made = {}
    for name in ("step", "metered step", "forward step", "update", "metered update"):
        torch.manual_seed(0)
        made[name] = eb.OnlineLearner(torch.nn.GRU(hidden, hidden), rule, loss, optax.sgd(1e-3))
    x, target = torch.randn(batch, hidden), torch.randn(batch, hidden)
    xs, targets = torch.randn(steps, batch, hidden), torch.randn(steps, batch, hidden)
    stream, sequences = eb.FidelityMeter(window=10**9), eb.FidelityMeter()

    def metered_update() -> float:
        sequences.before_batch(made["metered update"], xs, targets, None, False)
        return made["metered update"].update(xs, targets).loss

    calls = {
        "forward step": lambda: made["forward step"].predict(x[None], carry=True),
        "step": lambda: made["step"].step(x, target).loss,
        "metered step": lambda: stream.step(made["metered step"], x, target).loss,
        "update": lambda: made["update"].update(xs, targets).loss,
        "metered update": metered_update,
    }
    return fastest(calls, rounds)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description="Cost of the fidelity meter.")
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    print(
        "| GRU | rule | step | metered / step | update | metered / update |\n"
        "|---|---|---|---|---|---|"
    )
    for hidden, batch, rule in ((128, 1, "d_rtrl"), (256, 16, "d_rtrl"), (256, 16, "pp_prop")):
        found = measure(hidden, batch, 50, options.rounds, rule)
        step, update = found["step"], found["update"]
        print(
            f"| H={hidden} B={batch} | `{rule}` | {step * 1e6:,.0f} us | "
            f"{found['metered step'] / step:.2f} | {update * 1e3:.1f} ms | "
            f"{found['metered update'] / update:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
