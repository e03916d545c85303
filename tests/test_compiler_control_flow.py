"""Control flow and custom derivatives: what becomes of each, and that the program stays the same."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import HiddenState, ParamState
from jax import lax

import etrace_bridge as eb
import models
from etrace_bridge.compiler.control_flow import UNROLL_LIMIT
from models import B, H, Plain
from oracle_compiler import compute
from strict import promotion


def cell(step, **params):
    rng = np.random.default_rng(0)
    model = Plain(
        {n: ParamState(jnp.asarray(0.5 * rng.standard_normal(s))) for n, s in params.items()},
        {"h": HiddenState(jnp.asarray(rng.standard_normal((B, H))))},
        step,
    )
    return model, jnp.asarray(rng.standard_normal((B, H)))


def compiled(step, **params):
    """The graph of a step, checked against the step itself: values and gradients by parameters and
    state.
    """
    model, x = cell(step, **params)
    graph = eb.compile_etrace_graph(model, x)
    minfo = graph.module_info
    weights, h = {n: getattr(model, n).value for n in params}, model.h.value

    def by_function(weights, h):
        with promotion(implicit=True):  # the model's own code
            new, out = step(weights, {"h": h}, x)
        return (jnp.sin(new["h"]) + jnp.cos(out)).sum()

    def by_jaxpr(weights, h):
        values = {**weights, "h": h}
        old = [values[minfo.state_path(s)[0]] for s in minfo.compiled_model_states]
        out, hidden, _, _ = minfo.jaxpr_call(x, old_state_vals=old)
        return (jnp.sin(hidden[("h",)]) + jnp.cos(out)).sum()

    functions = [jax.value_and_grad(f, argnums=(0, 1)) for f in (by_function, by_jaxpr)]
    expected, got = compute(lambda: [f(weights, h) for f in functions])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    return graph


def kinds(graph):
    return [r.kind.value for r in graph.diagnostics]


def primitives(graph):
    return {eqn.primitive.name for eqn in graph.module_info.jaxpr.eqns}


def test_nested_calls_are_all_opened():
    def body(h, x, w):
        return lax.cond(
            x.sum() > 0, lambda: jnp.tanh(h + x @ w), lambda: jax.jit(jnp.sin)(h) + x @ w
        )

    def step(p, s, x):
        h, _ = lax.scan(lambda h, _: (jax.jit(body)(h, x, p["w"]), None), s["h"], None, length=2)
        return {"h": h}, jax.checkpoint(jnp.tanh)(h)

    graph = compiled(step, w=(H, H))
    assert primitives(graph) <= {
        "reduce_sum", "gt", "convert_element_type", "clamp", "min", "max", "dot_general", "add", "tanh", "sin", "eq",
        "broadcast_in_dim", "select_n",
    }  # fmt: skip
    assert kinds(graph).count("cond_converted") == 2
    assert kinds(graph).count("scan_unrolled") == 1
    assert graph.certificate()[("w",)].exact


def test_a_branch_out_of_range_is_clamped_as_jax_does():
    def step(p, s, x):
        branches = [lambda: x @ p["w"], lambda: jnp.tanh(x @ p["w"])]
        return {
            "h": 0.5 * s["h"]
            + lax.switch(7, branches)
            + lax.switch(jnp.int32(x[0, 0]) - 9, branches)
        }, s["h"]

    assert compiled(step, w=(H, H)).certificate()[("w",)].exact


@pytest.mark.parametrize("reverse", [False, True])
def test_scans_over_inputs_and_outputs(reverse):
    def step(p, s, x):
        rows = jnp.stack([x, 2 * x, 3 * x])
        h, ys = lax.scan(lambda h, r: (0.5 * h + r * p["w"], h * r), s["h"], rows, reverse=reverse)
        return {"h": h}, ys[0] + 2 * ys[2]

    graph = compiled(step, w=(H,))
    assert graph.certificate()[("w",)].exact
    assert "scan" not in primitives(graph)


def test_a_weight_among_the_scanned_values():
    def step(p, s, x):
        h, _ = lax.scan(lambda h, w: (jnp.tanh(h + x * w), None), s["h"], p["w"])
        return {"h": h}, h

    graph = compiled(step, w=(3, H))
    assert graph.certificate()[("w",)].exact
    assert len(graph.hidden_param_op_relations) == 3


def test_a_long_scan_with_a_weight_gets_no_trace_and_says_so():
    def step(p, s, x):
        y, _ = lax.scan(
            lambda c, _: (jnp.tanh(c + x @ p["w"]), None), x, None, length=UNROLL_LIMIT + 1
        )
        return {"h": 0.5 * s["h"] + y}, s["h"]

    graph = compiled(step, w=(H, H))
    (record,) = graph.explain(kind="scan_opaque")
    assert record.level == "warning"
    assert "the parameters w inside it get no trace" in record.message
    assert "test_compiler_control_flow.py" in record.context["line"]
    certificate = graph.certificate()[("w",)]
    assert (certificate.kind, certificate.exact) == ("upstream", False)
    assert "a scan of 17 steps" in graph.report()


def test_a_long_scan_of_the_state_is_a_cut():
    def step(p, s, x):
        h, _ = lax.scan(lambda h, _: (0.9 * h, None), s["h"], None, length=UNROLL_LIMIT + 1)
        return {"h": h + x @ p["w"]}, h

    graph = compiled(step, w=(H, H))
    (cut,) = graph.explain(kind="cut")
    assert (cut.primitive, cut.hidden_paths) == ("scan", (("h",),))
    assert not graph.certificate()[("w",)].exact


def test_a_weight_in_a_while_loop_is_refused_by_name():
    def step(p, s, x):
        y = lax.while_loop(lambda c: c.sum() < 9, lambda c: c + jnp.abs(p["w"]) + 1, s["h"])
        return {"h": y}, y

    model, x = cell(step, w=(H,))
    message = r"`while` loop \(.*test_compiler_control_flow.py:\d+.*uses the parameter `w`.*`jax.lax.scan`"
    with pytest.raises(eb.CompilationError, match=message):
        eb.compile_etrace_graph(model, x)


def test_a_while_loop_over_the_state_passes_no_gradient():
    def step(p, s, x):
        y = lax.while_loop(lambda c: c < 3, lambda c: c + 1, lax.stop_gradient(s["h"].sum()))
        return {"h": 0.5 * s["h"] + y * (x @ p["w"])}, s["h"]

    graph = compiled(step, w=(H, H))
    assert kinds(graph).count("while_opaque") == 1
    assert graph.certificate()[("w",)].exact


def test_fori_loop_with_a_fixed_count_is_a_scan():
    def step(p, s, x):
        return {"h": lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h + x @ p["w"]), s["h"])}, s["h"]

    graph = compiled(step, w=(H, H))
    assert graph.certificate()[("w",)].exact
    assert kinds(graph).count("scan_unrolled") == 1


# Spread products
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(H, 1), (H,)])
@pytest.mark.parametrize("shown", ["product", "gate", "nothing"])
def test_a_gate_of_one_value_a_row_keeps_its_trace(shape, shown):
    """Also where an output reads it: that output then reads the copy that was spread over the row."""

    def step(p, s, x):
        y = (x @ p["w"]).reshape(B, -1)
        h = jax.nn.sigmoid(y) * s["h"] + x
        return {"h": h}, h + {"product": y, "gate": jax.nn.sigmoid(y).sum(), "nothing": 0.0}[shown]

    graph = compiled(step, w=shape)
    (relation,) = graph.hidden_param_op_relations
    assert relation.y_var.aval.shape == (B, H)
    assert graph.certificate()[("w",)].exact
    assert not graph.explain(kind="cut")


# Custom derivatives stay whole
# --------------------------------------------------------------------------------------


@jax.custom_vjp
def spike(v, threshold):
    return (v > threshold).astype(v.dtype)


spike.defvjp(
    lambda v, threshold: (spike(v, threshold), v - threshold),
    lambda d, g: (g / (1 + d**2), -(g / (1 + d**2))),
)


def test_a_surrogate_with_a_learnable_threshold():
    """An element-wise custom call: the threshold is an element-wise contact, spread before the
    call.
    """

    def step(p, s, x):
        v = 0.9 * s["h"] + x
        z = spike(v, jnp.broadcast_to(p["threshold"], v.shape))
        return {"h": v - z}, z

    graph = compiled(step, threshold=(H,))
    (relation,) = graph.hidden_param_op_relations
    assert relation.x_var is None
    assert graph.certificate()[("threshold",)].exact
    assert "custom_vjp_call" in primitives(graph)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def normalise(v, axis):
    return v / jnp.abs(v).sum(axis, keepdims=True)


@normalise.defjvp
def _(axis, primals, tangents):
    return normalise(*primals, axis), 3.0 * tangents[0]


def test_a_custom_call_that_mixes_is_a_cut():
    def step(p, s, x):
        return {"h": normalise(s["h"], 1) + x @ p["w"]}, s["h"]

    graph = compiled(step, w=(H, H))
    (cut,) = graph.explain(kind="cut")
    assert cut.primitive == "custom_jvp_call"
    assert not graph.certificate()[("w",)].exact


def test_an_element_wise_custom_call_is_part_of_the_core():
    graph = models.graph_of("spiking_vjp")
    (group,) = graph.hidden_groups
    assert "custom_vjp_call" in {eqn.primitive.name for eqn in group.core.eqns}


def test_prints_and_checks_do_not_disturb():
    def step(p, s, x):
        jax.debug.print("{}", x.sum())
        h = 0.5 * s["h"] + x @ p["w"]
        return {"h": h}, h

    assert compiled(step, w=(H, H)).certificate()[("w",)].exact


def test_several_values_behind_one_barrier():
    def step(p, s, x):
        y, total = lax.optimization_barrier((x @ p["w"], x.sum()))
        h = 0.5 * s["h"] + y * total
        return {"h": h}, h

    assert compiled(step, w=(H, H)).certificate()[("w",)].exact
