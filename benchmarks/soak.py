"""Long runs must not grow: `python -m benchmarks.soak [--steps 1000000] [--learners 300] [--minutes
60]`.

First one learner makes many online steps with changing batch sizes, then learners are made, used
and dropped. All but the first learner read their compiled programs from a folder, as a user's would
with `cache_dir`: compiling each anew would be nearly all of the time. The resident memory is printed along the way; the exit code is 1 if it grew by more
than `LIMIT` after the first fifth, which has compiled everything.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import jax
import torch
from torch import nn
from torch.nn import functional as F

import etrace_bridge as eb

BATCHES = (1, 4, 2, 8, 3)
LIMIT = 32  # MB
CLASSES, WORDS = 5, 11


class Tagger(nn.Module):
    """Token ids in, class scores out, as in the most common use: int64 ids and labels."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, 8)
        self.rnn = nn.GRU(8, hidden)
        self.out = nn.Linear(hidden, CLASSES)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Class scores of a sequence."""
        return self.out(self.rnn(self.emb(ids))[0])


def make_learner(cache_dir: str | None = None) -> eb.OnlineLearner:
    """A learner with everything that holds memory: trace, optimizer slots, compiled programs."""
    model = Tagger()
    return eb.OnlineLearner(
        model,
        "d_rtrl",
        F.cross_entropy,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        cache_dir=cache_dir,
    )


def run_steps(
    total: int, per_batch_size: int = 500, sizes: tuple[int, ...] = BATCHES
) -> Iterator[int]:
    """Make online steps and yield how many are done, after each change of the batch size; the last
    loss of each is read.
    """
    learner, done = make_learner(), 0
    for size in itertools.cycle(sizes):
        learner.reset()
        ids, labels = torch.randint(WORDS, (64, size)), torch.randint(CLASSES, (64, size))
        for n in range(min(per_batch_size, total - done)):
            info = learner.step(ids[n % 64], labels[n % 64])
            done += 1
        if not info.loss < 100:
            raise RuntimeError(f"The loss is {info.loss} after {done} steps.")
        yield done
        if done >= total:
            return


def run_learners(total: int) -> Iterator[int]:
    """Make, use and drop learners, and yield how many."""
    ids, labels = torch.randint(WORDS, (4, 2)), torch.randint(CLASSES, (4, 2))
    with tempfile.TemporaryDirectory() as folder:
        for n in range(total):
            learner = make_learner(folder)
            for x, y in zip(ids, labels, strict=True):
                learner.step(x, y)
            learner.update(ids, labels)
            del learner
            gc.collect()
            yield n + 1


def resident() -> float:
    """Resident memory of this process in MB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def watch(
    name: str,
    total: int,
    progress: Iterator[int],
    deadline: float,
    say: Callable[[str], None] = print,
) -> float:
    """Run to the end or to the deadline and give the growth of memory in MB after the first fifth."""
    begun, early, next_report = time.monotonic(), None, 0.0
    done = 0
    for done in progress:
        now = resident()
        if early is None and done >= total / 5:
            early = now
        if done / total >= next_report or done == total:
            next_report = done / total + 0.1
            say(
                f"{name}: {done:,} of {total:,}, {now:.0f} MB, {len(jax.live_arrays())} arrays, "
                f"{time.monotonic() - begun:.0f} s"
            )
        if time.monotonic() > deadline:
            say(f"{name}: stopped after {done:,}, out of time")
            break
    growth = resident() - (early if early is not None else resident())
    say(f"{name}: grew by {growth:.1f} MB since the first fifth")
    return growth


def main(arguments: list[str] | None = None) -> int:
    """Run both and tell whether memory stayed flat."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--learners", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=60.0, help="most time for each part")
    options = parser.parse_args(arguments)
    growth = 0.0
    if options.steps:
        growth = watch(
            "steps",
            options.steps,
            run_steps(options.steps),
            time.monotonic() + 60 * options.minutes,
        )
    if options.learners:
        growth = max(
            growth,
            watch(
                "learners",
                options.learners,
                run_learners(options.learners),
                time.monotonic() + 60 * options.minutes,
            ),
        )
    return int(growth > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
