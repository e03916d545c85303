"""The compiled graph as one HTML page to click through: a parameter's way into the states, its
cuts, module and source lines.
"""

from __future__ import annotations

import json
from html import escape
from os import PathLike
from pathlib import Path as FilePath
from typing import Any

from etrace_bridge._errors import InputError
from etrace_bridge._jax_compat import module_scope
from etrace_bridge.compiler.certificate import ParameterCertificate
from etrace_bridge.compiler.diagnostics import Path, show_path
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.compiler.records import contact_name
from etrace_bridge.compiler.source_line import source_line

_ROW, _TOP = 34, 44
_X = {"parameter": 10, "contact": 420, "group": 640}
_WIDTH = {"parameter": 330, "contact": 150, "group": 330}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5em auto; max-width: 84em; padding: 0 1em; color: #1a1a1a; background: #fff; }
main { display: flex; flex-wrap: wrap; gap: 1.5em; align-items: flex-start; } svg { flex: 2 1 640px; max-width: 1000px; height: auto; }
aside { flex: 1 1 300px; border-left: 3px solid #ccd; padding-left: 1em; position: sticky; top: 1em; overflow-wrap: anywhere; }
text { font-size: 13px; dominant-baseline: middle; } text.note { font-size: 11px; fill: #666; } text.head { font-weight: 600; }
rect { rx: 5; stroke: #888; } .parameter rect { fill: #e8f0fb; } .contact rect { fill: #f5f5f5; } .group rect { fill: #e9f6ec; }
.parameter { cursor: pointer; } .parameter:focus { outline: none; } .parameter:focus rect, .parameter:hover rect { stroke-width: 2.5; }
.exact rect { stroke: #1b7837; } .approximate rect { stroke: #c08a00; } .unused rect { stroke: #999; }
.edge { stroke: #9aa; fill: none; } .cut { stroke: #c62828; fill: none; stroke-dasharray: 5 3; }
.picked .node, .picked .edge, .picked .cut { opacity: .18; } .picked .node.on, .picked .edge.on, .picked .cut.on { opacity: 1; }
.on rect { stroke-width: 2.5; } .edge.on { stroke: #1b7837; stroke-width: 2; } .cut.on { stroke-width: 2.5; }
dt { font-weight: 600; margin-top: .6em; } dd { margin: 0 0 .35em; } code { background: #f2f2f2; padding: 0 .25em; }
"""
_SCRIPT = """
const facts = JSON.parse(document.getElementById("facts").textContent);
const svg = document.querySelector("svg"), panel = document.getElementById("panel");
const start = panel.innerHTML;
function add(list, term, lines) {
  if (!lines.length) return;
  const dt = document.createElement("dt"); dt.textContent = term; list.append(dt);
  for (const line of lines) { const dd = document.createElement("dd"); dd.textContent = line; list.append(dd); }
}
function pick(name) {
  svg.querySelectorAll(".on").forEach(e => e.classList.remove("on"));
  const own = facts[name];
  svg.classList.toggle("picked", Boolean(own));
  if (!own) { panel.innerHTML = start; return; }
  own.on.forEach(id => document.getElementById(id).classList.add("on"));
  const title = document.createElement("h2"), list = document.createElement("dl");
  title.textContent = name;
  for (const [term, lines] of own.facts) add(list, term, lines);
  panel.replaceChildren(title, list);
}
svg.querySelectorAll(".parameter").forEach(node => {
  const choose = event => { event.stopPropagation(); pick(node.dataset.name); };
  node.addEventListener("click", choose);
  node.addEventListener("keydown", event => { if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(event); } });
});
svg.addEventListener("click", () => pick(null));
if (location.hash) pick(decodeURIComponent(location.hash.slice(1)));
"""


def explore_graph(graph: ETraceGraph, path: str | PathLike) -> FilePath:
    """Write a compiled graph as an HTML page that needs nothing else.

    Click a parameter (or choose it with Tab and Enter, or open the page with `#name`) to see its
    way into the hidden states, what is cut off and where, its module and the source lines that use
    it.

    Args:
        graph: the graph.
        path: where to write the page.

    Returns:
        The path of the page.
    """
    drawn, facts = _Drawing(graph), {}
    for certificate in graph.certificate().values():
        facts[show_path(certificate.path)] = drawn.facts(certificate)
    data = json.dumps(facts).replace("</", "<\\/")  # a name must not end the script
    title = "What the compiler read"
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><main>{drawn.svg()}<aside id='panel'><p>Click a parameter. Green arrows are traces; red ones are credit "
        "that traces do not follow.</p></aside></main>"
        f'<script type="application/json" id="facts">{data}</script><script>{_SCRIPT}</script></body></html>\n'
    )
    target = FilePath(path)
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(f"Cannot write `{target}`: {error.strerror}.") from error
    return target


class _Drawing:
    """Boxes and arrows of a graph, with an id each."""

    def __init__(self, graph: ETraceGraph) -> None:
        self.graph = graph
        self.parameters = list(graph.certificate().values())
        # (parameters, kind, groups) -> contacts: the gates of a product are one box
        self.contacts: dict[tuple, list[Any]] = {}
        fed: dict[int, set[int]] = {}
        for leg in graph.structure.legs:
            fed.setdefault(leg.contact.index, set()).add(leg.group)
        for contact in graph.structure.use.contacts:
            key = (
                tuple(dict.fromkeys(contact.view.paths)),
                contact_name(contact),
                tuple(sorted(fed.get(contact.index, ()))),
            )
            self.contacts.setdefault(key, []).append(contact)
        self.keys = list(self.contacts)
        self.cuts: dict[tuple[int, int], list[Any]] = {}
        for certificate in self.parameters:
            for drop in certificate.drops:
                source = graph.hid_path_to_group.get(drop.source)
                into = graph.hid_path_to_group.get(drop.into)
                if source is not None and into is not None:
                    self.cuts.setdefault((source.index, into.index), []).append(drop)
        self.cut_keys = list(self.cuts)
        most = max(len(self.parameters), len(self.keys), 2 * len(graph.hidden_groups), 3)
        self.height = _TOP + most * _ROW + 10
        self.at = {kind: _spread(count, most) for kind, count in self._counts().items()}

    def _counts(self) -> dict[str, int]:
        return {
            "parameter": len(self.parameters),
            "contact": len(self.keys),
            "group": len(self.graph.hidden_groups),
        }

    def facts(self, certificate: ParameterCertificate) -> dict[str, Any]:
        """What is lit and what is said when the parameter is chosen."""
        path, graph = certificate.path, self.graph
        own = [n for n, (paths, _, _) in enumerate(self.keys) if path in paths]
        number = self.parameters.index(certificate)
        on = [
            f"parameter-{number}",
            *(f"contact-{n}" for n in own),
            *(f"in-{number}-{n}" for n in own),
        ]
        on += [f"out-{n}-{g}" for n in own for g in self.keys[n][2]]
        on += [f"group-{g}" for g in certificate.groups]
        dropped = set(map(id, certificate.drops))
        on += [
            f"cut-{n}"
            for n, key in enumerate(self.cut_keys)
            if any(id(d) in dropped for d in self.cuts[key])
        ]
        contacts = [c for n in own for c in self.contacts[self.keys[n]]]
        groups = [f"{g}: {graph.hidden_groups[g].name}" for g in certificate.groups]
        said = [
            ("gradient under D-RTRL", [_verdict(certificate)]),
            ("path", [" → ".join((show_path(path), kind, *(graph.hidden_groups[g].name for g in to))) for _, kind, to in map(self.keys.__getitem__, own)]),
            ("module", _unique(module_scope(c.eqn) for c in contacts) or _owner(path)),
            ("source line", _unique(source_line(c.eqn) for c in contacts) or ["not known: the equation comes from a library's own code"]),
            ("hidden groups", groups),
            ("cuts", _cuts(certificate)),
        ]  # fmt: skip
        return {"on": on, "facts": [[term, lines] for term, lines in said]}

    def svg(self) -> str:
        """The picture."""
        parts = [
            f'<text class="head" x="{_X[kind]}" y="20">{title}</text>'
            for kind, title in _TITLES.items()
        ]
        parts += self._arrows()
        for n, certificate in enumerate(self.parameters):
            parts.append(
                self._box(
                    "parameter",
                    n,
                    show_path(certificate.path),
                    _kind(certificate),
                    _kind(certificate),
                )
            )
        for n, key in enumerate(self.keys):
            count = len(self.contacts[key])
            parts.append(self._box("contact", n, key[1], f"× {count}" if count > 1 else ""))
        for n, group in enumerate(self.graph.hidden_groups):
            parts.append(self._box("group", n, group.name, "×".join(map(str, group.varshape))))
        return f'<svg viewBox="0 0 1080 {self.height}" width="1080">{"".join(parts)}</svg>'

    def _arrows(self) -> list[str]:
        parts = []
        for n, (paths, _, groups) in enumerate(self.keys):
            for m, certificate in enumerate(self.parameters):
                if certificate.path in paths:
                    parts.append(self._curve(f"in-{m}-{n}", "parameter", m, "contact", n))
            parts += [self._curve(f"out-{n}-{g}", "contact", n, "group", g) for g in groups]
        right = _X["group"] + _WIDTH["group"]
        for n, (source, into) in enumerate(self.cut_keys):
            a, b = self.at["group"][source] - 6, self.at["group"][into] + 6
            reason = escape(self.cuts[source, into][0].cut.reason.replace("`", ""))
            bend = right + 40 + 12 * (n % 4)
            curve = f"M {right} {a} C {bend} {a}, {bend} {b}, {right} {b}"
            parts.append(
                f'<path class="cut" id="cut-{n}" d="{curve}"><title>{reason}</title></path>'
            )
        return parts

    def _curve(self, name: str, kind: str, n: int, to: str, m: int) -> str:
        x, y, end, into = _X[kind] + _WIDTH[kind], self.at[kind][n], _X[to], self.at[to][m]
        middle = (x + end) / 2
        return f'<path class="edge" id="{name}" d="M {x} {y} C {middle} {y}, {middle} {into}, {end} {into}"/>'

    def _box(self, kind: str, n: int, text: str, note: str, more: str = "") -> str:
        x, y, width = _X[kind], self.at[kind][n], _WIDTH[kind]
        shown = (
            text if len(text) <= width // 8 else f"{text[: width // 24]}…{text[-(width // 12) :]}"
        )
        chosen = (
            f' tabindex="0" role="button" data-name="{escape(text)}"' if kind == "parameter" else ""
        )
        return (
            f'<g class="node {kind} {more}" id="{kind}-{n}"{chosen}><title>{escape(text)}</title>'
            f'<rect x="{x}" y="{y - 12}" width="{width}" height="24"/><text x="{x + 8}" y="{y}">{escape(shown)}</text>'
            f'<text class="note" x="{x + width - 8}" y="{y}" text-anchor="end">{escape(note)}</text></g>'
        )


_TITLES = {"parameter": "parameters", "contact": "contacts", "group": "hidden groups"}


def _spread(count: int, rows: int) -> list[float]:
    return [_TOP + _ROW * (n + 0.5) * rows / count for n in range(count)]


def _kind(certificate: ParameterCertificate) -> str:
    if certificate.kind == "unused":
        return "unused"
    return "exact" if certificate.exact else "approximate"


def _cuts(certificate: ParameterCertificate) -> list[str]:
    return _unique(str(drop).replace("`", "") for drop in certificate.drops)


def _verdict(certificate: ParameterCertificate) -> str:
    if certificate.drops:
        count = len(_cuts(certificate))
        return f"approximate: credit through {count} cut{'s' if count > 1 else ''} is dropped"
    return f"{_kind(certificate)}: {certificate.reason}"


def _unique(texts: Any) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def _owner(path: Path) -> list[str]:
    """The module that holds a parameter; the model itself where the name has no dot."""
    return [show_path(path[:-1]) or "the model itself"]
