"""One traced step: the same values and gradients as the model, plain equations only, and errors for
bad input.
"""

from __future__ import annotations

from functools import partial

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import HiddenState, ParamState, ShortTermState

import etrace_bridge as eb
import models
from etrace_bridge.compiler.jaxpr import evaluate
from models import B, H, I, Plain
from oracle_compiler import compute

CONTROL_FLOW = ["cond", "switch", "short_scan", "long_scan", "while_loop"]
PLAIN = [name for name, entry in models.ZOO.items() if entry.is_plain]
MODULES = [name for name, entry in models.ZOO.items() if not entry.is_plain]


def like(x, rng):
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 5, x.shape), x.dtype)
    return jnp.asarray(rng.standard_normal(x.shape), x.dtype)


@pytest.mark.parametrize("name", MODULES + CONTROL_FLOW)
def test_the_step_computes_what_the_model_computes(name):
    model, args = models.build(name)
    minfo = models.graph_of(name).module_info
    states = {p: s for p, s in model.states().items() if not isinstance(s, ParamState)}
    for seed in range(3 if name in CONTROL_FLOW else 1):  # branches depend on the input
        inputs = tuple(like(x, np.random.default_rng(seed)) for x in args)
        old = [model.states()[minfo.state_path(s)].value for s in minfo.compiled_model_states]
        out, hidden, other, added = compute(partial(minfo.jaxpr_call, *inputs, old_state_vals=old))
        expected = model(*inputs)
        assert added == []
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
        for path, state in states.items():
            got = hidden[path] if path in hidden else other[path][0]
            np.testing.assert_allclose(got, jax.tree.leaves(state.value)[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", PLAIN)
def test_the_step_and_its_gradient_are_those_of_the_python_function(name):
    """Surrogates keep their own derivative, and no rearrangement changes a gradient."""
    model, args = models.build(name)
    minfo = models.graph_of(name).module_info
    params, states = ({n: getattr(model, n).value for n in names} for names in model.names)

    def total(values):
        return sum(
            (jnp.linspace(0.5, 1.5, v.size).reshape(v.shape) * jnp.sin(v)).sum() for v in values
        )

    def by_function(params):
        new, out = model.step(params, states, *args)
        return total(jax.tree.leaves([out, *(states | new).values()]))

    def by_jaxpr(params):
        by_name = params | states
        old = [by_name[minfo.state_path(s)[0]] for s in minfo.compiled_model_states]
        out, hidden, other, _ = minfo.jaxpr_call(*args, old_state_vals=old)
        new = {p[0]: v for p, v in hidden.items()} | {p[0]: v[0] for p, v in other.items()}
        return total(jax.tree.leaves([out, *(states | new).values()]))

    expected, got = compute(
        lambda: [jax.value_and_grad(f)(params) for f in (by_function, by_jaxpr)]
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)
    assert any(np.abs(g).max() > 1e-3 for g in jax.tree.leaves(expected[1]))


@pytest.mark.parametrize("name", list(models.ZOO))
def test_only_plain_equations_remain(name):
    primitives = {eqn.primitive.name for eqn in models.graph_of(name).module_info.jaxpr.eqns}
    assert not primitives & {"jit", "pjit", "cond", "closed_call", "remat", "checkpoint"}
    assert ("scan" in primitives) == (name == "long_scan")
    assert ("while" in primitives) == (name == "while_loop")


# Fields and methods
# -------------------------------------------------------------------------------------------------


def test_fields():
    minfo = models.graph_of("torch_lstm").module_info
    assert list(minfo.dict())[:17] == [
        "stateful_model", "closed_jaxpr", "retrieved_model_states", "compiled_model_states", "state_id_to_path",
        "state_tree_invars", "state_tree_outvars", "hidden_path_to_invar", "hidden_path_to_outvar",
        "invar_to_hidden_path", "outvar_to_hidden_path", "hidden_outvar_to_invar", "weight_invars",
        "weight_path_to_invars", "invar_to_weight_path", "num_var_out", "num_var_state",
    ]  # fmt: skip
    assert list(minfo.hidden_path_to_invar) == [("h",), ("c",)]
    assert sorted(minfo.weight_path_to_invars) == [("b",), ("w_hh",), ("w_ih",)]
    assert minfo.num_var_out == 1
    assert minfo.num_var_state == 5
    assert minfo.jaxpr is minfo.closed_jaxpr.jaxpr
    for path, before in minfo.hidden_path_to_invar.items():
        assert minfo.invar_to_hidden_path[before] == path
        after = minfo.hidden_path_to_outvar[path]
        assert minfo.outvar_to_hidden_path[after] == path
        assert minfo.hidden_outvar_to_invar[after] is before


def test_pytree_parameters_have_one_variable_a_leaf():
    minfo = models.graph_of("pytree").module_info
    assert [v.aval.shape for v in minfo.weight_path_to_invars[("p",)]] == [(H,), (I, H)]


def test_split_state_outvars():
    minfo = models.graph_of("carried_elsewhere").module_info
    weights, hidden, other = minfo.split_state_outvars()
    assert (list(weights), list(hidden), list(other)) == ([("w",)], [("h",)], [("slow",)])


def test_add_jaxpr_outs():
    model, args = models.build("rnn")
    minfo = models.graph_of("rnn").module_info
    product = next(e for e in minfo.jaxpr.eqns if e.primitive.name == "dot_general").outvars[0]
    more = minfo.add_jaxpr_outs([product])
    assert more.jaxpr_call(*args)[3][0].shape == (B, H)
    np.testing.assert_allclose(more.jaxpr_call(*args)[3][0], args[0] @ model.w.value)
    assert minfo.jaxpr_call(*args)[3] == []
    foreign = models.graph_of("transposed").module_info.jaxpr.eqns[0].outvars[0]
    with pytest.raises(eb.InputError, match="not a variable of this step"):
        minfo.add_jaxpr_outs([foreign])


def test_jaxpr_call_checks_its_arguments():
    minfo = models.graph_of("rnn").module_info
    _, args = models.build("rnn")
    with pytest.raises(eb.InputError, match="has 1 values, but the step takes 4 states"):
        minfo.jaxpr_call(*args, old_state_vals=[0])
    with pytest.raises(eb.InputError, match="takes 5 arrays in all, but 4 were given"):
        minfo.jaxpr_call()


def test_equations_keep_their_source_line():
    minfo = models.graph_of("jitted").module_info
    from etrace_bridge.compiler.source_line import source_line

    lines = [source_line(eqn) for eqn in minfo.jaxpr.eqns]
    assert all("models.py" in line for line in lines)


def test_evaluate_can_skip():
    minfo = models.graph_of("rnn").module_info
    env = evaluate(minfo.jaxpr.eqns, {}, skip=lambda eqn: True)
    assert env == {}


# Bad input
# ----------------------------------------------------------------------------------------------------------


def cell(step, states=None, **params):
    states = {"h": (B, H)} if states is None else states
    return Plain(
        {n: ParamState(jnp.full(s, 0.1)) for n, s in params.items()},
        {n: HiddenState(jnp.zeros(s)) if isinstance(s, tuple) else s for n, s in states.items()},
        step,
    )


X = jnp.ones((B, I))


def test_not_a_module():
    with pytest.raises(
        eb.InputError, match=r"`model` is a function, not a brainstate module.*etrace_bridge.wrap"
    ):
        eb.compile_etrace_graph(lambda x: x, X)


def test_no_hidden_state():
    model = cell(lambda p, s, x: ({}, x @ p["w"]), {}, w=(I, H))
    with pytest.raises(
        eb.CompilationError, match=r"No hidden state of `Plain` takes part.*HiddenState"
    ):
        eb.compile_etrace_graph(model, X)


def test_no_parameter():
    model = cell(lambda p, s, x: ({"h": 0.5 * s["h"]}, s["h"]))
    with pytest.raises(
        eb.CompilationError, match=r"No parameter of `Plain` takes part.*ParamState"
    ):
        eb.compile_etrace_graph(model, X)


def test_hidden_state_changes_shape():
    model = cell(lambda p, s, x: ({"h": x @ p["w"]}, x), {"h": (5, H)}, w=(I, H))
    with pytest.raises(
        eb.StateError,
        match=r"changes the hidden state `h` from float64\[5,4\] to float64\[2,4\].*batch",
    ):
        eb.compile_etrace_graph(model, X)


def test_hidden_state_changes_dtype():
    model = cell(lambda p, s, x: ({"h": (s["h"] + x @ p["w"]).astype(jnp.float32)}, x), w=(I, H))
    with pytest.raises(
        eb.StateError, match=r"`h` from float64\[2,4\] to float32\[2,4\].*keep its shape and dtype"
    ):
        eb.compile_etrace_graph(model, X)


def test_integer_hidden_state():
    model = cell(
        lambda p, s, x: ({}, x @ p["w"]), {"h": HiddenState(jnp.zeros((B, H), jnp.int32))}, w=(I, H)
    )
    with pytest.raises(
        eb.StateError, match=r"`h` has dtype int32, which has no gradient.*ShortTermState"
    ):
        eb.compile_etrace_graph(model, X)


def test_parameter_assigned_in_the_step():
    class Hebbian(brainstate.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.h = ParamState(jnp.ones((I, H))), HiddenState(jnp.zeros((B, H)))

        def update(self, x):
            self.h.value = 0.5 * self.h.value + x @ self.w.value
            self.w.value = 0.9 * self.w.value
            return self.h.value

    with pytest.raises(eb.CompilationError, match=r"assigns to the parameter `w`.*ShortTermState"):
        eb.compile_etrace_graph(Hebbian(), X)


@pytest.mark.parametrize("cls", [brainstate.nn.GRUCell, brainstate.nn.LSTMCell])
def test_states_not_initialised(cls):
    with pytest.raises(eb.StateError, match=r"init_state\(batch_size\)"):
        eb.compile_etrace_graph(cls(I, H, **models.ZEROS), X)


def test_an_error_of_the_model_itself_is_left_alone():
    model = cell(lambda p, s, x: ({}, x @ p["w"]), w=(7, H))
    with pytest.raises(TypeError, match="dot_general"):
        eb.compile_etrace_graph(model, X)


# States that the module and the jaxpr do not share
# ------------------------------------------------------------------


def test_states_outside_the_step_are_diagnostics():
    model = cell(lambda p, s, x: ({"h": s["h"] + x @ p["w"]}, s["h"]), w=(I, H))
    model.idle_param, model.idle_state = ParamState(jnp.zeros(3)), HiddenState(jnp.zeros((B, H)))
    outside = ShortTermState(jnp.zeros(()))
    step = model.step

    def counting(p, s, x):
        outside.value = outside.value + 1
        return step(p, s, x)

    model.step = counting
    graph = eb.compile_etrace_graph(model, X)
    found = {(r.kind.value, r.weight_path, r.hidden_paths) for r in graph.diagnostics}
    assert ("state_not_in_jaxpr", ("idle_param",), ()) in found
    assert ("state_not_in_jaxpr", None, (("idle_state",),)) in found
    assert ("state_not_in_module", None, ()) in found
    assert "idle_param" in graph.report()
    _, _, other, _ = graph.module_info.jaxpr_call(X)
    assert [float(v[0]) for v in other.values()] == [1.0]
