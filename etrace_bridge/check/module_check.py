"""`check_gradients` for a brainstate module: a rule's gradients next to `jax.grad` through time of
the module's own step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import InputError, NotSupportedError
from etrace_bridge.check.check_loss import CheckLoss
from etrace_bridge.check.comparison import RuleComparison
from etrace_bridge.check.gradients import (
    TOLERANCE,
    Check,
    check_rule,
    chunk_size,
    numpy_grads,
    read_mask,
    step_weights,
)
from etrace_bridge.check.module_reference import kept_states, masked_loss, module_reference
from etrace_bridge.check.reference import CheckData
from etrace_bridge.check.report import JAX_GRAD, GradientReport
from etrace_bridge.frontend import to_torch
from etrace_bridge.learning.inputs import as_array, as_inputs
from etrace_bridge.learning.masks import blank_masked, repeat_targets
from etrace_bridge.rules import BPTT, Rule, make_rule

NOTE = "a brainstate module: the reference is its own step, in its own precision"


def check_module(
    net: brainstate.nn.Module, xs: Any, targets: Any, loss: CheckLoss, rule: str | Rule | Sequence[str | Rule], chunk: int | str,
    reduction: str, mask: Any, tolerance: float | None, allow_zero: Sequence[str],
) -> GradientReport | RuleComparison:  # fmt: skip
    """Compares; arguments as for `check_gradients`. The module's States are left as they were."""
    rules = [make_rule(r) for r in rule] if isinstance(rule, (list, tuple)) else [make_rule(rule)]  # pyright: ignore[reportArgumentType]
    leaves = [
        x for s in net.states(brainstate.ParamState).values() for x in jax.tree.leaves(s.value)
    ]
    if not leaves:
        raise InputError(
            f"`{type(net).__name__}` has no `brainstate.ParamState`, so there is no gradient to "
            "check."
        )
    dtype = str(leaves[0].dtype)
    inputs = [jnp.asarray(as_array(x, leaves[0].dtype)) for x in as_inputs(xs)]
    if loss.over_time:
        raise NotSupportedError(
            "`seq_loss` is compared with torch's own loop only; a brainstate module takes `loss`, "
            "with `loss_at='last'` or 'every' for one target for each sequence."
        )
    steps, factors = read_mask(mask, loss, *inputs[0].shape[:2])
    weights = step_weights(steps, reduction, len(inputs[0]))
    shown = tuple(to_torch(x) for x in inputs)
    data = CheckData(shown, targets, weights, False, loss.per_sequence, factors)
    allowed = TOLERANCE.get(dtype, 1e-5) if tolerance is None else tolerance
    check = Check(
        _NoModel,
        net,
        data,
        loss,
        reduction,
        mask,
        dtype,
        allowed,
        frozenset(allow_zero),
        (NOTE,),
        JAX_GRAD,
    )  # pyright: ignore[reportArgumentType]
    with kept_states(net):
        size = chunk_size(chunk, check.length)
        first = check.learner(BPTT(), size)
        found = check.gradients(first)
        truncated = numpy_grads(found)
        compiled, reader = first.runtime.store.compiled, first.runtime.reader
        arrays = reader.sequence(inputs, targets, None, loss.per_sequence)
        jax_loss = first.runtime.losses.find(compiled, arrays.target)
        spread = lambda t: repeat_targets(t, check.length, None) if loss.per_sequence else t
        wanted = jax.tree.map(lambda t: jnp.asarray(spread(t)), arrays.targets)
        if factors is not None:
            wanted = jax.tree.map(lambda t: jnp.asarray(blank_masked(t, factors)), wanted)
            at_first = lambda tree: jax.tree.map(lambda a: a[0], tree)
            jax_loss = masked_loss(jax_loss, at_first(found.raw_outputs), at_first(wanted))
            wanted = wanted, jnp.asarray(factors, leaves[0].dtype)
        reference = module_reference(
            net, inputs, wanted, jax_loss, np.asarray(weights, leaves[0].dtype)
        )
        reports = []
        for one in rules:
            own = check.length if one.truncates and chunk == "auto" else size
            reports.append(
                check_rule(
                    check, one, own, reference, truncated if size < check.length else None, False
                )
            )
    return RuleComparison(tuple(reports)) if isinstance(rule, (list, tuple)) else reports[0]


class _NoModel(torch.nn.Module):
    """Stands where a check has its torch model."""
