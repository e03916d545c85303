"""State-space models and modern recurrences in step form: RTRL against torch, and D-RTRL's
certificate against its measurement.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import etrace_bridge as eb
from share import FULL

pytestmark = pytest.mark.usefixtures("without_single_steps")
_SPEC = importlib.util.spec_from_file_location(
    "state_space", Path(__file__).parents[1] / "examples" / "state_space.py"
)
state_space = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(state_space)

EXACT = frozenset(("LRU", "S4D", "S5", "complex retention", "retention", "RG-LRU", "minGRU"))


def check(name: str, rule: str) -> eb.GradientReport:
    model = state_space.CELLS[name]()
    xs = torch.randn(6, 2, 3)
    with torch.no_grad():
        outputs = model(xs[0])[0].shape[-1]
    return eb.check_gradients(
        model, xs, torch.randn(6, 2, outputs), loss=nn.functional.mse_loss, rule=rule
    )


# Where D-RTRL is exact, the next test compares its gradient, too, with torch's.
@pytest.mark.parametrize(
    "name",
    [name for name in state_space.CELLS if FULL or name not in EXACT or name in ("LRU", "RG-LRU")],
)
def test_rtrl_gives_torchs_gradient(name: str) -> None:
    report = check(name, "rtrl")
    assert report.ok and report.dtype == "float64", str(report)
    assert all(p.relative_error < 1e-9 and p.norm > 1e-8 for p in report.parameters.values()), str(
        report
    )


@pytest.mark.parametrize("name", state_space.CELLS)
def test_d_rtrl_is_exact_where_it_says_so(name: str) -> None:
    """`report.ok` holds certified parameters to torch's gradient; diagonal recurrences are
    certified in whole.
    """
    report = check(name, "d_rtrl")
    assert report.ok, str(report)
    exact = [p.verdict == "exact" for p in report.parameters.values()]
    assert all(exact) == (name in EXACT) and any(exact) == (name != "sLSTM"), str(report)
