"""Zoo modules under the rules, every second one: exact RTRL is torch BPTT, no certificate is
contradicted, chunks do not matter, and low rank lies between its two ends.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from etrace_bridge.rules import (
    DRTRL,
    OKRTRL,
    RFLO,
    RTRL,
    EProp,
    LowRankRTRL,
    PPProp,
    Rule,
    SnAp1,
    ThreeFactor,
)
from etrace_bridge.step.exits import find_exits
from quick_jit import quick_jit
from run_in_numpy import run_in_numpy
from share import FULL, in_turn
from torch_zoo import check_live, find, trained_cases
from zoo.online import FLOAT32_INSIDE, OnlineCase

LARGEST = 150_000  # elements of the influence matrix: the size up to which RTRL is shown to be BPTT
TOLERANCE = 1e-9

# In modules with float32 inside, and in one more, what a trace is made of is float32 too, so that its sum depends on
# where chunks end.
FLOAT32_TRACES = (*FLOAT32_INSIDE, "snntorch-leaky_graded")


TRAINED = [case.name for case in trained_cases()]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Inhibition is an unstable feature:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:LSTM with projections is not supported with oneDNN:UserWarning"
    ),
]


mixed_dtypes = pytest.mark.implicit_promotion("snnTorch has float32 inside a float64 model")


def tolerance(
    online: OnlineCase, float32: tuple[str, ...] = FLOAT32_INSIDE, otherwise: float = TOLERANCE
) -> float:
    if online.case.name not in float32:
        return otherwise
    assert any(
        v.aval.dtype == np.float32 for eqn in online.compiled.program.eqns for v in eqn.outvars
    )
    return 2e-6


def special(name: str) -> bool:
    """Whether a module needs a tolerance of its own."""
    return name in FLOAT32_TRACES


EXACT = in_turn(TRAINED, 2, special)


@mixed_dtypes
@pytest.mark.parametrize("name", EXACT)
def test_rtrl_is_bptt_and_certificates_hold(name):
    online = OnlineCase(find(name))
    check_live(online.case, online.ref)
    allowed = tolerance(online)
    assert online.influence_size <= LARGEST  # none of the zoo's modules is left out
    for parameter, error in online.errors(online.gradients(RTRL(), 4)).items():
        assert error <= allowed, f"rtrl, {parameter}: {error:.1e}"
    certificates = online.certificates()
    errors = online.errors(online.gradients(DRTRL(), 4))
    assert set(errors) == set(certificates)
    for parameter, error in errors.items():
        if certificates[parameter].exact:
            assert error <= allowed, f"certified exact, {parameter}: {error:.1e}"
        else:
            assert error > TOLERANCE, (
                f"{parameter}: {error:.1e}; certified: {certificates[parameter].reason}"
            )


IN_TURN = (
    PPProp(),
    EProp(kappa=0.5, upstream="step"),
    DRTRL("core", upstream="step"),
    SnAp1(upstream="step"),
)


def rule_for(name: str) -> Rule:
    return IN_TURN[TRAINED.index(name) // 4 % len(IN_TURN)]


CHUNKED = in_turn(
    [name for name in TRAINED if FULL or name not in EXACT or special(name)], 2, special
)


@mixed_dtypes
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_do_not_matter(name):
    """Step by step and in chunks of four; one module in four, each with one of the rules, since
    compiling takes its time.
    """
    online, rule = OnlineCase(find(name)), rule_for(name)
    allowed = tolerance(online, FLOAT32_TRACES, 1e-10)
    if isinstance(rule, EProp) and any(
        e.var.aval.dtype == np.float32
        for own in find_exits(online.compiled.program)
        for e in own.exits
    ):
        allowed = 2e-6  # signals are filtered at the exits, which are snnTorch's float32 spikes
    one, four = online.gradients(rule, 1), online.gradients(rule, 4)
    largest = max(np.abs(g).max() for g in one.values())
    assert largest > 0
    for parameter, g in one.items():
        difference = np.abs(four[parameter] - g).max()
        assert difference <= allowed * max(np.abs(g).max(), 1e-3 * largest), (
            f"{rule}, {parameter}: {difference:.1e}"
        )
    for parameter, error in (
        online.errors(four).items()
        if isinstance(rule, DRTRL) and not isinstance(rule, EProp)
        else ()
    ):
        assert error <= tolerance(online) or not online.certificates()[parameter].exact, (
            f"{rule}, certified exact, {parameter}"
        )


# A convolution, tied weights, a sum over units in the core, projections, an embedding.
LOW_RANK = (
    "torch-net-Conv1dCell", "torch-cell-Tied", "torch-cell-LayerNormRNN", "torch-lstm_proj",
    "torch-net-EmbeddingCell",
)  # fmt: skip


@pytest.mark.parametrize("name", TRAINED if FULL else in_turn(LOW_RANK, 2))
def test_low_rank_lies_between_d_rtrl_and_bptt(name):
    """Rank 0 is the one, full rank the other. The ranks between, over all modules, are on the
    fidelity page.
    """
    online = OnlineCase(find(name))
    diagonal, first = (online.gradients(rule, 4) for rule in (DRTRL("chunk"), LowRankRTRL(0)))
    largest, allowed = (
        max(np.abs(g).max() for g in diagonal.values()),
        tolerance(online, otherwise=1e-10),
    )
    assert largest > 0
    for parameter, g in diagonal.items():
        difference = np.abs(first[parameter] - g).max()
        assert difference <= allowed * max(np.abs(g).max(), 1e-3 * largest), parameter
    errors = online.errors(online.gradients(LowRankRTRL(10**6), 4))
    assert max(errors.values()) < tolerance(online), errors


def test_numpy_gives_the_same_as_a_compiled_program():
    """The fidelity page is measured in NumPy (`run_in_numpy`)."""
    compiled, in_numpy = (OnlineCase(find("torch-rnn"), run) for run in (quick_jit, run_in_numpy))
    for rule in (OKRTRL(1), LowRankRTRL(1)):  # random bits, and eigenvectors
        found = in_numpy.gradients(rule, 4)
        for name, g in compiled.gradients(rule, 4).items():
            assert np.abs(found[name] - g).max() < 1e-12 * np.abs(g).max() > 0, name


@mixed_dtypes
@pytest.mark.parametrize("rule", [RFLO(), ThreeFactor()], ids=lambda rule: rule.name)
def test_a_signal_to_states_of_several_precisions(rule):
    """snnTorch's spikes are float32, in a float64 model too."""
    online = OnlineCase(find("snntorch-rleaky_one_to_one"))
    one, four = online.gradients(rule, 1), online.gradients(rule, 4)
    for parameter, g in one.items():
        assert np.abs(g).max() > 0.01
        np.testing.assert_allclose(four[parameter], g, rtol=1e-6, atol=1e-7)


def test_there_are_many():
    assert len(TRAINED) > 140
    assert len(EXACT) > 70 and {name.split("-")[0] for name in EXACT} == {
        name.split("-")[0] for name in TRAINED
    }
    assert min(Counter(rule_for(name).name for name in CHUNKED).values()) > 5
