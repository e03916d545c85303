"""torch's optimizers translated to optax: the same updates as torch's own, in both directions."""

from __future__ import annotations

import copy

import jax
import numpy as np
import optax
import pytest
import torch

from etrace_bridge import InputError, NotSupportedError, OnlineLearner
from etrace_bridge.learning.inputs import as_array
from etrace_bridge.learning.optimizers import make_updater
from etrace_bridge.learning.torch_update import TorchUpdate

STEPS = 20

CASES = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "sgd-nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.8, nesterov=True, weight_decay=0.1
    ),
    "sgd-dampening": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, dampening=0.3, maximize=True
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adam-decay": lambda p: torch.optim.Adam(
        p, lr=0.02, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1
    ),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.02, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.3),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "rmsprop-all": lambda p: torch.optim.RMSprop(
        p, lr=0.01, momentum=0.7, centered=True, weight_decay=0.1, alpha=0.9
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad-all": lambda p: torch.optim.Adagrad(
        p, lr=0.1, lr_decay=0.05, weight_decay=0.1, initial_accumulator_value=0.2
    ),
}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, torch.nn.Parameter]:
    torch.manual_seed(1)
    shapes = {"a.weight": (3, 2), "a.bias": (3,), "b": ()}
    return {
        name: torch.nn.Parameter(torch.randn(shape, dtype=dtype)) for name, shape in shapes.items()
    }


def gradients(step: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    scale = 0.1 + step % 3  # sizes that change make amsgrad and the corrections matter
    return {
        n: scale * torch.randn(p.shape, dtype=dtype, generator=made)
        for n, p in parameters().items()
    }


def torch_steps(optimizer, params, steps, before=lambda step: None) -> dict[str, torch.Tensor]:
    for step in steps:
        before(step)
        for name, grad in gradients(step, next(iter(params.values())).dtype).items():
            params[name].grad = grad
        optimizer.step()
    return params


def bridge_steps(updater, params, steps, before=lambda step: None):
    theta = {n: as_array(p) for n, p in params.items()}
    dtype = next(iter(params.values())).dtype
    state, update = updater.init(theta), jax.jit(updater.update)
    for step in steps:
        before(step)
        if updater.translated is not None and updater.translated.signature() != updater.seen:
            state = state._replace(numbers=updater.numbers(theta))
        theta, state = update(
            {n: as_array(g) for n, g in gradients(step, dtype).items()}, state, theta
        )
    return theta, state


def assert_equal(theta, params, tolerance: float) -> None:
    start = parameters()
    for name, p in params.items():
        moved = (p.detach() - start[name].to(p.dtype)).abs().max()
        assert moved > 1e-3, f"{name} did not move: nothing is compared"
        worst = np.abs(np.asarray(theta[name]) - p.detach().numpy()).max()
        assert worst <= tolerance * float(p.detach().abs().max()), (name, worst)


@pytest.mark.parametrize("case", CASES)
def test_twenty_updates_equal_torch(case):
    params, mine = parameters(), parameters()
    torch_steps(CASES[case](params.values()), params, range(STEPS))
    theta, _ = bridge_steps(make_updater(CASES[case](mine.values()), mine), mine, range(STEPS))
    assert_equal(theta, params, 1e-12)


@pytest.mark.parametrize("case", ["sgd-momentum", "adam", "adamw", "rmsprop-all", "adagrad-all"])
def test_twenty_updates_equal_torch_in_float32(case):
    params, mine = parameters(torch.float32), parameters(torch.float32)
    torch_steps(CASES[case](params.values()), params, range(STEPS))
    theta, _ = bridge_steps(make_updater(CASES[case](mine.values()), mine), mine, range(STEPS))
    assert theta["a.weight"].dtype == np.float32
    assert_equal(theta, params, 1e-5)


def groups(params):
    weights = {"params": [params["a.weight"]], "lr": 0.1, "momentum": 0.5}
    rest = {"params": [params["a.bias"], params["b"]], "weight_decay": 0.2}
    return torch.optim.SGD([weights, rest], lr=0.02, momentum=0.9, nesterov=True)


def test_parameter_groups_have_their_own_options():
    params, mine = parameters(), parameters()
    torch_steps(groups(params), params, range(STEPS))
    theta, _ = bridge_steps(make_updater(groups(mine), mine), mine, range(STEPS))
    assert_equal(theta, params, 1e-12)


def test_torch_schedulers_change_learning_rate_and_momentum():
    def with_schedule(params):
        optimizer = CASES["sgd-momentum"](params.values())
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.3, total_steps=STEPS + 1
        )

    params, mine = parameters(), parameters()
    optimizer, scheduler = with_schedule(params)
    torch_steps(optimizer, params, range(STEPS), lambda step: step and scheduler.step())
    optimizer, other = with_schedule(mine)
    updater = make_updater(optimizer, mine)
    theta, _ = bridge_steps(updater, mine, range(STEPS), lambda step: step and other.step())
    assert_equal(theta, params, 1e-12)


@pytest.mark.parametrize("case", ["sgd-dampening", "adam-amsgrad", "rmsprop-all", "adagrad-all"])
def test_state_comes_from_torch_and_goes_back(case):
    params, mine = parameters(), parameters()
    torch_steps(CASES[case](params.values()), params, range(15))
    optimizer = CASES[case](mine.values())
    torch_steps(optimizer, mine, range(5))
    updater = make_updater(optimizer, mine)
    theta, state = bridge_steps(updater, mine, range(5, 10))
    updater.translated.export(state)
    with torch.no_grad():
        for name, p in mine.items():
            p.copy_(torch.tensor(np.asarray(theta[name])))
    torch_steps(optimizer, mine, range(10, 15))
    assert_equal({n: p.detach().numpy() for n, p in mine.items()}, params, 1e-12)


def test_clipping_is_torchs():
    params, mine = parameters(), parameters()
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    for step in range(3):
        for name, grad in gradients(step).items():
            params[name].grad = grad
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        assert norm > 0.5 or step == 0
        torch.nn.utils.clip_grad_value_(params.values(), 0.2)
        optimizer.step()
    updater = make_updater(
        torch.optim.SGD(mine.values(), lr=0.1), mine, clip_norm=0.5, clip_value=0.2
    )
    theta, _ = bridge_steps(updater, mine, range(3))
    assert_equal(theta, params, 1e-12)


def test_accumulation_averages():
    params, mine = parameters(), parameters()
    optimizer = CASES["adam"](params.values())
    for step in range(0, 6, 3):
        for name, p in params.items():
            p.grad = sum(gradients(s)[name] for s in range(step, step + 3)) / 3
        optimizer.step()
    theta, _ = bridge_steps(
        make_updater(CASES["adam"](mine.values()), mine, accumulate=3), mine, range(6)
    )
    assert_equal(theta, params, 1e-12)


@pytest.mark.implicit_promotion("optax raises the floats of a schedule to boolean powers")
def test_schedule_scales_the_learning_rate():
    mine = parameters()
    schedule = optax.piecewise_constant_schedule(1.0, {2: 0.5})
    theta, _ = bridge_steps(make_updater(optax.sgd(0.1), mine, schedule=schedule), mine, range(4))
    expected = {
        n: p.detach() - 0.1 * sum(gradients(s)[n] * (1.0 if s < 2 else 0.5) for s in range(4))
        for n, p in mine.items()
    }
    assert_equal(theta, expected, 1e-12)


def test_optax_sees_torch_names():
    mine = parameters()
    only_bias = optax.masked(optax.set_to_zero(), {"a.weight": True, "a.bias": False, "b": True})
    theta, _ = bridge_steps(
        make_updater(optax.chain(optax.sgd(0.1), only_bias), mine), mine, range(2)
    )
    assert np.array_equal(theta["a.weight"], mine["a.weight"].detach())
    assert not np.array_equal(theta["a.bias"], mine["a.bias"].detach())


def test_parameters_outside_the_optimizer_stay():
    mine = parameters()
    theta, _ = bridge_steps(
        make_updater(torch.optim.Adam([mine["b"]], lr=0.1), mine), mine, range(2)
    )
    assert np.array_equal(theta["a.weight"], mine["a.weight"].detach())
    assert not np.array_equal(theta["b"], mine["b"].detach())


def test_other_torch_optimizers_run_in_torch():
    params, mine = parameters(), parameters()
    torch_steps(torch.optim.Adamax(params.values(), lr=0.1), params, range(4))
    assert make_updater(torch.optim.Adamax(mine.values(), lr=0.1), mine) is None
    update = TorchUpdate(torch.optim.Adamax(mine.values(), lr=0.1), mine, None, None, 1)
    theta = {n: as_array(p) for n, p in mine.items()}
    for step in range(4):
        theta = update.apply(gradients(step), theta)
    assert_equal(theta, params, 1e-15)


def test_what_cannot_work_says_why():
    mine = parameters()
    with pytest.raises(NotSupportedError, match="LBFGS.*closure"):
        TorchUpdate(torch.optim.LBFGS(mine.values()), mine, None, None, 1)
    stranger = torch.nn.Parameter(torch.zeros(5))
    with pytest.raises(InputError, match=r"not parameters of the model.*\(5,\)"):
        make_updater(torch.optim.Adam([stranger]), mine)
    with pytest.raises(InputError, match="`optimizer` is a str"):
        make_updater("adam", mine)
    updater = make_updater(CASES["sgd"](mine.values()), mine)
    updater.translated.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(InputError, match="changed after the learner was made"):
        updater.translated.numbers()
    uneven = CASES["adam"](mine.values())
    mine["b"].grad = torch.ones_like(mine["b"])
    uneven.step()
    with pytest.raises(NotSupportedError, match=r"different numbers of times: \[0, 1\]"):
        bridge_steps(make_updater(uneven, mine), mine, [0])
    for p in mine.values():
        p.grad = torch.ones_like(p)
    uneven.step()
    with pytest.raises(NotSupportedError, match=r"different numbers of times: \[1, 2\]"):
        bridge_steps(make_updater(uneven, mine), mine, [])


class Readout(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = torch.nn.RNN(3, 4), torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.NAdam])
def test_clipping_is_by_all_gradients_whoever_has_the_parameters(kind):
    """As `clip_grad_norm_(model.parameters(), …)` with an optimizer of some parameters."""
    model, mse = Readout().double(), torch.nn.functional.mse_loss
    reference = copy.deepcopy(model)
    learner = OnlineLearner(
        model, "rtrl", mse, kind(model.out.parameters(), lr=0.1), clip_norm=0.1, track_norm=True
    )
    optimizer = kind(reference.out.parameters(), lr=0.1)
    for _ in range(3):
        x, y = torch.randn(4, 5, 3).double(), torch.randn(4, 5, 2).double()
        learner.update(x, y)
        reference.zero_grad()
        mse(reference(x), y).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        optimizer.step()
        assert norm > 0.2
        assert learner.gradient_norm == pytest.approx(float(norm), rel=1e-9)
    learner.sync_to_torch()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-12)
