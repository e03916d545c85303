"""The rules on the zoo of plain models: definitions by brute force, K-invariance, exactness and the
certificate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from etrace_bridge._errors import InputError
from etrace_bridge.compiler.graph import ETraceGraph, compile_etrace_graph
from etrace_bridge.rules import (
    BPTT,
    DECOLLE,
    DRTRL,
    OSTL,
    OTTT,
    RFLO,
    RTRL,
    Carry,
    Chunk,
    EProp,
    LowRankRTRL,
    PPProp,
    Rule,
    SnAp1,
    SnApN,
    ThreeFactor,
    make_rule,
    rule_names,
)
from etrace_bridge.rules.feedback import feedback_matrix
from etrace_bridge.schedule.chunk import run_chunk
from etrace_bridge.schedule.chunk_plan import block_steps, working_bytes
from etrace_bridge.step.exits import exit_cotangents, find_exits, linearise_exits
from etrace_bridge.step.forward import run_forward
from etrace_bridge.step.linearise import loss_gradient
from etrace_bridge.step.program import StepProgram, make_program
from etrace_bridge.step.steps import Steps
from models import B, H, I
from oracle import (
    Dense,
    Values,
    assert_close,
    assert_live,
    loss_of,
    unrolled_bptt,
)
from quick_jit import quick_jit
from share import in_turn
from strict import promotion

T, K = 6, 3

# One model for each thing that the compiler treats in a way of its own.
DEFINED = (
    *(
        "rnn",
        "torch_gru",
        "torch_lstm",
        "GRUCell",
        "spiking_jvp",
        "layer_norm",
        "conv_recurrent",
        "embedding",
    ),
    *(
        "tied_layers",
        "tied_twice",
        "sliced",
        "low_rank",
        "scalar_gate",
        "packed_concat",
        "group_state",
        "stacked",
    ),
    *(
        "two_groups_one_weight",
        "encoder_readout",
        "reads_old_state",
        "carried_elsewhere",
        "feeds_two_ways",
    ),
    *("feeds_two_states_of_a_group", "feeds_both_signs", "spread_twice", "feeds_too_many_ways"),
    *("leading_axis", "scalar_gate_kept", "conv_gate", "embedding_gate"),
)
# Where the core's credit and the step's differ in kind: a readout of old states, a way around the
# core, several states of a group.
OWN_CREDIT = ("torch_lstm", "reads_old_state", "feeds_two_ways", "carried_elsewhere")


# -- models of this file --------------------------------------------------------------------------


def min_gru(p, s, x):
    z = jax.nn.sigmoid(x @ p["w_z"] + p["b_z"])
    h = (1 - z) * s["h"] + z * (x @ p["w_h"])
    return {"h": h}, jnp.tanh(h) @ p["w_out"]


def rotation(p, s, x):
    """A linear recurrent unit: complex eigenvalues, real and imaginary parts as two states."""
    size, angle = jnp.exp(-jnp.exp(p["nu"])), p["theta"]
    re = size * (jnp.cos(angle) * s["re"] - jnp.sin(angle) * s["im"]) + x @ p["b_re"]
    im = size * (jnp.sin(angle) * s["re"] + jnp.cos(angle) * s["im"]) + x @ p["b_im"]
    return {"re": re, "im": im}, re @ p["c_re"] - im @ p["c_im"]


def leaky(p, s, x):
    h = 0.8 * s["h"] + 0.2 * jnp.tanh(x @ p["w"] + p["b"])
    return {"h": h}, h @ p["w_out"]


def two_readings(p, s, x):
    """An output that holds every position of a state twice, and the state's mean."""
    h = jnp.tanh(0.5 * s["h"] + x @ p["w"])
    return {"h": h}, jnp.concatenate([h, h**2, h.mean(-1, keepdims=True)], axis=-1)


def two_outputs(p, s, x):
    """Two states of one group, both of them read by an output, and one by two."""
    new, output = rotation(p, s, x)
    return new, (output, new["im"] @ p["c_two"])


DIAGONAL = {
    "min_gru": (min_gru, ("h",), {"w_z": (I, H), "b_z": (H,), "w_h": (I, H), "w_out": (H, 2)}),
    "rotation": (
        rotation,
        ("re", "im"),
        {"nu": (H,), "theta": (H,), "b_re": (I, H), "b_im": (I, H), "c_re": (H, 2), "c_im": (H, 2)},
    ),
    "leaky": (leaky, ("h",), {"w": (I, H), "b": (H,), "w_out": (H, 2)}),
}
OWN = DIAGONAL | {
    "two_readings": (two_readings, ("h",), {"w": (I, H)}),
    "two_outputs": (two_outputs, ("re", "im"), DIAGONAL["rotation"][2] | {"c_two": (H, 3)}),
}


def graph_of(name: str) -> ETraceGraph:
    if name not in OWN:
        return models.graph_of(name)
    step, states, shapes = OWN[name]
    rng = np.random.default_rng(2)
    model = models.Plain(
        {
            n: brainstate.ParamState(jnp.asarray(0.5 * rng.standard_normal(s)))
            for n, s in shapes.items()
        },
        {n: brainstate.HiddenState(jnp.asarray(rng.standard_normal((B, H)))) for n in states},
        step,
    )
    return compile_etrace_graph(model, jnp.ones((B, I)))


# -- running --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model of the zoo with random values, a sequence and targets."""

    graph: ETraceGraph
    program: StepProgram
    values: Values
    xs: list[Any]
    targets: Any


@dataclass(frozen=True)
class Run:
    """What a rule gives for a whole sequence, chunk by chunk."""

    grads: list[Any]
    losses: Any
    outputs: list[Any]
    carry: Carry


@cache
def case(name: str) -> Case:
    graph = graph_of(name)
    info, rng = graph.module_info, np.random.default_rng(1)
    states = info.retrieved_model_states
    program = make_program(graph)
    own = (brainstate.ParamState, brainstate.HiddenState)
    others = [s for s in info.compiled_model_states if not isinstance(s, own)]
    values = Values(
        [
            leaf
            for path in info.weight_path_to_invars
            for leaf in jax.tree.leaves(states[path].value)
        ],
        [leaf for hidden in program.leaves for leaf in jax.tree.leaves(states[hidden.path].value)],
        [leaf for s in others for leaf in jax.tree.leaves(s.value)],
    )
    xs = [_sequence(rng, v.aval) for v in program.arg_vars]
    return Case(graph, program, values, xs, jnp.linspace(-1.0, 1.0, T))


def _sequence(rng: np.random.Generator, aval: Any) -> Any:
    if jnp.issubdtype(aval.dtype, jnp.integer):
        return jnp.asarray(rng.integers(0, 5, (T, *aval.shape)))
    return jnp.asarray(rng.standard_normal((T, *aval.shape)))


@cache
def compiled(
    name: str, rule: Rule, fresh: bool = False, final: bool = False, loss: Callable | None = loss_of
):
    """One chunk of any length as a compiled function of arrays."""
    program = case(name).program

    def chunk(theta, hidden, other, trace, args, targets, weights):
        data = Chunk(args, targets, weights, loss)
        found = run_chunk(rule, program, theta, Carry(hidden, other, trace), data, fresh, final)
        return (
            found.grads,
            found.losses,
            found.outputs,
            (found.carry.hidden, found.carry.other, found.carry.trace),
        )

    return quick_jit(chunk)


def start(name: str, rule: Rule) -> tuple[Any, Any, Any]:
    """Hidden states, other states and the rule's memory before the first step."""
    c = case(name)
    return c.values.hidden, c.values.other, rule.init(c.program)


@cache
def run(name: str, rule: Rule, K: int = K, steps: int = T, flags: bool = False) -> Run:
    """The whole sequence in chunks of K; `flags` says whether the first and the last chunk are
    marked as such.
    """
    c = case(name)
    carry = start(name, rule)
    grads, losses, outputs = [jnp.zeros_like(w) for w in c.values.weights], [], []
    for i in range(0, steps, K):
        at = slice(i, min(i + K, steps))
        chunk = compiled(name, rule, flags and i == 0, flags and i + K >= steps)
        weights = jnp.ones(len(c.targets[at]))
        found, loss, output, carry = chunk(
            c.values.weights, *carry, [x[at] for x in c.xs], c.targets[at], weights
        )
        grads = [a + b for a, b in zip(grads, found, strict=True)]
        losses.append(loss)
        outputs += [jax.tree.map(lambda x, n=n: x[n], output) for n in range(len(loss))]
    return Run(grads, jnp.concatenate(losses), outputs, Carry(*carry))


@cache
def dense(name: str) -> Dense:
    c = case(name)
    return Dense(c.graph, c.values, c.xs, c.targets)


def certificates(name: str) -> list[Any]:
    """What the certificate says of each weight leaf."""
    info, found = case(name).graph.module_info, case(name).graph.certificate()
    return [found[info.invar_to_weight_path[v]] for v in info.weight_invars]


def relative(a: Any, b: Any) -> float:
    a, b = np.asarray(a), np.asarray(b)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))


# -- definitions ----------------------------------------------------------------------------------


# Every model with the step's credit, one in three also with the core's.
CREDITED = [(name, "step") for name in DEFINED] + [
    (name, "core") for name in in_turn(DEFINED, 3, OWN_CREDIT.__contains__)
]


@pytest.mark.parametrize(("name", "credit"), CREDITED)
def test_d_rtrl_is_its_definition(name, credit):
    found, expected = run(name, DRTRL(credit=credit, upstream="step")), dense(name)
    assert_live(expected.bptt()[0])
    assert_close(found.grads, expected.d_rtrl(credit))
    assert_close(found.outputs, expected.outputs)
    assert_close(
        [found.carry.hidden, found.carry.other], [expected.hidden_after, expected.other_after]
    )


@pytest.mark.parametrize(
    "name", ["torch_gru", "stacked", "layer_norm", "carried_elsewhere", "feeds_two_ways"]
)
def test_credit_inside_the_chunk(name):
    found = run(name, DRTRL(credit="chunk"))
    assert_close(found.grads, dense(name).d_rtrl("chunk", K))
    whole = run(name, DRTRL(credit="chunk"), T)
    assert_close(whole.grads, dense(name).bptt()[0])


@pytest.mark.parametrize("credit", ["core", "step"])
@pytest.mark.parametrize("name", ["encoder_readout", "feeds_too_many_ways"])
def test_upstream_weights_get_credit_within_the_chunk(name, credit):
    upstream = [n for n, c in enumerate(certificates(name)) if c.kind == "upstream"]
    assert upstream
    found, expected = run(name, DRTRL(credit=credit)).grads, dense(name).upstream(credit, K)
    direct_only = dense(name).d_rtrl(credit)
    for n in upstream:
        assert_close(found[n], expected[n])
        assert relative(found[n], direct_only[n]) > 1e-3


def test_upstream_half_of_a_fused_weight():
    """brainstate's GRU: the reset gate's half reaches the state through another weight, the update
    gate's has a trace.
    """
    name = "GRUCell"
    found = run(name, DRTRL()).grads
    upstream = dense(name).upstream("step", K)
    traced = dense(name).d_rtrl()
    fused = [n for n, g in enumerate(found) if g.shape[-1] == 2 * H]
    assert fused
    for n in fused:
        reset, update = slice(None, H), slice(H, None)
        assert_close(
            [found[n][..., reset], found[n][..., update]],
            [upstream[n][..., reset], traced[n][..., update]],
        )


@pytest.mark.parametrize("name", ["rnn", "torch_gru", "spiking_jvp", "conv_recurrent", "stacked"])
def test_snap1_keeps_the_diagonal_of_products(name):
    assert_close(run(name, SnAp1(upstream="step")).grads, dense(name).snap1())


@pytest.mark.parametrize(
    "name",
    [
        "torch_lstm",
        "layer_norm",
        "stacked",
        "low_rank",
        "carried_elsewhere",
        "encoder_readout",
        "GRUCell",
    ],
)
def test_rtrl_is_bptt(name):
    # What states that are not hidden carry ends at a chunk's boundary.
    assert_close(
        run(name, RTRL(), T if case(name).values.other else K).grads, dense(name).bptt()[0]
    )


def test_bptt_is_the_gradient_of_the_unrolled_loop():
    c = case("torch_gru")
    names = [path[-1] for path in c.graph.module_info.weight_path_to_invars]
    weights = dict(zip(names, c.values.weights, strict=True))
    step = models.build("torch_gru")[0].step
    expected = unrolled_bptt(step, weights, {"h": c.values.hidden[0]}, c.xs[0], c.targets)
    assert_close(run("torch_gru", BPTT(), T).grads, [expected[n] for n in names])
    assert_close(dense("torch_gru").bptt()[0], [expected[n] for n in names])


# -- what must not matter -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("torch_gru", DRTRL()),
        ("spiking_jvp", DRTRL(credit="core")),
        ("group_state", DRTRL()),
        ("encoder_readout", DRTRL(upstream="step")),
        ("rnn", SnAp1(credit="core")),
        ("torch_gru", PPProp(decay=0.8)),
        ("torch_gru", PPProp(credit="step")),
        ("spiking_jvp", EProp(kappa=0.6)),
        ("rnn", EProp(kappa=0.6, feedback="random")),
    ],
    ids=str,
)
def test_the_chunk_does_not_matter(name, rule):
    one = run(name, rule, 1)
    assert_live(one.grads)
    for K in (5, T):
        other = run(name, rule, K)
        for a, b in (
            (other.grads, one.grads),
            (other.outputs, one.outputs),
            (other.losses, one.losses),
        ):
            assert_close(a, b, 1e-10)
        assert_close(
            [other.carry.hidden, other.carry.trace], [one.carry.hidden, one.carry.trace], 1e-10
        )


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("torch_gru", DRTRL()),
        ("torch_lstm", DRTRL(credit="core")),
        ("encoder_readout", DRTRL()),
        ("two_groups_one_weight", SnAp1()),
        ("conv_recurrent", DRTRL(credit="chunk")),
        ("torch_gru", PPProp(decay=0.8, credit="step")),
        ("decay_vector", PPProp()),
    ],
    ids=str,
)
def test_blocks_do_not_matter(name, rule, monkeypatch):
    """A chunk worked through in blocks of one, three or five steps, some left over, gives what it
    gives at once, the trace included.
    """
    expected = run(name, rule, T)
    assert_live(expected.grads)
    assert T % 3 == 0 and T % 5
    for size in (1, 3, 5):
        for memory in ("dense", "factored"):
            monkeypatch.setattr(
                f"etrace_bridge.schedule.{memory}.block_steps",
                lambda program, length, size=size: size,
            )
        compiled.cache_clear()
        found = run.__wrapped__(name, rule, T)  # not the one in the cache
        assert_close(
            [found.grads, found.losses, found.outputs],
            [expected.grads, expected.losses, expected.outputs],
            1e-12,
        )
        assert_close(
            [found.carry.hidden, found.carry.trace],
            [expected.carry.hidden, expected.carry.trace],
            1e-12,
        )
    compiled.cache_clear()


def test_large_chunks_have_blocks():
    """Blocks divide the chunk evenly where they can, are of one size however long it is, and a
    small chunk is one.
    """
    program = case("torch_gru").program
    steps = 4 * program.tuning.whole_bytes // working_bytes(program) // 64 * 64
    size = block_steps(program, steps)
    assert size < steps / 4 and steps % size == 0
    prime = next(n for n in range(steps, 2 * steps) if all(n % d for d in range(2, n)))
    assert size / 2 <= block_steps(program, prime) <= 2 * size
    assert block_steps(program, 8) == 8


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(), EProp(kappa=0.6), RTRL()], ids=str)
def test_first_and_last_chunk_may_skip_the_trace(rule):
    marked, plain = run("rnn", rule, flags=True), run("rnn", rule)
    assert_close(marked.grads, plain.grads, 1e-12)


@pytest.mark.parametrize(("name", "credit"), CREDITED)
def test_one_step_is_bptt(name, credit):
    """Of a chunk whose first loss alone counts, in the program that other tests have compiled."""
    c, rule = case(name), DRTRL(credit=credit, upstream="step")
    first = jnp.zeros(K).at[0].set(1.0)
    found = compiled(name, rule)(
        c.values.weights, *start(name, rule), [x[:K] for x in c.xs], c.targets[:K], first
    )
    assert_close(found[0], dense(name).bptt(0, 1)[0])


@pytest.mark.parametrize(
    "rule",
    [DRTRL(credit="core"), DRTRL(credit="chunk"), SnAp1(), PPProp(), EProp(kappa=0.5)],
    ids=str,
)
def test_a_sequence_of_one_step_is_bptt(rule):
    expected, _ = dense("layer_norm").bptt(0, 1)
    assert_close(run("layer_norm", rule, 1, steps=1).grads, expected)


@pytest.mark.parametrize("credit", ["core", "step"])
@pytest.mark.parametrize("name", ["rnn", "scalar_gate", "embedding", "torch_lstm", "decay_vector"])
def test_pp_prop_starts_without_bias(name, credit):
    """After one step the factored trace is D-RTRL's, whatever the decay."""
    expected = run(name, DRTRL(credit, upstream="step"), 1, steps=2).grads
    assert_close(run(name, PPProp(decay=0.97, credit=credit), 2, steps=2).grads, expected)


def test_pp_prop_takes_the_step_where_the_core_is_empty():
    """A plain RNN's state has a past through its product alone; a GRU's gate carries it position by
    position.
    """
    for name, credit, other in (("rnn", "step", "core"), ("torch_gru", "core", "step")):
        found = run(name, PPProp(), K).grads
        assert_close(found, run(name, PPProp(credit=credit), K).grads, 1e-12)
        assert (
            max(
                np.abs(a - b).max()
                for a, b in zip(found, run(name, PPProp(credit=other), K).grads, strict=True)
            )
            > 1e-3
        )


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("torch_gru", DRTRL()),
        ("encoder_readout", RFLO()),
        ("encoder_readout", ThreeFactor()),
        ("encoder_readout", DECOLLE()),
    ],
    ids=str,
)
def test_masked_losses_add_up(name, rule):
    c, parts = case(name), []
    for weights in ([1.0, 0.0, 2.0], [0.0, 1.0, 0.0], [1.0, 1.0, 2.0]):
        inputs = ([x[:K] for x in c.xs], c.targets[:K], jnp.asarray(weights))
        parts.append(compiled(name, rule)(c.values.weights, *start(name, rule), *inputs)[0])
    assert_live(parts[1])
    assert_close([a + b for a, b in zip(parts[0], parts[1], strict=True)], parts[2])


@pytest.mark.parametrize("rule", [DRTRL(), PPProp(), EProp(kappa=0.6), RTRL(), BPTT()], ids=str)
def test_steps_without_a_loss_keep_the_memory_going(rule):
    c = case("rnn")
    silent = compiled("rnn", rule, loss=None)
    grads, losses, _, carry = silent(
        c.values.weights, *start("rnn", rule), [c.xs[0][:K]], None, jnp.ones(K)
    )
    assert grads is None and losses is None
    after = compiled("rnn", rule)(
        c.values.weights, *carry, [c.xs[0][K:]], c.targets[K:], jnp.ones(K)
    )
    weights = jnp.zeros(K)
    muted = compiled("rnn", rule)(
        c.values.weights, *start("rnn", rule), [c.xs[0][:K]], c.targets[:K], weights
    )
    expected = compiled("rnn", rule)(
        c.values.weights, *muted[3], [c.xs[0][K:]], c.targets[K:], jnp.ones(K)
    )
    assert_live(expected[0])
    assert_close([after[0], after[3]], [expected[0], expected[3]], 1e-12)


def row_loss(output: Any, target: Any) -> Any:
    """A loss whose target weighs the batch elements."""
    return jnp.sum(
        target[:, None] * jnp.sin(output + jnp.linspace(0.0, 1.0, output.shape[1])[None])
    )


@pytest.mark.parametrize("rule", [DRTRL(), SnAp1(), PPProp(), EProp(kappa=0.6), RTRL()], ids=str)
def test_reset_of_single_batch_elements(rule):
    """After a reset of element 0, the gradient is that of a fresh element 0 and a continued element
    1.
    """
    name = "rnn"
    c = case(name)
    chunk = compiled(name, rule, loss=row_loss)

    def advance(carry, at, rows):
        targets = jnp.tile(jnp.asarray(rows), (K, 1))
        found = chunk(c.values.weights, *carry, [c.xs[0][at]], targets, jnp.ones(K))
        return found[0], found[3]

    first, second = slice(0, K), slice(K, T)
    _, (hidden, other, trace) = advance(start(name, rule), first, [1.0, 1.0])
    keep = jnp.asarray([0.0, 1.0])
    cleared = [h * keep[:, None] for h in hidden]
    together, _ = advance((cleared, other, rule.reset(c.program, trace, keep)), second, [1.0, 1.0])
    fresh, _ = advance((cleared, other, rule.init(c.program)), second, [1.0, 0.0])
    continued, _ = advance((hidden, other, trace), second, [0.0, 1.0])
    assert_live(fresh)
    assert_close(together, [a + b for a, b in zip(fresh, continued, strict=True)])


@pytest.mark.parametrize(
    "make", [DRTRL, RFLO, PPProp, OTTT, RTRL, LowRankRTRL, SnApN, OSTL], ids=lambda rule: rule.name
)
def test_traces_in_half_precision(make):
    rule = make(trace_dtype="bfloat16")
    found, expected = run("torch_gru", rule, 2), run("torch_gru", make(), 2)
    stored = {str(x.dtype) for x in jax.tree.leaves(found.carry.trace)}
    # norms, and what was cut off, are small and stay as they are
    small = make in (PPProp, LowRankRTRL)
    assert stored == ({"bfloat16", "float64"} if small else {"bfloat16"})
    errors = [relative(a, b) for a, b in zip(found.grads, expected.grads, strict=True)]
    assert 0 < max(errors) < 2e-2


# -- exactness and the certificate ----------------------------------------------------------------


@pytest.mark.parametrize("name", [*DIAGONAL, "decay_vector", "decay_scalar"])
def test_recurrences_without_mixing_are_exact(name):
    assert all(c.exact for c in certificates(name)), "the certificate says so beforehand"
    expected = dense(name).bptt()[0]
    assert_live(expected)
    assert_close(run(name, DRTRL(credit="core")).grads, expected)


@pytest.mark.parametrize(("name", "credit"), CREDITED)
def test_exact_certificates_hold(name, credit):
    found, expected = run(name, DRTRL(credit=credit, upstream="step")).grads, dense(name).bptt()[0]
    for certificate, a, b in zip(certificates(name), found, expected, strict=True):
        if certificate.exact:
            assert relative(a, b) <= 1e-9, certificate.path


def test_inexact_certificates_measure_inexact():
    measured, compared = set(), 0
    for name in DEFINED:
        found, expected = run(name, DRTRL(upstream="step")).grads, dense(name).bptt()[0]
        for certificate, a, b in zip(certificates(name), found, expected, strict=True):
            compared += not certificate.exact
            if not certificate.exact and relative(a, b) <= 1e-9:
                measured.add((name, certificate.path))
    assert measured == set() and compared > 20


# -- exits, by which e-prop reads a group ---------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "torch_lstm",
        "stacked",
        "two_groups_one_weight",
        "reads_old_state",
        "packed_concat",
        "two_readings",
    ],
)
def test_exits_carry_all_credit_of_the_core(name):
    """`b_t` of `credit="core"` and the cotangents at contacts are what the exits' learning signals
    pull back.
    """
    c = case(name)
    exits = find_exits(c.program)

    @quick_jit
    def both(theta, hidden, other, xs, targets):
        env = c.program.weight_env(theta)
        forward = run_forward(c.program, env, hidden, other, xs)
        steps = Steps(c.program, theta, env, forward, xs, targets, jnp.ones(K), loss_of)
        found = loss_gradient(steps, "core")
        signals = exit_cotangents(steps, exits)
        pulled = [linearise_exits(steps, g, own)(signals[g]) for g, own in enumerate(exits)]
        taps = [
            sum(x for x in column if x is not None)
            for column in zip(*(t for _, t in pulled), strict=True)
        ]
        return (found.b, found.at_taps), ([b for b, _ in pulled], taps)

    expected, found = both(
        c.values.weights, c.values.hidden, c.values.other, [x[:K] for x in c.xs], c.targets[:K]
    )
    assert_live(expected[1])
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("feedback", ["symmetric", "random"])
def test_eprop_filters_every_exit_of_a_group(feedback):
    """Nothing mixes positions here, so an eligibility is the exit's derivative: the rule is that of
    filtered states that meet fixed signals.
    """
    rule = EProp(kappa=0.6, feedback=feedback, seed=3 if feedback == "random" else 0)
    c = case("two_outputs")
    names = [path[-1] for path in c.graph.module_info.weight_path_to_invars]
    leaves = [leaf.path[-1] for leaf in c.program.leaves]
    matrices = rule.feedback_matrices(c.program) if feedback == "random" else {}
    group = c.program.groups[0]
    drawn = {
        (path[-1], n): F
        for path, var in zip(group.hidden_paths, group.hidden_outvars, strict=True)
        for (exit_, n), F in matrices.items()
        if exit_ is var
    }
    assert len(drawn) == (4 if feedback == "random" else 0)

    def read(p, s):
        return s["re"] @ p["c_re"] - s["im"] @ p["c_im"], s["im"] @ p["c_two"]

    def signal(p, s, target):
        if feedback == "symmetric":
            return jax.grad(lambda s: loss_of(read(p, s), target))(s)
        errors = jax.grad(lambda ys: loss_of(ys, target))(read(p, s))
        return {name: sum(errors[n] @ drawn[name, n] for n in range(2)) for name in s}

    def objective(weights):
        p, s = (
            dict(zip(names, weights, strict=True)),
            dict(zip(leaves, c.values.hidden, strict=True)),
        )
        filtered, total = jax.tree.map(jnp.zeros_like, s), 0.0
        for x, target in zip(c.xs[0], c.targets, strict=True):
            s, _ = rotation(p, s, x)
            filtered = {name: 0.6 * filtered[name] + s[name] for name in s}
            fixed = jax.lax.stop_gradient((p, s))
            L = jax.lax.stop_gradient(signal(*fixed, target))
            total += sum(jnp.sum(L[name] * filtered[name]) for name in s)
            total += loss_of(read(p, fixed[1]), target)
        return total

    with promotion(implicit=True):  # the model's own code
        expected = jax.grad(objective)(c.values.weights)
    assert_live(expected)
    assert_close(run("two_outputs", rule, 2).grads, expected, 1e-10)


# -- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "option", "value"),
    [
        (DRTRL, "credit", "all"),
        (DRTRL, "upstream", "none"),
        (SnAp1, "credit", "all"),
        (PPProp, "decay", 1.0),
        (PPProp, "time_constant", 0.0),
        (PPProp, "credit", "chunk"),
        (EProp, "kappa", 1.0),
        (EProp, "feedback", "none"),
        (EProp, "credit", "step"),
    ],
)
def test_wrong_options_are_named_with_what_is_allowed(rule, option, value):
    with pytest.raises(
        InputError, match=rf"`{option}` is {value!r}; it (must|is a number of steps and must) be "
    ):
        rule(**{option: value})


def test_a_seed_without_random_matrices_is_refused():
    with pytest.raises(InputError, match="`seed=3` would have no effect: with `feedback='symm"):
        make_rule("eprop:seed=3")
    with pytest.raises(InputError, match="`three_factor` has no option 'seed'"):
        make_rule("three_factor:seed=3")
    assert make_rule("eprop:seed=3:feedback=random").seed == 3


@pytest.mark.parametrize(
    ("output", "inside", "shape"),
    [((3, 50), (3, 8, 50), (50, 400)), ((3, 50), (400,), (150, 400)), ((40,), (10, 30), (40, 300))],
)
def test_random_feedback_keeps_the_size_of_an_error(output, inside, shape):
    """Entries of variance 1 / outputs, the same for all batch elements where both have a batch."""
    matrix = np.asarray(feedback_matrix(np.random.default_rng(0), output, inside))
    assert matrix.shape == shape
    assert abs(matrix.mean()) < 0.02 * matrix.std()
    assert matrix.std() == pytest.approx(shape[0] ** -0.5, rel=0.02)


@pytest.mark.parametrize("name", ["rflo", "eprop:feedback=random", "decolle"])
def test_another_seed_draws_other_matrices(name):
    program = case("encoder_readout").program
    one, same, other = (make_rule(f"{name}:seed={seed}") for seed in (1, 1, 2))

    def drawn(rule):
        if name == "rflo":
            return rule.matrices(program.groups, {0: program.out_vars[0].aval.shape})
        return rule.readouts(program) if name == "decolle" else rule.feedback_matrices(program)

    first = list(drawn(one).values())
    assert first
    assert_close(first, list(drawn(same).values()), 0)
    for a, b in zip(first, drawn(other).values(), strict=True):
        assert np.abs(a - b).max() > 0.1


def test_decolle_has_no_feedback_without_local_losses():
    """With `feedback="symmetric"` it would be e-prop under another name."""
    with pytest.raises(InputError, match="`decolle` has no option 'feedback'"):
        make_rule("decolle:feedback=symmetric")
    assert make_rule("decolle:seed=3") == replace(make_rule("decolle"), seed=3)


def test_the_error_for_an_unknown_rule_lists_the_known_ones():
    with pytest.raises(
        InputError, match="There is no rule 'no_such_rule'.* Known rules: .*d_rtrl.*rtrl"
    ):
        make_rule("no_such_rule")


def test_rules_by_name():
    assert {"bptt", "rtrl", "d_rtrl", "snap1", "pp_prop", "eprop"} <= set(rule_names())
    assert make_rule("pp_prop") == PPProp(decay=0.9)
    assert make_rule(SnAp1) == SnAp1()
    assert PPProp(time_constant=10.0).alpha == pytest.approx(np.exp(-0.1))
