"""Check a step: torch's result for a whole sequence must equal that of its steps, and samples must
not mix.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import torch
from torch import nn

from etrace_bridge.frontend import messages
from etrace_bridge.frontend.examples import (
    random_like,
    scaled,
    with_sample_changed,
)
from etrace_bridge.frontend.injector import native_call
from etrace_bridge.frontend.later_steps import CountedCalls, first_uneven_length
from etrace_bridge.frontend.layout import repeat_in_time, unused_length
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.recorder import Recorder, call_root
from etrace_bridge.frontend.returned import same_tensors
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import flatten_state
from etrace_bridge.frontend.time.draws import SeenDraws


def check_chaining(model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None) -> None:
    """Run a random sequence at once and step by step, which shows a state that the bridge does not
    carry, or an output that looks ahead.

    Raises:
        NotChained: They differ, or nothing tells whether an output of the last step is not a sum or
            a maximum over time.
    """
    # Dropout differs from run to run; batch statistics are part of what the model computes
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._NormBase):
            module.training = False
    error = messages.not_chained(
        type(model).__name__, [".".join(leaf.path) for leaf in plan.leaves]
    )
    longer = _uneven_length(model, inputs, plan, given)
    if longer is not None and not _WholeAndSteps(model, inputs, plan, given, 1.0, longer).agree():
        raise error
    proven = False
    for scale in (1.0, 5.0, 30.0):  # a spiking model that is silent agrees with everything
        pair = _WholeAndSteps(model, inputs, plan, given, scale, unused_length(inputs))
        if not pair.agree():
            break
        proven = proven or pair.last_steps_tell
        if not pair.silent:
            return
    else:
        if proven:
            return
    raise error


def _uneven_length(
    model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None
) -> int | None:
    """Return a length of sequences for which `forward` seems to do more than for shorter ones."""

    def count(length: int) -> Counter[Any]:
        sequences = repeat_in_time(inputs, plan.layout, length)
        with torch.no_grad(), CountedCalls() as calls:
            call_root(model, plan, given, sequences, Recorder())
        return calls.counts

    return first_uneven_length(count, unused_length(inputs))


class _WholeAndSteps:
    """torch's results for a random sequence at once, and for its steps one after the other.

    Attributes:
        whole: Output tensors of the sequence.
        last_steps_tell: Each output without a time axis has a value or a derivative that is not
            zero, so that it could have differed from that of the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple,
        plan: StepPlan,
        given: tuple | None,
        scale: float,
        length: int,
    ) -> None:
        self.model, self.plan = model, plan
        axis = 1 if plan.layout == "batch_first" else 0
        self.steps = [
            scaled(tuple(random_like(x, t) for x in inputs), scale) for t in range(length)
        ]
        sequence = [
            torch.stack(x, min(axis, x[0].dim())) if isinstance(x[0], torch.Tensor) else x[0]
            for x in zip(*self.steps, strict=True)
        ]
        returned = call_root(model, plan, given, tuple(sequence), Recorder())
        self.whole = [tensor for _, tensor in flatten_state(plan.output_of(model, returned))[0]]
        self._weights = [p for p in model.parameters() if p.requires_grad]
        self.last_steps_tell = True

    @property
    def silent(self) -> bool:
        """Whether an output is all zeros."""
        return any(not bool(tensor.any()) for tensor in self.whole)

    def agree(self) -> bool:
        """Return whether values and derivatives are the same.

        Values alone do not distinguish a last step from a sum where the steps before it are silent;
        nor do they show whether `forward` detaches its state.
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
        """Return the outputs of each step."""
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
        """Yield an output at each step together with the expected one; without a time axis, only
        the last.
        """
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
        """Return whether the gradients of each output with respect to the weights agree."""
        for index, (y, axis) in enumerate(zip(self.whole, self.plan.output_time_axes, strict=True)):
            if y.is_complex() or not self._weights:
                continue
            found, wanted = zip(*self._pairs(outputs, index), strict=True)
            try:
                gradients = [self._gradients(found), self._gradients(wanted)]
            except RuntimeError:  # the model writes to what autograd needs
                continue
            # a weight that no step reads makes the initial state, of which a warning tells
            both = [
                (a, torch.zeros_like(a) if b is None else b)
                for a, b in zip(*gradients, strict=True)
                if a is not None
            ]
            if not all(_close_gradients(a, b) for a, b in both):
                return False
            if axis is None and not y.any() and not any(b.any() for _, b in both):
                self.last_steps_tell = False
        return True

    def _gradients(self, values: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
        """Return the gradients of a sum of values with positive factors, None where it does not
        depend on a weight.
        """
        generator = torch.Generator().manual_seed(0)
        factors = [torch.rand(y.shape, generator=generator).to(y.dtype) + 0.5 for y in values]
        total = sum((f * y).sum() for f, y in zip(factors, values, strict=True))
        if not isinstance(total, torch.Tensor) or not total.requires_grad:
            return [None] * len(self._weights)
        return list(torch.autograd.grad(total, self._weights, retain_graph=True, allow_unused=True))


def _close_gradients(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether two gradients agree; half precision and exploding ones are not judged."""
    if wanted.dtype not in (torch.float32, torch.float64) or not wanted.isfinite().all():
        return True
    scale = max(1e-3, float(wanted.abs().max()))
    return bool(((found - wanted).abs() <= 1e-2 * scale).all())


# ---- random numbers


def check_draws(model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None) -> None:
    """Raise if a model that runs its layers over a whole sequence draws some random numbers once
    for all steps, such as a dropout mask that they share: a step would draw them anew.
    """
    if not any(module.training for module in model.modules()):
        return  # numbers that are drawn in evaluation mode too differ from step to step
    drawn = []
    for skip in (0, 1):
        sequences = repeat_in_time(inputs, plan.layout, unused_length(inputs, skip))
        with SeenDraws() as seen:
            call_root(model, plan, given, sequences, Recorder())
        drawn.append(seen.shapes)
    short, long = drawn
    if len(short) == len(long) and any(a == b for a, b in zip(short, long, strict=True)):
        raise messages.drawn_once(type(model).__name__)


# ---- states and samples


def reads_state(model: nn.Module, inputs: tuple, plan: StepPlan) -> bool:
    """Return whether a step depends on any of its states: `forward` may set them anew in every
    call.
    """
    start = [leaf.initial for leaf in plan.leaves]
    moved = [(t == 0) if t.dtype == torch.bool else t + torch.ones_like(t) for t in start]
    return bool(start) and any(
        _tells_apart(model, given, plan, start, moved)
        for given in (inputs, tuple(random_like(x, 0) for x in inputs))  # zeros may close a gate
    )


def _tells_apart(
    model: nn.Module, inputs: tuple, plan: StepPlan, *states: list[torch.Tensor]
) -> bool:
    """Return whether a step gives different results for different states."""
    runs = []
    for some in states:
        try:
            with restored(model, values=False), torch.no_grad():
                given = [state.clone() for state in some]
                runs.append(plan.run(model, inputs, given, native_call(model)))
        except Exception:  # the model checks its states
            return True
    return not same_tensors(*runs)


def check_batch(model: nn.Module, inputs: tuple, plan: StepPlan, given: tuple | None) -> None:
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
                [t for _, t in flatten_state(call_root(model, plan, given, changed, Recorder()))[0]]
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
