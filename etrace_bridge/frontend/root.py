"""Understanding the `forward` of a user's own module: which arguments carry state, and where the new state comes back."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.frontend.state import Adapter, call_with_state, find_adapter, flatten_state, unflatten_state

_STATE_NAME = re.compile(
    r"(.*_)?(h|hx|hs|h0|c|cx|cs|v|u|z|s|mem|syn|hidden|states?|memory|memories|carry|cell|context|membrane)(_.*|\d+|s)?|prev.*|.*prev|last.*"
)
Split = Callable[[Any], tuple[Any, tuple]]


class FoundAdapter(Adapter):
    """The adapter that the bridge makes for a root module without one."""

    def __init__(self, names: tuple[str, ...], split: Split) -> None:
        self._names, self._split = names, split

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        """The state arguments that were found."""
        return self._names

    def split(self, module: nn.Module, returned: Any) -> tuple[Any, tuple]:
        """The convention that was found."""
        return self._split(returned)


def find_root_adapter(model: nn.Module, inputs: tuple, state: Any) -> tuple[Adapter | None, tuple | None]:
    """Give the root module's adapter, registered or made for its `forward(x, state)`, and the state that the user gave.

    Args:
        model: The root module, which the caller restores.
        inputs: The arguments of a call, without state.
        state: The user's initial state, or None.

    Returns:
        The adapter (None if the root has no state arguments), and one value per state argument if the user gave a state.
    """
    known = find_adapter(model)
    if known is not None and known.arguments(model):
        names = known.arguments(model)
        return known, None if state is None else _per_argument(state, names)
    names = _state_arguments(model, len(inputs), state is not None)
    if not names:
        if state is not None:
            raise InputError(
                f"`wrap` got a `state`, but `{type(model).__name__}.forward` has no argument for it besides its "
                f"{len(inputs)} input(s). Leave `state` out; state in attributes and inside layers is found without it."
            )
        return known, None
    given = None if state is None else _per_argument(state, names)
    try:
        returned = call_with_state(model, names, inputs, {}, given or (None,) * len(names), model.forward)
    except Exception as error:
        if given is not None or not _required(model, names):
            raise
        unclear = [name for name in names if not _STATE_NAME.fullmatch(name)]
        if unclear:
            raise InputError(
                f"`{type(model).__name__}.forward` fails without `{', '.join(unclear)}` ({type(error).__name__}: {error}). If that is an input, "
                "call the model with all its inputs, or show them first: `wrap(model, example_input=(x, ...))`. If it is a state, pass "
                "`wrap(model, state=lambda batch_size: torch.zeros(batch_size, hidden))`."
            ) from error
        raise StateError(
            f"`{type(model).__name__}.forward` needs a state in `{', '.join(names)}` and fails without one "
            f"({type(error).__name__}: {error}). The bridge cannot know its shape. Pass `wrap(model, state=lambda "
            f"batch_size: torch.zeros(batch_size, hidden))`, with the structure that `forward` expects."
        ) from error
    split = _find_split(model, inputs, names, given, returned)
    return (known, None) if split is None else (FoundAdapter(names, split), given)


def _per_argument(state: Any, names: tuple[str, ...]) -> tuple:
    if len(names) == 1:
        return (state,)
    if not isinstance(state, (tuple, list)) or len(state) != len(names):
        raise InputError(f"`forward` takes {len(names)} state arguments ({', '.join(names)}); `state` must be a tuple of as many values.")
    return tuple(state)


def _state_arguments(model: nn.Module, num_inputs: int, told: bool) -> tuple[str, ...]:
    """Name the positional arguments after the inputs that are required, or default to None and sound like a state."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p for p in inspect.signature(model.forward).parameters.values() if p.kind in positional][num_inputs:]
    names = []
    for parameter in parameters:
        required = parameter.default is inspect.Parameter.empty
        if required or (parameter.default is None and (_STATE_NAME.fullmatch(parameter.name) or (told and not names))):
            names.append(parameter.name)
        else:
            break
    return tuple(names)


def _required(model: nn.Module, names: tuple[str, ...]) -> bool:
    parameters = inspect.signature(model.forward).parameters
    return any(parameters[name].default is inspect.Parameter.empty for name in names)


def _find_split(model: nn.Module, inputs: tuple, names: tuple[str, ...], given: tuple | None, returned: Any) -> Split | None:
    """Find where the new state stands in what `forward` returned: try each convention by a second call."""
    count = len(names)
    candidates: list[Split] = []
    if isinstance(returned, (tuple, list)) and not hasattr(returned, "_fields"):
        if len(returned) == 1 + count:
            candidates.append(lambda r: (r[0], tuple(r[1:])))
        if count == 1 and len(returned) > 2:
            candidates.append(lambda r: (r[0] if len(r) == 2 else tuple(r[:-1]), (r[-1],)))
        if count > 1 and len(returned) == 2:
            candidates.append(lambda r: (r[0], tuple(r[1])))
        if count > 1 and len(returned) == count:
            candidates.append(lambda r: (r[0], tuple(r)))
    if count == 1:
        candidates.append(lambda r: (first_tensor(r), (r,)))
    for split in candidates:
        try:
            states = split(returned)[1]
            if given is not None and not _same_structure(states, given):
                continue
            again = call_with_state(model, names, inputs, {}, states, model.forward)
        except Exception:  # this convention does not fit; the next one may
            continue
        if _same_structure(again, returned):
            return split
    if given is None and not _required(model, names):
        return None
    raise StateError(
        f"`{type(model).__name__}.forward` takes a state in `{', '.join(names)}`, but what it returns holds no state "
        f"of the same structure. The bridge understands `-> (output, state)`, `-> (output, *states)` and `-> state`. "
        f"Return the new state, or register an adapter (`eb.register_adapter`) whose `split` finds it."
    )


def first_tensor(value: Any) -> torch.Tensor:
    """Give the first tensor of a state: the output of a cell that returns its state and nothing else."""
    return flatten_state(value)[0][0][1]


def _same_structure(a: Any, b: Any) -> bool:
    (x, left), (y, right) = flatten_state(a), flatten_state(b)
    shapes = [(p, tuple(t.shape)) for p, t in x] == [(p, tuple(t.shape)) for p, t in y]
    return shapes and type(unflatten_state(left, [0] * len(x))) is type(unflatten_state(right, [0] * len(y)))


def same_tensors(a: Any, b: Any) -> bool:
    """Tell whether two outputs hold the same numbers."""
    x, y = flatten_state(a)[0], flatten_state(b)[0]
    return len(x) == len(y) and all(
        s.shape == t.shape and torch.allclose(s, t, rtol=1e-4, atol=1e-6, equal_nan=True) for (_, s), (_, t) in zip(x, y, strict=True)
    )
