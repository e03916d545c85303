"""A gradient check as a picture: bars for every parameter, and the worst one element by element."""

from __future__ import annotations

import math
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from etrace_bridge._errors import InputError, NotSupportedError

if TYPE_CHECKING:
    from etrace_bridge.check.gradient_report import GradientReport

_MOST_POINTS = 5000


def draw_report(report: GradientReport, path: str | PathLike | None = None) -> Any:
    """Draw cosine and relative error of every parameter and a scatter of the worst one.

    Args:
        report: the report.
        path: where to save it; None to leave that to the caller.

    Returns:
        The matplotlib figure.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NotSupportedError(
            "`plot` needs matplotlib: `pip install 'etrace-bridge[plot]'`. `to_html` works "
            "without it."
        ) from error
    parameters = list(report)
    figure = Figure(figsize=(13, max(3.2, 1.2 + 0.3 * len(parameters))), layout="constrained")
    cosines, errors, points = figure.subplots(1, 3, width_ratios=(1, 1, 1.1))
    names = [p.name for p in parameters]
    colours = [
        "tab:red" if not p.ok else "tab:green" if p.verdict == "exact" else "tab:blue"
        for p in parameters
    ]
    places = np.arange(len(names))
    cosines.barh(
        places, [0 if math.isnan(p.cosine) else p.cosine for p in parameters], color=colours
    )
    cosines.set_yticks(places, names)
    cosines.set_xlim(
        min(0.0, *(p.cosine for p in parameters if not math.isnan(p.cosine)), 0.0), 1.02
    )
    cosines.set_title(f"cosine to {report.reference}")
    shown = [p.relative_error if 0 < p.relative_error < math.inf else 1e-17 for p in parameters]
    errors.barh(places, shown, color=colours, left=1e-18)
    errors.set_xscale("log")
    errors.set_yticks(places, [])
    errors.axvline(report.tolerance, color="black", linewidth=1, linestyle=":")
    errors.set_title("relative error (dotted: counts as equal)")
    for axes in (cosines, errors):
        axes.invert_yaxis()
    if parameters:
        _draw_worst(points, report)
    figure.suptitle(
        f"{report.rule} against {report.reference}: {'ok' if report.ok else 'NOT OK'}  "
        f"({report.steps} steps, chunks of {report.chunk}, {report.dtype})"
    )
    if path is not None:
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise InputError(f"Cannot save the plot as `{path}`: {error}.") from error
    return figure


def _draw_worst(axes: Any, report: GradientReport) -> None:
    worst = report.worst()
    ours, theirs = worst.online_gradient.reshape(-1).real, worst.torch_gradient.reshape(-1).real
    every = max(1, math.ceil(ours.size / _MOST_POINTS))
    axes.scatter(theirs[::every], ours[::every], s=8, color="tab:blue" if worst.ok else "tab:red")
    ends = [
        min(theirs.min(initial=0), ours.min(initial=0)),
        max(theirs.max(initial=0), ours.max(initial=0)),
    ]
    axes.plot(ends, ends, color="black", linewidth=1, linestyle=":")
    axes.set_xlabel(report.reference)
    axes.set_ylabel(report.rule)
    axes.set_title(f"worst: {worst.name}")
