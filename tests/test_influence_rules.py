"""Rules that approximate RTRL's influence matrix, against their definitions with dense matrices
from torch's own Jacobians.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.footprint import rule_bytes
from etrace_bridge.rules import (
    DRTRL,
    KFRTRL,
    OKRTRL,
    OSTL,
    RTRL,
    UORO,
    LowRankRTRL,
    Rule,
    SnApN,
)
from etrace_bridge.rules.noise import after_draw, digest, no_draws, read_data
from etrace_bridge.rules.ok_rtrl import mixed_columns
from etrace_bridge.step.units import find_layout
from quick_jit import quick_jit
from sequences import sequence_gradient

T, B, IN, OUT = 5, 2, 3, 2


def loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.sin(output + target).sum()


class Ring(nn.Module):
    """A recurrent layer in which each unit hears itself and one neighbour.

    Args:
        as_buffer: the mask is a buffer rather than a constant.
    """

    sizes = (6,)

    def __init__(self, as_buffer: bool = False) -> None:
        super().__init__()
        mask = torch.eye(6) + torch.eye(6).roll(1, 0)
        if as_buffer:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask.tolist()
        self.w, self.u = nn.Parameter(torch.empty(6, IN)), nn.Parameter(torch.empty(6, 6))
        self.b, self.out = nn.Parameter(torch.empty(6)), nn.Parameter(torch.empty(OUT, 6))

    def run(self, p: dict[str, Tensor], x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """The new state and the output."""
        h = torch.tanh(x @ p["w"].T + h @ (p["u"] * torch.as_tensor(self.mask)).T + p["b"])
        return h, h @ p["out"].T

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h, y = self.run(dict(self.named_parameters()), x, h)
        return y, h


class Two(nn.Module):
    """Two dense recurrent layers."""

    sizes = (3, 4)

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.u1 = nn.Parameter(torch.empty(3, IN)), nn.Parameter(torch.empty(3, 3))
        self.w2, self.u2 = nn.Parameter(torch.empty(4, 3)), nn.Parameter(torch.empty(4, 4))
        self.out = nn.Parameter(torch.empty(OUT, 4))

    def run(self, p: dict[str, Tensor], x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """The new states, joined, and the output."""
        a = torch.tanh(x @ p["w1"].T + 0.5 * h[..., :3] + h[..., :3] @ p["u1"].T)
        c = torch.tanh(a @ p["w2"].T + 0.5 * h[..., 3:] + h[..., 3:] @ p["u2"].T)
        return torch.cat([a, c], -1), c @ p["out"].T

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, y = self.run(dict(self.named_parameters()), x, torch.cat(state, -1))
        return y, (h[..., :3], h[..., 3:])


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@dataclass(frozen=True)
class Dense:
    """Steps of a model with their dense Jacobians, for every batch element: leading axis B.

    Attributes:
        F: `dh/dh`, (B, n, n).
        G: `dh/dθ`, (B, n, P).
        l_h: (B, n).
        l_w: (B, P).
    """

    F: np.ndarray
    G: np.ndarray
    l_h: np.ndarray
    l_w: np.ndarray


@cache
def case(make: Any) -> tuple[nn.Module, Tensor, Tensor, list[Dense]]:
    """A model with values, a sequence and the taken-apart steps."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    generator, model = torch.Generator().manual_seed(3), make()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.7 * torch.randn(p.shape, generator=generator))
    xs = torch.randn(T, B, IN, generator=generator)
    targets = torch.randn(T, B, OUT, generator=generator)
    shapes = {n: p.shape for n, p in model.named_parameters()}
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def parts(flat: Tensor) -> dict[str, Tensor]:
        pieces = flat.split([s.numel() for s in shapes.values()])
        return {n: piece.reshape(s) for (n, s), piece in zip(shapes.items(), pieces, strict=True)}

    def whole(flat: Tensor, h: Tensor, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        new, y = model.run(parts(flat), x, h)
        return new, loss(y, target)

    linear = torch.func.vmap(torch.func.jacrev(whole, argnums=(0, 1)), in_dims=(None, 0, 0, 0))
    h, steps = torch.zeros(B, sum(model.sizes)), []
    for x, target in zip(xs, targets, strict=True):
        (G, F), (l_w, l_h) = linear(flat, h, x, target)
        steps.append(Dense(*(a.detach().numpy() for a in (F, G, l_h, l_w))))
        h = model.run(parts(flat), x, h)[0].detach()
    torch.set_default_dtype(before)
    return model, xs, targets, steps


def wrapped(make: Any) -> Any:
    """The model for the engine, with its initial state."""
    model = case(make)[0]

    def start(n: int):
        zeros = tuple(torch.zeros(n, size) for size in model.sizes)
        return zeros if len(zeros) > 1 else zeros[0]

    return eb.wrap(model, state=start)


@cache
def built(make: Any) -> CompiledStep:
    """The model, compiled."""
    return CompiledStep(wrapped(make), [jnp.asarray(case(make)[1][0].numpy())])


def run(make: Any, rule: Rule, chunk: int = 1) -> list[Any]:
    """The gradient over the sequence, as JAX arrays in the program's order."""
    _, xs, targets, _ = case(make)
    return sequence_gradient(built(make), rule, xs, targets, chunk)


def in_order(make: Any, grads: list[Any]) -> np.ndarray:
    """Gradients as one vector in torch's order; axes before those of a weight are kept."""
    by_name = dict(zip(built(make).weight_names, grads, strict=True))
    flat = [
        np.asarray(by_name[n]).reshape(*np.shape(by_name[n])[: -p.ndim], -1)
        for n, p in case(make)[0].named_parameters()
    ]
    return np.concatenate(flat, -1)


@cache
def found(make: Any, rule: Rule, chunk: int = 1) -> np.ndarray:
    built(make)  # compiled outside of the program below
    return in_order(make, quick_jit(lambda: run(make, rule, chunk))())


def assert_equal(a: np.ndarray, b: np.ndarray, tolerance: float = 1e-9) -> None:
    assert np.abs(b).max() > 1e-3 and np.abs(a - b).max() <= tolerance * np.abs(b).max(), np.abs(
        a - b
    ).max()


def masked_rtrl(steps: list[Dense], mask: np.ndarray) -> np.ndarray:
    """`J = mask ∘ (F J + G)`, `g = l_w + l_h J`."""
    J, total = np.zeros_like(steps[0].G), np.zeros(steps[0].G.shape[-1])
    for s in steps:
        total += (s.l_w + np.einsum("bn,bnp->bp", s.l_h, J)).sum(0)
        J = mask * (s.F @ J + s.G)
    return total


def snap_mask(steps: list[Dense], n: int) -> np.ndarray:
    """Where a weight reaches a hidden value within n steps."""
    F, G = np.abs(steps[1].F).sum(0) > 0, np.abs(steps[1].G).sum(0) > 0
    reach = G
    for _ in range(n - 1):
        reach = G | ((F.astype(float) @ reach) > 0)
    return reach


@pytest.mark.parametrize("n", [1, 2])
def test_snap_n_by_definition(n):
    steps = case(Ring)[3]
    mask = snap_mask(steps, n)
    assert mask.any(0).sum() == 18 + 12 + 6 and mask.sum(0).max() == n, (
        "each weight reaches n units"
    )
    assert_equal(found(Ring, SnApN(n)), masked_rtrl(steps, mask))


def test_snap_n_is_exact_when_saturated():
    exact = masked_rtrl(case(Ring)[3], np.ones(()))
    assert_equal(found(Ring, SnApN(6)), exact)
    assert np.abs(found(Ring, SnApN(2)) - exact).max() > 1e-3 * np.abs(exact).max(), (
        "n = 2 drops something here"
    )
    exact = masked_rtrl(case(Two)[3], np.ones(()))
    assert_equal(found(Two, SnApN(2)), exact)


def test_snap_n_remembers_only_what_it_keeps():
    for n in (1, 2, 3):
        memory = jax.eval_shape(lambda n=n: SnApN(n).init(built(Ring).program))
        assert sum(x.size for x in jax.tree.leaves(memory)) == n * B * (6 * IN + 36 + 6)


def test_snap_n_reads_a_mask_that_is_a_buffer():
    """The pattern is that of the mask, whichever way it is declared, and the gradient the same."""
    make = functools.partial(Ring, as_buffer=True)
    assert_equal(found(make, SnApN(2)), found(Ring, SnApN(2)), 1e-12)


def test_ostl_by_definition():
    """Each layer's weights with its own states."""
    steps = case(Two)[3]
    layer_of_state = np.repeat([0, 1], [3, 4])
    layer_of_weight = np.repeat([0, 1, 2], [9 + 9, 12 + 16, 8])
    expected = masked_rtrl(steps, layer_of_state[:, None] == layer_of_weight)
    assert_equal(found(Two, OSTL()), expected)
    assert (
        np.abs(expected - masked_rtrl(steps, np.ones(()))).max() > 1e-3 * np.abs(expected).max()
    ), "layers matter to each other"
    assert np.abs(expected - found(Two, DRTRL())).max() > 1e-3 * np.abs(expected).max(), (
        "recurrent weights matter"
    )


def test_ostl_of_one_layer_is_rtrl():
    assert_equal(found(Ring, OSTL()), masked_rtrl(case(Ring)[3], np.ones(())))


def test_what_they_promise():
    for make, rule, kinds in (
        (Ring, SnApN(2), {"approximate"}), (Ring, SnApN(6), {"exact"}), (Two, SnApN(2), {"exact"}),
        (Two, OSTL(), {"approximate", "exact"}), (Ring, OSTL(), {"exact"}), (Ring, UORO(), {"approximate"}),
    ):  # fmt: skip
        graph = built(make).program.graph
        assert {
            p.kind for path, p in rule.promises(graph, T, 1).items() if path != ("out",)
        } == kinds, rule
        assert {p.kind for p in rule.promises(graph, T, T).values()} == {"exact"}


class Encoded(nn.Module):
    """A layer before one of torch's own, which gives it a time axis of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.layer = nn.Linear(IN, 3), nn.GRU(3, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.encoder(x)))[0]


@pytest.mark.parametrize("rule", [RTRL(), LowRankRTRL(1), SnApN(1)], ids=lambda rule: rule.name)
def test_batch_elements_stay_apart_behind_an_encoder(rule):
    """Each element's units are its own, so the gradient of a batch is the sum of theirs, and no
    memory grows with the square of the batch.
    """
    torch.manual_seed(0)
    model, xs, targets = Encoded(), torch.randn(T, 4, IN), torch.randn(T, 4, OUT)

    def run(some: slice) -> tuple[CompiledStep, list[Any]]:
        compiled = CompiledStep(eb.wrap(model, example_input=xs[0, some]), [xs[0, some].numpy()])
        data = xs[:, some], targets[:, some]
        return compiled, quick_jit(lambda: sequence_gradient(compiled, rule, *data, 1))()

    (whole, found), *halves = map(run, (slice(0, 4), slice(0, 2), slice(2, 4)))
    for g, *parts in zip(found, *(made for _, made in halves), strict=True):
        assert_equal(np.asarray(g), np.asarray(sum(parts)))
    assert rule_bytes(whole, rule) == 2 * rule_bytes(halves[0][0], rule)
    assert find_layout(whole.program).rows == 4


# ---- UORO


def assert_unbiased(make_rule: Any) -> np.ndarray:
    """The mean over 2,000 seeds is within four standard errors of BPTT, element by element; gives
    the standard errors.
    """
    built(Ring)
    steps = case(Ring)[3]
    drawn = in_order(
        Ring, quick_jit(jax.vmap(lambda seed: run(Ring, make_rule(seed))))(jnp.arange(2000))
    )
    exact, step_alone = masked_rtrl(steps, np.ones(())), sum(s.l_w.sum(0) for s in steps)
    error = drawn.std(0) / np.sqrt(2000)
    assert (np.abs(drawn.mean(0) - exact) <= 4 * error + 1e-9).all()
    assert (np.abs(step_alone - exact) > 8 * error).sum() > 10, (
        "a gradient without the past would not pass"
    )
    return error


class Given(UORO):
    """UORO with the signs of this file."""

    def signs(self, draws: Any, hidden: Any) -> list[Any]:
        return [jnp.asarray(signs())[draws["count"]]]


@cache
def signs() -> np.ndarray:
    return np.random.default_rng(0).choice([-1.0, 1.0], (T, B, 6))


def uoro(steps: list[Dense]) -> np.ndarray:
    """The paper's recursion, the batch being one state of B·n numbers."""
    s, theta, total = np.zeros(B * 6), np.zeros(steps[0].G.shape[-1]), 0.0
    for t, step in enumerate(steps):
        total = total + step.l_w.sum(0) + (step.l_h.reshape(-1) @ s) * theta
        nu = signs()[t].reshape(-1)
        moved = np.concatenate([step.F[b] @ s.reshape(B, 6)[b] for b in range(B)])
        row = nu @ step.G.reshape(B * 6, -1)
        norm = np.linalg.norm
        rho0, rho1 = (
            np.sqrt((norm(a) + 1e-7) / (norm(b) + 1e-7)) for a, b in ((theta, moved), (row, nu))
        )
        s, theta = rho0 * moved + rho1 * nu, theta / rho0 + row / rho1
    return total


def test_uoro_by_definition():
    assert_equal(found(Ring, Given()), uoro(case(Ring)[3]))


def test_random_rules_have_no_bias():
    uoro_error, kf_error = assert_unbiased(UORO), assert_unbiased(KFRTRL)
    assert kf_error.mean() < 0.5 * uoro_error.mean(), "what the Kronecker form is for"


def draws_after(theta: Any, *inputs: Any) -> Any:
    """The numbers of the last of some draws."""
    draws = no_draws()
    for n, x in enumerate(inputs):
        draws = read_data(after_draw(draws) if n else draws, [theta], [jnp.asarray(x)])
    return draws


def test_random_rules_draw_new_signs():
    """For another seed, later in the stream, for other inputs and for other weights at its start;
    the same ones for the same data.
    """
    w = jnp.ones(3)
    hidden = [jnp.ones((B, 40))]
    x = np.ones((1, B, IN))
    blank = np.zeros((1, B, IN))
    signs = lambda draws, rule=UORO(): np.asarray(rule.signs(draws, hidden)[0])  # noqa: B008
    first, later = signs(draws_after(w, x)), signs(draws_after(w, x, blank))
    assert set(np.unique(first)) == {-1.0, 1.0}
    pairs = [
        (first, signs(draws_after(w, x), UORO(seed=1))),
        (first, signs(draws_after(w, 2 * x))),
        (first, signs(draws_after(w + 1e-6, x))),
        (first, signs(after_draw(draws_after(w, x)))),
        (later, signs(draws_after(w, 2 * x, blank))),  # what came before is not forgotten
    ]
    for one, other in pairs:
        assert 20 < (one != other).sum() < 60
    assert (signs(draws_after(w, x)) == first).all()


def test_sparse_inputs_draw_signs_of_their_own():
    """Zeros and ones differ in few bits; the digests of all one-hot sequences differ."""
    hot = np.eye(1200, dtype=np.float32).reshape(1200, 30, 40)
    found = jax.vmap(lambda x: digest([x]))(np.concatenate([hot, hot[:600] + hot[600:]]))
    assert len(np.unique(np.asarray(found))) == 1800
    tokens = jax.vmap(lambda x: digest([x]))(np.arange(1000).reshape(-1, 1))
    assert len(np.unique(np.asarray(tokens))) == 1000


def test_uoro_goes_on_where_it_was_saved(tmp_path):
    _, xs, targets, _ = case(Ring)
    whole, first = (eb.OnlineLearner(wrapped(Ring), UORO(seed=5), loss) for _ in range(2))
    expected = [
        whole.gradients(xs[t : t + 1], targets[t : t + 1], carry=True).grads for t in range(4)
    ][-1]
    for t in range(2):
        first.gradients(xs[t : t + 1], targets[t : t + 1], carry=True)
    second = eb.OnlineLearner.load(first.save(tmp_path / "uoro"), wrapped(Ring), loss=loss)
    for t in (2, 3):
        last = second.gradients(xs[t : t + 1], targets[t : t + 1], carry=True).grads
    for name, g in expected.items():
        assert g.abs().max() > 1e-3 and torch.equal(last[name], g), name


# ---- KF-RTRL


class GivenPairs(KFRTRL):
    """KF-RTRL with the signs of this file."""

    def pairs(self, layout: Any, draws: Any) -> Any:
        return jnp.asarray(signs())[draws["count"]][:1, :2]


def test_kf_rtrl_by_definition():
    """One sum with the inputs (x, h, 1): `A ⊗ u`, both for each batch element, with the norms of
    the whole batch.
    """
    model, xs, targets, steps = case(Ring)
    p = {n: v.detach() for n, v in model.named_parameters()}
    mask, h = torch.tensor(model.mask), torch.zeros(B, 6)
    A, u, total = np.zeros((B, 6, 6)), [np.zeros((B, IN)), np.zeros((B, 6)), np.zeros(())], 0.0
    for t, step in enumerate(steps):
        b = np.einsum("bn,bnu->bu", step.l_h, A)
        past = [
            np.einsum("bu,bi->ui", b, u[0]),
            np.einsum("bu,bi->ui", b, u[1]) * mask.numpy(),
            b.sum(0) * u[2],
            np.zeros((OUT, 6)),
        ]
        total = total + step.l_w.sum(0) + np.concatenate([g.reshape(-1) for g in past])
        new = model.run(p, xs[t], h)[0]
        G = np.stack([np.diag(row) for row in (1 - new**2).numpy()])
        moved, features = step.F @ A, [xs[t].numpy(), h.numpy(), np.ones(())]
        length = lambda arrays: np.sqrt(sum((a**2).sum() for a in arrays)) + 1e-7
        rho1, rho2 = np.sqrt(length(u) / length([moved])), np.sqrt(length(features) / length([G]))
        c1, c2 = signs()[t, 0, :2]
        A = c1 * rho1 * moved + c2 * rho2 * G
        u = [c1 / rho1 * a + c2 / rho2 * x for a, x in zip(u, features, strict=True)]
        h = new
    assert [n for n, _ in model.named_parameters()] == ["w", "u", "b", "out"]
    assert_equal(found(Ring, GivenPairs()), total)


# ---- OK-RTRL


def every_sign(count: int) -> np.ndarray:
    return np.array(list(itertools.product([-1.0, 1.0], repeat=count)))


def cut_kronecker_sum(J: np.ndarray, r: int, signs: np.ndarray) -> np.ndarray:
    """The paper's approximation of a dense matrix (inputs, rest) of rank r + 1 by one of rank r."""
    v, sigma, a = np.linalg.svd(J, full_matrices=False)
    v, sigma, a = v[:, : r + 1], np.where(sigma > 1e-14 * sigma[0], sigma, 0)[: r + 1], a[: r + 1]
    m = next(m for m in range(r + 1) if (r - m) * sigma[m] <= sigma[m:].sum() * (1 + 1e-12))
    k, s = r - m, sigma[m:].sum()
    z = np.sqrt(np.maximum(1 - k * sigma[m:] / s, 0))
    c = signs[m:, None] * signs[m:]
    middle = s / k * c * (np.eye(k + 1) - np.outer(z, z))
    return (v[:, :m] * sigma[:m]) @ a[:m] + v[:, m:] @ middle @ a[m:]


@pytest.mark.parametrize("r", [1, 3])
def test_mixed_columns_have_no_bias_and_the_least_variance(r):
    """Over all signs; the variance is that of the paper's theorem."""
    rng = np.random.default_rng(r)
    L, Z = rng.standard_normal((9, r + 1)), rng.standard_normal((7, r + 1))
    Z[:, 0] *= 4  # one term that stays
    factors = [np.linalg.qr(x, "r") for x in (L, Z)]
    X, Y = quick_jit(jax.vmap(lambda c: mixed_columns(*factors, c)))(every_sign(r + 1))
    found = np.einsum("lq,sqk,zp,spk->slz", L, X, Z, Y)
    whole, sigma = L @ Z.T, np.linalg.svd(L @ Z.T, compute_uv=False)[: r + 1]
    np.testing.assert_allclose(found.mean(0), whole, atol=1e-12)
    assert np.linalg.svd(found, compute_uv=False)[:, r].max() < 1e-12
    least = min(
        sigma[m:].sum() ** 2 / (r - m) - (sigma[m:] ** 2).sum()
        for m in range(r)
        if (r - m) * sigma[m] <= sigma[m:].sum()
    )
    assert least > 0.1
    np.testing.assert_allclose(((found - whole) ** 2).sum((1, 2)).mean(), least, rtol=1e-9)


class GivenSigns(OKRTRL):
    """OK-RTRL whose seed is its signs, (T, B, 2)."""

    def pairs(self, layout: Any, draws: Any) -> Any:
        return self.seed[draws["count"]][None]


def ok_rtrl(row: int, signs: np.ndarray) -> np.ndarray:
    """Rank 1 for one batch element: `J` (inputs, n·units) of the one sum with the inputs (x, h, 1)."""
    model, xs, _, steps = case(Ring)
    p, mask = {n: v.detach() for n, v in model.named_parameters()}, np.asarray(model.mask)
    h, J, total = torch.zeros(6), np.zeros((IN + 7, 36)), 0.0
    for t, step in enumerate(steps):
        past = np.einsum("n,inu->ui", step.l_h[row], J.reshape(-1, 6, 6))
        parts = past[:, :IN], past[:, IN:-1] * mask, past[:, -1], np.zeros((OUT, 6))
        total = total + step.l_w[row] + np.concatenate([g.reshape(-1) for g in parts])
        new = model.run(p, xs[t, row], h)[0]
        J = np.einsum("nm,imu->inu", step.F[row], J.reshape(-1, 6, 6)).reshape(J.shape)
        J += np.outer(np.concatenate([xs[t, row], h, [1.0]]), np.diag(1 - new**2))
        J, h = cut_kronecker_sum(J, 1, signs[t]), new
    return total


def test_ok_rtrl_by_definition():
    """A singular vector has no sign of its own, so all outcomes of the signs are compared as a set.
    Their mean is BPTT.
    """
    built(Ring)
    chosen = np.ones((8, T, 2))
    chosen[:, 1:4, 1] = every_sign(3)  # what was cut after steps 1 and 5 is nothing, or not used
    both = np.stack([np.repeat(chosen, 8, 0), np.tile(chosen, (8, 1, 1))], 2)
    found = in_order(Ring, quick_jit(jax.vmap(lambda c: run(Ring, GivenSigns(c, 1))))(both))
    first, second = ([ok_rtrl(row, c) for c in chosen] for row in range(B))
    expected = np.array([a + b for a in first for b in second])
    along = np.random.default_rng(0).standard_normal(expected.shape[1])
    order = np.argsort(found @ along), np.argsort(expected @ along)
    assert_equal(found[order[0]], expected[order[1]])
    assert found.std(0).max() > 1e-3
    assert_equal(found.mean(0), masked_rtrl(case(Ring)[3], np.ones(())))


def test_check_gradients_holds_them_to_their_promises():
    torch.manual_seed(0)
    xs, targets = torch.randn(4, B, 2), torch.randn(4, B, 3)
    table = eb.check_gradients(
        nn.RNN(2, 3),
        xs,
        targets,
        torch.nn.functional.mse_loss,
        rule=["immediate", "snap_n", "uoro"],
        chunk=2,
    )
    assert table.ok
    assert (
        table["snap_n"].cosine > 1 - 1e-12 > table["uoro"].cosine
        and table["immediate"].cosine < 0.999
    )
