"""docs/reproduce.md and its pictures, from the stored results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from benchmarks.reproduce.results import Results
from benchmarks.reproduce.tasks import Task

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "reproduce.md"
PICTURE = ROOT / "docs" / "pictures" / "reproduce.png"

HEAD = """# Published experiments, every rule

Made by `make reproduce` (`make reproduce TASK=A SEEDS=3` for one task) from the runs stored in `benchmarks/reproduce/results`; a stopped
run goes on where it was. The data are made by the code from the seed. Numbers are means over seeds, ± the standard deviation
where there are several; *seeds* says how many. Fidelity is not performance, so each task first says how much credit through time
matters: the score without any memory in the gradient beside that of an exact gradient. `tbptt 1` is backpropagation through one step,
`bptt` through the whole episode or sequence with one update for it. *published* is the number of the source where it has one. *Training here* says how
long training was; `--scale` sets it, and only runs of one length are compared. The
seconds are wall time on a shared machine, a rough hint only.
"""

CAPTION = """The picture has the mean over the settings that were run. It stretches the methods of a setting from 0 to 1 however little they
differ, so read it with the tables: where all are close or there is one seed, its colours are noise. Empty fields were not run.
"""


def write_page(tasks: Mapping[str, Task]) -> None:
    """Write the page, and the picture if there are results."""
    parts = [HEAD]
    stored = {key: Results(key) for key in tasks}
    if any(results.runs for results in stored.values()):
        draw(tasks, stored)
        parts.append("![Normalised score by rule and task](pictures/reproduce.png)\n")
        parts.append(CAPTION)
    for key, task in tasks.items():
        parts.append(_section(task, stored[key]))
    PAGE.write_text("\n".join(parts))


def _section(task: Task, results: Results) -> str:
    lines = [f"## {task.key}. {task.title}", "", f"{task.setup}", ""]
    lines += [f"Score: {task.measure}. Source: {task.source}.", ""]
    if not results.runs:
        return "\n".join([*lines, f"Not run yet: `make reproduce TASK={task.key}`.", ""])
    lines += [_lengths(task, results), "", *_statements(task, results), ""]
    header = ["method", *task.settings, "seeds", "seconds per run"]
    if any(task.published.values()):
        header.insert(-2, "published")
    rows = [_row(task, results, method, len(header)) for method in results.methods()]
    lines += ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    lines += [""]
    lines += [f"`{name}` is left out: {why}." for name, why in task.without.items()]
    if task.notes:
        lines += ["", task.notes]
    return "\n".join([*lines, ""])


def _lengths(task: Task, results: Results) -> str:
    """How long training was in each setting, and how long it is in full."""
    parts = []
    for setting, full in task.steps.items():
        steps = results.steps(setting)
        if steps is None:
            parts.append(f"{setting} not run")
        elif steps == full:
            parts.append(f"{setting} {steps:,} {task.unit}, the full length")
        else:
            parts.append(f"{setting} {steps:,} of {full:,} {task.unit}, scaled down")
    return f"Training here: {'; '.join(parts)}."


def _row(task: Task, results: Results, method: str, width: int) -> list[str]:
    found = [results.scores(setting, method) for setting in task.settings]
    row = [f"`{method}`", *map(_number, found)]
    if width == len(task.settings) + 4:
        published = task.published.get(method) or ()
        row.append(" / ".join("–" if p is None else f"{p:g}" for p in published))
    counts = sorted({len(scores) for scores in found if scores})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return [*row, seeds, f"{results.seconds(method) or 0:.0f}"]


def _number(scores: list[float]) -> str:
    if not scores:
        return "–"
    mean = sum(scores) / len(scores)
    spread = math.sqrt(sum((s - mean) ** 2 for s in scores) / max(len(scores) - 1, 1))
    return f"{mean:.3g}" + (f" ± {spread:.1g}" if len(scores) > 1 else "")


def _statements(task: Task, results: Results) -> list[str]:
    """By how much credit through time matters, where both ends were run."""
    lines = []
    for setting in task.settings:
        least = next((n for n in ("immediate", "tbptt 1") if results.scores(setting, n)), None)
        most = next((n for n in ("rtrl", "bptt") if results.scores(setting, n)), None)
        if least and most:
            without, exact = (_number(results.scores(setting, n)) for n in (least, most))
            lines.append(
                f"- {setting}: {without} without credit through time (`{least}`), {exact} with an "
                f"exact gradient (`{most}`)."
            )
    return lines


def normalised(task: Task, results: Results, method: str) -> float | None:
    """The mean over settings of a score between the worst (0) and the best (1) method."""
    shares = []
    for setting in task.settings:
        means = {
            n: _mean(results.scores(setting, n))
            for n in results.methods()
            if results.scores(setting, n)
        }
        if method not in means or len(means) < 2:
            continue
        low, high = min(means.values()), max(means.values())
        share = (means[method] - low) / (high - low) if high > low else 1.0
        shares.append(1 - share if is_error(task, setting) else share)
    return _mean(shares) if shares else None


def is_error(task: Task, setting: str) -> bool:
    """Return whether a small score is good in this setting."""
    return task.lower_is_better or setting.startswith(("adding", "rotation"))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def draw(tasks: Mapping[str, Task], stored: Mapping[str, Results], path: Path = PICTURE) -> None:
    """Draw methods by tasks, coloured by the normalised score."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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
