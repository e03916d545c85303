"""The demo: what it shows, in which order, and that its memory is counted right."""

from __future__ import annotations

import copy

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
    weights = 3 * 4 * (3 + 4 + 2)  # of three gates: three inputs, four units, two biases
    assert {trace for trace, _ in seen["memory"].values()} == {4 * demo._BATCH * weights}
    saved = {steps: size for steps, (_, size) in seen["memory"].items()}
    assert 9 * saved[100] < saved[1000] < 11 * saved[100]
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2 and "Now your model" in page
    assert 'src="http' not in page


def test_torch_with_a_window_from_the_cue_on_has_its_gradient():
    """A window as long as a trial gives torch's BPTT of the whole trial; a shorter one does not."""
    samples = list(demo.cued_stream(demo._DELAY + 1))
    torch.manual_seed(0)
    model = demo.Listener()
    outputs, _ = model(torch.stack([x for x, _ in samples]))
    demo._loss(outputs[-1], samples[-1][1]).backward()
    wanted = [p.grad for p in model.parameters()]
    for window, equal in ((demo._DELAY + 1, True), (demo._DELAY, False)):
        same = copy.deepcopy(model)
        same.zero_grad()
        learner = demo.WindowedBPTT(same, window)
        for x, y in samples:
            learner.step(x, y)
        clip = demo._CLIP / torch.cat([w.ravel() for w in wanted]).norm().clamp(min=demo._CLIP)
        pairs = zip(same.parameters(), wanted, strict=True)
        assert all(torch.allclose(p.grad, clip * w, atol=1e-6) for p, w in pairs) == equal


def test_a_window_of_torch_keeps_as_much_as_the_trace():
    trace = 4 * demo._BATCH * 3 * demo._HIDDEN * (3 + demo._HIDDEN + 2)
    window = torch.zeros(demo._WINDOWS[0], demo._BATCH, 3)
    assert 0.9 < demo.saved_bytes(demo.Listener(), window) / trace < 1.1


def test_cues_and_answers():
    trial = demo._DELAY + 1
    samples = list(demo.cued_stream(2 * trial))
    assert [n for n, (_, y) in enumerate(samples) if y is not None] == [trial - 1, 2 * trial - 1]
    for cue, question in ((0, trial - 1), (trial, 2 * trial - 1)):
        (x, _), (asking, answer) = samples[cue], samples[question]
        assert 0 < answer.sum() < len(answer) and torch.equal(x[:, :1], 2 * answer - 1)
        assert (asking[:, 2] == 1).all() and (asking[:, 0] == 0).all()


def test_smoothed_answers():
    found = demo.smoothed([0.0, 1.0, 0.5, 1.0], window=2)
    assert np.isnan(found[0]) and found[1:].tolist() == [0.5, 0.75, 0.75]
    assert np.isnan(demo.smoothed([])).all()
