"""Find which arguments of a module's `forward` are states, and which part of the returned value is
the new state.

A *reading* says which arguments are states and which part of the returned value becomes each of
them at the next call. Every reading that the shapes allow is run for a few steps on random inputs.
A reading is dropped if the call fails, if structure or shapes change, if the state has no effect,
or if it mixes samples of the batch that one call keeps apart. For a `forward` that takes sequences,
a reading is right if parts of a sequence, run one after the other, give what the whole gives. If
readings with different results are left, the code itself decides (an argument that `forward`
assigns again and returns), else `wrap` refuses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.frontend import messages
from etrace_bridge.frontend.adapter import Adapter, find_adapter
from etrace_bridge.frontend.fitting_zeros import find_zeros
from etrace_bridge.frontend.inputs import PLAIN, InputForm
from etrace_bridge.frontend.readings import (
    STATE_NAME,
    Reading,
    candidate_arguments,
    is_by_name,
    per_argument,
    pick,
    possible_readings,
    required_arguments,
)
from etrace_bridge.frontend.returned import is_same_object, same_numbers, same_structure
from etrace_bridge.frontend.state_values import flatten_state
from etrace_bridge.frontend.trials import Trials

# What the code says about an argument and its new value: `forward` assigns the argument again and
# returns it; the returned variable or field is named after the argument. Below: 1 if the argument's
# name is one that states often have, else 0.
_ASSIGNED, _NAMED = 3, 2


class FoundAdapter(Adapter):
    """The adapter that the bridge makes for a root module without one."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        """Return the state arguments that were found."""
        return self._reading.names

    def split(self, module: nn.Module, returned: Any) -> tuple[Any, tuple]:
        """Split a returned value as the reading says."""
        return self._reading.split(returned)


def find_root_adapter(
    model: nn.Module,
    inputs: tuple,
    state: Any,
    batch_axis: int | None = None,
    time_axis: int | None = None,
    form: InputForm = PLAIN,
) -> tuple[Adapter | None, tuple | None]:
    """Return the root module's adapter, registered or made for its `forward(x, state)`, and the
    user's state.

    Args:
        model: The root module, which the caller restores.
        inputs: The tensors of a call, without state.
        state: The user's initial state, or None. A dict whose keys are arguments of `forward` gives
            one value for each.
        batch_axis: The batch axis of the inputs; None if there is none.
        time_axis: The time axis of the inputs; None if they are one step.
        form: How the tensors stand in the call.

    Returns:
        The adapter (None if the root has no state arguments), and one value per state argument if
        the user gave a state.
    """
    known = find_adapter(model)
    if known is not None and known.arguments(model):
        names = known.arguments(model)
        return known, None if state is None else per_argument(state, names)
    args, kwargs = form.fill(inputs)
    found = [c for c in candidate_arguments(model, len(args), state, tuple(kwargs)) if c]
    if not found:
        if state is not None and not is_by_name(state, ()):
            raise InputError(
                f"`wrap` got a `state`, but `{type(model).__name__}.forward` has no argument for "
                f"it besides its {len(args) + len(kwargs)} input(s). Leave `state` out; state in attributes "
                "and inside layers is found without it."
            )
        return known, None
    trials = Trials(model, inputs, state, batch_axis, time_axis, form)
    reading = _choose(trials, found)
    if reading is None:
        return known, None
    return FoundAdapter(reading), trials.given(reading.names)


@dataclass(frozen=True)
class Trial:
    """A reading that could be right: its results over the steps, and a grade of what the code says
    about each argument.

    `fits` says whether the new states are built like the values that `forward` itself uses for the
    arguments where they are None.
    """

    reading: Reading
    result: list[torch.Tensor]
    grades: tuple[int, ...]
    fits: bool


def _choose(trials: Trials, candidates: list[tuple[str, ...]]) -> Reading | None:
    """Choose the one reading that results and code allow; None if no argument is a state."""
    model = trials.model
    found: list[Trial] = []
    for names in candidates:
        try:
            returned = trials.first_call(names)
        except Exception as error:
            if names == candidates[-1] and not found:
                if trials.state is None and trials.runs_without_state():
                    return None
                if trials.state is None and required_arguments(model, names):
                    known = all(STATE_NAME.fullmatch(name) for name in names)
                    zeros = find_zeros(trials, names) if known else None
                    name = type(model).__name__
                    raise messages.needs_state(name, names, error, known, zeros) from error
                raise
            continue
        for reading in possible_readings(names, returned):
            result = trials.result(reading)
            if result is not None:
                found.append(
                    Trial(
                        reading,
                        result,
                        _grades(reading, returned, trials),
                        _fits(reading, returned, trials),
                    )
                )
    if not found:
        return _no_reading(trials, candidates)
    told = trials.state is not None or all(required_arguments(model, names) for names in candidates)
    if trials.time_axis is not None:
        proven = [trial for trial in found if trials.continues(trial.reading)]
        if not proven and not told:
            return None
        found, told = proven or found, True
    found = (
        found
        if told
        else [trial for trial in found if min(trial.grades) > 0] or _unclear(model, found)
    )
    found = _agreeing(found, _ASSIGNED)
    found = [trial for trial in found if not trials.mixes_batch(trial.reading)] or found
    found = _agreeing(found, _NAMED)
    most = max(len(trial.grades) for trial in found)
    left = [trial for trial in found if len(trial.grades) == most]
    left = [trial for trial in left if trial.fits] or left
    # of two places with one and the same object, either is right
    sure = min(left[0].grades) == _ASSIGNED
    if any(
        t.reading.names != left[0].reading.names
        or not (sure or same_numbers(t.result, left[0].result))
        for t in left[1:]
    ):
        _unclear(model, left)
    return left[0].reading


def _unclear(model: nn.Module, trials: list[Trial]) -> list[Trial]:
    raise messages.unclear_state(type(model).__name__, [str(trial.reading) for trial in trials])


def _agreeing(trials: list[Trial], grade: int) -> list[Trial]:
    """Keep the readings that agree with everything that is known with a grade about an argument and
    its place.
    """
    known = {
        (name, place)
        for trial in trials
        for name, place, own in zip(
            trial.reading.names, trial.reading.places, trial.grades, strict=True
        )
        if own >= grade
    }

    def agrees(reading: Reading) -> bool:
        pairs = set(zip(reading.names, reading.places, strict=True))
        for name in {name for name, _ in known}:
            if not any((name, place) in pairs for other, place in known if other == name):
                return False
        return not any(
            place in {p for _, p in known} and (name, place) not in known for name, place in pairs
        )

    return [trial for trial in trials if agrees(trial.reading)] or trials


def _no_reading(trials: Trials, candidates: list[tuple[str, ...]]) -> None:
    if trials.state is None and not all(
        required_arguments(trials.model, names) for names in candidates
    ):
        return
    raise StateError(
        f"`{type(trials.model).__name__}.forward` takes a state in `{', '.join(candidates[0])}`, "
        "but what it returns holds no state of the same structure. The bridge understands `-> "
        "(output, state)`, `-> (output, *states)` and `-> state`. Return the new state, or "
        "register an adapter (`eb.register_adapter`) whose `split` finds it."
    )


def _fits(reading: Reading, returned: Any, trials: Trials) -> bool:
    """Return whether each new state has the structure and shapes of its argument's variable at the
    end of `forward`.
    """
    pairs = [
        (trials.locals.get(name), pick(returned, place))
        for name, place in zip(reading.names, reading.places, strict=True)
    ]
    return all(
        bool(flatten_state(variable)[0]) and same_structure(value, variable)
        for variable, value in pairs
    )


def _grades(reading: Reading, returned: Any, trials: Trials) -> tuple[int, ...]:
    """Grade what the code says for each argument of a reading."""
    grades = []
    for name, place, start in zip(
        reading.names, reading.places, trials.start(reading.names), strict=True
    ):
        value = pick(returned, place)
        if is_same_object(trials.locals.get(name), value) and not is_same_object(start, value):
            grades.append(_ASSIGNED)
            continue
        variables = [n for n, v in trials.locals.items() if n != name and is_same_object(v, value)]
        named = any(
            name in re.split(r"_|\d+", n) or (len(name) > 2 and name in n)
            for n in (*variables, *place)
        )
        grades.append(_NAMED if named else int(STATE_NAME.fullmatch(name) is not None))
    return tuple(grades)
