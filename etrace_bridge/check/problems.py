"""Why a comparison of gradients shows nothing: what is wrong apart from the gradients themselves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from etrace_bridge.check.parameter_report import ParameterReport
from etrace_bridge.check.text import short
from etrace_bridge.check.torch_reference import Reference
from etrace_bridge.compiler.certificate import ParameterCertificate
from etrace_bridge.learning.results import GradientResult

if TYPE_CHECKING:
    from etrace_bridge.check.setup import CheckSetup


def forward_problems(setup: CheckSetup, result: GradientResult, reference: Reference) -> list[str]:
    """Describe the first difference between the outputs of both sides, or a loss that is not
    finite.
    """
    arrays = [np.asarray(x) for x in jax.tree.leaves(result.raw_outputs)]
    for step, outputs in enumerate(reference.outputs):
        if len(outputs) != len(arrays):
            return [
                f"The model gives {len(outputs)} output tensors in {short(setup.reference)} and "
                f"{len(arrays)} when bridged."
            ]
        for n, (array, expected) in enumerate(zip(arrays, outputs, strict=True)):
            problem = _output_problem(setup, n, step, array[step], expected)
            if problem is not None:
                return [problem]
    if not math.isfinite(reference.loss):
        return [f"The loss is {reference.loss} in {short(setup.reference)}."]
    return []


def _output_problem(
    setup: CheckSetup, n: int, step: int, bridged: np.ndarray, expected: np.ndarray
) -> str | None:
    """Describe how output `n` of one step differs, if it does."""
    if bridged.shape != expected.shape:
        return (
            f"Output {n} has shape {bridged.shape} when bridged and {expected.shape} in "
            f"{short(setup.reference)}."
        )
    allowed = 10 * setup.tolerance
    difference = np.abs(bridged.astype(complex) - expected)
    if bool(np.all(difference <= allowed * max(1.0, float(np.abs(expected).max(initial=0))))):
        return None
    where = tuple(int(i) for i in np.unravel_index(int(np.argmax(difference)), difference.shape))
    return (
        f"The outputs differ at step {step}, so the gradients are those of different functions: "
        f"output {n} at index {where} is {bridged[where].item()!r} when bridged and "
        f"{expected[where].item()!r} in {short(setup.reference)} (up to {allowed:g} allowed)."
    )


def empty_problems(setup: CheckSetup, reference: Reference, scale: float) -> list[str]:
    """Explain why there is nothing to compare, if that is so."""
    if not reference.reaches_output:
        return [
            "The loss does not depend on the model: its derivative by every output is zero or "
            "missing, so every gradient is zero."
        ]
    if not reference.reaches_parameter or scale == 0:
        return [
            f"All gradients are zero in {short(setup.reference)}, so there is nothing to compare. "
            "(Frozen parameters? A detached state? Saturated units?)"
        ]
    if not reference.responds_to_input:
        if setup.data.is_zero:
            return [
                "The input is zero at every step, so most of the model is not exercised. Compare "
                "on real data."
            ]
        return [
            "The network is silent: its outputs are the same as for an input of zeros. Scale up "
            "the input or the weights until its units respond, or compare on real data."
        ]
    return []


def trace_problems(
    setup: CheckSetup,
    chunk: int,
    certificates: Mapping[str, ParameterCertificate],
    parameters: Mapping[str, ParameterReport],
) -> list[str]:
    """Explain why the rule's memory of the past is not tested, if that is so."""
    if chunk >= setup.length:
        steps = "one step" if setup.length == 1 else f"{setup.length} steps"
        return [
            f"The trace is never used: the sequence of {steps} is one chunk. Give a longer "
            "sequence or a smaller `chunk`."
        ]
    if not np.any(setup.data.weights[chunk:]):
        return [f"The trace is never used: only the first chunk of {chunk} steps has a loss."]
    traced = [name for name, c in certificates.items() if c.kind in ("traced", "upstream")]
    if not traced:
        return [
            "The trace is never used: no parameter reaches the loss through a hidden state, so "
            "this model has no recurrence to learn."
        ]
    if all(
        (parameters[name].past or 0.0) <= setup.tolerance for name in traced if name in parameters
    ):
        return [
            "The trace is never used: no gradient comes from before the chunk of the loss. The "
            "states may be detached or reset at every step."
        ]
    return []
