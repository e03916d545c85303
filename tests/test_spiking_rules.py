"""Rules for spiking stacks against their papers' definitions, written in torch with autograd on
single steps and loops over time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.rules import DECOLLE, DRTRL, OTPE, OTTT, EProp, Immediate, Rule
from online_oracle import Spike
from quick_jit import quick_jit
from sequences import sequence_gradient

T, B, IN, H1, H2, OUT = 6, 3, 4, 5, 6, 2
LEAK = 0.8


class Layers(nn.Module):
    """Two layers of leaky integrate-and-fire units without recurrent weights, and a readout of the
    upper one's spikes.

    Args:
        reset: a spike takes this much off the membrane, which no derivative sees.
    """

    def __init__(self, reset: float = 0.3) -> None:
        super().__init__()
        self.fc1 = nn.Linear(IN, H1)
        self.fc2 = nn.Linear(H1, H2)
        self.out = nn.Linear(H2, OUT)
        self.reset = reset

    def layer(self, current: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """The new membrane and the spike."""
        u = LEAK * u + current - self.reset * (u > 0.3)
        return u, Spike.apply(u - 0.3)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        u1, s1 = self.layer(self.fc1(x), state[0])
        u2, s2 = self.layer(self.fc2(s1), state[1])
        return self.out(s2), (u1, u2)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.sin(output + target).sum()


def start(n: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(n, H1), torch.zeros(n, H2)


@pytest.fixture(autouse=True)
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def make() -> tuple[Layers, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    model = Layers()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.6 * torch.randn(p.shape, generator=generator))
    return (
        model,
        torch.randn(T, B, IN, generator=generator),
        torch.randn(T, B, OUT, generator=generator),
    )


@cache
def built() -> CompiledStep:
    model, xs, _ = make()
    return CompiledStep(eb.wrap(model, state=start), [xs[0].numpy()])


@cache
def found(rule: Rule, chunk: int) -> dict[str, Tensor]:
    """The rule's gradient of the summed losses."""
    compiled, (_, xs, targets) = built(), make()
    grads = quick_jit(lambda: sequence_gradient(compiled, rule, xs, targets, chunk))()
    return {
        name: torch.tensor(np.asarray(g))
        for name, g in zip(compiled.weight_names, grads, strict=True)
    }


# ---- the definitions: `at_step(model, spikes and membranes of the step, target)` gives what a step
# adds to the gradients


class Step:
    """One step of the stack, taken apart: old membranes are constants.

    Attributes:
        x: what the two layers read.
        u: their membranes.
        s: their spikes.
        output: the readout's.
    """

    def __init__(self, model: Layers, x: Tensor, state: tuple[Tensor, Tensor]) -> None:
        u1, s1 = model.layer(model.fc1(x), state[0].detach())
        u2, s2 = model.layer(model.fc2(s1), state[1].detach())
        self.x, self.u, self.s, self.output = (x, s1), (u1, u2), (s1, s2), model.out(s2)


def run(model: Layers, xs: Tensor, targets: Tensor, make_rule: Callable) -> dict[str, Tensor]:
    """Gradients by a rule that is given the steps one after the other; the readout's own gradient
    is plain.
    """
    rule, state = make_rule(model), start(B)
    grads = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    rates = []
    for x, target in zip(xs, targets, strict=True):
        step = Step(model, x, state)
        readout = list(model.out.parameters())
        for (name, _), g in zip(
            model.out.named_parameters(prefix="out"),
            torch.autograd.grad(loss(step.output, target), readout, retain_graph=True),
            strict=True,
        ):
            grads[name] += g
        for k, (weight, bias) in enumerate(rule(step, target), 1):
            grads[f"fc{k}.weight"] += weight
            grads[f"fc{k}.bias"] += bias
        rates.append(torch.cat([s.detach().flatten() for s in step.s]).mean())
        state = tuple(u.detach() for u in step.u)
    assert 0.05 < sum(rates) / T < 0.95, "silent, or always firing"
    return grads


def ottt(model: Layers, leak: float = LEAK) -> Callable:
    """`dl/du ⊗ x̄`; a bias is a column that reads 1."""
    filters = [torch.zeros(B, IN + 1), torch.zeros(B, H1 + 1)]

    def at_step(step: Step, target: Tensor):
        for k, delta in enumerate(torch.autograd.grad(loss(step.output, target), step.u)):
            filters[k] = leak * filters[k] + torch.cat([step.x[k], torch.ones(B, 1)], 1).detach()
            whole = delta.T @ filters[k]
            yield whole[:, :-1], whole[:, -1]

    return at_step


def surrogate(u: Tensor) -> Tensor:
    return 1 / (1 + 2 * (u - 0.3).abs()) ** 2


def eligibilities() -> Callable:
    """`ds_t/dθ` of both layers, (B, units, inputs + 1), from filtered inputs."""
    filters = [torch.zeros(B, IN + 1), torch.zeros(B, H1 + 1)]

    def at_step(step: Step) -> list[Tensor]:
        made = []
        for k in range(2):
            filters[k] = LEAK * filters[k] + torch.cat([step.x[k], torch.ones(B, 1)], 1).detach()
            made.append(surrogate(step.u[k].detach())[:, :, None] * filters[k][:, None])
        return made

    return at_step


def otpe(model: Layers) -> Callable:
    """`dl/ds · R`, R the lower layer's eligibility filtered by the upper one's leak; nothing comes
    after the upper layer.
    """
    e_of, R = eligibilities(), torch.zeros(())

    def at_step(step: Step, target: Tensor):
        nonlocal R
        e = e_of(step)
        R = LEAK * R + e[0]
        for signal, trace in zip(
            torch.autograd.grad(loss(step.output, target), step.s), (R, e[1]), strict=True
        ):
            whole = torch.einsum("bu,bui->ui", signal, trace)
            yield whole[:, :-1], whole[:, -1]

    return at_step


def decolle(readouts: list[Tensor]) -> Callable:
    """`d l(s G)/ds · e` for each layer by itself."""

    def make_rule(model: Layers) -> Callable:
        e_of = eligibilities()

        def at_step(step: Step, target: Tensor):
            for s, G, e in zip(step.s, readouts, e_of(step), strict=True):
                spikes = s.detach().requires_grad_()
                (signal,) = torch.autograd.grad(loss(spikes @ G, target), spikes)
                whole = torch.einsum("bu,bui->ui", signal, e)
                yield whole[:, :-1], whole[:, -1]

        return at_step

    return make_rule


def check(rule: Rule, make_rule: Callable, chunks: tuple[int, ...] = (3,)) -> dict[str, Tensor]:
    expected = run(*make(), make_rule)
    for chunk in chunks:
        for name, g in expected.items():
            assert g.abs().max() > 1e-3
            assert (found(rule, chunk)[name] - g).abs().max() <= 1e-9 * g.abs().max(), (name, chunk)
    return expected


def differs(a: dict[str, Tensor], b: dict[str, Tensor], name: str = "fc1.weight") -> bool:
    return bool((a[name] - b[name]).abs().max() > 0.05 * b[name].abs().max())


def test_ottt_by_definition():
    expected = check(OTTT(leak=LEAK), ottt, chunks=(3, 1))
    assert differs(expected, found(Immediate(), 3)), "the past makes a difference here"


def test_immediate_is_ottt_without_leak():
    check(Immediate(), lambda model: ottt(model, 0.0))


def test_ottt_is_d_rtrl_where_the_leak_is_the_only_memory():
    for name, g in found(DRTRL("core", upstream="step"), 3).items():
        assert g.abs().max() > 1e-3, name
        assert (found(OTTT(leak=LEAK), 3)[name] - g).abs().max() <= 1e-12 * g.abs().max(), name


def test_otpe_by_definition():
    expected = check(OTPE(leak=LEAK), otpe, chunks=(3, T))
    assert differs(expected, found(EProp(), 3))


def test_otpe_comes_closer_to_bptt_than_ottt():
    """What it is for: the lower layer's weights, whose effect the upper layer's membrane keeps."""

    def cosine(rule: Rule) -> float:
        a, b = found(rule, 3)["fc1.weight"], found(eb.rules.BPTT(), T)["fc1.weight"]
        return float((a * b).sum() / a.norm() / b.norm())

    assert cosine(OTPE(leak=LEAK)) > cosine(OTTT(leak=LEAK)) + 0.02


def test_decolle_by_definition():
    rule = DECOLLE(seed=2)
    matrices = [torch.tensor(np.asarray(G)) for G in rule.readouts(built().program).values()]
    assert [tuple(G.shape) for G in matrices] == [(H1, OUT), (H2, OUT)]
    check(rule, decolle(matrices))


def test_elements_that_are_reset_start_anew():
    """After a reset of one element its gradient is that of a new sequence."""
    (model, xs, targets), rule = make(), OTTT(leak=LEAK)
    first, alone = (
        eb.OnlineLearner(
            eb.wrap(model, state=start),
            rule,
            lambda y, t: loss(y[:1], t[:1]),
            chunk=1,
            reduction="sum",
        )
        for _ in range(2)
    )
    first.gradients(xs[:2], targets[:2], carry=True)
    first.reset(torch.tensor([True, False, False]))
    left, new = (one.gradients(xs[2:4], targets[2:4], carry=True).grads for one in (first, alone))
    for name, g in new.items():
        assert (left[name] - g).abs().max() <= 1e-12 * g.abs().max(), name


def test_rules_that_read_the_loss_are_refused_where_it_is_unknown():
    for name in ("decolle", "three_factor", "dni", "fptt"):
        with pytest.raises(eb.InputError, match=f"`{name}` needs the loss"):
            eb.OnlineModule(nn.GRU(2, 3), rule=name)(torch.zeros(1, 2))
    learner = eb.OnlineLearner(nn.GRU(2, 3), "three_factor", seq_loss=lambda ys, target: ys.sum())
    with pytest.raises(eb.InputError, match="a loss over the whole sequence has none"):
        learner.gradients(torch.zeros(2, 1, 2), torch.zeros(1))


@pytest.mark.parametrize("make_rule", [OTTT, OTPE])
def test_the_leak_is_a_decay(make_rule):
    with pytest.raises(eb.InputError, match="`leak` is 1.5"):
        make_rule(leak=1.5)


class Leaky(nn.Module):
    """Units that add up a product."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(IN, H1, bias=False)

    def forward(self, x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        u = LEAK * u + self.fc(x)
        return u, u


def test_three_factor_learns_from_a_reward_that_no_output_enters():
    """`g = -sum of r_t x̄_t`, with x̄ the filtered inputs, the same for every unit."""
    torch.manual_seed(0)
    xs, rewards = torch.randn(T, B, IN), torch.randn(T, B)

    def negative_reward(output: Tensor, reward: Tensor) -> Tensor:
        return -reward.mean()

    def make(rule: str) -> eb.OnlineLearner:
        net = eb.wrap(Leaky(), state=lambda n: torch.zeros(n, H1))
        return eb.OnlineLearner(net, rule, negative_reward, reduction="sum")

    filtered, expected = torch.zeros(B, IN), torch.zeros(H1, IN)
    for x, reward in zip(xs, rewards, strict=True):
        filtered = LEAK * filtered + x
        expected -= reward.mean() * filtered.sum(0)
    found = make("three_factor").gradients(xs, rewards).grads["fc.weight"]
    assert expected.abs().max() > 0.1 and (found - expected).abs().max() < 1e-9
    with pytest.raises(eb.InputError, match="no derivative by the model's output"):
        make("decolle").gradients(xs, rewards)
