"""The learner's borders: losses of any kind, copies in and out, `.grad` and hooks, bad input, trees
of inputs and outputs, random ops.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import etrace_bridge as eb
from learner_models import B, I, O, T, assert_same, make_data, make_net, torch_gradients, torch_loss

XS, YS = make_data()
LABELS = torch.randint(O, (T, B), generator=torch.Generator().manual_seed(0))
LIKELY = torch.sigmoid(YS)


def copies(learner: eb.OnlineLearner) -> list[np.ndarray]:
    """Every array of the learner, of a stream that is parked too."""
    runtime = learner.runtime
    return [np.array(x) for x in runtime.store.arrays()]


# -- losses ---------------------------------------------------------------------------------------


def user_written(y, t):
    close = torch.exp(-((y - t) ** 2).sum(-1))
    return torch.where(close > 0.5, 1 - close, (y - t).abs().sum(-1)).mean()


LOSSES = {
    "mse": (F.mse_loss, YS),
    "mse sum": (nn.MSELoss(reduction="sum"), YS),
    "cross entropy": (F.cross_entropy, LABELS),
    "cross entropy module": (
        nn.CrossEntropyLoss(
            weight=torch.tensor([0.2, 0.8], dtype=torch.float64), label_smoothing=0.1
        ),
        LABELS,
    ),
    "cross entropy of probabilities": (F.cross_entropy, torch.softmax(YS, -1)),
    "nll": (F.nll_loss, LABELS),
    "bce with logits": (F.binary_cross_entropy_with_logits, LIKELY),
    "huber": (F.huber_loss, 3 * YS),
    "user-written": (user_written, YS),
}


@pytest.mark.parametrize("name", LOSSES)
def test_torch_losses_are_torchs(name):
    loss, targets = LOSSES[name]
    model = make_net()
    found = eb.OnlineLearner(model, rule="bptt", loss=loss).gradients(XS, targets)
    assert found.loss == pytest.approx(torch_loss(model, XS, targets, loss).item(), rel=1e-12)
    assert_same(found.grads, torch_gradients(model, XS, targets, loss=loss), 1e-10)


def test_jax_callables_are_losses():
    model = make_net()
    learner = eb.OnlineLearner(
        model, rule="bptt", loss=lambda y, t: jnp.mean(optax.losses.huber_loss(y, t))
    )
    found = learner.gradients(XS, 3 * YS)
    assert_same(found.grads, torch_gradients(model, XS, 3 * YS, loss=F.huber_loss), 1e-10)


def test_losses_that_cannot_work():
    net = eb.wrap(make_net())
    with pytest.raises(
        eb.InputError, match=r"must return a scalar for one step; it returned shape \(3, 2\)"
    ):
        eb.OnlineLearner(net, loss=nn.MSELoss(reduction="none")).gradients(XS, YS)
    with pytest.raises(
        eb.InputError, match=r"must return a scalar for one step; it returned shape \(3,\)"
    ):
        eb.OnlineLearner(net, loss=lambda y, t: jnp.mean(jnp.square(y - t), -1)).gradients(XS, YS)
    with pytest.raises(eb.InputError, match="`loss` is a str"):
        eb.OnlineLearner(net, loss="mse").gradients(XS, YS)
    with pytest.raises(eb.InputError, match="has no loss"):
        eb.OnlineLearner(net).gradients(XS, YS)


# -- copies ---------------------------------------------------------------------------------------


class Bare(nn.Module):
    """Its output is its hidden state, the hardest case for results that must not be the learner's
    own arrays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(I, O)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.seen = self.seen + 1
        return self.rnn(x)[0]


@pytest.fixture(scope="module")
def bare() -> tuple[Bare, eb.OnlineLearner]:
    torch.manual_seed(1)
    model = Bare().double()
    learner = eb.OnlineLearner(
        model, rule="d_rtrl", loss=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    return model, learner


@pytest.mark.parametrize("kind", ["torch", "numpy", "jax"])
def test_inputs_are_copied(bare, kind):
    _, learner = bare
    make = {
        "torch": torch.clone,
        "numpy": lambda t: t.numpy().copy(),
        "jax": lambda t: jnp.array(t.numpy()),
    }[kind]
    learner.reset()
    learner.step(make(XS[0]), make(YS[0]))  # the next ones take the quick way
    for _ in range(20):
        x, y = make(XS[1]), make(YS[1])
        info = learner.step(x, y)
        if kind == "jax":
            assert not x.is_deleted() and np.array_equal(x, XS[1])
        else:
            x[:], y[:] = 1e9, 1e9
        assert info.loss < 100
    sequence, targets = make(XS), make(YS)
    result = learner.gradients(sequence, targets)
    if kind != "jax":
        sequence[:], targets[:] = 1e9, 1e9
    assert result.loss < 100


def test_results_are_copies_and_stay(bare):
    model, learner = bare
    learner.reset()
    infos = [learner.step(x, y) for x, y in zip(XS, YS, strict=True)]
    found = learner.gradients(XS, YS)
    predicted = learner.predict(XS)
    before = copies(learner)
    # read after the arrays of those steps were given away
    outputs = [info.output.clone() for info in infos]
    assert (
        all(torch.equal(info.output, out) for info, out in zip(infos, outputs, strict=True))
        and outputs[0].abs().max() > 0.01
    )
    for tensor in (
        infos[-1].output,
        found.outputs,
        found.losses,
        predicted,
        *found.grads.values(),
        *learner.net.state_dict().values(),
    ):
        with torch.no_grad():
            tensor.fill_(1e9)
    assert all(map(np.array_equal, copies(learner), before))
    assert torch.equal(infos[-1].output, outputs[-1])
    learner.step(XS[0], YS[0])
    assert float(found.outputs.max()) == 1e9  # and the learner does not write into results


def test_sync_writes_in_place_and_shares_nothing(bare):
    model, learner = bare
    pointers = {n: t.data_ptr() for n, t in model.state_dict().items()}
    held = dict(model.named_parameters())
    optimizer = learner.runtime.optimizer
    learner.reset()
    learner.step(XS[0], YS[0])
    learner.sync_to_torch()
    assert {n: t.data_ptr() for n, t in model.state_dict().items()} == pointers
    assert all(
        dict(model.named_parameters())[n] is p and p.requires_grad and p.is_leaf
        for n, p in held.items()
    )
    assert optimizer.param_groups[0]["params"][0] is held["rnn.weight_ih_l0"]
    current = learner.net.state_dict()
    assert all(torch.equal(t, current[n]) for n, t in model.state_dict().items())
    assert model.seen > 0  # buffers come home
    before = copies(learner)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert all(map(np.array_equal, copies(learner), before))
    synced = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.warns(UserWarning, match="torch model changed"):
        learner.step(XS[1], YS[1])
    assert all(torch.equal(t, synced[n]) for n, t in model.state_dict().items())
    learner.sync_from_torch()
    assert torch.equal(learner.net.state_dict()["rnn.weight_hh_l0"], model.rnn.weight_hh_l0)


# -- torch's side of an update --------------------------------------------------------------------


def test_fill_grad_is_torchs_grad():
    model, plain = make_net(), make_net()
    learner = eb.OnlineLearner(model, rule="bptt", loss=F.mse_loss)
    mine, own = (
        torch.optim.AdamW(m.parameters(), lr=0.05, weight_decay=0.5) for m in (model, plain)
    )
    for n in range(3):
        batch = make_data(seed=n)
        mine.zero_grad()
        found = learner.gradients(*batch)
        learner.fill_grad(found)
        own.zero_grad()
        torch_loss(plain, *batch).backward()
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name  # no decay where torch has none
            assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-9, atol=1e-14), name
        assert model.out.weight.grad.data_ptr() != found.grads["out.weight"].data_ptr()
        mine.step(), own.step()
        learner.sync_from_torch()
    assert_same(model.state_dict(), plain.state_dict(), 1e-10)
    with pytest.raises(eb.InputError, match="no parameters named nose, tail"):
        learner.fill_grad({"tail": torch.zeros(1), "nose": torch.zeros(1)})


def test_hooks_act_on_the_gradient():
    model, plain = make_net(), make_net()
    for m in (model, plain):
        m.out.weight.register_hook(lambda grad: 3 * grad)
        m.rnn.weight_hh_l0.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    learner = eb.OnlineLearner(model, rule="bptt", loss=F.mse_loss, optimizer=optax.sgd(0.1))
    expected = torch_gradients(plain, XS, YS)
    assert expected["rnn.weight_hh_l0"].abs().max() == 0.01
    assert_same(learner.gradients(XS, YS).grads, expected)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    for n in range(2):
        torch_gradients(plain, *make_data(seed=n))
        own.step()
        learner.update(*make_data(seed=n))
    assert_same(dict(learner.net.state_dict()), plain.state_dict(), 1e-10)
    torch_gradients(plain, XS[:1], YS[:1])
    own.step()
    learner.step(XS[0], YS[0])
    assert_same(dict(learner.net.state_dict()), plain.state_dict(), 1e-10)
    with pytest.raises(
        eb.InputError, match=r"every='chunk'` needs an update inside the compiled program"
    ):
        learner.update(XS, YS, every="chunk")
    model.out.bias.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(
        eb.NotSupportedError,
        match=r"`out\.bias` has a hook from `register_post_accumulate_grad_hook`",
    ):
        _ = learner.gradients(XS, YS).grads


def test_other_torch_optimizers_step_in_torch():
    model, plain = make_net(), make_net()
    mine, own = (
        torch.optim.Adamax(m.parameters(), lr=0.05, weight_decay=0.1) for m in (model, plain)
    )
    learner = eb.OnlineLearner(model, rule="bptt", loss=F.mse_loss, optimizer=mine)
    for n in range(4):
        batch = make_data(seed=n)
        own.zero_grad()
        torch_loss(plain, *batch).backward()
        own.step()
        learner.update(*batch)
    learner.sync_to_torch()
    assert_same(model.state_dict(), plain.state_dict(), 1e-10)


# -- bad input ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared() -> eb.OnlineLearner:
    """A learner in the middle of a stream."""
    learner = eb.OnlineLearner(
        make_net(), "d_rtrl", F.cross_entropy, optax.adam(0.01), chunk=2, check_inputs=True
    )
    learner.step(XS[0], LABELS[0])
    return learner


NAN = XS.clone()
NAN[2, 1, 0] = torch.nan
BAD = {
    "labels as floats": (lambda k: k.step(XS[0], LABELS[0].double()), r"`cross_entropy` does not work.*float64\(3,\)"),
    "labels as int32": (lambda k: k.gradients(XS, LABELS.int()), r"`cross_entropy` does not work.*int32\(3,\).*int64"),
    "labels of another batch": (lambda k: k.step(XS[0], LABELS[0, :2]), r"`cross_entropy` does not work.*int64\(2,\)"),
    "labels of another batch, in a sequence": (lambda k: k.update(XS, LABELS[:, :2]), r"does not work on the model's output float64\(3, 2\)"),
    "too few targets": (lambda k: k.update(XS, LABELS[:-1]), "number of time steps differs: input 0 has 6, the target has 5"),
    "no targets": (lambda k: k.gradients(XS, None), "`targets` is missing"),
    "no targets for an update": (lambda k: k.update(XS, None), "`targets` is missing"),
    "one target a sequence": (lambda k: k.evaluate([(XS, LABELS[0])]), "loss_at='last'"),
    "no time axis": (lambda k: k.gradients(XS[0, 0], LABELS), r"Input 0 has shape \(2,\); a sequence needs"),
    "no steps": (lambda k: k.gradients(XS[:0], LABELS[:0]), "no time steps"),
    "another number of features": (lambda k: k.predict(torch.zeros(T, B, 5, dtype=torch.float64)), "5"),
    "another precision": (lambda k: k.step(XS[0].float(), LABELS[0]), "Input 0 is float32, but the model's parameters are float64"),
    "another batch in a stream": (lambda k: k.step(XS[0, :1], LABELS[0, :1]), r"cannot continue with another batch.*`reset\(\)`"),
    "another batch with carry": (lambda k: k.update(XS[:, :1], LABELS[:, :1], carry=True), "cannot continue with another batch"),
    "a mask of another length": (lambda k: k.gradients(XS, LABELS, mask=torch.ones(4)), "`mask` has 4"),
    "a mask of another batch": (lambda k: k.gradients(XS, LABELS, mask=torch.ones(T, B + 1)), rf"`mask` has shape .*\({T}, {B}\)"),
    "an empty mask": (lambda k: k.gradients(XS, LABELS, mask=torch.zeros(T)), "no step with a positive weight"),
    "NaN in a step": (lambda k: k.step(NAN[2], LABELS[2]), r"The input has 1 values that are NaN.*\(1, 0\)"),
    "NaN in a sequence": (lambda k: k.update(NAN, LABELS), r"The input has 1 values that are NaN.*\(2, 1, 0\)"),
    "text": (lambda k: k.step("hello", LABELS[0]), "The input is a `str` of <U5, not of numbers"),
    "ragged lists": (lambda k: k.step(np.array([[1], [1, 2]], object), LABELS[0]), "of object, not of numbers"),
    "a word for every": (lambda k: k.update(XS, LABELS, every="week"), "it must be 'sequence', 'chunk' or 'step'"),
    "a mask for reset": (lambda k: k.reset(mask=[True]), r"`mask` has shape \(1,\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_changes_nothing(shared, name):
    call, message = BAD[name]
    before, counts = copies(shared), (shared.steps, shared.updates)
    with pytest.raises(eb.BridgeError, match=message):
        call(shared)
    after = copies(shared)
    assert len(after) == len(before) and all(map(np.array_equal, after, before))
    assert (shared.steps, shared.updates) == counts
    assert shared.runtime.store.active is shared.runtime.store.stream


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 10}, "budget of 10 bytes is less than one step's buffers"),
        ({"chunk": 0}, "`chunk` is 0"),
    ],
)
def test_a_chunk_that_cannot_fit(options, message):
    learner = eb.OnlineLearner(make_net(), "d_rtrl", F.cross_entropy, optax.adam(0.01), **options)
    learner.step(XS[0], LABELS[0])
    before = copies(learner)
    with pytest.raises(eb.InputError, match=message):
        learner.update(XS, LABELS)
    assert all(map(np.array_equal, copies(learner), before))


def test_a_first_step_that_fails_leaves_a_new_learner():
    learner = eb.OnlineLearner(make_net(), "d_rtrl", F.cross_entropy, optax.adam(0.01))
    for batch in (3, 2):
        with pytest.raises(eb.InputError, match="does not work"):
            learner.step(XS[0, :batch], LABELS[0, :batch].double())
    # any batch is still possible
    assert learner.step(XS[0, :3], LABELS[0, :3]).output.shape == (3, O)
    fresh = eb.OnlineLearner(make_net(), "d_rtrl", F.cross_entropy, optax.adam(0.01))
    assert (
        learner.step(XS[1], LABELS[1]).loss
        == [fresh.step(XS[n], LABELS[n]) for n in (0, 1)][1].loss
    )


def test_what_the_constructor_refuses():
    model = make_net()
    for options, message in (
        ({"reduction": "max"}, "must be 'mean' or 'sum'"),
        ({"accumulate": 0}, "positive number of gradients"),
        ({"clip_norm": -1.0}, "`clip_norm` is -1.0; it must be positive"),
        ({"rule": "magic"}, "magic"),
    ):
        with pytest.raises(eb.InputError, match=message):
            eb.OnlineLearner(model, loss=F.mse_loss, **options)
    with pytest.raises(eb.InputError, match="`model` is a int"):
        eb.OnlineLearner(3)


# -- trees, random ops, half precision ------------------------------------------------------------


class Two(nn.Module):
    """Two inputs and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(I + 1, 3), nn.Linear(3, O)

    def forward(self, x, extra):
        h, _ = self.gru(torch.cat([x, extra], -1))
        return {"y": self.out(h), "size": h.square().mean(-1)}


def two_loss(output, target):
    return (
        F.mse_loss(output["y"], target["y"]) + 0.1 * (output["size"] - target["size"]).abs().mean()
    )


def test_several_inputs_and_trees_of_outputs():
    torch.manual_seed(2)
    model = Two().double()
    extra, sizes = torch.randn(T, B, 1, dtype=torch.float64), torch.rand(T, B, dtype=torch.float64)
    net = eb.wrap(model, example_input=(XS[0], extra[0]))
    learner = eb.OnlineLearner(net, rule="bptt", loss=two_loss, optimizer=optax.sgd(0.0))
    found = learner.gradients((XS, extra), {"y": YS, "size": sizes})
    outputs = model(XS, extra)
    losses = [
        two_loss({"y": outputs["y"][n], "size": outputs["size"][n]}, {"y": YS[n], "size": sizes[n]})
        for n in range(T)
    ]
    torch.stack(losses).mean().backward()
    assert_same(found.grads, {n: p.grad for n, p in model.named_parameters()}, 1e-10)
    assert set(found.outputs) == {"y", "size"} and torch.allclose(
        found.outputs["size"], outputs["size"]
    )
    info = learner.step((XS[0], extra[0]), {"y": YS[0], "size": sizes[0]})
    assert info.loss == pytest.approx(losses[0].item()) and torch.allclose(
        info.output["y"], outputs["y"][0]
    )
    with pytest.raises(eb.InputError, match="input 0 has 6, input 1 has 4"):
        learner.gradients((XS, extra[:4]), {"y": YS, "size": sizes})


def test_random_ops_do_not_depend_on_the_chunk():
    found = []
    for chunk in (1, 5):
        learner = eb.OnlineLearner(
            make_net(dropout=0.5), rule="d_rtrl", loss=F.mse_loss, chunk=chunk, seed=4
        )
        found.append(learner.gradients(XS, YS))
    assert torch.allclose(found[0].outputs, found[1].outputs, rtol=1e-12)
    assert not torch.allclose(found[0].outputs, make_net()(XS)), "nothing was dropped"
    assert_same(found[1].grads, found[0].grads, 1e-10)


@pytest.mark.x32
def test_traces_in_bfloat16_are_close():
    xs, ys = make_data(steps=30, dtype=torch.float32)
    grads = []
    for dtype in (None, "bfloat16"):
        learner = eb.OnlineLearner(
            make_net(torch.float32), eb.rules.DRTRL(trace_dtype=dtype), F.mse_loss, chunk=3
        )
        grads.append(torch.cat([g.flatten() for g in learner.gradients(xs, ys).grads.values()]))
    apart = (grads[1] - grads[0]).norm() / grads[0].norm()
    assert 0 < apart < 0.01
