"""A gradient check of a brainstate module against `jax.grad` through time of its own step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import InputError, NotSupportedError
from etrace_bridge.check.check_loss import CheckLoss
from etrace_bridge.check.gradient_report import GradientReport
from etrace_bridge.check.module_reference import masked_loss, module_reference, preserved_states
from etrace_bridge.check.rule_check import check_rules, numpy_grads
from etrace_bridge.check.setup import (
    CheckSetup,
    chunk_size,
    default_tolerance,
    read_mask,
    step_weights,
)
from etrace_bridge.check.torch_reference import JAX_GRAD, CheckData
from etrace_bridge.frontend import to_torch
from etrace_bridge.learning.inputs import as_array, as_inputs
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.learning.masks import blank_masked, repeat_targets
from etrace_bridge.rules import BPTT, Rule

_NOTE = "a brainstate module: the reference is its own step, in its own precision"


def check_module(
    net: brainstate.nn.Module, xs: Any, targets: Any, loss: CheckLoss, rules: Sequence[Rule], chunk: int | str,
    reduction: str, mask: Any, tolerance: float | None, allow_zero: frozenset[str],
) -> list[GradientReport]:  # fmt: skip
    """Compare the gradients of each rule with the reference.

    The arguments are those of `check_gradients`. The module's States are restored afterwards.
    """
    leaves = [
        x for s in net.states(brainstate.ParamState).values() for x in jax.tree.leaves(s.value)
    ]
    if not leaves:
        raise InputError(
            f"`{type(net).__name__}` has no `brainstate.ParamState`, so there is no gradient to "
            "check. Make its trainable values `ParamState`s."
        )
    if loss.over_time:
        raise NotSupportedError(
            "`seq_loss` is compared with torch's own loop only; a brainstate module takes `loss`, "
            "with `loss_at='last'` or 'every' for one target for each sequence."
        )
    dtype = leaves[0].dtype
    inputs = [jnp.asarray(as_array(x, dtype)) for x in as_inputs(xs)]
    length = len(inputs[0])
    steps, factors = read_mask(mask, loss, length, inputs[0].shape[1])
    weights = step_weights(steps, reduction, length)
    shown = tuple(to_torch(x) for x in inputs)
    data = CheckData(shown, targets, weights, False, loss.per_sequence, factors)
    allowed = default_tolerance(str(dtype)) if tolerance is None else tolerance
    setup = CheckSetup(
        net, data, loss, reduction, mask, str(dtype), allowed, allow_zero, (_NOTE,), JAX_GRAD
    )
    with preserved_states(net):
        size = chunk_size(chunk, length)
        bptt = setup.learner(BPTT(), size)
        result = setup.gradients(bptt)
        truncated = numpy_grads(result)
        by_step, jax_loss = _targets_and_loss(setup, bptt, inputs)
        if factors is not None:
            by_step = jax.tree.map(lambda t: jnp.asarray(blank_masked(t, factors)), by_step)
            first = jax.tree.map(lambda a: a[0], (result.raw_outputs, by_step))
            jax_loss = masked_loss(jax_loss, *first)
            by_step = by_step, jnp.asarray(factors, dtype)
        reference = module_reference(net, inputs, by_step, jax_loss, np.asarray(weights, dtype))
        by_chunk = truncated if size < length else None
        return check_rules(setup, rules, chunk, reference, by_chunk, measured=False)


def _targets_and_loss(
    setup: CheckSetup, learner: OnlineLearner, inputs: Sequence[jax.Array]
) -> tuple[Any, Any]:
    """Return the targets of every step as JAX arrays, and the loss as a JAX function."""
    runtime, loss = learner.runtime, setup.loss
    data = runtime.reader.sequence(inputs, setup.data.targets, None, loss.per_sequence)
    jax_loss = runtime.losses.find(runtime.store.compiled, data.target)
    by_step = lambda t: repeat_targets(t, setup.length, None) if loss.per_sequence else t
    return jax.tree.map(lambda t: jnp.asarray(by_step(t)), data.targets), jax_loss
