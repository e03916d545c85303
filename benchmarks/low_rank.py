"""Low-rank RTRL measured: `python -m benchmarks.low_rank table | time`.

`table`: cosine and relative error to BPTT by rank, by brute force with an SVD of the dense
influence, mean over seeds; with `--engine` the engine's own gradients beside it. `time`: an online
step beside that of `d_rtrl` and of `rtrl`, interleaved; on a machine that others use, with `--clock
cpu`. `benchmarks/fidelity.py` measures the rule over the zoo of torch modules.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import jax
import numpy as np

from benchmarks.loop_cost import CLOCKS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

RULES = {
    "d_rtrl": (0, None),
    "hops=1, rank 1": (1, 1),
    "rank 1": (1, None),
    "rank 2": (2, None),
    "rank 4": (4, None),
}


def table(options: argparse.Namespace) -> None:
    """Print cosine / relative error of each model by rank."""
    from etrace_bridge.rules import LowRankRTRL
    from low_rank_oracle import GRU, LIF, Reference, engine, joined, relative

    models = {
        "GRU, 1 layer H=8": lambda: GRU(8, 1),
        "GRU, 3 layers H=8": lambda: GRU(8, 3),
        "GRU H=32, weights x 2": lambda: GRU(32, 1, 2.0),
        "recurrent LIF H=32": lambda: LIF(32, 1),
        "recurrent LIF, 2 layers H=8": lambda: LIF(8, 2),
        "LIF, 2 layers, no recurrent weights, one decay": lambda: LIF(8, 2, recurrent=False),
        "the same, a decay a unit": lambda: LIF(8, 2, recurrent=False, decay=None),
    }
    print("| | " + " | ".join(RULES) + " |\n|" + "---|" * (len(RULES) + 1))
    for name, build in models.items():
        references = [Reference(build, seed, options.steps, 1) for seed in range(options.seeds)]
        cells, worst = [], 0.0
        for rank, hops in RULES.values():
            pairs = [(ref.gradient(rank, hops), ref.bptt()) for ref in references]
            cosines = [_cosine(joined(a), joined(b)) for a, b in pairs]
            cells.append(
                f"{np.mean(cosines):.4f} / {np.mean([relative(a, b) for a, b in pairs]):.3f}"
            )
            if options.engine:
                found, _ = engine(references[0], LowRankRTRL(rank, hops))
                worst = max(worst, relative(found, pairs[0][0]))
        end = f"   engine to brute force: {worst:.0e}" if options.engine else ""
        print(f"| {name} | " + " | ".join(cells) + f" |{end}", flush=True)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def steps(options: argparse.Namespace) -> None:
    """Print the least time of an online step under each rule, and its ratio to `d_rtrl`."""
    import optax
    import torch

    import etrace_bridge as eb
    from benchmarks.workloads import WORKLOADS, data, torch_model
    from etrace_bridge.rules import rule_text

    workload = next(w for w in WORKLOADS if w.name == "online-step")
    xs, targets = data(workload)
    x, target = (jax.numpy.asarray(a[0].numpy()) for a in (xs, targets))
    rules = [
        eb.rules.DRTRL(),
        eb.rules.LowRankRTRL(1, hops=1),
        eb.rules.LowRankRTRL(1),
        eb.rules.LowRankRTRL(4),
        eb.rules.RTRL(),
    ]
    learners, best, clock = {}, {}, CLOCKS[options.clock]
    for rule in rules[: options.rules]:
        learner = eb.OnlineLearner(
            eb.wrap(torch_model(workload)),
            rule=rule,
            loss=torch.nn.functional.mse_loss,
            optimizer=optax.sgd(1e-3),
        )
        learners[rule_text(rule)], best[rule_text(rule)] = learner, np.inf
        jax.block_until_ready(learner.step(x, target).raw_loss)
    for _ in range(options.repeats):
        for name, learner in learners.items():
            start = clock()
            for _ in range(10):
                info = learner.step(x, target)
            jax.block_until_ready(info.raw_loss)
            best[name] = min(best[name], (clock() - start) / 10)
    for name, seconds in best.items():
        print(
            f"{name:22s} {1e6 * seconds:7.0f} us   {seconds / best['d_rtrl']:6.2f} x d_rtrl   "
            f"({workload.shape})"
        )


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.low_rank", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("what", choices=("table", "time"))
    parser.add_argument("--seeds", type=int, default=5, help="table: seeds (default 5)")
    parser.add_argument("--steps", type=int, default=20, help="table: time steps (default 20)")
    parser.add_argument(
        "--engine",
        action="store_true",
        help="table: compare the engine with brute force, for the first seed",
    )
    parser.add_argument(
        "--repeats", type=int, default=40, help="time: rounds of 10 steps of each rule (default 40)"
    )
    parser.add_argument("--rules", type=int, default=5, help="time: only the first N rules")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="time: cpu is processor time"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    jax.config.update("jax_enable_x64", options.what != "time")
    {"table": table, "time": steps}[options.what](options)


if __name__ == "__main__":
    main()
