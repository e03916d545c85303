"""`check_gradients`: every online gradient next to torch BPTT, parameter by parameter, on the
user's own model.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from etrace_bridge._errors import InputError, NotSupportedError
from etrace_bridge.check.check_loss import CheckLoss, read_loss
from etrace_bridge.check.comparison import RuleComparison
from etrace_bridge.check.expectation import NOT_USED, START_ONLY
from etrace_bridge.check.module_reference import flat_gradient
from etrace_bridge.check.precision import float_dtype, in_precision, torch_dtype
from etrace_bridge.check.reference import CheckData, Reference, map_tensors, torch_reference
from etrace_bridge.check.report import TORCH_BPTT, GradientReport, compare
from etrace_bridge.check.stepwise import check_steps, training_precision
from etrace_bridge.check.text import short
from etrace_bridge.compiler.diagnostics import show_path
from etrace_bridge.frontend import BridgedModule, map_input, to_jax, unwrapped, wrap
from etrace_bridge.learning.compiled_step import evaluation_mode
from etrace_bridge.learning.footprint import compile_gradients
from etrace_bridge.learning.inputs import read_inputs, sequence_length
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.learning.masks import check_mask, split_mask
from etrace_bridge.learning.results import GradientResult
from etrace_bridge.learning.sequence_loss import inexact, linear_loss
from etrace_bridge.learning.weighting import reduction_of
from etrace_bridge.lowering import announcing
from etrace_bridge.rules import BPTT, Rule, make_rule

TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 1e-1, "float16": 1e-2}
# in torch's messages when precisions are mixed
_PRECISION_ERROR = re.compile(r"dtype|scalar type|type \(|Double|Float")
_REPEATS = 3  # timed runs of a compiled program, of which the fastest counts


@dataclass(frozen=True)
class Check:
    """What all rules of one check share."""

    model: nn.Module
    net: BridgedModule
    data: CheckData
    loss: CheckLoss
    reduction: str
    mask: Any
    dtype: str
    tolerance: float
    allow_zero: frozenset[str]
    notes: tuple[str, ...]
    reference: str = TORCH_BPTT

    @property
    def length(self) -> int:
        return len(self.data.weights)

    def learner(self, rule: Rule, chunk: int) -> OnlineLearner:
        options = self.loss.options
        return OnlineLearner(
            self.net, rule=rule, chunk=chunk, reduction=self.reduction, guard=False, **options
        )

    def gradients(self, learner: OnlineLearner) -> GradientResult:
        return learner.gradients(self.data.xs, self.data.targets, self.mask)


@overload
def check_gradients(
    model: nn.Module,
    xs: Any,
    targets: Any,
    loss: Callable | None = ...,
    rule: str | Rule = ...,
    **options: Any,
) -> GradientReport: ...
@overload
def check_gradients(
    model: nn.Module,
    xs: Any,
    targets: Any,
    loss: Callable | None = ...,
    rule: Sequence[str | Rule] = ...,
    **options: Any,
) -> RuleComparison: ...


@announcing("comparing gradients …")
def check_gradients(
    model: nn.Module,
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
    """Compares a rule's gradients of a sequence with torch's own, by autograd on the torch model
    itself.

    A parameter that is certified exact must agree with torch; one that is certified approximate is
    reported with its cosine and what is dropped. A comparison that shows nothing (a silent network,
    a loss that does not depend on the model, gradients that are all zero, a trace that is never
    used) is not ok, and says so.

    The first steps also run one by one, through `learner.step`, in the model's own precision and
    the caller's JAX mode; they must give the losses, outputs and gradients that `learner.gradients`
    gives for them.

    Args:
        model: the torch model; it is left as it was. Or a brainstate module, whose gradients are
            compared with `jax.grad` through time of its own step, in its own precision.
        xs: inputs `(T, B, …)`, or `(B, T, …)` for a batch-first model; a tuple or dict for several
            inputs, as for `OnlineLearner.step`.
        targets: targets, time where the inputs have it; with `loss_at` or `seq_loss`, one for each
            sequence, `(B, …)`.
        loss: torch or JAX callable `(output_t, target_t) -> scalar`.
        rule: a rule's name or object; several of them give a `RuleComparison`, with time and
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
        allow_zero: names of parameters whose gradient is rightly zero in torch, or that only make
            the initial state and shall stay.
        state: as for `wrap`.
        sequence: as for `wrap`.
        batch_first: as for `wrap`.
        loss_at: as for `OnlineLearner`. With `"model"`, for a model that reduces its output over
            time, torch's side is `loss(model(xs), targets)`.
        seq_loss: as for `OnlineLearner`, in place of `loss`.
    """
    found_loss = read_loss(loss, loss_at, seq_loss)
    if isinstance(model, brainstate.nn.Module) and not isinstance(model, BridgedModule):
        from etrace_bridge.check.module_check import check_module  # it builds on this file

        return check_module(
            model, xs, targets, found_loss, rule, chunk, reduction, mask, tolerance, allow_zero
        )
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
    model = unwrapped(model)
    if reduction not in ("mean", "sum"):
        raise InputError(f"`reduction` is {reduction!r}; it must be 'mean' or 'sum'.")
    several = isinstance(rule, (list, tuple))
    rules = [make_rule(r) for r in rule] if several else [make_rule(rule)]  # pyright: ignore[reportGeneralTypeIssues, reportArgumentType]
    if not rules:
        raise InputError("`rule` is an empty list; name at least one rule.")
    job = _Job(
        model,
        xs,
        targets,
        found_loss,
        rules,
        several,
        chunk,
        reduction,
        mask,
        tolerance,
        frozenset(allow_zero),
        state,
        sequence,
        batch_first,
    )
    wanted = torch_dtype("float64" if dtype == "auto" else dtype) or float_dtype(model)
    if wanted != torch.float64 or float_dtype(model) == torch.float64:
        return job.run(wanted)
    try:
        return job.run(torch.float64)
    except _OtherPrecision as error:
        note = f"the model cannot run in float64 ({error.__cause__}), so both sides ran in its own precision"
        return job.run(float_dtype(model), (note,))


def assert_gradients_close(
    model: nn.Module,
    xs: Any,
    targets: Any,
    loss: Callable,
    rule: str | Rule = "rtrl",
    *,
    min_cosine: float | None = None,
    **options: Any,
) -> GradientReport:
    """Raises an `AssertionError` that reads like `torch.testing.assert_close` unless
    `check_gradients` is ok; for tests.

    Args:
        model: the torch model.
        xs: inputs, as for `check_gradients`.
        targets: targets.
        loss: the loss.
        rule: one rule.
        min_cosine: least cosine that every parameter must have, for rules that are approximate.
        **options: further arguments of `check_gradients`.

    Returns:
        The report.
    """
    report = check_gradients(model, xs, targets, loss, rule, **options)
    texts = report.mismatches()
    if min_cosine is not None:
        texts += [
            f"The gradient of `{p.name}` has cosine {p.cosine:.6f} to {short(report.reference)}'s; "
            f"at least {min_cosine} was asked for."
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


class _OtherPrecision(InputError):
    """A model has a precision written into it."""


@dataclass(frozen=True)
class _Job:
    """The arguments of `check_gradients`."""

    model: nn.Module
    xs: Any
    targets: Any
    loss: CheckLoss
    rules: list[Rule]
    several: bool
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

    def run(
        self, precision: torch.dtype, notes: tuple[str, ...] = ()
    ) -> GradientReport | RuleComparison:
        """Both sides in one precision."""
        with in_precision(self.model, precision), contextlib.ExitStack() as stack:
            try:
                check = self.prepare(precision, notes, stack)
                names = check.net.parameter_names
                reference = torch_reference(self.model, names, check.data, self.loss, self.options)
            except RuntimeError as error:
                if _PRECISION_ERROR.search(str(error)) is None:
                    raise
                raise _OtherPrecision(
                    f"`{type(self.model).__name__}` cannot run in {check_dtype(precision)}: "
                    f"{error}. A tensor of another precision is made inside the model or its loss. "
                    "Pass `dtype=None` to compare in the model's own precision."
                ) from error
            if self.several:  # the first run pays for warming up
                again = [
                    torch_reference(self.model, names, check.data, self.loss, self.options)
                    for _ in range(_REPEATS - 1)
                ]
                reference = replace(reference, seconds=min(r.seconds for r in (reference, *again)))
            size = chunk_size(self.chunk, check.length)
            truncated = (
                None
                if size >= check.length
                else numpy_grads(check.gradients(check.learner(BPTT(), size)))
            )
            reports = []
            for rule in self.rules:
                own = check.length if rule.truncates and self.chunk == "auto" else size
                reports.append(check_rule(check, rule, own, reference, truncated, self.several))
        reports = self.with_single_steps(reports)
        return RuleComparison(tuple(reports)) if self.several else reports[0]

    def prepare(
        self, precision: torch.dtype, notes: tuple[str, ...], stack: contextlib.ExitStack
    ) -> Check:
        """Data and model in one precision; `stack` keeps a random model in evaluation mode."""
        inputs = self.inputs(precision)
        tensors = jax.tree.leaves(inputs)
        if any(x.dim() < 2 for x in tensors):
            raise InputError(
                "`xs` needs a time axis and a batch axis: (T, B, …), or (B, T, …) for a "
                "batch-first model."
            )
        net, random = self.bridge_fixed(inputs, stack)
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
        targets = map_tensors(_tensors(self.targets), lambda t: _as_tensor(t, precision))
        by_time = lambda t: t.transpose(0, 1) if net.batch_first and t.dim() > 1 else t
        of_steps = None if self.loss.per_sequence else map_tensors(targets, by_time)
        length = sequence_length([by_time(x) for x in tensors], of_steps, None, net.batch_first)
        batch = tensors[0].shape[0 if net.batch_first else 1]
        steps, factors = read_mask(self.mask, self.loss, length, batch, net.batch_first)
        weights = step_weights(steps, self.reduction, length)
        data = CheckData(inputs, targets, weights, net.batch_first, self.loss.per_sequence, factors)
        name = check_dtype(precision)
        allowed = TOLERANCE.get(name, 1e-5) if self.tolerance is None else self.tolerance
        return Check(
            self.model,
            net,
            data,
            self.loss,
            self.reduction,
            self.mask,
            name,
            allowed,
            self.allow_zero,
            notes,
        )

    def blank_targets(self) -> Any:
        """The targets, with zeros where a mask of single sequences leaves them out."""
        kept = None if self.mask is None else _as_tensor(self.mask, torch.float64) != 0
        if kept is None or kept.dim() < 2 or self.loss.per_sequence:
            return self.targets
        blank = lambda t: t.masked_fill(~kept.reshape(kept.shape + (1,) * (t.dim() - 2)), 0)
        return map_tensors(_tensors(self.targets), blank)

    def with_single_steps(self, reports: list[GradientReport]) -> list[GradientReport]:
        """The reports with what `learner.step` gives, as it would run in training."""
        if self.loss.over_time:  # which single steps cannot have
            return reports
        with training_precision(self.model), contextlib.ExitStack() as stack:
            precision = float_dtype(self.model)
            net, _ = self.bridge_fixed(self.inputs(precision), stack)
            own = lambda t: (
                t.to(precision) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            )
            xs, targets = map_input(own, self.xs), map_tensors(self.blank_targets(), own)
            call = functools.partial(check_steps, per_sequence=self.loss.per_sequence)
            found = [call(net, rule, self.loss.function, xs, targets) for rule in self.rules]
        return [
            replace(
                report,
                single_steps=steps,
                problems=report.problems if steps.ok else (*report.problems, steps.problem()),
            )
            for report, steps in zip(reports, found, strict=True)
        ]

    def inputs(self, precision: torch.dtype) -> Any:
        """The inputs as tensors of one precision."""
        return map_input(lambda x: _as_tensor(x, precision), self.xs)

    def bridge_fixed(self, inputs: Any, stack: contextlib.ExitStack) -> tuple[BridgedModule, bool]:
        """The bridged model, in evaluation mode if it is random otherwise, and whether it is."""
        net, random = self.bridge(inputs)
        if random:
            stack.enter_context(evaluation_mode(net))
            net, still_random = self.bridge(inputs)
            if still_random:
                raise NotSupportedError(
                    "The model draws random numbers in evaluation mode too, so torch and JAX "
                    "cannot be compared on it."
                )
        return net, random

    def bridge(self, inputs: Any) -> tuple[BridgedModule, bool]:
        """The bridged model, and whether its step is random."""
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


def check_dtype(precision: torch.dtype) -> str:
    """The name of a torch dtype."""
    return str(precision).removeprefix("torch.")


def read_mask(
    mask: Any, loss: CheckLoss, length: int, batch: int, batch_first: bool = False
) -> tuple[Any, Any]:
    """The steps' weights, and factors of the batch elements for a mask of single sequences."""
    if mask is not None:
        mask = np.asarray(_as_tensor(mask, torch.float64))
        mask = mask.T if batch_first and mask.ndim == 2 else mask
        check_mask(mask, length, batch)
    mask = loss.mask(mask, length)
    return (None, None) if mask is None else split_mask(mask)


def step_weights(mask: Any, reduction: str, length: int) -> np.ndarray:
    """(T,) factors of the steps' losses."""
    weights = np.ones(length) if mask is None else mask
    if reduction == "mean":
        if not weights.sum() > 0:
            raise InputError("`mask` has no step with a positive weight, so there is no mean loss.")
        weights = weights / weights.sum()
    return weights


def _as_tensor(x: Any, precision: torch.dtype) -> torch.Tensor:
    tensor = (
        x.detach().cpu() if isinstance(x, torch.Tensor) else torch.tensor(np.array(x, order="C"))
    )
    if tensor.is_complex():
        return tensor.to(precision.to_complex())
    return tensor.to(precision) if tensor.is_floating_point() else tensor.clone()


def _tensors(tree: Any) -> Any:
    """NumPy and JAX arrays in a tree of targets as tensors; whole numbers are torch's int64, as for
    the learner.
    """

    def tensor(x: Any) -> torch.Tensor:
        if isinstance(x, torch.Tensor):
            return x
        made = torch.tensor(np.array(x, order="C"))  # torch itself refuses negative strides
        return (
            made
            if made.is_floating_point() or made.is_complex() or made.dtype == torch.bool
            else made.long()
        )

    return jax.tree.map(
        tensor, tree, is_leaf=lambda x: isinstance(x, (torch.Tensor, np.ndarray, jax.Array))
    )


def chunk_size(chunk: int | str, length: int) -> int:
    if chunk == "auto":
        return max(1, math.ceil(length / 3))
    if isinstance(chunk, bool) or not isinstance(chunk, (int, np.integer)) or chunk < 1:
        raise InputError(f"`chunk` is {chunk!r}; it must be 'auto' or a positive number of steps.")
    return min(int(chunk), length)


def numpy_grads(result: GradientResult) -> dict[str, np.ndarray]:
    if all(isinstance(g, torch.Tensor) for g in result.grads.values()):
        return {name: g.numpy(force=True) for name, g in result.grads.items()}
    return {name: flat_gradient(g) for name, g in result.grads.items()}


def check_rule(
    check: Check,
    rule: Rule,
    chunk: int,
    reference: Reference,
    truncated: dict[str, np.ndarray] | None,
    measured: bool,
) -> GradientReport:
    learner = check.learner(rule, chunk)
    result = check.gradients(learner)
    online = numpy_grads(result)
    certificates = {show_path(path): c for path, c in learner.graph.certificate().items()}
    promises = {
        show_path(path): p for path, p in rule.promises(learner.graph, check.length, chunk).items()
    }
    scale = max(
        (float(np.linalg.norm(g.reshape(-1))) for g in reference.grads.values()), default=0.0
    )
    floor = 16 * float(torch.finfo(getattr(torch, check.dtype)).eps) * scale
    parameters = {}
    for name, wanted in reference.grads.items():
        found = online.get(name, np.zeros_like(wanted))
        past = (
            None
            if truncated is None
            else _share(wanted - truncated.get(name, np.zeros_like(wanted)), wanted)
        )
        start_only = name in getattr(check.net, "start_parameters", ())
        promise = START_ONLY if start_only else promises.get(name, NOT_USED)
        parameters[name] = compare(
            name, found, wanted, promise, check.tolerance, floor, past, name in check.allow_zero
        )
    problems = [
        *_forward_problems(check, result, reference),
        *_empty_problems(check, reference, scale),
    ]
    if not problems and not rule.truncates:
        problems += _trace_problems(check, chunk, certificates, parameters)
    seconds = memory = None
    if measured:
        seconds = min(
            _timed(lambda: jax.block_until_ready(check.gradients(learner).raw_grads))
            for _ in range(_REPEATS)
        )
        memory = _memory(check, learner, rule, chunk, result)
    return GradientReport(
        rule=rule.name or type(rule).__name__, parameters=parameters, problems=tuple(problems), notes=check.notes, steps=check.length,
        chunk=chunk, dtype=check.dtype, tolerance=check.tolerance, loss=result.loss, torch_loss=reference.loss, seconds=seconds,
        torch_seconds=reference.seconds, memory=memory, reference=check.reference,
    )  # fmt: skip


def _share(part: np.ndarray, whole: np.ndarray) -> float:
    norm = float(np.linalg.norm(whole.reshape(-1)))
    return float(np.linalg.norm(part.reshape(-1))) / norm if norm else 0.0


def _timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _memory(
    check: Check, learner: OnlineLearner, rule: Rule, chunk: int, result: GradientResult
) -> int:
    """Bytes of the program of the online pass."""
    runtime, data = learner.runtime, check.data
    time_major = lambda t: t.transpose(0, 1) if data.batch_first and t.dim() > 1 else t
    args = [to_jax(time_major(x)) for x in read_inputs(check.net, data.xs)]
    compiled = runtime.store.compiled
    if check.loss.reads_sequence:  # the online pass gets the derivative by each output
        loss, targets = linear_loss, inexact(result.raw_outputs)
    else:
        loss = runtime.losses.find(compiled, data.target(0))
        steps = [map_tensors(data.target(t), to_jax) for t in range(check.length)]
        targets = jax.tree.map(lambda *each: jnp.stack(each), *steps)
    return compile_gradients(compiled, rule, loss, args, targets, chunk, check.reduction).memory


def _forward_problems(check: Check, result: GradientResult, reference: Reference) -> list[str]:
    """Differences in what both sides computed before any gradient."""
    arrays = [np.asarray(x) for x in jax.tree.leaves(result.raw_outputs)]
    for step, wanted in enumerate(reference.outputs):
        if len(wanted) != len(arrays):
            return [
                f"The model gives {len(wanted)} output tensors in {short(check.reference)} and "
                f"{len(arrays)} when bridged."
            ]
        for n, (array, expected) in enumerate(zip(arrays, wanted, strict=True)):
            found = array[step]
            if found.shape != expected.shape:
                return [
                    f"Output {n} has shape {found.shape} when bridged and {expected.shape} in "
                    f"{short(check.reference)}."
                ]
            size = max(1.0, float(np.abs(expected).max(initial=0)))
            difference = np.abs(found.astype(complex) - expected)
            if not bool(np.all(difference <= 10 * check.tolerance * size)):
                where = tuple(
                    int(i) for i in np.unravel_index(int(np.argmax(difference)), difference.shape)
                )
                return [
                    f"The outputs differ at step {step}, so the gradients are those of different "
                    f"functions: output {n} at index {where} is {found[where].item()!r} when "
                    f"bridged and {expected[where].item()!r} in {short(check.reference)} (up to "
                    f"{10 * check.tolerance * size:g} allowed)."
                ]
    if not math.isfinite(reference.loss):
        return [f"The loss is {reference.loss} in {short(check.reference)}."]
    return []


def _empty_problems(check: Check, reference: Reference, scale: float) -> list[str]:
    """Why the comparison shows nothing, if it does not."""
    if not reference.reaches_output:
        return [
            "The loss does not depend on the model: its derivative by every output is zero or "
            "missing, so every gradient is zero."
        ]
    if not reference.reaches_parameter or scale == 0:
        return [
            f"All gradients are zero in {short(check.reference)}, so there is nothing to compare. "
            "(Frozen parameters? A detached state? Saturated units?)"
        ]
    if not reference.hears_input:
        if check.data.is_zero:
            return [
                "The input is zero at every step, so most of the model is not exercised. Compare "
                "on real data."
            ]
        return [
            "The network is silent: its outputs are the same as for an input of zeros. Scale up "
            "the input or the weights until its units respond, or compare on real data."
        ]
    return []


def _trace_problems(check: Check, chunk: int, certificates: dict, parameters: dict) -> list[str]:
    """Why the rule's memory of the past is not tested, if it is not."""
    if chunk >= check.length:
        steps = "one step" if check.length == 1 else f"{check.length} steps"
        return [
            f"The trace is never used: the sequence of {steps} is one chunk. Give a longer "
            "sequence or a smaller `chunk`."
        ]
    if not np.any(check.data.weights[chunk:]):
        return [f"The trace is never used: only the first chunk of {chunk} steps has a loss."]
    carried = [name for name, c in certificates.items() if c.kind in ("traced", "upstream")]
    if not carried:
        return [
            "The trace is never used: no parameter reaches the loss through a hidden state, so "
            "this model has no recurrence to learn."
        ]
    if all(
        (parameters[name].past or 0.0) <= check.tolerance for name in carried if name in parameters
    ):
        return [
            "The trace is never used: no gradient comes from before the chunk of the loss. The "
            "states may be detached or reset at every step."
        ]
    return []
