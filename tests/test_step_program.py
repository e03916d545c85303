"""How the engine divides a step: levels of states, what the forward pass keeps, traces, and
convolutions as products.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from torch import nn

import etrace_bridge as eb
import models
from etrace_bridge._jax_compat import evaluate_jaxpr
from etrace_bridge.lowering import CPUTuning
from etrace_bridge.lowering import patches as convolution
from etrace_bridge.lowering import products as lowered_products
from etrace_bridge.rules import DRTRL, Carry, Chunk, EProp, PPProp
from etrace_bridge.schedule.chunk import run_chunk
from etrace_bridge.step.forward import run_forward
from etrace_bridge.step.linearise import loss_gradient
from etrace_bridge.step.program import StepProgram, make_program
from etrace_bridge.step.steps import Steps


def program_of(name: str) -> StepProgram:
    return make_program(models.graph_of(name))


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("torch_gru", 1),
        ("torch_lstm", 1),  # h and c depend on each other
        ("stacked", 2),
        ("tied_layers", 2),
        ("delay_line", 1),
    ],
)
def test_states_that_depend_on_each_other_are_one_level(name, levels):
    program = program_of(name)
    assert len(program.levels) == levels
    assert sorted(n for level in program.levels for n in level) == list(
        range(len(program.state_vars))
    )


@pytest.mark.parametrize(
    "name",
    [
        "torch_gru",
        "torch_lstm",
        "stacked",
        "tied_layers",
        "delay_line",
        "encoder_readout",
        "unused_state",
    ],
)
def test_levels_give_the_states_of_the_step_itself(name):
    """Against the step's own jaxpr, one step after the other."""
    program = program_of(name)
    rng, steps = np.random.default_rng(0), 4
    draw = lambda v, *lead: jnp.asarray(rng.standard_normal((*lead, *v.aval.shape)), v.aval.dtype)
    theta, xs = [draw(v) for v in program.weight_vars], [draw(v, steps) for v in program.arg_vars]
    hidden = [draw(leaf.invar) for leaf in program.leaves]
    assert not program.other_vars
    found = run_forward(program, program.weight_env(theta), hidden, [], xs)
    info = program.graph.module_info
    order = {
        v: n
        for n, v in enumerate(
            [*program.arg_vars, *program.weight_vars, *(leaf.invar for leaf in program.leaves)]
        )
    }
    for t in range(steps):
        for expected, kept in zip(hidden, found.hidden, strict=True):
            np.testing.assert_allclose(kept[t], expected, rtol=1e-12, atol=1e-12)
        values = [*(x[t] for x in xs), *theta, *hidden]
        out = evaluate_jaxpr(info.closed_jaxpr, *(values[order[v]] for v in info.jaxpr.invars))
        by_var = {
            v: o for v, o in zip(info.jaxpr.outvars, out, strict=True) if not hasattr(v, "val")
        }
        hidden = [
            by_var[leaf.outvar]
            if not hasattr(leaf.outvar, "val")
            else jnp.full(h.shape, leaf.outvar.val)
            for leaf, h in zip(program.leaves, hidden, strict=True)
        ]
    for expected, last in zip(hidden, found.new_hidden, strict=True):
        np.testing.assert_allclose(last, expected, rtol=1e-12, atol=1e-12)


def test_a_gru_keeps_sums():
    """Of r and z the sums of both products; of n the two products apart, since r scales one of
    them.
    """
    program = program_of("torch_gru")
    assert len(program.saved_vars) == 4
    made = {v: eqn.primitive.name for eqn in program.eqns for v in eqn.outvars}
    assert sum(made[v] == "add" for v in program.saved_vars) >= 2


def test_the_readout_is_left_to_the_parallel_passes():
    program = program_of("encoder_readout")
    products = [eqn.outvars[0] for eqn in program.eqns if eqn.primitive.name == "dot_general"]
    *on_the_way, readout = products  # the encoder's, the recurrent layer's, the readout's
    assert (
        len(on_the_way) == 2 and readout not in program.saved_vars and len(program.saved_vars) == 2
    )


def test_gates_share_a_trace():
    program = program_of("torch_lstm")
    products = [leg for leg in program.traces if leg.contact.x is not None]
    assert len(products) == 2 and all(len(program.taps_of(leg)) == 4 for leg in products)


SHAPES = {
    "plain": ((2, 3, 6, 5), (4, 3, 3, 3), {"padding": "SAME"}),
    "strided": (
        (2, 3, 7, 6),
        (4, 3, 3, 2),
        {"window_strides": (2, 3), "padding": ((1, 0), (2, 1))},
    ),
    "dilated": ((2, 3, 9, 8), (4, 3, 3, 2), {"rhs_dilation": (2, 3), "padding": ((2, 2), (0, 1))}),
    "transposed": (
        (2, 3, 4, 4),
        (4, 3, 3, 3),
        {"lhs_dilation": (2, 2), "padding": ((1, 2), (1, 2))},
    ),
    "cropped": ((2, 3, 6, 6), (4, 3, 3, 3), {"padding": ((-1, 0), (0, -1))}),
    "grouped": ((2, 6, 5, 5), (4, 3, 3, 3), {"feature_group_count": 2, "padding": "SAME"}),
    "depthwise": ((2, 4, 5), (8, 1, 3), {"feature_group_count": 4, "padding": "SAME"}),
    "channels last": (
        (2, 6, 5, 3),
        (3, 3, 3, 4),
        {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_convolutions_as_products(name):
    """Values and both derivatives are those of XLA's own convolution."""
    x_shape, w_shape, options = SHAPES[name]
    options = {"window_strides": (1,) * (len(x_shape) - 2)} | options
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.standard_normal(x_shape)), jnp.asarray(rng.standard_normal(w_shape))
    conv = lambda x, w: lax.conv_general_dilated(x, w, **options)
    (eqn,) = jax.make_jaxpr(conv)(x, w).eqns
    assert CPUTuning().is_patch_product(eqn)
    y, pull = jax.vjp(conv, x, w)
    found, found_pull = jax.vjp(lambda x, w: convolution.as_patch_product(eqn, [x, w])[0], x, w)
    cotangent = jnp.asarray(rng.standard_normal(y.shape))
    for a, b in zip((found, *found_pull(cotangent)), (y, *pull(cotangent)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11)


def test_large_convolutions_stay_what_they_are(monkeypatch):
    x, w = jnp.ones((1, 1, 8, 8)), jnp.ones((1, 1, 3, 3))
    (eqn,) = jax.make_jaxpr(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"))(x, w).eqns
    assert CPUTuning().is_patch_product(eqn)
    monkeypatch.setattr(convolution, "PATCH_BYTES", 100)
    assert (
        not CPUTuning().is_patch_product(eqn) and convolution.as_patch_product(eqn, [x, w]) is None
    )


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("torch_gru", set()),
        ("stacked", set()),
        ("encoder_readout", {"w_in", "b_in", "w_out", "b_out"}),
        ("tied_layers", set()),
        ("embedding", set()),
    ],
)
def test_weights_that_only_traces_read(name, others):
    """The loss reaches them through their contacts alone: with those left out, their gradient is
    zero, and that of the rest is not.
    """
    program = program_of(name)
    rng, steps = np.random.default_rng(0), 2

    def draw(v, *lead):
        shape = (*lead, *v.aval.shape)
        return jnp.asarray(
            rng.standard_normal(shape)
            if jnp.issubdtype(v.aval.dtype, jnp.floating)
            else rng.integers(0, 3, shape),
            v.aval.dtype,
        )

    theta, xs = [draw(v) for v in program.weight_vars], [draw(v, steps) for v in program.arg_vars]
    forward = run_forward(
        program, program.weight_env(theta), [draw(leaf.invar) for leaf in program.leaves], [], xs
    )

    def loss(output, target):
        return sum(jnp.sum((o - 0.3) ** 2) for o in jax.tree.leaves(output))

    env = program.weight_env(theta)
    run = Steps(program, theta, env, forward, xs, jnp.zeros(steps), jnp.ones(steps), loss)
    direct = loss_gradient(run, "step").direct
    paths = program.graph.module_info.invar_to_weight_path
    for v, g, alone in zip(program.weight_vars, direct, program.only_traced, strict=True):
        assert bool(np.abs(g).max() > 0) is not alone, paths[v]
    assert {
        paths[v][0]
        for v, alone in zip(program.weight_vars, program.only_traced, strict=True)
        if not alone
    } == others


def test_a_weight_that_is_computed_with_counts_as_read():
    """The derivative of what it becomes may be infinite where every factor of the trace is finite."""
    program = program_of("normalised")
    assert not any(program.only_traced)


@pytest.mark.parametrize(("steps", "largest"), [(1, 2**18), (5, 2**18), (5, 10)])
def test_loops_multiply_with_the_transpose_or_from_the_left(monkeypatch, steps, largest):
    """torch's (out, in) weights are transposed once before the loop; a large one, or that of a
    single step, is the left factor.
    """
    monkeypatch.setattr(lowered_products, "LARGEST_TRANSPOSED", largest)
    net = eb.wrap(nn.GRU(3, 4).double())
    x = jnp.ones((2, 3))
    net.init_state(batch_size=2)
    program = make_program(eb.compile_etrace_graph(net, x))
    rng = np.random.default_rng(0)
    theta, hidden = (
        [jnp.asarray(rng.standard_normal(v.aval.shape)) for v in vs]
        for vs in (program.weight_vars, [program.leaves[0].invar])
    )
    xs = jnp.asarray(rng.standard_normal((steps, 2, 3)))

    def forward(theta, hidden, xs):
        env = program.weight_env(theta) | program.loop_env(theta)
        return run_forward(program, env, hidden, [], [xs]).new_hidden

    jaxpr = jax.make_jaxpr(forward)(theta, hidden, xs)
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    eqns = loops[0].params["jaxpr"].eqns if loops else jaxpr.eqns
    products = [
        [v.aval.shape for v in eqn.invars] for eqn in eqns if eqn.primitive.name == "dot_general"
    ]
    recurrent = [(left, right) for left, right in products if {left, right} & {(12, 4), (4, 12)}]
    assert len(loops) == (steps > 1) and recurrent == [
        ((2, 4), (4, 12)) if loops and largest > 10 else ((12, 4), (2, 4))
    ]
    cell = nn.GRU(3, 4).double()
    names = [
        path[-1] if len(path) > 1 else path[0]
        for path in (program.graph.module_info.invar_to_weight_path[v] for v in program.weight_vars)
    ]
    cell.load_state_dict(
        {name: torch.from_numpy(np.array(w)) for name, w in zip(names, theta, strict=True)}
    )
    expected, _ = cell(
        torch.from_numpy(np.array(xs)), torch.from_numpy(np.array(hidden[0])).reshape(1, 2, 4)
    )
    np.testing.assert_allclose(
        np.reshape(forward(theta, hidden, xs)[0], (2, 4)), expected[-1].detach().numpy(), rtol=1e-12
    )


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(), EProp(kappa=0.5)], ids=str)
def test_one_step_transposes_products_not_sums(rule):
    """A transposed gradient is brought into order before another is added to it: a transpose goes
    into a product, not a sum.
    """
    net = eb.wrap(nn.GRU(3, 4).double())
    net.init_state(batch_size=2)
    program = make_program(eb.compile_etrace_graph(net, jnp.ones((2, 3))))
    theta = [jnp.ones(v.aval.shape) for v in program.weight_vars]
    hidden = [jnp.ones(leaf.invar.aval.shape) for leaf in program.leaves]

    def step(theta, hidden, trace, x):
        data = Chunk([x], jnp.zeros(1), jnp.ones(1), lambda y, target: jnp.sum(y**2))
        return run_chunk(rule, program, theta, Carry(hidden, [], trace), data, False, False).grads

    jaxpr = jax.make_jaxpr(step)(theta, hidden, rule.init(program), jnp.ones((1, 2, 3))).jaxpr
    made_by = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    shapes = {w.shape for w in theta if w.ndim == 2}
    transposed = [
        made_by[eqn.invars[0]]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "transpose" and eqn.outvars[0].aval.shape in shapes
    ]
    assert set(transposed) == {"dot_general"}


def primitives_of(jaxpr) -> set[str]:
    found = {eqn.primitive.name for eqn in jaxpr.eqns}
    inner = [v for eqn in jaxpr.eqns for v in jax.tree.leaves(list(eqn.params.values()))]
    return found.union(*(primitives_of(getattr(v, "jaxpr", v)) for v in inner if is_jaxpr(v)))


def is_jaxpr(value) -> bool:
    return hasattr(value, "eqns")


@pytest.mark.parametrize(
    ("name", "rule", "steps"),
    [("nn.GRU", DRTRL(), 5), ("nn.GRU", PPProp(), 1), ("conv1d", DRTRL(), 3)],
)
def test_other_devices_get_plain_programs_that_compute_the_same(name, rule, steps):
    """A program for a GPU has no barriers, patches or transposed weights; both are run here, on a
    CPU.
    """
    if name == "nn.GRU":
        net = eb.wrap(nn.GRU(3, 4).double())
        net.init_state(batch_size=2)
        graph = eb.compile_etrace_graph(net, jnp.ones((2, 3)))
    else:
        graph = models.graph_of(name)
    rng, found, seen = np.random.default_rng(0), {}, {}
    for platform in ("cpu", "gpu"):
        program = make_program(graph, platform)
        draw = lambda v, *lead: jnp.asarray(
            rng.standard_normal((*lead, *v.aval.shape)), v.aval.dtype
        )
        if not found:
            theta = [draw(v) for v in program.weight_vars]
            xs = [draw(v, steps) for v in program.arg_vars]
            hidden = [draw(leaf.invar) for leaf in program.leaves]
            trace = jax.tree.map(
                lambda x: jnp.asarray(rng.random(x.shape), x.dtype), rule.init(program)
            )
        assert bool(program.loop_env(theta)) is (platform == "cpu" and name == "nn.GRU")

        def run(theta, hidden, trace, xs, program=program):
            loss = lambda output, target: sum(jnp.sum(o**2) for o in jax.tree.leaves(output))
            data = Chunk(xs, jnp.zeros(steps), jnp.ones(steps), loss)
            result = run_chunk(rule, program, theta, Carry(hidden, [], trace), data, False, False)
            return result.grads, result.carry.trace, result.factors

        seen[platform] = primitives_of(jax.make_jaxpr(run)(theta, hidden, trace, xs).jaxpr)
        found[platform] = jax.jit(run)(theta, hidden, trace, xs)[:2]
    assert "optimization_barrier" not in seen["gpu"]
    assert name == "conv1d" or "optimization_barrier" in seen["cpu"]
    assert name != "conv1d" or (
        "conv_general_dilated" in seen["gpu"] and "conv_general_dilated" not in seen["cpu"]
    )
    assert max(np.abs(g).max() for g in found["cpu"][0]) > 0
    for a, b in zip(
        *(jax.tree.leaves(found[platform]) for platform in ("cpu", "gpu")), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_step_is_the_model():
    """`StepProgram.step` against torch's cell."""
    torch.manual_seed(0)
    cell = nn.GRUCell(3, 4).double()
    net = eb.wrap(cell)
    x, h = torch.randn(2, 3).double(), torch.randn(2, 4).double()
    net.init_state(batch_size=2)
    program = make_program(eb.compile_etrace_graph(net, jnp.asarray(x.numpy())))
    paths = program.graph.module_info.invar_to_weight_path
    theta = [jnp.asarray(getattr(cell, paths[v][-1]).detach().numpy()) for v in program.weight_vars]
    output, hidden, other = program.step(
        theta, [jnp.asarray(h.numpy())], [], [jnp.asarray(x.numpy())]
    )
    expected = cell(x, h).detach().numpy()
    np.testing.assert_allclose(jax.tree.leaves(output)[0], expected, rtol=1e-12)
    np.testing.assert_allclose(hidden[0], expected, rtol=1e-12)
    assert other == []
