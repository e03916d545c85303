"""Run a torch model over a sequence as a torch user would: the reference for everything the bridge
computes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from etrace_bridge._errors import InputError
from etrace_bridge.frontend import discover, examples, layout
from etrace_bridge.frontend.calls import LOCK
from etrace_bridge.frontend.injector import native_call
from etrace_bridge.frontend.inputs import InputForm, read_input
from etrace_bridge.frontend.names import step_tensors
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import flatten_state, unflatten_state
from etrace_bridge.frontend.time_axis import TimeAxis


@dataclass
class TorchRun:
    """torch's results, with their autograd graph.

    Attributes:
        outputs: The output of each time step, in the structure that one bridged step gives.
        states: `{state name: tensor}` after each step; only the last one (or none) where torch ran
            the whole sequence at once.
        returned: What the model gave for the whole sequence; None where it ran step by step.
        seconds: Time of the run itself, without finding out how the model runs.
    """

    outputs: list[Any]
    states: list[dict[str, torch.Tensor]]
    returned: Any = None
    seconds: float = 0.0

    def stacked(self) -> Any:
        """Stack the outputs along a new first axis, time."""
        leaves = [flatten_state(output) for output in self.outputs]
        columns = zip(*[[t for _, t in found] for found, _ in leaves], strict=True)
        return unflatten_state(leaves[0][1], [torch.stack(column) for column in columns])


def run_torch(
    model: nn.Module,
    xs: Any,
    state: Any = None,
    *,
    sequence: bool | None = None,
    batch_first: bool | None = None,
    stepwise: bool = False,
    form: InputForm | None = None,
) -> TorchRun:
    """Run the torch model itself over a sequence, recording gradients, and leave it as it was.

    A model that consumes sequences gets the whole sequence in one call, with torch's own kernels.
    Any other model is called once per step, its state passed from call to call or kept in its
    attributes.

    Args:
        model: The torch model. Gradients of the outputs reach its own parameters.
        xs: The input sequence, a tuple of them, or a dict, as for `wrap`'s `example_input`: `(T, B,
            ...)`, or `(B, T, ...)` for a batch-first model.
        state: As for `wrap`: the initial state, or a callable `batch_size -> state`.
        sequence: As for `wrap`.
        batch_first: As for `wrap`.
        stepwise: Call a sequence model step by step too, with its layers' states carried by the
            bridge.
        form: How the tensors stand in a call, if `xs` are those in a row; read off `xs` if None.
    """
    sequences = tuple(xs) if form is not None else ()
    if form is None:
        sequences, form = read_input(model.forward, xs)
    if not all(isinstance(x, torch.Tensor) and x.dim() >= 1 for x in sequences):
        raise InputError("`run_torch` takes torch tensors with a time axis.")
    dtype = next(
        (p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype()
    )

    def find(first: bool) -> tuple[StepPlan, list[torch.Tensor]]:
        by_time = [x.transpose(0, 1) if first and x.dim() > 1 else x for x in sequences]
        batched = by_time[0].dim() > 1
        batch_size = by_time[0].shape[1] if batched else None
        plan = discover.find_plan(
            model,
            tuple(x[0].detach() for x in by_time),
            state=lambda size: examples.given_state(state, size, dtype),
            sequence=sequence,
            batch_first=batch_first,
            batch_size=batch_size,
            tensors=step_tensors(model),
            form=form,
        )
        return plan, by_time

    with LOCK, restored(model):
        known = layout.static_batch_first(model, batch_first)
        plan, by_time = find(bool(known))
        if known is None and plan.layout == "batch_first":
            plan, by_time = find(True)
        whole = plan.layout is not None and not stepwise
        if plan.begin is not None:
            plan.begin()
        # Copies, so that putting the model back does not write to tensors that autograd needs
        for slot in plan.attributes:
            slot.put([leaf.initial.clone() for leaf in slot.leaves])
        begin = time.perf_counter()
        run = _run_whole(model, plan, sequences) if whole else _run_steps(model, plan, by_time)
        run.seconds = time.perf_counter() - begin
        return run


def _run_steps(model: nn.Module, plan: StepPlan, by_time: list[torch.Tensor]) -> TorchRun:
    states = [leaf.initial.clone() for leaf in plan.leaves]
    outputs, trajectory = [], []
    names = [".".join(leaf.path) for leaf in plan.leaves]
    for step in zip(*by_time, strict=True):
        output, states = plan.run(model, step, states, native_call(model))
        outputs.append(
            unflatten_state(
                flatten_state(output)[1], [t.clone() for _, t in flatten_state(output)[0]]
            )
        )
        trajectory.append(dict(zip(names, [s.clone() for s in states], strict=True)))
    return TorchRun(outputs, trajectory)


def _run_whole(model: nn.Module, plan: StepPlan, sequences: tuple) -> TorchRun:
    axis = 1 if plan.layout == "batch_first" else 0
    length = sequences[0].shape[axis]

    def call(steps: int) -> tuple[list[torch.Tensor], Any]:
        returned = plan.call_root(model, tuple(x.narrow(axis, 0, steps) for x in sequences))
        leaves, skeleton = flatten_state(plan.output_of(model, returned))
        return [t for _, t in leaves], skeleton

    if plan.loop is not None and {"sum", "mean"} & set(plan.loop.reductions):
        prefixes = [call(steps) for steps in range(1, length + 1)]
        addends = _addends(plan.loop.reductions, prefixes, plan.output_time_axes)
        return TorchRun(addends, [], unflatten_state(prefixes[-1][1], prefixes[-1][0]))
    axes = [axis for axis in plan.output_time_axes if axis is not None]
    # the model gives its last step only: run every prefix
    if len(axes) < len(plan.output_time_axes):
        outputs = []
        for steps in range(1, length + 1):
            tensors, skeleton = call(steps)
            last = [
                t if a is None else a.select(t, -1)
                for t, a in zip(tensors, plan.output_time_axes, strict=True)
            ]
            outputs.append(unflatten_state(skeleton, last))
        return TorchRun(outputs, [], unflatten_state(skeleton, tensors))
    tensors, skeleton = call(length)
    outputs = [
        unflatten_state(skeleton, [a.select(t, step) for t, a in zip(tensors, axes, strict=True)])
        for step in range(length)
    ]
    return TorchRun(outputs, [], unflatten_state(skeleton, tensors))


def _addends(
    reductions: tuple[str | None, ...],
    prefixes: list[tuple[list[torch.Tensor], Any]],
    axes: tuple[TimeAxis | None, ...],
) -> list[Any]:
    """Return what sums and means over time add at each step, from the results of all prefixes of a
    sequence.
    """
    outputs = []
    for step, (tensors, skeleton) in enumerate(prefixes, 1):
        now = []
        for i, (tensor, kind, axis) in enumerate(zip(tensors, reductions, axes, strict=True)):
            if axis is not None:
                now.append(axis.select(tensor, -1))
            elif kind in ("sum", "mean") and step > 1:
                before = prefixes[step - 2][0][i]
                now.append(
                    tensor - before if kind == "sum" else step * tensor - (step - 1) * before
                )
            else:
                now.append(tensor)
        outputs.append(unflatten_state(skeleton, now))
    return outputs
