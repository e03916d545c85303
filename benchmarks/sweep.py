"""Time and memory against the length of the sequence and against the hidden size, their plot, and
the memory of long sequences.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import FOLDER, MAKERS, measure
from benchmarks.ours import make_ours
from benchmarks.workloads import Workload

SHOWN = {"ours": "etrace_bridge", "yardstick": "written by hand"}  # the programs' names in the plot


def sweep(
    quick: bool, patience: float = 0.0, clock: str = "wall", repeats: int = 5
) -> dict[str, list[dict[str, Any]]]:
    """Measure a GRU over lengths at one size, and over sizes at one length."""
    lengths = (100, 400) if quick else (100, 300, 1000, 3000, 10_000)
    sizes = (64, 128) if quick else (64, 128, 256, 512)
    budget = 5.0 if quick else 3.0 * repeats
    by_length = [Workload(f"t{t}", "gru", 128, 32, 8, t, chunk=100) for t in lengths]
    by_size = [Workload(f"h{h}", "gru", h, 64, 16, 200, chunk=100) for h in sizes]
    options = {"repeats": repeats, "budget": budget, "patience": patience, "clock": clock}
    return {
        "steps": [measure(workload, **options) for workload in by_length],
        "hidden": [measure(workload, **options) for workload in by_size],
    }


def flatness(quick: bool) -> list[dict[str, Any]]:
    """Peak memory of our gradients against the length of the sequence, inputs and outputs aside,
    and in units of the trace.
    """
    rows = []
    for steps in (100, 400) if quick else (100, 1000, 2000, 10_000):
        workload = Workload(f"t{steps}", "gru", 256, 64, 32, steps)
        program = make_ours(workload)
        if program is None:
            break
        size, method = program.memory()
        rows.append(
            {"steps": steps, "bytes": size, "method": method, "traces": size / workload.trace_bytes}
        )
        print(
            f"memory of `gradients`, {workload.shape}: {size / 1e6:.0f} MB, "
            f"{rows[-1]['traces']:.2f} x the trace",
            flush=True,
        )
    return rows


def plot(report: dict[str, list[dict[str, Any]]], path: Path | None = None) -> None:
    """Draw time and memory against both axes of a `sweep`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for column, (axis, label) in enumerate((("steps", "steps T"), ("hidden", "hidden units H"))):
        for name in MAKERS:
            points = [
                (row["workload"][axis], row["programs"][name])
                for row in report[axis]
                if "seconds" in row["programs"].get(name, {})
            ]
            if not points:
                continue
            at = [x for x, _ in points]
            axes[0, column].loglog(
                at,
                [result["seconds"] * 1e3 for _, result in points],
                "o-",
                label=SHOWN.get(name, name),
            )
            axes[1, column].loglog(
                at, [result["memory_bytes"] / 1e6 for _, result in points], "o-", label=name
            )
        at = [row["workload"][axis] for row in report[axis]]
        for axes_of in axes[:, column]:
            axes_of.set_xticks(at, [f"{x:,}" for x in at])
            axes_of.minorticks_off()
            axes_of.grid(alpha=0.3)
        first = report[axis][0]["workload"]
        fixed = (
            "H={hidden} B={batch} I={inputs}"
            if axis == "steps"
            else "T={steps} B={batch} I={inputs}"
        )
        axes[0, column].set_title("GRU, " + fixed.format(**first))
        axes[1, column].set_xlabel(label)
    axes[0, 0].set_ylabel("time of one gradient [ms]")
    axes[1, 0].set_ylabel("peak memory, inputs aside [MB]")
    axes[0, 0].legend()
    figure.savefig(path or FOLDER.parent / "docs" / "pictures" / "benchmarks.png", dpi=130)
    plt.close(figure)
