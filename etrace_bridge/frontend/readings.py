"""Readings of a `forward`: which arguments may be states, and which part of what it returns may be
each of them at the next call.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from etrace_bridge._errors import InputError
from etrace_bridge.frontend.returned import output_of_state
from etrace_bridge.frontend.state_values import children

# keys from the returned value to a new state; see `pick` for the two slices
Place = tuple[str, ...]
_REST = "1:"
_MOST = ":-1"
STATE_NAME = re.compile(
    r"(.*_)?(h|hx|hs|h0|c|cx|cs|v|u|z|s|mem|syn|hidden|states?|memory|memories|carry|cell|membrane)(_.*|\d+|s)?|prev.*|.*prev|last.*"
)
NO_STATE_NAME = re.compile(
    r"(.*_)?(mask|masks|length|lengths|label|labels|target|targets|weight|bias|generator|dtype|device)"
)
_MOST_ARGUMENTS = 4


@dataclass(frozen=True)
class Reading:
    """One way to understand a `forward`: the state arguments, and the place of each in what is
    returned.
    """

    names: tuple[str, ...]
    places: tuple[Place, ...]

    def split(self, returned: Any) -> tuple[Any, tuple]:
        """Split the returned value into output and new states."""
        states = tuple(pick(returned, place) for place in self.places)
        items = children(returned)
        if items is None or () in self.places:
            return output_of_state(returned), states
        rest = [
            (key, value)
            for key, value in items
            if not any(_covers(place, key, items) for place in self.places)
        ]
        if not rest:
            return output_of_state(returned), states
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


def possible_readings(names: tuple[str, ...], returned: Any) -> Iterator[Reading]:
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


# ---- which arguments could be states


def candidate_arguments(
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
        if p.default in (inspect.Parameter.empty, None) and not NO_STATE_NAME.fullmatch(n)
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


def required_arguments(model: nn.Module, names: Sequence[str]) -> list[str]:
    """List those of some arguments that have no default."""
    parameters = inspect.signature(model.forward).parameters
    return [name for name in names if parameters[name].default is inspect.Parameter.empty]


def per_argument(state: Any, names: tuple[str, ...]) -> tuple:
    """Return the user's initial state as one value per state argument."""
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
    """Return whether a `state` names arguments of `forward`."""
    return type(state) is dict and all(key in arguments for key in state)


# ---- parts of a returned value


def pick(returned: Any, place: Place) -> Any:
    """Return the part of a returned value at a path."""
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
