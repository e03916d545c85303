"""The graph of every model in the zoo equals an expectation written by hand."""

from __future__ import annotations

import pytest

import models
from etrace_bridge.compiler.diagnostics import DiagnosticKind, show_path
from expected_graphs import EXPECTED

TOLD_ELSEWHERE = {
    DiagnosticKind.RELATION_INCLUDED,
    DiagnosticKind.CUT,
    DiagnosticKind.NON_TEMPORAL,
    DiagnosticKind.UPSTREAM,
    DiagnosticKind.UNUSED_PARAMETER,
}


def names(paths) -> str:
    return ", ".join(show_path(p) for p in paths)


def describe(graph) -> str:
    """A graph in a few lines: groups, relations, cuts, certificates, other decisions."""
    lines = []
    for group in graph.hidden_groups:
        packed = f" x {group.num_state}" if group.num_state != len(group.hidden_paths) else ""
        lines.append(f"group {group.index}: {names(group.hidden_paths)} {group.varshape}{packed}")
    for r in graph.hidden_param_op_relations:
        steps = " > ".join(eqn.primitive.name for eqn in r.weight_view.eqns)
        view = f"{steps}({names(r.weight_view.paths)})" if steps else names(r.weight_view.paths)
        x = "" if r.x_var is None else "x, "
        keys = "/".join(r.trainable_paths)
        groups = ", ".join(str(g.index) for g in r.hidden_groups)
        lines.append(f"{r.primitive}({x}{view}) {r.y_var.aval.shape} as {keys} -> {groups}: {names(r.connected_hidden_paths)}")
    for record in graph.explain(kind="cut"):
        sources = (*record.context["from"], *record.context["parameters"])
        lines.append(f"cut: {names(sources)} > {record.context['cut'].reason} > {names(record.context['into'])}")
    for path, c in graph.certificate().items():
        drops = ", ".join(f"{show_path(d.source)} > {d.cut.primitive} > {show_path(d.into)}" for d in c.drops)
        lines.append(f"{show_path(path)}: {c.kind}, {'exact' if c.exact else f'drops {drops}'}")
    for record in graph.diagnostics:
        if record.kind not in TOLD_ELSEWHERE:
            about = names([record.weight_path] if record.weight_path else record.hidden_paths)
            lines.append(f"note: {record.kind.value} {about}".rstrip())
    return "\n".join(lines)


def test_every_model_has_an_expectation():
    assert sorted(EXPECTED) == sorted(models.ZOO)


@pytest.mark.parametrize("name", list(models.ZOO))
def test_graph(name):
    assert describe(models.graph_of(name)) == EXPECTED[name].strip()
