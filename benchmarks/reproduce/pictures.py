"""Pictures of the stored results: a summary, and the course of training of each task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from benchmarks.reproduce.results import Results
from benchmarks.reproduce.tasks import Task


def normalised(task: Task, results: Results, method: str) -> float | None:
    """The mean over settings of a score between the worst (0) and the best (1) method."""
    shares = []
    for setting in task.settings:
        means = {
            n: mean(results.scores(setting, n))
            for n in results.methods()
            if results.scores(setting, n)
        }
        if method not in means or len(means) < 2:
            continue
        low, high = min(means.values()), max(means.values())
        share = (means[method] - low) / (high - low) if high > low else 1.0
        shares.append(1 - share if is_error(task, setting) else share)
    return mean(shares) if shares else None


def is_error(task: Task, setting: str) -> bool:
    """Whether a small score is good in this setting."""
    return task.lower_is_better or setting.startswith(("adding", "rotation"))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def draw(tasks: Mapping[str, Task], stored: Mapping[str, Results], path: Path) -> None:
    """Draw methods by tasks, coloured by the normalised score."""
    plt = _pyplot()
    keys = [key for key in tasks if stored[key].runs]
    methods = list(dict.fromkeys(n for key in keys for n in stored[key].methods()))
    table = [[normalised(tasks[key], stored[key], n) for key in keys] for n in methods]
    shown = [[math.nan if v is None else v for v in row] for row in table]
    figure, axis = plt.subplots(
        figsize=(max(5.5, 2.5 + 0.9 * len(keys)), 1.2 + 0.32 * len(methods))
    )
    image = axis.imshow(shown, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axis.set_yticks(range(len(methods)), methods)
    axis.set_xticks(range(len(keys)), keys)
    for y, row in enumerate(table):
        for x, value in enumerate(row):
            if value is not None:
                colour = "black" if value > 0.6 else "white"
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    axis.set_title("Score between the worst (0) and the best (1) method")
    figure.colorbar(image)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def draw_curves(task: Task, results: Results, path: Path) -> None:
    """Draw the course of training, an axis for each setting; a line is the mean over seeds."""
    plt = _pyplot()
    settings = [s for s in task.settings if results.steps(s)]
    columns = min(3, len(settings))
    rows = math.ceil(len(settings) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4 * columns + 1.6, 3 * rows), squeeze=False, layout="constrained"
    )
    colours = {n: f"C{k % 10}" for k, n in enumerate(results.methods())}
    lines = {}
    for axis, setting in zip(axes.flat, settings, strict=False):
        for k, name in enumerate(results.methods()):
            curves = results.values(setting, name, "curve")
            if not curves:
                continue
            course = [mean(list(point)) for point in zip(*curves, strict=True)]
            steps = results.steps(setting) or 0
            at = [steps * (n + 0.5) / len(course) for n in range(len(course))]
            style = ("-", "--")[k // 10 % 2]
            lines[name] = axis.plot(at, course, style, color=colours[name], linewidth=1.2)[0]
        axis.set_title(setting, fontsize=10)
        axis.set_xlabel(task.unit)
        if all(min(line.get_ydata()) > 0 for line in axis.lines) and is_error(task, setting):
            axis.set_yscale("log")
    for axis in list(axes.flat)[len(settings) :]:
        axis.set_visible(False)
    figure.legend(lines.values(), lines.keys(), loc="outside right upper", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _pyplot():
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
