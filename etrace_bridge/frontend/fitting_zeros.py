"""Zeros that a `forward` takes as its state and gives back in the same shapes: what an error
suggests.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from etrace_bridge.frontend.readings import pick, possible_readings
from etrace_bridge.frontend.returned import same_structure
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import children, flatten_state, unflatten_state
from etrace_bridge.frontend.trials import Trials

_MOST_SIZES = 24
_BATCH = 11  # unlike the number of tensors in a state, which code may unpack
# what one argument may be, of tensors of one shape
_FORMS: tuple[Callable[[Callable], Any], ...] = (
    lambda make: make(),
    lambda make: (make(), make()),
    lambda make: [make(), make()],
    lambda make: (make(), make(), make()),
)


def find_zeros(trials: Trials, names: tuple[str, ...]) -> str | None:
    """Give code that makes zeros which some arguments take, and of which a call returns new ones in
    the same shapes; None if nothing fits.
    """
    batch = None if trials.batch_axis is None else _BATCH
    inputs = tuple(_with_batch(v, trials.batch_axis) for v in trials.steps[0])
    x = next((v for v in inputs if isinstance(v, torch.Tensor)), None)
    if x is None:
        return None
    for shape in _shapes(trials, x, batch):
        for form in _FORMS:
            make = functools.partial(_zeros, trials, x, shape)
            found = _settled(trials, inputs, names, tuple(form(make) for _ in names))
            if found is not None:
                return _code(found[0] if len(found) == 1 else found, batch)
    return None


def _with_batch(x: Any, axis: int | None) -> Any:
    """Repeat samples up to the batch size with which shapes are tried."""
    if not isinstance(x, torch.Tensor) or axis is None or x.dim() <= axis:
        return x
    return x.index_select(axis, torch.arange(_BATCH) % x.shape[axis])


def _settled(trials: Trials, inputs: tuple, names: tuple[str, ...], states: tuple) -> tuple | None:
    """Give states that a call gives back in the same shapes: these, or those of what it returned."""
    for _ in range(2):
        try:
            with restored(trials.model, values=False), torch.no_grad():
                returned = trials.form.call(trials.model, inputs, names, states)
        except Exception:  # it does not take them
            return None
        news = [
            tuple(pick(returned, place) for place in reading.places)
            for reading in possible_readings(names, returned)
        ]
        if any(same_structure(new, states) for new in news):
            return states
        paths = [p for p, _ in flatten_state(states)[0]]
        like = [new for new in news if [p for p, _ in flatten_state(new)[0]] == paths]
        if not like:
            return None
        leaves = flatten_state(like[0])[0]
        states = unflatten_state(flatten_state(states)[1], [torch.zeros_like(t) for _, t in leaves])
    return None


def _zeros(trials: Trials, x: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    dtypes = [p.dtype for p in trials.model.parameters() if p.is_floating_point()]
    other = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    return torch.zeros(shape, dtype=dtypes[0] if dtypes else other)


def _shapes(trials: Trials, x: torch.Tensor, batch: int | None) -> list[tuple[int, ...]]:
    """Shapes that a state may have: like a step of the input, and with sizes that the model's
    attributes and parameters have; few axes first.
    """
    start = () if batch is None else (batch,)
    inner = tuple(x.shape[len(start) + (trials.time_axis is not None) :])
    modules = list(trials.model.modules())
    sizes = [n for m in modules for n in vars(m).values() if type(n) is int and n > 0]
    sizes += [n for p in trials.model.parameters() for n in p.shape]
    few = list(dict.fromkeys(sizes))[:_MOST_SIZES]
    shapes = [(*start, *inner), *((*start, size) for size in few)]
    if len(inner) > 1:
        shapes += [(*start, size, *inner[1:]) for size in few]
    shapes += [(1, *start, size) for size in few]
    return sorted(dict.fromkeys(shapes), key=len)


def _code(value: Any, batch: int | None) -> str:
    """Write zeros as code."""
    if isinstance(value, torch.Tensor):
        sizes: Sequence[Any] = list(value.shape)
        if batch in sizes:
            sizes[sizes.index(batch)] = "batch_size"
        return f"torch.zeros({', '.join(map(str, sizes))})"
    inner = ", ".join(_code(child, batch) for _, child in children(value) or ())
    return f"[{inner}]" if isinstance(value, list) else f"({inner})"
