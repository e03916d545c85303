"""The graph as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import brainstate

from etrace_bridge._tables import html_table, text_table
from etrace_bridge.compiler.certificate import Cut, ParameterCertificate
from etrace_bridge.compiler.diagnostics import (
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
    Path,
    show_path,
)
from etrace_bridge.compiler.records import contact_name

if TYPE_CHECKING:
    from etrace_bridge.compiler.graph import ETraceGraph

_HEADER = ("parameter", "contact", "hidden group", "gradient")
_VERDICTS = {"exact": "exact", "approximate": "approximate", "none": "without gradient"}


def render_report(graph: ETraceGraph) -> str:
    """Render parameters with their gradients, hidden groups, and the cuts they refer to."""
    cuts = _numbered_cuts(graph)
    rows = _rows(graph, cuts)
    parts = [_title(rows), "", *text_table(_HEADER, rows), "", *_groups(graph)]
    if cuts:
        parts += [
            "",
            "Cuts: from -> where credit is not followed, because positions of the state mix -> "
            "into",
        ]
        parts += [f"  [{n}] {text}" for text, n in cuts.values()]
    notes = [r for r in graph.diagnostics if r.level != DiagnosticLevel.INFO and not _is_shown(r)]
    if notes:
        parts += ["", "Notes", *(f"  {r.level.value}: {r.message}" for r in notes)]
    return "\n".join(line.rstrip() for line in parts)


def render_line(graph: ETraceGraph) -> str:
    """Render the graph in one line."""
    names = ", ".join(group.name for group in graph.hidden_groups)
    title = _title(_rows(graph, _numbered_cuts(graph)))
    return f"ETraceGraph({title}; hidden groups: {names or 'none'}; `report()` has the table)"


def render_html(graph: ETraceGraph) -> str:
    """Render the parameters' table and the cuts for a notebook."""
    cuts = _numbered_cuts(graph)
    rows = _rows(graph, cuts)
    return html_table(_title(rows), _HEADER, rows, [f"[{n}] {text}" for text, n in cuts.values()])


def _rows(graph: ETraceGraph, cuts: dict) -> list[tuple[str, str, str, str]]:
    certificates = graph.certificate()
    rows = [_row(graph, c, cuts) for c in certificates.values()]
    for path, state in graph.module_info.retrieved_model_states.items():
        if isinstance(state, brainstate.ParamState) and path not in certificates:
            rows.append((show_path(path), "-", "-", "none: the step does not read it"))
    return rows


def _title(rows: Sequence[Sequence[str]]) -> str:
    words = [row[3].split(":")[0].split(" ")[0] for row in rows]
    counts = [f"{words.count(word)} {text}" for word, text in _VERDICTS.items() if word in words]
    many = "parameters" if len(rows) != 1 else "parameter"
    return f"Online gradients (D-RTRL) of {len(rows)} {many}: {', '.join(counts)}"


def _is_shown(record: CompilationRecord) -> bool:
    # The table says these, parameter by parameter.
    return record.kind in (DiagnosticKind.UPSTREAM, DiagnosticKind.UNUSED_PARAMETER)


def _row(
    graph: ETraceGraph, certificate: ParameterCertificate, cuts: dict
) -> tuple[str, str, str, str]:
    contacts = [c for c in graph.structure.use.contacts if certificate.path in c.view.paths]
    names = [contact_name(c) for c in contacts]
    counted = [f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names)]
    groups = ", ".join(f"{n}: {graph.hidden_groups[n].name}" for n in certificate.groups)
    return (
        show_path(certificate.path),
        ", ".join(counted) or "-",
        groups or "-",
        _gradient(certificate, cuts),
    )


def _gradient(certificate: ParameterCertificate, cuts: dict) -> str:
    if certificate.kind == "unused":
        return "none: no gradient can reach it"
    if certificate.kind == "direct":
        return "exact (outside the recurrence)"
    if certificate.exact:
        return "exact"
    numbers = sorted({cuts[_key(d.cut.edge, d.into)][1] for d in certificate.drops})
    dropped = f"drops {', '.join(f'[{n}]' for n in numbers)}"
    if certificate.kind == "upstream":
        return f"approximate: no trace, credit within the chunk; {dropped}"
    return f"approximate: {dropped}"


def _key(edge: tuple[int, int], into: Path) -> tuple:
    """Return the key of a cut: its edge.

    Credit lost in a state that is not a `HiddenState` is keyed by that state too.
    """
    return edge if edge[0] >= 0 else (*edge, into)


def _numbered_cuts(graph: ETraceGraph) -> dict[tuple, tuple[str, int]]:
    """Return the text and the number of each cut."""
    texts: dict[tuple, str] = {}
    for record in graph.explain(kind=DiagnosticKind.CUT):
        sources = (*record.context["from"], *record.context["parameters"])
        texts[_key(record.context["edge"], ())] = _cut_text(
            sources, record.context["cut"], record.context["into"]
        )
    for certificate in graph.certificate().values():
        for drop in certificate.drops:
            texts.setdefault(
                _key(drop.cut.edge, drop.into), _cut_text((drop.source,), drop.cut, (drop.into,))
            )
    return {key: (text, n) for n, (key, text) in enumerate(texts.items(), 1)}


def _cut_text(sources: Sequence[Path], cut: Cut, into: Sequence[Path]) -> str:
    # the folder and file are enough to find it
    short = replace(cut, line="/".join(cut.line.split("/")[-2:]))
    return f"{_names(sources)} -> {short} -> {_names(into)}"


def _names(paths: Sequence[Path], most: int = 4) -> str:
    shown = ", ".join(show_path(p) for p in paths[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"


def _groups(graph: ETraceGraph) -> list[str]:
    rows = []
    for group in graph.hidden_groups:
        for n, (leaf, state) in enumerate(zip(group.leaves, group.hidden_states, strict=True)):
            held = f"{leaf.count} states in one" if leaf.count > 1 else ""
            rows.append(
                (
                    str(group.index) if n == 0 else "",
                    show_path(leaf.path),
                    str(state.value.shape),
                    held,
                )
            )
    header = ("hidden group", "state", "shape", "packed")
    if not any(row[3] for row in rows):
        header, rows = header[:3], [row[:3] for row in rows]
    return text_table(header, rows)
