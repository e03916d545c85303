"""How one step of a torch model runs: where its state is, what it consumes, and how to call it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from etrace_bridge.frontend.adapter import Adapter
from etrace_bridge.frontend.injector import Injector
from etrace_bridge.frontend.inputs import PLAIN, InputForm
from etrace_bridge.frontend.slots import ArgumentSlot, AttributeSlot, PythonAttribute, StateLeaf
from etrace_bridge.frontend.state_arguments import call_with_state
from etrace_bridge.frontend.time_axis import TimeAxis, add_time_axis, remove_time_axis

if TYPE_CHECKING:
    from etrace_bridge.frontend.own_start import OwnStart
    from etrace_bridge.frontend.time.step import LoopStep


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
