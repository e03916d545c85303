"""Find out how a torch model runs one step, by running it: its inputs, where its state is, and how
the state starts.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import BridgeError, InputError, NotSupportedError, StateError
from etrace_bridge.frontend import examples, messages
from etrace_bridge.frontend.adapter import find_adapter
from etrace_bridge.frontend.argument_slots import find_argument_slots
from etrace_bridge.frontend.attributes import find_attribute_slots
from etrace_bridge.frontend.calls import LOCK, DefinedMemory, as_written
from etrace_bridge.frontend.chaining import (
    check_batch,
    check_chaining,
    check_draws,
    reads_state,
)
from etrace_bridge.frontend.injector import native_call
from etrace_bridge.frontend.inputs import PLAIN, InputForm
from etrace_bridge.frontend.layout import (
    find_layout,
    find_time_axes,
    keeps_samples_apart,
    repeat_in_time,
)
from etrace_bridge.frontend.names import NamedTensor
from etrace_bridge.frontend.own_start import find_beginning, find_own_start
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.recorder import Recorder, call_root, call_without_state
from etrace_bridge.frontend.root import find_root_adapter
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.time_axis import add_time_axis, time_axis_of

_MAY_BE_A_LOOP = (
    messages.BatchInOrder,
    messages.NotChained,
    messages.MissingArgument,
    messages.NeedsState,
    messages.UnclearState,
)


def find_plan(
    model: nn.Module,
    inputs: tuple,
    *,
    state: Callable[[int | None], Any] = lambda batch_size: None,
    sequence: bool | None = None,
    batch_first: bool | None = None,
    batch_size: int | None,
    tensors: Sequence[NamedTensor] = (),
    form: InputForm = PLAIN,
) -> StepPlan:
    """Find how one step of a model runs.

    A model whose `forward` takes one step, or whose state lives in layers that the bridge knows,
    runs as it is, with its state put in and taken out. Of any other model that takes sequences, the
    step is found in the program of a whole sequence.

    Args:
        model: The torch model; it is left as it was.
        inputs: One time step of each input, as a flat list of torch tensors.
        state: Makes the initial state of the root module's state arguments for a batch size, where
            `forward` does not accept None.
        sequence: Whether `forward` consumes sequences; None to find out.
        batch_first: Where the batch axis of a sequence is; None to find out.
        batch_size: Size of the batch axis of the inputs; None if there is none.
        tensors: The parameters and buffers that a step may read.
        form: How the inputs stand in a call of the model.

    Returns:
        The plan, with initial values for `inputs`' batch size.
    """
    check_modules(model)
    if sequence is None and (other := _unlike_batch(inputs, batch_size)) is not None:
        # A batch as large as another axis may be taken for it: another batch size tells them apart
        with contextlib.suppress(Exception):  # the model takes this one only
            probe = find_plan(
                model,
                tuple(examples.with_batch(x, other) for x in inputs),
                state=state,
                batch_first=batch_first,
                batch_size=other,
                tensors=tensors,
                form=form,
            )
            sequence = probe.layout is not None
            batch_first = probe.layout == "batch_first" if sequence else batch_first
    batched, own = batch_size is not None, None
    with _trying(model):
        if (begin := find_beginning(model, inputs, form, batch_size)) is not None:
            begin()
        if state(batch_size) is None:
            own = find_own_start(model, inputs, form, batched)
            state = state if own is None else own.make_constant
        given = state(batch_size)
        layout = find_layout(model, inputs, sequence, batch_first, form, batched, state)
        layout = layout if batched or layout is None else "time_major"
        try:
            plan = _plan_in_layout(model, inputs, layout, given, batched, form)
            plan.own_start, plan.begin = own, begin
        except Exception as error:
            if sequence is False or not _may_take_sequences(model, error):
                raise
            # so it takes steps, and a later one fails
            if not isinstance(error, BridgeError) and _runs_alone(model, inputs, form):
                raise
            failure: Exception | None = error
        else:
            if (
                layout is not None
                or sequence is False
                or not _may_take_sequences(model, None)
                or reads_state(model, inputs, plan)
            ):
                return plan
            failure = None
        layouts = (
            [layout]
            if layout is not None
            else [*(["batch_first"] if batched else []), "time_major"]
        )
        if layout is None and batch_first is not None:
            layouts = ["batch_first" if batch_first else "time_major"]
        found = _plan_loop(model, inputs, layouts, given, batched, tensors, failure, form)
        if found is None:
            return plan  # type: ignore[possibly-undefined]
        found.own_start, found.begin = own, begin
        return found


@contextlib.contextmanager
def _trying(model: nn.Module) -> Iterator[None]:
    """Let the model be run in this context; its library layers start from their reset states."""
    with LOCK, restored(model), torch.enable_grad(), as_written(), DefinedMemory():
        for module in model.modules():  # a run before `wrap` must not show
            if (adapter := find_adapter(module)) is not None:
                adapter.reset(module)
        yield


def see_layout(
    model: nn.Module, inputs: tuple, form: InputForm, state: Callable[[int | None], Any]
) -> str | None:
    """Return the layout in which a model's recurrent layers receive sequences of such steps; None
    if it is unknown.
    """
    with contextlib.suppress(Exception), _trying(model):  # the first input will tell
        if state(2) is None and (own := find_own_start(model, inputs, form, True)) is not None:
            state = own.make_constant
        return find_layout(model, inputs, None, None, form, True, state)
    return None


def _unlike_batch(inputs: tuple, batch_size: int | None) -> int | None:
    """Return a batch size that no other axis of the inputs has, if another axis has this one."""
    sizes = {size for x in inputs if isinstance(x, torch.Tensor) for size in x.shape[1:]}
    if batch_size is None or batch_size not in sizes:
        return None
    return next(size for size in itertools.count(3) if size not in sizes)


def _runs_alone(model: nn.Module, inputs: tuple, form: InputForm) -> bool:
    """Return whether torch runs a single step of a model from its initial state."""
    try:
        with restored(model, values=False), torch.no_grad():
            call_without_state(model, inputs, form)
    except Exception:  # it takes no single steps, or needs a state
        return False
    return True


def _may_take_sequences(model: nn.Module, error: Exception | None) -> bool:
    """Return whether to try a model on whole sequences after one step failed or showed no state."""
    known = find_adapter(model)
    if known is not None and (known.arguments(model) or known.sequence(model) is not None):
        return False
    return error is None or not isinstance(error, BridgeError) or isinstance(error, _MAY_BE_A_LOOP)


def _plan_in_layout(
    model: nn.Module,
    inputs: tuple,
    layout: str | None,
    state: Any,
    batched: bool,
    form: InputForm,
) -> StepPlan:
    """Return the plan of a model whose state is in arguments, attributes and layers with an
    adapter.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    plan = StepPlan(layout=layout, form=form)
    with restored(model, values=False):
        batch_axis = None if not batched else int(plan.layout == "time_major")
        plan.root, given = find_root_adapter(
            model, add_time_axis(inputs, layout), state, batch_axis, time_axis_of(layout), form
        )
    if plan.layout is None and batched:
        check_batch(model, inputs, plan, given)
    plan.output_time_axes = find_time_axes(model, inputs, plan, given)
    find_argument_slots(model, inputs, plan, paths, given)
    plan.attributes, plan.python = _find_attribute_slots(model, inputs, plan, paths)
    if plan.layout is not None:
        check_draws(model, inputs, plan, given)
        training = [(module, module.training) for module in model.modules()]
        check_chaining(model, inputs, plan, given)
        for module, mode in training:
            module.training = mode
    return plan


def _plan_loop(
    model: nn.Module,
    inputs: tuple,
    layouts: list[str],
    state: Any,
    batched: bool,
    tensors: Sequence[NamedTensor],
    failure: Exception | None,
    form: InputForm,
) -> StepPlan | None:
    """Find the step of a model that loops over time, in the first layout in which it has a state.

    Raises:
        The reason why there is none, if the model cannot run single steps either (`failure`).
    """
    from etrace_bridge.frontend.time.loop import find_loop  # which imports the plan

    reasons: list[Exception] = []
    likely: list[Exception] = []  # of layouts in which the model keeps samples apart
    stateless = None
    batch = (
        next((x.shape[0] for x in inputs if isinstance(x, torch.Tensor) and x.dim()), None)
        if batched
        else None
    )
    for layout in layouts:
        plan, given = StepPlan(layout=layout, form=form), None
        try:
            with restored(model, values=False):
                batch_axis = None if not batched else int(layout == "time_major")
                plan.root, given = find_root_adapter(
                    model,
                    repeat_in_time(inputs, layout, 5),
                    state,
                    batch_axis,
                    time_axis_of(layout),
                    form,
                )
            # torch must take this layout
            call_root(model, plan, given, repeat_in_time(inputs, layout, 5), Recorder())
            plan.loop = find_loop(model, tensors, inputs, plan, given, batch)
        except Exception as error:  # the model does not take this layout, or looks ahead in it
            reasons.append(error)
            if batched and _keeps_apart(model, inputs, plan, given):
                likely.append(error)
            continue
        plan.output_time_axes = plan.loop.axes
        if plan.loop.leaves:
            return plan
        stateless = stateless or plan
    known = [
        error
        for error in (*likely, *reasons)
        if isinstance(error, BridgeError) and not isinstance(error, InputError)
    ]
    later = _later_time_axis(model, tensors, inputs, form) if batched else None
    if failure is None:
        about_time = [
            error for error in known if isinstance(error, (NotSupportedError, StateError))
        ]
        if later is not None:
            about_time = [messages.time_on_a_later_axis(type(model).__name__, later)]
        elif about_time and likely and not _keeps_apart(model, inputs, StepPlan(form=form), None):
            raise about_time[0]
        if about_time:
            warnings.warn(
                messages.stateless_step(type(model).__name__, about_time[0]), stacklevel=2
            )
        return None
    if later is not None:
        raise messages.time_on_a_later_axis(type(model).__name__, later) from failure
    if stateless is not None and not known and not isinstance(failure, messages.UnclearState):
        return stateless
    if isinstance(failure, BridgeError) and not isinstance(
        failure, (messages.BatchInOrder, messages.NotChained)
    ):
        raise failure
    raise (known[0] if known else failure)


def takes_time_at(
    model: nn.Module,
    tensors: Sequence[NamedTensor],
    inputs: tuple,
    form: InputForm,
    axis: int,
) -> bool:
    """Return whether a model with one input loops over a later axis, as in `(batch, channels,
    time)`.

    Then samples do not mix, and there is a state.
    """
    from etrace_bridge.frontend.time.loop import find_loop  # which imports the plan

    moved, plan = _TimeMoved(model, axis), StepPlan(layout="batch_first", form=form)
    # a model that does not take time there raises, most often
    with contextlib.suppress(Exception), warnings.catch_warnings(), _trying(model):
        warnings.simplefilter("ignore")
        if _keeps_apart(moved, inputs, plan, None):
            found = find_loop(moved, tensors, inputs, plan, None, inputs[0].shape[0])
            return bool(found.leaves) and not found.first_differs
    return False


def _later_time_axis(
    model: nn.Module, tensors: Sequence[NamedTensor], inputs: tuple, form: InputForm
) -> int | None:
    """Return the axis behind the second along which a model loops over time; None if there is none."""
    if not form.is_plain or len(inputs) != 1 or not isinstance(inputs[0], torch.Tensor):
        return None
    axes = range(2, inputs[0].dim() + 1)
    return next((a for a in axes if takes_time_at(model, tensors, inputs, form, a)), None)


class _TimeMoved(nn.Module):
    """Moves the time axis of a model from a later position to the second."""

    def __init__(self, model: nn.Module, axis: int) -> None:
        super().__init__()
        self.model, self.axis = model, axis

    def forward(self, x: torch.Tensor) -> Any:
        """Run the model on a sequence `(batch, time, ...)`."""
        return self.model(x.movedim(1, self.axis))


def _keeps_apart(model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None) -> bool:
    """Return whether samples do not mix in a plan's layout, from the user's state."""

    def call(x: tuple) -> Any:
        return plan.output_of(model, call_root(model, plan, given, x, Recorder()))

    return keeps_samples_apart(model, inputs, plan.layout, call)


def _find_attribute_slots(
    model: nn.Module, inputs: tuple, plan: StepPlan, paths: dict[int, str]
) -> tuple[list, list]:
    """Find state in attributes, with argument states at their initial values."""
    start = [leaf.initial for leaf in plan.leaves]
    with contextlib.ExitStack() as stack:

        def reset() -> None:
            stack.close()
            stack.enter_context(restored(model, values=False))

        reset()
        return find_attribute_slots(
            model, lambda: plan.run(model, inputs, start, native_call(model))[0], reset, paths
        )


def check_modules(model: nn.Module) -> None:
    """Let adapters refuse modules that cannot run one step at a time."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise messages.scripted(module.original_name, path)
        adapter = find_adapter(module)
        if adapter is not None:
            adapter.check(module, path)
        if module._backward_hooks or module._backward_pre_hooks:
            raise messages.backward_hook(type(module).__name__, path)
