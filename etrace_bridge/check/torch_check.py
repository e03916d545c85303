"""A gradient check of a torch model: both sides in one precision, rule by rule."""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from etrace_bridge._errors import InputError, NotSupportedError
from etrace_bridge.check.check_loss import CheckLoss
from etrace_bridge.check.gradient_report import GradientReport
from etrace_bridge.check.precision import dtype_name, float_dtype, in_precision
from etrace_bridge.check.rule_check import REPEATS, check_rules, numpy_grads
from etrace_bridge.check.setup import (
    CheckSetup,
    as_tensor,
    chunk_size,
    default_tolerance,
    read_mask,
    step_weights,
)
from etrace_bridge.check.stepwise import check_steps, training_precision
from etrace_bridge.check.torch_reference import CheckData, Reference, map_tensors, torch_reference
from etrace_bridge.frontend import BridgedModule, map_input, to_jax, wrap
from etrace_bridge.learning.inputs import sequence_length
from etrace_bridge.learning.modes import evaluation_mode
from etrace_bridge.learning.weighting import reduction_of
from etrace_bridge.rules import BPTT, Rule

# Words in torch's messages about operands of different precisions
_PRECISION_ERROR = re.compile(r"dtype|scalar type|type \(|Double|Float")


class FixedPrecisionError(InputError):
    """The model has a precision written into it and cannot run in another."""


@dataclass(frozen=True)
class TorchCheck:
    """The arguments of `check_gradients` for a torch model, under the same names.

    `measured` asks for time and memory of each rule too.
    """

    model: nn.Module
    xs: Any
    targets: Any
    loss: CheckLoss
    rules: Sequence[Rule]
    measured: bool
    chunk: int | str
    reduction: str
    mask: Any
    tolerance: float | None
    allow_zero: frozenset[str]
    state: Any
    sequence: bool | None
    batch_first: bool | None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of `wrap` and `run_torch`."""
        return {"state": self.state, "sequence": self.sequence, "batch_first": self.batch_first}

    def run(self, precision: torch.dtype, notes: tuple[str, ...] = ()) -> list[GradientReport]:
        """Run both sides in one precision and return one report per rule."""
        with in_precision(self.model, precision), contextlib.ExitStack() as stack:
            setup, reference = self._reference(precision, notes, stack)
            size = chunk_size(self.chunk, setup.length)
            truncated = None
            if size < setup.length:
                truncated = numpy_grads(setup.gradients(setup.learner(BPTT(), size)))
            reports = check_rules(
                setup, self.rules, self.chunk, reference, truncated, self.measured
            )
        return self.with_single_steps(reports)

    def _reference(
        self, precision: torch.dtype, notes: tuple[str, ...], stack: contextlib.ExitStack
    ) -> tuple[CheckSetup, Reference]:
        """Return the setup and torch's gradients, with the shortest time of several runs."""
        try:
            setup = self._setup(precision, notes, stack)
            names = setup.net.parameter_names
            run = lambda: torch_reference(self.model, names, setup.data, self.loss, self.options)
            reference = run()
        except RuntimeError as error:
            if _PRECISION_ERROR.search(str(error)) is None:
                raise
            raise FixedPrecisionError(
                f"`{type(self.model).__name__}` cannot run in {dtype_name(precision)}: {error}. A "
                "tensor of another precision is made inside the model or its loss. Pass "
                "`dtype=None` to compare in the model's own precision."
            ) from error
        if self.measured:  # the first run pays for warming up
            again = [run() for _ in range(REPEATS - 1)]
            reference = replace(reference, seconds=min(r.seconds for r in (reference, *again)))
        return setup, reference

    def _setup(
        self, precision: torch.dtype, notes: tuple[str, ...], stack: contextlib.ExitStack
    ) -> CheckSetup:
        """Bridge the model and cast the data; `stack` holds a random model in evaluation mode."""
        inputs = self._inputs(precision)
        tensors = jax.tree.leaves(inputs)
        if any(x.dim() < 2 for x in tensors):
            raise InputError(
                "`xs` needs a time axis and a batch axis: (T, B, …), or (B, T, …) for a "
                "batch-first model."
            )
        net, random = self._bridge_fixed(inputs, stack)
        if random:
            notes = (*notes, "the model is random, so both sides were compared in evaluation mode")
        unknown = sorted(self.allow_zero - set(net.parameter_names))
        if unknown:
            raise InputError(
                "`allow_zero` names parameters that the model does not train: "
                f"{', '.join(unknown)}."
            )
        if self.loss.at == "model":
            reduction_of(net)
        targets = map_tensors(_tensors(self.targets), lambda t: as_tensor(t, precision))
        by_time = lambda t: t.transpose(0, 1) if net.batch_first and t.dim() > 1 else t
        of_steps = None if self.loss.per_sequence else map_tensors(targets, by_time)
        length = sequence_length([by_time(x) for x in tensors], of_steps, None, net.batch_first)
        batch = tensors[0].shape[0 if net.batch_first else 1]
        steps, factors = read_mask(self.mask, self.loss, length, batch, net.batch_first)
        weights = step_weights(steps, self.reduction, length)
        data = CheckData(inputs, targets, weights, net.batch_first, self.loss.per_sequence, factors)
        name = dtype_name(precision)
        tolerance = default_tolerance(name) if self.tolerance is None else self.tolerance
        return CheckSetup(
            net, data, self.loss, self.reduction, self.mask, name, tolerance, self.allow_zero, notes
        )

    def with_single_steps(self, reports: list[GradientReport]) -> list[GradientReport]:
        """Add to the reports what `learner.step` gives, as it would run in training."""
        if self.loss.over_time:  # which single steps cannot have
            return reports
        with training_precision(self.model), contextlib.ExitStack() as stack:
            precision = float_dtype(self.model)
            net, _ = self._bridge_fixed(self._inputs(precision), stack)
            cast = lambda t: (
                t.to(precision) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            )
            xs, targets = map_input(cast, self.xs), map_tensors(self._blank_targets(), cast)
            check = functools.partial(check_steps, per_sequence=self.loss.per_sequence)
            checks = [check(net, rule, self.loss.function, xs, targets) for rule in self.rules]
        return [
            replace(
                report,
                single_steps=steps,
                problems=report.problems if steps.ok else (*report.problems, steps.problem()),
            )
            for report, steps in zip(reports, checks, strict=True)
        ]

    def _blank_targets(self) -> Any:
        """Return the targets, with zeros where a mask of single sequences leaves them out."""
        kept = None if self.mask is None else as_tensor(self.mask, torch.float64) != 0
        if kept is None or kept.dim() < 2 or self.loss.per_sequence:
            return self.targets
        blank = lambda t: t.masked_fill(~kept.reshape(kept.shape + (1,) * (t.dim() - 2)), 0)
        return map_tensors(_tensors(self.targets), blank)

    def _inputs(self, precision: torch.dtype) -> Any:
        """Return the inputs as tensors of one precision."""
        return map_input(lambda x: as_tensor(x, precision), self.xs)

    def _bridge_fixed(self, inputs: Any, stack: contextlib.ExitStack) -> tuple[BridgedModule, bool]:
        """Bridge the model, in evaluation mode if it is random otherwise; say whether it is."""
        net, random = self._bridge(inputs)
        if random:
            stack.enter_context(evaluation_mode(net))
            net, still_random = self._bridge(inputs)
            if still_random:
                raise NotSupportedError(
                    "The model draws random numbers in evaluation mode too, so torch and JAX "
                    "cannot be compared on it. Draw them only where `self.training` is true."
                )
        return net, random

    def _bridge(self, inputs: Any) -> tuple[BridgedModule, bool]:
        """Bridge the model; say whether its step is random."""
        first = wrap(self.model, **self.options)
        first.read_inputs(inputs, sequence=True)
        axis = 1 if first.batch_first else 0
        example = map_input(lambda x: x.select(axis, 0), inputs)
        net = wrap(self.model, example_input=example, **self.options)
        tensors = net.read_inputs(example)
        with warnings.catch_warnings():  # the report has a verdict of its own for these
            warnings.filterwarnings("ignore", ".*used only to make the initial state")
            net.init_state(batch_size=tensors[0].shape[0])
        return net, net.traced_step(*[to_jax(x) for x in tensors]).uses_key


def _tensors(tree: Any) -> Any:
    """Convert NumPy and JAX arrays in a tree of targets to tensors.

    Whole numbers become torch's int64, as in the learner.
    """

    def tensor(x: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x
        made = torch.tensor(np.array(x, order="C"))  # torch itself refuses negative strides
        keeps_dtype = made.is_floating_point() or made.is_complex() or made.dtype == torch.bool
        return made if keeps_dtype else made.long()

    return jax.tree.map(
        tensor, tree, is_leaf=lambda x: isinstance(x, (torch.Tensor, np.ndarray, jax.Array))
    )
