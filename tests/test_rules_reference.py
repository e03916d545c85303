"""Rules against their own equations: cells written out by hand, cells in torch, and braintrace's
D-RTRL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import models
from etrace_bridge.compiler.graph import compile_etrace_graph
from etrace_bridge.rules import (
    DRTRL,
    RFLO,
    Carry,
    Chunk,
    EProp,
    Immediate,
    PPProp,
    Rule,
    SnAp1,
    SnApN,
    ThreeFactor,
)
from etrace_bridge.schedule.chunk import run_chunk
from etrace_bridge.step.program import StepProgram, make_program
from models import B, H, I
from oracle import Cell, CellRules, assert_close, assert_live
from quick_jit import quick_jit
from strict import promotion

pytestmark = pytest.mark.usefixtures("users_compiler")

T, OUT = 6, 2


@dataclass(frozen=True)
class Written:
    """A model written twice: as a step on a batch, and as a cell for one batch element."""

    step: Callable
    cell: Cell
    weights: dict[str, tuple[int, ...]]
    states: tuple[str, ...]
    shape: tuple[int, ...] = (H,)
    x_shape: tuple[int, ...] = (I,)


MODELS: dict[str, Written] = {}


def _readout(weights, exits):
    return weights["w_out"] @ exits[0]


# -- RNN ------------------------------------------------------------------------------------------


def _rnn_step(p, s, x):
    h = jnp.tanh(x @ p["w"] + s["h"] @ p["u"] + p["b"])
    return {"h": h}, h @ p["w_out"].T


def _rnn_core(y, x, h):
    new = [jnp.tanh(y["w"] + y["u"] + y["b"])]
    return new, new


MODELS["rnn"] = Written(
    _rnn_step,
    Cell(
        lambda p: {"w": p["w"].T, "u": p["u"].T, "b": p["b"]},
        lambda x, h: {"w": x, "u": h[0]},
        _rnn_core,
        _readout,
        ("b",),
    ),
    {"w": (I, H), "u": (H, H), "b": (H,), "w_out": (OUT, H)},
    ("h",),
)


# -- GRU and LSTM in torch's layout ---------------------------------------------------------------


def _gru_core(y, x, h):
    i_r, i_z, i_n = jnp.split(y["w_ih"] + y["b_ih"], 3, axis=-1)
    h_r, h_z, h_n = jnp.split(y["w_hh"] + y["b_hh"], 3, axis=-1)
    z = jax.nn.sigmoid(i_z + h_z)
    new = [(1 - z) * jnp.tanh(i_n + jax.nn.sigmoid(i_r + h_r) * h_n) + z * h[0]]
    return new, new


def _lstm_core(y, x, h):
    i, f, g, o = jnp.split(y["w_ih"] + y["w_hh"] + y["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * h[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
    new = [jax.nn.sigmoid(o) * jnp.tanh(c), c]
    return new, new[:1]


def _torch_layout(core: Callable, names: tuple[str, ...]) -> tuple[Callable, Cell]:
    """A step and a cell that share their element-wise part; products and biases are written apart."""

    def step(p, s, x):
        y = {"w_ih": x @ p["w_ih"].T, "w_hh": s["h"] @ p["w_hh"].T}
        y |= {n: p[n] for n in p if n.startswith("b")}
        new, exits = core(y, x, [s[n] for n in names])
        return dict(zip(names, new, strict=True)), exits[0] @ p["w_out"].T

    def views(p):
        return {n: v for n, v in p.items() if n != "w_out"}

    return step, Cell(
        views, lambda x, h: {"w_ih": x, "w_hh": h[0]}, core, _readout, ("b_ih", "b_hh", "b")
    )


MODELS["gru"] = Written(
    *_torch_layout(_gru_core, ("h",)),
    {"w_ih": (3 * H, I), "w_hh": (3 * H, H), "b_ih": (3 * H,), "b_hh": (3 * H,), "w_out": (OUT, H)},
    ("h",),
)
MODELS["lstm"] = Written(
    *_torch_layout(_lstm_core, ("h", "c")),
    {"w_ih": (4 * H, I), "w_hh": (4 * H, H), "b": (4 * H,), "w_out": (OUT, H)},
    ("h", "c"),
)


# -- Adaptive spiking neurons; the readout reads spikes, which are no state -----------------------


def _alif_core(y, x, h):
    v = 0.9 * h[0] + y["w"] + y["u"] - y["beta"] * h[1]
    z = models.spike_jvp(v - 0.2)
    return [v - z, 0.8 * h[1] + z], [z]


def _alif_step(p, s, x):
    y = {"w": x @ p["w"].T, "u": models.spike_jvp(s["v"]) @ p["u"].T, "beta": p["beta"]}
    (v, a), (z,) = _alif_core(y, x, [s["v"], s["a"]])
    return {"v": v, "a": a}, z @ p["w_out"].T


MODELS["alif"] = Written(
    _alif_step,
    Cell(
        lambda p: {n: p[n] for n in ("w", "u", "beta")},
        lambda x, h: {"w": x, "u": models.spike_jvp(h[0])},
        _alif_core,
        _readout,
    ),
    {"w": (H, I), "u": (H, H), "beta": (H,), "w_out": (OUT, H)},
    ("v", "a"),
)


# -- A recurrent convolution; by hand its kernels are banded matrices -----------------------------

LENGTH = 4


def _conv_step(p, s, x):
    def conv(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
        )

    h = jnp.tanh(conv(x, p["w"]) + conv(s["h"], p["u"]))
    return {"h": h}, h.reshape(B, -1) @ p["w_out"].T


def _banded(kernel: Any) -> Any:
    """(place, out) by (place, in): the matrix of a convolution with a kernel of three places."""
    _, ins, outs = kernel.shape
    places, none = range(LENGTH), jnp.zeros((outs, ins))
    return jnp.block(
        [[kernel[j - i + 1].T if abs(j - i) <= 1 else none for j in places] for i in places]
    )


MODELS["conv"] = Written(
    _conv_step,
    Cell(
        lambda p: {"w": _banded(p["w"]), "u": _banded(p["u"])},
        lambda x, h: {"w": x, "u": h[0]},
        lambda y, x, h: ([jnp.tanh(y["w"] + y["u"])],) * 2,
        _readout,
    ),
    {"w": (3, I, 2), "u": (3, 2, 2), "w_out": (OUT, LENGTH * 2)},
    ("h",),
    (LENGTH, 2),
    (LENGTH, I),
)


# -- running --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A written model with values, its program, and its oracle."""

    program: StepProgram
    weights: dict[str, Any]
    states: dict[str, Any]
    xs: Any
    targets: Any
    rules: CellRules

    def in_order(self) -> tuple[list[Any], list[Any]]:
        """Weights and hidden states in the order that the program takes them."""
        info = self.program.graph.module_info
        weights = [self.weights[path[-1]] for path in info.weight_path_to_invars]
        return weights, [self.states[leaf.path[-1]] for leaf in self.program.leaves]


@cache
def built(name: str) -> Built:
    model, rng = MODELS[name], np.random.default_rng(5)
    weights = {n: jnp.asarray(0.6 * rng.standard_normal(s)) for n, s in model.weights.items()}
    states = {n: jnp.asarray(0.5 * rng.standard_normal((B, *model.shape))) for n in model.states}
    xs = jnp.asarray(rng.standard_normal((T, B, *model.x_shape)))
    module = models.Plain(
        {n: models.ParamState(w) for n, w in weights.items()},
        {n: models.HiddenState(s) for n, s in states.items()},
        model.step,
    )
    program = make_program(compile_etrace_graph(module, xs[0]))
    targets = jnp.linspace(-1.0, 1.0, T)
    # One batch element's loss; the batch's loss is their sum.
    flat = [states[n].reshape(B, -1) for n in model.states]
    rules = CellRules(model.cell, weights, flat, xs.reshape(T, B, -1), targets, row_loss)
    return Built(program, weights, states, xs, targets, rules)


def row_loss(output: Any, target: Any) -> Any:
    ramp = jnp.linspace(0.5, 1.5, output.size).reshape(output.shape)
    return jnp.sum(jnp.sin(ramp * output + target))


def batch_loss(output: Any, target: Any) -> Any:
    return sum(row_loss(row, target) for row in output)


@cache
def gradient(name: str, rule: Rule, K: int) -> dict[str, np.ndarray]:
    """The rule's gradient over the sequence, in chunks of K."""
    b = built(name)
    weights, hidden = b.in_order()

    @quick_jit
    def chunk(hidden, trace, x, target):
        data = Chunk([x], target, jnp.ones(len(target)), batch_loss)
        found = run_chunk(rule, b.program, weights, Carry(hidden, [], trace), data, False, False)
        return found.grads, found.carry.hidden, found.carry.trace

    trace, total = rule.init(b.program), [0.0] * len(weights)
    for i in range(0, T, K):
        grads, hidden, trace = chunk(hidden, trace, b.xs[i : i + K], b.targets[i : i + K])
        total = [x + y for x, y in zip(total, grads, strict=True)]
    names = [path[-1] for path in b.program.graph.module_info.weight_path_to_invars]
    return {n: np.asarray(g) for n, g in zip(names, total, strict=True)}


def check(name: str, rule: Rule, K: int, expected: dict[str, np.ndarray]) -> None:
    found = gradient(name, rule, K)
    assert_live(list(expected.values()))
    for n, g in expected.items():
        assert_close(found[n], g)


@pytest.mark.parametrize("credit", ["core", "step"])
@pytest.mark.parametrize(
    ("name", "K"), [("rnn", 1), ("gru", 3), ("lstm", 3), ("conv", 2), ("alif", 3)]
)
def test_pp_prop(name, K, credit):
    check(name, PPProp(decay=0.8, credit=credit), K, built(name).rules.pp_prop(0.8, credit))


@pytest.mark.parametrize(
    ("name", "K"), [("rnn", 1), ("gru", 3), ("lstm", 3), ("conv", 2), ("alif", 3)]
)
def test_snap1(name, K):
    expected = built(name).rules.snap1()
    check(name, SnAp1(credit="core"), K, expected)
    plain = built(name).rules.eprop(0.0)
    assert max(np.abs(plain[n] - expected[n]).max() for n in plain) > 1e-3, (
        "the diagonal makes no difference here"
    )


@pytest.mark.parametrize(("name", "K"), [("rnn", 1), ("gru", 3), ("lstm", 3), ("alif", 2)])
def test_eprop_with_a_filter(name, K):
    check(name, EProp(kappa=0.7), K, built(name).rules.eprop(0.7))


@pytest.mark.parametrize(("name", "kappa", "K"), [("gru", 0.0, 3), ("alif", 0.6, 2)])
def test_eprop_with_random_feedback(name, kappa, K):
    rule = EProp(kappa=kappa, feedback="random", seed=3)
    (matrix,) = rule.feedback_matrices(built(name).program).values()
    check(name, rule, K, built(name).rules.eprop(kappa, np.asarray(matrix)))


@pytest.mark.parametrize(("name", "K"), [("rnn", 1), ("gru", 3), ("lstm", 2), ("alif", 3)])
def test_rflo(name, K):
    rule, program = RFLO(seed=4), built(name).program
    (group,) = program.groups
    assert [leaf.path[-1] for leaf in group.leaves] == list(MODELS[name].states), (
        "states in the oracle's order"
    )
    matrices = rule.matrices(program.groups, {0: program.out_vars[0].aval.shape})
    expected = built(name).rules.rflo(np.concatenate([np.asarray(F) for F in matrices.values()], 1))
    check(name, rule, K, expected)
    other = built(name).rules.eprop(0.0)
    outside = [n for n in expected if np.allclose(expected[n], other[n], rtol=1e-9)]
    assert outside == ["w_out"], "all but the readout have another signal"


@pytest.mark.parametrize(("name", "K"), [("lstm", 2), ("alif", 3)])
def test_three_factor(name, K):
    """The signal is the loss itself, one number for batch and units."""
    b, states, losses = built(name), built(name).states, []
    for x, target in zip(b.xs, b.targets, strict=True):
        with promotion(implicit=True):  # the model's own code
            states, output = MODELS[name].step(b.weights, states, x)
        losses.append(float(batch_loss(output, target)))
    check(name, ThreeFactor(), K, b.rules.three_factor(losses))


@pytest.mark.parametrize(("name", "K"), [("gru", 3), ("conv", 2)])
def test_immediate(name, K):
    check(name, Immediate(), K, built(name).rules.immediate())


@pytest.mark.parametrize("name", ["gru", "alif"])
def test_eprop_without_a_filter_is_d_rtrl(name):
    check(name, EProp(), 3, built(name).rules.eprop(0.0))
    check(name, DRTRL(credit="core"), 3, built(name).rules.eprop(0.0))


# -- in torch: a history whose recurrent product is detached --------------------------------------


def _torch_rnn(p, states, x, seen):
    return (torch.tanh(x @ p["w"] + seen @ p["u"] + p["b"]),)


def _torch_gru(p, states, x, seen):
    i_r, i_z, i_n = (x @ p["w_ih"].T + p["b_ih"]).chunk(3, 1)
    h_r, h_z, h_n = (seen @ p["w_hh"].T + p["b_hh"]).chunk(3, 1)
    z = torch.sigmoid(i_z + h_z)
    return ((1 - z) * torch.tanh(i_n + torch.sigmoid(i_r + h_r) * h_n) + z * states[0],)


def _torch_lstm(p, states, x, seen):
    i, f, g, o = (x @ p["w_ih"].T + seen @ p["w_hh"].T + p["b"]).chunk(4, 1)
    c = torch.sigmoid(f) * states[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


TORCH = {"rnn": _torch_rnn, "gru": _torch_gru, "lstm": _torch_lstm}


def torch_online(name: str, credit: str) -> dict[str, np.ndarray]:
    """The gradients of the steps' losses, one by one; what the recurrent product reads is detached.

    With `credit="step"` it is not detached in the last step, the one whose loss is taken; with
    `"bptt"` it never is.
    """
    b, cell = built(name), TORCH[name]
    weights = {n: torch.tensor(np.asarray(w), requires_grad=True) for n, w in b.weights.items()}
    xs, ramp = torch.tensor(np.asarray(b.xs)), torch.linspace(0.5, 1.5, OUT, dtype=torch.float64)
    for t in range(T):
        states = tuple(torch.tensor(np.asarray(b.states[n])) for n in MODELS[name].states)
        for s in range(t + 1):
            whole = credit == "bptt" or (credit == "step" and s == t)
            states = cell(weights, states, xs[s], states[0] if whole else states[0].detach())
        output = states[0] @ weights["w_out"].T
        torch.sin(ramp * output + float(b.targets[t])).sum().backward()
    return {n: w.grad.numpy() for n, w in weights.items()}


@pytest.mark.parametrize("credit", ["core", "step"])
@pytest.mark.parametrize("name", list(TORCH))
def test_d_rtrl_in_torch(name, credit):
    expected = torch_online(name, credit)
    check(name, DRTRL(credit=credit), 3, expected)
    exact = torch_online(name, "bptt")
    assert max(np.abs(exact[n] - expected[n]).max() for n in exact) > 1e-3, "nothing was detached"


# -- braintrace: the same cells, one layer a gate -------------------------------------------------


def _layer(p: dict, x: Any) -> Any:
    return x @ p["weight"] + p["bias"]


def _plain_rnn(p, s, x):
    h = jnp.tanh(_layer(p["W"], jnp.concatenate([x, s["h"]])))
    return {"h": h}, h


def _plain_gru(p, s, x):
    both = jnp.concatenate([x, s["h"]])
    z, r = jax.nn.sigmoid(_layer(p["Wz"], both)), jax.nn.sigmoid(_layer(p["Wr"], both))
    h = (1 - z) * s["h"] + z * jnp.tanh(_layer(p["Wh"], jnp.concatenate([x, r * s["h"]])))
    return {"h": h}, h


def _plain_cfn(p, s, x):
    both = jnp.concatenate([x, s["h"]])
    f, i = jax.nn.sigmoid(_layer(p["Wf"], both)), jax.nn.sigmoid(_layer(p["Wi"], both))
    h = f * jnp.tanh(s["h"]) + i * jnp.tanh(_layer(p["Wh"], x))
    return {"h": h}, h


# braintrace says which weight it leaves out
@pytest.mark.filterwarnings("ignore:ETP primitive:UserWarning")
@pytest.mark.implicit_promotion("braintrace's own code promotes")
@pytest.mark.parametrize(
    ("cell", "step", "left_out"),
    [
        ("ValinaRNNCell", _plain_rnn, set()),
        ("GRUCell", _plain_gru, {"Wr"}),
        ("CFNCell", _plain_cfn, set()),
    ],
)
def test_braintrace_gives_the_same_where_it_gives_anything(cell, step, left_out):
    import braintrace

    xs = jnp.asarray(np.random.default_rng(4).standard_normal((T, I)))
    targets = jnp.linspace(-1.0, 1.0, T)
    theirs = getattr(braintrace.nn, cell)(I, H, activation="tanh")
    learner = braintrace.compile(theirs, braintrace.D_RTRL, xs[0])
    expected = learner.etrace_grad(
        xs, targets, step_fn=lambda x, target: row_loss(learner(x), target)
    )

    layers = {
        path[0]: jax.tree.map(jnp.array, w.value)
        for path, w in theirs.states(models.ParamState).items()
    }
    params = {n: models.ParamState(w) for n, w in layers.items()}
    model = models.Plain(params, {"h": models.HiddenState(jnp.zeros(H))}, step)
    program = make_program(compile_etrace_graph(model, xs[0]))
    paths = list(program.graph.module_info.weight_path_to_invars)
    theta = [leaf for path in paths for leaf in jax.tree.leaves(layers[path[0]])]
    rule = DRTRL(credit="core", upstream="step")
    data = Chunk([xs], targets, jnp.full(T, 1 / T), row_loss)  # theirs is the mean over time
    found = quick_jit(
        lambda: (
            run_chunk(rule, program, theta, Carry([jnp.zeros(H)], [], None), data, True, True).grads
        )
    )()
    leaves = iter(found)
    for path in paths:
        ours = {name: next(leaves) for name in sorted(layers[path[0]])}
        assert_live(list(ours.values()))
        for name, g in ours.items():
            other = expected[path[0], "weight"][name]
            if path[0] in left_out:
                assert not np.asarray(other).any()
            else:
                assert_close(g, other)


def _braintrace_rnn(
    algorithm: Callable, step_fn: Callable, rule: Rule, loss: Callable, **options: Any
) -> tuple[dict, dict]:
    """Gradients of braintrace's RNN cell under its algorithm, and of ours step by step; the mean
    over time.
    """
    import braintrace

    xs = jnp.asarray(np.random.default_rng(4).standard_normal((T, I)))
    targets = jnp.linspace(-1.0, 1.0, T)
    theirs = braintrace.nn.ValinaRNNCell(I, H, activation="tanh")
    learner = braintrace.compile(theirs, algorithm, xs[0], **options)
    expected = learner.etrace_grad(xs, targets, step_fn=functools.partial(step_fn, learner))[
        "W", "weight"
    ]
    layer = jax.tree.map(jnp.array, theirs.states(models.ParamState)["W", "weight"].value)
    model = models.Plain(
        {"W": models.ParamState(layer)}, {"h": models.HiddenState(jnp.zeros(H))}, _plain_rnn
    )
    program = make_program(compile_etrace_graph(model, xs[0]))

    def body(state: Any, part: Any) -> tuple[Any, Any]:
        data = Chunk([part[0][None]], part[1][None], jnp.full(1, 1 / T), loss)
        made = run_chunk(rule, program, jax.tree.leaves(layer), Carry(*state), data, False, False)
        return (made.carry.hidden, made.carry.other, made.carry.trace), made.grads

    found = quick_jit(
        lambda: jax.lax.scan(body, ([jnp.zeros(H)], [], rule.init(program)), (xs, targets))[1]
    )()
    return expected, dict(zip(sorted(layer), (g.sum(0) for g in found), strict=True))


@pytest.mark.implicit_promotion("braintrace's own code promotes")
def test_braintrace_has_the_same_three_factors():
    """A reward for every step; theirs takes it as an argument, ours as the value of the loss."""
    import braintrace

    expected, found = _braintrace_rnn(
        braintrace.ThreeFactor,
        lambda learner, x, m: jnp.sum(learner.update(x, modulator=m)),
        ThreeFactor(),
        lambda output, m: m,
    )
    assert_live(list(found.values()))
    assert_close(found, expected)


# it widens to all units, as ours does
@pytest.mark.filterwarnings("ignore:The SnAp-n position analysis could not derive a pattern")
@pytest.mark.implicit_promotion("braintrace's own code promotes")
def test_braintrace_has_the_same_snap_2():
    """Of dense recurrent weights it is RTRL; theirs masks within a group, which is all there is
    here.
    """
    import braintrace

    expected, found = _braintrace_rnn(  # its n is 2 by default
        braintrace.SnAp, lambda learner, x, target: row_loss(learner(x), target), SnApN(2), row_loss
    )
    assert_live(list(found.values()))
    assert_close(found, expected)


@pytest.mark.implicit_promotion("braintrace's own code promotes")
@pytest.mark.parametrize(
    ("algorithm", "options", "rule"),
    [
        ("EProp", {"kappa_filter_decay": 0.5}, EProp(kappa=0.5)),
        ("OSTLRecurrent", {}, SnAp1("core")),
        ("OSTLFeedforward", {"decay_or_rank": 0.0}, Immediate()),
        ("pp_prop", {"decay_or_rank": 0.0}, PPProp(decay=0.0, credit="core")),
    ],
)
def test_braintrace_has_rules_under_names_of_ours(algorithm, options, rule):
    """Its e-prop is ours. Its OSTL is our SnAp-1: it keeps the diagonal of the recurrent weights,
    while the paper's OSTL of one layer is RTRL (`test_ostl_of_one_layer_is_rtrl`). Its OSTL for
    layers without recurrent weights forgets every past step, which the paper's does not. Its
    pp-prop is ours without a filter; with one, theirs has the step's own `df_t` and `x_t` in both
    factors, so that what a step asks of its own input is scaled by `(1 - α) / (1 - α^t)` and mixed
    with older inputs, where ours keeps that part exactly.
    """
    import braintrace

    expected, found = _braintrace_rnn(
        getattr(braintrace, algorithm),
        lambda learner, x, target: row_loss(learner(x), target),
        rule,
        row_loss,
        **options,
    )
    assert_live(list(found.values()))
    # its factored traces pass through float32
    assert_close(found, expected, 1e-6 if "decay_or_rank" in options else 1e-9)
