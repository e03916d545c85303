"""What credit through the whole step is worth in training: `python benchmarks/credit.py`.

Trains the models of two examples by D-RTRL and by pp-prop, with `core` and `step` credit, from
several seeds, and prints the accuracy on new data. Nothing is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import etrace_bridge as eb
from etrace_bridge.rules import DRTRL, PPProp, Rule

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import delayed_copy_gru as copying
import digits_lstm as digits

SEEDS = range(3)
RULES = {
    f"{rule.name} {rule.credit}": rule
    for rule in (DRTRL("core"), DRTRL("step"), PPProp(credit="core"), PPProp(credit="step"))
}


def learner_for(model: torch.nn.Module, rule: Rule, rate: float) -> eb.OnlineLearner:
    """Return a learner as the examples make it."""
    return eb.OnlineLearner(
        model,
        rule=rule,
        loss=cross_entropy,
        optimizer=torch.optim.Adam(model.parameters(), lr=rate),
    )


def copy_after(delay: int) -> Callable[[Rule, int], float]:
    """Return the accuracy of a GRU of 64 units that repeats symbols after a delay, after 500
    updates.
    """

    def run(rule: Rule, seed: int) -> float:
        torch.manual_seed(seed)
        model = copying.Copier(64)
        learner = learner_for(model, rule, 0.01)
        learner.fit([copying.make_batch(1000 * seed + n, 24, 32, delay) for n in range(500)])
        xs, targets, mask = copying.make_batch(1000 * seed + 999_999, 24, 256, delay)
        return copying.accuracy(learner.predict(xs), targets, mask)

    return run


def read_digits(rule: Rule, seed: int) -> float:
    """Return the test accuracy of an LSTM of 64 units that reads digits row by row, after 12
    epochs.
    """
    data, images, labels = digits.load()
    torch.manual_seed(seed)
    learner = learner_for(digits.Reader(64), rule, 0.005)
    loader, last_row = digits.batches_of(data, seed), torch.eye(digits.ROWS)[-1]
    learner.fit(lambda: ((images, labels, last_row) for images, labels in loader), 12)
    return float((learner.predict(images)[:, -1].argmax(-1) == labels).float().mean())


def main() -> None:
    """Print one row per task: the mean accuracy, and each seed's."""
    for task, run in {
        "copy after 3": copy_after(3),
        "copy after 5": copy_after(5),
        "digits by row": read_digits,
    }.items():
        for name, rule in RULES.items():
            found = [run(rule, seed) for seed in SEEDS]
            each = ", ".join(f"{a:.3f}" for a in found)
            print(f"{task:14s}  {name:13s}  {sum(found) / len(found):.3f}   ({each})", flush=True)


if __name__ == "__main__":
    main()
