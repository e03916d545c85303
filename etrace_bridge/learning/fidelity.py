"""`FidelityMeter`: whether updates go downhill on the true loss, measured while a learner learns.

For a direction `v` of weight space the true slope of the loss, `g_true · v`, is carried forward
exactly (`step.slope`), where BPTT would need the whole past. With `v = g / |g|`, the rule's own
gradient,

    ratio = (g_true · g) / (g · g)

is 1 for an exact rule, positive as long as updates go downhill, and says how far off their size is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from etrace_bridge._errors import BridgeError, InputError
from etrace_bridge._tables import html_table, text_table
from etrace_bridge.learning.inputs import read_inputs
from etrace_bridge.learning.results import StepInfo
from etrace_bridge.learning.slopes import MeterState, MeterWindow

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner

_HEADER = ("step", "true slope", "rule's slope", "ratio", "downhill")
_MOST_ROWS = 20


@dataclass(frozen=True)
class Reading:
    """One measurement along a direction of length one.

    Attributes:
        step: time steps that the learner had seen.
        slope: the true slope of the loss along the direction.
        predicted: the slope that the rule's gradient gives.
    """

    step: int
    slope: float
    predicted: float

    @property
    def ratio(self) -> float:
        """`slope / predicted`: 1 is exact; NaN without a gradient."""
        return self.slope / self.predicted if self.predicted else math.nan

    @property
    def descends(self) -> bool:
        """Whether a small step against the direction lowers the true loss."""
        return self.slope > 0


class FidelityMeter:
    """Measures whether a learner's updates lower the true loss.

    As a callback, `learner.fit(..., callbacks=[eb.FidelityMeter()])`, it measures batches before
    their update, at the weights before it: the direction is the rule's own gradient of the batch,
    and the reading is exact. The epochs' records get `fidelity` (the ratio) and `downhill` (the
    share of readings that descend). With `carry=True`, and in a loop of `meter.step(learner, x,
    target)` in place of `learner.step(x, target)`, there is no end of a sequence at which the
    rule's gradient would be known: the direction is then the mean gradient of the window before,
    and held for one window.

    Args:
        every: measure every so many batches; not for `carry=True`, where each batch moves the
            states' derivative on.
        window: steps of a stream for which a direction is held.
        warmup: steps at a window's start that do not count. The states' derivative along a new
            direction starts at zero, as if the weights had moved only since then; the model must
            have forgotten that. By default half of the window.

    Attributes:
        readings: what was measured.
    """

    def __init__(self, every: int = 1, window: int = 100, warmup: int | None = None) -> None:
        for name, value, least in (
            ("every", every, 1),
            ("window", window, 2),
            ("warmup", warmup or 0, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(
                    f"`{name}` is {value!r}; it must be a whole number, {least} or more."
                )
        self.every, self.window, self.warmup = (
            every,
            window,
            window // 2 if warmup is None else warmup,
        )
        if self.warmup >= window:
            raise InputError(
                f"`warmup` is {warmup}, so no step of a window of {window} would count. Make the "
                "window longer."
            )
        self.readings: list[Reading] = []
        self._batches = 0
        self._stream = _Stream(self)

    # -- measuring --------------------------------------------------------------------------------

    def step(
        self, learner: OnlineLearner, x: Any, target: Any = None, mask: Any = None
    ) -> StepInfo:
        """`learner.step(x, target, mask)`, measured.

        Args:
            learner: the learner.
            x: the input of one time step.
            target: the target; None advances states and trace only.
            mask: (batch,) weights of the batch elements' losses.
        """
        runtime, stream = learner.runtime, self._stream
        stream.enter(learner)
        args = read_inputs(runtime.net, x)
        loss, output, state = runtime.steps.run_metered(args, target, mask, stream.window())
        stream.leave(learner, state, 1, learner.steps)
        return StepInfo(loss, output, runtime.watch.look)

    def before_batch(
        self, learner: OnlineLearner, xs: Any, targets: Any, mask: Any, carry: bool
    ) -> dict[str, tuple[float, float]]:
        """Called by `fit` before a batch's update: numbers for the epoch's record, each with its
        weight in the mean.
        """
        if targets is None:
            return {}  # the update says what is wrong
        self._batches += 1
        count, inputs = len(self.readings), read_inputs(learner.runtime.net, xs, sequence=True)
        if carry:
            stream = self._stream
            stream.enter(learner)
            state, steps = learner.runtime.sequences.stream_slope(
                inputs, targets, mask, stream.window()
            )
            stream.leave(learner, state, steps, learner.steps + steps)
        elif (self._batches - 1) % self.every == 0:
            slope, predicted = learner.runtime.sequences.own_slope(inputs, targets, mask)
            self.readings.append(Reading(learner.steps, slope, predicted))
        new = [r for r in self.readings[count:] if r.predicted]
        if not new:
            return {}
        return {
            "fidelity": (new[0].ratio, new[0].predicted),
            "downhill": (float(new[0].descends), 1.0),
        }

    def __call__(self, learner: OnlineLearner, record: Mapping[str, Any]) -> None:
        """After an epoch there is nothing left to do: `before_batch` has measured."""

    # -- what was measured ------------------------------------------------------------------------

    @property
    def ratio(self) -> float:
        """The ratio over all readings, `sum of slopes / sum of the rule's slopes`; NaN without any."""
        predicted = sum(r.predicted for r in self.readings)
        return sum(r.slope for r in self.readings) / predicted if predicted else math.nan

    @property
    def downhill(self) -> float:
        """The share of readings in which updates lower the true loss; NaN without any."""
        return (
            sum(r.descends for r in self.readings) / len(self.readings)
            if self.readings
            else math.nan
        )

    def _headline(self) -> str:
        if not self.readings:
            return "FidelityMeter: no reading yet"
        count = len(self.readings)
        return (
            f"FidelityMeter: {self.downhill:.0%} of {count} reading{'s' if count > 1 else ''} "
            f"downhill, true slope / rule's slope {self.ratio:.4g} (1 is exact)"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        every = max(1, math.ceil(len(self.readings) / _MOST_ROWS))
        return [
            (
                f"{r.step:,}",
                f"{r.slope:.4g}",
                f"{r.predicted:.4g}",
                f"{r.ratio:.4g}",
                "yes" if r.descends else "NO",
            )
            for r in self.readings[::every]
        ]

    def report(self) -> str:
        """The readings as text, every so many if there are more than twenty."""
        if not self.readings:
            return self._headline()
        return "\n".join(
            line.rstrip() for line in (self._headline(), "", *text_table(_HEADER, self._rows()))
        )

    def __repr__(self) -> str:
        return self._headline()

    def _repr_html_(self) -> str:
        return html_table(self._headline(), _HEADER, self._rows())

    def plot(self, path: str | PathLike | None = None) -> Any:
        """Draws ratio and slopes over time; needs matplotlib.

        Args:
            path: where to save the picture; None to leave that to the caller.

        Returns:
            The matplotlib figure.
        """
        if not self.readings:
            raise InputError(
                "The meter has no reading to draw. Use it as a callback of `fit`, or call "
                "`meter.step`."
            )
        return _draw(self.readings, self._headline(), path)


class _Stream:
    """The window that a meter is in, on a stream.

    Attributes:
        state: what is carried from step to step; None before the first.
        begins: the next steps begin a window.
    """

    def __init__(self, meter: FidelityMeter) -> None:
        self.meter = meter
        self._restart()

    def _restart(self) -> None:
        self.state: MeterState | None = None
        self.begins, self._known, self._steps, self._measured = False, False, 0, 0
        # the learner, its steps and resets, as they were left
        self._expected: tuple[int, int, int] | None = None

    @property
    def counts(self) -> float:
        """1 if the next steps count, 0 while the window warms up or there is no direction."""
        return float(self._known and self._steps >= self.meter.warmup)

    def window(self) -> MeterWindow:
        """What the learner's program needs to go on."""
        return MeterWindow(self.state, self.begins, self.counts)

    def enter(self, learner: OnlineLearner) -> None:
        """Start again where the learner has moved without the meter: the states' derivative does
        not belong to its states.
        """
        store = learner.runtime.store
        if self._expected is None or self._expected == (id(learner), store.steps, store.resets):
            return
        if self._expected[0] == id(learner):
            self._begin_window()
        else:
            self._restart()

    def leave(self, learner: OnlineLearner, state: MeterState, steps: int, seen: int) -> None:
        """Count the steps; at the window's end take the reading, and the next direction from it."""
        counted = self.counts
        self.state, self.begins = state, False
        self._steps += steps
        self._measured += steps if counted else 0
        if self._steps >= self.meter.window:
            if counted:
                slope, predicted = float(state.slope), float(state.predicted)
                self.meter.readings.append(
                    Reading(seen, slope / self._measured, predicted / self._measured)
                )
            self._begin_window()
            self._known = True
        self._expected = id(learner), seen, learner.runtime.store.resets

    def _begin_window(self) -> None:
        self.begins, self._steps, self._measured = self.state is not None, 0, 0


def _draw(readings: Sequence[Reading], title: str, path: str | PathLike | None) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BridgeError(
            "Drawing needs matplotlib. Install it with `pip install 'etrace-bridge[plot]'`."
        ) from error
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    steps = [r.step for r in readings]
    upper.plot(
        steps, [r.ratio for r in readings], "o-", markersize=3, label="true slope / rule's slope"
    )
    upper.axhline(1, color="tab:green", linewidth=1, linestyle=":", label="exact")
    upper.axhline(0, color="tab:red", linewidth=1, label="below: updates climb")
    lower.plot(
        steps,
        [r.slope for r in readings],
        "o-",
        markersize=3,
        label="true slope along the rule's gradient",
    )
    lower.plot(
        steps,
        [r.predicted for r in readings],
        "o-",
        markersize=3,
        label="what the rule's gradient says",
    )
    lower.axhline(0, color="tab:red", linewidth=1)
    lower.set_xlabel("time steps")
    for axes in (upper, lower):
        axes.legend(fontsize=8)
        axes.grid(alpha=0.3)
    figure.suptitle(title)
    if path is not None:
        try:
            figure.savefig(path, dpi=120)
        except (OSError, ValueError) as error:
            raise InputError(f"Cannot save the plot as `{path}`: {error}.") from error
    return figure
