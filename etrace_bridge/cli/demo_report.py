"""The demo's report: one HTML file that contains its pictures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.plot import plot_graph


def write_report(
    folder: Path,
    graph: ETraceGraph,
    comparison: Any,
    memory: dict[int, tuple[int, int]],
    stream: tuple[str, dict[str, np.ndarray]],
    table: tuple[Sequence[Sequence[str]], str],
    closing: str,
) -> Path:
    """Write the report.

    Args:
        folder: where it goes.
        graph: the compiled graph.
        comparison: what `check_gradients` returned.
        memory: bytes of the trace and of what torch saves, by number of steps.
        stream: what the task is; by name, the share of right answers along the stream.
        table: header and rows of the results, and what its columns mean.
        closing: how to go on.

    Returns:
        The report's path.
    """
    plot_graph(graph, folder / "graph.svg")
    picture = (folder / "graph.svg").read_text(encoding="utf-8")
    (task, curves), ((header, *cells), caption) = stream, table
    rows = "".join(_html_row(row, "td") for row in cells)
    body = [
        "<h1>A torch GRU, trained online</h1>",
        f"<h2>Memory against the length of the sequence</h2>{_memory_picture(memory)}",
        f"<h2>An endless stream</h2><p>{task} The GRU was trained several times from the same "
        "weights: online by D-RTRL, and by torch's backpropagation through a window of the last "
        f"samples.</p>{_stream_picture(curves)}"
        f"<table>{_html_row(header, 'th')}{rows}</table><p><small>{caption}</small></p>",
        f"<h2>Gradients next to torch BPTT</h2><pre>{html.escape(str(comparison))}</pre>",
        "<h2>What the compiler "
        f"read</h2>{picture[picture.index('<svg') :]}<pre>{html.escape(graph.report())}</pre>",
        f"<h2>Now your model</h2><pre>{html.escape(closing)}</pre>",
    ]
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 "
        "1em;color:#1a1a1a;background:#fff}pre{background:#f6f6f6;padding:1em;overflow-x:auto;font-size:12px}td,th{padding:.2em "
        "1.2em .2em 0;text-align:left;border-bottom:1px solid "
        "#ddd}svg,img{max-width:100%;height:auto}"
    )
    page = folder / "report.html"
    page.write_text(
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>etrace_bridge demo</title>'
        f"<style>{style}</style></head><body>{''.join(body)}</body></html>",
        encoding="utf-8",
    )
    return page


def _html_row(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def _memory_picture(memory: dict[int, tuple[int, int]]) -> str:
    figure, axes = _new_figure()
    for n, name in enumerate(("online: the trace", "torch BPTT: saved for backward")):
        axes.loglog(list(memory), [sizes[n] / 1e6 for sizes in memory.values()], "o-", label=name)
    axes.set(xlabel="steps", ylabel="MB")
    return _as_image(figure, axes, "memory against steps")


def _stream_picture(curves: dict[str, np.ndarray]) -> str:
    figure, axes = _new_figure()
    for name, curve in curves.items():
        axes.plot(curve, label=name)
    axes.set(xlabel="question", ylabel="right answers", ylim=(0.3, 1.05))
    return _as_image(figure, axes, "right answers along the stream")


def _new_figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.2))
    return figure, figure.subplots()


def _as_image(figure: Any, axes: Any, title: str) -> str:
    axes.legend()
    axes.grid(alpha=0.3)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
    return f'<img alt="{title}" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'
