"""The page and the picture of `benchmarks/fidelity.py`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, PICTURE = DOCS / "fidelity.md", DOCS / "pictures" / "fidelity.png"
EXACT = 1e-9  # meter errors above this come from float32 inside a module
LOWEST = 1e-3  # smaller errors are drawn here
BY_RANK = {"0": "d_rtrl chunk", "1": "low_rank", "2": "low_rank rank=2", "4": "low_rank rank=4"}

HEAD = """# How close to BPTT

Every learning rule against torch BPTT, over the zoo of torch modules that the tests use. Made by
`python benchmarks/fidelity.py`, which measures what is new and keeps the rest: eight steps in chunks of four,
float64, random weights and inputs; all parameters that enter the recurrence together. A network of short
memory is easy: these numbers compare rules, they do not promise a cosine for your model.
[`check_gradients`](reading-the-report.md) measures that, and [`FidelityMeter`](howto/fidelity-meter.md) says
while you train whether updates go downhill.

![Error of every rule against its memory and its time](pictures/fidelity.png)

"""
ABOUT = """
*Cosine* and *relative error* (the norm of the difference over the norm of BPTT's gradient) are means over
{count} of the zoo's {zoo} modules{share}; *exact on* counts the modules with a
relative error below 1e-6. *Memory* is what the rule carries from step to step, in units of the model's
weights, and *time* the {clock} of a whole online step with its update, in units of a step without learning: a GRU of
{layers} layers, {width} units, one sequence, float32. `low_rank` has rank 1 where nothing else is said.
`bptt` and `fptt` stop where a chunk of four begins, so a single step has nothing to compare; with fixed weights
they are the same. `uoro` and `kf_rtrl` are random: this is the error of a single draw, and their mean over
draws is exact. So is `ok_rtrl`, but its four products hold the four steps of a first chunk, so that nothing is
mixed here; longer sequences have its noise. `three_factor` has no gradient of the loss at all. A rule without a
number for a module does not run there, and says why in an error; its means are over the others.

"""
LOW_RANK = """
## `low_rank` by rank

The two ends of the rule, parameter by parameter, over the same modules: rank 0 differs from `d_rtrl chunk` by at most {diagonal:.0e} and full rank from BPTT by
at most {exact:.0e} of a gradient's largest value{single}. The mean relative error of all parameters together falls with the rank:

"""


def write_page(results: dict[str, Any]) -> list[Path]:
    """Write the page and its picture; returns their paths."""
    from benchmarks.fidelity import LAYERS, WIDTH

    modules, rules = results["modules"], _rules(results)
    text = HEAD + _summary(results, rules)
    clock = "processor time" if results["clock"] == "cpu" else "time"
    text += ABOUT.format(
        count=len(modules),
        zoo=results["zoo"],
        share=""
        if len(modules) == results["zoo"]
        else " (drawn at random; the command goes on with the others)",
        clock=clock,
        layers=LAYERS,
        width=WIDTH,
    )
    text += f"The meter's slope along `d_rtrl`'s gradient differs from BPTT's by at most {_meter(modules)}\n\n"
    text += "## Cosine\n\n*exact* counts the parameters whose certificate says that `d_rtrl` equals BPTT.\n\n"
    text += _by_module(modules, rules, 0, "{:.4f}", ["exact"])
    text += "\n## Relative error\n\n" + _by_module(modules, rules, 1, "{:.1e}", [])
    text += _low_rank(modules)
    PAGE.write_text(text)
    _draw(results, rules)
    return [PAGE, PICTURE]


def _rules(results: dict[str, Any]) -> list[str]:
    """Return the rules in order of their mean relative error."""
    names = {name for module in results["modules"].values() for name in module["rules"]}
    return sorted(names, key=lambda name: (round(_mean(results["modules"], name, 1), 9), name))


def _numbers(modules: dict[str, Any], rule: str, which: int) -> list[float]:
    found = (module["rules"].get(rule) for module in modules.values())
    return [pair[which] for pair in found if isinstance(pair, list) and not math.isnan(pair[which])]


def _mean(modules: dict[str, Any], rule: str, which: int) -> float:
    numbers = _numbers(modules, rule, which)
    return sum(numbers) / len(numbers) if numbers else math.inf


def _cost(results: dict[str, Any], rule: str) -> tuple[float, float] | None:
    """Return memory in units of the weights and time in units of a forward step."""
    costs = results["costs"]
    if rule not in costs or "memory" not in costs[rule]:
        return None
    own = costs[rule]
    return own["memory"] / own["weights"], own["seconds"] / costs["forward"]["seconds"]


def _summary(results: dict[str, Any], rules: Sequence[str]) -> str:
    modules, rows = results["modules"], []
    for rule in rules:
        errors, cost = _numbers(modules, rule, 1), _cost(results, rule)
        shown = ["-", "-"] if cost is None else [f"{cost[0]:.3g}", f"{cost[1]:.3g}"]
        exact = f"{sum(e < 1e-6 for e in errors)} of {len(errors)}"
        cosine, error = _mean(modules, rule, 0), _mean(modules, rule, 1)
        rows.append([f"`{rule}`", f"{cosine:.4f}", f"{error:.3g}", exact, *shown])
    return _table(["rule", "cosine", "relative error", "exact on", "memory", "time"], rows)


def _meter(modules: dict[str, Any]) -> str:
    def worst(float32: bool) -> float:
        found = [m["meter"] for m in modules.values() if (m["meter"] > EXACT) == float32]
        return max(found, default=0.0)

    return f"{worst(False):.0e} of both norms, or {worst(True):.0e} where a module computes in float32 inside."


def _low_rank(modules: dict[str, Any]) -> str:
    """Return the section on how the rule's error falls with its rank."""
    from zoo.online import FLOAT32_INSIDE

    double = [m["low_rank"] for name, m in modules.items() if name not in FLOAT32_INSIDE]
    single = [m["low_rank"] for name, m in modules.items() if name in FLOAT32_INSIDE]
    worst = max((m[end] for m in single for end in ("rank 0", "full rank")), default=0.0)
    text = LOW_RANK.format(
        diagonal=max(m["rank 0"] for m in double),
        exact=max(m["full rank"] for m in double),
        single=single and f"; where snnTorch computes in float32 inside, by {worst:.0e}" or "",
    )
    errors = ["relative error", *(f"{_mean(modules, rule, 1):.5f}" for rule in BY_RANK.values())]
    return text + _table(["rank", *BY_RANK], [errors])


def _by_module(
    modules: dict[str, Any], rules: Sequence[str], which: int, shape: str, more: Sequence[str]
) -> str:
    rows = []
    for name, module in modules.items():
        cells = []
        for rule in rules:
            pair = module["rules"].get(rule)
            cells.append(shape.format(pair[which]) if isinstance(pair, list) else "-")
        rows.append([name, *(module[key] for key in more), *cells])
    return _table(["module", *more, *(f"`{rule}`" for rule in rules)], rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _draw(results: dict[str, Any], rules: Sequence[str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 5), dpi=130)
    FigureCanvasAgg(figure)  # text has a size only on a canvas
    figure.subplots_adjust(left=0.07, right=0.99, bottom=0.11, top=0.97, wspace=0.04)
    panels = figure.subplots(1, 2, sharey=True)
    labels = ("memory of the rule / weights", "time of an online step / step without learning")
    for which, (axes, label) in enumerate(zip(panels, labels, strict=True)):
        points = _points(results, rules, which)
        axes.set_xscale(
            "symlog" if which == 0 else "log", **({"linthresh": 0.1} if which == 0 else {})
        )
        axes.set_yscale("log")
        axes.set_ylim(LOWEST / 2, 2 * max(max(y for _, y, _, _ in points), 1))
        axes.set_xlim(-0.02 if which == 0 else 0.3, 4 * max(x for x, _, _, _ in points))
        for x, y, _, colour in points:
            axes.plot([x], [y], "o", color=colour, markersize=7)
        axes.axhline(LOWEST, color="black", linewidth=0.8, linestyle=":")
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("relative error to BPTT, mean over the zoo")
    panels[0].text(-0.01, LOWEST * 1.06, "0.001 or less", fontsize=8, va="bottom")
    figure.canvas.draw()
    for which, axes in enumerate(panels):
        _label(axes, _points(results, rules, which))
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE)


def _points(
    results: dict[str, Any], rules: Sequence[str], which: int
) -> list[tuple[float, float, str, str]]:
    """Return cost, error, name and colour of every rule whose cost is known."""
    found = []
    for n, rule in enumerate(rules):
        cost, error = _cost(results, rule), _mean(results["modules"], rule, 1)
        if cost is not None:
            found.append((cost[which], max(error, LOWEST), rule, f"C{n % 10}"))
    return found


def _label(axes: Any, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each name beside its point, at the nearest place where it covers nothing and its line
    crosses little.
    """
    from matplotlib.patheffects import withStroke

    scale = axes.figure.dpi / 72
    dots = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    frame, boxes, lines = axes.bbox.shrunk(0.98, 0.98), [], []
    for (x, y, rule, colour), dot in zip(points, dots, strict=True):
        size = np.array([5.2 * len(rule), 10]) * scale
        best, least = None, math.inf
        for radius, angle in itertools.product((11, 17, 25, 35, 47, 61, 80), np.arange(24) / 12):
            toward = np.array([math.cos(angle * math.pi), math.sin(angle * math.pi)])
            centre = dot + toward * (radius * scale + np.array([size[0] / 2, 0]))
            line = dot + np.linspace(0, 1, 25)[:, None] * (centre - toward * size / 2 - dot)
            box = centre - size / 2, centre + size / 2
            is_covering = any(_is_inside(at, box, 6) for at in dots) or any(
                _is_inside(at, box, 2) for other in lines for at in other
            )
            touching = any((box[0] < b).all() and (a < box[1]).all() for a, b in boxes)
            corners = frame.contains(*box[0]) and frame.contains(*box[1])
            if is_covering or touching or not corners:
                continue
            crossed = sum(any(_is_inside(at, other, 0) for at in line) for other in boxes)
            crossed += sum(np.abs(line - at).max(1).min() < 6 for at in dots if at is not dot)
            if radius + 25 * crossed < least:
                best, least = (centre, box, line), radius + 25 * crossed
        if best is None:
            raise ValueError(f"no room for the name of `{rule}`")
        centre, box, line = best
        boxes.append(box)
        lines.append(line)
        axes.annotate(
            rule, (x, y), (centre - dot) / scale, textcoords="offset points", fontsize=8,
            color=colour, ha="center", va="center", path_effects=[withStroke(linewidth=2, foreground="white")],
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.6, "shrinkA": 0, "shrinkB": 3},
        )  # fmt: skip


def _is_inside(at: Any, box: tuple[Any, Any], margin: float) -> bool:
    return bool((box[0] - margin < at).all() and (at < box[1] + margin).all())
