"""This tree's programs against those of another checkout, turn by turn: did a change cost speed?

    git worktree add ../before main
    python -m benchmarks.against ../before --only lstm-3 convlstm

Each tree has a process of its own, which compiles the workload and then runs it when told to; only
one of them runs at a time. The least time of each counts, so the ratio holds on a noisy machine
where two runs of `make bench` would not.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.workloads import WORKLOADS

_WORKER = """
import sys, time
from benchmarks.ours import make_ours
from benchmarks.workloads import WORKLOADS

workload = next(w for w in WORKLOADS if w.name == sys.argv[1])
run = make_ours(workload).run
turn = 0.3 if workload.mode == "step" else 0.0
for line in sys.stdin:  # each line asks for a turn
    best, begin = float("inf"), time.perf_counter()
    while best == float("inf") or time.perf_counter() - begin < turn:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    print(best, flush=True)
"""


class Worker:
    """A process that runs one workload with the package of one tree.

    Args:
        tree: the checkout.
        workload: the row's name.
    """

    def __init__(self, tree: Path, workload: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, workload],
            cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.turn()  # compiles
        self.turn()

    def turn(self) -> float:
        """Seconds of the fastest run of one turn."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the benchmark's process ended with {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(other: Path, workload: str, turns: int) -> tuple[float, float]:
    """Least seconds of this tree and of the other."""
    workers = [Worker(Path(__file__).parents[1], workload), Worker(other, workload)]
    times = [[worker.turn() for worker in workers] for _ in range(turns)]
    for worker in workers:
        worker.close()
    here, there = (min(column) for column in zip(*times, strict=True))
    return here, there


def main() -> None:
    """Print one line per row."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.against")
    parser.add_argument("tree", type=Path, help="another checkout of this repository")
    parser.add_argument("--only", nargs="+", default=[w.name for w in WORKLOADS], metavar="ROW")
    parser.add_argument("--turns", type=int, default=15, help="default %(default)s")
    arguments = parser.parse_args()
    print(f"{'row':16}{'here ms':>10}{'there ms':>10}{'here / there':>14}")
    for row in arguments.only:
        here, there = compare(arguments.tree.resolve(), row, arguments.turns)
        print(f"{row:16}{1e3 * here:10.3f}{1e3 * there:10.3f}{here / there:14.2f}", flush=True)


if __name__ == "__main__":
    main()
