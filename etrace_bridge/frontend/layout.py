"""In which layout a model takes sequences, and where the time axes of its outputs are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from etrace_bridge.frontend.adapter import find_adapter
from etrace_bridge.frontend.examples import (
    random_like,
    share_changed,
    with_batch,
    with_sample_changed,
)
from etrace_bridge.frontend.inputs import PLAIN, InputForm
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.recorder import Recorder, call_root, call_without_state
from etrace_bridge.frontend.returned import copied_state
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import flatten_state
from etrace_bridge.frontend.time_axis import TimeAxis

_LENGTHS = (3, 5, 7, 11, 13)


def find_layout(
    model: nn.Module,
    inputs: tuple,
    sequence: bool | None,
    batch_first: bool | None,
    form: InputForm = PLAIN,
    batched: bool = True,
    start: Callable[[int | None], Any] = lambda batch: None,
) -> str | None:
    """Return whether layers inside a model read whole sequences, and the layout in which the model
    takes them; None for one time step, and for a model without such layers.

    The batch axis is the one along which samples stay apart: of the layouts that the model runs
    in, it is the first in which a change of one sample changes no other sample's output. Where
    samples mix in all of them, it is that of a layer inside; whether the model looks ahead then is
    checked later. `start` makes what required state arguments start from.
    """
    adapter = find_adapter(model)
    own = adapter.sequence(model) if adapter is not None else None
    if sequence is False:
        return None
    if own is not None:
        return own
    inner = layouts_of_layers(model)
    chosen = None if batch_first is None else "batch_first" if batch_first else "time_major"
    if sequence:
        return chosen or next(iter(inner), "time_major")
    if not inner or (adapter is not None and adapter.arguments(model)):
        return None
    layouts = [chosen] if chosen else list(dict.fromkeys([*inner, "time_major", "batch_first"]))

    def runs_in(layout: str, apart: bool) -> bool:
        def call(x: tuple) -> Any:
            size = x[0].shape[int(layout == "time_major")] if batched else None
            return call_without_state(model, x, form, start(size))

        return keeps_samples_apart(model, inputs, layout, call, apart and batched)

    tries = [(layout, True) for layout in layouts]
    tries += [(layout, False) for layout in layouts if layout in (chosen, *inner)]
    return next((layout for layout, apart in tries if runs_in(layout, apart)), None)


def layouts_of_layers(model: nn.Module) -> list[str]:
    """The layouts of a model's layers that read whole sequences."""
    found = [a.sequence(m) for m in model.modules() if (a := find_adapter(m)) is not None]
    return [layout for layout in found if layout is not None]


def keeps_samples_apart(
    model: nn.Module,
    inputs: tuple,
    layout: str | None,
    call: Callable[[tuple], Any],
    batched: bool = True,
) -> bool:
    """Return whether a model runs in a layout, and a change of the first or the last sample then
    changes no other sample's output.

    Args:
        model: The model, which is left as it was.
        inputs: One time step of each input.
        layout: The layout of what the model is called with.
        call: Calls the model on such inputs.
        batched: Whether the inputs have a batch axis; if not, the model only has to run.
    """
    axis = int(layout == "time_major")
    size = usable_batch(inputs) if batched else 0
    steps = tuple(with_batch(x, size) for x in inputs) if batched else inputs
    whole = steps if layout is None else repeat_in_time(steps, layout, unused_length(steps))
    base = tuple(random_like(x, 0) for x in whole)
    runs = []
    for sample in (None, 0, size - 1) if batched else (None,):
        changed = tuple(with_sample_changed(x, axis, size, sample) for x in base)
        try:
            with restored(model, values=False), torch.no_grad():
                model.eval()  # dropout differs from run to run
                runs.append([t for _, t in flatten_state(copied_state(call(changed)))[0]])
        except Exception:  # the model does not take this layout
            return False
    return all(share_changed(runs[0], run) <= 1 / size + 1e-9 for run in runs[1:])


def usable_batch(inputs: tuple) -> int:
    """The batch size, or another one where it is one or that of another axis."""
    tensors = [x for x in inputs if isinstance(x, torch.Tensor) and x.dim()]
    others = {1, *(size for x in tensors for size in x.shape[1:])}
    own = [x.shape[0] for x in tensors[:1]]
    candidates = itertools.chain(own, itertools.count(3))
    return next(size for size in candidates if size not in others)


def static_batch_first(model: nn.Module, batch_first: bool | None) -> bool | None:
    """Tell from the layers alone whether sequences are batch-first; None if no layer tells."""
    if batch_first is not None:
        return batch_first
    return next((layout == "batch_first" for layout in layouts_of_layers(model)), None)


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
