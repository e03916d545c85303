"""Every zoo module under the rules: exact RTRL is torch BPTT, and no certificate is contradicted."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from etrace_bridge.rules import DRTRL, RTRL
from torch_zoo import CASES, Case, check_live, find
from zoo.online import OnlineCase

LARGEST = 150_000  # elements of the influence matrix: the size up to which RTRL is shown to be BPTT
TOLERANCE = 1e-9

# Inside these float64 modules snnTorch itself goes through float32 (a float32 spike times a 0-d float64 threshold is float32 in
# torch), so that the gradient depends on the order of a float32 sum.
FLOAT32_INSIDE = ("leaky_learn", "synaptic_learn", "rleaky_one_to_one", "leaky_immediate_reset")

# `case:parameter`, with the reason, of what is certified inexact and yet measures exact on the zoo's eight steps: none.
EXACT_ANYWAY: dict[str, str] = {}


def trained(case: Case) -> bool:
    """Whether a module has parameters and runs in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, when they build a module
        return case.available and not case.float32_only and any(p.requires_grad for p in case.build().parameters())


TRAINED = [case.name for case in CASES if trained(case)]

pytestmark = [
    pytest.mark.filterwarnings("ignore:Inhibition is an unstable feature:UserWarning"),
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]


def tolerance(online: OnlineCase) -> float:
    if online.case.name.removeprefix("snntorch-") not in FLOAT32_INSIDE:
        return TOLERANCE
    assert any(v.aval.dtype == np.float32 for eqn in online.session.program.eqns for v in eqn.outvars)
    return 2e-6


@pytest.mark.parametrize("name", TRAINED)
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
            measured = error <= TOLERANCE
            assert measured == (f"{name}:{parameter}" in EXACT_ANYWAY), (
                f"{parameter}: {error:.1e}; certified: {certificates[parameter].reason}"
            )


def test_there_are_many():
    assert len(TRAINED) > 140
