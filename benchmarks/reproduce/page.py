"""docs/reproduce.md and its pictures, from the stored results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.reproduce.pictures import draw, draw_curves, mean
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.tasks import Task

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "reproduce.md"
PICTURES = ROOT / "docs" / "pictures"

HEAD = """# Published experiments, every rule

Made by `make reproduce` (`make reproduce TASK=A SEEDS=3` for one task) from the runs stored in `benchmarks/reproduce/results`; a stopped
run goes on where it was. The data are made by the code from the seed. Numbers are means over seeds, ± the standard deviation
where there are several; *seeds* says how many. Fidelity is not performance, so each task first says how much credit through time
matters: the score without any memory in the gradient beside that of an exact gradient. `tbptt 1` is backpropagation through one step,
`bptt` through the whole episode or sequence with one update for it. *published* is the number of the source where it has one. *Training here* says how
long training was; `--scale` sets it, and only runs of one length are compared. Where a task has several settings, a cell has a number for
each, – where there is none.

*Cosine* is that of the rule's gradient to BPTT's by torch itself, of all weights together, at the end of training: over a piece of
the task on which the weights do not change. *Time* is processor time of the training, without compiling, on two shared cores. *Memory* is that of the
program that goes over this piece window by window (one step at a time for online rules), as XLA counts it, without the piece itself.
"""

CAPTION = """The picture has the mean over the settings that were run. It stretches the methods of a setting from 0 to 1 however little they
differ, so read it with the tables: where all are close or there is one seed, its colours are noise. Empty fields were not run.
"""


def write_page(tasks: Mapping[str, Task]) -> None:
    """Write the page, and the picture if there are results."""
    parts = [HEAD]
    stored = {key: Results(key) for key in tasks}
    if any(results.runs for results in stored.values()):
        draw(tasks, stored, PICTURES / "reproduce.png")
        parts.append("![Normalised score by rule and task](pictures/reproduce.png)\n")
        parts.append(CAPTION)
    for key, task in tasks.items():
        if stored[key].runs:
            draw_curves(task, stored[key], PICTURES / _picture(task))
        parts.append(_section(task, stored[key]))
    PAGE.write_text("\n".join(parts))


def _section(task: Task, results: Results) -> str:
    lines = [f"## {task.key}. {task.title}", "", f"{task.setup}", ""]
    lines += [f"Score: {task.measure}. Source: {task.source}.", ""]
    if not results.runs:
        return "\n".join([*lines, f"Not run yet: `make reproduce TASK={task.key}`.", ""])
    lines += [_lengths(task, results), "", *_statements(task, results), ""]
    header = ["method", *task.settings, "seeds", "cosine", "time", "memory"]
    if any(task.published.values()):
        header.insert(-4, "published")
    rows = [_row(task, results, method, len(header)) for method in results.methods()]
    lines += ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    lines += [""]
    lines += [f"![{task.title}: {task.curve} along training](pictures/{_picture(task)})", ""]
    for why in dict.fromkeys(task.without.values()):
        names = [f"`{name}`" for name, reason in task.without.items() if reason == why]
        lines += [f"Left out: {', '.join(names)} ({why})."]
    if task.notes:
        lines += ["", task.notes]
    return "\n".join([*lines, ""])


def _picture(task: Task) -> str:
    return f"reproduce-{task.key.lower()}.png"


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
    if width == len(task.settings) + 6:
        published = task.published.get(method) or ()
        row.append(" / ".join("–" if p is None else f"{p:g}" for p in published))
    counts = sorted({len(scores) for scores in found if scores})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    ended = [
        [results.values(setting, method, name) for setting in task.settings]
        for name in ("cosine", "seconds", "memory")
    ]
    shown = zip(("{:.3f}".format, "{:.3g} s".format, _bytes), ended, strict=True)
    return [*row, seeds, *(_each(form, found) for form, found in shown)]


def _each(form: Callable[[float], str], found: list[list[float]]) -> str:
    """The mean of each setting."""
    if not any(found):
        return "–"
    texts = [form(mean(values)) if values else "–" for values in found]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2g} MB" if count < 1e7 else f"{count / 1e6:,.0f} MB"


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
