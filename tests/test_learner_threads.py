"""Threads and long runs: two learners at once, one learner in two threads, learners that are
dropped.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import etrace_bridge as eb
from learner_models import make_data, make_net

XS, YS = make_data(steps=30)


def make_learner() -> eb.OnlineLearner:
    model = make_net()
    return eb.OnlineLearner(
        model, "d_rtrl", F.mse_loss, torch.optim.Adam(model.parameters(), lr=0.05)
    )


def weights(learner: eb.OnlineLearner) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in learner.net.state_dict().items()}


def run_stream(learner: eb.OnlineLearner, shift: int) -> tuple[dict[str, np.ndarray], list[float]]:
    losses = [learner.step(x + shift, y).loss for x, y in zip(XS, YS, strict=True)]
    return weights(learner), losses


def test_two_learners_in_two_threads_are_right():
    alone = [run_stream(make_learner(), shift) for shift in (0, 1)]
    # here, since torch has one random state for all threads
    learners = [make_learner(), make_learner()]
    with ThreadPoolExecutor(2) as pool:  # they compile at once too
        together = list(pool.map(run_stream, learners, (0, 1)))
    for (expected, losses), (found, found_losses) in zip(alone, together, strict=True):
        assert found_losses == losses
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert alone[0][1] != alone[1][1]


def test_one_learner_in_two_threads_makes_its_steps_one_after_the_other():
    expected, learner = make_learner(), make_learner()
    for _ in range(80):
        expected.step(XS[0], YS[0])
    learner.step(XS[0], YS[0])

    def work(count: int) -> None:
        for n in range(count):
            learner.step(XS[0].clone(), YS[0].clone())
            if n % 10 == 0:
                learner.predict(XS[:3])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (40, 39)))
    assert (learner.steps, learner.updates) == (80, 80)
    found, wanted = weights(learner), weights(expected)
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert np.abs(wanted["out.bias"] - make_net().out.bias.detach().numpy()).max() > 0.1


def test_learners_that_are_dropped_leave_nothing_behind():
    counts, dead = [], []
    for _ in range(4):
        learner = make_learner()
        learner.step(XS[0], YS[0])
        dead.append(weakref.ref(learner.runtime.store.compiled))
        del learner
        gc.collect()
        counts.append(len(jax.live_arrays()))
    assert [ref() for ref in dead] == [None] * 4
    assert counts[-1] <= counts[1]


@pytest.mark.x32
def test_the_soak_in_small(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent))
    soak = importlib.import_module("benchmarks.soak")
    counts = [
        (done, len(jax.live_arrays()))
        for done in soak.run_steps(264, per_batch_size=66, sizes=(1, 3))
    ]
    assert [done for done, _ in counts] == [66, 132, 198, 264]  # each batch size twice
    assert counts[-1][1] <= max(count for _, count in counts[:2])
    assert soak.watch("learners", 1, soak.run_learners(1), float("inf")) < 1e6
    assert "1 of 1" in capsys.readouterr().out
