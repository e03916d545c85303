"""Low-rank RTRL measured: `python -m benchmarks.low_rank table | zoo | time`.

`table`: cosine and relative error to BPTT by rank, by brute force with an SVD of the dense
influence, mean over seeds; with `--engine` the engine's own gradients beside it. `zoo`: over the
zoo of torch modules, rank 0 beside `d_rtrl`, full rank beside torch BPTT, and the mean error by
rank; it keeps what it measured in `low_rank.json` beside this file, and goes on where it stopped.
`time`: an online step beside that of `d_rtrl` and of `rtrl`, interleaved; on a machine that others
use, with `--clock cpu`.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.loop_cost import CLOCKS

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

RESULTS = Path(__file__).with_suffix(".json")
CHUNK = 4
RANKS = (0, 1, 2, 4)
RANK_0, FULL_RANK = 1e-10, 1e-9  # how far from `d_rtrl` and from BPTT
FLOAT32 = 2e-6  # both, for the modules that compute in float32 inside

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


def zoo(options: argparse.Namespace) -> None:
    """Measure the modules that `low_rank.json` does not have, and print what all of them say."""
    from torch_zoo import CASES

    cases = [c for c in CASES if c.available and not c.float32_only]
    cases = [c for c in cases if any(p.requires_grad for p in c.build().parameters())]
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() and not options.fresh else {}
    results = {c.name: known[c.name] for c in cases if c.name in known}
    for case in [c for c in cases[options.start :: options.every] if c.name not in results]:
        results[case.name] = _measure(case)
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{len(results)} of {len(cases)}  {_line(case.name, results[case.name])}", flush=True)
    bad = [name for name, found in results.items() if not _holds(name, found)]
    print(f"{len(results)} of {len(cases)} modules; not within the tolerance: {len(bad)}")
    for name in bad:
        print(_line(name, results[name]))
    by_rank = np.array([found["by rank"] for found in results.values()])
    for rank, mean in zip(RANKS, by_rank.mean(0), strict=True):
        print(f"mean relative error at rank {rank}: {mean:.5f}")


def _measure(case: Any) -> dict[str, Any]:
    """Return how far rank 0 is from `d_rtrl` and full rank from BPTT, relative to the largest value
    of each parameter's gradient; and the relative error of the whole gradient by rank.
    """
    from etrace_bridge.rules import DRTRL, LowRankRTRL
    from zoo.online import OnlineCase

    online = OnlineCase(case)
    diagonal = online.gradients(DRTRL("chunk"), CHUNK)
    found = {rank: online.gradients(LowRankRTRL(rank), CHUNK) for rank in (*RANKS, 10**6)}
    scale = max(np.abs(g).max() for g in diagonal.values())
    differences = [
        np.abs(found[0][n] - g).max() / max(np.abs(g).max(), 1e-3 * scale)
        for n, g in diagonal.items()
    ]
    return {
        "rank 0": float(max(differences)),
        "full rank": max(online.errors(found[10**6]).values()),
        "by rank": [_relative(online, found[rank]) for rank in RANKS],
    }


def _holds(name: str, found: dict[str, Any]) -> bool:
    from zoo.online import FLOAT32_INSIDE

    rank_0, full_rank = (FLOAT32, FLOAT32) if name in FLOAT32_INSIDE else (RANK_0, FULL_RANK)
    return found["rank 0"] < rank_0 and found["full rank"] < full_rank


def _line(name: str, found: dict[str, Any]) -> str:
    by_rank = "  ".join(f"{error:.4f}" for error in found["by rank"])
    bad = "" if _holds(name, found) else "  <- too far"
    ends = f"rank 0 {found['rank 0']:.0e}  full rank {found['full rank']:.0e}"
    return f"{name:40s} {ends}  by rank {by_rank}{bad}"


def _relative(online: Any, grads: dict[str, np.ndarray]) -> float:
    wanted = {n: g.numpy() for n, g in online.ref.grads.items() if n in grads}
    square = sum(((grads[n] - g) ** 2).sum() for n, g in wanted.items())
    return float(np.sqrt(square / sum((g**2).sum() for g in wanted.values())))


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
    """Run one of the three."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.low_rank", description=__doc__.splitlines()[0]
    )
    parser.add_argument("what", choices=("table", "zoo", "time"))
    parser.add_argument("--seeds", type=int, default=5, help="table: seeds (default 5)")
    parser.add_argument("--steps", type=int, default=20, help="table: time steps (default 20)")
    parser.add_argument(
        "--engine",
        action="store_true",
        help="table: compare the engine with brute force, for the first seed",
    )
    parser.add_argument(
        "--every", type=int, default=1, metavar="N", help="zoo: only every N-th module"
    )
    parser.add_argument(
        "--start", type=int, default=0, metavar="N", help="zoo: from this module on"
    )
    parser.add_argument("--fresh", action="store_true", help="zoo: measure every module again")
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
    {"table": table, "zoo": zoo, "time": steps}[options.what](options)


if __name__ == "__main__":
    main()
