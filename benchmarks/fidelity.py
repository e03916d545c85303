"""How close every rule comes to torch BPTT, over the zoo of torch modules: `python
benchmarks/fidelity.py`.

Keeps what it measured in `fidelity.json` beside this file and measures only what is missing there,
so a new rule costs only its own column. Then writes `docs/fidelity.md` and its picture.

Every module runs eight steps in chunks of four in float64, so that the rule's memory is used.
Cosine and relative error are those of all parameters that enter the recurrence, together, to
torch's own BPTT on the torch module. Memory and time are those of an online step of a larger model.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).with_suffix(".json")
CHUNK = 4
LAYERS, WIDTH, ROUNDS = 2, 64, 30  # the model of memory and time, and how often each step is timed


def shown_rules() -> dict[str, Callable[[], Any]]:
    """Return makers of the rules by their name in the tables: every registered one, and other kinds
    of credit.
    """
    from etrace_bridge.rules import DRTRL, LowRankRTRL, PPProp, make_rule, rule_names

    found: dict[str, Callable[[], Any]] = {}
    for name in rule_names():
        found[name] = lambda name=name: make_rule(name)
        if name == DRTRL.name:
            found["d_rtrl core"] = lambda: DRTRL("core")
            found["d_rtrl chunk"] = lambda: DRTRL("chunk")
        elif name == PPProp.name:
            found["pp_prop step"] = lambda: PPProp(credit="step")
        elif name == LowRankRTRL.name:
            found["low_rank hops=1"] = lambda: LowRankRTRL(hops=1)
            found["low_rank rank=2"] = lambda: LowRankRTRL(2)
            found["low_rank rank=4"] = lambda: LowRankRTRL(4)
    return found


def measure_case(case: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Return cosine and relative error of the rules that `known` lacks, for one module."""
    from etrace_bridge import BridgeError
    from run_in_numpy import run_in_numpy
    from zoo.online import OnlineCase

    rules = dict(known.get("rules", {}))
    missing = {name: make for name, make in shown_rules().items() if name not in rules}
    if not missing and known.keys() >= {"meter", "low_rank"}:
        return known
    online = OnlineCase(case, run_in_numpy)  # each program runs once: compiling is its cost
    for name, make in missing.items():
        try:
            grads = online.gradients(make(), CHUNK)
            rules[name] = [online.cosine(grads), online.relative_error(grads)]
        except BridgeError as error:
            rules[name] = str(error)
    certificates = online.certificates().values()
    exact = f"{sum(c.exact for c in certificates)} of {len(certificates)}"
    return {
        "exact": exact,
        "rules": rules,
        "meter": online.meter_error(),
        "low_rank": low_rank_ends(online),
    }


def low_rank_ends(online: Any) -> dict[str, float]:
    """How far rank 0 of `low_rank` is from `d_rtrl` and full rank from BPTT, relative to the
    largest value of each parameter's gradient.
    """
    from etrace_bridge.rules import DRTRL, LowRankRTRL

    rules = DRTRL("chunk"), LowRankRTRL(0), LowRankRTRL(10**6)
    diagonal, first, last = (online.gradients(rule, CHUNK) for rule in rules)
    scale = max(np.abs(g).max() for g in diagonal.values())
    differences = [
        np.abs(first[n] - g).max() / max(np.abs(g).max(), 1e-3 * scale) for n, g in diagonal.items()
    ]
    return {"rank 0": float(max(differences)), "full rank": max(online.errors(last).values())}


def measure_zoo(results: dict[str, Any], minutes: float, only: str) -> None:
    """Measure what is missing, module after module; `results` is saved after each.

    Modules come in a random order, the same in every run, so that a run that ends early leaves a
    fair share of the zoo.
    """
    from torch_zoo import trained_cases

    end = time.monotonic() + 60 * minutes
    cases = trained_cases()
    results["zoo"] = len(cases)
    for case in random.Random(0).sample(cases, len(cases)):
        known = results["modules"].get(case.name, {})
        if only not in case.name or time.monotonic() > end:
            continue
        found = measure_case(case, known)
        if found is known:
            continue
        measured = results["modules"] | {case.name: found}
        results["modules"] = {c.name: measured[c.name] for c in cases if c.name in measured}
        save(results)
        shown = "  ".join(
            f"{name} {v[0]:.3f} {v[1]:.1e}" if isinstance(v, list) else f"{name} -"
            for name, v in found["rules"].items()
        )
        print(f"{case.name}  meter {found['meter']:.0e}  {shown}", flush=True)


def measure_costs(results: dict[str, Any], clock_name: str) -> None:
    """Return memory and time of an online step, all rules in turn: the least of several rounds."""
    import optax
    import torch

    import etrace_bridge as eb
    from benchmarks.loop_cost import CLOCKS
    from etrace_bridge.learning.footprint import tree_bytes

    clock, results["clock"] = CLOCKS[clock_name], clock_name
    steppers, x = {}, torch.randn(1, WIDTH)
    for name, make in shown_rules().items():
        rule = make()
        if rule.truncates:
            continue  # credit over one step only: not what the zoo's chunks of four give it
        torch.manual_seed(0)
        model = torch.nn.GRU(WIDTH, WIDTH, LAYERS)
        try:
            learner = eb.OnlineLearner(
                model, rule, torch.nn.functional.mse_loss, optax.sgd(1e-3), guard=False
            )
            learner.step(x, torch.zeros(1, WIDTH)).loss  # noqa: B018 - waits
        except eb.BridgeError as error:
            print(f"{name}: {error}")
            continue
        values = learner.runtime.store.state
        results["costs"][name] = {
            "weights": tree_bytes(values.theta),
            "memory": tree_bytes(values.trace),
        }
        steppers[name] = lambda learner=learner: learner.step(x, torch.zeros(1, WIDTH)).loss
    plain = eb.OnlineLearner(torch.nn.GRU(WIDTH, WIDTH, LAYERS), "bptt", guard=False)
    steppers["forward"] = lambda: plain.step(x).output  # no loss, and this rule has no memory
    steppers["forward"]()
    seconds = dict.fromkeys(steppers, np.inf)
    for _ in range(ROUNDS):
        for name, call in steppers.items():
            begun = clock()
            call()
            seconds[name] = min(seconds[name], clock() - begun)
    for name, value in seconds.items():
        results["costs"].setdefault(name, {})["seconds"] = value
        print(f"{name}: {value * 1e6:,.0f} us", flush=True)


def save(results: dict[str, Any]) -> None:
    """Write what was measured."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    """Measure what is missing and write the page."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from benchmarks.fidelity_page import write_page
    from benchmarks.loop_cost import CLOCKS

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="begin no further module after this long"
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="measure only modules with this in their name"
    )
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--costs", action="store_true", help="measure memory and time again")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="time of costs: cpu is processor time"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    results = {"modules": {}, "costs": {}, "clock": options.clock}
    if RESULTS.exists() and not options.fresh:
        results = json.loads(RESULTS.read_text())
    online = {name for name, make in shown_rules().items() if not make().truncates}
    if options.costs or not set(results["costs"]) >= online:
        measure_costs(results, options.clock)
        save(results)
    jax.config.update("jax_enable_x64", True)
    measure_zoo(results, options.minutes, options.only)
    for path in write_page(results):
        print(f"Wrote {path.relative_to(ROOT)}.")


if __name__ == "__main__":
    main()
