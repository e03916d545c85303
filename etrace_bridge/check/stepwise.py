"""Compare `learner.step` with `learner.gradients` on the user's arrays.

Both run in the precision and JAX mode that training will use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch import nn

from etrace_bridge.check.precision import float_dtype, in_precision
from etrace_bridge.frontend import BridgedModule
from etrace_bridge.learning.inputs import as_targets
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.rules import Rule

# The second step is the first that skips the checks; the others show states and traces that advance
MOST_STEPS = 4
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 1e-1, torch.float16: 1e-2}


@dataclass(frozen=True)
class StepCheck:
    """How far single steps are from the same steps as a sequence.

    Attributes:
        steps: steps that were run.
        dtype: the precision they ran in.
        error: the largest difference of a loss, an output or a summed gradient, relative to the
            largest element.
        where: what differs most, and at which step.
        tolerance: the error that counts as equal.
    """

    steps: int
    dtype: str
    error: float
    where: str
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether single steps give what the sequence gives."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        verdict = (
            "the same losses, outputs and gradients as `gradients`"
            if self.ok
            else "NOT what `gradients` gives"
        )
        return f"`learner.step`, {self.steps} steps one by one in {self.dtype}: {verdict}"

    def problem(self) -> str:
        """Describe what is wrong, for a check that is not ok."""
        return (
            "`learner.step` does not give what `learner.gradients` gives on the same steps: "
            f"{self.where} is off by {self.error:.2g} of its size (up to {self.tolerance:g} "
            "allowed). Please report it; `learner.update` runs sequences the other way."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings; an infinite error is None."""
        error = self.error if np.isfinite(self.error) else None
        return {**asdict(self), "error": error, "ok": self.ok}


class _Sum(NamedTuple):
    total: Any


def _sum_gradients() -> optax.GradientTransformation:
    """Make an optimizer that adds up gradients and does not change the weights."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        total = jax.tree.map(jnp.add, state.total, updates)
        return jax.tree.map(jnp.zeros_like, updates), _Sum(total)

    return optax.GradientTransformation(
        lambda params: _Sum(jax.tree.map(jnp.zeros_like, params)), update
    )


@contextlib.contextmanager
def training_precision(model: nn.Module):
    """Return the mode in which the user would train: the current one, or float64 for a model that
    needs it.
    """
    dtype = float_dtype(model)
    with in_precision(model, dtype) if dtype == torch.float64 else contextlib.nullcontext():
        yield


def check_steps(
    net: BridgedModule,
    rule: Rule,
    loss: Callable,
    xs: Any,
    targets: Any,
    per_sequence: bool = False,
) -> StepCheck:
    """Run the first steps of a sequence one by one, and as one sequence.

    Args:
        net: the bridged model.
        rule: the learning rule.
        loss: the loss of one step.
        xs: inputs as the user gave them.
        targets: targets as the user gave them.
        per_sequence: there is one target for each sequence; here it is that of every step.
    """
    at_every = "every" if per_sequence else None
    learner = OnlineLearner(
        net, rule, loss, _sum_gradients(), chunk=1, reduction="sum", guard=False, loss_at=at_every
    )
    inputs, targets = net.read_inputs(xs), as_targets(targets)
    count = min(MOST_STEPS, np.shape(inputs[0])[1 if net.batch_first else 0])
    at = lambda tree, step: _map_arrays(tree, lambda a: _along_time(a, net.batch_first, step))
    wanted = (lambda t: targets) if per_sequence else (lambda t: at(targets, t))
    taken = [learner.step(at(inputs, t), wanted(t)) for t in range(count)]
    summed = _named_sum(learner)
    whole = learner.gradients(at(inputs, slice(0, count)), wanted(slice(0, count)))
    outputs = jax.tree.leaves(whole.raw_outputs)
    pairs = [
        (f"the loss of step {t + 1}", info.raw_loss, whole.raw_losses[t])
        for t, info in enumerate(taken)
    ]
    for t, info in enumerate(taken):
        pairs += [
            (f"the output of step {t + 1}", o, w[t])
            for o, w in zip(jax.tree.leaves(info.raw_output), outputs, strict=True)
        ]
    pairs += [
        (f"the gradient of `{name}`", summed[name], g)
        for name, g in whole.raw_grads.items()
        if name in summed
    ]
    error, where = max(
        ((_distance(found, wanted), what) for what, found, wanted in pairs),
        key=lambda pair: pair[0],
    )
    dtype = float_dtype(net.model)
    return StepCheck(
        count, str(dtype).removeprefix("torch."), error, where, _TOLERANCE.get(dtype, 1e-5)
    )


def _named_sum(learner: OnlineLearner) -> dict[str, Any]:
    state = learner.runtime.store.state.opt
    sums = [
        x
        for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, _Sum))
        if isinstance(x, _Sum)
    ]
    return dict(sums[0].total)


def _distance(found: Any, wanted: Any) -> float:
    found, wanted = np.asarray(found), np.asarray(wanted)
    worst = float(np.abs(found.astype(wanted.dtype) - wanted).max(initial=0.0))
    error = worst / max(float(np.abs(wanted).max(initial=0.0)), 1e-3)
    return error if np.isfinite(error) else np.inf


def _map_arrays(tree: Any, take: Callable) -> Any:
    if isinstance(tree, Mapping):
        return {key: _map_arrays(value, take) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map_arrays(value, take) for value in tree))
    return (
        type(tree)(_map_arrays(value, take) for value in tree)
        if isinstance(tree, (tuple, list))
        else take(tree)
    )


def _along_time(array: Any, batch_first: bool, step: int | slice) -> Any:
    return array[:, step] if batch_first and array.ndim > 1 else array[step]
