"""Runs the examples and draws what they learn, for the gallery.

    python docs/pictures/draw_examples.py [name ...]

The examples know nothing of this: a learner's losses, and the reports of gradient checks, are
noted down while an example runs. An example that learns is drawn as its loss, one that only checks
gradients as their cosine to those of BPTT.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt
import numpy as np

import etrace_bridge as eb
from etrace_bridge.rules import make_rule, rule_text

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"
# The examples that are drawn, and their arguments.
DRAWN = {
    "braintrace_integrator": [],
    "braintrace_spiking_units": [],
    "custom_cell": [],
    "delayed_copy_gru": [],
    "digits_lstm": [],
    "digits_snntorch": [],
    "endless_stream": ["--steps", "10000"],
    "norse_cell": [],
    "rtrl_and_d_rtrl_on_a_stack": [],
    "spikingjelly_network": [],
    "state_space": ["--small"],
    "torch_optim_loop": [],
    "wrap_and_check_gru": [],
}
BLUE = "#1f77b4"


@contextlib.contextmanager
def noting(losses: dict[int, list], reports: list):
    """Keeps the losses of every learner, and every report of a gradient check."""

    def noted(call: Any) -> Any:
        def wrapped(learner: Any, *args: Any, **options: Any) -> Any:
            info = call(learner, *args, **options)
            losses.setdefault(id(learner), []).append(info.loss)
            return info

        return wrapped

    def checked(*args: Any, rule: Any = "d_rtrl", **options: Any) -> Any:
        found = check(*args, rule=rule, **options)
        several = getattr(found, "reports", None)
        for report in several or [found]:
            label = report.rule if several else rule_text(make_rule(rule))
            reports.append((f"{label}, chunk {report.chunk}", report))
        return found

    check = eb.check_gradients
    with contextlib.ExitStack() as stack:
        for name in ("step", "update", "gradients"):
            call = getattr(eb.OnlineLearner, name)
            stack.enter_context(mock.patch.object(eb.OnlineLearner, name, noted(call)))
        stack.enter_context(mock.patch.object(eb, "check_gradients", checked))
        yield


def draw_losses(axes: Any, losses: list[float]) -> None:
    """Each loss, and their running mean."""
    width = max(1, len(losses) // 50)
    mean = np.convolve(losses, np.ones(width) / width, "valid")
    axes.plot(losses, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(np.arange(len(mean)) + width - 1, mean, color=BLUE)
    low, high = np.quantile(losses, [0.01, 0.99])
    axes.set(yscale="log" if low > 0 and high > 4 * low else "linear", ylabel="loss")
    axes.set_xlabel("step or update")
    if low < 1e-2 * mean.min():  # single steps that happen to be right would take all the room
        axes.set_ylim(mean.min() / 5, mean.max() * 3)


def draw_cosines(axes: Any, reports: list[tuple[str, eb.GradientReport]]) -> None:
    """Each parameter's cosine to BPTT, for each check."""
    for label, report in reports:
        values = [row.cosine for row in report]
        axes.plot(values, "o-", markersize=4, linewidth=0.8, label=label)
    axes.set(xlabel="parameter", ylabel="cosine to BPTT", xticks=range(len(values)))
    axes.legend(fontsize=7)


def draw(name: str) -> Path:
    """Runs an example; returns the file of its picture."""
    losses, reports = {}, []
    argv = [str(EXAMPLES / f"{name}.py"), *DRAWN[name]]
    with noting(losses, reports), mock.patch.object(sys, "argv", argv):
        runpy.run_path(argv[0], run_name="__main__")
    figure, axes = plt.subplots(figsize=(4, 2.6), layout="constrained")
    longest = max(losses.values(), key=len, default=[])
    if len(longest) > 5:
        draw_losses(axes, longest)
    else:
        draw_cosines(axes, reports)
    axes.grid(alpha=0.3)
    path = HERE / f"example-{name}.png"
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path


if __name__ == "__main__":
    for chosen in sys.argv[1:] or DRAWN:
        print(draw(chosen))
