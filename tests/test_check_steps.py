"""`check_gradients` also takes single steps, as training does: same losses, outputs and gradients
as the sequence's.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import etrace_bridge as eb
from learner_models import make_data, make_net


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(2, 3), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.gru(x)[0])


@pytest.mark.x32
def test_single_steps_are_reported_in_the_precision_of_training(tmp_path) -> None:
    """The comparison with torch runs in float64; the single steps run as the user's own would."""
    model, (xs, ys) = make_net(torch.float32), make_data(dtype=torch.float32)
    report = eb.check_gradients(
        model, xs, ys.numpy(), F.mse_loss, rule="d_rtrl", allow_zero=["spare.weight", "spare.bias"]
    )
    steps = report.single_steps
    assert report.dtype == "float64" and (steps.dtype, steps.steps, steps.tolerance) == (
        "float32",
        4,
        1e-5,
    )
    assert steps.ok and 0 <= steps.error <= 1e-5
    line = "`learner.step`, 4 steps one by one in float32: the same losses, outputs and gradients as `gradients`"
    assert line in str(report) and line in report.to_html(tmp_path / "r.html").read_text().replace(
        "&#x27;", "'"
    )
    assert json.loads(report.to_json())["single_steps"]["ok"] is True


@pytest.mark.parametrize("fault", ["second input", "gradient"])
def test_steps_that_go_wrong_are_found(fault: str, monkeypatch) -> None:
    taken = []
    right = eb.OnlineLearner.step

    def wrong(self, x, target=None):
        taken.append(x)
        if fault == "second input" and len(taken) > 1:
            x = tuple(1.01 * part for part in x)
        if fault == "gradient" and len(taken) == 3:
            self.reset()  # as if the trace were lost
        return right(self, x, target)

    monkeypatch.setattr(eb.OnlineLearner, "step", wrong)
    model, (xs, ys) = make_net(batch_first=True), make_data()
    xs, ys = xs.transpose(0, 1), ys.transpose(0, 1)
    report = eb.check_gradients(
        model, xs, ys, F.mse_loss, rule="rtrl", allow_zero=["spare.weight", "spare.bias"]
    )
    assert len(taken) == 4 and taken[0][0].shape == xs[:, 0].shape
    assert not report.ok and not report.single_steps.ok and all(p.ok for p in report)
    assert "`learner.step` does not give what `learner.gradients` gives" in report.problems[
        0
    ] and "NOT what" in str(report)
    assert json.loads(report.to_json())["single_steps"]["error"] > 1e-4


@pytest.mark.x32
def test_class_labels_in_default_mode() -> None:
    report = eb.check_gradients(
        Classifier(), torch.randn(6, 2, 2), torch.randint(0, 4, (6, 2)), F.cross_entropy
    )
    assert np.isfinite(report.loss) and all(p.ok for p in report)
    assert report.single_steps.ok, report
