"""The compiled graph as a picture."""

from __future__ import annotations

import itertools
import re

import snntorch
import torch
from torch import nn

import etrace_bridge as eb


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, 2)
        self.out = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0])


def test_picture_names_parameters_groups_and_cuts(tmp_path):
    net = eb.wrap(Stack())
    net.init_state(batch_size=2)
    graph = eb.compile_etrace_graph(net, eb.to_jax(torch.randn(2, 3)), include_hidden_perturb=False)
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):  # keep text as text
        eb.plot_graph(graph, tmp_path / "graph.svg")
    text = re.sub(r"<!--.*?-->", "", (tmp_path / "graph.svg").read_text())
    for name in net.parameter_names:
        assert name in text
    for group in graph.hidden_groups:
        assert group.name in text
    assert "product with lstm.weight_hh_l0" in text and "product with lstm.weight_ih_l1" in text


def test_picture_as_png(tmp_path):
    net = eb.wrap(nn.GRU(2, 3))
    net.init_state(batch_size=2)
    graph = eb.compile_etrace_graph(net, eb.to_jax(torch.randn(2, 2)), include_hidden_perturb=False)
    path = tmp_path / "graph.png"
    eb.plot_graph(graph, path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000


class Spiking(nn.Module):
    """Two recurrent spiking layers, in a module with a name that is too long for a box."""

    def __init__(self) -> None:
        super().__init__()
        self.a_module_with_a_name_that_goes_on_and_on = nn.LSTM(3, 4)
        self.fc = nn.Linear(4, 2)
        self.lif = snntorch.RLeaky(beta=0.9, linear_features=2, init_hidden=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [self.lif(self.fc(h)) for h in self.a_module_with_a_name_that_goes_on_and_on(x)[0]]
        )


def test_nothing_runs_over_its_box():
    """Long names lose their middle, and no two texts of a row overlap."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    net = eb.wrap(Spiking())
    net.init_state(batch_size=2)
    graph = eb.compile_etrace_graph(net, eb.to_jax(torch.randn(2, 3)), include_hidden_perturb=False)
    figure = eb.plot_graph(graph)
    renderer = FigureCanvasAgg(figure).get_renderer()
    texts = [t for t in figure.axes[0].texts if t.get_text()]
    boxes = [t.get_window_extent(renderer) for t in texts]
    overlapping = [
        (a.get_text(), b.get_text())
        for (a, box), (b, other) in itertools.combinations(zip(texts, boxes, strict=True), 2)
        if box.x0 < other.x1 and other.x0 < box.x1 and box.y0 < other.y1 and other.y0 < box.y1
    ]
    assert overlapping == []
    shown = [t.get_text() for t in texts]
    assert any("…" in text and text.endswith(".weight_hh_l0") for text in shown)
    heights = {t.get_text(): t.get_position()[1] for t in texts}
    # layers from top to bottom, in the order of the step
    assert heights["fc.weight"] > heights["lif.recurrent.weight"]
    red = {t.get_text() for t in texts if t.get_color() == "#c62828"}
    assert {"product with lif.recurrent.weight", "product with fc.weight"} <= red
