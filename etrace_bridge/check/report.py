"""What a gradient check found: one row per parameter, a verdict, and everything that makes the
comparison empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge.check.expectation import (
    AS_EXPECTED,
    EXACT,
    MISMATCH,
    NONE,
    START,
    START_ONLY,
    ZERO,
    Promise,
)
from etrace_bridge.check.html import render_page
from etrace_bridge.check.plot import draw_report
from etrace_bridge.check.stepwise import StepCheck
from etrace_bridge.check.text import render_report, report_html, short

TORCH_BPTT = "torch BPTT"
JAX_GRAD = "jax.grad through time"


@dataclass(frozen=True)
class ParameterReport:
    """One parameter's online gradient next to torch's.

    Attributes:
        name: the torch name.
        cosine: cosine of the angle between the two gradients; NaN if one of them is zero.
        relative_error: norm of the difference over the norm of torch's gradient.
        norm_ratio: norm of the online gradient over that of torch's.
        sign_agreement: share of elements with the same sign, among those where torch's is not zero.
        max_difference: largest absolute difference.
        max_index: where it is.
        found: the online gradient there.
        expected: torch's gradient there.
        norm: norm of torch's gradient.
        past: share of torch's gradient that comes from before the chunk of the loss; None if it was
            not measured.
        expectation: what the rule promised, and why.
        verdict: what came of it.
        tolerance: relative error that counts as equal.
        online_gradient: the rule's gradient.
        torch_gradient: torch's.
    """

    name: str
    cosine: float
    relative_error: float
    norm_ratio: float
    sign_agreement: float
    max_difference: float
    max_index: tuple[int, ...]
    found: float
    expected: float
    norm: float
    past: float | None
    expectation: Promise
    verdict: str
    tolerance: float
    online_gradient: np.ndarray = field(repr=False, compare=False)
    torch_gradient: np.ndarray = field(repr=False, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the gradient is what was promised, and there was one to compare."""
        return self.verdict in AS_EXPECTED.values()

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.torch_gradient.shape

    def mismatch(self, rule: str, reference: str) -> str:
        """The difference in the words of `torch.testing.assert_close`."""
        difference = np.abs(self.online_gradient - self.torch_gradient)
        size = max(difference.size, 1)
        allowed = self.tolerance * self.norm / math.sqrt(size)
        wrong = int(np.count_nonzero(~(difference <= allowed)))
        at = f"index {self.max_index}" if self.max_index else "the only element"
        lines = [
            f"The gradient of `{self.name}` is not close to {short(reference)}'s, though it is "
            f"expected to be {self.expectation.kind}: {self.expectation.reason}.",
            "",
            f"Mismatched elements: {wrong} / {size} ({100 * wrong / size:.1f}%)",
            f"Relative error of the whole gradient: {self.relative_error:.6g} (up to "
            f"{self.tolerance:g} allowed)",
            f"Greatest absolute difference: {self.max_difference:.6g} at {at} (up to {allowed:.3g} "
            "allowed)",
            f"  {rule}: {self.found!r}",
            f"  {reference}: {self.expected!r}",
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        numbers = (
            "cosine",
            "relative_error",
            "norm_ratio",
            "sign_agreement",
            "max_difference",
            "found",
            "expected",
            "norm",
            "past",
        )
        return {
            "name": self.name,
            "shape": list(self.shape),
            **{key: _plain(getattr(self, key)) for key in numbers},
            "max_index": list(self.max_index),
            "expectation": self.expectation.kind,
            "reason": self.expectation.reason,
            "verdict": self.verdict,
            "ok": self.ok,
        }


def compare(
    name: str,
    online: np.ndarray,
    reference: np.ndarray,
    expectation: Promise,
    tolerance: float,
    floor: float,
    past: float | None,
    zero_is_fine: bool,
) -> ParameterReport:
    """Compares one parameter's gradients.

    Args:
        name: the torch name.
        online: the rule's gradient.
        reference: torch's.
        expectation: what was promised.
        tolerance: relative error that counts as equal.
        floor: norm below which a gradient is rounding error on the scale of the model's gradients.
        past: share of the gradient from before the chunk.
        zero_is_fine: the user expects torch's gradient to be zero, or none to be computed.
    """
    difference = np.abs(online - reference)
    norm, own, error = (
        float(np.linalg.norm(x.reshape(-1))) for x in (reference, online, difference)
    )
    place = (
        int(np.argmax(np.where(np.isnan(difference), np.inf, difference))) if difference.size else 0
    )
    index = (
        tuple(int(i) for i in np.unravel_index(place, difference.shape)) if difference.size else ()
    )
    parts = [np.stack((x.real, x.imag)) if np.iscomplexobj(x) else x for x in (online, reference)]
    signed = parts[1] != 0
    relative = error / norm if norm > 0 else (0.0 if error == 0 else math.inf)
    empty = norm <= floor
    if expectation.kind == NONE or empty:
        matches = error <= floor
    else:
        matches = relative <= tolerance
    if expectation is START_ONLY:
        verdict = AS_EXPECTED[NONE] if zero_is_fine else START
    elif (
        expectation.kind in (EXACT, NONE)
        and not matches
        or not (np.isfinite(own) and np.isfinite(norm))
    ):
        verdict = MISMATCH
    elif empty and expectation.kind != NONE and not zero_is_fine:
        verdict = ZERO if matches else MISMATCH
    else:
        verdict = AS_EXPECTED[EXACT if matches and expectation.kind != NONE else expectation.kind]
    return ParameterReport(
        name=name,
        cosine=float(np.vdot(online.reshape(-1), reference.reshape(-1)).real / (own * norm))
        if own and norm
        else math.nan,
        relative_error=relative,
        norm_ratio=own / norm if norm else math.nan,
        sign_agreement=float(np.mean(np.sign(parts[0][signed]) == np.sign(parts[1][signed])))
        if signed.any()
        else math.nan,
        max_difference=float(difference.max(initial=0.0)),
        max_index=index,
        found=online[index].item() if online.size else math.nan,
        expected=reference[index].item() if reference.size else math.nan,
        norm=norm,
        past=past,
        expectation=expectation,
        verdict=verdict,
        tolerance=tolerance,
        online_gradient=online,
        torch_gradient=reference,
    )


@dataclass(frozen=True)
class GradientReport:
    """A rule's gradients next to torch BPTT's, for one model and one sequence.

    Attributes:
        rule: the rule's name.
        parameters: one report a parameter, by torch name.
        problems: why the comparison shows nothing, or what else is wrong; empty for a good one.
        notes: what else one should know.
        steps: steps in the sequence.
        chunk: steps in a chunk.
        dtype: the precision of the comparison.
        tolerance: relative error that counts as equal.
        loss: the sequence's loss by the rule.
        torch_loss: the same by torch.
        seconds: time of the rule's gradients, compiled; None if it was not measured.
        torch_seconds: time of torch's forward and backward pass.
        memory: bytes of the compiled program, inputs aside; None if it was not measured.
        single_steps: what `learner.step` gives for the first steps, beside `learner.gradients`.
        reference: what the rule is compared with: `"torch BPTT"`, or for a brainstate module
            `"jax.grad through time"`. `torch_loss`, `torch_seconds` and `torch_gradient` are then
            those of `jax.grad`.
    """

    rule: str
    parameters: Mapping[str, ParameterReport]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    steps: int
    chunk: int
    dtype: str
    tolerance: float
    loss: float
    torch_loss: float
    seconds: float | None = None
    torch_seconds: float | None = None
    memory: int | None = None
    single_steps: StepCheck | None = None
    reference: str = TORCH_BPTT

    @property
    def ok(self) -> bool:
        """Whether every parameter is as promised, single steps give the same, and the comparison
        shows something.
        """
        return not self.problems and all(p.ok for p in self.parameters.values())

    def __bool__(self) -> bool:
        return self.ok

    def __getitem__(self, name: str) -> ParameterReport:
        if name not in self.parameters:
            raise InputError(
                f"There is no parameter `{name}` in this report. It has: "
                f"{', '.join(self.parameters)}."
            )
        return self.parameters[name]

    def __iter__(self) -> Iterator[ParameterReport]:
        return iter(self.parameters.values())

    def __len__(self) -> int:
        return len(self.parameters)

    def worst(self) -> ParameterReport:
        """The parameter that is furthest from torch: one that is not ok if there is one, then by
        relative error.
        """
        if not self.parameters:
            raise InputError("The report has no parameters.")
        return max(
            self,
            key=lambda p: (
                not p.ok,
                p.relative_error if math.isfinite(p.relative_error) else math.inf,
            ),
        )

    @property
    def cosine(self) -> float:
        """Cosine between all gradients of the rule and of torch, as one vector."""
        own, ref = (np.concatenate([np.ravel(x) for x in xs] or [np.zeros(0)]) for xs in (
            [p.online_gradient for p in self], [p.torch_gradient for p in self]))  # fmt: skip
        scale = float(np.linalg.norm(own) * np.linalg.norm(ref))
        return float(np.vdot(own, ref).real) / scale if scale else math.nan

    @property
    def relative_error(self) -> float:
        """Norm of the difference of all gradients over the norm of torch's."""
        norm = math.sqrt(sum(p.norm**2 for p in self))
        error = math.sqrt(
            sum(float(np.sum(np.abs(p.online_gradient - p.torch_gradient) ** 2)) for p in self)
        )
        return error / norm if norm else math.nan

    @property
    def norm_ratio(self) -> float:
        """Norm of all gradients of the rule over the norm of torch's."""
        norm = math.sqrt(sum(p.norm**2 for p in self))
        own = math.sqrt(sum(float(np.sum(np.abs(p.online_gradient) ** 2)) for p in self))
        return own / norm if norm else math.nan

    @property
    def verdict(self) -> str:
        """`"exact"`, `"as certified"` (what is inexact was announced as such), or `"NOT OK"`."""
        if not self.ok:
            return "NOT OK"
        exact = all(p.verdict in (AS_EXPECTED[EXACT], AS_EXPECTED[NONE]) for p in self)
        return "exact" if exact else "as certified"

    def mismatches(self) -> list[str]:
        """What is wrong, one paragraph each; empty if the report is ok."""
        texts = list(self.problems)
        for p in self:
            if p.verdict == MISMATCH:
                texts.append(p.mismatch(self.rule, self.reference))
            elif p.verdict == START:
                texts.append(
                    f"`{p.name}` gets no gradient: {p.expectation.reason}. If that is meant, "
                    f"freeze it (`requires_grad_(False)`) or pass `allow_zero=[{p.name!r}]`."
                )
            elif not p.ok:
                texts.append(
                    f"The gradient of `{p.name}` is zero in {short(self.reference)}, so nothing "
                    f"was compared. If that is right, pass `allow_zero=[{p.name!r}]`."
                )
        return texts

    def __str__(self) -> str:
        return render_report(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return report_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings; NaN is None."""
        keys = (
            "rule",
            "reference",
            "steps",
            "chunk",
            "dtype",
            "tolerance",
            "loss",
            "torch_loss",
            "seconds",
            "torch_seconds",
            "memory",
        )
        return {
            "ok": self.ok,
            **{key: _plain(getattr(self, key)) for key in keys},
            "cosine": _plain(self.cosine),
            "relative_error": _plain(self.relative_error),
            "norm_ratio": _plain(self.norm_ratio),
            "verdict": self.verdict,
            "single_steps": None if self.single_steps is None else self.single_steps.to_dict(),
            "problems": list(self.problems),
            "notes": list(self.notes),
            "parameters": [p.to_dict() for p in self],
        }

    def to_json(self, path: str | PathLike | None = None) -> str:
        """The report as JSON; written to `path` if there is one."""
        return write_json(self.to_dict(), path)

    def to_html(self, path: str | PathLike) -> Path:
        """Writes the report as one HTML file that needs nothing else; returns its path."""
        return write_text(render_page([self]), path)

    def plot(self, path: str | PathLike | None = None) -> Any:
        """Bars for every parameter and a scatter of the worst one; needs matplotlib.

        Args:
            path: where to save the picture (.png, .svg, .pdf); None to leave that to the caller.

        Returns:
            The matplotlib figure.
        """
        return draw_report(self, path)


def write_json(content: dict[str, Any], path: str | PathLike | None) -> str:
    """JSON text, also as a file."""
    text = json.dumps(content, indent=2, allow_nan=False)
    if path is not None:
        write_text(text + "\n", path)
    return text


def write_text(text: str, path: str | PathLike) -> Path:
    """Writes a file; a folder that is missing is the user's mistake and is named."""
    path = Path(path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot write `{path}`: {error.strerror}.") from error
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, complex):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
