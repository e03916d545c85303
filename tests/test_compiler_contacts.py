"""The linear form of every contact is what the equation computes, and the tables can be extended."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import HiddenState, ParamState
from jax import lax

import etrace_bridge as eb
import models
from etrace_bridge._jax_compat import bind_equation
from etrace_bridge.compiler import ContactForm
from etrace_bridge.compiler.contacts import _RULES
from etrace_bridge.compiler.jaxpr import read
from etrace_bridge.compiler.normalise import normalise
from etrace_bridge.compiler.primitives import _ELEMENTWISE, index_maps, is_structural
from models import B, H, I, Plain
from oracle_compiler import Step, compute


def by_form(form, view, x):
    """`y` from the letters: sum over the contracted ones of features times the view, spread to new
    axes.
    """
    view = view.reshape(form.shape(form.view))
    if form.x_index is None:
        operands, letters = [view], [form.view]
    else:
        operands = [form.phi(x).reshape(form.shape(form.feature)), view]
        letters = [form.feature, form.view]
    new = [c for c in form.out if not any(c in part for part in letters)]  # of the output alone
    operands += [jnp.ones(form.sizes[c]) for c in new]
    return jnp.einsum(",".join([*letters, *new]) + "->" + form.out, *operands)


@pytest.mark.parametrize("name", list(models.ZOO))
def test_the_form_is_the_equation(name):
    graph, (_, args) = models.graph_of(name), models.build(name)
    step = Step(graph, args)

    def run():
        env = step.run({}, {})
        pairs = []
        for contact in graph.structure.use.contacts:
            for part in contact.parts:
                view = contact.view(env)
                if part.letter:
                    axis = contact.form.view.index(part.letter)
                    view = lax.slice_in_dim(
                        view, part.start, part.start + part.form.sizes[part.letter], axis=axis
                    )
                pairs.append(
                    (
                        by_form(
                            part.form,
                            view,
                            step.read(env, contact.x) if contact.x is not None else None,
                        ),
                        env[part.var],
                    )
                )
        return [(a.reshape(b.shape), b) for a, b in pairs]

    for got, expected in compute(run):
        if name != "embedding_module":  # its features are those of the declared gradient, see below
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)
        assert np.abs(expected).max() > 0


def test_features_of_an_embedding_follow_its_own_gradient():
    """`padding_idx` has no gradient, so no feature; the forward value is untouched."""
    graph, (model, args) = models.graph_of("embedding_module"), models.build("embedding_module")
    (contact,) = graph.structure.use.contacts
    features = contact.form.phi(args[0])
    np.testing.assert_array_equal(features, [[0, 0, 0, 0, 0], [0, 0, 0, 1, 0]])
    np.testing.assert_allclose(model.table(args[0]), model.table.weight.value[args[0]])


def test_the_view_is_a_function_of_the_parameters():
    graph, (model, _) = models.graph_of("normalised"), models.build("normalised")
    (relation,) = graph.hidden_param_op_relations
    values = {("v",): model.v.value, ("g",): model.g.value}
    env = {v: values[p] for v, p in graph.module_info.invar_to_weight_path.items()}
    v, g = model.v.value, model.g.value
    np.testing.assert_allclose(
        relation.weight_view(env), (g / jnp.linalg.norm(v, axis=0))[None] * v, rtol=1e-12
    )
    assert str(relation.weight_view).startswith("v, g -> broadcast_in_dim -> mul")


# Structural primitives: which input element each output element is
# ----------------------------------------------------

ROWS, COLUMNS = np.array([2, 0, 1]), np.array([1, 1, 3])
STRUCTURAL = {
    "reshape": lambda x: x.reshape(2, 6),
    "squeeze": lambda x: lax.squeeze(x.reshape(3, 1, 4), (1,)),
    "broadcast_in_dim adds an axis": lambda x: x[:, None],
    "transpose": lambda x: x.T,
    "rev": lambda x: lax.rev(x, (1,)),
    "slice": lambda x: x[1:, ::2],
    "split": lambda x: lax.split(x, (1, 2), axis=0),
    "concatenate": lambda x: lax.concatenate([x, x[:2]], 0),
    "stack": lambda x: jnp.stack([x, 2 * x], axis=1),
    "broadcast_in_dim": lambda x: jnp.broadcast_to(x[:, None], (3, 2, 4)),
    "pad": lambda x: lax.pad(x, 0.0, [(1, 2, 1), (-1, 0, 0)]),
    "gather": lambda x: x[ROWS],
    "gather points": lambda x: x[ROWS, COLUMNS],
    "gather fill": lambda x: x.at[np.array([0, 7])].get(mode="fill", fill_value=0.0),
    "scatter": lambda x: x.at[ROWS[:2]].set(5 * x[:2]),
    "slice from dynamic_slice": lambda x: lax.dynamic_slice(x, (1, 9), (2, 2)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x, x[:2, :2], (2, 1)),
}


@pytest.mark.parametrize("name", list(STRUCTURAL))
def test_index_maps(name):
    """Run on the numbers 1, 2, 3, … of its elements, a structural equation gives the map itself (0:
    a fill value).
    """
    closed, _ = normalise(jax.make_jaxpr(STRUCTURAL[name])(jnp.ones((3, 4))), [None])
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    env = constants | {closed.jaxpr.invars[0]: jnp.ones((3, 4))}
    checked = []
    for eqn in closed.jaxpr.eqns:
        operands = [read(env, v) for v in eqn.invars]
        if is_structural(eqn):
            numbered, start = [], 1
            for o in operands:
                number = jnp.arange(start, start + np.size(o), dtype=jnp.float64).reshape(
                    np.shape(o)
                )
                numbered.append(number if jnp.issubdtype(jnp.result_type(o), jnp.floating) else o)
                start += np.size(o)
            if eqn.primitive.name == "pad":
                numbered[1] = jnp.zeros(())
            for got, expected in zip(
                index_maps(eqn, constants), bind_equation(eqn, numbered), strict=True
            ):
                np.testing.assert_array_equal(got + 1, expected)
            checked.append(eqn.primitive.name)
        env.update(zip(eqn.outvars, bind_equation(eqn, operands), strict=True))
    assert name.split()[0] in checked


def test_indices_that_depend_on_data_mix_positions():
    closed = jax.make_jaxpr(lambda x, i: x[i])(jnp.ones((3, 4)), 1)
    eqn = next(e for e in closed.jaxpr.eqns if e.primitive.name in ("gather", "dynamic_slice"))
    assert index_maps(eqn, {}) is None


# Extending the tables
# -----------------------------------------------------------------------------------------------


def cell(step, **params):
    rng = np.random.default_rng(0)
    model = Plain(
        {n: ParamState(jnp.asarray(rng.standard_normal(s))) for n, s in params.items()},
        {"h": HiddenState(jnp.asarray(rng.standard_normal((B, H))))},
        step,
    )
    return model, jnp.asarray(rng.standard_normal((B, H)))


def test_register_contact(monkeypatch):
    """`cumsum(x * w)` along the features is linear in `w`, and no rule is built in for a primitive
    that does it.
    """

    @jax.custom_vjp
    def scale(x, w):
        return jnp.sort(x, axis=1) * w

    scale.defvjp(
        lambda x, w: (scale(x, w), (x, w)),
        lambda r, g: (g * r[1], (jnp.sort(r[0], axis=1) * g).sum(0)),
    )

    model, x = cell(lambda p, s, x: ({"h": 0.5 * s["h"] + scale(x, p["w"])}, s["h"]), w=(H,))
    before = eb.compile_etrace_graph(model, x)
    (record,) = before.explain(kind="unknown_contact")
    assert record.weight_path == ("w",)
    assert "register_contact" in record.message
    assert not before.hidden_param_op_relations

    def rule(eqn, weight):
        if weight != 1:
            return None
        b, h = eqn.outvars[0].aval.shape
        return ContactForm(
            1, 0, {"b": b, "h": h}, out="bh", view="h", feature="bh", phi=lambda x: jnp.sort(x, 1)
        )

    monkeypatch.setitem(_RULES, "custom_vjp_call", _RULES["custom_vjp_call"])
    eb.register_contact("custom_vjp_call", rule)
    after = eb.compile_etrace_graph(model, x)
    (relation,) = after.hidden_param_op_relations
    assert relation.path == ("w",)
    assert after.certificate()[("w",)].exact
    (contact,) = after.structure.use.contacts
    env = Step(after, (x,)).run({}, {})
    np.testing.assert_allclose(
        by_form(contact.form, contact.view(env), x), env[contact.y], rtol=1e-12
    )


def test_register_elementwise(monkeypatch):
    def step(p, s, x):
        return {"h": lax.clamp(-1.0, s["h"] + x @ p["w"], 1.0)}, s["h"]

    model, x = cell(step, w=(H, H))
    assert eb.compile_etrace_graph(model, x).certificate()[("w",)].exact
    without = _ELEMENTWISE - {"clamp"}
    monkeypatch.setattr("etrace_bridge.compiler.primitives._ELEMENTWISE", without)
    assert not eb.compile_etrace_graph(model, x).certificate()[("w",)].exact
    eb.register_elementwise("clamp")
    assert eb.compile_etrace_graph(model, x).certificate()[("w",)].exact


def test_large_traces_are_warned_about(monkeypatch):
    monkeypatch.setattr("etrace_bridge.compiler.records.LARGE_TRACE_BYTES", B * I * H * 8 - 1)
    model, args = models.build("rnn")
    records = eb.compile_etrace_graph(model, *args).explain(kind="large_trace")
    assert [r.weight_path for r in records] == [("w",), ("u",)]
    assert records[0].context["bytes"] == B * I * H * 8
    assert "pp_prop" in records[0].message
