"""How one step of a torch model runs: where its state is, what it consumes, and how to call it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from etrace_bridge.frontend import messages
from etrace_bridge.frontend.calls import intercepted_calls, plain_call
from etrace_bridge.frontend.inputs import PLAIN, InputForm
from etrace_bridge.frontend.state import (
    Adapter,
    Path,
    bind_state_arguments,
    call_with_state,
    count_tensors,
    find_adapter,
    flatten_state,
    unflatten_state,
)
from etrace_bridge.frontend.tensor import INPUT, STATE

if TYPE_CHECKING:
    from etrace_bridge.frontend.own_start import OwnStart
    from etrace_bridge.frontend.time.step import LoopStep


@dataclass(frozen=True)
class TimeAxis:
    """Where the steps of an output are: along one axis, which is read as `(outer, steps, inner)`.

    Models that flatten time and batch to one axis (`y.view(-1, classes)`) have an `outer` or
    `inner` of the batch size.
    """

    axis: int
    outer: int = 1
    inner: int = 1

    def select(self, value: Any, step: int) -> Any:
        """Return one step of a tensor or array."""
        before = value.shape[: self.axis]
        after = value.shape[self.axis + 1 :]
        width = self.outer * self.inner
        if value.shape[self.axis] == width:  # the only step
            return value.squeeze(self.axis) if width == 1 else value
        if width == 1:
            return value[(slice(None),) * self.axis + (step,)]
        split = value.reshape(
            *before, self.outer, value.shape[self.axis] // width, self.inner, *after
        )
        return split[(slice(None),) * (self.axis + 1) + (step,)].reshape(*before, width, *after)


@dataclass
class StateLeaf:
    """One state tensor.

    Attributes:
        path: Its path in the bridged module: the torch module's path, then the state's own name.
        initial: Its value before the first step.
        hidden: It is recurrent (a `HiddenState`); otherwise it is carried only.
    """

    path: Path
    initial: torch.Tensor
    hidden: bool = True


@dataclass
class ArgumentSlot:
    """State that enters and leaves one call of a module by its arguments.

    Attributes:
        module: The torch module.
        call: Which call of the module in a step, from 0.
        adapter: Its adapter.
        skeletons: One per argument: the argument's value with holes for the tensors.
        leaves: The tensors of all arguments, in order.
        later: The skeletons in later steps, if Python values in them change.
    """

    module: nn.Module
    call: int
    adapter: Adapter
    skeletons: tuple[Any, ...]
    leaves: list[StateLeaf]
    later: tuple[tuple[Any, ...], ...] = ()

    def states(self, tensors: Sequence[Any], which: int = 0) -> tuple:
        """Put tensors into the structure of the arguments, the first one or one of the later ones."""
        states, position = [], 0
        for skeleton in _at(which, self.skeletons, *self.later):
            states.append(unflatten_state(skeleton, tensors[position:]))
            position += count_tensors(skeleton)
        return tuple(states)


@dataclass
class AttributeSlot:
    """State that a module keeps in an attribute or buffer.

    Attributes:
        module: The torch module.
        name: The attribute.
        path: The module's path.
        skeleton: The attribute's value after one step, with holes for the tensors.
        leaves: Its tensors.
        later: The skeletons of `PythonAttribute.values` but the first, if Python values in it change.
    """

    module: nn.Module
    name: str
    path: str
    skeleton: Any
    leaves: list[StateLeaf]
    later: tuple[Any, ...] = ()

    def put(self, tensors: Sequence[torch.Tensor], which: int = 0) -> None:
        """Set the attribute, without the checks of `nn.Module.__setattr__`; `which` as for
        `PythonAttribute.put`.
        """
        holder = self.module._buffers if self.name in self.module._buffers else self.module.__dict__
        holder[self.name] = unflatten_state(_at(which, self.skeleton, *self.later), tensors)

    def get(self) -> list[torch.Tensor]:
        """Read the attribute's tensors."""
        holder = self.module._buffers if self.name in self.module._buffers else self.module.__dict__
        return [tensor for _, tensor in flatten_state(holder[self.name])[0]]


@dataclass
class PythonAttribute:
    """A Python value that a module changes from step to step, such as a counter.

    Attributes:
        module: The torch module.
        name: The attribute.
        path: The module's path.
        values: What it is after one, after two and after very many steps, and before a late step
            that seems to be unlike the others, if there is one; with holes for tensors. A step
            must be the same for all of them.
        tensors: What fills the holes: parameters, constants.
        where: Paths inside the attribute of what changes; `()` is the attribute itself.
        whole: No slot sets this attribute.
    """

    module: nn.Module
    name: str
    path: str
    values: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...] = ()
    where: tuple[Path, ...] = ((),)
    whole: bool = True

    @property
    def label(self) -> str:
        """The full name of what changes."""
        full = f"{self.path}.{self.name}" if self.path else self.name
        return full + "".join(
            f"[{key}]" if key.isdigit() else f"[{key!r}]"
            for key in (self.where[0] if self.where else ())
        )

    @property
    def goes_on(self) -> bool:
        """Whether the second step changes it too, as a counter; a flag that the first step sets
        does not.
        """
        return repr(self.values[0]) != repr(self.values[1])

    def put(self, which: int) -> None:
        """Set the attribute to one of its `values`."""
        if self.whole:  # a fresh container each time: the step may change it in place
            self.module.__dict__[self.name] = unflatten_state(
                _at(which, *self.values), self.tensors
            )


def _at(which: int, *values: Any) -> Any:
    """Return one of some values, the last one if there are not so many."""
    return values[min(which, len(values) - 1)]


@dataclass
class StepPlan:
    """How one step of a model runs.

    Attributes:
        arguments: State in arguments, root first.
        attributes: State in attributes.
        python: Python values in attributes that change from step to step.
        layout: None if the model takes one time step, else `"time_major"` or `"batch_first"`.
        form: How the tensors of an input stand in a call.
        output_time_axes: For each tensor of a sequence model's output, where its steps are, or
            None.
        root: The adapter of the root module, given or found, or None.
        uses_random: The step draws random numbers.
        later: Which of their values Python attributes and Python values in states get, to see
            whether that matters.
        start_parameters: Names of the parameters that do nothing but make the initial state.
        own_start: What the model itself tells that its required state arguments start from.
        begin: Calls the method of the model that has to be called before a sequence; None if there
            is none. The states that it sets are then set by the plan.
        loop: The step of a model that loops over time with its state in local variables; None for
            other models.
    """

    arguments: list[ArgumentSlot] = field(default_factory=list)
    attributes: list[AttributeSlot] = field(default_factory=list)
    python: list[PythonAttribute] = field(default_factory=list)
    layout: str | None = None
    form: InputForm = PLAIN
    output_time_axes: tuple[TimeAxis | None, ...] = ()
    root: Adapter | None = None
    uses_random: bool = False
    later: int = 0
    start_parameters: tuple[str, ...] = ()
    own_start: OwnStart | None = None
    begin: Callable[[], Any] | None = None
    loop: LoopStep | None = None

    @property
    def leaves(self) -> list[StateLeaf]:
        """All state tensors, in the order in which `run` takes and gives them."""
        if self.loop is not None:
            return self.loop.leaves
        return [leaf for slot in (*self.arguments, *self.attributes) for leaf in slot.leaves]

    @property
    def num_later(self) -> int:
        """In how many ways a later step may differ from the first in Python values."""
        counts = [len(attribute.values) - 1 for attribute in self.python]
        return max([0, *counts, *(len(slot.later) for slot in self.arguments)])

    @property
    def python_values(self) -> list[str]:
        """Names of what holds Python values that change from step to step."""
        arguments = [
            name for s in self.arguments if s.later for name in s.adapter.arguments(s.module)
        ]
        return [*(attribute.label for attribute in self.python), *arguments]

    def drop_unread(self, used: Sequence[bool], model: nn.Module) -> None:
        """Drop slots none of whose tensors is read by the step: written only, or overruled by a
        state that the model passes.
        """
        if self.loop is not None:
            return
        flags = iter(used)
        read = [
            (slot, any(list(itertools.islice(flags, len(slot.leaves)))))
            for slot in (*self.arguments, *self.attributes)
        ]
        self.arguments = [
            s for s, r in read if isinstance(s, ArgumentSlot) and (r or s.module is model)
        ]
        self.attributes = [s for s, r in read if isinstance(s, AttributeSlot) and r]

    def run(
        self, model: nn.Module, inputs: tuple, states: Sequence[Any], call: Callable
    ) -> tuple[Any, list[Any]]:
        """Run one step of the model, on plain or traced tensors.

        Args:
            model: The root module, whose attributes may be changed: use `snapshot.restored` around
                it.
            inputs: One time step of each input tensor, without a time axis.
            states: One tensor per leaf.
            call: Runs the model on arguments by position and by keyword, with an `Injector`
                handling its module calls: `native_call(model)`, or the tracer's.

        Returns:
            The output (state taken away, time axis removed) and the new states.
        """
        injector = Injector(self, model, states)
        for attribute in self.python:
            attribute.put(self.later)
        position = sum(len(slot.leaves) for slot in self.arguments)
        for slot in self.attributes:
            slot.put(states[position : position + len(slot.leaves)], self.later)
            position += len(slot.leaves)
        names = () if self.root is None else self.root.arguments(model)
        args, kwargs = self.form.fill(add_time_axis(inputs, self.layout))
        if names:  # the injector puts the state in the places of these
            args, kwargs = call_with_state(
                lambda *args, **kwargs: (args, kwargs),
                names,
                args,
                kwargs,
                (None,) * len(names),
                model.forward,
            )
        returned = call(injector, args, kwargs)
        new_states = injector.new_states()
        for slot in self.attributes:
            new_states.extend(slot.get())
        return remove_time_axis(
            self.output_of(model, returned), self.layout, self.output_time_axes
        ), new_states

    def call_from(self, model: nn.Module, inputs: tuple, given: tuple | None) -> Any:
        """Call the model from the state that the user gave, or from none where `forward` makes its
        own.
        """
        names = () if self.root is None else self.root.arguments(model)
        if self.root is None or not names:
            return self.form.call(model, inputs)
        states = (None,) * len(names) if given is None else self.root.pack(model, given)
        return self.form.call(model, inputs, names, states)

    def call_root(self, model: nn.Module, inputs: tuple) -> Any:
        """Call the model on plain tensors from its initial state, as a torch user would."""
        slot = next((slot for slot in self.arguments if slot.module is model), None)
        if slot is None:
            return self.form.call(model, inputs)
        states = slot.adapter.pack(
            model, slot.states([leaf.initial.clone() for leaf in slot.leaves])
        )
        return self.form.call(model, inputs, slot.adapter.arguments(model), states)

    def output_of(self, model: nn.Module, returned: Any) -> Any:
        """Take the root's state out of what its `forward` returned."""
        if self.root is not None and self.root.arguments(model):
            return self.root.split(model, returned)[0]
        return returned


@contextlib.contextmanager
def begun(plan: StepPlan) -> Iterator[None]:
    """Within this, the model's own method for the begin of a sequence has been called, if it has to
    be; the caller restores the model.
    """
    if plan.begin is not None:
        plan.begin()
    yield


def native_call(model: nn.Module) -> Callable:
    """Run a model on plain tensors: the `call` of `StepPlan.run`."""

    def call(injector: Injector, args: tuple, kwargs: dict) -> Any:
        injector.native = True
        with intercepted_calls(lambda module, args, kwargs: injector(module, *args, **kwargs)):
            return model(*args, **kwargs)

    return call


class Injector:
    """Handles module calls: gives modules their state arguments and catches the new values."""

    def __init__(self, plan: StepPlan, model: nn.Module, states: Sequence[Any]) -> None:
        # Plain tensors: torch's own kernels run, not the adapters' equations for them
        self.native = False
        self._root, self._root_adapter = model, plan.root
        self._slots: dict[tuple[int, int], ArgumentSlot] = {
            (id(s.module), s.call): s for s in plan.arguments
        }
        self._values: dict[tuple[int, int], list[Any]] = {}
        self._later = plan.later
        self._calls: dict[int, int] = {}
        position = 0
        for key, slot in self._slots.items():
            self._values[key] = list(states[position : position + len(slot.leaves)])
            position += len(slot.leaves)

    def new_states(self) -> list[Any]:
        """Return the state tensors after the step; a module that was not called keeps its state."""
        return [value for values in self._values.values() for value in values]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        adapter = self._root_adapter if module is self._root else find_adapter(module)
        names = () if adapter is None else adapter.arguments(module)
        if adapter is None or (not names and adapter.forward is None):
            return plain_call(module, *args, **kwargs)
        key = (id(module), self._calls.get(id(module), 0))
        self._calls[id(module)] = key[1] + 1
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            rest, kept, given = bind_state_arguments(original, names, args, kwargs)
            slot = self._slots.get(key)
            if slot is not None and _origin(given) & STATE:
                slot = None  # the model passes its own recurrent state: that one counts
            elif slot is not None and _origin(given) & INPUT:
                raise messages.computed_initial_state(
                    ".".join(slot.leaves[0].path[:-1]), ", ".join(names)
                )
            states = given if slot is None else slot.states(self._values[key], self._later)
            if adapter.forward is not None and not self.native:
                returned, new = adapter.forward(module, rest, states, **kept)
            else:
                states = states if slot is None else adapter.pack(module, states)
                returned = call_with_state(original, names, rest, kept, states)
                new = adapter.split(module, returned)[1] if slot is not None else ()
            if slot is not None:
                self._values[key] = [
                    tensor for value in new for _, tensor in flatten_state(value)[0]
                ]
            return returned

        module.__dict__["forward"] = forward  # so that torch's hooks run as for any call
        try:
            return plain_call(module, *args, **kwargs)
        finally:
            del module.__dict__["forward"]


def _origin(given: tuple) -> int:
    """What state values that a model passes depend on; 0 also for plain tensors, whose origin is
    not followed.
    """
    found = 0
    for _, tensor in flatten_state(given)[0]:
        found |= getattr(tensor, "origin", 0)
    return found


# ---- the time axis of models that consume sequences


def time_axis_of(layout: str | None) -> int | None:
    """Return the time axis of a layout; None for one step."""
    return None if layout is None else int(layout == "batch_first")


def add_time_axis(inputs: tuple, layout: str | None) -> tuple:
    """Make a sequence of length one of each input tensor."""
    if layout is None:
        return inputs
    return tuple(
        x.unsqueeze(_time_axis(x, layout)) if isinstance(x, torch.Tensor) else x for x in inputs
    )


def _time_axis(x: torch.Tensor, layout: str) -> int:
    return 1 if layout == "batch_first" and x.dim() >= 1 else 0


def remove_time_axis(output: Any, layout: str | None, axes: tuple[TimeAxis | None, ...]) -> Any:
    """Take the only step out of each output tensor that has a time axis."""
    if layout is None:
        return output
    leaves, skeleton = flatten_state(output)
    tensors = [
        t if axis is None else axis.select(t, 0) for (_, t), axis in zip(leaves, axes, strict=True)
    ]
    return unflatten_state(skeleton, tensors)
