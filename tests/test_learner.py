"""OnlineLearner against torch: gradients, updates, streams, resets, layouts, batch sizes."""

from __future__ import annotations

import numpy as np
import optax
import pytest
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from learner_models import B, I, O, T, assert_same, make_data, make_net, torch_gradients, torch_loss


def weights(learner) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in learner.net.state_dict().items()}


@pytest.mark.parametrize("rule", ["rtrl", "d_rtrl", "pp_prop"])
def test_every_division_of_a_sequence_gives_the_same(rule):
    """Two chunks, with and without a rest, and one with a rest are written out; three or more are a
    loop, and so are single steps.
    """
    model, (xs, ys) = make_net(), make_data(steps=8)

    def gradients(chunk: int) -> dict[str, torch.Tensor]:
        return (
            eb.OnlineLearner(model, rule=rule, loss=mse_loss, chunk=chunk).gradients(xs, ys).grads
        )

    single = torch_gradients(model, xs, ys) if rule == "rtrl" else gradients(1)
    assert single["rnn.weight_hh_l0"].abs().max() > 1e-4
    for chunk in (4, 3, 5, 2):
        assert_same(gradients(chunk), single)


def test_gradients_of_an_exact_rule_are_torchs():
    model, (xs, ys) = make_net(), make_data()
    learner = eb.OnlineLearner(model, rule="rtrl", loss=mse_loss, chunk=2)
    found = learner.gradients(xs, ys)
    expected = torch_gradients(model, xs, ys)
    assert_same(found.grads, expected)
    assert found.loss == pytest.approx(torch_loss(model, xs, ys).item(), rel=1e-12)
    assert torch.allclose(found.outputs, model(xs), rtol=1e-12)
    assert found.losses.shape == (T,)
    assert not found.grads["spare.weight"].any()
    assert "spare.weight" in learner.graph.report()

    learner.gradients(xs[:3], ys[:3], carry=True)
    second = learner.gradients(xs[3:], ys[3:], carry=True)
    whole = {n: (2 * expected[n] - torch_gradients(model, xs[:3], ys[:3])[n]) for n in expected}
    assert_same(second.grads, whole)  # the trace carried what the first half did

    masked = learner.gradients(xs, ys, mask=torch.tensor([0.0, 0, 1, 0, 0, 1]))
    model.zero_grad()
    out = model(xs)
    ((mse_loss(out[2], ys[2]) + mse_loss(out[5], ys[5])) / 2).backward()
    for name, grad in masked.grads.items():
        own = dict(model.named_parameters())[name].grad
        assert torch.allclose(
            grad, torch.zeros_like(grad) if own is None else own, rtol=1e-9, atol=1e-12
        )


def test_updates_are_those_of_a_torch_loop():
    model, mine = make_net(), make_net()
    optimizer = torch.optim.Adam(
        [{"params": model.rnn.parameters()}, {"params": model.out.parameters(), "lr": 0.1}], lr=0.02
    )
    other = torch.optim.Adam(
        [{"params": mine.rnn.parameters()}, {"params": mine.out.parameters(), "lr": 0.1}], lr=0.02
    )
    learner = eb.OnlineLearner(mine, rule="bptt", loss=mse_loss, optimizer=other)
    for n in range(20):
        xs, ys = make_data(seed=n)
        torch_gradients(model, xs, ys)
        optimizer.step()
        result = learner.update(xs, ys)
    assert result.loss == pytest.approx(result.losses.mean().item())
    assert learner.updates == 20 and learner.steps == 20 * T
    assert_same(
        {n: p.detach() for n, p in mine.named_parameters()}, dict(make_net().named_parameters()), 0
    )  # untouched
    learner.sync_to_torch()
    assert_same(
        dict(mine.named_parameters()), {n: p.detach() for n, p in model.named_parameters()}, 1e-10
    )


@pytest.fixture(scope="module")
def stream():
    """A learner with a plain step, and its own copy of the start."""
    learner = eb.OnlineLearner(
        make_net(), rule="d_rtrl", loss=mse_loss, optimizer=optax.sgd(0.1), chunk=2
    )
    xs, ys = make_data()
    learner.step(xs[0], ys[0])
    return learner


def restart(learner) -> None:
    learner.reset()
    learner.net.load_state_dict(make_net().state_dict())


def test_a_stream_of_steps_is_an_update_per_step(stream):
    xs, ys = make_data()
    restart(stream)
    losses = [stream.step(x, y).loss for x, y in zip(xs, ys, strict=True)]
    by_step = weights(stream)
    restart(stream)
    together = stream.update(xs, ys, every="step", carry=True)
    assert np.allclose(losses, together.losses, rtol=1e-12)
    assert_same(weights(stream), by_step, 1e-12)
    # The first step's update is the gradient of one step, which torch knows.
    restart(stream)
    start = weights(stream)
    info = stream.step(xs[0], ys[0])
    model = make_net()
    expected = torch_gradients(model, xs[:1], ys[:1])
    moved = {n: (start[n] - w) / 0.1 for n, w in weights(stream).items()}
    for name, grad in expected.items():
        assert torch.allclose(moved[name], grad, rtol=1e-8, atol=1e-12), name
    assert torch.allclose(info.output, model(xs[:1])[0])


def test_a_step_without_target_advances_states_and_trace(stream):
    xs, ys = make_data()
    restart(stream)
    for x in xs[:-1]:
        assert stream.step(x).loss is None
    assert_same(weights(stream), make_net().state_dict(), 0)
    start = weights(stream)
    whole = stream.gradients(xs, ys, mask=torch.eye(T)[-1])
    stream.step(xs[-1], ys[-1])
    moved = {n: (start[n] - w) / 0.1 for n, w in weights(stream).items()}
    assert_same(moved, whole.grads)


def test_reset_of_some_batch_elements(stream):
    xs, ys = make_data()
    restart(stream)
    stream.step(xs[0]), stream.step(xs[1])
    stream.reset(mask=[True, False, False])
    mixed = stream.step(xs[2]).output
    restart(stream)
    fresh = stream.step(xs[2]).output
    restart(stream)
    stream.step(xs[0]), stream.step(xs[1])
    kept = stream.step(xs[2]).output
    assert torch.equal(mixed[0], fresh[0]) and torch.equal(mixed[1:], kept[1:])
    assert not torch.allclose(fresh[0], kept[0])
    with pytest.raises(eb.InputError, match=r"`mask` has shape \(2,\); it must be \(3,\)"):
        stream.reset(mask=[True, False])


def test_another_batch_size(stream):
    restart(stream)
    xs, ys = make_data()
    stream.step(xs[0], ys[0])
    small_x, small_y = make_data(batch=1)
    with pytest.raises(
        eb.InputError, match=r"A stream cannot continue with another batch.*`reset\(\)`"
    ):
        stream.step(small_x[0], small_y[0])
    before = stream.net.hidden_values()[0]
    result = stream.gradients(small_x, small_y)  # a sequence of its own may have any batch size ...
    assert result.outputs.shape == (T, 1, O)
    assert np.array_equal(stream.net.hidden_values()[0], before)  # ... and the stream goes on
    stream.step(xs[1], ys[1])
    stream.reset()
    assert stream.step(small_x[0], small_y[0]).output.shape == (1, O)
    stream.reset()
    stream.step(xs[0], ys[0])


def test_batch_first_and_prediction():
    model = make_net(batch_first=True, dropout=0.5)
    xs, ys = make_data()
    learner = eb.OnlineLearner(model, rule="bptt", loss=mse_loss, optimizer=optax.sgd(0.0))
    one = learner.gradients(xs.transpose(0, 1), ys.transpose(0, 1))
    assert one.outputs.shape == (B, T, O)
    other = learner.gradients(xs.transpose(0, 1), ys.transpose(0, 1))
    assert not torch.allclose(one.outputs, other.outputs)  # dropout draws anew, as in torch
    predicted = learner.predict(xs.transpose(0, 1))
    assert model.training
    assert torch.allclose(predicted, model.eval()(xs.transpose(0, 1)), rtol=1e-12)
    model.train()
    mean = learner.evaluate([(xs.transpose(0, 1), ys.transpose(0, 1))])
    assert mean == pytest.approx(
        torch.stack([mse_loss(p, y) for p, y in zip(predicted.transpose(0, 1), ys, strict=True)])
        .mean()
        .item()
    )


def test_running_statistics_advance_and_return_to_torch():
    class Normed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(I, momentum=0.5)
            self.cell = torch.nn.RNNCell(I, 3)

        def forward(self, x, h=None):
            h = self.cell(self.norm(x), h)
            return h, h

    torch.manual_seed(0)
    model = Normed().double()
    learner = eb.OnlineLearner(model, rule="bptt", loss=mse_loss, optimizer=optax.sgd(0.0))
    xs, _ = make_data()
    ys = torch.zeros(T, B, 3, dtype=torch.float64)
    learner.update(xs, ys)
    learner.reset()
    expected = torch.nn.BatchNorm1d(I, momentum=0.5).double()
    for x in xs:
        expected(x)
    assert not model.norm.running_mean.any()
    kept = model.norm.running_mean
    learner.sync_to_torch()
    assert model.norm.running_mean is kept and torch.allclose(
        kept, expected.running_mean, rtol=1e-10
    )


def test_clipping_and_accumulation_in_the_learner():
    model, mine = make_net(), make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    learner = eb.OnlineLearner(
        mine, rule="bptt", loss=mse_loss, optimizer=torch.optim.SGD(mine.parameters(), lr=0.5, momentum=0.9), accumulate=2, clip_norm=0.1
    )  # fmt: skip
    for n in range(2):
        first = torch_gradients(model, *make_data(seed=2 * n))
        second = torch_gradients(model, *make_data(seed=2 * n + 1))
        for name, p in model.named_parameters():
            p.grad = (first[name] + second[name]) / 2
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
        learner.update(*make_data(seed=2 * n))
        learner.update(*make_data(seed=2 * n + 1))
    learner.sync_to_torch()
    assert_same(
        dict(mine.named_parameters()), {n: p.detach() for n, p in model.named_parameters()}, 1e-10
    )


def test_brainstate_modules_learn_too():
    import brainstate
    import jax.numpy as jnp

    net = brainstate.nn.GRUCell(I, 3)
    brainstate.nn.init_all_states(net, batch_size=B)
    learner = eb.OnlineLearner(
        net,
        rule="d_rtrl",
        loss=lambda y, t: jnp.mean((y - t) ** 2),
        optimizer=optax.sgd(0.1),
        chunk=3,
    )
    xs = np.asarray(make_data()[0])
    first = learner.update(xs, np.zeros((T, B, 3))).loss
    assert learner.update(xs, np.zeros((T, B, 3))).loss < first
    with pytest.raises(eb.InputError, match="no torch model"):
        learner.sync_to_torch()


# -- brainstate modules and their batch axis ------------------------------------------------------


def _unrolled_loss(net, start, xs, targets) -> float:
    net.h.value = start
    return sum(float(((net(x) - t) ** 2).sum()) for x, t in zip(xs, targets, strict=True))


@pytest.mark.parametrize("batch", [None, 3])
def test_a_brainstate_module_starts_from_the_state_that_the_user_set(batch):
    import brainstate
    import jax.numpy as jnp

    # as many features as batch elements, so that shapes alone tell nothing
    net = brainstate.nn.GRUCell(3, 4)
    brainstate.nn.init_all_states(net, **({} if batch is None else {"batch_size": batch}))
    shape = () if batch is None else (batch,)
    rng = np.random.default_rng(0)
    start, xs, targets = (
        jnp.asarray(rng.normal(size=s)) for s in ((*shape, 4), (T, *shape, 3), (T, *shape, 4))
    )
    net.h.value = start
    learner = eb.OnlineLearner(net, "bptt", lambda y, t: jnp.sum((y - t) ** 2), reduction="sum")
    found = learner.gradients(xs, targets)
    assert learner.net.h.value.shape == start.shape
    assert found.loss == pytest.approx(_unrolled_loss(net, start, xs, targets), rel=1e-12)
    states = list(net.states(brainstate.ParamState).values())
    grad = next(g for g in found.raw_grads.values() if g.ndim == 2)
    weight = next(s for s in states for leaf in [s.value["weight"]] if leaf.shape == grad.shape)
    old, slopes = dict(weight.value), []
    for at in ((0, 0), (2, 1)):
        sides = []
        for sign in (1, -1):
            weight.value = old | {"weight": old["weight"].at[at].add(sign * 1e-6)}
            sides.append(_unrolled_loss(net, start, xs, targets))
        weight.value = old
        slopes.append((sides[0] - sides[1]) / 2e-6)
        assert float(grad[at]) == pytest.approx(slopes[-1], rel=1e-6)
    assert max(map(abs, slopes)) > 1e-3


def test_states_of_brainstate_modules_are_made_only_where_they_do_not_fit():
    import brainstate
    import jax.numpy as jnp

    loss = lambda y, t: jnp.mean((y - t) ** 2)
    missing = brainstate.nn.GRUCell(I, 3)
    assert (
        eb.OnlineLearner(missing, "bptt", loss).gradients(make_data()[0], np.zeros((T, B, 3))).loss
        > 0
    )
    assert missing.h.value.shape == (B, 3)
    other_batch = brainstate.nn.GRUCell(I, 3)
    brainstate.nn.init_all_states(other_batch, batch_size=7)
    assert (
        eb.OnlineLearner(other_batch, "bptt", loss)
        .gradients(make_data()[0], np.zeros((T, B, 3)))
        .loss
        > 0
    )
    no_batch = brainstate.nn.GRUCell(I, 3)
    brainstate.nn.init_all_states(no_batch)
    no_batch.h.value = jnp.ones(3)
    learner = eb.OnlineLearner(no_batch, "bptt", loss)
    with pytest.raises(
        eb.InputError,
        match=r"hidden states have shapes \(3,\).*init_all_states\(net, batch_size=3\)",
    ):
        learner.gradients(make_data()[0], np.zeros((T, B, 3)))
    assert np.array_equal(no_batch.h.value, np.ones(3))


def test_predict_is_in_evaluation_mode_after_eval():
    """`model.eval()` after the first step used to make the trained step, with its dropout, pass for
    that of evaluation.
    """
    (xs, ys), model = make_data(), make_net(dropout=0.5)
    learner = eb.OnlineLearner(model, "d_rtrl", mse_loss)
    learner.gradients(xs, ys)
    model.eval()
    expected = model(xs).detach()
    torch.testing.assert_close(learner.predict(xs), expected, rtol=1e-9, atol=1e-12)
    assert learner.evaluate([(xs, ys)]) == pytest.approx(float(mse_loss(expected, ys)), rel=1e-9)
