"""Time and memory against the length of the sequence and against the hidden size, and their plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import FOLDER, MAKERS, measure
from benchmarks.workloads import Workload


def sweep(quick: bool, patience: float = 0.0, clock: str = "wall") -> dict[str, list[dict[str, Any]]]:
    """Measure a GRU over lengths at one size, and over sizes at one length."""
    lengths = (100, 400) if quick else (100, 300, 1000, 3000, 10_000)
    sizes = (64, 128) if quick else (64, 128, 256, 512)
    repeats, budget = (3, 5.0) if quick else (5, 15.0)
    by_length = [Workload(f"t{t}", "gru", 128, 32, 8, t, chunk=100) for t in lengths]
    by_size = [Workload(f"h{h}", "gru", h, 64, 16, 200, chunk=100) for h in sizes]
    options = {"repeats": repeats, "budget": budget, "patience": patience, "clock": clock}
    return {
        "steps": [measure(workload, **options) for workload in by_length],
        "hidden": [measure(workload, **options) for workload in by_size],
    }


def plot(report: dict[str, list[dict[str, Any]]], path: Path | None = None) -> None:
    """Draw time and memory against both axes of a `sweep`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    for column, (axis, label) in enumerate((("steps", "steps T"), ("hidden", "hidden units H"))):
        for name in MAKERS:
            points = [(row["workload"][axis], row["programs"][name]) for row in report[axis] if "seconds" in row["programs"].get(name, {})]
            if not points:
                continue
            at = [x for x, _ in points]
            axes[0, column].loglog(at, [result["seconds"] * 1e3 for _, result in points], "o-", label=name)
            axes[1, column].loglog(at, [result["memory_bytes"] / 1e6 for _, result in points], "o-", label=name)
        first = report[axis][0]["workload"]
        fixed = "H={hidden} B={batch} I={inputs}" if axis == "steps" else "T={steps} B={batch} I={inputs}"
        axes[0, column].set_title("GRU, " + fixed.format(**first))
        axes[1, column].set_xlabel(label)
    axes[0, 0].set_ylabel("time of one gradient [ms]")
    axes[1, 0].set_ylabel("peak memory, inputs aside [MB]")
    axes[0, 0].legend()
    figure.savefig(path or FOLDER / "results.png", dpi=130)
    plt.close(figure)
