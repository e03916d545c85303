"""The graph of every model in the zoo equals an expectation written by hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from etrace_bridge.compiler.diagnostics import DiagnosticKind, show_path
from expected_graphs import EXPECTED
from strict import promotion

CONTACTS = {
    "dot_general": "product",
    "conv_general_dilated": "convolution",
    "gather": "lookup",
    "dynamic_slice": "lookup",
    "custom_vjp_call": "lookup",
}
TOLD_ELSEWHERE = {
    DiagnosticKind.RELATION_INCLUDED,
    DiagnosticKind.CUT,
    DiagnosticKind.NON_TEMPORAL,
    DiagnosticKind.UPSTREAM,
    DiagnosticKind.UNUSED_PARAMETER,
}


# What is written
# ----------------------------------------------------------------------------------------------------


def written_lines(text: str) -> list[str]:
    """The lines of an expectation; one line per parameter, its drops one by one."""
    lines = [
        line for line in text.strip().replace("\n  ", " ").splitlines() if not line.startswith("#")
    ]
    expanded = []
    for line in lines:
        if line.split()[0] in ("group", "cut", "note", "bias", "elementwise", *CONTACTS.values()):
            expanded.append(line)
            continue
        names, verdict = line.split(": ")
        kind, _, drops = verdict.partition("drops ")
        for name in names.split(", "):
            expanded.append(
                f"{name}: {kind}" + (f"drops {expand_drops(name, drops)}" if drops else "")
            )
    return expanded


def expand_drops(parameter: str, text: str) -> str:
    """`h > product u > h, c` as `h > product u > c; h > product u > h`."""
    pieces = set()
    for drop in text.split(";"):
        source, cut, into = drop.strip().split(" > ")
        pieces.update(
            f"{parameter if source == 'itself' else source} > {cut} > {state}"
            for state in into.split(", ")
        )
    return "; ".join(sorted(pieces))


def written_formulas(text: str) -> list[str]:
    """The formulas of the weights that meet data."""
    contacts = [line for line in written_lines(text) if " -> " in line]
    return [line.split(" -> ")[0].split(" ", 1)[1] for line in contacts]


# What was found
# -----------------------------------------------------------------------------------------------------


def found_lines(graph, formulas: list[str]) -> Iterator[str]:
    """A graph in the words of the expectations."""
    for group in graph.hidden_groups:
        packed = f" x {group.num_state}" if group.num_state != len(group.hidden_paths) else ""
        yield f"group {names(group.hidden_paths)} {group.varshape}{packed}"
    yield from (
        contact_line(graph, relation, formulas) for relation in graph.hidden_param_op_relations
    )
    for record in graph.explain(kind="cut"):
        sources = (*record.context["from"], *record.context["parameters"])
        yield f"cut {names(sources)} > {cut_words(record.context['cut'])} > {names(record.context['into'])}"
    for path, c in graph.certificate().items():
        drops = sorted(
            {f"{show_path(d.source)} > {cut_words(d.cut)} > {show_path(d.into)}" for d in c.drops}
        )
        if c.kind in ("traced", "upstream"):
            yield f"{show_path(path)}: {c.kind}, {'exact' if c.exact else 'drops ' + '; '.join(drops)}"
        else:
            yield f"{show_path(path)}: {c.kind}" + ("" if c.exact else " but not exact")
    for record in graph.diagnostics:
        if record.kind not in TOLD_ELSEWHERE:
            about = names([record.weight_path] if record.weight_path else record.hidden_paths)
            yield f"note {record.kind.value} {about}".rstrip()


def describe(graph) -> str:
    """A graph in a few lines, in the compiler's own order."""
    return "\n".join(found_lines(graph, []))


def names(paths) -> str:
    return ", ".join(show_path(p) for p in paths)


def cut_words(cut) -> str:
    if cut.weights:
        return f"product {names(cut.weights)}"
    endings = {
        "a state that is not a HiddenState": "no HiddenState",
        "feeds many positions": f"{cut.primitive} feeds many",
        "joins a weight with data in no known way": f"{cut.primitive} unknown",
        "spreads positions": f"{cut.primitive} spreads",
        "moves positions": f"{cut.primitive} moves",
        "mixes positions": f"{cut.primitive} mixes",
    }
    return next(words for ending, words in endings.items() if cut.reason.endswith(ending))


def contact_line(graph, relation, formulas: list[str]) -> str:
    key = next(iter(relation.trainable_paths))
    kind = (
        CONTACTS[relation.primitive.name]
        if relation.x_var is not None
        else "bias"
        if key == "bias"
        else "elementwise"
    )
    fed = [
        [p for p in relation.connected_hidden_paths if p in g.hidden_paths]
        for g in relation.hidden_groups
    ]
    shape = relation.y_var.aval.shape
    one_a_position = all(np.prod(shape) == np.prod(g.varshape) for g in relation.hidden_groups)
    states = " and ".join(map(names, fed)) + ("" if one_a_position else f" as {shape}")
    return f"{kind} {formula_of(graph, relation, formulas)} -> {states}"


def formula_of(graph, relation, formulas: list[str]) -> str:
    """The written formula that has the value of the relation's weight; how the compiler makes it,
    if none has.
    """
    params = {
        p: s.value
        for p, s in graph.module_info.retrieved_model_states.items()
        if p in graph.module_info.weight_path_to_invars
    }
    value = weight_value(graph, relation, params)
    for formula in formulas:
        with promotion(implicit=True):
            expected = eval(formula, {"jax": jax, "jnp": jnp, "np": np, **namespace(params)})
        if np.shape(expected) == value.shape and np.allclose(expected, value, rtol=1e-6):
            return formula
    return f"`{relation.weight_view}` {value.shape}"


def weight_value(graph, relation, params) -> np.ndarray:
    """The weight view at the parameters' values; of a fused product, the gate's part."""
    minfo = graph.module_info
    env = dict(zip(minfo.jaxpr.constvars, minfo.closed_jaxpr.consts, strict=True))
    for path, leaves in minfo.weight_path_to_invars.items():
        env.update(zip(leaves, jax.tree.leaves(params[path]), strict=True))
    value = np.asarray(relation.weight_view(env))
    contact = graph.structure.use.contacts[relation.contact_index]
    part = next(p for p in contact.parts if p.var is relation.y_var)
    if not part.letter:
        return value
    return np.take(
        value,
        np.arange(part.start, part.start + part.form.sizes[part.letter]),
        contact.form.view.index(part.letter),
    )


def namespace(params) -> dict:
    """Parameters by their dotted names: `cell.Wh.weight`."""
    top = SimpleNamespace()
    for path, value in params.items():
        at = top
        for key in path[:-1]:
            at = at.__dict__.setdefault(key, SimpleNamespace())
        setattr(at, path[-1], value)
    return vars(top)


def test_every_model_has_an_expectation():
    assert sorted(EXPECTED) == sorted(models.ZOO)


@pytest.mark.parametrize("name", list(models.ZOO))
def test_graph(name):
    written = written_lines(EXPECTED[name])
    found = found_lines(models.graph_of(name), written_formulas(EXPECTED[name]))
    assert sorted(found) == sorted(written)
