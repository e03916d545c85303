"""Arguments of `forward` that are states: taken out of a call, and put into one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any


def bind_state_arguments(
    forward: Callable, names: Sequence[str], args: tuple, kwargs: dict
) -> tuple[tuple, dict, tuple[Any, ...]]:
    """Separate the state arguments of a call from the rest: other positional, other keyword, state
    values (None: not given).
    """
    parameters = list(_parameters(forward))
    rest, kept, states = [], dict(kwargs), dict.fromkeys(names)
    for position, value in enumerate(args):
        name = parameters[position] if position < len(parameters) else None
        if name in states:
            states[name] = value
        else:
            rest.append(value)
    for name in names:
        if name in kept:
            states[name] = kept.pop(name)
    return tuple(rest), kept, tuple(states[name] for name in names)


def call_with_state(
    function: Callable,
    names: Sequence[str],
    rest: tuple,
    kept: dict,
    states: Sequence[Any],
    signature: Callable | None = None,
) -> Any:
    """Call a function with state arguments where its signature has them, among other positional
    arguments.
    """
    given = dict(zip(names, states, strict=True))
    waiting = iter(rest)
    args = []
    for name in _parameters(signature or function):
        if name in given:
            args.append(given.pop(name))
            continue
        value = next(waiting, _MISSING)
        if value is _MISSING:
            break
        args.append(value)
    return function(*args, *waiting, **kept, **given)


def missing_arguments(forward: Callable, args: tuple, kwargs: dict) -> list[str]:
    """Name the required arguments that some arguments by position and by keyword leave out."""
    required = [
        name
        for name, p in inspect.signature(forward).parameters.items()
        if p.default is p.empty and p.kind in _POSITIONAL
    ]
    return [name for name in required[len(args) :] if name not in kwargs]


def fill_missing(
    forward: Callable, args: tuple, kwargs: dict, start: Any = None
) -> tuple[tuple, dict]:
    """Give a start for the required arguments beyond those given, or None: a model's code often
    takes None for "no state yet".
    """
    missing = missing_arguments(forward, args, kwargs)
    values: tuple = (None,) * len(missing)
    if start is not None and len(missing) == 1:
        values = (start,)
    elif isinstance(start, (tuple, list)) and len(start) == len(missing):
        values = tuple(start)
    if kwargs:
        return args, {**kwargs, **dict(zip(missing, values, strict=True))}
    return (*args, *values), kwargs


_MISSING = object()


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(forward: Callable) -> Iterator[str]:
    return (
        name for name, p in inspect.signature(forward).parameters.items() if p.kind in _POSITIONAL
    )
