"""`check_gradients`: compare online gradients with torch BPTT, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import brainstate
import jax
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from etrace_bridge._errors import InputError
from etrace_bridge.check.check_loss import read_loss
from etrace_bridge.check.gradient_report import GradientReport
from etrace_bridge.check.module_check import check_module
from etrace_bridge.check.precision import float_dtype, torch_dtype
from etrace_bridge.check.rule_comparison import RuleComparison
from etrace_bridge.check.text import short
from etrace_bridge.check.torch_check import FixedPrecisionError, TorchCheck
from etrace_bridge.frontend import BridgedModule, unwrapped, wrap
from etrace_bridge.learning.inputs import read_inputs
from etrace_bridge.learning.masks import unpack_sequences
from etrace_bridge.lowering import announcing
from etrace_bridge.rules import Rule, make_rule


@overload
def check_gradients(
    model: nn.Module | brainstate.nn.Module,
    xs: Any,
    targets: Any,
    loss: Callable | None = ...,
    rule: str | Rule = ...,
    chunk: int | str = ...,
    **options: Any,
) -> GradientReport: ...
@overload
def check_gradients(
    model: nn.Module | brainstate.nn.Module,
    xs: Any,
    targets: Any,
    loss: Callable | None = ...,
    rule: Sequence[str | Rule] = ...,
    chunk: int | str = ...,
    **options: Any,
) -> RuleComparison: ...


@announcing("comparing gradients …")
def check_gradients(
    model: nn.Module | brainstate.nn.Module,
    xs: Any,
    targets: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    rule: str | Rule | Sequence[str | Rule] = "d_rtrl",
    chunk: int | str = "auto",
    *,
    dtype: Any = "float64",
    reduction: str = "mean",
    mask: Any = None,
    tolerance: float | None = None,
    allow_zero: Sequence[str] = (),
    state: Any = None,
    sequence: bool | None = None,
    batch_first: bool | None = None,
    loss_at: str | None = None,
    seq_loss: Callable[[Any, Any], Any] | None = None,
) -> GradientReport | RuleComparison:
    """Compare a rule's gradients of a sequence with those of torch autograd on the torch model.

    A parameter that is certified exact must agree with torch; one that is certified approximate is
    reported with its cosine and what is dropped. A comparison that shows nothing (a silent network,
    a loss that does not depend on the model, gradients that are all zero, a trace that is never
    used) is not ok, and the report says why.

    The first steps also run one by one, through `learner.step`, in the model's own precision and
    the caller's JAX mode; they must give the same losses, outputs and gradients as
    `learner.gradients`.

    Args:
        model: the torch model, which is not changed. Or a brainstate module, whose gradients are
            compared with `jax.grad` through time of its own step, in its own precision.
        xs: inputs `(T, B, …)`, or `(B, T, …)` for a batch-first model; a tuple or dict for several
            inputs, as for `OnlineLearner.step`; or torch's packed sequences.
        targets: targets, time where the inputs have it; with `loss_at` or `seq_loss`, one for each
            sequence, `(B, …)`.
        loss: torch or JAX callable `(output_t, target_t) -> scalar`.
        rule: a rule's name or object; a list of them gives a `RuleComparison`, with time and
            memory.
        chunk: steps in a chunk. `"auto"` divides the sequence into three, so that the trace is
            written and read.
        dtype: precision in which both sides run: `"float64"`, `"float32"`, or None for the model's
            own. A model that cannot run in float64 (snnTorch makes float32 spikes, whatever the
            weights are) runs in its own precision, and a note says so; `report.dtype` is the
            precision that was used.
        reduction: `"mean"` or `"sum"` over the steps' losses.
        mask: (T,) weights of the steps' losses, or (T, B) those of each sequence, (B, T) for a
            batch-first model.
        tolerance: relative error that counts as equal; by default 1e-9 in float64, 1e-5 in float32.
        allow_zero: names of parameters whose gradient may be zero in torch, and of those that only
            make the initial state and are not meant to be trained.
        state: as for `wrap`.
        sequence: as for `wrap`.
        batch_first: as for `wrap`.
        loss_at: as for `OnlineLearner`. With `"model"`, for a model that reduces its output over
            time, torch's side is `loss(model(xs), targets)`.
        seq_loss: as for `OnlineLearner`, in place of `loss`.
    """
    function = read_loss(loss, loss_at, seq_loss)
    if reduction not in ("mean", "sum"):
        raise InputError(f"`reduction` is {reduction!r}; it must be 'mean' or 'sum'.")
    several = isinstance(rule, Sequence) and not isinstance(rule, str)
    given = rule if isinstance(rule, Sequence) and not isinstance(rule, str) else (rule,)
    rules = [make_rule(r) for r in given]
    if not rules:
        raise InputError("`rule` is an empty list; name at least one rule.")
    zero = frozenset(allow_zero)
    is_packed = lambda x: isinstance(x, PackedSequence)
    if any(map(is_packed, jax.tree.leaves((xs, targets), is_leaf=is_packed))):
        options = {"state": state, "sequence": sequence, "batch_first": batch_first}
        xs, targets, mask = _unpacked(model, options, xs, targets, mask)
    if isinstance(model, brainstate.nn.Module) and not isinstance(model, BridgedModule):
        reports = check_module(
            model, xs, targets, function, rules, chunk, reduction, mask, tolerance, zero
        )
        return RuleComparison(tuple(reports)) if several else reports[0]
    if not isinstance(model, nn.Module):
        hint = (
            " Pass `net.model`, after `learner.sync_to_torch()` if it was trained."
            if isinstance(model, BridgedModule)
            else ""
        )
        raise InputError(
            "`check_gradients` takes a torch or brainstate module, not a "
            f"`{type(model).__name__}`.{hint}"
        )
    check = TorchCheck(
        unwrapped(model), xs, targets, function, rules, several, chunk, reduction, mask, tolerance,
        zero, state, sequence, batch_first,
    )  # fmt: skip
    reports = _run_in_precision(check, torch_dtype("float64" if dtype == "auto" else dtype))
    return RuleComparison(tuple(reports)) if several else reports[0]


def _unpacked(
    model: Any, options: dict[str, Any], xs: Any, targets: Any, mask: Any
) -> tuple[tuple, Any, Any]:
    """Return inputs, targets and mask with packed sequences padded as the model takes sequences."""
    net = wrap(unwrapped(model), **options) if isinstance(model, nn.Module) else model
    inputs = read_inputs(net, xs, sequence=True)
    return unpack_sequences(inputs, targets, mask, bool(getattr(net, "batch_first", False)))


def _run_in_precision(check: TorchCheck, requested: torch.dtype | None) -> list[GradientReport]:
    """Run a check in the requested precision, or in the model's own if it cannot run in float64."""
    own = float_dtype(check.model)
    precision = requested or own
    if precision != torch.float64 or own == torch.float64:
        return check.run(precision)
    try:
        return check.run(torch.float64)
    except FixedPrecisionError as error:
        note = f"the model cannot run in float64 ({error.__cause__}), so both sides ran in its own precision"
        return check.run(own, (note,))


def assert_gradients_close(
    model: nn.Module | brainstate.nn.Module,
    xs: Any,
    targets: Any,
    loss: Callable,
    rule: str | Rule = "rtrl",
    *,
    min_cosine: float | None = None,
    **options: Any,
) -> GradientReport:
    """Raise an `AssertionError` unless `check_gradients` is ok; for tests.

    The message reads like that of `torch.testing.assert_close`.

    Args:
        model: the torch model.
        xs: inputs, as for `check_gradients`.
        targets: targets.
        loss: the loss.
        rule: one rule.
        min_cosine: the least cosine that every parameter must reach, for approximate rules.
        **options: further arguments of `check_gradients`.

    Returns:
        The report.
    """
    report = check_gradients(model, xs, targets, loss, rule, **options)
    texts = report.mismatches()
    if min_cosine is not None:
        texts += [
            f"The gradient of `{p.name}` has cosine {p.cosine:.6f} to {short(report.reference)}'s; "
            f"it must be at least {min_cosine}."
            for p in report
            if p.expectation.kind != "none"
            and p.name not in options.get("allow_zero", ())
            and not p.cosine >= min_cosine
        ]
    if texts:
        raise AssertionError(
            "\n\n".join(
                [f"Gradients of `{report.rule}` are not close to {report.reference}.", *texts]
            )
        )
    return report
