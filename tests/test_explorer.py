"""The HTML explorer of a graph, in headless Chromium, and objects that print as one can read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


class Cell(nn.Module):
    """A recurrent layer written out, so that its equations have a source line."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(3, 4), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[0], 4) if h is None else h
        h = torch.tanh(self.inp(x) + self.rec(h))  # the line of both products
        return h, h


class Stack(nn.Module):
    """Two of them and a readout, one parameter with a name that would end a script."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = Cell(), nn.GRUCell(4, 4)
        self.out = nn.Linear(4, 2)
        self.register_parameter("</script><b>", nn.Parameter(torch.ones(2)))

    def forward(
        self, x: Tensor, states: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        first, second = (None, None) if states is None else states
        low, first = self.lower(x, first)
        second = self.upper(low, second)
        return self.out(second) * getattr(self, "</script><b>"), (first, second)


class Normed(nn.Module):
    """Two recurrent layers with a layer norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.RNN(3, 4), nn.LayerNorm(4), nn.RNN(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)[0]))[0]


@pytest.fixture(scope="module")
def net() -> eb.BridgedModule:
    net = eb.wrap(Stack(), example_input=torch.randn(2, 3))
    net.init_state(batch_size=2)
    return net


@pytest.fixture(scope="module")
def graph(net) -> eb.ETraceGraph:
    return eb.compile_etrace_graph(net, eb.to_jax(torch.randn(2, 3)))


def dom_after(page: Path, script: str, tmp_path: Path) -> str:
    """The page's elements after a script has run in it."""
    copy = tmp_path / "clicked.html"
    copy.write_text(page.read_text().replace("</body>", f"<script>{script}</script></body>"))
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=1000",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [str(CHROMIUM), *options, "--dump-dom", copy.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_page_needs_nothing_else_and_knows_every_parameter(graph, tmp_path):
    page = eb.explore_graph(graph, tmp_path / "graph.html").read_text()
    assert not re.search(r"(src|href)=|https?://|@import", page)
    assert page.count("</script>") == 2  # a parameter's name does not end one
    for path in graph.certificate():
        assert f"parameter-{list(graph.certificate()).index(path)}" in page
    with pytest.raises(eb.InputError, match="Cannot write"):
        eb.explore_graph(graph, tmp_path / "missing" / "graph.html")


def test_as_many_cuts_are_counted_as_are_listed(tmp_path):
    """A layer norm cuts the same way twice: by its mean and by its variance."""
    net = eb.wrap(Normed())
    net.init_state(batch_size=2)
    graph = eb.compile_etrace_graph(net, eb.to_jax(torch.randn(2, 3)))
    page = eb.explore_graph(graph, tmp_path / "graph.html").read_text()
    shown = json.loads(re.search(r'id="facts">(.*?)</script>', page)[1].replace("<\\/", "</"))
    counted = 0
    for parameter in shown.values():
        facts = dict(parameter["facts"])
        if found := re.search(r"through (\d+) cut", facts["gradient under D-RTRL"][0]):
            counted += int(found[1])
            assert int(found[1]) == len(facts["cuts"])
    repeated = [len(c.drops) - len({str(d) for d in c.drops}) for c in graph.certificate().values()]
    assert counted > 4 and max(repeated) > 0


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_click_on_a_parameter_shows_its_way(graph, tmp_path):
    page = eb.explore_graph(graph, tmp_path / "graph.html")
    click = "document.querySelector('[data-name=\"lower.rec.weight\"]').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
    dom = dom_after(page, click, tmp_path)
    panel = dom[dom.index('id="panel"') : dom.index("</aside>")]
    assert "<h2>lower.rec.weight</h2>" in panel
    assert "lower.rec.weight → dot_general" in panel  # path
    assert re.search(r"<dt>cuts</dt>.*product with lower\.rec\.weight", panel)
    assert re.search(r"<dt>module</dt><dd>lower", panel)
    line = next(
        n
        for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "the line of both products" in text
    )
    assert f"test_explorer.py:{line}" in panel
    lit = set(re.findall(r'class="[^"]*\bon\b[^"]*" id="([\w-]+)"', dom))
    names = [".".join(map(str, p)) for p in graph.certificate()]
    assert f"parameter-{names.index('lower.rec.weight')}" in lit and any(
        name.startswith("cut-") for name in lit
    )
    assert f"parameter-{names.index('out.weight')}" not in lit
    assert '<svg class="picked"' in dom or 'class="picked"' in dom


def test_objects_print_as_one_can_read_them(net, graph):
    assert len(repr(graph)) < 300 and "exact" in repr(graph) and "first" not in repr(net)[:20]
    assert repr(net).startswith("BridgedModule(Stack: ") and len(repr(net)) < 200
    table = net._repr_html_()
    assert table.count("<td") == 3 * (len(net.parameter_names) + 2) and "states.0" in table
    assert "&lt;/script&gt;" in table and "</script>" not in table and "(4, 3)" in table
    html = graph._repr_html_()
    assert "lower.rec.weight" in html and "approximate: drops [1]" in html and "<b>" in html
    assert "</script><b>" not in html and "&lt;/script&gt;&lt;b&gt;" in html
    assert [repr(group) for group in graph.hidden_groups] == [
        "HiddenGroup(0: states.0 (2, 4))",
        "HiddenGroup(1: states.1 (2, 4))",
    ]
    for relation in graph.hidden_param_op_relations:
        assert relation.path[-1] in repr(relation) and "HiddenGroup(" in repr(relation)
        assert len(repr(relation)) < 200
