"""The demo: what it shows, in which order, and that its memory is counted right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etrace_bridge.cli import demo, main

pytestmark = [
    pytest.mark.x32,
    pytest.mark.usefixtures("without_single_steps"),
]


def test_the_demo_runs_and_ends_with_your_model(tmp_path, monkeypatch, capsys):
    """In small. Memory comes first; the trace does not depend on the length, torch's does."""
    monkeypatch.setattr(demo, "_HIDDEN", 4)
    seen = {}
    real = demo.memory_by_length
    monkeypatch.setattr(
        demo, "memory_by_length", lambda *args: seen.setdefault("memory", real(*args))
    )
    threads = torch.get_num_threads()
    assert main(["demo", "--steps", "40", "--folder", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert torch.get_num_threads() == threads
    assert -1 < out.find("1. memory") < out.find("2. the model") < out.find("4. learning")
    assert out.rstrip().splitlines()[-4].startswith("Now your model")
    weights = 3 * 4 * (1 + 4 + 2)  # of three gates: one input, four units, two biases
    assert {trace for trace, _ in seen["memory"].values()} == {4 * demo._BATCH * weights}
    saved = {steps: size for steps, (_, size) in seen["memory"].items()}
    assert 9 * saved[100] < saved[1000] < 11 * saved[100]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2 and "Now your model" in page
    assert 'src="http' not in page


def test_explained_power():
    run = demo.Run("", errors=[1.0, 0.0, 0.5, 0.5])
    found = demo.explained(run, [1.0, 1.0, 2.0, 2.0], 2)
    assert np.isnan(found[0]) and found[1:].tolist() == [0.5, 1 - 0.5 / 3, 0.75]
