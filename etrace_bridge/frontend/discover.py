"""Finding out how a torch model runs one step, by running it: what it consumes, where its state is,
how the state starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import BridgeError, InputError, NotSupportedError, StateError
from etrace_bridge.frontend import examples, messages
from etrace_bridge.frontend.attributes import find_attribute_slots
from etrace_bridge.frontend.calls import (
    LOCK,
    DefinedMemory,
    as_written,
    intercepted_calls,
    plain_call,
)
from etrace_bridge.frontend.examples import (
    random_like,
    scaled,
    share_changed,
    with_sample_changed,
)
from etrace_bridge.frontend.inputs import PLAIN, InputForm
from etrace_bridge.frontend.names import NamedTensor
from etrace_bridge.frontend.plan import (
    ArgumentSlot,
    StateLeaf,
    StepPlan,
    TimeAxis,
    add_time_axis,
    native_call,
    time_axis_of,
)
from etrace_bridge.frontend.root import find_root_adapter, same_tensors
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state import (
    Adapter,
    bind_state_arguments,
    call_with_state,
    fill_missing,
    find_adapter,
    flatten_state,
    state_names,
    unflatten_state,
)

_LENGTHS = (3, 5, 7, 11, 13)
_MAY_BE_A_LOOP = (
    messages.BatchInOrder,
    messages.NotChained,
    messages.MissingArgument,
    messages.UnclearState,
)


@dataclass
class Call:
    """One recorded call of a module that has an adapter."""

    module: nn.Module
    adapter: Adapter
    index: int
    inputs: tuple
    keywords: dict
    given: tuple
    returned: Any


class Recorder:
    """Handles module calls on plain tensors: notes the calls of modules with an adapter."""

    def __init__(self, root: nn.Module | None = None, root_adapter: Adapter | None = None) -> None:
        self.calls: list[Call] = []
        self.total = 0
        self._root, self._root_adapter = root, root_adapter
        self._counts: dict[int, int] = {}

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> Any:
        self.total += 1
        adapter = self._root_adapter if module is self._root else find_adapter(module)
        if adapter is None:
            return plain_call(module, *args, **kwargs)
        rest, kept, given = bind_state_arguments(
            module.forward, adapter.arguments(module), args, kwargs
        )
        index = self._counts.get(id(module), 0)
        self._counts[id(module)] = index + 1
        # the call may write to its arguments
        call = Call(module, adapter, index, _copied(rest), _copied(kept), _copied(given), None)
        self.calls.append(call)
        call.returned = plain_call(module, *args, **kwargs)
        return call.returned


def _copied(values: Any) -> Any:
    leaves, skeleton = flatten_state(values)
    return unflatten_state(skeleton, [tensor.detach().clone() for _, tensor in leaves])


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
        inputs: One time step of each input, as torch tensors in a row.
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
    batched, given = batch_size is not None, state(batch_size)
    with LOCK, restored(model), torch.enable_grad(), as_written(), DefinedMemory():
        for module in model.modules():  # a run before `wrap` must not show
            if (adapter := find_adapter(module)) is not None:
                adapter.reset(module)
        layout = find_layout(model, inputs, sequence, batch_first, form)
        layout = layout if batched or layout is None else "time_major"
        try:
            plan = _plan_in_layout(model, inputs, layout, given, batched, form)
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
                or _reads_state(model, inputs, plan)
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
        return plan if found is None else found  # type: ignore[possibly-undefined]


def _unlike_batch(inputs: tuple, batch_size: int | None) -> int | None:
    """Give a batch size that no other axis of the inputs has, if this one is that of another."""
    sizes = {size for x in inputs if isinstance(x, torch.Tensor) for size in x.shape[1:]}
    if batch_size is None or batch_size not in sizes:
        return None
    return next(size for size in itertools.count(3) if size not in sizes)


def _runs_alone(model: nn.Module, inputs: tuple, form: InputForm) -> bool:
    """Whether torch runs a single step of a model from its initial state."""
    try:
        with restored(model, values=False), torch.no_grad():
            _call_without_state(model, inputs, form)
    except Exception:  # it takes no single steps, or needs a state
        return False
    return True


def _reads_state(model: nn.Module, inputs: tuple, plan: StepPlan) -> bool:
    """Whether a step depends on any of its states: `forward` may set them anew in every call."""
    start = [leaf.initial for leaf in plan.leaves]
    moved = [(t == 0) if t.dtype == torch.bool else t + torch.ones_like(t) for t in start]
    return bool(start) and any(
        _tells_apart(model, given, plan, start, moved)
        for given in (inputs, tuple(random_like(x, 0) for x in inputs))  # zeros may close a gate
    )


def _tells_apart(
    model: nn.Module, inputs: tuple, plan: StepPlan, *states: list[torch.Tensor]
) -> bool:
    """Whether a step gives other results from other states."""
    runs = []
    for some in states:
        try:
            with restored(model, values=False), torch.no_grad():
                given = [state.clone() for state in some]
                runs.append(plan.run(model, inputs, given, native_call(model)))
        except Exception:  # the model checks its states
            return True
    return not same_tensors(*runs)


def _may_take_sequences(model: nn.Module, error: Exception | None) -> bool:
    """Whether it is worth trying a model on whole sequences after one step failed, or after it
    showed no state.
    """
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
    """Find how a model runs whose state is in arguments, attributes and layers with an adapter."""
    paths = {id(module): path for path, module in model.named_modules()}
    plan = StepPlan(layout=layout, form=form)
    with restored(model, values=False):
        batch_axis = None if not batched else int(plan.layout == "time_major")
        plan.root, given = find_root_adapter(
            model, add_time_axis(inputs, layout), state, batch_axis, time_axis_of(layout), form
        )
    if plan.layout is None and batched:
        _check_batch(model, inputs, plan, given)
    plan.output_time_axes = find_time_axes(model, inputs, plan, given)
    _find_argument_slots(model, inputs, plan, paths, given)
    plan.attributes, plan.python = _find_attribute_slots(model, inputs, plan, paths)
    if plan.layout is not None:
        training = [(module, module.training) for module in model.modules()]
        _check_chaining(model, inputs, plan, given)
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
            _call_root(model, plan, given, repeat_in_time(inputs, layout, 5), Recorder())
            plan.loop = find_loop(model, tensors, inputs, plan, given, batch)
        except Exception as error:  # the model does not take this layout, or looks ahead in it
            reasons.append(error)
            if batched and _keeps_samples_apart(model, inputs, plan, given):
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
    if failure is None:
        about_time = [
            error for error in known if isinstance(error, (NotSupportedError, StateError))
        ]
        if about_time:
            if likely and not _keeps_samples_apart(model, inputs, StepPlan(form=form), None):
                raise about_time[0]
            warnings.warn(
                messages.stateless_step(type(model).__name__, about_time[0]), stacklevel=2
            )
        return None
    if stateless is not None and not known and not isinstance(failure, messages.UnclearState):
        return stateless
    if isinstance(failure, BridgeError) and not isinstance(
        failure, (messages.BatchInOrder, messages.NotChained)
    ):
        raise failure
    raise (known[0] if known else failure)


def _keeps_samples_apart(
    model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None
) -> bool:
    """Tell whether a change of one sample changes no other sample's output, in a plan's layout."""
    axis = int(plan.layout == "time_major")
    whole = inputs if plan.layout is None else repeat_in_time(inputs, plan.layout, 5)
    size = next(x.shape[axis] for x in whole if isinstance(x, torch.Tensor) and x.dim() > axis)
    base = tuple(random_like(x, 0) for x in whole)
    changed = tuple(with_sample_changed(x, axis, size) for x in base)
    if size < 2:
        return False
    try:
        runs = [_call_root(model, plan, given, x, Recorder()) for x in (base, changed)]
    except Exception:  # the model does not take this layout
        return False
    tensors = [[t for _, t in flatten_state(plan.output_of(model, r))[0]] for r in runs]
    return share_changed(*tensors) <= 1 / size + 1e-9


def _call_root(
    model: nn.Module, plan: StepPlan, given: tuple | None, args: tuple, recorder: Recorder
) -> Any:
    """Call the model on plain tensors with its initial state, if it takes one and the state is
    known.
    """
    root = plan.root
    names = () if root is None else root.arguments(model)
    states = given
    if root is not None and names and given is None:
        with restored(model, values=False):
            states = root.initial(model, plan.form.fill(args)[0])
    with restored(model, values=False), intercepted_calls(recorder):
        return plan.call_from(model, args, None if states is None else _copied(states))


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


def _check_chaining(model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None) -> None:
    """Run a random sequence at once and step by step: a state that the bridge does not carry, or a
    look ahead, would show.

    Raises:
        NotChained: They differ, or nothing tells whether an output of the last step is not a sum or
            a maximum over time.
    """
    # Dropout differs from run to run; batch statistics are part of what the model computes
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            module.training = False
    proven = False
    for scale in (1.0, 5.0, 30.0):  # a spiking model that is silent agrees with everything
        pair = _WholeAndSteps(model, inputs, plan, given, scale)
        if not pair.agree():
            break
        proven = proven or pair.last_steps_tell
        if not pair.silent:
            return
    else:
        if proven:
            return
    raise messages.not_chained(type(model).__name__, [".".join(leaf.path) for leaf in plan.leaves])


class _WholeAndSteps:
    """What torch gives for a random sequence at once, and for its steps one after the other.

    Attributes:
        whole: Output tensors of the sequence.
        last_steps_tell: Each output without a time axis has a value or a derivative that is not
            zero, so that it could have differed from that of the last step.
    """

    def __init__(
        self, model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None, scale: float
    ) -> None:
        self.model, self.plan = model, plan
        length, axis = _unused_length(inputs), 1 if plan.layout == "batch_first" else 0
        self.steps = [
            scaled(tuple(random_like(x, t) for x in inputs), scale) for t in range(length)
        ]
        sequence = [
            torch.stack(x, min(axis, x[0].dim())) if isinstance(x[0], torch.Tensor) else x[0]
            for x in zip(*self.steps, strict=True)
        ]
        returned = _call_root(model, plan, given, tuple(sequence), Recorder())
        self.whole = [tensor for _, tensor in flatten_state(plan.output_of(model, returned))[0]]
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self.last_steps_tell = True

    @property
    def silent(self) -> bool:
        """Whether an output is all zeros."""
        return any(not bool(tensor.any()) for tensor in self.whole)

    def agree(self) -> bool:
        """Tell whether values and derivatives are the same.

        Values alone do not tell a last step from a sum, where the steps before it are silent; nor
        whether `forward` detaches the state that it gets.
        """
        root = [slot for slot in self.plan.arguments if slot.module is self.model]
        if root and len(root) < len(self.plan.arguments):
            # What the root passes on counts, not the states of the layers that it calls
            outputs = self._in_steps(dataclasses.replace(self.plan, arguments=root))
            if self._same_values(outputs):
                return self._same_derivatives(outputs)
        outputs = self._in_steps(self.plan)
        return self._same_values(outputs) and self._same_derivatives(outputs)

    def _in_steps(self, plan: StepPlan) -> list[list[torch.Tensor]]:
        """Give the outputs of each step."""
        outputs = []
        with restored(self.model, values=False):
            states = [leaf.initial.clone() for leaf in plan.leaves]
            for x in self.steps:
                output, states = plan.run(self.model, x, states, native_call(self.model))
                outputs.append([tensor for _, tensor in flatten_state(output)[0]])
        return outputs

    def _pairs(
        self, outputs: list[list[torch.Tensor]], index: int
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Give an output at each step beside what it should be; without a time axis, the last."""
        column, whole = [y[index] for y in outputs], self.whole[index]
        axis = self.plan.output_time_axes[index]
        if axis is None:
            return [(column[-1], whole)]
        return [(y, axis.select(whole, t)) for t, y in enumerate(column)]

    def _same_values(self, outputs: list[list[torch.Tensor]]) -> bool:
        return all(
            torch.allclose(found, wanted, rtol=1e-3, atol=1e-5, equal_nan=True)
            for index in range(len(self.whole))
            for found, wanted in self._pairs(outputs, index)
        )

    def _same_derivatives(self, outputs: list[list[torch.Tensor]]) -> bool:
        """Compare the gradients of each output by the weights."""
        for index, (y, axis) in enumerate(zip(self.whole, self.plan.output_time_axes, strict=True)):
            if y.is_complex() or not self._weights:
                continue
            found, wanted = zip(*self._pairs(outputs, index), strict=True)
            try:
                gradients = [self._gradients(found), self._gradients(wanted)]
            except RuntimeError:  # the model writes to what autograd needs
                continue
            if not all(_close_gradients(a, b) for a, b in zip(*gradients, strict=True)):
                return False
            if axis is None and not y.any() and not any(g.any() for g in gradients[1]):
                self.last_steps_tell = False
        return True

    def _gradients(self, values: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        """Give the gradients of a sum of values with positive factors."""
        generator = torch.Generator().manual_seed(0)
        factors = [torch.rand(y.shape, generator=generator).to(y.dtype) + 0.5 for y in values]
        total = sum((f * y).sum() for f, y in zip(factors, values, strict=True))
        if not isinstance(total, torch.Tensor) or not total.requires_grad:
            return [torch.zeros_like(p) for p in self._weights]
        found = torch.autograd.grad(
            total, self._weights, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return list(found)


def _close_gradients(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Tell whether two gradients agree; half precision and exploding ones are not judged."""
    if wanted.dtype not in (torch.float32, torch.float64) or not wanted.isfinite().all():
        return True
    scale = max(1e-3, float(wanted.abs().max()))
    return bool(((found - wanted).abs() <= 1e-2 * scale).all())


def _check_batch(model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None) -> None:
    """Raise if a step reads the samples of a batch one after the other: then the first axis is
    time.
    """
    size = next((x.shape[0] for x in inputs if isinstance(x, torch.Tensor) and x.dim()), 1)
    if size < 3:  # with two samples, "reads the first one" and "in order" look the same
        return
    base = tuple(random_like(x, 0) for x in inputs)
    runs = []
    for sample in (None, 0, 1, size - 1):
        changed = tuple(with_sample_changed(x, 0, size, sample) for x in base)
        try:
            runs.append(
                [
                    t
                    for _, t in flatten_state(_call_root(model, plan, given, changed, Recorder()))[
                        0
                    ]
                ]
            )
        except Exception:  # the call itself will be judged where the states are looked for
            return
    for plain, *others in zip(*runs, strict=False):
        if (
            plain.dim()
            and plain.shape[0] == size
            and all(plain.shape == other.shape for other in others)
        ):
            rows = [(plain != other).reshape(size, -1).any(1).tolist() for other in others]
            if rows == [[row >= sample for row in range(size)] for sample in (0, 1, size - 1)]:
                raise messages.reads_batch_in_order(type(model).__name__)


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


# ---- what `forward` consumes


def find_layout(
    model: nn.Module,
    inputs: tuple,
    sequence: bool | None,
    batch_first: bool | None,
    form: InputForm = PLAIN,
) -> str | None:
    """Tell whether a model consumes sequences, and in which layout, by giving it one and watching
    its recurrent layers.
    """
    adapter = find_adapter(model)
    own = adapter.sequence(model) if adapter is not None else None
    inner = [
        found
        for m in model.modules()
        if (a := find_adapter(m)) is not None and (found := a.sequence(m)) is not None
    ]
    if sequence is False:
        return None
    if own is not None:
        return own
    chosen = None if batch_first is None else "batch_first" if batch_first else "time_major"
    if sequence:
        return chosen or (inner[0] if inner else "time_major")
    if adapter is not None and adapter.arguments(model):
        return None
    candidates = [chosen] if chosen else list(dict.fromkeys([*inner, "time_major", "batch_first"]))
    if inner:
        return next(
            (layout for layout in candidates if _layers_see_time(model, inputs, layout, form)), None
        )
    return "time_major" if _loops_over_first_axis(model, inputs, form) else None


def _call_without_state(model: nn.Module, inputs: tuple, form: InputForm) -> Any:
    args, kwargs = fill_missing(model.forward, *form.fill(inputs))
    return model(*args, **kwargs)


def _layers_see_time(model: nn.Module, inputs: tuple, layout: str, form: InputForm) -> bool:
    """Tell whether a sequence in this layout reaches a recurrent layer as one of the same length."""
    length = _unused_length(inputs)
    recorder = Recorder()
    try:
        with restored(model, values=False), intercepted_calls(recorder):
            _call_without_state(model, repeat_in_time(inputs, layout, length), form)
    except BridgeError:
        raise
    except Exception:  # the model does not take this layout; what it raises is its own affair
        return False
    for call in recorder.calls:
        own = call.adapter.sequence(call.module)
        if own is not None and call.inputs and isinstance(call.inputs[0], torch.Tensor):
            x = call.inputs[0]
            if x.shape[1 if own == "batch_first" and x.dim() == 3 else 0] == length:
                return True
    return False


def _loops_over_first_axis(model: nn.Module, inputs: tuple, form: InputForm) -> bool:
    """Tell whether `forward` calls its cells once for each entry of the first axis: then that axis
    is time.
    """
    if not any((a := find_adapter(m)) is not None and a.arguments(m) for m in model.modules()):
        return False
    counts = []
    for size in (2, 3):
        recorder = Recorder()
        try:
            with restored(model, values=False), intercepted_calls(recorder):
                first = [
                    x[:1].expand(size, *x.shape[1:]).contiguous()
                    if isinstance(x, torch.Tensor) and x.dim()
                    else x
                    for x in inputs
                ]
                _call_without_state(model, tuple(first), form)
        except Exception:  # another call convention; the step itself will tell
            return False
        counts.append(recorder.total)
    return counts[0] != counts[1]


def repeat_in_time(inputs: tuple, layout: str | None, length: int) -> tuple:
    """Make sequences that repeat one time step."""
    axis = 1 if layout == "batch_first" else 0
    return tuple(
        torch.stack([x] * length, min(axis, x.dim())) if isinstance(x, torch.Tensor) else x
        for x in inputs
    )


def _unused_length(inputs: tuple, skip: int = 0) -> int:
    sizes = {size for x in inputs if isinstance(x, torch.Tensor) for size in x.shape}
    return [length for length in _LENGTHS if length not in sizes][skip]


def find_time_axes(
    model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None
) -> tuple[TimeAxis | None, ...]:
    """Find the time axis of each output tensor: the axis whose size follows the length of the
    sequence.

    An axis of several times that size has time and batch in it, in the order of the layout.
    """
    if plan.layout is None:
        return ()
    shapes = []
    for skip in (0, 1):
        length = _unused_length(inputs, skip)
        args = repeat_in_time(inputs, plan.layout, length)
        returned = _call_root(model, plan, given, args, Recorder())
        shapes.append(
            [tuple(t.shape) for _, t in flatten_state(plan.output_of(model, returned))[0]]
        )
    axes: list[TimeAxis | None] = []
    for short, long in zip(*shapes, strict=True):
        changed = [i for i, (a, b) in enumerate(zip(short, long, strict=True)) if a != b]
        if not changed:
            axes.append(None)
            continue
        together = max(1, long[changed[0]] // length)
        axes.append(
            TimeAxis(changed[0], together, 1)
            if plan.layout == "batch_first"
            else TimeAxis(changed[0], 1, together)
        )
    return tuple(axes)


# ---- state in arguments


def _find_argument_slots(
    model: nn.Module, inputs: tuple, plan: StepPlan, paths: dict[int, str], given: tuple | None
) -> None:
    """Make a slot for every call whose state the bridge has to carry: the root's, and those inside
    a sequence model.
    """
    recorder = Recorder(model, plan.root)
    _call_root(model, plan, given, add_time_axis(inputs, plan.layout), recorder)
    for call in recorder.calls:
        carried = call.module is model or plan.layout is not None
        if carried and call.adapter.arguments(call.module):
            with restored(model, values=False):
                plan.arguments.append(
                    _argument_slot(
                        call, paths[id(call.module)], _inner_starts(recorder.calls, call)
                    )
                )
    plan.arguments.sort(key=lambda slot: slot.module is not model)


def _inner_starts(calls: Sequence[Call], outer: Call) -> dict[int, torch.Tensor]:
    """Give the initial values of states that inner layers made for themselves, by `id` of the new
    states that came out.
    """
    found = {}
    for call in calls:
        if (
            call is outer
            or not call.adapter.arguments(call.module)
            or any(value is not None for value in call.given)
        ):
            continue
        values = call.adapter.initial(call.module, call.inputs)
        new = flatten_state(call.adapter.split(call.module, call.returned)[1])[0]
        old = [] if values is None else flatten_state(values)[0]
        if [t.shape for _, t in new] == [t.shape for _, t in old]:
            found.update({id(a): b for (_, a), (_, b) in zip(new, old, strict=True)})
    return found


def _argument_slot(call: Call, path: str, inner: dict[int, torch.Tensor]) -> ArgumentSlot:
    adapter = call.adapter
    names = adapter.arguments(call.module)
    values = (
        None
        if all(value is None for value in call.given)
        else adapter.adopt(call.module, call.given)
    )
    if values is None or not _keeps_shape(values, adapter.split(call.module, call.returned)[1]):
        # no state was passed, or a placeholder that the module itself replaces in its first step
        values = adapter.initial(call.module, call.inputs)
        if values is None:
            values = zero_state(call, path, inner)
    prefix = (
        *(path.split(".") if path else ()),
        *((f"call{call.index + 1}",) if call.index else ()),
    )
    skeletons, leaves = [], []
    for name, value in zip(names, values, strict=True):
        found, skeleton = flatten_state(value)
        skeletons.append(skeleton)
        for local, (_, tensor) in zip(state_names(name, [p for p, _ in found]), found, strict=True):
            local = adapter.state_path(call.module, local)
            leaves.append(
                StateLeaf(
                    (*prefix, *local),
                    tensor.detach().clone(),
                    adapter.is_hidden(call.module, local),
                )
            )
    return ArgumentSlot(call.module, call.index, adapter, tuple(skeletons), leaves)


def _keeps_shape(before: tuple, after: tuple) -> bool:
    return [t.shape for _, t in flatten_state(before)[0]] == [
        t.shape for _, t in flatten_state(after)[0]
    ]


def zero_state(call: Call, path: str, known: dict[int, torch.Tensor]) -> tuple:
    """Make a state of zeros like the one a module returned, and check that the module starts from
    it: output and new state agree.

    `known` has the initial values that are known, by `id` of the new states.
    """
    module, returned = call.module, call.returned
    names = call.adapter.arguments(module)
    leaves, skeleton = flatten_state(call.adapter.split(module, returned)[1])
    starts = [known.get(id(t)) for _, t in leaves]
    zeros = unflatten_state(
        skeleton,
        [
            torch.zeros_like(t) if s is None else s.clone()
            for (_, t), s in zip(leaves, starts, strict=True)
        ],
    )
    if not same_tensors(
        returned,
        call_with_state(module, names, call.inputs, call.keywords, zeros, module.forward),
    ):
        raise StateError(
            f"Module `{path or '(root)'}` ({type(module).__name__}) starts from a state that is "
            f"not zero when `{names[0]}` is None, and the bridge cannot see which. Pass "
            "`wrap(model, state=lambda batch_size: ...)`, or register an adapter with `initial`."
        )
    return zeros


def static_batch_first(model: nn.Module, batch_first: bool | None) -> bool | None:
    """Tell from the layers alone whether sequences are batch-first; None if no layer tells."""
    if batch_first is not None:
        return batch_first
    found = [a.sequence(m) for m in model.modules() if (a := find_adapter(m)) is not None]
    return next((layout == "batch_first" for layout in found if layout is not None), None)
