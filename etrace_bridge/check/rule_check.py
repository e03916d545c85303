"""One rule's gradients of a sequence, compared with the reference."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge.check.expectation import NOT_USED, START_ONLY
from etrace_bridge.check.gradient_report import GradientReport
from etrace_bridge.check.module_reference import flat_gradient
from etrace_bridge.check.parameter_report import ParameterReport, compare
from etrace_bridge.check.problems import empty_problems, forward_problems, trace_problems
from etrace_bridge.check.setup import CheckSetup, chunk_size
from etrace_bridge.check.torch_reference import Reference, map_tensors
from etrace_bridge.compiler.diagnostics import show_path
from etrace_bridge.frontend import to_jax
from etrace_bridge.learning.footprint import compile_gradients
from etrace_bridge.learning.inputs import read_inputs
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.learning.results import GradientResult
from etrace_bridge.learning.sequence_loss import inexact, linear_loss
from etrace_bridge.rules import Rule

REPEATS = 3  # timed runs, of which the fastest counts


def check_rules(
    setup: CheckSetup,
    rules: Sequence[Rule],
    chunk: int | str,
    reference: Reference,
    truncated: dict[str, np.ndarray] | None,
    measured: bool,
) -> list[GradientReport]:
    """Compare the gradients of each rule with the reference.

    Args:
        setup: what the rules share.
        rules: the rules.
        chunk: steps in a chunk, or `"auto"`.
        reference: the reference's gradients and outputs.
        truncated: gradients by BPTT within each chunk; None if the sequence is one chunk.
        measured: also measure time and memory.
    """
    reports = []
    for rule in rules:
        whole = rule.truncates and chunk == "auto"
        size = setup.length if whole else chunk_size(chunk, setup.length)
        reports.append(_check_rule(setup, rule, size, reference, truncated, measured))
    return reports


def numpy_grads(result: GradientResult) -> dict[str, np.ndarray]:
    """Return gradients by name as NumPy arrays; those of a brainstate module as vectors."""
    if all(isinstance(g, torch.Tensor) for g in result.grads.values()):
        return {name: g.numpy(force=True) for name, g in result.grads.items()}
    return {name: flat_gradient(g) for name, g in result.grads.items()}


def _check_rule(
    setup: CheckSetup,
    rule: Rule,
    chunk: int,
    reference: Reference,
    truncated: dict[str, np.ndarray] | None,
    measured: bool,
) -> GradientReport:
    learner = setup.learner(rule, chunk)
    result = setup.gradients(learner)
    scale = max(
        (float(np.linalg.norm(g.reshape(-1))) for g in reference.grads.values()), default=0.0
    )
    parameters = _compare_parameters(setup, learner, chunk, result, reference, truncated, scale)
    problems = [
        *forward_problems(setup, result, reference),
        *empty_problems(setup, reference, scale),
    ]
    if not problems and not rule.truncates:
        certificates = {show_path(path): c for path, c in learner.graph.certificate().items()}
        problems += trace_problems(setup, chunk, certificates, parameters)
    seconds = memory = None
    if measured:
        seconds = min(
            _timed(lambda: jax.block_until_ready(setup.gradients(learner).raw_grads))
            for _ in range(REPEATS)
        )
        memory = _memory(setup, learner, rule, chunk, result)
    return GradientReport(
        rule=rule.name or type(rule).__name__, parameters=parameters, problems=tuple(problems), notes=setup.notes, steps=setup.length,
        chunk=chunk, dtype=setup.dtype, tolerance=setup.tolerance, loss=result.loss, torch_loss=reference.loss, seconds=seconds,
        torch_seconds=reference.seconds, memory=memory, reference=setup.reference,
    )  # fmt: skip


def _compare_parameters(
    setup: CheckSetup,
    learner: OnlineLearner,
    chunk: int,
    result: GradientResult,
    reference: Reference,
    truncated: dict[str, np.ndarray] | None,
    scale: float,
) -> dict[str, ParameterReport]:
    """Compare each parameter's gradient with the reference's.

    `scale` is the norm of the reference's largest gradient: what is below its rounding error counts
    as zero.
    """
    online = numpy_grads(result)
    promised = learner.rule.promises(learner.graph, setup.length, chunk)
    promises = {show_path(path): promise for path, promise in promised.items()}
    floor = 16 * float(torch.finfo(getattr(torch, setup.dtype)).eps) * scale
    parameters = {}
    for name, expected in reference.grads.items():
        zeros = np.zeros_like(expected)
        past = None
        if truncated is not None:
            past = _share(expected - truncated.get(name, zeros), expected)
        start_only = name in getattr(setup.net, "start_parameters", ())
        promise = START_ONLY if start_only else promises.get(name, NOT_USED)
        gradient, zero_is_fine = online.get(name, zeros), name in setup.allow_zero
        parameters[name] = compare(
            name, gradient, expected, promise, setup.tolerance, floor, past, zero_is_fine
        )
    return parameters


def _share(part: np.ndarray, whole: np.ndarray) -> float:
    norm = float(np.linalg.norm(whole.reshape(-1)))
    return float(np.linalg.norm(part.reshape(-1))) / norm if norm else 0.0


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _memory(
    setup: CheckSetup, learner: OnlineLearner, rule: Rule, chunk: int, result: GradientResult
) -> int:
    """Return the bytes that the program of the online pass takes."""
    runtime, data = learner.runtime, setup.data
    time_major = lambda t: t.transpose(0, 1) if data.batch_first and t.dim() > 1 else t
    args = [to_jax(time_major(x)) for x in read_inputs(setup.net, data.xs)]
    compiled = runtime.store.compiled
    if setup.loss.reads_sequence:  # the online pass gets the derivative by each output
        loss, targets = linear_loss, inexact(result.raw_outputs)
    else:
        loss = runtime.losses.find(compiled, data.target(0))
        steps = [map_tensors(data.target(t), to_jax) for t in range(setup.length)]
        targets = jax.tree.map(lambda *each: jnp.stack(each), *steps)
    return compile_gradients(compiled, rule, loss, args, targets, chunk, setup.reduction).memory
