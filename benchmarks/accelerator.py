"""Time online steps and sequences on this machine's device, and print JSON to send back.

python benchmarks/accelerator.py [--small] > result.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
import torch

import etrace_bridge as eb

RULES = ("d_rtrl", "pp_prop", "bptt")


def best_of(call: Callable[[], Any], repeats: int) -> float:
    """Return the least seconds of several runs, after one that compiles."""
    jax.block_until_ready(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return min(times)


def measure(
    rule: str, units: int, inputs: int, batch: int, steps: int, repeats: int
) -> dict[str, Any]:
    """Return the seconds of a step, and of a sequence's gradients, of a GRU."""
    torch.manual_seed(0)
    xs, targets = torch.randn(steps, batch, inputs), torch.randn(steps, batch, units)
    make = lambda: eb.OnlineLearner(
        torch.nn.GRU(inputs, units), rule, torch.nn.functional.mse_loss, optax.sgd(1e-3)
    )
    online, whole = make(), make()

    def stream() -> Any:
        for x, y in zip(xs[:20], targets[:20], strict=True):
            info = online.step(x, y)
        return info.raw_loss

    return {
        "rule": rule, "units": units, "inputs": inputs, "batch": batch, "steps": steps,
        "seconds_per_online_step": best_of(stream, repeats) / min(20, steps),
        "seconds_per_sequence": best_of(lambda: list(whole.gradients(xs, targets).raw_grads.values()), repeats),
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    small = parser.parse_args(arguments).small
    sizes = [(8, 4, 2, 4)] if small else [(256, 64, 64, 200), (1024, 256, 256, 1000)]
    rows = []
    for size in sizes:
        for rule in RULES:
            try:
                rows.append(measure(rule, *size, repeats=1 if small else 5))
            except Exception as error:  # out of memory is a result, too
                rows.append(
                    {"rule": rule, "sizes": size, "error": f"{type(error).__name__}: {error}"[:500]}
                )
    device = jax.devices()[0]
    about = {
        "device": device.device_kind,
        "platform": device.platform,
        "memory": device.memory_stats(),
        "jax": jax.__version__,
    }
    print(
        json.dumps(
            {
                **about,
                "torch": torch.__version__,
                "python": platform.python_version(),
                "rows": rows,
            },
            indent=1,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
