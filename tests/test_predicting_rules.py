"""Rules with a memory that is not an influence: FPTT and DNI against their definitions in torch,
with autograd on single chunks.
"""

from __future__ import annotations

import copy

import optax
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb
from etrace_bridge.rules import DNI, FPTT

T, B, IN, H = 6, 2, 3, 4
RATE = 0.2  # of the learner


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.sin(output + target).sum()


class Net(nn.Module):
    """A recurrent layer and a readout."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(IN, H), nn.Linear(H, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return self.out(h), h


def case() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(1)
    return Net(), torch.randn(T, B, IN), torch.randn(T, B, 2)


def learner(model: nn.Module, rule: eb.rules.Rule, chunk: int) -> eb.OnlineLearner:
    net = eb.wrap(model, state=lambda n: torch.zeros(n, H))
    return eb.OnlineLearner(net, rule, loss, optax.sgd(RATE), chunk=chunk, reduction="sum")


def chunk_losses(model: Net, xs: Tensor, targets: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the chunk's losses, and the state after it."""
    total = torch.zeros(())
    for x, target in zip(xs, targets, strict=True):
        y, h = model(x, h)
        total = total + loss(y, target)
    return total, h


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, g in expected.items():
        assert g.abs().max() > 1e-3, name
        assert (found[name] - g).abs().max() <= 1e-9 * g.abs().max(), name


def fptt(model: Net, xs: Tensor, targets: Tensor, alpha: float) -> None:
    """An update per step on `l_t + alpha/2 |θ - mean|² - λ·θ`, in place."""
    weights = list(model.parameters())
    mean, slope = ([w.detach().clone() for w in weights], [torch.zeros_like(w) for w in weights])
    h = torch.zeros(B, H)
    for x, target in zip(xs, targets, strict=True):
        y, new = model(x, h)
        pull = sum(
            (alpha / 2 * ((w - m) ** 2).sum() - (s * w).sum())
            for w, m, s in zip(weights, mean, slope, strict=True)
        )
        grads = torch.autograd.grad(loss(y, target) + pull, weights)
        with torch.no_grad():
            for w, g, m, s in zip(weights, grads, mean, slope, strict=True):
                w -= RATE * g
                s -= alpha * (w - m)
                m.copy_((m + w) / 2 - s / (2 * alpha))
        h = new.detach()


def test_fptt_by_definition():
    """The weights after six updates; without the pull they would be others."""
    model, xs, targets = case()
    start = {n: w.detach().clone() for n, w in model.named_parameters()}
    moved = {}
    for rule in (FPTT(alpha=0.7), eb.rules.BPTT()):
        one = learner(trained := copy.deepcopy(model), rule, 1)
        for x, target in zip(xs, targets, strict=True):
            one.step(x, target)
        one.sync_to_torch()
        moved[rule.name] = {n: w.detach() - start[n] for n, w in trained.named_parameters()}
    fptt(model, xs, targets, 0.7)
    expected = {n: w.detach() - start[n] for n, w in model.named_parameters()}
    assert_close(moved["fptt"], expected)
    assert (moved["bptt"]["out.weight"] - expected["out.weight"]).abs().max() > 1e-2


def test_fptt_with_fixed_weights_is_bptt():
    model, xs, targets = case()
    found, plain = (
        learner(model, rule, 2).gradients(xs, targets).grads for rule in (FPTT(), eb.rules.BPTT())
    )
    assert_close(found, plain)


def dni(model: Net, xs: Tensor, targets: Tensor, chunk: int, rate: float) -> dict[str, Tensor]:
    """The sum of the chunks' gradients."""
    names, weights = zip(*model.named_parameters(), strict=True)
    W, c = torch.zeros(H, H), torch.zeros(H)
    total, h = [torch.zeros_like(w) for w in weights], torch.zeros(B, H)
    for at in range(0, T, chunk):
        h = h.detach().requires_grad_()
        losses, last = chunk_losses(model, xs[at : at + chunk], targets[at : at + chunk], h)
        later = (last.detach() @ W.T + c) * last
        *grads, d = torch.autograd.grad(losses + later.sum(), [*weights, h])
        with torch.no_grad():
            errors = [d[b] - (W @ h[b] + c) for b in range(B)]
            for e, value in zip(errors, h, strict=True):
                e = rate / B * e / (1 + value @ value)
                W, c = W + torch.outer(e, value), c + e
            total = [t + g for t, g in zip(total, grads, strict=True)]
        h = last
    return dict(zip(names, total, strict=True))


@pytest.mark.parametrize("chunk", [1, 3])
def test_dni_by_definition(chunk):
    model, xs, targets = case()
    expected = dni(model, xs, targets, chunk, 0.5)
    assert_close(learner(model, DNI(0.5), chunk).gradients(xs, targets).grads, expected)
    plain = dni(model, xs, targets, chunk, 0.0)
    name = "cell.weight_hh"
    assert (expected[name] - plain[name]).abs().max() > 1e-2 * plain[name].abs().max()


def test_dni_learns_the_cotangents_of_later_losses():
    """A unit that keeps its value, and a loss three steps after the input: a step by itself gives no
    credit, the prediction does.
    """

    class Keep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([0.5]))

        def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
            h = 0.9 * h + x * self.w
            return h, h

    xs, weights = torch.zeros(400, 1, 1), torch.zeros(400, 1, 1)
    xs[::8], weights[3::8] = 1.0, 1.0
    net = eb.wrap(Keep(), state=lambda n: torch.zeros(n, 1))
    one = eb.OnlineLearner(net, DNI(0.3), lambda y, w: (w * y).sum(), chunk=1, reduction="sum")
    one.gradients(xs, weights, carry=True)
    found = one.gradients(xs[:8], weights[:8], carry=True).grads["w"]
    alone = eb.OnlineLearner(net, "immediate", lambda y, w: (w * y).sum(), reduction="sum")
    assert alone.gradients(xs[:8], weights[:8]).grads["w"].abs().max() == 0
    assert found.item() > 0.1


@pytest.mark.parametrize(("rule", "text"), [(DNI, "rate"), (FPTT, "alpha")])
def test_options_must_be_positive(rule, text):
    with pytest.raises(eb.InputError, match=f"`{text}` is 0"):
        rule(0)
