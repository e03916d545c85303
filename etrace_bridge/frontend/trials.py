"""Run readings of a model on random inputs, to see which of them can be right."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from etrace_bridge.frontend.examples import random_like, share_changed, with_sample_changed
from etrace_bridge.frontend.inputs import InputForm
from etrace_bridge.frontend.readings import Reading, per_argument, required_arguments
from etrace_bridge.frontend.returned import (
    copied_state,
    last_part,
    same_numbers,
    same_structure,
    same_tensors,
)
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import flatten_state

_STEPS = 3


class _LooksForFrame(TorchFunctionMode):
    """Finds the frame of a function among the callers of a torch function.

    A frame that is referenced keeps its local variables. A profiler or debugger of the user is not
    disturbed.
    """

    def __init__(self, code: Any) -> None:
        super().__init__()
        self._code, self.frame = code, None

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Run a torch function; look for the frame before the first one."""
        frame: Any = sys._getframe() if self.frame is None else None
        while frame is not None:
            if frame.f_code is self._code:
                self.frame = frame  # the outermost stays
            frame = frame.f_back
        return func(*args, **(kwargs or {}))


class Trials:
    """Runs readings of one model on random inputs; the model is restored after each run."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple,
        state: Any,
        batch_axis: int | None,
        time_axis: int | None,
        form: InputForm,
    ) -> None:
        self.model, self.state, self.form = model, state, form
        self.batch_axis, self.time_axis = batch_axis, time_axis
        self.steps = [tuple(random_like(x, step) for x in inputs) for step in range(_STEPS)]
        self.locals: dict[str, Any] = {}

    def given(self, names: tuple[str, ...]) -> tuple | None:
        """The user's initial state, one value per argument."""
        return None if self.state is None else per_argument(self.state, names)

    def start(self, names: tuple[str, ...]) -> tuple:
        """Return the values of the state arguments in the first call."""
        given = self.given(names)
        return (
            (None,) * len(names) if given is None else tuple(copied_state(value) for value in given)
        )

    def first_call(self, names: tuple[str, ...]) -> Any:
        """Call the model once from its initial state, and record the local variables of `forward`
        at its end.
        """
        looking = _LooksForFrame(getattr(inspect.unwrap(self.model.forward), "__code__", None))
        with restored(self.model, values=False), looking:
            returned = self.form.call(self.model, self.steps[0], names, self.start(names))
        self.locals = {} if looking.frame is None else dict(looking.frame.f_locals)
        return returned

    def runs_without_state(self) -> bool:
        """Return whether `forward` can be called with the inputs alone."""
        try:
            with restored(self.model, values=False), torch.no_grad():
                self.form.call(self.model, self.steps[0])
        except Exception:  # an argument is missing, or None is not a valid value
            return False
        return True

    def run(self, reading: Reading, steps: Sequence[tuple]) -> list[Any]:
        """Run a reading over some steps."""
        states, results = self.start(reading.names), []
        with restored(self.model, values=False):
            for inputs in steps:
                results.append(
                    copied_state(self.form.call(self.model, inputs, reading.names, states))
                )
                states = reading.split(copied_state(results[-1]))[1]
        return results

    def _has_effect(self, reading: Reading, name: str, returned: Any) -> bool:
        """Return whether an argument changes the result of a second step.

        Attributes are restored, because they may hold the state too.
        """
        new, start = reading.split(copied_state(returned))[1], self.start(reading.names)
        results = []
        for forget in (False, True):
            states = [
                b if forget and n == name else a
                for n, a, b in zip(reading.names, new, start, strict=True)
            ]
            with restored(self.model, values=False):
                result = self.form.call(
                    self.model, self.steps[1], reading.names, copied_state(states)
                )
                results.append([t for _, t in flatten_state(copied_state(result))[0]])
        return not same_numbers(*results)

    def result(self, reading: Reading) -> list[torch.Tensor] | None:
        """Return everything that a reading returns over the steps, or None if the reading cannot be
        right.
        """
        try:
            returned = self.run(reading, self.steps)
            if not all(same_structure(a, returned[0]) for a in returned[1:]):
                return None
            given = self.given(reading.names)
            if given is not None and not same_structure(reading.split(returned[0])[1], given):
                return None
            tensors = [t for r in returned for _, t in flatten_state(r)[0]]
            for name in reading.names:
                if name not in required_arguments(
                    self.model, reading.names
                ) and not self._has_effect(reading, name, returned[0]):
                    return None
            return tensors
        except Exception:  # the model does not take this value for this argument
            return None

    def continues(self, reading: Reading) -> bool:
        """Return whether two sequences run one after the other end as one long sequence does: new
        states, and outputs with a time axis.
        """
        axis = self.time_axis or 0
        whole = tuple(
            torch.cat(parts, min(axis, parts[0].dim() - 1))
            if isinstance(parts[0], torch.Tensor)
            else parts[0]
            for parts in zip(*self.steps, strict=True)
        )
        with restored(self.model, values=False):
            self.model.eval()  # dropout differs from run to run
            long, again = (self.run(reading, [whole])[0] for _ in range(2))
            last = self.run(reading, self.steps)[-1]
        if not same_tensors(long, again):  # random in evaluation mode too: nothing to compare
            return True
        if not same_tensors(reading.split(long)[1], reading.split(last)[1]):
            return False
        outputs = [flatten_state(reading.split(value)[0])[0] for value in (long, last)]
        return all(
            same_numbers([tail], [b])
            for (_, a), (_, b) in zip(*outputs, strict=True)
            if (tail := last_part(a, b, _STEPS)) is not None
        )

    def mixes_batch(self, reading: Reading) -> bool:
        """Return whether a second step mixes samples that the first step keeps apart."""
        axis = self.batch_axis
        x = next(
            (
                x
                for x in self.steps[0]
                if isinstance(x, torch.Tensor) and axis is not None and x.dim() > axis
            ),
            None,
        )
        if x is None or axis is None or x.shape[axis] < 2:
            return False
        changed = tuple(with_sample_changed(v, axis, x.shape[axis]) for v in self.steps[0])
        runs = [self.run(reading, [first, self.steps[1]]) for first in (self.steps[0], changed)]
        tensors = [[[t for _, t in flatten_state(returned)[0]] for returned in run] for run in runs]
        share = [share_changed(a, b) for a, b in zip(*tensors, strict=True)]
        bound = 1 / x.shape[axis] + 1e-9
        return share[0] <= bound < share[1]
