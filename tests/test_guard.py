"""The guard: training stops at NaN with the step and the parameter, and the last good state stays."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from etrace_bridge.learning.guard import (
    alarm_text,
    full_verdict,
    new_alarm,
    quick_verdict,
    to_watch,
)
from etrace_bridge.lowering import CPUTuning, Tuning
from learner_models import B, O, T, make_data, make_net

XS, YS = make_data()
BAD = XS.clone()
BAD[3, 1, 0] = torch.nan


def copies(learner: eb.OnlineLearner) -> list[np.ndarray]:
    """Every array but the guard's own."""
    return [np.array(x) for x in jax.tree.leaves(learner.runtime.store.state.replace(alarm=None))]


def assert_unchanged(learner: eb.OnlineLearner, before: list[np.ndarray]) -> None:
    now = copies(learner)
    assert len(now) == len(before) and all(map(np.array_equal, now, before))
    assert all(np.isfinite(x).all() for x in now if x.dtype.kind == "f")


@pytest.fixture(scope="module")
def shared() -> eb.OnlineLearner:
    return eb.OnlineLearner(
        make_net(), rule="d_rtrl", loss=mse_loss, optimizer=optax.adam(0.01), chunk=2
    )


@pytest.fixture
def learner(shared: eb.OnlineLearner) -> eb.OnlineLearner:
    shared.reset()
    shared.net.load_state_dict(make_net().state_dict())
    return shared


def test_a_step_that_is_read_stops_at_once(learner):
    for n in range(3):
        learner.step(XS[n], YS[n])
    before, steps, updates = copies(learner), learner.steps, learner.updates
    bad = learner.step(BAD[3], YS[3])
    with pytest.raises(eb.NonFiniteError) as caught:
        _ = bad.loss
    message = str(caught.value)
    assert (
        f"At step {steps + 1}," in message
        and "`rnn.weight_ih_l0`" in message
        and "the loss" in message
    )
    assert (learner.steps, learner.updates) == (steps, updates)
    assert_unchanged(learner, before)
    assert np.isfinite(learner.step(XS[3], YS[3]).loss)  # it goes on from there
    assert learner.steps == steps + 1


def test_steps_that_nobody_reads_stop_too(learner):
    learner.step(XS[0], YS[0])
    learner.step(XS[1])
    before, steps, updates = copies(learner), learner.steps, learner.updates
    with pytest.raises(eb.NonFiniteError, match=f"At step {steps + 1},"):
        learner.step(BAD[3], YS[3])
        for n in range(200):  # none of these is made
            learner.step(XS[n % T], YS[n % T])
    assert n < 100, "the guard was never asked"
    assert (learner.steps, learner.updates) == (steps, updates)
    assert_unchanged(learner, before)


def test_a_step_without_a_target_is_guarded(learner):
    learner.step(XS[0], YS[0])
    before, steps = copies(learner), learner.steps
    learner.step(BAD[3] * torch.nan)
    with pytest.raises(
        eb.NonFiniteError, match=rf"At step {steps + 1},.*the hidden state `rnn\.h_l0`"
    ):
        learner.gradients(XS, YS)
    assert_unchanged(learner, before)


def test_a_gradient_that_alone_is_not_finite(learner):
    learner.step(XS[0], YS[0])
    before = copies(learner)
    # tanh makes it 1, but its derivative times the input is NaN
    saturated = learner.step(torch.full_like(XS[1], torch.inf), YS[1])
    assert np.isfinite(saturated.loss)
    with pytest.raises(
        eb.NonFiniteError, match=r"appeared in: the gradient of `rnn\.weight_ih_l0`\. "
    ):
        learner.gradients(XS, YS)
    assert_unchanged(learner, before)


def test_a_target_that_is_nan_names_the_gradient(learner):
    learner.step(XS[0], YS[0])
    before = copies(learner)
    with pytest.raises(eb.NonFiniteError, match=r"the loss, the gradient of `rnn\.weight_ih_l0`"):
        _ = learner.step(XS[1], YS[1] * torch.nan).loss
    assert_unchanged(learner, before)


@pytest.mark.parametrize(
    ("every", "good", "made"), [("sequence", 0, 0), ("chunk", 2, 1), ("step", 3, 3)]
)
def test_sequences_stop_before_the_first_bad_update(learner, every, good, made):
    start = learner.net.state_dict()
    learner.step(XS[0])
    steps, updates = learner.steps, learner.updates
    with pytest.raises(eb.NonFiniteError, match=f"At step {steps + 4},.*gradient of"):
        learner.update(BAD, YS, every=every, carry=True)
    assert learner.updates == updates + made and learner.steps == steps + good
    now = learner.net.state_dict()
    moved = [name for name in now if not torch.equal(now[name], start[name])]
    assert len(moved) == (6 if made else 0)
    assert all(np.isfinite(x).all() for x in copies(learner) if x.dtype.kind == "f")
    hidden = learner.runtime.store.state.hidden[0]
    learner.net.load_state_dict(start)
    learner.reset()
    learner.step(XS[0])
    again = learner.update(XS[:good], YS[:good], every=every, carry=True).losses if good else ()
    assert len(again) == good
    # The optimizer's memory is another one by now, so only a first update can be repeated
    if made == 1:
        assert np.array_equal(learner.runtime.store.state.hidden[0], hidden)


def test_a_sequence_of_its_own_changes_nothing(learner):
    learner.update(XS, YS)
    before, steps, updates = copies(learner), learner.steps, learner.updates
    with pytest.raises(eb.NonFiniteError, match=f"At step {steps + 4},"):
        learner.update(BAD, YS)
    assert_unchanged(learner, before)
    assert (learner.steps, learner.updates) == (steps, updates)
    with pytest.raises(eb.NonFiniteError):
        learner.fit([(XS, YS), (BAD, YS), (XS, YS)])
    assert len(learner.history.batch_losses) == 1 and learner.history.stopped == "NonFiniteError"


def test_weights_that_overflow_are_not_taken():
    learner = eb.OnlineLearner(
        make_net(), rule="bptt", loss=mse_loss, optimizer=optax.sgd(1e308), reduction="sum"
    )
    learner.gradients(XS, YS)
    before = copies(learner)
    with pytest.raises(eb.NonFiniteError, match=r"`out\.weight`|`rnn\.weight_hh_l0`"):
        learner.update(XS, 1e3 * YS)
    assert_unchanged(learner, before)


@pytest.mark.parametrize("kind", ["hook", "torch optimizer"])
def test_updates_through_torch_are_guarded(kind):
    model = make_net()
    optimizer = optax.sgd(0.1) if kind == "hook" else torch.optim.Adamax(model.parameters())
    if kind == "hook":
        model.out.bias.register_hook(lambda grad: grad * 2)
    learner = eb.OnlineLearner(model, rule="bptt", loss=mse_loss, optimizer=optimizer)
    learner.step(XS[0], YS[0])
    learner.update(XS, YS)
    before, steps = copies(learner), learner.steps
    with pytest.raises(eb.NonFiniteError, match=f"At step {steps + 1},"):
        learner.step(BAD[3], YS[3])
    assert_unchanged(learner, before)
    with pytest.raises(
        eb.NonFiniteError,
        match=f"At step {steps + 4},.*the loss, the gradient of `rnn.weight_ih_l0`",
    ):
        learner.update(BAD, YS)
    assert_unchanged(learner, before)
    assert learner.steps == steps


def test_without_the_guard_nan_goes_on_and_nothing_piles_up():
    learner = eb.OnlineLearner(
        make_net(), rule="d_rtrl", loss=mse_loss, optimizer=optax.sgd(0.1), guard=False
    )
    learner.step(BAD[3], YS[3])
    assert np.isnan(learner.step(XS[0], YS[0]).loss)
    for _ in range(200):
        learner.step(XS[0], YS[0])
    assert len(learner.runtime.watch.recent) <= 64
    assert learner.steps == 202


@pytest.fixture(scope="module")
def alone() -> eb.OnlineLearner:
    """Batch 1: the factors of the gradients are watched in their place."""
    return eb.OnlineLearner(
        make_net(hidden=16), rule="d_rtrl", loss=mse_loss, optimizer=optax.adam(0.01)
    )


def test_gradients_are_watched_by_their_factors(alone):
    one = slice(0, 1)
    alone.step(XS[0, one], YS[0, one])
    runtime = alone.runtime
    values, session = runtime.store.state, runtime.store.compiled
    spec = runtime.programs.spec(runtime.losses.find(session, YS[0, one]))
    data = spec.one_step(values.theta, [XS[0, one].numpy()], YS[0, one].numpy())
    found = spec.core.chunk(values.theta, values.carry, data, False, False)
    products = session.program.only_traced
    assert [n for n, p in zip(session.weight_names, products, strict=True) if not p] == [
        "out.weight",
        "out.bias",
    ]
    watched = to_watch(found.grads, values.trace, found.factors, products)
    assert len(watched[0]) == 2 and watched[1] is values.trace
    assert to_watch(found.grads, [values.trace] * 3, found.factors, products) is found.grads, (
        "a large memory is not read"
    )


@pytest.mark.parametrize(
    ("x", "y", "named"),
    [
        (torch.nan, 1, "the loss, the gradient of `rnn"),
        (torch.inf, 1, r"appeared in: the gradient of `rnn\.weight_ih_l0`\. "),
        (1, torch.nan, "the loss, the gradient of `rnn"),
        (torch.inf, None, "appeared in: the trace"),
        (torch.nan, None, r"the hidden state `rnn\.h_l0`"),
    ],
)
def test_one_sample_at_a_time(alone, x, y, named):
    one = slice(0, 1)
    alone.reset()
    alone.step(XS[0, one], YS[0, one])
    before = copies(alone)
    bad = XS[1, one].clone()
    bad[0, 0] *= x  # infinity is no worse for tanh than 1
    alone.step(bad, None if y is None else YS[1, one] * y)
    with pytest.raises(eb.NonFiniteError, match=named):
        alone.gradients(XS[:, one], YS[:, one])
    assert_unchanged(alone, before)
    assert np.isfinite(alone.step(XS[1, one], YS[1, one]).loss)


def test_a_trace_that_is_not_finite(alone):
    one = slice(0, 1)
    alone.reset()
    alone.step(XS[0, one], YS[0, one])
    runtime = alone.runtime
    good = runtime.store.state
    runtime.store.state = good.replace(
        trace=jax.tree.map(lambda t: t.at[-1, -1].set(np.inf), good.trace)
    )
    weights = [np.array(w) for w in good.theta]
    with pytest.raises(eb.NonFiniteError, match="the gradient of `rnn"):
        _ = alone.step(XS[1, one], YS[1, one])
        alone.gradients(XS[:, one], YS[:, one])
    assert all(map(np.array_equal, runtime.store.state.theta, weights))
    runtime.store.state = runtime.store.state.replace(trace=good.trace)


class RootOfWeight(nn.Module):
    """A weight whose square root is used: at zero its derivative is infinite, and everything else
    is finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))

    def forward(self, x, h=None):
        h = torch.tanh(x @ self.w.sqrt() + (0 if h is None else 0.5 * h))
        return h, h


def test_a_derivative_of_the_weight_itself_that_is_infinite():
    model = RootOfWeight()
    with torch.no_grad():
        model.w[0, 0] = 0
    learner = eb.OnlineLearner(model, rule="d_rtrl", loss=mse_loss, optimizer=optax.sgd(0.1))
    with pytest.raises(eb.NonFiniteError, match="the gradient of `w`"):
        learner.step(torch.ones(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64))
        learner.gradients(
            torch.ones(2, 1, 3, dtype=torch.float64), torch.zeros(2, 1, 3, dtype=torch.float64)
        )


def test_an_element_that_overflows_keeps_its_value():
    learner = eb.OnlineLearner(make_net(), rule="d_rtrl", loss=mse_loss, optimizer=optax.sgd(1e308))
    grads = learner.gradients(XS[:1, :1], 1e3 * YS[:1, :1]).grads
    assert (
        all(torch.isfinite(g).all() for g in grads.values())
        and torch.isinf(1e308 * grads["out.weight"]).any()
    )
    learner.step(XS[0, :1], 1e3 * YS[0, :1])
    learner.runtime.watch.look()
    assert all(np.isfinite(x).all() for x in copies(learner) if x.dtype.kind == "f")


@pytest.mark.parametrize("tuning", [CPUTuning(), Tuning()], ids=["cpu", "plain"])
def test_verdicts(tuning):
    fine, nan = np.ones((B, O)), np.full((B, O), np.nan)
    alarm = new_alarm(5, 3)
    good, after = full_verdict(alarm, [fine, fine, fine])
    assert bool(good) and list(after) == [6, 0, 0, 0, 0]
    good, after = full_verdict(alarm, [fine, nan, fine])
    assert not bool(good) and list(after) == [5, 1, 0, 1, 0]
    still, later = full_verdict(after, [fine, fine, fine])
    assert not bool(still) and list(later) == list(after), "once stopped, it stays stopped"
    # compiled: XLA must not drop a product with zeros
    quick = jax.jit(functools.partial(quick_verdict, tuning=tuning))
    large, huge = np.ones((64, 33)), np.full((B, O), 1e200)  # huge in float64, infinite in float32
    good, after = quick(alarm, (np.float64(1), [fine, huge], [large, np.arange(3)]))
    assert bool(good) and list(after) == [6, 0, 0, 0, 0]
    holes = large.copy()
    holes[63, 32] = np.inf
    for loss, one, many in (
        (np.nan, fine, large),
        (1.0, nan, large),
        (1.0, fine, holes),
        (np.inf, fine, large),
    ):
        good, after = quick(alarm, (np.float64(loss), [fine, one], [many]))
        assert not bool(good) and list(after) == [5, 1, 0, 0, 0]
    assert not bool(quick(np.array([5, 1, 0], np.int32), fine)[0])
    many = alarm_text(7, [f"the gradient of `w{n}`" for n in range(6)])
    assert alarm_text(3, ["the trace"], 6).startswith("Somewhere in steps 3 to 6, NaN or infinity")
    assert "At step 7" in many and "`w3` and 2 more" in many and "`clip_norm=1.0`" in many
