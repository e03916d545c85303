"""30 online steps with updates, in JAX's default mode, against the rules' definitions in plain
torch: losses, states, weights.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F

import etrace_bridge as eb
from etrace_bridge.rules import BPTT, DRTRL, RTRL, EProp, PPProp, SnAp1
from online_oracle import ALPHA, FAMILIES, KAPPA, OUT, B, I, Online
from share import in_turn

pytestmark = [pytest.mark.x32, pytest.mark.usefixtures("users_compiler")]
STEPS = 30

RULES = {
    "rtrl": RTRL, "d_rtrl step": DRTRL, "d_rtrl core": lambda: DRTRL("core"), "d_rtrl chunk": lambda: DRTRL("chunk"),
    "snap1": SnAp1, "eprop": lambda: EProp(kappa=KAPPA), "pp_prop": lambda: PPProp(decay=ALPHA), "bptt": BPTT,
}  # fmt: skip
# Adam and its kin divide by the size of a gradient: an epsilon of some size keeps rounding errors
# of tiny gradients small.
OPTIMIZERS: dict[str, Callable] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02, eps=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, eps=1e-3, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-2),
    "optax": lambda p: torch.optim.Adam(p, lr=0.03, eps=1e-3),
    # has no translation, so torch itself runs it
    "in torch": lambda p: torch.optim.NAdam(p, lr=0.02, eps=1e-3),
}
# Every second pair of a rule and a family, all pairs in `make test-full`; optimizers in turn, so
# that each meets several of both.
PAIRS = in_turn([(n, m) for n in range(len(RULES)) for m in range(len(FAMILIES))], 2)
CASES = [
    (list(RULES)[n], list(FAMILIES)[m], list(OPTIMIZERS)[(m + 5 * n) % len(OPTIMIZERS)])
    for n, m in PAIRS
]


def test_cases_cover() -> None:
    assert all(len({f for r, f, _ in CASES if r == rule}) >= 2 for rule in RULES)
    assert all(len({(r, o) for r, f, o in CASES if f == family}) >= 4 for family in FAMILIES)
    assert all(
        len({(r, f) for r, f, o in CASES if o == optimizer}) >= 2 for optimizer in OPTIMIZERS
    )


@pytest.mark.parametrize("rule, family, optimizer", CASES)
def test_thirty_steps(rule: str, family: str, optimizer: str) -> None:
    kind = FAMILIES[family]
    model = kind.make()
    reference = Online(model, kind, rule, OPTIMIZERS[optimizer])
    own = (
        optax.adam(0.03, eps=1e-3)
        if optimizer == "optax"
        else OPTIMIZERS[optimizer](model.parameters())
    )
    learner = eb.OnlineLearner(model, RULES[rule](), F.mse_loss, own)
    made = torch.Generator().manual_seed(1)
    xs = 1.5 * torch.randn(STEPS, B, I, generator=made)
    targets = torch.randn(STEPS, B, OUT, generator=made)  # labels are in test_user_mode.py
    before = {name: t.detach().clone() for name, t in reference.p.items()}
    for t in range(STEPS):
        info = learner.step(xs[t], targets[t])
        expected = reference.step(xs[t], targets[t])
        # `learner.net` would lend them, and leave the quick way
        values, session = learner.runtime.store.state, learner.runtime.store.compiled
        assert info.loss == pytest.approx(expected, rel=1e-5, abs=1e-6), f"step {t}"
        states = dict(zip(session.hidden_names, values.hidden, strict=True))
        for name, wanted in zip(kind.states, reference.state, strict=True):
            close(states[name], wanted, f"state {name} after step {t}")
        weights = dict(zip(session.weight_names, values.theta, strict=True))
        for name, wanted in reference.p.items():
            close(weights[name], wanted.detach(), f"{name} after step {t}")
    moved = {name: (t.detach() - before[name]).abs().max() for name, t in reference.p.items()}
    assert all(m > 1e-3 for name, m in moved.items()), f"hardly any learning: {moved}"
    assert float(reference.state.abs().max()) > 0.05


def close(found, wanted: torch.Tensor, what: str) -> None:
    difference = np.abs(np.asarray(found).reshape(wanted.shape) - wanted.numpy()).max()
    assert difference <= 2e-5 * max(1.0, float(wanted.abs().max())), (
        f"{what}: off by {difference:.1e}"
    )
