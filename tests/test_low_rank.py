"""Low-rank RTRL against its definition with dense matrices and an SVD (low_rank_oracle), and
against BPTT on modules of the zoo.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import jax
import numpy as np
import optax
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import etrace_bridge as eb
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.footprint import rule_bytes
from etrace_bridge.rules import DRTRL, LowRankRTRL, make_rule, rule_text
from etrace_bridge.rules.best_rank import singular_columns
from fuzz_record import record
from low_rank_oracle import (
    GRU,
    INPUTS,
    LIF,
    Encoded,
    Engine,
    Reference,
    bptt,
    engine,
    relative,
)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gru": lambda: GRU(6, 1),
    "gru stack": lambda: GRU(4, 3),
    "gru wide": lambda: GRU(8, 1, 2.0),
    "lif": lambda: LIF(8, 1),
    "lif stack": lambda: LIF(5, 2),
    "lif one decay": lambda: LIF(5, 2, recurrent=False),
    "lif own decays": lambda: LIF(5, 2, recurrent=False, decay=None),
    "encoder": lambda: Encoded(5),
}


@cache
def reference(name: str) -> Reference:
    return Reference(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_the_reference_itself_is_bptt_at_full_rank(name):
    ref = reference(name)
    assert relative(ref.gradient(1000), ref.bptt()) < 1e-12
    assert relative(ref.gradient(0), ref.bptt()) > 0.02  # what crosses a product matters here
    assert min(np.abs(g).max() for g in ref.bptt().values()) > 1e-6


def test_the_mean_error_shrinks_with_the_rank():
    """By definition; the next test shows that the engine has the same numbers."""
    errors = {
        r: [relative(reference(n).gradient(r), reference(n).bptt()) for n in MODELS]
        for r in (0, 1, 2, 4)
    }
    means = [np.mean(e) for e in errors.values()]
    assert all(b < 0.5 * a for a, b in zip(means, means[1:], strict=False)), means


def slow(seed: int) -> Reference:
    """A GRU whose units remember for 2 to 100 steps."""

    def build() -> nn.Module:
        model = GRU(6, 1, 2.0)
        with torch.no_grad():
            model.hh[0].bias[6:12] = torch.linspace(0, 5, 6)
        return model

    return Reference(build, seed, steps=60, batch=1)


def test_the_cut_is_made_in_a_norm_that_looks_ahead():
    """An error in a unit that remembers does harm for long, so the plain norm is not the best."""
    errors = {plain: [] for plain in (False, True)}
    for ref in map(slow, range(4)):
        for plain, found in errors.items():
            found.append(relative(ref.gradient(1, plain=plain), ref.bptt()))
    assert 0.01 < np.mean(errors[False]) < 0.85 * np.mean(errors[True]), errors


# Compiling is the cost: every model at rank 1, some in other ways.
WAYS = [(name, 1, None) for name in MODELS]
WAYS += [
    ("gru", 1000, None),
    ("lif stack", 1000, None),
    ("encoder", 1000, None),
    ("lif stack", 0, None),
    ("gru", 5, None),
]
WAYS += [("gru stack", 2, None), ("lif stack", 1, 1), ("gru", 1000, 1)]


@pytest.mark.parametrize(("name", "rank", "hops"), WAYS)
def test_equals_the_definition_and_its_error_is_bounded(name, rank, hops):
    ref = reference(name)
    found, (square, bound) = engine(ref, LowRankRTRL(rank, hops))
    assert relative(found, ref.gradient(rank, hops)) < 1e-9
    exact = ref.bptt()
    error = math.sqrt(sum(((found[n] - g) ** 2).sum() for n, g in exact.items()))
    scale = math.sqrt(sum((g**2).sum() for g in exact.values()))
    assert error <= bound + 1e-12 * scale
    if rank == 1000 and hops is None:
        assert bound == 0 and error < 1e-12 * scale
    elif name != "lif one decay":  # which has rank 1
        assert error / 4 < math.sqrt(square) < 4 * error
        assert bound < 80 * error


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_memory_of_few_bits_claims_no_bound(dtype):
    """At full rank nothing is cut off, and the error is that of the memory's rounding."""
    ref = reference("lif stack")
    found, lost = engine(ref, LowRankRTRL(1000, trace_dtype=dtype))
    error = relative(found, ref.bptt())
    assert (1e-4 < error < 0.1 and lost is None) if dtype == "bfloat16" else error < 1e-12
    assert dtype == "bfloat16" or (lost is not None and lost[1] == 0)


@cache
def compiled(name: str, rule: LowRankRTRL) -> tuple[nn.Module, Engine]:
    model = MODELS[name]().double()
    return model, Engine(model, torch.zeros(2, INPUTS, dtype=torch.float64), rule)


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("name", "rule"), [("gru stack", LowRankRTRL(1)), ("lif stack", LowRankRTRL(1, hops=1))]
)
@given(
    seed=st.integers(0, 10**6),
    steps=st.integers(2, 12),
    weights=st.floats(0.1, 3.0),
    inputs=st.floats(0.1, 3.0),
)
def test_the_error_is_never_above_the_bound(name, rule, seed, steps, weights, inputs):
    model, online = compiled(name, rule)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(weights * torch.randn_like(p) / p.shape[-1] ** 0.5)
    xs = inputs * torch.randn(steps, 2, INPUTS, dtype=torch.float64)
    targets = torch.randn(steps, 2, 2, dtype=torch.float64)
    exact = bptt(model, xs, targets)
    found, lost = online.gradients(dict(model.named_parameters()), xs, targets, 1)
    assert lost is not None
    error = math.sqrt(sum(((found[n] - g) ** 2).sum() for n, g in exact.items()))
    scale = math.sqrt(sum((g**2).sum() for g in exact.values()))
    assert scale > 0 and error <= lost[1] + 1e-11 * scale
    assert steps < 4 or lost[1] > 0
    record("test_the_error_is_never_above_the_bound", "programs")


class Chain(nn.Module):
    """One unit that sends its value to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.u, self.out = nn.Linear(INPUTS, 1), nn.Linear(1, 1), nn.Linear(1, 2)
        for name, p in self.named_parameters():
            nn.init.constant_(p, 0.0 if name.endswith("bias") else 0.3)

    def forward(self, x: torch.Tensor, state=None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        h = x.new_zeros(len(x), 1) if state is None else state[0]
        h = torch.tanh(self.w(x) + self.u(h) + 0.5 * h)
        return self.out(h), [h]


@pytest.mark.parametrize("hops", [None, 1])
def test_the_bound_is_reached_where_nothing_cancels(hops):
    """All errors of this unit have the same direction and sign, so a bound that forgets anything is
    too small.
    """
    model = Chain().double()
    xs = 0.1 * torch.ones(12, 2, INPUTS, dtype=torch.float64)
    targets = -torch.ones(12, 2, 2, dtype=torch.float64)
    found, lost = Engine(model, xs[0], LowRankRTRL(0, hops)).gradients(
        dict(model.named_parameters()), xs, targets, 1
    )
    assert lost is not None
    exact = bptt(model, xs, targets)
    error = math.sqrt(sum(((found[n] - g) ** 2).sum() for n, g in exact.items()))
    assert 0.9 * lost[1] < error <= lost[1]
    assert relative(found, exact) > 0.05


@pytest.mark.parametrize("name", ["encoder"])
def test_rank_0_is_d_rtrl_also_in_chunks(name):
    ref = reference(name)
    assert relative(engine(ref, LowRankRTRL(0))[0], engine(ref, DRTRL())[0]) < 1e-10
    assert relative(engine(ref, LowRankRTRL(0), 3)[0], engine(ref, DRTRL("chunk"), 3)[0]) < 1e-10


@pytest.mark.parametrize("q", [1, 2, 3, 6])
def test_the_best_rank_is_that_of_the_svd(q):
    rng = np.random.default_rng(q)
    L, Z = rng.standard_normal((5, 9, q)), rng.standard_normal((5, 7, q))
    L[0], Z[1, :, 0], Z[2] = 0, 0, 0  # nothing yet, a column without weights, no weights
    Z[3, :, -1] = Z[3, :, 0]
    grams = (np.moveaxis(a.transpose(0, 2, 1) @ a, 0, 2) for a in (L, Z))
    X, Y = (np.moveaxis(np.asarray(a), 2, 0) for a in jax.jit(singular_columns)(*grams))
    for unit in range(5):
        U, sigma, V = np.linalg.svd(L[unit] @ Z[unit].T)
        for r in range(q + 1):
            wanted = (U[:, :r] * sigma[:r]) @ V[:r]
            found = (L[unit] @ X[unit, :, :r]) @ (Z[unit] @ Y[unit, :, :r]).T
            np.testing.assert_allclose(found, wanted, atol=3e-8)
            if unit == 4:
                np.testing.assert_allclose(found, wanted, atol=1e-12)


def session_of(model: nn.Module, x: torch.Tensor) -> CompiledStep:
    net = eb.wrap(model, example_input=x)
    net.init_state(batch_size=len(x))
    return CompiledStep(net, [x.numpy()])


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize(
    ("make", "n"),
    [
        (lambda: nn.GRU(8, 32), 32),
        (lambda: nn.GRU(8, 10, 3), 30),
        (lambda: nn.LSTM(8, 16), 32),  # two states a unit
        (lambda: nn.Sequential(nn.Linear(8, 4), nn.RNN(4, 16)), 16),  # an encoder
    ],
    ids=["GRU", "stack", "LSTM", "encoder"],
)
def test_memory(make, n, rank):
    """At most 1.5 r·B·(n² + P) beside D-RTRL's trace."""
    batch, model = 3, make()
    session = session_of(model, torch.randn(batch, 8))
    weights = sum(p.numel() for p in model.parameters())
    beside = rule_bytes(session, LowRankRTRL(rank)) - rule_bytes(session, DRTRL())
    assert rank * batch * weights * 4 <= beside <= 1.5 * rank * batch * (n**2 + weights) * 4


def test_weights_that_do_not_fit_keep_the_trace_of_d_rtrl():
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.cell = nn.Linear(40, 30), nn.RNNCell(30, 4)

        def forward(self, x, h=None):
            return self.cell(self.wide(x), h)

    session = session_of(Encoder(), torch.randn(2, 40))
    rule = LowRankRTRL(2, max_bytes=8000)
    promises = {
        ".".join(p): v.reason for p, v in rule.promises(session.program.graph, 10, 1).items()
    }
    assert "max_bytes=8000" in promises["wide.weight"] and "rank 2" in promises["cell.weight_hh"]
    shapes = jax.eval_shape(lambda: rule.init(session.program))
    assert {len(f["A"]) for f in shapes["families"]} == {0, 2}
    assert "max_bytes" not in str(LowRankRTRL(2).promises(session.program.graph, 10, 1))


def test_the_learner_says_what_was_discarded():
    torch.manual_seed(0)
    model = nn.GRU(3, 5)
    xs, targets = torch.randn(6, 2, 3), torch.randn(6, 2, 5)
    learner = eb.OnlineLearner(
        model,
        rule="low_rank:rank=1",
        loss=nn.functional.mse_loss,
        chunk=1,
        optimizer=optax.sgd(0.0),
    )
    result = learner.gradients(xs, targets)
    total = nn.functional.mse_loss(model(xs)[0], targets)
    exact = dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(total, list(model.parameters())),
            strict=True,
        )
    )
    error = math.sqrt(sum(float(((result.grads[n] - g) ** 2).sum()) for n, g in exact.items()))
    norm = math.sqrt(sum(float((g**2).sum()) for g in exact.values()))
    assert 0 < error <= result.discarded.absolute_bound
    assert 1e-4 < error / norm <= result.discarded.bound < math.inf
    assert error / norm / 4 < result.discarded.estimate < 4 * error / norm
    steps = [learner.step(x, target).discarded for x, target in zip(xs, targets, strict=True)]
    assert steps[0] == eb.Discarded(0.0, 0.0, 0.0)  # a first step has no past
    assert 0 < steps[-1].estimate < steps[-1].bound
    assert learner.step(xs[0]).discarded is None


def test_rules_as_text():
    assert make_rule("low_rank:rank=3:hops=1") == LowRankRTRL(3, hops=1)
    assert make_rule("d_rtrl:credit=core") == DRTRL("core")
    assert rule_text(LowRankRTRL(3, hops=1)) == "low_rank:rank=3:hops=1"
    assert rule_text(DRTRL()) == "d_rtrl"
    with pytest.raises(eb.InputError, match="no option 'order'. Its options: rank, hops"):
        make_rule("low_rank:order=3")


def test_recommend_chooses_the_rank():
    x = torch.randn(2, 3)
    found = eb.recommend(nn.RNN(3, 12), x, "60kB", rules=["low_rank"], steps=4)
    assert (
        found.rule in ("low_rank:rank=8", "low_rank:rank=4", "low_rank:rank=2")
        and found.memory <= 60_000
    )
    assert found.candidates[0].cosine > 0.99
