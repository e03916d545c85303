"""Two layers under the rules' definitions, written in torch: what a step's loss asks of the lower
layer, and what is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb
from etrace_bridge.rules import DRTRL, EProp, PPProp, Rule

T, B, IN, H1, H2, OUT = 7, 3, 4, 5, 6, 2
KAPPA, ALPHA = 0.6, 0.85
State = tuple[Tensor, Tensor]


class Stack(nn.Module):
    """Two recurrent layers and a readout; what the upper layer reads is a `signal` of the lower
    one, or its new state.

    Args:
        signals: the lower layer sends a signal that is no state, as the spike of most spiking
            neurons is.
    """

    def __init__(self, signals: bool) -> None:
        super().__init__()
        self.signals = signals
        self.fc1, self.rec1 = nn.Linear(IN, H1), nn.Linear(H1, H1, bias=False)
        self.fc2, self.rec2 = nn.Linear(H1, H2), nn.Linear(H2, H2, bias=False)
        self.out = nn.Linear(H2, OUT)

    def lower(self, x: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """The new state and the signal; `seen` is the old state as the recurrent product reads it."""
        u = 0.8 * v + self.fc1(x) + self.rec1(seen)
        if not self.signals:
            return torch.tanh(u), torch.tanh(u)
        z = torch.sigmoid(3 * (u - 0.2))
        return u * (1 - z), z

    def upper(self, z: Tensor, w: Tensor, seen: Tensor) -> Tensor:
        """The new state."""
        return torch.tanh(0.7 * w + self.fc2(z) + self.rec2(seen))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        v, z = self.lower(x, state[0], state[0])
        w = self.upper(z, state[1], state[1])
        return self.out(w), (v, w)

    def history(self, xs: Tensor, steps: int) -> State:
        """The states after some steps, with the position by position paths of each layer alone."""
        v, w = torch.zeros(B, H1), torch.zeros(B, H2)
        for x in xs[:steps]:
            v, z = self.lower(x, v, v.detach())
            w = self.upper(z.detach(), w, w.detach())
        return v, w


def make(signals: bool) -> tuple[Stack, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    model = Stack(signals)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=generator))
    return (
        model,
        torch.randn(T, B, IN, generator=generator),
        torch.randn(T, B, OUT, generator=generator),
    )


def loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.sin(output + target).sum()


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def last_step(model: Stack, x: Tensor, state: State, credit: str) -> tuple[Tensor, Tensor, Tensor]:
    """Output, signal and upper state of the step whose loss is taken: layers are joined, recurrent
    products only for `"step"`.
    """
    v, w = state
    _, z = model.lower(x, v, v if credit == "step" else v.detach())
    w = model.upper(z, w, w if credit == "step" else w.detach())
    return model.out(w), z, w


def d_rtrl(model: Stack, xs: Tensor, targets: Tensor, credit: str) -> None:
    """Fills `.grad` by D-RTRL's definition."""
    for t in range(T):
        output, _, _ = last_step(model, xs[t], model.history(xs, t), credit)
        loss(output, targets[t]).backward()


def eprop(model: Stack, xs: Tensor, targets: Tensor) -> None:
    """Fills `.grad` by e-prop's: `sum over t, s <= t of kappa^(t-s) L_t · e_s`, and the readout's
    own gradient.
    """
    for t in range(T):
        output, z, w = last_step(model, xs[t], model.history(xs, t), "core")
        signals = torch.autograd.grad(loss(output, targets[t]), (z, w))
        loss(model.out(w.detach()), targets[t]).backward()
        for s in range(t + 1):
            v, u = model.history(xs, s)
            _, z_s = model.lower(xs[s], v, v.detach())
            w_s = model.upper(z_s.detach(), u, u.detach())
            (
                KAPPA ** (t - s)
                * sum((a * b).sum() for a, b in zip(signals, (z_s, w_s), strict=True))
            ).backward()


def pp_prop(model: Stack, xs: Tensor, targets: Tensor) -> None:
    """Fills `.grad` by pp-prop's equations, with two filters a product; a bias is a column whose
    feature is 1.
    """
    v, w = torch.zeros(B, H1), torch.zeros(B, H2)
    layers = (model.fc1, model.rec1), (model.fc2, model.rec2)
    f, n = [torch.zeros(()), torch.zeros(())], 0.0
    x_bar = {linear: torch.zeros(()) for layer in layers for linear in layer}
    for x, target in zip(xs, targets, strict=True):
        v, w = (s.detach().requires_grad_() for s in (v, w))
        output, z, _ = last_step(model, x, (v, w), "core")
        b = torch.autograd.grad(loss(output, target), (v, w), retain_graph=True)
        loss(output, target).backward()
        new_v, _ = model.lower(x, v, v.detach())
        new_w = model.upper(z.detach(), w, w.detach())
        D = torch.autograd.grad(new_v.sum() + new_w.sum(), (v, w))
        df = D[0] / 0.8, D[1] / 0.7  # both states enter their layer's sum with these factors
        for k, layer in enumerate(layers):
            for linear in layer if n else ():
                asked = b[k] * f[k] / n
                linear.weight.grad += asked.T @ x_bar[linear]
                if linear.bias is not None:
                    linear.bias.grad += asked.sum(0) * n / (1 - ALPHA)
            f[k] = (ALPHA * D[k] * f[k] + (1 - ALPHA) * df[k]).detach()
        for linear, feature in ((model.fc1, x), (model.rec1, v), (model.fc2, z), (model.rec2, w)):
            x_bar[linear] = ALPHA * x_bar[linear] + feature.detach()
        n = ALPHA * n + 1 - ALPHA
        v, w = new_v, new_w


CASES: dict[str, tuple[Rule, Callable]] = {
    "d_rtrl core": (DRTRL("core", upstream="step"), lambda *case: d_rtrl(*case, "core")),
    "d_rtrl step": (DRTRL("step", upstream="step"), lambda *case: d_rtrl(*case, "step")),
    "eprop": (EProp(), lambda *case: d_rtrl(*case, "core")),
    "eprop filtered": (EProp(kappa=KAPPA), eprop),
    "pp_prop": (PPProp(decay=ALPHA), pp_prop),
}


@pytest.mark.parametrize("signals", [True, False], ids=["signal", "state"])
@pytest.mark.parametrize("name", list(CASES))
def test_two_layers_by_definition(name, signals):
    rule, define = CASES[name]
    model, xs, targets = make(signals)
    learner = eb.OnlineLearner(
        eb.wrap(model, state=lambda n: (torch.zeros(n, H1), torch.zeros(n, H2))),
        rule,
        loss,
        chunk=3,
        reduction="sum",
    )
    found = learner.gradients(xs, targets).grads
    define(model, xs, targets)
    for parameter, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 1e-3
        assert (found[parameter] - p.grad).abs().max() <= 1e-9 * p.grad.abs().max(), parameter


@pytest.mark.parametrize(
    "rule", [DRTRL("core", upstream="step"), EProp(), EProp(kappa=KAPPA), PPProp()], ids=str
)
def test_a_lower_layer_that_sends_signals_needs_its_past(rule):
    """The loss reads it through the upper layer alone: without that path nothing of its past would
    count, only each step by itself.
    """
    model, xs, targets = make(True)
    net = eb.wrap(model, state=lambda n: (torch.zeros(n, H1), torch.zeros(n, H2)))
    whole = eb.OnlineLearner(net, rule, loss, chunk=3, reduction="sum").gradients(xs, targets).grads
    for t in range(T):
        v, w = (s.detach() for s in model.history(xs, t))
        loss(model(xs[t], (v, w))[0], targets[t]).backward()
    for parameter, p in model.fc1.named_parameters(prefix="fc1"):
        assert p.grad is not None
        assert (whole[parameter] - p.grad).abs().max() > 0.05 * p.grad.abs().max()


class Delayed(Stack):
    """The upper layer reads what the lower one sent a step before, so that no step's loss depends
    on it.
    """

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        v, z = self.lower(x, state[0], state[0])
        w = torch.tanh(0.7 * state[1] + state[2] + self.rec2(state[1]))
        return self.out(w), (v, w, self.fc2(z))


def test_random_feedback_reaches_a_layer_that_answers_later():
    """`sum over t, s <= t of kappa^(t-s) (dl_t/doutput_t F) · e_s`, with the lower layer's own
    random matrix F.
    """
    _, xs, targets = make(True)
    torch.manual_seed(0)
    model, rule = Delayed(True), EProp(kappa=KAPPA, feedback="random")
    start = lambda n: (torch.zeros(n, H1), torch.zeros(n, H2), torch.zeros(n, H2))
    learner = eb.OnlineLearner(eb.wrap(model, state=start), rule, loss, chunk=3, reduction="sum")
    result = learner.gradients(xs, targets)
    matrices = rule.feedback_matrices(learner.runtime.store.compiled.program).values()
    feedback = next(torch.tensor(np.asarray(m)) for m in matrices if m.shape == (OUT, H1))
    asked = torch.cos(result.outputs + targets)  # the derivative of `loss`
    for s in range(T):
        v, _ = model.history(xs, s)
        _, z = model.lower(xs[s], v, v.detach())
        signal = sum(KAPPA ** (t - s) * asked[t] @ feedback for t in range(s, T))
        (signal * z).sum().backward()
    for name in ("fc1.weight", "fc1.bias", "rec1.weight"):
        expected = model.get_parameter(name).grad
        assert expected is not None and expected.abs().max() > 1e-2
        assert (result.grads[name] - expected).abs().max() <= 1e-9 * expected.abs().max(), name
    silent = eb.OnlineLearner(
        eb.wrap(model, state=start), EProp(kappa=KAPPA), loss, chunk=3, reduction="sum"
    ).gradients(xs, targets)
    assert silent.grads["fc1.weight"].abs().max() == 0


class LeakyReadout(Stack):
    """The upper layer is the readout: leaky integrators that are the output."""

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        v, z = self.lower(x, state[0], state[0])
        w = 0.7 * state[1] + self.fc2(z)
        return w, (v, w)


@pytest.mark.parametrize("kappa", [0.0, KAPPA])
def test_a_readout_knows_its_own_error(kappa):
    """Random feedback replaces the way back through a readout's weights; the readout's own error
    needs no way back.
    """
    _, xs, _ = make(True)
    targets = torch.randn(T, B, H2, generator=torch.Generator().manual_seed(7))
    torch.manual_seed(0)
    net = eb.wrap(LeakyReadout(True), state=lambda n: (torch.zeros(n, H1), torch.zeros(n, H2)))
    random, own = (
        eb.OnlineLearner(net, EProp(kappa=kappa, feedback=feedback), loss, chunk=3, reduction="sum")
        .gradients(xs, targets)
        .grads
        for feedback in ("random", "symmetric")
    )
    for name in ("fc2.weight", "fc2.bias"):
        assert own[name].abs().max() > 0.1
        assert (random[name] - own[name]).abs().max() <= 1e-12 * own[name].abs().max()
    assert (
        (random["fc1.weight"] - own["fc1.weight"]).abs().max()
        > 0.1 * own["fc1.weight"].abs().max()
        > 0
    )
