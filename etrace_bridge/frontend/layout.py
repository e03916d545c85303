"""Whether `forward` consumes sequences, in which layout, and where the time axes of its outputs are:
found by giving it sequences and watching its layers.
"""

from __future__ import annotations

import torch
from torch import nn

from etrace_bridge._errors import BridgeError
from etrace_bridge.frontend.calls import intercepted_calls
from etrace_bridge.frontend.inputs import PLAIN, InputForm
from etrace_bridge.frontend.plan import StepPlan, TimeAxis
from etrace_bridge.frontend.recorder import Recorder, call_root, call_without_state
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state import find_adapter, flatten_state

_LENGTHS = (3, 5, 7, 11, 13)


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


def static_batch_first(model: nn.Module, batch_first: bool | None) -> bool | None:
    """Tell from the layers alone whether sequences are batch-first; None if no layer tells."""
    if batch_first is not None:
        return batch_first
    found = [a.sequence(m) for m in model.modules() if (a := find_adapter(m)) is not None]
    return next((layout == "batch_first" for layout in found if layout is not None), None)


def _layers_see_time(model: nn.Module, inputs: tuple, layout: str, form: InputForm) -> bool:
    """Tell whether a sequence in this layout reaches a recurrent layer as one of the same length."""
    length = unused_length(inputs)
    recorder = Recorder()
    try:
        with restored(model, values=False), intercepted_calls(recorder):
            call_without_state(model, repeat_in_time(inputs, layout, length), form)
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
                call_without_state(model, tuple(first), form)
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


def unused_length(inputs: tuple, skip: int = 0) -> int:
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
        length = unused_length(inputs, skip)
        args = repeat_in_time(inputs, plan.layout, length)
        returned = call_root(model, plan, given, args, Recorder())
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
