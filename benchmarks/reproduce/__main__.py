"""Run published experiments again: `python -m benchmarks.reproduce [--task A B ...] [--seeds 3]
[--methods d_rtrl ...] [--scale 0.1]`.

Each finished run is written to `results/TASK.json` beside this file, so that a run that was stopped
goes on where it was. The page docs/reproduce.md and its pictures are made from these files.
"""

from __future__ import annotations

import argparse
import math
import time

from benchmarks.reproduce import (
    chaotic,
    diagnostics,
    match_to_sample,
    patterning,
    sequences,
    spiking,
    t_maze,
)
from benchmarks.reproduce.closeness import compare
from benchmarks.reproduce.methods import methods_for
from benchmarks.reproduce.page import write_page
from benchmarks.reproduce.programs import forget
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.tasks import Size, Task

TASKS: dict[str, Task] = {
    task.key: task
    for task in (
        chaotic.TASK,
        diagnostics.TASK,
        t_maze.TASK,
        patterning.TASK,
        spiking.EVIDENCE,
        sequences.COPY_WITH_LRU,
        match_to_sample.MATCH,
        sequences.CURRICULUM,
        sequences.DIGITS,
    )
}


def run_task(
    task: Task, seeds: int, names: list[str] | None, settings: list[str] | None, size: Size
) -> None:
    """Run what is missing of a task, and say how it goes."""
    results = Results(task.key)
    for setting in settings or task.settings:
        stored, asked = results.steps(setting), size.steps(task.steps[setting], 0)
        if stored not in (None, asked):
            raise SystemExit(
                f"{results.path.name} has runs of {setting} with {stored:,} {task.unit}, not "
                f"{asked:,}. Use --scale {stored / task.steps[setting]:g}, or delete them first."
            )
    methods = methods_for(task, names)
    wanted = [
        (setting, name, seed)
        for name in methods
        for setting in settings or task.settings
        for seed in range(seeds)
    ]
    missing = [each for each in wanted if not results.has(*each)]
    done = len(wanted) - len(missing)
    print(f"{task.key}  {task.title}: {len(missing)} runs to make, {done} there", flush=True)
    for n, (setting, name, seed) in enumerate(missing, 1):
        start = time.perf_counter()
        if n > 1 and name != missing[n - 2][1]:
            forget()
        try:
            outcome = task.run(setting, methods[name], seed, size)
            close = compare(outcome.piece, methods[name])
        except Exception as error:  # one method that fails must not end a run of hours
            print(f"  {setting}, {name}, seed {seed}: {type(error).__name__}: {error}", flush=True)
            continue
        results.add(setting, name, seed, outcome, close)
        text = f"{n}/{len(missing)}  {setting}, {name}, seed {seed}"
        seconds = time.perf_counter() - start
        print(
            f"  {text}: {outcome.score:.4g}  cosine {close[0] if close else math.nan:.3f}  ({seconds:.0f} s)",
            flush=True,
        )


def main() -> None:
    """Run tasks and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reproduce", description=__doc__)
    parser.add_argument("--task", nargs="+", choices=sorted(TASKS), default=sorted(TASKS))
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds (default 3)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="only these methods")
    parser.add_argument(
        "--settings", nargs="+", metavar="NAME", help="only these settings of the task"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="share of the full training (default 1)"
    )
    parser.add_argument("--page-only", action="store_true", help="make the page from what is there")
    options = parser.parse_args()
    if not options.page_only:
        for key in options.task:
            size = Size(scale=options.scale)
            run_task(TASKS[key], options.seeds, options.methods, options.settings, size)
    write_page(TASKS)


if __name__ == "__main__":
    main()
