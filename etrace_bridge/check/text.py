"""A gradient check as text for a terminal."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from etrace_bridge._tables import html_table, text_table

if TYPE_CHECKING:
    from etrace_bridge.check.gradient_report import GradientReport
    from etrace_bridge.check.gradients import RuleComparison
    from etrace_bridge.check.parameter_report import ParameterReport

_HEADER = (
    "parameter",
    "cosine",
    "rel. error",
    "norm ratio",
    "signs",
    "largest difference",
    "past",
    "expected",
    "verdict",
)


def short(reference: str) -> str:
    """Return the library of a reference: `torch` or `jax.grad`."""
    return reference.split()[0]


def render_report(report: GradientReport) -> str:
    """Render a headline, what is wrong, a row per parameter, and why gradients are not exact."""
    lines = [
        f"{report.rule} against {report.reference}: {report.verdict}",
        f"{report.steps} steps in chunks of {report.chunk}, {report.dtype}, equal means within "
        f"{report.tolerance:g}; loss {report.loss:.6g} ({short(report.reference)} "
        f"{report.torch_loss:.6g}); all gradients together: cosine {number(report.cosine, 5)}, relative error "
        f"{small(report.relative_error)}",
        *([] if report.single_steps is None else [str(report.single_steps)]),
        *(f"PROBLEM: {text}" for text in report.problems),
        "",
        *text_table(_HEADER, [row(p) for p in report]),
    ]
    reasons: dict[str, list[str]] = {}
    for p in report:
        if p.expectation.kind != "exact" or not p.ok:
            reasons.setdefault(f"{p.expectation.kind}: {p.expectation.reason}", []).append(p.name)
    if reasons:
        lines += ["", "Why"]
        for reason, names in reasons.items():
            lines += [f"  {', '.join(names)}", f"    {reason}"]
    for text in report.mismatches()[len(report.problems) :]:
        lines += ["", text]
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(line.rstrip() for line in lines)


def row(p: ParameterReport) -> tuple[str, ...]:
    """Return the cells of one parameter."""
    where = (
        f"{small(p.max_difference)} at {p.max_index}" if p.max_index else small(p.max_difference)
    )
    return (
        p.name, number(p.cosine, 5), small(p.relative_error), number(p.norm_ratio, 4), percent(p.sign_agreement), where,
        "-" if p.past is None else percent(p.past), p.expectation.kind, p.verdict,
    )  # fmt: skip


def rule_header(reference: str) -> tuple[str, ...]:
    """Return the columns of a table of rules."""
    return (
        "rule",
        "verdict",
        "cosine",
        "rel. error",
        "norm ratio",
        "worst parameter",
        "exact",
        "time",
        f"of {reference}",
        "memory",
    )


def render_comparison(comparison: RuleComparison) -> str:
    """Render a row per rule: fidelity, time, memory."""
    lines = [
        f"{len(comparison.reports)} rules on {comparison.steps} steps, {comparison.dtype}; "
        f"{comparison.reference} takes {seconds(comparison.torch_seconds)}",
        "",
        *text_table(rule_header(comparison.reference), [rule_row(r) for r in comparison]),
    ]
    for report in comparison:
        lines += [f"PROBLEM ({report.rule}): {text}" for text in report.problems]
        if not report.ok and not report.problems:
            lines += ["", f"{report.rule}:", *report.mismatches()]
    lines += [f"note: {note}" for note in dict.fromkeys(n for r in comparison for n in r.notes)]
    return "\n".join(line.rstrip() for line in lines)


def report_html(report: GradientReport) -> str:
    """Render the headline and the parameters' rows for a notebook."""
    title = (
        f"{report.rule} against {report.reference}: {report.verdict} (cosine "
        f"{number(report.cosine, 5)}, relative error {small(report.relative_error)}, norm ratio "
        f"{number(report.norm_ratio, 3)})"
    )
    return html_table(title, _HEADER, [row(p) for p in report], report.mismatches())


def comparison_html(comparison: RuleComparison) -> str:
    """Render a row per rule for a notebook."""
    title = f"{len(comparison.reports)} rules on {comparison.steps} steps, {comparison.dtype}"
    problems = [f"{r.rule}: {text}" for r in comparison for text in r.mismatches()]
    return html_table(
        title, rule_header(comparison.reference), [rule_row(r) for r in comparison], problems
    )


def rule_row(report: GradientReport) -> tuple[str, ...]:
    """Return the cells of one rule."""
    worst = report.worst() if len(report) else None
    exact = sum(p.verdict == "exact" for p in report)
    ratio = "-"
    if report.seconds is not None and report.torch_seconds:
        ratio = f"{report.seconds / report.torch_seconds:.2f} x"
    return (
        report.rule, report.verdict, number(report.cosine, 5), small(report.relative_error), number(report.norm_ratio, 3),
        f"{worst.name} ({number(worst.cosine, 3)})" if worst else "-", f"{exact}/{len(report)}", seconds(report.seconds), ratio,
        size(report.memory),
    )  # fmt: skip


def number(value: float, digits: int) -> str:
    """Format a number near one with so many digits after the point."""
    if not math.isfinite(value):
        return "-" if math.isnan(value) else "inf"
    return f"{value:.{digits}f}"


def small(value: float) -> str:
    """Format a number of any size."""
    if value == 0:
        return "0"
    return f"{value:.1e}" if math.isfinite(value) else ("-" if math.isnan(value) else "inf")


def percent(value: float) -> str:
    """Format a share."""
    return "-" if not math.isfinite(value) else f"{100 * value:.1f}%"


def seconds(value: float | None) -> str:
    """Format a time."""
    if value is None:
        return "-"
    return f"{1000 * value:.1f} ms" if value < 1 else f"{value:.2f} s"


def size(value: Any) -> str:
    """Format a number of bytes."""
    if value is None:
        return "-"
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value} B"
