"""Sequences of every length through one compiled program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from learner_models import assert_same, make_data, make_net, torch_gradients


def count_programs(function: Callable, *args: Any) -> tuple[Any, int]:
    """What a function gives, and how many programs JAX compiles for it."""
    client = jax.devices()[0].client
    before = client.live_executables()  # held, so that identities stay theirs
    result = function(*args)
    made = sum(all(p is not old for old in before) for p in client.live_executables())
    return result, made


def make_learner(**options: Any) -> eb.OnlineLearner:
    return eb.OnlineLearner(
        make_net(), rule="rtrl", loss=mse_loss, optimizer=optax.sgd(0.1), chunk=8, **options
    )


def test_every_length_runs_through_the_same_programs() -> None:
    """The gradients are those of torch, also where the last chunk is padded, and where steps are
    masked; only the first length is compiled for.
    """
    learner = make_learner(any_length=True)
    first = make_data(steps=5)
    learner.gradients(*first)
    for steps in (8, 21, 100):
        xs, ys = make_data(steps=steps, seed=steps)
        result, made = count_programs(learner.gradients, xs, ys)
        assert made == 0
        assert result.outputs.shape == ys.shape and len(result.losses) == steps
        assert_same(result.grads, torch_gradients(make_net(), xs, ys))
    mask = (torch.arange(21) % 3 != 0).double()
    xs, ys = make_data(steps=21)
    weighted = lambda y, t: mse_loss(y, t) * float(next(weights))
    weights = iter(mask * 21 / mask.sum())
    expected = torch_gradients(make_net(), xs, ys, loss=weighted)
    assert_same(learner.gradients(xs, ys, mask).grads, expected)


def test_an_update_of_any_length() -> None:
    """The weights move by torch's gradient, and a sequence that is not finite changes nothing."""
    learner = make_learner(any_length=True)
    xs, ys = make_data(steps=11)
    start = {n: p.detach().clone() for n, p in make_net().named_parameters()}
    learner.update(xs, ys)
    learner.sync_to_torch()
    model = learner.runtime.net.model
    moved = {n: (start[n] - p.detach()) / 0.1 for n, p in model.named_parameters()}
    assert_same(moved, torch_gradients(make_net(), xs, ys))
    assert count_programs(learner.update, *make_data(steps=30))[1] == 0
    before = [np.array(w) for w in learner.runtime.store.state.theta]
    with pytest.raises(eb.NonFiniteError, match="At step"):
        learner.update(xs * float("inf"), ys)
    for old, new in zip(before, learner.runtime.store.state.theta, strict=True):
        np.testing.assert_array_equal(old, new)


def test_predict_and_evaluate_of_any_length() -> None:
    """Outputs and losses are torch's, and only the first length is compiled for."""
    learner, net = make_learner(any_length=True), make_net()
    learner.predict(make_data(steps=5)[0]), learner.evaluate([make_data(steps=5)])
    for steps in (100, 130, 1_000, 10_000):
        xs, ys = make_data(steps=steps, seed=steps)
        outputs, made = count_programs(learner.predict, xs)
        expected = net(xs).detach()
        torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-12)
        loss, again = count_programs(learner.evaluate, [(xs, ys)])
        assert made == again == 0
        assert loss == pytest.approx(float(mse_loss(expected, ys)), rel=1e-9)
    # from the states of a stream, which stay as they are
    xs, ys = make_data(steps=13)
    for n in range(5):
        learner.step(xs[n])
    found, made = count_programs(learner.predict, xs[5:], True)
    torch.testing.assert_close(found, net(xs)[5:].detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(learner.predict(xs[5:7], True), found[:2])
    mask = (torch.arange(13) % 3 != 0).double()
    errors = mse_loss(net(xs).detach(), ys, reduction="none").mean((1, 2))
    weighted = (errors * mask).sum() / mask.sum()
    assert learner.evaluate([(xs, ys, mask)]) == pytest.approx(float(weighted), rel=1e-9)


def count_long(function: Callable, *args: Any) -> int:
    """The same count without copies to the device, which JAX compiles for each shape in
    milliseconds.
    """
    client = jax.devices()[0].client
    before = client.live_executables()
    function(*args)
    made = [p for p in client.live_executables() if all(p is not old for old in before)]
    return sum("stage" not in p.hlo_modules()[0].name for p in made)


def test_a_new_shape_compiles_at_most_two_programs() -> None:
    """By default, for each kind of call: a new length, and a new batch size."""
    learner = eb.OnlineLearner(make_net(), loss=mse_loss, optimizer=optax.sgd(0.1))
    xs, ys = make_data(steps=5)
    calls = {
        "gradients": lambda xs, ys: learner.gradients(xs, ys),
        "update": lambda xs, ys: learner.update(xs, ys),
        "predict": lambda xs, ys: learner.predict(xs),
        "evaluate": lambda xs, ys: learner.evaluate([(xs, ys)]),
    }
    for name, call in calls.items():
        call(xs, ys)
        counts = [
            count_long(call, *make_data(steps=steps, batch=batch))
            for steps, batch in ((100, 3), (10_000, 3), (100, 3), (100, 4))
        ]
        assert counts[2] == 0 and max(counts) <= 2 and counts[0] > 0, (name, counts)
