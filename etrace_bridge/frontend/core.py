"""The torch side of a bridged module: its tensors, how its step runs, and the steps traced so far."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from etrace_bridge._jax_compat import is_concrete
from etrace_bridge.frontend import discover, examples, layout, messages
from etrace_bridge.frontend.borders import to_host, to_jax, to_torch
from etrace_bridge.frontend.inputs import PLAIN, InputForm, missing_keywords
from etrace_bridge.frontend.left_over import tensors_of_a_run
from etrace_bridge.frontend.names import (
    NamedTensor,
    named_tensors,
    step_tensors,
    to_path,
    versions_of,
)
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.settings import Settings
from etrace_bridge.frontend.starting import find_start_parameters
from etrace_bridge.frontend.step import TracedStep, trace_step


@dataclass(frozen=True)
class WrapOptions:
    """The arguments of `wrap` besides the model; the example's tensors, and their form."""

    state: Any = None
    example_input: tuple | None = None
    form: InputForm = PLAIN
    sequence: bool | None = None
    batch_first: bool | None = None
    seed: int = 0


@dataclass(eq=False)
class Session:
    """What `init_state` fixes: the plan of a step for one batch size, and the steps traced for it."""

    batch_size: int | None
    plan: StepPlan
    inputs: tuple[torch.Tensor, ...]
    guessed: bool
    settings: Settings
    form: InputForm
    steps: dict[Any, TracedStep] = field(default_factory=dict)


class Core:
    """The torch side of a bridged module, shared by its copies."""

    def __init__(self, model: nn.Module, options: WrapOptions) -> None:
        self.model, self.options = model, options
        self.form = options.form  # of the inputs; fixed once the model ran on some
        self.form_is_fixed = options.example_input is not None
        # a step like those of the first sequences, if they were read before there were states
        self.step_of_sequences: tuple | None = None
        self._steps_along_later_axes: dict[int, tuple] = {}  # and if time is at a later axis
        self.tensors: list[NamedTensor] = named_tensors(model)
        self.versions_read = versions_of(self.tensors)  # when a net last took the tensors' values
        self.tensor_paths = {to_path(n.name) for n in self.tensors}
        self.step_tensors = step_tensors(model)
        # What callers were told before a step's input was known
        self.assumed_batch_first: bool | None = None
        self._guessed_batch_first: bool | None = None

    def inputs_for(self, batch_size: int | None) -> tuple[tuple | None, bool]:
        """Return one step of input for a batch size, and whether it is guessed from the layers'
        sizes.
        """
        if self.options.example_input is not None:
            return tuple(
                examples.with_batch(x, batch_size) for x in self.options.example_input
            ), False
        if not self.form.is_plain or missing_keywords(self.model.forward, self.form):
            return None, True  # sizes of layers do not tell how inputs stand in a call
        return examples.guess_inputs(self.model, batch_size), True

    def learn_sequences(self, sequences: tuple) -> None:
        """Note the layout of a user's sequences, which decides where the layers do not."""
        if all(getattr(x, "ndim", 0) >= 2 for x in sequences):
            self.step_of_sequences = tuple(
                examples.example_tensor((2, *x.shape[2:]), self.as_input(x[:1, :1]).dtype)
                for x in sequences
            )
            shape, dtype = sequences[0].shape, self.as_input(sequences[0][:1, :1]).dtype
            self._steps_along_later_axes = {
                axis: (examples.example_tensor((2, *shape[1:axis], *shape[axis + 1 :]), dtype),)
                for axis in range(2, len(shape) if len(sequences) == 1 else 0)
            }
            self._guessed_batch_first = None

    def tell_batch_first(self) -> bool:
        """Return whether sequences are batch-first before an input is known.

        The layers decide; else sequences that were read; else a guessed input.

        Raises:
            InputError: Callers were told otherwise before; what they cut then would be wrong.
        """
        if self._guessed_batch_first is None:
            known = layout.static_batch_first(self.model, self.options.batch_first)
            if self.step_of_sequences is not None and self.options.batch_first is None:
                # code around a layer may bring sequences into the layer's layout
                seen = discover.see_layout(
                    self.model, self.step_of_sequences, self.form, self._given_state
                )
                known = known if seen is None else seen == "batch_first"
            self._guessed_batch_first = self._plan_says_batch_first() if known is None else known
        if self.assumed_batch_first not in (None, self._guessed_batch_first):
            raise messages.other_layout(type(self.model).__name__, self._guessed_batch_first)
        self.assumed_batch_first = self._guessed_batch_first
        return self._guessed_batch_first

    def _plan_says_batch_first(self) -> bool:
        for inputs in (self.step_of_sequences, self.inputs_for(2)[0]):
            if inputs is None:
                continue
            with (
                warnings.catch_warnings(),  # of a model that is given something else
                contextlib.suppress(Exception),  # a wrong guess; the first input will tell
            ):
                warnings.simplefilter("ignore")
                plan = self.find_plan(inputs, 2)
                if not plan.leaves:  # nothing to learn online: the layout may be another
                    break
                return plan.layout == "batch_first"
        self._refuse_later_time_axis()
        return False

    def _refuse_later_time_axis(self) -> None:
        """Raise if the sequences that were read have time behind their second axis."""
        for axis, step in self._steps_along_later_axes.items():
            if discover.takes_time_at(self.model, self.step_tensors, step, self.form, axis):
                raise messages.time_on_a_later_axis(type(self.model).__name__, axis)

    def check_layout(self, plan: StepPlan) -> None:
        """Raise if a sequence was cut into steps before its layout was known, and along the wrong
        axis.
        """
        batch_first = plan.layout == "batch_first"
        if plan.layout and self.assumed_batch_first not in (None, batch_first):
            raise messages.other_layout(type(self.model).__name__, batch_first)

    def find_plan(self, inputs: tuple, batch_size: int | None) -> StepPlan:
        """Find how a step runs, with initial states for this batch size."""
        options = self.options
        try:
            plan = discover.find_plan(
                self.model,
                inputs,
                state=self._given_state,
                sequence=options.sequence,
                batch_first=options.batch_first,
                batch_size=batch_size,
                tensors=self.step_tensors,
                form=self.form,
            )
        except Exception as error:
            if left := tensors_of_a_run(self.model):  # of another batch size, perhaps
                error.add_note(messages.left_over(type(self.model).__name__, left))
            raise
        state = None if plan.own_start is None else plan.own_start.make(batch_size)
        if options.state is not None:
            state = examples.given_state(options.state, batch_size, self.float_dtype, detach=False)
        plan.start_parameters = find_start_parameters(self.model, inputs, plan, state)
        return plan

    def _given_state(self, batch_size: int | None) -> Any:
        """The user's initial state for a batch size; None if there is none."""
        return examples.given_state(self.options.state, batch_size, self.float_dtype)

    def settings(self, plan: StepPlan) -> Settings:
        """The model's current settings, without those that a step changes."""
        changed = (*plan.attributes, *plan.python)
        return Settings(self.model, {(id(each.module), each.name) for each in changed})

    def drop_unread_states(self, session: Session) -> None:
        """Trace the step once, take states that it never reads out of the plan, and note whether it
        is random.
        """
        step = self.traced_step(session, tuple(to_jax(x) for x in session.inputs))
        session.plan.uses_random = step.uses_key
        if session.plan.num_later:
            self._check_python_values(session, step)
        if not all(step.used_states):
            session.plan.drop_unread(step.used_states, self.model)
            session.steps.clear()

    def _check_python_values(self, session: Session, step: TracedStep) -> None:
        """Trace again with the Python values of the next step, and of steps far away: the program
        must be the same.
        """
        labels = session.plan.python_values
        inputs = tuple(to_jax(x) for x in session.inputs)
        for which in range(1, session.plan.num_later + 1):
            try:
                again = trace_step(
                    self.model,
                    dataclasses.replace(session.plan, later=which),
                    self.step_tensors,
                    inputs,
                )
            except Exception as error:
                # the model's own, or ours: a counter that ran out of a list, an operation of
                # another branch
                raise messages.python_state(labels) from error
            if str(again.jaxpr) != str(step.jaxpr):
                raise messages.python_state(labels)

    def traced_step(self, session: Session, inputs: Sequence[Any]) -> TracedStep:
        """Trace one step, at most once per shape of the inputs."""
        key = tuple((tuple(x.shape), str(x.dtype)) for x in inputs)
        if key not in session.steps:
            session.steps[key] = trace_step(self.model, session.plan, self.step_tensors, inputs)
        return session.steps[key]

    def as_input(self, x: Any) -> Any:
        """Bring an input to a JAX array; NumPy's default float64 becomes the model's float type, and
        in 32-bit mode so does a float64 tensor, as in the learner's steps.
        """
        if isinstance(x, torch.Tensor) and not jax.config.jax_enable_x64:
            return jnp.asarray(to_host(x, "The input"))
        array = to_jax(x)
        if isinstance(x, (np.ndarray, list, float)) and np.asarray(x).dtype == np.float64:
            return array.astype(str(self.float_dtype).removeprefix("torch."))
        return array

    @property
    def float_dtype(self) -> torch.dtype:
        """The dtype of the model's first floating parameter or buffer; of a complex one, that of
        its parts.
        """
        return next(
            (
                n.tensor.dtype.to_real()
                for n in self.tensors
                if n.tensor.is_floating_point() or n.tensor.is_complex()
            ),
            torch.get_default_dtype(),
        )

    def example_like(self, values: tuple) -> tuple[torch.Tensor, ...]:
        """Make torch tensors of the shapes of some inputs, which may be traced."""
        return tuple(
            to_torch(v) if is_concrete(v) else examples.example_tensor(v.shape, v.dtype)
            for v in values
        )
