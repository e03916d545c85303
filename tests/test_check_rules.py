"""Several rules side by side: what they cost, which one is recommended, and that predicted bytes
are XLA's.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import etrace_bridge as eb

T, B, IN, H = 9, 4, 16, 24
RULES = ["rtrl", "d_rtrl", "pp_prop"]


class NearlyDiagonal(nn.Module):
    """Leaky units with a weak mixing, on which the order of the rules has a reason.

    `rtrl` is exact. `d_rtrl` drops only what passes through the mixing product, of the order of its
    size, 0.005. `pp_prop` carries the past as one product of two low-pass filters with one decay,
    while the units have decays from 0.2 to 0.95: a trace for each unit's own decay is just what it
    has not. Their memory falls in the same order: hidden x parameters, parameters, units.
    """

    def __init__(self, mixing: float = 0.005) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.fc, self.mix = nn.Linear(IN, H), nn.Linear(H, H, bias=False)
        self.decay = nn.Parameter(torch.linspace(0.2, 0.95, H))
        with torch.no_grad():
            for p, size in ((self.fc.weight, 0.5), (self.fc.bias, 0.5), (self.mix.weight, mixing)):
                p.copy_(size * torch.randn(p.shape, generator=generator))
        self.h: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], H) if self.h is None else self.h
        self.h = self.decay * h + self.mix(h) + torch.tanh(self.fc(x))
        return self.h


class Recurrent(nn.Module):
    """A recurrent layer of torch and a readout."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.rnn, self.out = layer, nn.Linear(H, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0])


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(T, B, IN, generator=generator), torch.randn(T, B, H, generator=generator)


@pytest.fixture(scope="module")
def comparison() -> eb.RuleComparison:
    return eb.check_gradients(NearlyDiagonal(), *data(), mse_loss, RULES)


def test_several_rules_give_a_table(comparison, tmp_path):
    assert comparison.ok and [r.rule for r in comparison] == RULES
    for report in comparison:
        assert report.seconds > 0 and report.torch_seconds > 0 and report.memory > 1000
    text = str(comparison)
    assert all(word in text for word in ("rtrl", "pp_prop", "memory", "time", "cosine"))
    assert comparison.to_html(tmp_path / "c.html").read_text().count("<h2>") == 3
    assert [r["rule"] for r in json.loads(comparison.to_json())["rules"]] == RULES
    with pytest.raises(eb.InputError, match="no rule `snap1`"):
        comparison["snap1"]


def test_the_order_of_the_rules_has_its_reason(comparison):
    exact, diagonal, factored = (comparison[name].cosine for name in RULES)
    assert exact > 1 - 1e-12
    assert 1 - 1e-3 < diagonal < 1 - 1e-7  # the mixing is dropped, and it is small
    assert 1 - factored > 10 * (1 - diagonal)
    assert (
        comparison["pp_prop"]["fc.weight"].relative_error
        > 3 * comparison["d_rtrl"]["fc.weight"].relative_error
    )
    none = eb.check_gradients(NearlyDiagonal(mixing=0.0), *data(), mse_loss, "d_rtrl")
    # with no mixing nothing is dropped: that was the reason
    assert none["fc.weight"].relative_error < 1e-12
    assert [comparison[name].memory for name in RULES] == sorted(
        (r.memory for r in comparison), reverse=True
    )


def test_comparison_recommends_within_a_budget(comparison):
    sizes = {name: comparison[name].memory for name in RULES}
    assert comparison.recommend("1GB").rule == "rtrl"
    assert comparison.recommend(sizes["rtrl"] - 1).rule == "d_rtrl"
    assert comparison.recommend(sizes["d_rtrl"] - 1).rule == "pp_prop"
    with pytest.raises(eb.InputError, match="No rule of this comparison is ok and fits into 10 B"):
        comparison.recommend(10)


def test_recommend_picks_the_most_faithful_rule_that_fits():
    model, x = NearlyDiagonal(), torch.randn(B, IN)
    best = eb.recommend(model, x, budget="100MB", rules=RULES, steps=8)
    assert best.rule == "rtrl" and best.ok and best.memory <= 100e6
    by_name = {c.rule: c for c in best.candidates}
    assert [c.rule for c in best.candidates] == RULES  # most faithful first
    assert by_name["rtrl"].cosine > 1 - 1e-6 and 1 - by_name["pp_prop"].cosine > 10 * (
        1 - by_name["d_rtrl"].cosine
    )
    assert 'Use rule="rtrl"' in str(best) and json.loads(best.to_json())["rule"] == "rtrl"
    less = eb.recommend(model, x, budget=by_name["d_rtrl"].memory, rules=RULES, steps=8)
    assert less.rule == "d_rtrl" and less.memory <= by_name["d_rtrl"].memory
    none = eb.recommend(model, x, budget=100, rules=RULES, steps=8)
    assert not none.ok and none.rule is None and "No rule fits" in str(none)
    assert all(not c.compiled for c in none.candidates)


def test_recommend_prefers_the_smaller_of_two_exact_rules():
    model = NearlyDiagonal(mixing=0.0)
    # a frozen mixing of zero: nothing is left that `d_rtrl` could drop
    model.mix.requires_grad_(False)
    best = eb.recommend(model, torch.randn(B, IN), rules=["rtrl", "d_rtrl"], steps=8)
    assert {c.cosine > 1 - 1e-6 for c in best.candidates} == {True}
    assert best.rule == "d_rtrl" and best.memory == min(c.memory for c in best.candidates)


# ---- predicted bytes


def learner_bytes(model: nn.Module, rule: str, chunk: int, xs: Tensor, ys: Tensor) -> int:
    """XLA's count for the largest program that a learner loaded while it computed gradients."""
    client = jax.devices()[0].client
    before = client.live_executables()
    kept = eb.OnlineLearner(model, rule=rule, loss=mse_loss, chunk=chunk, guard=False)
    assert kept.gradients(xs, ys).grads
    found = [
        program.get_compiled_memory_stats()
        for program in client.live_executables()
        if all(program is not old for old in before)
    ]
    parts = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    largest = max(sum(getattr(f, part) for part in parts) - f.alias_size_in_bytes for f in found)
    return largest - sum(t.numel() * t.element_size() for t in (xs, ys))


MODELS: dict[str, tuple[Any, int, list[str]]] = {
    "nearly diagonal": (NearlyDiagonal, H, RULES),
    "gru": (lambda: Recurrent(nn.GRU(IN, H)), 3, ["rtrl", "d_rtrl", "snap1"]),
    "two lstm layers": (lambda: Recurrent(nn.LSTM(IN, H, 2)), 3, ["d_rtrl", "pp_prop", "eprop"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_predicted_bytes_are_those_of_the_learners_own_program(name):
    make, width, rules = MODELS[name]
    model, steps = make(), 8
    found = eb.recommend(model, torch.randn(B, IN), rules=rules, steps=steps)
    xs, ys = torch.randn(steps, B, IN), torch.randn(steps, B, width)
    for candidate in found.candidates:
        wanted = learner_bytes(model, candidate.rule, candidate.chunk, xs, ys)
        assert candidate.compiled and abs(candidate.memory - wanted) <= 0.1 * wanted, (
            candidate.rule,
            candidate.memory,
            wanted,
        )


def test_the_comparisons_bytes_are_those_of_the_learners_own_program(comparison):
    model, (xs, ys) = NearlyDiagonal().double(), data()
    for name in ("rtrl", "d_rtrl"):
        wanted = learner_bytes(model, name, comparison[name].chunk, xs.double(), ys.double())
        assert abs(comparison[name].memory - wanted) <= 0.1 * wanted
