"""The perturbed step: `h + p` is what everything downstream reads, so `dl/dp` is the gradient by
the state.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import HiddenState, ParamState

import etrace_bridge as eb
import models
from models import B, H, I, Plain
from oracle_compiler import compute
from strict import promotion


def loss(out, new):
    """Outputs and new states, weighted differently."""
    leaves = [*jax.tree.leaves(out), *new]
    return sum(
        (jnp.linspace(0.5, 1.5, v.size).reshape(v.shape) * jnp.sin(v + n)).sum()
        for n, v in enumerate(leaves)
    )


# The same models with `+ q` written where the state is computed: what the perturbed step must
# equal.


def rnn(p, s, x, q):
    h = jnp.tanh(x @ p["w"] + s["h"] @ p["u"] + p["b"]) + q["h"]
    return {"h": h}, h


def torch_lstm(p, s, x, q):
    gates = x @ p["w_ih"].T + s["h"] @ p["w_hh"].T + p["b"]
    i, f, g, o = jnp.split(gates, 4, axis=1)
    c = jax.nn.sigmoid(f) * s["c"] + jax.nn.sigmoid(i) * jnp.tanh(g) + q["c"]
    h = jax.nn.sigmoid(o) * jnp.tanh(c) + q["h"]
    return {"h": h, "c": c}, h


def stacked(p, s, x, q):
    h1 = jnp.tanh(x @ p["w1"] + s["h1"] @ p["u1"]) + q["h1"]
    h2 = jnp.tanh(h1 @ p["w2"] + s["h2"] @ p["u2"]) + q["h2"]
    return {"h1": h1, "h2": h2}, h2


def skip_joined(p, s, x, q):
    h1 = 0.5 * s["h1"] + x @ p["w1"] + q["h1"]
    h2 = jnp.tanh(0.5 * s["h2"] + x @ p["w2"] + h1) + q["h2"]
    return {"h1": h1, "h2": h2}, h2


def reads_old_state(p, s, x, q):
    h = jnp.tanh(0.5 * s["h"] + x @ p["w"]) + q["h"]
    return {"h": h}, s["h"] @ p["w_out"] + h[:, :2]


def leading_axis(p, s, x, q):
    h = jnp.tanh(0.5 * s["h"][0] + x @ p["w"]) + q["h"][0]
    return {"h": h[None]}, h @ p["w_out"]


def transposed_alias(p, s, x, q):
    h = jnp.tanh(0.5 * s["h"].T + x @ p["w"]) + q["h"].T
    return {"h": h.T}, h @ p["w_out"]


def sliced_alias(p, s, x, q):
    h = jnp.tanh(0.5 * s["h"] + x @ p["w"]) + q["h"]
    return {"h": h}, h[:, :H] @ p["w_out"]


def packed_concat(p, s, x, q):
    h, c = jnp.split(s["hc"], 2, axis=-1)
    f, g = jnp.split(x @ p["w"], 2, axis=-1)
    c = jax.nn.sigmoid(f) * c + g + q["hc"][:, H:]
    h = jnp.tanh(c + h) + q["hc"][:, :H]
    return {"hc": jnp.concatenate([h, c], axis=-1)}, h


def packed_stack(p, s, x, q):
    h, c = s["hc"][..., 0], s["hc"][..., 1]
    c = 0.5 * c + x @ p["w"] + q["hc"][..., 1]
    h = jnp.tanh(c + h) + q["hc"][..., 0]
    return {"hc": jnp.stack([h, c], axis=-1)}, h


def short_scan(p, s, x, q):
    y, h, seen = x @ p["w"], s["h"], 0
    for k in (1.0, 2.0, 3.0):
        seen, h = seen + h, jnp.tanh(0.5 * h + y * k + p["b"])
    return {"h": h + q["h"]}, h + q["h"] + seen


BY_HAND = [
    rnn, torch_lstm, stacked, skip_joined, reads_old_state, leading_axis, transposed_alias, sliced_alias,
    packed_concat, packed_stack, short_scan,
]  # fmt: skip


@pytest.mark.parametrize("step", BY_HAND, ids=lambda step: step.__name__)
@pytest.mark.parametrize("scale", [0.0, 0.3])
def test_equals_the_model_perturbed_by_hand(step, scale):
    model, args = models.build(step.__name__)
    graph = models.graph_of(step.__name__)
    assert_equals(graph, model, args, step, scale)


def assert_equals(graph, model, args, step, scale):
    params, states = ({n: getattr(model, n).value for n in names} for names in model.names)
    rng = np.random.default_rng(0)
    q = {
        p[0]: jnp.asarray(scale * rng.standard_normal(s.value.shape)) for p, s in _perturbed(graph)
    }

    def by_hand(q):
        with promotion(implicit=True):  # the model's own code
            new, out = step(params, states, *args, q)
        return loss(out, [new[n] for n in q])

    def by_graph(q):
        out, hidden, _, _ = graph.call_hidden_perturb(args, [q[p[0]] for p, _ in _perturbed(graph)])
        return loss(out, [hidden[(n,)] for n in q])

    (value, grads), (value_by_hand, grads_by_hand) = compute(
        lambda: (jax.value_and_grad(by_graph)(q), jax.value_and_grad(by_hand)(q))
    )
    np.testing.assert_allclose(value, value_by_hand, rtol=1e-12)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, grads_by_hand[name], rtol=1e-12, atol=1e-12)
        assert np.abs(grad).max() > 1e-3


def _perturbed(graph):
    return list(
        zip(
            graph.hidden_perturb.perturb_hidden_paths,
            graph.hidden_perturb.perturb_hidden_states,
            strict=True,
        )
    )


def make(step, states, **params):
    rng = np.random.default_rng(3)
    model = Plain(
        {n: ParamState(jnp.asarray(rng.standard_normal(s))) for n, s in params.items()},
        {n: HiddenState(jnp.asarray(rng.standard_normal(s))) for n, s in states.items()},
        step,
    )
    return model, (jnp.asarray(rng.standard_normal((B, I))),)


def test_each_of_two_states_of_one_value_has_its_own_perturbation():
    def plain(p, s, x):
        h = jnp.tanh(0.5 * s["a"] + x @ p["w"])
        return {"a": h, "b": h[None]}, h * s["b"][0]

    def step(p, s, x, q):
        h = jnp.tanh(0.5 * s["a"] + x @ p["w"])
        return {"a": h + q["a"], "b": h[None] + q["b"]}, (h + q["a"] + q["b"][0]) * s["b"][0]

    model, args = make(plain, {"a": (B, H), "b": (1, B, H)}, w=(I, H))
    assert_equals(eb.compile_etrace_graph(model, *args), model, args, step, 0.3)


def test_value_made_inside_jit():
    @jax.jit
    def jitted(h, x, w):
        h = jnp.tanh(0.5 * h + x @ w)
        return h.reshape(1, B, H), h[:, :2]

    def cell(h, x, w, q):
        h = jnp.tanh(0.5 * h + x @ w) + q
        return h.reshape(1, B, H), h[:, :2]

    def step(p, s, x, q=None):
        h, out = cell(s["h"][0], x, p["w"], q["h"][0]) if q else jitted(s["h"][0], x, p["w"])
        return {"h": h}, out

    model, args = make(step, {"h": (1, B, H)}, w=(I, H))
    assert_equals(eb.compile_etrace_graph(model, *args), model, args, step, 0.3)


def test_state_that_stores_its_input_or_stays_as_it_is():
    """Nothing in the step reads the *new* state then, so only the state itself is perturbed."""

    def plain(p, s, x):
        h = jnp.tanh(0.5 * s["h"] + x @ p["w"] + s["last"] @ p["w"] + s["kept"])
        return {"last": x, "h": h}, h + x.sum()

    def step(p, s, x, q):
        h = jnp.tanh(0.5 * s["h"] + x @ p["w"] + s["last"] @ p["w"] + s["kept"]) + q["h"]
        return {"last": x + q["last"], "kept": s["kept"] + q["kept"], "h": h}, h + x.sum()

    model, args = make(plain, {"last": (B, I), "kept": (B, H), "h": (B, H)}, w=(I, H))
    assert_equals(eb.compile_etrace_graph(model, *args), model, args, step, 0.3)


@pytest.mark.parametrize("name", list(models.ZOO))
def test_on_the_zoo(name):
    """Zeros change nothing; a state perturbed alone moves by its perturbation, unless it packs
    several that interact.
    """
    graph, (_, args) = models.graph_of(name), models.build(name)
    perturb, minfo = graph.hidden_perturb, graph.module_info
    rng = np.random.default_rng(0)
    zeros = perturb.init_perturb_data()
    assert [(z.shape, z.dtype) for z in zeros] == [
        (v.aval.shape, v.aval.dtype) for v in minfo.hidden_path_to_invar.values()
    ]
    noise = [jnp.asarray(rng.standard_normal(z.shape)) for z in zeros]

    def all_steps():
        one_at_a_time = [
            [n if i == j else z for j, (n, z) in enumerate(zip(noise, zeros, strict=True))]
            for i in range(len(zeros))
        ]
        return (
            minfo.jaxpr_call(*args),
            graph.call_hidden_perturb(args, zeros),
            [graph.call_hidden_perturb(args, data)[1] for data in one_at_a_time],
        )

    (out, hidden, other, _), (out_0, hidden_0, other_0, _), moved = compute(all_steps_of(all_steps))
    for a, b in zip(out_0 + hidden_0 + other_0, out + hidden + other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13, atol=1e-13)
    for leaf, after in zip(graph.structure.alignment.leaves, moved, strict=True):
        i = leaf.index
        if leaf.count == 1:
            np.testing.assert_allclose(after[i] - hidden[i], noise[i], rtol=1e-12, atol=1e-12)


def all_steps_of(fun):
    """The same results with dictionaries (whose keys JAX cannot sort) as lists."""

    def listed(result):
        out, hidden, other, added = result
        return (
            jax.tree.leaves(out),
            list(hidden.values()),
            [v for vs in other.values() for v in vs],
            added,
        )

    def run():
        plain, zero, moved = fun()
        return listed(plain), listed(zero), [list(h.values()) for h in moved]

    return run


def test_group_data():
    graph = models.graph_of("torch_lstm")
    perturb = graph.hidden_perturb
    h, c = jnp.ones((B, H)), jnp.zeros((B, H))
    (data,) = perturb.perturb_data_to_hidden_group_data([h, c], graph.hidden_groups)
    assert data.shape == (B, H, 2)
    np.testing.assert_array_equal(data[..., 0], h)
    np.testing.assert_array_equal(data[..., 1], c)
    with pytest.raises(eb.InputError, match="has no hidden state `v`"):
        perturb.perturb_data_to_hidden_group_data([h, c], models.graph_of("alif").hidden_groups)


def test_wrong_lengths():
    graph, (_, args) = models.graph_of("torch_lstm"), models.build("torch_lstm")
    with pytest.raises(
        eb.InputError, match=r"has 1 arrays, but there are 2 hidden states: `h`, `c`"
    ):
        graph.call_hidden_perturb(args, [jnp.zeros((B, H))])
    with pytest.raises(eb.InputError, match=r"`inputs` has 1 arrays, but the step takes 6"):
        graph.hidden_perturb.eval_jaxpr(list(args), graph.hidden_perturb.init_perturb_data())


def test_fields_and_builders():
    model, args = models.build("rnn")
    for perturb in (
        eb.add_hidden_perturbation_in_module(model, *args),
        eb.add_hidden_perturbation_from_minfo(eb.extract_module_info(model, *args)),
    ):
        assert list(perturb.dict()) == [
            "perturb_vars",
            "perturb_hidden_paths",
            "perturb_hidden_states",
            "perturb_jaxpr",
        ]
        assert perturb.perturb_hidden_paths == (("h",),)
        assert perturb.perturb_hidden_states == (model.h,)
        assert perturb.perturb_jaxpr.jaxpr.invars[-1] is perturb.perturb_vars[0]
    graph = eb.compile_etrace_graph(model, *args, include_hidden_perturb=False)
    assert graph.hidden_perturb is None
    assert graph.call_hidden_perturb(args, [jnp.zeros((B, H))])[0].shape == (B, H)
