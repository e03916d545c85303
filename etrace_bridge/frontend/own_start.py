"""What a required state argument starts from, where the module itself tells.

A method of the module that makes a first state (`init_hidden(batch_size)`) is asked, then the layer
inside that gets the argument. The answer is tried: `forward` must return a new state of the same
structure and shapes. And of a module that keeps its state in attributes: the method that has to be
called before a sequence (`init_sequence(batch_size)`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from etrace_bridge.frontend.adapter import find_adapter
from etrace_bridge.frontend.calls import intercepted_calls, plain_call
from etrace_bridge.frontend.examples import given_state, with_batch
from etrace_bridge.frontend.inputs import InputForm
from etrace_bridge.frontend.layout import layouts_of_layers, repeat_in_time, usable_batch
from etrace_bridge.frontend.readings import per_argument, pick, possible_readings
from etrace_bridge.frontend.returned import copied_state, same_structure
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_arguments import (
    bind_state_arguments,
    call_with_state,
    missing_arguments,
)
from etrace_bridge.frontend.state_values import flatten_state, unflatten_state

_LENGTH = 5  # of sequences with which a layout is tried
_MAKING = {"init", "initial", "initialize", "zero", "zeros", "default", "start", "new", "first"}
_BEGINNING = {"reset", "begin", *_MAKING}
_RUN = {"sequence", "episode", "reset", "trial"}
_STATE = {
    "hidden",
    "hiddens",
    "state",
    "states",
    "carry",
    "memory",
    "mem",
    "membrane",
    "cell",
    "hx",
}
_NOT_MAKING = re.compile(r"weight|param|dict|bias|load|save|from|layer|module|optim|seed")
_BATCH = re.compile(r"b|n|bs|bsz|bsize|batch|batch_?sizes?|n_?batch|num_(envs|samples)|size")
_INPUT = re.compile(r"x|xs|inputs?_?|data|obs|observations?")
_SHAPE = re.compile(r"(input_?)?shape|size")
_SPATIAL = re.compile(r"(image|frame|spatial|img)_?(size|shape|dims?)|hw")


@dataclass(frozen=True)
class OwnStart:
    """The start that a module tells for its required state arguments.

    Attributes:
        make: Makes it for a batch size (None: no batch axis), one value for all arguments as
            `wrap`'s `state` gives it, in torch's graph.
    """

    make: Callable[[int | None], Any]

    def make_constant(self, batch: int | None) -> Any:
        """Make the start, cut off from torch's graph."""
        start = self.make(batch)
        return None if start is None else copied_state(start)


def find_own_start(
    model: nn.Module, inputs: tuple, form: InputForm, batched: bool
) -> OwnStart | None:
    """Find what the required state arguments of a model's `forward` start from; None if there are
    none, if None does for them, or if nothing tells.

    Args:
        model: The model, which the caller restores.
        inputs: One time step of each input.
        form: How the inputs stand in a call.
        batched: Whether the inputs have a batch axis.
    """
    names = tuple(missing_arguments(model.forward, *form.fill(inputs)))
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    if not names or not tensors:
        return None
    batch = usable_batch(inputs) if batched else None
    layouts = list(dict.fromkeys([*layouts_of_layers(model), None, "batch_first", "time_major"]))
    calls = [_Call(model, inputs, form, layout, names) for layout in layouts]
    takes_none = any(call.returns(batch, (None,) * len(names)) is not None for call in calls)
    for source in (_by_methods,) if takes_none else (_by_methods, _by_layer):
        for call in calls if batched else calls[:1]:
            for make in source(call, batch):
                start = make(batch)
                if start is None:
                    continue
                if takes_none and not any(bool(t.any()) for _, t in flatten_state(start)[0]):
                    return None  # zeros, as with None
                return OwnStart(make)
    return None


@dataclass(frozen=True)
class _Call:
    """Calls of a model on its inputs in one layout, with values for its state arguments."""

    model: nn.Module
    inputs: tuple
    form: InputForm
    layout: str | None
    names: tuple[str, ...]

    def values(self, batch: int | None) -> tuple:
        """The inputs of a call, for a batch size."""
        steps = tuple(
            with_batch(x, batch) if isinstance(x, torch.Tensor) else x for x in self.inputs
        )
        return steps if self.layout is None else repeat_in_time(steps, self.layout, _LENGTH)

    def returns(self, batch: int | None, states: Sequence[Any]) -> Any:
        """What the model returns from some states; None if it does not take them."""
        args, kwargs = self.form.fill(self.values(batch))
        try:
            with restored(self.model, values=False):
                return call_with_state(
                    self.model, self.names, args, kwargs, states, self.model.forward
                )
        except Exception:  # not in this layout, or not from these states
            return None

    def settled(self, batch: int | None, start: Any) -> Any:
        """Give a start that the model gives back with the same structure and shapes: the given one,
        or, where only sizes differ, one expanded to those; None if there is none.
        """
        try:
            states = per_argument(start, self.names)
        except Exception:  # as many values as there are arguments
            return None
        returned = self.returns(batch, states)
        if returned is None:
            return None
        for reading in possible_readings(self.names, returned):
            new = tuple(pick(returned, place) for place in reading.places)
            if same_structure(new, states):
                return start
        for reading in possible_readings(self.names, returned):
            new = tuple(pick(returned, place) for place in reading.places)
            wider = _expanded(states, new)
            if wider is not None:
                again = self.returns(batch, wider)
                if again is not None and same_structure(reading.split(again)[1], wider):
                    return wider[0] if len(self.names) == 1 else wider
        return None


def _expanded(states: tuple, new: tuple) -> tuple | None:
    """Expand axes of size one of some states to the sizes of others."""
    (old, skeleton), (wanted, _) = flatten_state(states), flatten_state(new)
    if [p for p, _ in old] != [p for p, _ in wanted]:
        return None
    try:
        return unflatten_state(
            skeleton, [a.expand(b.shape) for (_, a), (_, b) in zip(old, wanted, strict=True)]
        )
    except RuntimeError:
        return None


# ---- a method of the module


def _by_methods(call: _Call, batch: int | None) -> Iterator[Callable[[int | None], Any]]:
    """Give makers of a start that call a method of the model or of a module inside it."""
    for module in call.model.modules():
        for name in dir(type(module)):
            if not _may_make_a_state(name) or hasattr(nn.Module, name):
                continue
            if not callable(getattr(type(module), name, None)):
                continue
            method = getattr(module, name)

            def make(size: int | None, method: Callable = method) -> Any:
                made = _called(method, call, size)
                return None if made is None else call.settled(size, made)

            if make(batch) is not None:
                yield make


def _may_make_a_state(name: str) -> bool:
    words = _words(name)
    return bool(words & _MAKING and words & _STATE) and not _NOT_MAKING.search(name.lower())


def _words(name: str) -> set[str]:
    return set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_"))


def _called(method: Callable, call: _Call, batch: int | None) -> Any:
    """Call a method that may make a state; None if it takes something else, or makes nothing."""
    x = next(v for v in call.values(batch) if isinstance(v, torch.Tensor))
    try:
        with restored(call.model, values=False):
            made = _run_method(method, x, batch)
    except Exception:  # it makes something else
        return None
    if not flatten_state(made)[0]:
        return None
    return given_state(lambda _: made, None, _dtype(call.model, x), detach=False)


def _run_method(method: Callable, x: torch.Tensor, batch: int | None) -> Any:
    """Call a method that may make a state.

    Raises:
        ValueError: It draws random numbers: torch would draw others for every sequence.
    """
    generator = torch.get_rng_state()
    made = method(**_arguments(method, x, batch))
    if not torch.equal(generator, torch.get_rng_state()):
        raise ValueError
    return made


def _arguments(method: Callable, x: torch.Tensor, batch: int | None) -> dict[str, Any]:
    """Give what the names of a method's arguments ask for."""
    values: dict[str, Any] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        if name == "device":
            values[name] = x.device
        elif name in ("cuda", "use_cuda"):
            values[name] = x.is_cuda
        elif _SPATIAL.fullmatch(name):
            values[name] = tuple(x.shape[-2:])
        elif _INPUT.fullmatch(name):
            values[name] = x
        elif _BATCH.fullmatch(name):
            values[name] = batch
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            values[name] = tuple(x.shape) if _SHAPE.fullmatch(name) else batch
    return values


def _dtype(model: nn.Module, x: torch.Tensor) -> torch.dtype:
    floats = [*(p for p in model.parameters() if p.is_floating_point())]
    if floats:
        return floats[0].dtype
    return x.dtype if x.is_floating_point() else torch.get_default_dtype()


# ---- a method to call before a sequence


def find_beginning(
    model: nn.Module, inputs: tuple, form: InputForm, batch: int | None
) -> Callable[[], Any] | None:
    """Find the method without which a model does not run, such as `init_sequence(batch_size)`: what
    has to be called before a sequence. None if the model runs, or if no method helps.
    """
    if not any(isinstance(x, torch.Tensor) for x in inputs):
        return None
    names = tuple(missing_arguments(model.forward, *form.fill(inputs)))
    layouts = (None, "batch_first", "time_major") if batch is not None else (None,)
    calls = [_Call(model, inputs, form, layout, names) for layout in layouts]
    methods = [name for name in dir(type(model)) if _may_begin(name)]
    if not methods or _runs(calls, batch):
        return None
    x = next(v for v in calls[0].values(batch) if isinstance(v, torch.Tensor))
    for name in methods:
        method = getattr(model, name)

        def begin(method: Callable = method) -> None:
            _run_method(method, x, batch)

        with restored(model, values=False):
            try:
                begin()
            except Exception:  # it takes something else
                continue
            if _runs(calls, batch):
                return begin
    return None


def _may_begin(name: str) -> bool:
    words = _words(name)
    fits = words & _BEGINNING and words & (_STATE | _RUN)
    return bool(fits) and not (_NOT_MAKING.search(name.lower()) or hasattr(nn.Module, name))


def _runs(calls: Sequence[_Call], batch: int | None) -> bool:
    return any(call.returns(batch, (None,) * len(call.names)) is not None for call in calls)


# ---- a layer inside


class _Marker:
    """Stands for a state argument, to see which layer gets it."""


def _by_layer(call: _Call, batch: int | None) -> Iterator[Callable[[int | None], Any]]:
    """Give a maker of the start that the layer makes to which the arguments are passed on."""

    def make(size: int | None) -> Any:
        markers = tuple(_Marker() for _ in call.names)
        made: dict[int, Any] = {}

        def handler(module: nn.Module, args: tuple, kwargs: dict) -> Any:
            adapter = find_adapter(module)
            names = () if adapter is None else adapter.arguments(module)
            if adapter is None or not names or module is call.model:
                return plain_call(module, *args, **kwargs)
            rest, kept, given = bind_state_arguments(module.forward, names, args, kwargs)
            if not any(isinstance(part, _Marker) for part in _parts(given)):
                return plain_call(module, *args, **kwargs)
            start = adapter.initial(module, rest)
            packed = (None,) * len(names) if start is None else adapter.pack(module, start)
            _note(made, given, packed)
            return call_with_state(module, names, rest, kept, packed, module.forward)

        with intercepted_calls(handler):
            call.returns(size, markers)
        values = tuple(made.get(id(marker)) for marker in markers)
        if any(value is None for value in values):
            return None
        return call.settled(size, values[0] if len(values) == 1 else values)

    if make(batch) is not None:
        yield make


def _parts(given: tuple) -> list[Any]:
    return [
        part
        for value in given
        for part in (value if isinstance(value, (tuple, list)) else (value,))
    ]


def _note(made: dict[int, Any], given: tuple, packed: tuple) -> None:
    """Note which part of a layer's start each marker stands for."""
    for marker, value in zip(given, packed, strict=True):
        if isinstance(marker, _Marker):
            made[id(marker)] = value
        elif isinstance(marker, (tuple, list)) and isinstance(value, (tuple, list)):
            made.update({id(m): v for m, v in zip(marker, value, strict=False)})
