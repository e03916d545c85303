"""Every call of a learner with every kind of bad input: a `BridgeError` that names it, and nothing
has changed.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import etrace_bridge as eb
from learner_models import B, I, O, T, make_data, make_net

XS, YS = make_data()


@pytest.fixture(scope="module")
def learner() -> eb.OnlineLearner:
    """A learner in the middle of a stream."""
    made = eb.OnlineLearner(make_net(), "d_rtrl", F.mse_loss, optax.adam(0.01), chunk=2)
    made.step(XS[0], YS[0])
    made.update(XS, YS)
    return made


def everything(learner: eb.OnlineLearner) -> list[np.ndarray]:
    """The learner's arrays, the torch model's weights and gradients, torch's random state, counts."""
    runtime = learner.runtime
    model = runtime.net.model
    tensors = [
        *model.state_dict().values(),
        *(p.grad for p in model.parameters() if p.grad is not None),
        torch.get_rng_state(),
    ]
    arrays = runtime.store.arrays()
    return [
        *map(np.array, arrays),
        *(t.detach().clone().numpy() for t in tensors),
        np.array(
            [learner.steps, learner.updates, id(runtime.store.stream), id(runtime.store.active)]
        ),
    ]


def rare(make):
    """A tensor of a kind that torch warns of when it is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make()


def deleted() -> jax.Array:
    array = jnp.ones((T, B, 2))
    array.delete()
    return array


BAD = {
    "meta": (lambda shape: torch.ones(shape, device="meta"), "meta tensor"),
    "sparse": (lambda shape: torch.ones(shape, dtype=torch.float64).to_sparse(), "sparse tensor"),
    "quantised": (lambda shape: rare(lambda: torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.quint8)), "quantised tensor"),
    "nested": (lambda shape: rare(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "nested tensor"),
    "float8": (lambda shape: torch.ones(shape).to(torch.float8_e4m3fn), "float8"),
    "text": (lambda shape: "text", "`str`"),
    "texts": (lambda shape: np.full(shape, "a"), "<U1"),
    "an object": (lambda shape: object(), "`object`"),
    "ragged": (lambda shape: np.array([[1], [1, 2]], object), "object"),
    "dates": (lambda shape: np.full(shape, "2020", "M8[Y]"), "datetime64"),
    "masked": (lambda shape: np.ma.masked_equal(np.ones(shape), 3), "masked array"),
    "deleted": (lambda shape: deleted(), "deleted"),
}  # fmt: skip
CALLS = {
    "step, input": lambda k, make: k.step(make((B, I)), YS[0]),
    "step, target": lambda k, make: k.step(XS[0], make((B, O))),
    "step without a target": lambda k, make: k.step(make((B, I))),
    "gradients, inputs": lambda k, make: k.gradients(make((T, B, I)), YS),
    "gradients, targets": lambda k, make: k.gradients(XS, make((T, B, O)), carry=True),
    "gradients, mask": lambda k, make: k.gradients(XS, YS, mask=make((T,))),
    "update": lambda k, make: k.update(make((T, B, I)), YS),
    "predict": lambda k, make: k.predict(make((T, B, I))),
    "evaluate": lambda k, make: k.evaluate([(XS, YS), (XS, make((T, B, O)))]),
    "reset": lambda k, make: k.reset(make((B,))),
    "the wrapped module": lambda k, make: k.net(make((B, I))),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_an_array_of_numbers_is_refused_by_name(learner, kind, call):
    make, message = BAD[kind]
    learner.net  # noqa: B018 - the states are lent out, as after a user's look
    before = everything(learner)
    with pytest.raises(eb.BridgeError, match=message):
        CALLS[call](learner, make)
    after = everything(learner)
    assert len(after) == len(before) and all(map(np.array_equal, after, before))


OTHER = {
    "no batch, step": (lambda k: k.step(XS[0, :0], YS[0, :0]), "the batch is empty"),
    "no batch, sequence": (lambda k: k.update(XS[:, :0], YS[:, :0]), "the batch is empty"),
    "no batch, predict": (lambda k: k.predict(XS[:, :0]), "the batch is empty"),
    "no input": (lambda k: k.step((), YS[0]), "There is no input"),
    "None": (lambda k: k.predict(None), "`NoneType`"),
    "a dict as input": (lambda k: k.step({"y": XS[0]}, YS[0]), r"this call gives `x\['y'\]`"),
    "a list of numbers as input": (lambda k: k.step([1.0, 2.0], YS[0]), "."),
    "a ragged target": (lambda k: k.step(XS[0], [[1.0], [1.0, 2.0]]), "The target is a `list`"),
    "a target of texts": (lambda k: k.step(XS[0], ["a", "b"]), "The target is a `list`"),
    "one bad target of two": (lambda k: k.gradients(XS, (YS, "a")), "Target 1 is a `str`"),
    "mask with infinity": (lambda k: k.gradients(XS, YS, mask=torch.tensor([1.0] * 5 + [torch.inf])), "`mask` is .*infinity"),
    "mask with NaN": (lambda k: k.update(XS, YS, mask=np.array([1.0] * 5 + [np.nan])), "`mask` is .*NaN"),
    "lengths as a mask": (lambda k: k.update(XS, YS, mask=torch.tensor([6, 2, 1, 1, 1, 1])), "has other numbers than 0 and 1"),
    "indices in a batch": (lambda k: k.fit([(XS, YS, torch.arange(T))], progress=False), "has other numbers than 0 and 1"),
    "complex mask": (lambda k: k.update(XS, YS, mask=torch.ones(T, dtype=torch.complex64)), "`mask` is complex64"),
    "reset with NaN": (lambda k: k.reset(torch.tensor([1.0, 0.0, torch.nan])), "`mask` is .*NaN"),
    "fit on a number": (lambda k: k.fit(3), "`batches` is a int"),
    "fit on nothing": (lambda k: k.fit(None), "`batches` is a NoneType"),
    "evaluate a tensor": (lambda k: k.evaluate(XS), "`batches` is a Tensor"),
    "save nowhere": (lambda k: k.save(None), "`path` is a NoneType"),
    "load from a number": (lambda k: eb.OnlineLearner.load(3, k.runtime.net.model), "`path` is a int"),
    "gradient of another shape": (
        lambda k: k.fill_grad({"out.bias": torch.zeros(O).double(), "out.weight": torch.zeros(1, 7)}),
        r"gradient of `out.weight` is torch.float32\(1, 7\)",
    ),
    "gradient that is an array": (lambda k: k.fill_grad({"out.bias": np.zeros(O)}), "gradient of `out.bias` is a ndarray"),
    "complex gradient": (lambda k: k.fill_grad({"out.bias": torch.zeros(O, dtype=torch.complex64)}), "`out.bias` is torch.complex64"),
    "meta gradient": (lambda k: k.fill_grad({"out.bias": torch.zeros(O, device="meta")}), "`out.bias` is a"),
    "not gradients": (lambda k: k.fill_grad(3), "not a `int`"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_other_bad_arguments(learner, name):
    call, message = OTHER[name]
    before = everything(learner)
    with pytest.raises(eb.BridgeError, match=message):
        call(learner)
    after = everything(learner)
    assert len(after) == len(before) and all(map(np.array_equal, after, before))


# -- nothing to learn from, or with ---------------------------------------------------------------


def test_update_and_fit_need_an_optimizer_and_step_says_so_once():
    learner = eb.OnlineLearner(make_net(), "d_rtrl", F.mse_loss)
    for call in (lambda: learner.update(XS, YS), lambda: learner.fit([(XS, YS)], progress=False)):
        with pytest.raises(eb.InputError, match="This learner has no optimizer"):
            call()
    learner.step(XS[0])
    with pytest.warns(UserWarning, match="has no optimizer") as caught:
        for x, y in zip(XS, YS, strict=True):
            learner.step(x, y)
    assert len(caught) == 1 and caught[0].filename == __file__
    with pytest.warns(UserWarning, match="has no optimizer") as caught:
        eb.FidelityMeter().step(eb.OnlineLearner(make_net(), "d_rtrl", F.mse_loss), XS[0], YS[0])
    assert len(caught) == 1 and caught[0].filename == __file__


LOSSES = {
    "a constant": lambda y, t: torch.tensor(1.0, dtype=torch.float64),
    "of the target": lambda y, t: (t**2).mean(),
    "detached": lambda y, t: ((y.detach() - t) ** 2).mean(),
    "under no_grad": lambda y, t: torch.no_grad()(F.mse_loss)(y, t),
    "complex": lambda y, t: torch.complex(y, t).sum(),
    "an integer": lambda y, t: (y > t).sum(),
    "a bool": lambda y, t: (y > t).any(),
    "a Python number": lambda y, t: 0,
    "a rounded output": lambda y, t: F.mse_loss(y.round(), t),
    "JAX: a constant": lambda y, t: jnp.zeros(()),
    "JAX: detached": lambda y, t: jnp.mean((jax.lax.stop_gradient(y) - t) ** 2),
    "JAX: an integer": lambda y, t: jnp.sum(y > t),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_without_a_gradient_is_refused(name):
    learner = eb.OnlineLearner(eb.wrap(make_net()), "bptt", LOSSES[name], optax.sgd(0.1))
    for call in (lambda: learner.step(XS[0], YS[0]), lambda: learner.update(XS, YS)):
        with pytest.raises(eb.InputError, match="no derivative|must be a real floating-point"):
            call()
    assert learner.steps == 0 and not learner.runtime.store.started


class Spiking(nn.Module):
    """Its only output is a step function, with or without a surrogate gradient."""

    def __init__(self, surrogate: bool) -> None:
        super().__init__()
        self.rnn = nn.RNN(I, O)
        self.surrogate = surrogate

    def forward(self, x):
        h = self.rnn(x)[0]
        hard = (h > 0).to(h.dtype)
        return hard + torch.sigmoid(h) - torch.sigmoid(h).detach() if self.surrogate else hard


def test_a_model_that_no_gradient_reaches_does_not_train():
    torch.manual_seed(0)
    frozen = make_net().requires_grad_(False)
    for model, message in (
        (Spiking(False).double(), "No gradient can reach any parameter"),
        (frozen, "No parameter of"),
    ):
        learner = eb.OnlineLearner(model, "d_rtrl", F.mse_loss, optax.sgd(0.1))
        for call in (lambda k=learner: k.step(XS[0], YS[0]), lambda k=learner: k.update(XS, YS)):
            with pytest.raises(eb.BridgeError, match=message):
                call()
    trained = eb.OnlineLearner(Spiking(True).double(), "d_rtrl", F.mse_loss, optax.sgd(0.1))
    assert trained.update(XS, YS).loss > 0


def test_gradients_do_not_put_nan_into_states():
    learner = eb.OnlineLearner(make_net(), "d_rtrl", F.mse_loss, chunk=2)
    bad = XS.clone()
    bad[3, 1, 0] = torch.nan
    with pytest.raises(eb.NonFiniteError, match="At step 4"):
        learner.gradients(bad, YS, carry=True)
    # Also the first call leaves nothing
    assert learner.steps == 0 and not learner.runtime.store.started
    learner.gradients(XS, YS, carry=True)
    for value in (torch.nan, torch.inf):
        bad[3, 1, 0] = value
        before = everything(learner)
        if value == torch.inf:  # tanh of infinity is 1, and infinity times zero in the trace is NaN
            message = r"Somewhere in steps 7 to 12, .*the trace"
        else:
            message = r"the hidden state `rnn\.h_l0`"
        with pytest.raises(eb.NonFiniteError, match=message):
            learner.gradients(bad, YS, carry=True)
        assert all(map(np.array_equal, everything(learner), before))
    found = learner.gradients(bad, YS)  # nothing of it is kept: torch's NaN, for the user to see
    assert (
        not torch.isfinite(found.losses).all()
        or not torch.isfinite(found.grads["rnn.weight_ih_l0"]).all()
    )
    assert all(map(np.isfinite, [learner.gradients(XS, YS, carry=True).loss]))


def test_running_statistics_do_not_take_what_is_not_finite():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.cell = nn.BatchNorm1d(I), nn.RNNCell(I, O)

        def forward(self, x, h=None):
            return self.cell(self.norm(x), h)

    learner = eb.OnlineLearner(Normed().double(), "bptt", F.mse_loss)
    learner.gradients(XS, YS)
    before = everything(learner)
    bad = XS.clone()
    bad[3, 1, 0] = torch.nan
    with pytest.raises(eb.NonFiniteError, match=r"norm\.running_mean"):
        learner.gradients(bad, YS)
    assert all(map(np.array_equal, everything(learner), before))
