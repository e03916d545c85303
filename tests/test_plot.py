"""The compiled graph as a picture."""

from __future__ import annotations

import re

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
        path = eb.plot_graph(graph, tmp_path / "graph.svg")
    text = re.sub(r"<!--.*?-->", "", path.read_text())
    for name in net.parameter_names:
        assert name in text
    for group in graph.hidden_groups:
        assert group.name in text
    assert "product with lstm.weight_hh_l0" in text and "product with lstm.weight_ih_l1" in text


def test_picture_as_png(tmp_path):
    net = eb.wrap(nn.GRU(2, 3))
    net.init_state(batch_size=2)
    graph = eb.compile_etrace_graph(net, eb.to_jax(torch.randn(2, 2)), include_hidden_perturb=False)
    path = eb.plot_graph(graph, tmp_path / "graph.png")
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5_000
