"""A gradient check as one HTML file: no scripts, no links, bars and scatter as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from etrace_bridge.check.text import (
    number,
    percent,
    rule_header,
    rule_row,
    seconds,
    short,
    size,
    small,
)

if TYPE_CHECKING:
    from etrace_bridge.check.gradient_report import GradientReport
    from etrace_bridge.check.parameter_report import ParameterReport

_MOST_POINTS = 1500
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 78em; padding: 0 1em; color: #1a1a1a; background: #fff; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; border-bottom: 2px solid #888; padding: .3em .6em; white-space: nowrap; }
td { border-bottom: 1px solid #ddd; padding: .3em .6em; vertical-align: top; }
td.n { font-variant-numeric: tabular-nums; white-space: nowrap; }
code { background: #f2f2f2; padding: 0 .25em; border-radius: 3px; }
pre { background: #f7f7f7; padding: .8em; overflow-x: auto; }
.ok { color: #1b7837; font-weight: 600; } .bad { color: #b2182b; font-weight: 600; } .mid { color: #2166ac; font-weight: 600; }
.problem { border-left: 4px solid #b2182b; background: #fdf0f0; padding: .5em 1em; margin: .6em 0; }
.bar { display: inline-block; width: 80px; height: 9px; background: #e8e8e8; margin-right: .5em; }
.bar span { display: block; height: 9px; }
.facts { color: #555; } .reason { color: #555; font-size: 12px; }
"""


def render_page(reports: Sequence[GradientReport]) -> str:
    """Render the page of one or several rules."""
    good = all(r.ok for r in reports)
    title = f"{', '.join(r.rule for r in reports)} against {reports[0].reference}"
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head><body>',
        f'<h1>{escape(title)}: <span class="{"ok" if good else "bad"}">{"ok" if good else "NOT OK"}</span></h1>',
    ]
    if len(reports) > 1:
        parts.append(_rules_table(reports))
    parts += [_section(r, len(reports) > 1) for r in reports]
    return "\n".join([*parts, "</body></html>", ""])


def _rules_table(reports: Sequence[GradientReport]) -> str:
    rows = [[escape(cell) for cell in rule_row(r)] for r in reports]
    return _table(rule_header(reports[0].reference), rows)


def _section(report: GradientReport, named: bool) -> str:
    facts = [
        f"{report.steps} steps in chunks of {report.chunk}", report.dtype, f"equal means within {report.tolerance:g}",
        f"loss {report.loss:.6g} ({short(report.reference)} {report.torch_loss:.6g})", f"cosine of all gradients {number(report.cosine, 5)}",
        f"relative error {small(report.relative_error)}",
    ]  # fmt: skip
    if report.single_steps is not None:
        facts.append(str(report.single_steps))
    if report.seconds is not None:
        facts.append(
            f"time {seconds(report.seconds)} ({short(report.reference)} "
            f"{seconds(report.torch_seconds)})"
        )
    if report.memory is not None:
        facts.append(f"memory {size(report.memory)}")
    parts = [f"<h2>{escape(report.rule)}</h2>"] if named else []
    parts.append(f'<p class="facts">{escape(" · ".join(facts))}</p>')
    parts += [f'<div class="problem">{escape(text)}</div>' for text in report.problems]
    header = (
        "parameter",
        "cosine",
        "relative error",
        "norm ratio",
        "signs",
        "largest difference",
        "past",
        "verdict",
    )
    parts.append(_table(header, [_row(p) for p in report]))
    parts += [f"<pre>{escape(text)}</pre>" for text in report.mismatches()[len(report.problems) :]]
    if len(report):
        parts.append(_scatter(report))
    parts += [f'<p class="facts">{escape(note)}</p>' for note in report.notes]
    return "\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "\n".join(
        "<tr>" + "".join(f'<td class="n">{cell}</td>' for cell in row) + "</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _row(p: ParameterReport) -> list[str]:
    kind = "bad" if not p.ok else "ok" if p.verdict == "exact" else "mid"
    where = (
        f"{small(p.max_difference)} at {p.max_index}" if p.max_index else small(p.max_difference)
    )
    reason = (
        f'<div class="reason">{escape(p.expectation.reason)}</div>'
        if p.expectation.kind != "exact" or not p.ok
        else ""
    )
    return [
        f"<code>{escape(p.name)}</code><div class='reason'>{escape(str(p.shape))}</div>",
        _bar(p.cosine, kind) + number(p.cosine, 5),
        small(p.relative_error),
        number(p.norm_ratio, 4),
        percent(p.sign_agreement),
        escape(where),
        "-" if p.past is None else percent(p.past),
        f'<span class="{kind}" style="white-space: normal">{escape(p.verdict)}</span>{reason.replace("<div", "<div style=white-space:normal", 1)}',
    ]


def _bar(share: float, kind: str) -> str:
    colour = {"ok": "#1b7837", "bad": "#b2182b", "mid": "#2166ac"}[kind]
    width = 0.0 if math.isnan(share) else 100 * min(max(share, 0.0), 1.0)
    return (
        f'<span class="bar"><span style="width: {width:.1f}%; background: {colour}"></span></span>'
    )


def _scatter(report: GradientReport, width: int = 360) -> str:
    """Draw the worst parameter, element by element."""
    worst = report.worst()
    ours, theirs = worst.online_gradient.reshape(-1).real, worst.torch_gradient.reshape(-1).real
    every = max(1, math.ceil(ours.size / _MOST_POINTS))
    low = min(float(theirs.min(initial=0)), float(ours.min(initial=0)))
    high = max(float(theirs.max(initial=0)), float(ours.max(initial=0)))
    span = (high - low) or 1.0
    if not math.isfinite(span):
        return ""
    place = lambda v: 30 + (float(v) - low) / span * (width - 50)
    points = "".join(
        f'<circle cx="{place(x):.1f}" cy="{width - place(y):.1f}" r="2"/>'
        for x, y in zip(theirs[::every], ours[::every], strict=True)
    )
    colour = "#2166ac" if worst.ok else "#b2182b"
    return (
        f'<p class="facts">Worst: <code>{escape(worst.name)}</code>, one point an element: {report.reference} to the right, {escape(report.rule)} upwards, '
        f"from {low:.3g} to {high:.3g}. On the line they are equal.</p>"
        f'<svg viewBox="0 0 {width} {width}" width="{width}" height="{width}" role="img" aria-label="scatter of {escape(worst.name)}">'
        f'<rect x="30" y="20" width="{width - 50}" height="{width - 50}" fill="none" stroke="#bbb"/>'
        f'<line x1="30" y1="{width - 30}" x2="{width - 20}" y2="20" stroke="#888" stroke-dasharray="3 3"/>'
        f'<g fill="{colour}" fill-opacity="0.6">{points}</g></svg>'
    )
