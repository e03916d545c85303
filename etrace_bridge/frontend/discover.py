"""Finding out how a torch model runs one step, by running it: what it consumes, where its state is, how the state starts."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import BridgeError, StateError
from etrace_bridge.frontend import messages
from etrace_bridge.frontend.attributes import find_attribute_slots
from etrace_bridge.frontend.calls import LOCK, intercepted_calls, plain_call
from etrace_bridge.frontend.plan import ArgumentSlot, StateLeaf, StepPlan, add_time_axis, native_call
from etrace_bridge.frontend.root import find_root_adapter, same_tensors
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state import (
    Adapter,
    bind_state_arguments,
    call_with_state,
    find_adapter,
    flatten_state,
    state_names,
    unflatten_state,
)

_LENGTHS = (3, 5, 7, 11, 13)


@dataclass
class Call:
    """One recorded call of a module that has an adapter."""

    module: nn.Module
    adapter: Adapter
    index: int
    inputs: tuple
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
        rest, _, given = bind_state_arguments(module.forward, adapter.arguments(module), args, kwargs)
        index = self._counts.get(id(module), 0)
        self._counts[id(module)] = index + 1
        call = Call(module, adapter, index, _copied(rest), _copied(given), None)  # the call may write to its arguments
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
    state: Any = None,
    sequence: bool | None = None,
    batch_first: bool | None = None,
    batched: bool = True,
) -> StepPlan:
    """Find how one step of a model runs.

    Args:
        model: The torch model; it is left as it was.
        inputs: One time step of each input, as torch tensors.
        state: The initial state of the root module's state arguments, for one that does not accept None.
        sequence: Whether `forward` consumes sequences; None to find out.
        batch_first: Where the batch axis of a sequence is; None to find out.
        batched: Inputs have a batch axis.

    Returns:
        The plan, with initial values for `inputs`' batch size.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    check_modules(model)
    with LOCK, restored(model), torch.enable_grad():
        layout = find_layout(model, inputs, sequence, batch_first)
        plan = StepPlan(layout=layout if batched or layout is None else "time_major")
        with restored(model, values=False):
            plan.root, given = find_root_adapter(model, add_time_axis(inputs, plan.layout), state)
        plan.output_time_axes = find_time_axes(model, inputs, plan, given)
        _find_argument_slots(model, inputs, plan, paths, given)
        plan.attributes, plan.python = _find_attribute_slots(model, inputs, plan, paths)
        if plan.layout is not None:
            _check_chaining(model, inputs, plan, given)
    return plan


def _call_root(model: nn.Module, plan: StepPlan, given: tuple | None, args: tuple, recorder: Recorder) -> Any:
    """Call the model on plain tensors with its initial state, if it takes one and the state is known."""
    root = plan.root
    names = () if root is None else root.arguments(model)
    states = given
    if root is not None and names and given is None:
        with restored(model, values=False):
            states = root.initial(model, args)
    with restored(model, values=False), intercepted_calls(recorder):
        if root is None or not names or states is None:
            return model(*args)
        return call_with_state(model, names, args, {}, root.pack(model, _copied(states)), model.forward)


def _find_attribute_slots(model: nn.Module, inputs: tuple, plan: StepPlan, paths: dict[int, str]) -> tuple[list, list]:
    """Find state in attributes, with argument states at their initial values."""
    start = [leaf.initial for leaf in plan.leaves]
    with contextlib.ExitStack() as stack:

        def reset() -> None:
            stack.close()
            stack.enter_context(restored(model, values=False))

        reset()
        return find_attribute_slots(model, lambda: plan.run(model, inputs, start, native_call(model))[0], reset, paths)


def _check_chaining(model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None) -> None:
    """Run a short sequence at once and step by step: a state that the bridge does not carry would show."""
    model.eval()  # dropout differs from run to run, and batch statistics from length to length
    length = _unused_length(inputs)
    returned = _call_root(model, plan, given, repeat_in_time(inputs, plan.layout, length), Recorder())
    whole = flatten_state(plan.output_of(model, returned))[0]
    with restored(model, values=False):
        states = [leaf.initial.clone() for leaf in plan.leaves]
        for step in range(length):
            output, states = plan.run(model, inputs, states, native_call(model))
            for (_, found), (_, wanted), axis in zip(flatten_state(output)[0], whole, plan.output_time_axes, strict=True):
                if axis is None and step < length - 1:
                    continue
                wanted = wanted if axis is None else wanted.select(axis, step)
                if not torch.allclose(found, wanted, rtol=1e-3, atol=1e-5, equal_nan=True):
                    raise messages.not_chained(type(model).__name__, [".".join(leaf.path) for leaf in plan.leaves])


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


def find_layout(model: nn.Module, inputs: tuple, sequence: bool | None, batch_first: bool | None) -> str | None:
    """Tell whether a model consumes sequences, and in which layout, by giving it one and watching its recurrent layers."""
    adapter = find_adapter(model)
    own = adapter.sequence(model) if adapter is not None else None
    inner = [found for m in model.modules() if (a := find_adapter(m)) is not None and (found := a.sequence(m)) is not None]
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
        return next((layout for layout in candidates if _layers_see_time(model, inputs, layout)), None)
    return "time_major" if _loops_over_first_axis(model, inputs) else None


def _layers_see_time(model: nn.Module, inputs: tuple, layout: str) -> bool:
    """Tell whether a sequence in this layout reaches a recurrent layer as one of the same length."""
    length = _unused_length(inputs)
    recorder = Recorder()
    try:
        with restored(model, values=False), intercepted_calls(recorder):
            model(*repeat_in_time(inputs, layout, length))
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


def _loops_over_first_axis(model: nn.Module, inputs: tuple) -> bool:
    """Tell whether `forward` calls its cells once for each entry of the first axis: then that axis is time."""
    if not any((a := find_adapter(m)) is not None and a.arguments(m) for m in model.modules()):
        return False
    counts = []
    for size in (2, 3):
        recorder = Recorder()
        try:
            with restored(model, values=False), intercepted_calls(recorder):
                model(*[x[:1].expand(size, *x.shape[1:]).contiguous() if isinstance(x, torch.Tensor) and x.dim() else x for x in inputs])
        except Exception:  # another call convention; the step itself will tell
            return False
        counts.append(recorder.total)
    return counts[0] != counts[1]


def repeat_in_time(inputs: tuple, layout: str | None, length: int) -> tuple:
    """Make sequences that repeat one time step."""
    axis = 1 if layout == "batch_first" else 0
    return tuple(torch.stack([x] * length, min(axis, x.dim())) if isinstance(x, torch.Tensor) else x for x in inputs)


def _unused_length(inputs: tuple, skip: int = 0) -> int:
    sizes = {size for x in inputs if isinstance(x, torch.Tensor) for size in x.shape}
    return [length for length in _LENGTHS if length not in sizes][skip]


def find_time_axes(model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None) -> tuple[int | None, ...]:
    """Find the time axis of each output tensor: the axis whose size follows the length of the sequence."""
    if plan.layout is None:
        return ()
    shapes = []
    for skip in (0, 1):
        args = repeat_in_time(inputs, plan.layout, _unused_length(inputs, skip))
        returned = _call_root(model, plan, given, args, Recorder())
        shapes.append([tuple(t.shape) for _, t in flatten_state(plan.output_of(model, returned))[0]])
    axes = []
    for short, long in zip(*shapes, strict=True):
        changed = [i for i, (a, b) in enumerate(zip(short, long, strict=True)) if a != b]
        axes.append(changed[0] if changed else None)
    return tuple(axes)


# ---- state in arguments


def _find_argument_slots(model: nn.Module, inputs: tuple, plan: StepPlan, paths: dict[int, str], given: tuple | None) -> None:
    """Make a slot for every call whose state the bridge has to carry: the root's, and those inside a sequence model."""
    recorder = Recorder(model, plan.root)
    _call_root(model, plan, given, add_time_axis(inputs, plan.layout), recorder)
    for call in recorder.calls:
        carried = call.module is model or plan.layout is not None
        if carried and call.adapter.arguments(call.module):
            with restored(model, values=False):
                plan.arguments.append(_argument_slot(call, paths[id(call.module)]))
    plan.arguments.sort(key=lambda slot: slot.module is not model)


def _argument_slot(call: Call, path: str) -> ArgumentSlot:
    adapter = call.adapter
    names = adapter.arguments(call.module)
    values = None if all(value is None for value in call.given) else adapter.adopt(call.module, call.given)
    if values is None or not _keeps_shape(values, adapter.split(call.module, call.returned)[1]):
        # no state was passed, or a placeholder that the module itself replaces in its first step
        values = adapter.initial(call.module, call.inputs)
        if values is None:
            values = zero_state(call.module, adapter, call.inputs, call.returned, path)
    prefix = (*(path.split(".") if path else ()), *((f"call{call.index + 1}",) if call.index else ()))
    skeletons, leaves = [], []
    for name, value in zip(names, values, strict=True):
        found, skeleton = flatten_state(value)
        skeletons.append(skeleton)
        for local, (_, tensor) in zip(state_names(name, [p for p, _ in found]), found, strict=True):
            local = adapter.state_path(call.module, local)
            leaves.append(StateLeaf((*prefix, *local), tensor.detach().clone(), adapter.is_hidden(call.module, local)))
    return ArgumentSlot(call.module, call.index, adapter, tuple(skeletons), leaves)


def _keeps_shape(before: tuple, after: tuple) -> bool:
    return [t.shape for _, t in flatten_state(before)[0]] == [t.shape for _, t in flatten_state(after)[0]]


def zero_state(module: nn.Module, adapter: Adapter, inputs: tuple, returned: Any, path: str) -> tuple:
    """Make a state of zeros like the one a module returned, and check that the module starts from zeros itself."""
    names = adapter.arguments(module)
    output, states = adapter.split(module, returned)
    leaves, skeleton = flatten_state(states)
    zeros = unflatten_state(skeleton, [torch.zeros_like(t) for _, t in leaves])
    again, _ = adapter.split(module, call_with_state(module, names, inputs, {}, zeros, module.forward))
    if not same_tensors(output, again):
        raise StateError(
            f"Module `{path or '(root)'}` ({type(module).__name__}) starts from a state that is not zero when "
            f"`{names[0]}` is None, and the bridge cannot see which. Pass `wrap(model, state=lambda batch_size: ...)`, "
            f"or register an adapter with `initial`."
        )
    return zeros


# ---- inputs


def guess_inputs(model: nn.Module, batch_size: int | None) -> tuple[torch.Tensor, ...] | None:
    """Make an input from the size of the first layer that states one; None if no layer does."""
    batch = () if batch_size is None else (batch_size,)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            return None
        if isinstance(module, nn.Embedding):
            return (torch.zeros(batch, dtype=torch.int64),)
        size = next((s for name in ("in_features", "input_size") if isinstance(s := getattr(module, name, None), int)), None)
        if size is not None:
            return (example_tensor((*batch, size), dtype),)
    return None


def example_tensor(shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
    """Make an example of an input: ordinary numbers that do not repeat, or zeros for integers."""
    kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, str(dtype))
    if not (kind.is_floating_point or kind.is_complex):
        return torch.zeros(shape, dtype=kind)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(kind)


def with_batch(x: torch.Tensor, batch_size: int | None) -> torch.Tensor:
    """Repeat or cut an example to a batch size."""
    if batch_size is None or x.dim() == 0 or x.shape[0] == batch_size:
        return x
    return x[torch.arange(batch_size) % x.shape[0]]


def given_state(state: Any, batch_size: int | None, dtype: torch.dtype, detach: bool = True) -> Any:
    """Give the user's initial state for a batch size, floating tensors in the model's dtype, constant or as it was made."""
    made = state(batch_size) if callable(state) and not isinstance(state, (torch.Tensor, nn.Module)) else state
    leaves, skeleton = flatten_state(made)
    tensors = [t.detach() if detach else t for _, t in leaves]
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    if state is made and batch_size is not None:
        tensors = [with_batch(t, batch_size) for t in tensors]
    return unflatten_state(skeleton, tensors)


def static_batch_first(model: nn.Module, batch_first: bool | None) -> bool:
    """Tell from the layers alone whether sequences are batch-first."""
    if batch_first is not None:
        return batch_first
    found = [a.sequence(m) for m in model.modules() if (a := find_adapter(m)) is not None]
    return next((layout == "batch_first" for layout in found if layout is not None), False)
