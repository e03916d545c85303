"""`eb.functional`: pure functions whose JAX gradient is the online gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from learner_models import T, make_data, make_net, torch_gradients

RULES = ["d_rtrl", "pp_prop", eb.rules.EProp(kappa=0.5)]  # test_online_module.py has the others


def squared(output, target):
    return jnp.mean((output - target) ** 2)


def step_loss(fun: eb.Functional):
    """`(params, carry, x, y) -> (loss, carry)` of one step."""

    def loss(params, carry, x, y):
        output, carry = fun.step(params, carry, x)
        return squared(output, y), carry

    return loss


def online_gradient(fun: eb.Functional, xs, ys) -> dict:
    """The sum over steps of each step's own `jax.grad`, in a scan."""
    loss = step_loss(fun)

    def body(state, data):
        carry, total = state
        grads, carry = jax.grad(loss, has_aux=True)(fun.params, carry, *data)
        return (carry, jax.tree.map(jnp.add, total, grads)), None

    start = fun.init(fun.params), jax.tree.map(jnp.zeros_like, fun.params)
    return jax.jit(lambda data: jax.lax.scan(body, start, data)[0][1])(
        (jnp.asarray(xs), jnp.asarray(ys))
    )


def assert_close(found: dict, expected: dict, tolerance: float = 1e-9) -> None:
    assert set(found) <= set(expected)
    for name, g in found.items():
        e = np.asarray(expected[name])
        assert np.abs(e).max() > 1e-6, f"no gradient of {name}: nothing is compared"
        assert np.abs(np.asarray(g) - e).max() <= tolerance * np.abs(e).max(), name


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_sum_of_step_gradients_is_the_learner_s(rule):
    net, (xs, ys) = make_net(), make_data()
    learner = eb.OnlineLearner(net, rule=rule, loss=mse_loss, chunk=1, reduction="sum")
    fun = eb.functional(net, xs[0], rule=rule)
    assert repr(fun).startswith("Functional(") and len(repr(fun)) < 120  # no arrays
    assert repr(fun) in fun._repr_html_() and next(iter(fun.params)) in fun._repr_html_()
    assert_close(online_gradient(fun, xs, ys), learner.gradients(xs, ys).grads)


def test_rtrl_is_torch_s_bptt_by_steps_and_in_a_chunk():
    net, (xs, ys) = make_net(), make_data()
    expected = {n: T * g for n, g in torch_gradients(net, xs, ys).items()}
    fun = eb.functional(net, xs[0], rule="rtrl")
    assert_close(online_gradient(fun, xs, ys), expected)
    X, Y = jnp.asarray(xs), jnp.asarray(ys)

    def two_chunks(params):
        first, carry = fun.chunk(params, fun.init(params), X[:2])
        second, _ = fun.chunk(params, carry, X[2:])
        return sum(map(squared, [*first, *second], Y))

    assert_close(jax.jit(jax.grad(two_chunks))(fun.params), expected)


def test_d_rtrl_by_its_definition():
    """eps_t = D_t eps_(t-1) + dh_t/dtheta, g_t = dl_t/dtheta + (dl_t/dh_(t-1)) eps_(t-1), dense,
    with torch's derivatives.

    In an Elman network no path leads from a unit to itself but through the product, so D is zero.
    """
    net, (xs, ys) = make_net(), make_data()
    names = ["rnn.weight_ih_l0", "rnn.weight_hh_l0"]
    rnn = net.rnn
    h = torch.zeros(xs.shape[1], rnn.hidden_size, dtype=xs.dtype)
    eps = [
        torch.zeros(*h.shape, *p.shape, dtype=xs.dtype)
        for p in (rnn.weight_ih_l0, rnn.weight_hh_l0)
    ]
    expected = [torch.zeros_like(e[0, 0]) for e in eps]

    def new_state(ih, hh, h, x):
        return torch.tanh(x @ ih.T + h @ hh.T + rnn.bias_ih_l0 + rnn.bias_hh_l0)

    for x, y in zip(xs, ys, strict=True):
        at = rnn.weight_ih_l0.detach(), rnn.weight_hh_l0.detach(), h, x
        step = torch.autograd.functional.jacobian(
            lambda ih, hh, h, x=x, y=y: mse_loss(net.out(new_state(ih, hh, h, x)), y), at[:3]
        )  # fmt: skip
        for n in range(2):
            expected[n] += step[n] + torch.tensordot(step[2], eps[n], 2)
        eps = list(
            torch.autograd.functional.jacobian(
                lambda ih, hh, x=x, h=h: new_state(ih, hh, h, x), at[:2]
            )
        )
        h = new_state(*at).detach()
    found = online_gradient(eb.functional(net, xs[0], rule="d_rtrl"), xs, ys)
    assert_close(
        {n: found[n] for n in names}, {n: e.detach() for n, e in zip(names, expected, strict=True)}
    )
    bptt = torch_gradients(net, xs, ys)
    assert np.abs(np.asarray(found[names[1]]) - T * bptt[names[1]].numpy()).max() > 1e-3, (
        "D-RTRL and BPTT agree: a trivial case"
    )


def test_vmap_over_models_and_a_whole_training_in_one_scan():
    net, (xs, ys) = make_net(), make_data(12)
    fun, optimizer = eb.functional(net, xs[0]), optax.adam(1e-2)
    loss = step_loss(fun)

    def train(params):
        def body(state, data):
            params, opt, carry = state
            (value, carry), grads = jax.value_and_grad(loss, has_aux=True)(params, carry, *data)
            updates, opt = optimizer.update(grads, opt, params)
            return (optax.apply_updates(params, updates), opt, carry), value

        return jax.lax.scan(
            body,
            (params, optimizer.init(params), fun.init(params)),
            (jnp.asarray(xs), jnp.asarray(ys)),
        )

    models = [fun.params, jax.tree.map(lambda p: 1.5 * p, fun.params)]
    (together, _, _), losses = jax.jit(jax.vmap(train))(
        jax.tree.map(lambda *p: jnp.stack(p), *models)
    )
    for n, params in enumerate(models):
        (alone, _, _), expected = jax.jit(train)(params)
        np.testing.assert_allclose(losses[n], expected, rtol=1e-9)
        for name in alone:
            np.testing.assert_allclose(together[name][n], alone[name], rtol=1e-7, atol=1e-12)
            assert np.abs(alone[name] - params[name]).max() > 1e-3, f"{name} was not trained"


def test_the_gradient_of_the_input_is_that_of_the_steps_given():
    net, (xs, ys) = make_net(), make_data()
    fun = eb.functional(net, xs[0])
    given = xs.clone().requires_grad_()
    (sum(mse_loss(o, y) for o, y in zip(net(given), ys, strict=True))).backward()
    found = jax.grad(
        lambda x: sum(
            map(squared, fun.chunk(fun.params, fun.init(fun.params), x)[0], jnp.asarray(ys))
        )
    )(jnp.asarray(xs))
    assert np.abs(given.grad.numpy()).max() > 1e-3
    np.testing.assert_allclose(found, given.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_the_carry_passes_no_derivative_on():
    net, (xs, _) = make_net(), make_data()
    fun = eb.functional(net, xs[0])
    grads = jax.grad(
        lambda p: sum(jnp.sum(h) for h in fun.step(p, fun.init(p), xs[0])[1].hidden.values())
    )(fun.params)
    assert all(not g.any() for g in grads.values())


def test_reset_of_some_batch_elements():
    net, (xs, ys) = make_net(), make_data(batch=3)
    fun = eb.functional(net, xs[0])
    X, Y = jnp.asarray(xs), jnp.asarray(ys)
    loss = lambda p, c, x, y: jnp.sum((fun.step(p, c, x)[0] - y)[1:] ** 2)
    _, carry = fun.step(fun.params, fun.init(fun.params), X[0])
    again = fun.reset(carry, jnp.array([False, True, True]))
    found = jax.grad(loss)(fun.params, again, X[1], Y[1])
    fresh = jax.grad(loss)(fun.params, fun.init(fun.params), X[1], Y[1])
    # the initial state is zero, so nothing comes through the recurrent weight
    used = [n for n in fresh if n != "rnn.weight_hh_l0"]
    assert_close({n: found[n] for n in used}, fresh)
    assert not np.abs(found["rnn.weight_hh_l0"]).any()
    assert (
        np.abs(
            np.asarray(again.hidden["rnn.h_l0"])[..., 0, :]
            - np.asarray(carry.hidden["rnn.h_l0"])[..., 0, :]
        ).max()
        == 0
    )
    with pytest.raises(eb.InputError, match="mask"):
        fun.reset(carry, jnp.ones(4))


def test_wrong_names_and_inputs_are_refused():
    net, (xs, _) = make_net(), make_data()
    fun = eb.functional(net, xs[0])
    with pytest.raises(eb.InputError, match=r"missing: out\.bias"):
        fun.init({n: p for n, p in fun.params.items() if n != "out.bias"})
    carry = fun.init(fun.params)
    with pytest.raises(eb.InputError, match="compiled for"):
        fun.step(fun.params, carry, xs[0][:2])
    with pytest.raises(eb.InputError, match="compiled for"):
        fun.step(fun.params, carry, xs[0].float())
    with pytest.raises(eb.InputError, match="example"):
        eb.functional(net)
    with pytest.raises(eb.InputError, match="torch or a brainstate module"):
        eb.functional(3, xs[0])


@pytest.mark.parametrize("make", [eb.OnlineLearner, eb.functional])
def test_a_seed_that_would_do_nothing_is_refused(make):
    xs, _ = make_data()
    rest = (xs[0],) if make is eb.functional else ()
    net = eb.wrap(make_net(), seed=3)
    with pytest.raises(eb.InputError, match=r"`seed=5` would have no effect.*`wrap\(model, seed"):
        make(net, *rest, seed=5)
    make(make_net(), *rest, seed=5)
    make(net, *rest)


class Tokens(torch.nn.Module):
    """A GRU on token numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.gru = torch.nn.GRU(4, 5)
        self.out = torch.nn.Linear(5, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(self.embed(x))[0])


@pytest.mark.x32
def test_int64_tokens_and_float32_in_jax_s_default_mode():
    net = Tokens()
    xs, ys = torch.randint(0, 7, (4, 3)), torch.randint(0, 7, (4, 3))
    fun = eb.functional(net, xs[0], rule="rtrl")

    def loss(params):
        outputs, _ = fun.chunk(params, fun.init(params), xs)
        return optax.softmax_cross_entropy_with_integer_labels(
            outputs, jnp.asarray(ys.numpy().astype(np.int32))
        ).mean()

    found = jax.jit(jax.grad(loss))(fun.params)
    torch.nn.functional.cross_entropy(net(xs).flatten(0, 1), ys.flatten()).backward()
    assert_close(found, {n: p.grad for n, p in net.named_parameters()}, 1e-5)
