"""Several rules on one model: fidelity, time and memory side by side, and which to take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from etrace_bridge._bytes import parse_bytes
from etrace_bridge._errors import InputError
from etrace_bridge.check.gradient_report import GradientReport
from etrace_bridge.check.html import render_page
from etrace_bridge.check.output_files import write_json, write_text
from etrace_bridge.check.text import comparison_html, render_comparison, size


@dataclass(frozen=True)
class RuleComparison:
    """The reports of several rules on one model and one sequence.

    Attributes:
        reports: one per rule, in the order requested.
    """

    reports: tuple[GradientReport, ...]

    @property
    def ok(self) -> bool:
        """Whether every report is."""
        return all(r.ok for r in self.reports)

    def __bool__(self) -> bool:
        return self.ok

    def __getitem__(self, rule: str) -> GradientReport:
        for report in self.reports:
            if report.rule == rule:
                return report
        raise InputError(
            f"There is no rule `{rule}` in this comparison. It has: "
            f"{', '.join(r.rule for r in self.reports)}."
        )

    def __iter__(self) -> Iterator[GradientReport]:
        return iter(self.reports)

    def __len__(self) -> int:
        return len(self.reports)

    @property
    def steps(self) -> int:
        """Steps in the sequence."""
        return self.reports[0].steps

    @property
    def dtype(self) -> str:
        """The precision of the comparison."""
        return self.reports[0].dtype

    @property
    def reference(self) -> str:
        """What the rules are compared with."""
        return self.reports[0].reference

    @property
    def torch_seconds(self) -> float | None:
        """Time of torch's forward and backward pass."""
        return self.reports[0].torch_seconds

    def recommend(self, budget: int | float | str) -> GradientReport:
        """Return the most faithful rule, as measured, whose program fits into a memory budget.

        Of equally faithful rules it is the one with the smallest program.

        Args:
            budget: bytes, or text such as `"500MB"`.
        """
        limit = parse_bytes(budget)
        fitting = [r for r in self.reports if r.ok and r.memory is not None and r.memory <= limit]
        if not fitting:
            sizes = ", ".join(
                f"{r.rule} {size(r.memory)}{'' if r.ok else ' (not ok)'}" for r in self.reports
            )
            raise InputError(
                f"No rule of this comparison is ok and fits into {size(limit)}: {sizes}. Raise the "
                "budget, or use a smaller batch."
            )
        return min(fitting, key=lambda r: (round(_distance(r), 6), r.memory))

    def __str__(self) -> str:
        return render_comparison(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return comparison_html(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return {"ok": self.ok, "rules": [r.to_dict() for r in self.reports]}

    def to_json(self, path: str | PathLike | None = None) -> str:
        """Return the comparison as JSON, and write it to `path` if one is given."""
        return write_json(self.to_dict(), path)

    def to_html(self, path: str | PathLike) -> Path:
        """Write the comparison as one self-contained HTML file; return its path."""
        return write_text(render_page(self.reports), path)


def _distance(report: GradientReport) -> float:
    """Return one minus the cosine between all gradients of the rule and of torch."""
    return 1 - report.cosine if math.isfinite(report.cosine) else math.inf
