"""The report of a gradient check: one row per parameter, a verdict, and what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge.check.expectation import AS_EXPECTED, EXACT, MISMATCH, NONE, START
from etrace_bridge.check.html import render_page
from etrace_bridge.check.output_files import write_json, write_text
from etrace_bridge.check.parameter_report import ParameterReport, plain_number
from etrace_bridge.check.report_plot import draw_report
from etrace_bridge.check.stepwise import StepCheck
from etrace_bridge.check.text import render_report, report_html, short
from etrace_bridge.check.torch_reference import TORCH_BPTT


@dataclass(frozen=True)
class GradientReport:
    """A rule's gradients next to torch BPTT's, for one model and one sequence.

    Attributes:
        rule: the rule's name.
        parameters: one report per parameter, by torch name.
        problems: why the comparison shows nothing, or what else is wrong; empty for a good one.
        notes: remarks that change no verdict.
        steps: steps in the sequence.
        chunk: steps in a chunk.
        dtype: the precision of the comparison.
        tolerance: relative error that counts as equal.
        loss: the loss of the sequence in the online pass.
        torch_loss: the same loss in torch.
        seconds: time of the rule's gradients, compiled; None if it was not measured.
        torch_seconds: time of torch's forward and backward pass.
        memory: bytes of the compiled program without its inputs; None if it was not measured.
        single_steps: how `learner.step` compares with `learner.gradients` on the first steps.
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
        """Whether every parameter is as promised and nothing else is wrong.

        Single steps must give the same results, and the comparison must show something.
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
        """Return the parameter that is furthest from torch.

        Those that are not ok come first, then the relative error decides.
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
        online = _joined([p.online_gradient for p in self])
        reference = _joined([p.torch_gradient for p in self])
        scale = float(np.linalg.norm(online) * np.linalg.norm(reference))
        return float(np.vdot(online, reference).real) / scale if scale else math.nan

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
        online = math.sqrt(sum(float(np.sum(np.abs(p.online_gradient) ** 2)) for p in self))
        return online / norm if norm else math.nan

    @property
    def verdict(self) -> str:
        """`"exact"`, `"as certified"` (what is inexact was announced as such), or `"NOT OK"`."""
        if not self.ok:
            return "NOT OK"
        exact = all(p.verdict in (AS_EXPECTED[EXACT], AS_EXPECTED[NONE]) for p in self)
        return "exact" if exact else "as certified"

    def mismatches(self) -> list[str]:
        """Describe what is wrong, one paragraph each; empty if the report is ok."""
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
        """Return plain numbers and strings; NaN becomes None."""
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
            **{key: plain_number(getattr(self, key)) for key in keys},
            "cosine": plain_number(self.cosine),
            "relative_error": plain_number(self.relative_error),
            "norm_ratio": plain_number(self.norm_ratio),
            "verdict": self.verdict,
            "single_steps": None if self.single_steps is None else self.single_steps.to_dict(),
            "problems": list(self.problems),
            "notes": list(self.notes),
            "parameters": [p.to_dict() for p in self],
        }

    def to_json(self, path: str | PathLike | None = None) -> str:
        """Return the report as JSON, and write it to `path` if one is given."""
        return write_json(self.to_dict(), path)

    def to_html(self, path: str | PathLike) -> Path:
        """Write the report as one self-contained HTML file; return its path."""
        return write_text(render_page([self]), path)

    def plot(self, path: str | PathLike | None = None) -> Any:
        """Plot bars for every parameter and a scatter of the worst one; needs matplotlib.

        Args:
            path: where to save the picture (.png, .svg, .pdf); None to save nothing.

        Returns:
            The matplotlib figure.
        """
        return draw_report(self, path)


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    """Join arrays into one vector."""
    return np.concatenate([np.ravel(x) for x in arrays] or [np.zeros(0)])
