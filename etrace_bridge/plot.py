"""The compiled graph as a picture: parameters, contacts, hidden groups, and the cuts in red."""

from __future__ import annotations

from os import PathLike
from typing import Any

from etrace_bridge._errors import BridgeError, InputError
from etrace_bridge.compiler.diagnostics import show_path
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.compiler.hidden_group import HiddenGroup

_ROW = 0.62
_COLUMNS = {"parameter": 0.0, "contact": 5.2, "group": 8.4}
_WIDTHS = {"parameter": 4.7, "contact": 2.3, "group": 4.2}
_LETTERS = {"parameter": 35, "contact": 20, "group": 34}  # that fit into a box, beside its note
_LONGEST_REASON = 46
_COLOURS = {"parameter": "#e8f0fb", "contact": "#f5f5f5", "group": "#e9f6ec"}


def plot_graph(graph: ETraceGraph, path: str | PathLike | None = None) -> Any:
    """Draw a compiled graph.

    Parameters stand on the left, the contacts through which they meet data in the middle, hidden
    groups on the right, all in the order of the step. A red arrow is credit that traces do not
    follow. Names that are too long lose their middle.

    Args:
        graph: the graph.
        path: where to save the picture; the ending (`.svg`, `.png`, `.pdf`) says as what. None to
            leave that to the caller.

    Returns:
        The matplotlib figure.
    """
    parameters = list(graph.certificate().values())
    contacts = _merged_contacts(graph)
    rows = max(len(parameters), 2 * len(graph.hidden_groups), 3)
    figure = _new_figure((15.0, _ROW * rows + 1.0))
    axes = figure.subplots()
    axes.set_xlim(-0.2, 15.9)
    axes.set_ylim(-0.3, rows + 0.5)
    axes.axis("off")
    for title, key in (
        ("parameters", "parameter"),
        ("contacts", "contact"),
        ("hidden groups", "group"),
    ):
        axes.text(_COLUMNS[key], rows + 0.1, title, fontsize=11, weight="bold", va="bottom")
    height = {c.path: rows - 0.5 - n * rows / len(parameters) for n, c in enumerate(parameters)}
    for certificate in parameters:
        mark = (
            "exact"
            if certificate.exact
            else certificate.kind
            if certificate.kind != "traced"
            else "approximate"
        )
        edge = "#3c8d5a" if certificate.exact else "#c08a00"
        _box(axes, "parameter", height[certificate.path], show_path(certificate.path), mark, edge)
    fed: dict[int, list[float]] = {}
    lines = []
    for (paths, kind, groups), count in contacts.items():
        y = sum(height[p] for p in paths) / len(paths)
        _box(axes, "contact", y, kind, f"{count} gates" if count > 1 else "")
        for p in paths:
            _arrow(axes, _right("parameter", height[p]), (_COLUMNS["contact"], y), "#8a8a8a")
        for g in groups:
            fed.setdefault(g, []).append(y)
            lines.append((y, g))
    at = _group_heights(graph, fed, rows)
    for y, g in lines:
        _arrow(axes, _right("contact", y), (_COLUMNS["group"], at[g]), "#3c8d5a")
    for group in graph.hidden_groups:
        shape = "×".join(map(str, group.varshape))
        _box(axes, "group", at[group.index], _group_name(group), shape)
    _draw_cuts(axes, graph, at)
    if path is not None:
        try:
            figure.savefig(path, bbox_inches="tight", dpi=130)
        except (OSError, ValueError) as error:
            raise InputError(f"Cannot save the picture as `{path}`: {error}.") from error
    return figure


def _merged_contacts(graph: ETraceGraph) -> dict[tuple, int]:
    """(parameters, kind, groups) -> how many contacts; the gates of a fused product are one box."""
    merged: dict[tuple, int] = {}
    for relation in graph.hidden_param_op_relations:
        kind = "element-wise" if relation.x_var is None else relation.primitive.name
        paths = tuple(dict.fromkeys(relation.trainable_paths.values()))
        key = (paths, kind, tuple(g.index for g in relation.hidden_groups))
        merged[key] = merged.get(key, 0) + 1
    return merged


def _group_heights(
    graph: ETraceGraph, fed: dict[int, list[float]], rows: float
) -> dict[int, float]:
    """Each group in the middle of what feeds it, top to bottom, one row apart at least."""
    at: dict[int, float] = {}
    top = rows - 0.5
    for group in graph.hidden_groups:
        wanted = sum(fed[group.index]) / len(fed[group.index]) if group.index in fed else top
        at[group.index] = min(wanted, top)
        top = at[group.index] - 1
    return at


def _draw_cuts(axes: Any, graph: ETraceGraph, at: dict[int, float]) -> None:
    """One red arrow for each pair of groups between which credit is dropped, and what stands there."""
    seen: dict[tuple[int, int], str] = {}
    for certificate in graph.certificate().values():
        for drop in certificate.drops:
            source = graph.hid_path_to_group.get(drop.source)
            into = graph.hid_path_to_group.get(drop.into)
            if source is not None and into is not None:
                seen.setdefault((source.index, into.index), drop.cut.reason.replace("`", ""))
    right = _right("group", 0)[0]
    for lane, ((source, into), reason) in enumerate(sorted(seen.items())):
        a, b = at[source], at[into]
        short = shorten(reason, _LONGEST_REASON)
        if source == into:
            x = right + 0.3
            axes.plot([right, x, x], [a + 0.12, a + 0.12, a - 0.12], color="#c62828", lw=1.3)
            _arrow(axes, (x, a - 0.12), (right, a - 0.12), "#c62828")
        else:
            x, side = right - 0.5 - 0.4 * (lane % 4), -0.2 if b < a else 0.2
            _arrow(axes, (x, a + side), (x, b - side), "#c62828")
        # On white, since long reasons reach over the arrows of other lanes.
        axes.text(
            x + 0.1,
            (a + b) / 2,
            short,
            color="#c62828",
            fontsize=7,
            va="center",
            backgroundcolor="white",
            zorder=3,
        )


def _right(kind: str, y: float) -> tuple[float, float]:
    return _COLUMNS[kind] + _WIDTHS[kind], y


def shorten(name: str, most: int) -> str:
    """A name of so many letters at most: the middle goes first, because a parameter's own name
    stands at the end.
    """
    if len(name) <= most:
        return name
    head = (most - 1) // 3
    return f"{name[:head]}…{name[len(name) - (most - 1 - head) :]}"


def _group_name(group: HiddenGroup) -> str:
    """The group's states; those of one module after that module's name if they are too long for the
    box.
    """
    modules = {path[:-1] for path in group.hidden_paths}
    if len(group.name) <= _LETTERS["group"] or len(modules) != 1:
        return group.name
    own = ", ".join(path[-1] for path in group.hidden_paths)
    return f"{shorten(show_path(modules.pop()), max(_LETTERS['group'] - len(own) - 2, 8))}: {own}"


def _box(axes: Any, kind: str, y: float, text: str, note: str = "", edge: str = "#555555") -> None:
    """A box with a text on its left and a note on its right."""
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0.02,rounding_size=0.08"
    corner = (_COLUMNS[kind], y - 0.2)
    axes.add_patch(
        FancyBboxPatch(corner, _WIDTHS[kind], 0.4, boxstyle=style, fc=_COLOURS[kind], ec=edge)
    )
    axes.text(
        _COLUMNS[kind] + 0.1,
        y,
        shorten(text, _LETTERS[kind]),
        fontsize=8.5,
        va="center",
        color="#111111",
    )
    axes.text(_right(kind, y)[0] - 0.08, y, note, fontsize=7, va="center", ha="right", color=edge)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.annotate(
        "",
        end,
        start,
        arrowprops={"arrowstyle": "->", "color": colour, "lw": 0.9, "shrinkA": 0, "shrinkB": 0},
    )


def _new_figure(size: tuple[float, float]) -> Any:
    """A figure that no window of pyplot holds: notebooks show it, and nothing has to close it."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BridgeError(
            "Drawing needs matplotlib. Install it with `pip install 'etrace-bridge[plot]'`."
        ) from error
    return Figure(figsize=size)
