"""Metrics: functions `(output, target) -> number` over the steps that count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.frontend import to_torch
from etrace_bridge.learning.batches import split_batch
from etrace_bridge.learning.filling import full_batch_size
from etrace_bridge.learning.inputs import as_targets
from etrace_bridge.learning.masks import last_of
from etrace_bridge.learning.processes import own_part
from etrace_bridge.learning.results import SequenceResult

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner
    from etrace_bridge.learning.runtime import Runtime

Metric = Callable[[Any, Any], Any]
Metrics = Mapping[str, Metric] | Sequence[str | Metric] | str | Metric | None


def accuracy(output: torch.Tensor, target: torch.Tensor) -> float:
    """Return the share of correct outputs.

    An output `(N, classes, …)` is correct where its largest class is the target's; an output of the
    targets' shape, where its sign is right.
    """
    if not isinstance(output, torch.Tensor):
        raise InputError(
            f"`accuracy` needs a model with one output; this one gives a {type(output).__name__}. "
            "Write your own function."
        )
    if output.shape == target.shape:
        return float(((output > 0) == (target > 0.5)).double().mean())
    if output.dim() < 2 or output.shape[:1] + output.shape[2:] != target.shape:
        raise InputError(
            "`accuracy` needs outputs (N, classes) and labels (N,), or both of one shape; they "
            f"have {tuple(output.shape)} and {tuple(target.shape)}."
        )
    return float((output.argmax(1) == target).double().mean())


KNOWN: dict[str, Metric] = {"accuracy": accuracy}


def named_metrics(metrics: Metrics) -> dict[str, Metric]:
    """Return metrics by name, from names, functions, or a dict of functions."""
    if metrics is None:
        return {}
    if isinstance(metrics, Mapping):
        given: dict[str, Any] = dict(metrics)
    else:
        each = [metrics] if isinstance(metrics, str) or callable(metrics) else list(metrics)
        given = {
            m if isinstance(m, str) else getattr(m, "__name__", type(m).__name__): m for m in each
        }
    found: dict[str, Metric] = {}
    for name, metric in given.items():
        if isinstance(metric, str):
            if metric not in KNOWN:
                raise InputError(
                    f"There is no metric {metric!r}. Known: {', '.join(KNOWN)}; or pass a function "
                    "`(output, target) -> number`."
                )
            found[name] = KNOWN[metric]
        elif not callable(metric):
            raise InputError(
                f"The metric {name!r} is a {type(metric).__name__}; it must be a function "
                "`(output, target) -> number`."
            )
        else:
            found[name] = metric
    return found


def measure(
    metrics: Mapping[str, Metric], outputs: Any, targets: Any, mask: Any, runtime: Runtime
) -> tuple[dict[str, float], float]:
    """Return the metrics of one batch, and the number of (output, target) pairs behind them.

    Args:
        metrics: functions by name.
        outputs: the model's outputs, time-major, on the device.
        targets: targets as the user gave them.
        mask: weights of the steps, or of the steps of each sequence; those with weight zero are
            left out, and so are those whose labels the loss ignores.
        runtime: knows how sequences and targets are laid out. Of several processes each computes
            the metrics of its own part, and their means over all processes are returned.
    """
    batch_first, loss_at = runtime.batch_first, runtime.options.loss_at
    wanted = jax.tree.map(_as_torch, as_targets(targets))
    given = jax.tree.map(lambda x: to_torch(own_part(x)), outputs)
    steps = jax.tree.leaves(given)[0].shape[:2]
    if mask is not None:
        mask = _as_torch(mask)
        mask = mask.t() if batch_first and mask.dim() == 2 else mask
    if loss_at is not None:
        wanted = jax.tree.map(lambda t: t.expand(steps[0], *t.shape), wanted)
        mask = torch.as_tensor(last_of(mask, steps[0])) if loss_at == "last" else mask
    elif batch_first:
        wanted = jax.tree.map(lambda t: t.transpose(0, 1) if t.dim() > 1 else t, wanted)
    for t in jax.tree.leaves(wanted):
        if t.shape[:2] != steps:
            raise InputError(
                f"Metrics need one target for each step; outputs are {tuple(steps)} steps and "
                f"sequences, a target {tuple(t.shape)}."
            )
    keep = None
    if mask is not None:
        keep = (mask.reshape(mask.shape[0], -1) != 0).expand(*steps).reshape(-1)
    if runtime.losses.ignored is not None:
        position, label = runtime.losses.ignored
        given_labels = jax.tree.leaves(wanted)[position]
        counts = (given_labels != label).reshape(*steps, -1).any(2).reshape(-1)
        keep = counts if keep is None else keep & counts

    def flat(t: torch.Tensor) -> torch.Tensor:
        t = t.detach().flatten(0, 1)
        return t if keep is None else t[keep]

    given, wanted = jax.tree.map(flat, given), jax.tree.map(flat, wanted)
    count = len(jax.tree.leaves(wanted)[0])
    values = {
        name: (as_number(name, metric(given, wanted)) if count else 0.0, float(count))
        for name, metric in metrics.items()
    }
    means = runtime.store.placement.mean(values)
    counted = max((count for _, count in means.values()), default=0)
    return {name: value for name, (value, _) in means.items()} if counted else {}, counted


def as_number(name: str, value: Any) -> float:
    """Convert a number that a user's function returned to a float."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name!r} gave a {type(value).__name__}; it must give one number."
        ) from error


def evaluate_with(
    learner: OnlineLearner, batches: Iterable[Any], metrics: Mapping[str, Metric]
) -> dict[str, float]:
    """Return the mean loss over batches, and the metrics, in evaluation mode."""
    losses, sums, weights, runtime = [], dict.fromkeys(metrics, 0.0), 0, learner.runtime
    with runtime.filling.up_to(full_batch_size(batches, runtime.is_batch_first)):
        for batch in batches:
            xs, targets, mask = learner._unpacked(*split_batch(batch))
            found = runtime.sequences.evaluate(xs, targets, mask)
            losses.append(SequenceResult(found[0], None, found[1], False).loss)
            if metrics:
                outputs = runtime.sequences.predict(xs, False)
                numbers, count = measure(metrics, outputs, targets, mask, runtime)
                weights += count
                for name, value in numbers.items():
                    sums[name] += value * count
    if not losses:
        raise InputError("There was no batch to evaluate.")
    return {"loss": sum(losses) / len(losses)} | (
        {name: total / weights for name, total in sums.items()} if weights else {}
    )


def _as_torch(x: Any) -> torch.Tensor:
    return (
        x
        if isinstance(x, torch.Tensor)
        else to_torch(own_part(x))
        if isinstance(x, jax.Array)
        else torch.as_tensor(np.asarray(x))
    )
