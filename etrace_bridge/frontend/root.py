"""Which arguments of a module's `forward` carry state, and where the new state comes back: found by
what flows.

A *reading* says which arguments are states and which part of the returned value becomes each of
them at the next call. Every reading that the shapes allow is run for a few steps on random inputs.
A reading is dropped if the call fails, if structure or shapes change, if the state has no effect,
or if it mixes samples of the batch that one call keeps apart. Of a `forward` that takes sequences,
a reading is right if parts of a sequence, run one after the other, give what the whole gives. If
readings with different results are left, the code itself decides (an argument that `forward`
assigns again and returns), else `wrap` refuses.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.frontend import messages
from etrace_bridge.frontend.examples import random_like, share_changed, with_sample_changed
from etrace_bridge.frontend.inputs import PLAIN, InputForm
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state import (
    Adapter,
    children,
    find_adapter,
    flatten_state,
    unflatten_state,
)

# keys from the returned value to a new state; see `_pick` for the two slices
Place = tuple[str, ...]
_REST, _MOST = "1:", ":-1"
_STATE_NAME = re.compile(
    r"(.*_)?(h|hx|hs|h0|c|cx|cs|v|u|z|s|mem|syn|hidden|states?|memory|memories|carry|cell|membrane)(_.*|\d+|s)?|prev.*|.*prev|last.*"
)
_NO_STATE_NAME = re.compile(
    r"(.*_)?(mask|masks|length|lengths|label|labels|target|targets|weight|bias|generator|dtype|device)"
)
_MOST_ARGUMENTS, _STEPS = 4, 3
# What the code says about an argument and its new value: `forward` assigns the argument again and
# returns it; the returned variable or field is named after the argument. Below: 1 if the argument's
# name is one that states often have, else 0.
_ASSIGNED, _NAMED = 3, 2


@dataclass(frozen=True)
class Reading:
    """One way to understand a `forward`: the state arguments, and the place of each in what is
    returned.
    """

    names: tuple[str, ...]
    places: tuple[Place, ...]

    def split(self, returned: Any) -> tuple[Any, tuple]:
        """Take the returned value apart into output and new states."""
        states = tuple(_pick(returned, place) for place in self.places)
        items = children(returned)
        if items is None or () in self.places:
            return first_tensor(returned), states
        rest = [
            (key, value)
            for key, value in items
            if not any(_covers(place, key, items) for place in self.places)
        ]
        if not rest:
            return first_tensor(returned), states
        if isinstance(returned, dict):
            return {key: returned[key] for key in returned if str(key) in dict(rest)}, states
        return (rest[0][1] if len(rest) == 1 else tuple(value for _, value in rest)), states

    def __str__(self) -> str:
        where = [
            "the returned value" if not p else "returned" + "".join(f"[{k}]" for k in p)
            for p in self.places
        ]
        return " and ".join(
            f"`{name}` <- {place}" for name, place in zip(self.names, where, strict=True)
        )


class FoundAdapter(Adapter):
    """The adapter that the bridge makes for a root module without one."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        """The state arguments that were found."""
        return self._reading.names

    def split(self, module: nn.Module, returned: Any) -> tuple[Any, tuple]:
        """The convention that was found."""
        return self._reading.split(returned)


def find_root_adapter(
    model: nn.Module,
    inputs: tuple,
    state: Any,
    batch_axis: int | None = None,
    time_axis: int | None = None,
    form: InputForm = PLAIN,
) -> tuple[Adapter | None, tuple | None]:
    """Give the root module's adapter, registered or made for its `forward(x, state)`, and the state
    that the user gave.

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
        return known, None if state is None else _per_argument(state, names)
    args, kwargs = form.fill(inputs)
    found = [c for c in _candidates(model, len(args), state, tuple(kwargs)) if c]
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


def _per_argument(state: Any, names: tuple[str, ...]) -> tuple:
    if is_by_name(state, names):
        return tuple(state[name] for name in names)
    if len(names) == 1:
        return (state,)
    if not isinstance(state, (tuple, list)) or len(state) != len(names):
        raise InputError(
            f"`forward` takes {len(names)} state arguments ({', '.join(names)}); `state` must be a "
            "tuple of as many values."
        )
    return tuple(state)


def is_by_name(state: Any, arguments: Sequence[str]) -> bool:
    """Tell whether a `state` names arguments of `forward`."""
    return type(state) is dict and all(key in arguments for key in state)


# ---- which arguments could be states


def _candidates(
    model: nn.Module, num_inputs: int, state: Any, keywords: tuple[str, ...] = ()
) -> list[tuple[str, ...]]:
    """List the sets of arguments that may be states, so that the inputs fill the other required
    ones; those that the input gives by keyword are not.
    """
    kinds = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    parameters = {
        name: p
        for name, p in inspect.signature(model.forward).parameters.items()
        if p.kind in kinds and name not in keywords
    }
    if is_by_name(state, tuple(parameters)):
        return [tuple(state)]
    possible = [
        n
        for n, p in parameters.items()
        if p.default in (inspect.Parameter.empty, None) and not _NO_STATE_NAME.fullmatch(n)
    ]
    first = next(iter(parameters), None)
    sizes = range(min(len(possible), _MOST_ARGUMENTS), 0, -1)
    found = []
    for names in itertools.chain.from_iterable(
        itertools.combinations(possible, size) for size in sizes
    ):
        rest = [
            p
            for name, p in parameters.items()
            if name not in names and p.kind is not inspect.Parameter.KEYWORD_ONLY
        ]
        required = sum(p.default is inspect.Parameter.empty for p in rest)
        fits = (
            state is None
            or len(names) == 1
            or (isinstance(state, (tuple, list)) and len(state) == len(names))
        )
        if fits and first not in names and required <= num_inputs <= len(rest):
            found.append(names)
    return found


def _required(model: nn.Module, names: Sequence[str]) -> list[str]:
    parameters = inspect.signature(model.forward).parameters
    return [name for name in names if parameters[name].default is inspect.Parameter.empty]


# ---- trying readings


class _LooksForFrame(TorchFunctionMode):
    """Finds the frame of a function among the callers of a torch function. A frame that is held
    keeps its local variables; and a user's profiler or debugger is left alone.
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
    """Runs readings of one model on random inputs; the model is put back after each run."""

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
        return None if self.state is None else _per_argument(self.state, names)

    def start(self, names: tuple[str, ...]) -> tuple:
        """What the state arguments get at the first call."""
        given = self.given(names)
        return (None,) * len(names) if given is None else tuple(_copied(value) for value in given)

    def first_call(self, names: tuple[str, ...]) -> Any:
        """Call the model once from its initial state, and note the local variables of `forward` at
        its end.
        """
        looking = _LooksForFrame(getattr(inspect.unwrap(self.model.forward), "__code__", None))
        with restored(self.model, values=False), looking:
            returned = self.form.call(self.model, self.steps[0], names, self.start(names))
        self.locals = {} if looking.frame is None else dict(looking.frame.f_locals)
        return returned

    def runs_without_state(self) -> bool:
        """Tell whether the inputs alone fill the arguments of `forward`."""
        try:
            with restored(self.model, values=False), torch.no_grad():
                self.form.call(self.model, self.steps[0])
        except Exception:  # an argument is missing, or None is no value for it
            return False
        return True

    def run(self, reading: Reading, steps: Sequence[tuple]) -> list[Any]:
        """Run a reading over some steps."""
        states, results = self.start(reading.names), []
        with restored(self.model, values=False):
            for inputs in steps:
                results.append(_copied(self.form.call(self.model, inputs, reading.names, states)))
                states = reading.split(_copied(results[-1]))[1]
        return results

    def _has_effect(self, reading: Reading, name: str, returned: Any) -> bool:
        """Tell whether a second step changes with an argument; attributes are put back, which may
        hold the state too.
        """
        new, start = reading.split(_copied(returned))[1], self.start(reading.names)
        results = []
        for forget in (False, True):
            states = [
                b if forget and n == name else a
                for n, a, b in zip(reading.names, new, start, strict=True)
            ]
            with restored(self.model, values=False):
                result = self.form.call(self.model, self.steps[1], reading.names, _copied(states))
                results.append([t for _, t in flatten_state(_copied(result))[0]])
        return not _same(*results)

    def result(self, reading: Reading) -> list[torch.Tensor] | None:
        """Give everything that a reading returns over the steps, or None if the reading cannot be
        right.
        """
        try:
            returned = self.run(reading, self.steps)
            if not all(_same_structure(a, returned[0]) for a in returned[1:]):
                return None
            given = self.given(reading.names)
            if given is not None and not _same_structure(reading.split(returned[0])[1], given):
                return None
            tensors = [t for r in returned for _, t in flatten_state(r)[0]]
            for name in reading.names:
                if name not in _required(self.model, reading.names) and not self._has_effect(
                    reading, name, returned[0]
                ):
                    return None
            return tensors
        except Exception:  # the model does not take this value for this argument
            return None

    def continues(self, reading: Reading) -> bool:
        """Tell whether sequences that are run one after the other end as one long sequence does:
        new states, and outputs with a time axis.
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
            _same([tail], [b])
            for (_, a), (_, b) in zip(*outputs, strict=True)
            if (tail := _last_part(a, b, _STEPS)) is not None
        )

    def mixes_batch(self, reading: Reading) -> bool:
        """Tell whether a second step mixes samples that the first step keeps apart."""
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


@dataclass(frozen=True)
class Trial:
    """A reading that could be right: what it returns over the steps, and what the code says for
    each of its arguments.

    `fits` tells whether the new states are built like what `forward` itself puts into the arguments
    where they are None.
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
                if trials.state is None and _required(model, names):
                    known = all(_STATE_NAME.fullmatch(name) for name in names)
                    raise messages.needs_state(type(model).__name__, names, error, known) from error
                raise
            continue
        for reading in _readings(names, returned):
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
    told = trials.state is not None or all(_required(model, names) for names in candidates)
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
        t.reading.names != left[0].reading.names or not (sure or _same(t.result, left[0].result))
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
    if trials.state is None and not all(_required(trials.model, names) for names in candidates):
        return
    raise StateError(
        f"`{type(trials.model).__name__}.forward` takes a state in `{', '.join(candidates[0])}`, "
        "but what it returns holds no state of the same structure. The bridge understands `-> "
        "(output, state)`, `-> (output, *states)` and `-> state`. Return the new state, or "
        "register an adapter (`eb.register_adapter`) whose `split` finds it."
    )


def _readings(names: tuple[str, ...], returned: Any) -> Iterator[Reading]:
    """List the readings of a returned value for some arguments, the usual conventions first."""
    keys = [key for key, _ in children(returned) or ()]
    if len(names) == 1:
        places: list[Place] = [(key,) for key in reversed(keys)]
        if len(keys) > 2 and isinstance(returned, tuple):
            places += [(_REST,), (_MOST,)]
        yield from (Reading(names, (place,)) for place in [*places, ()])
        return
    groups = itertools.combinations(keys, len(names))
    yield from (Reading(names, tuple((key,) for key in group)) for group in reversed(list(groups)))
    for key, child in children(returned) or ():
        inner = [k for k, _ in children(child) or ()]
        if len(inner) == len(names):
            yield Reading(names, tuple((key, k) for k in inner))


def _fits(reading: Reading, returned: Any, trials: Trials) -> bool:
    """Tell whether each new state has the structure and shapes of its argument's variable at the
    end of `forward`.
    """
    pairs = [
        (trials.locals.get(name), _pick(returned, place))
        for name, place in zip(reading.names, reading.places, strict=True)
    ]
    return all(
        bool(flatten_state(variable)[0]) and _same_structure(value, variable)
        for variable, value in pairs
    )


def _grades(reading: Reading, returned: Any, trials: Trials) -> tuple[int, ...]:
    """Grade what the code says for each argument of a reading."""
    grades = []
    for name, place, start in zip(
        reading.names, reading.places, trials.start(reading.names), strict=True
    ):
        value = _pick(returned, place)
        if _is_same_object(trials.locals.get(name), value) and not _is_same_object(start, value):
            grades.append(_ASSIGNED)
            continue
        variables = [n for n, v in trials.locals.items() if n != name and _is_same_object(v, value)]
        named = any(
            name in re.split(r"_|\d+", n) or (len(name) > 2 and name in n)
            for n in (*variables, *place)
        )
        grades.append(_NAMED if named else int(_STATE_NAME.fullmatch(name) is not None))
    return tuple(grades)


# ---- values


def _pick(returned: Any, place: Place) -> Any:
    for key in place:
        if key in (_REST, _MOST):
            returned = returned[1:] if key == _REST else returned[:-1]
        else:
            returned = dict(children(returned) or ())[key]
    return returned


def _covers(place: Place, key: str, items: list) -> bool:
    if place[0] == _REST:
        return key != items[0][0]
    return key != items[-1][0] if place[0] == _MOST else key == place[0]


def _last_part(whole: torch.Tensor, part: torch.Tensor, parts: int) -> torch.Tensor | None:
    """Give the end of a tensor that is, along one axis, as long as some parts; else None."""
    if whole.dim() != part.dim():
        return None
    longer = [i for i, (a, b) in enumerate(zip(whole.shape, part.shape, strict=True)) if a != b]
    if len(longer) != 1 or whole.shape[longer[0]] != parts * part.shape[longer[0]]:
        return None
    size = part.shape[longer[0]]
    return whole.narrow(longer[0], (parts - 1) * size, size)


def _copied(value: Any) -> Any:
    leaves, skeleton = flatten_state(value)
    return unflatten_state(skeleton, [tensor.detach().clone() for _, tensor in leaves])


def _is_same_object(a: Any, b: Any) -> bool:
    x, y = flatten_state(a)[0], flatten_state(b)[0]
    return bool(x) and len(x) == len(y) and all(s is t for (_, s), (_, t) in zip(x, y, strict=True))


def first_tensor(value: Any) -> torch.Tensor:
    """Give the first tensor of a state: the output of a cell that returns its state and nothing
    else.
    """
    return flatten_state(value)[0][0][1]


def _same_structure(a: Any, b: Any) -> bool:
    (x, left), (y, right) = flatten_state(a), flatten_state(b)
    shapes = [(p, tuple(t.shape)) for p, t in x] == [(p, tuple(t.shape)) for p, t in y]
    return shapes and type(unflatten_state(left, [0] * len(x))) is type(
        unflatten_state(right, [0] * len(y))
    )


def _same(a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        s.shape == t.shape and torch.allclose(s, t, rtol=1e-4, atol=1e-6, equal_nan=True)
        for s, t in zip(a, b, strict=True)
    )


def same_tensors(a: Any, b: Any) -> bool:
    """Tell whether two outputs hold the same numbers."""
    return _same([t for _, t in flatten_state(a)[0]], [t for _, t in flatten_state(b)[0]])
