"""Every task of `make reproduce` in miniature: it runs, it is the same from the same seed, and what
is stored makes a page.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pytest
import torch

import etrace_bridge as eb
from benchmarks.reproduce import __main__ as main
from benchmarks.reproduce import along
from benchmarks.reproduce.__main__ import TASKS
from benchmarks.reproduce.closeness import bptt_gradient, compare
from benchmarks.reproduce.diagnostics import random_rotation, rotation
from benchmarks.reproduce.lru import LRUStack
from benchmarks.reproduce.match_to_sample import VARIANTS, make_network, match_batch
from benchmarks.reproduce.methods import all_methods, methods_for
from benchmarks.reproduce.page import _section
from benchmarks.reproduce.pictures import draw, draw_curves, normalised
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.sequences import PADDING, make_learner, one_level
from benchmarks.reproduce.spiking import AdaptiveNet, evidence_batch
from benchmarks.reproduce.tasks import Outcome, Piece, Size
from benchmarks.reproduce.training import Method, Readout, cross_entropy
from etrace_bridge.rules import rule_names

pytestmark = [
    pytest.mark.x32,
    pytest.mark.implicit_promotion("the experiments run in processes of their own"),
]

# What a miniature must reach: better than what a network that has learned nothing gets.
FIRST = {
    "A": ("Hénon", 0.95),
    "D": ("GRU", None),
    "E": ("batches of 16", None),
    "G": ("GIF, delay 300 ms", None),
    "H": ("GRU-32", 2),
    "I": ("2 GRU layers", 0.2),
}


class Asked(Size):
    """Notes the full and the small length of training that a task asks for."""

    @cached_property
    def lengths(self):
        return []

    def steps(self, full, small):
        self.lengths.append((full, small))
        return super().steps(full, small)


@pytest.mark.parametrize("key", sorted(TASKS))
def test_a_task_runs_in_miniature_and_learns(key):
    task = TASKS[key]
    setting, bound = FIRST.get(key, (task.settings[0], None))
    size = Asked(small=True)
    outcome = task.run(setting, methods_for(task)["d_rtrl"], 0, size)
    assert size.lengths == [(task.steps[setting], outcome.steps)]
    assert (
        np.isfinite(outcome.score) and np.isfinite(outcome.curve).all() and len(outcome.curve) > 1
    )
    if bound is not None:
        assert outcome.score < bound if task.lower_is_better else outcome.score >= bound


def test_rules_are_compared_on_the_weights_of_one_run(capsys):
    """40 steps after 20 of training, in which `low_rank 4` is closer to exact than `d_rtrl`."""
    along.measure("d_rtrl", ["d_rtrl", "low_rank 4"], 0, 20, 40)
    _, _, norm, _, cosine, ratio, *low_rank = capsys.readouterr().out.split()
    assert float(norm) > 1e-4 and 0.5 < float(cosine) < 1 and 0.5 < float(ratio) < 1.5
    assert float(cosine) < float(low_rank[2]) <= 1


def test_every_rule_is_a_method_and_bad_names_are_refused():
    names = set(all_methods())
    assert {n for n in rule_names() if n not in ("bptt", "low_rank")} <= names
    assert {"tbptt 1", "bptt", "low_rank 1"} <= names
    with pytest.raises(SystemExit, match="has no method nonsense"):
        methods_for(TASKS["A"], ["nonsense"])


def made(score: float, steps: int) -> Outcome:
    """What a run of three seconds gave."""
    return Outcome(score, np.linspace(1, 0, 120), steps, 3.0, None)


def small_piece(model):
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((13, 4, 3)).astype(np.float32)
    return Piece(model, xs, rng.integers(2, size=(13, 4)), np.ones(13, np.float32), cross_entropy)


@pytest.mark.parametrize(
    ("method", "low", "high"),
    [("bptt", 1 - 1e-9, 1.1), ("rtrl", 1 - 1e-9, 1.1), ("tbptt 5", 0.8, 1 - 1e-5)],
)
def test_gradients_are_compared_with_torch(method, low, high):
    """Windows of 5 leave 3 of 13 steps over, which count, too."""
    torch.manual_seed(0)
    piece = small_piece(Readout("gru", 3, 6, 2))
    methods = all_methods() | {"tbptt 5": Method("bptt", window=5)}
    cosine, memory = compare(piece, methods[method])
    assert low < cosine < high and memory > 1000
    if method == "bptt":  # the reference is torch's own
        loss = torch.nn.functional.cross_entropy
        ys = torch.from_numpy(piece.ys)
        outputs = piece.model(torch.from_numpy(piece.xs))
        sum(loss(o, y) for o, y in zip(outputs, ys, strict=True)).backward()
        for name, found in bptt_gradient(piece).items():
            wanted = piece.model.get_parameter(name).grad
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


class Leaky(torch.nn.Module):
    """Leaks in a buffer."""

    def __init__(self, leak):
        super().__init__()
        self.into = torch.nn.Linear(3, 2)
        self.register_buffer("leak", torch.tensor([leak, leak]))

    def forward(self, xs):
        h, outputs = xs.new_zeros(xs.shape[1], 2), []
        for x in xs:
            h = self.leak * h + self.into(x)
            outputs.append(h)
        return torch.stack(outputs)


def test_a_kept_program_is_not_used_for_other_buffers():
    for leak in (0.9, -0.9):
        cosine, _ = compare(small_piece(Leaky(leak)), all_methods()["d_rtrl"])
        assert cosine == pytest.approx(1, abs=1e-6)


def test_rules_that_need_the_loss_are_not_compared():
    assert compare(small_piece(Readout("gru", 3, 6, 2)), Method("decolle")) is None


def test_a_learner_gives_an_online_gradient_in_chunks_of_any_length():
    """Weights before the recurrence would get credit along a chunk, as on no stream of single
    steps: the copying task's learner then was BPTT.
    """
    torch.manual_seed(0)
    model = LRUStack(3, 6, 4, 2, layers=1)
    xs, ys = torch.randn(12, 4, 3), torch.randint(2, (12, 4))
    online = make_learner(model, Method("d_rtrl"), 1e-3)
    single = eb.OnlineLearner(
        eb.wrap(model, sequence=True), "d_rtrl", torch.nn.functional.cross_entropy, chunk=1
    )
    wanted = single.gradients(xs, ys).grads
    found = online.gradients(xs, ys).grads
    assert set(found) == set(wanted)
    for name, grad in found.items():
        assert float(grad.abs().max()) > 0
        torch.testing.assert_close(grad, wanted[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("task", ["evidence", *VARIANTS])
def test_recurrent_weights_of_spiking_networks_have_a_trace(task):
    """Without one they learn from nothing before the step, whatever the rule."""
    size = Size(small=True)
    net = AdaptiveNet(3, 5, 5, 2, 40, 2) if task == "evidence" else make_network(task, size)
    graph = eb.functional(eb.wrap(net, sequence=True), torch.zeros(2, net.w_in.shape[1])).graph
    traced = {r.path[-1]: r.connected_hidden_paths for r in graph.hidden_param_op_relations}
    for name in ("w_in", "w_rec"):
        assert ("v",) in traced[name]


def test_results_are_on_disk_after_each_run_and_make_a_page(tmp_path):
    task = TASKS["A"]
    scores = {"tbptt 1": (0.5, 0.7), "rtrl": (0.1, 0.1), "d_rtrl": (0.2, 0.4)}
    for seed in (0, 1):
        for name, found in scores.items():
            results = Results("A", tmp_path)  # a new process goes on
            assert not results.has("Hénon", name, seed)
            results.add("Hénon", name, seed, made(found[seed], 600), (0.75, 2_000_000))
    results = Results("A", tmp_path)
    assert len(results.runs) == 6 and all(len(r["curve"]) == 50 for r in results.runs)
    assert [r["steps"] for r in results.runs] == [600] * 6
    # an error: small is good
    assert [normalised(task, results, n) for n in ("tbptt 1", "rtrl")] == [0.0, 1.0]
    assert normalised(task, results, "d_rtrl") == pytest.approx(0.6)
    text = _section(task, results)
    assert (
        "- Hénon: 0.6 ± 0.1 without credit through time (`tbptt 1`), 0.1 ± 0 with an exact "
        "gradient (`rtrl`)." in text
    )
    assert "Hénon 600 of 15,000 steps, scaled down; Mackey-Glass not run; Lorenz not run." in text
    assert "| `d_rtrl` | 0.3 ± 0.1 | – | – |" in text
    ends = "2 | 0.750 / – / – | 3 s / – / – | 2 MB / – / – |"
    assert f"| `rtrl` | 0.1 ± 0 | – | – | 0.0052 / 0.018 / 0.0051 | {ends}" in text
    draw({"A": task}, {"A": results}, tmp_path / "picture.png")
    draw_curves(task, results, tmp_path / "curves.png")
    for name in ("picture.png", "curves.png"):
        assert (tmp_path / name).stat().st_size > 5000


def test_runs_of_different_length_are_not_mixed(tmp_path, monkeypatch):
    """Their mean, and a comparison of methods across lengths, would be wrong without a word."""
    results = Results("A", tmp_path)
    results.add("Hénon", "d_rtrl", 0, made(0.2, 1500), None)
    with pytest.raises(ValueError, match="with 1500 steps; this one has 15000"):
        results.add("Hénon", "snap1", 0, made(0.1, 15_000), None)
    assert len(Results("A", tmp_path).runs) == 1
    results.add("Lorenz", "snap1", 0, made(0.1, 15_000), None)
    monkeypatch.setattr(main, "Results", lambda key: Results(key, tmp_path))
    with pytest.raises(SystemExit, match=r"with 1,500 steps, not 15,000. Use --scale 0.1,"):
        main.run_task(TASKS["A"], 1, ["snap1"], ["Hénon"], Size())


@pytest.mark.parametrize("key", sorted(TASKS))
def test_stored_runs_are_those_of_the_task(key):
    task, results = TASKS[key], Results(key)
    assert results.runs
    for run in results.runs:
        assert run["setting"] in task.settings and run["method"] in methods_for(task)
        assert run["steps"] == results.steps(run["setting"]) <= task.steps[run["setting"]]


def test_scale_is_a_share_of_the_training():
    assert Size(scale=0.25).steps(1000, 3) == 250 and Size(scale=1e-9).steps(1000, 3) == 1
    assert Size(small=True, scale=0.25).steps(1000, 3) == 3


@pytest.mark.parametrize("level", [1, 7, 8, 20])
def test_the_curriculum_asks_for_what_was_shown(level):
    xs, ys, mask = one_level(level, 4, torch.Generator().manual_seed(level))
    length = int(mask.sum())
    assert max(1, level - 5) <= length <= level and len(xs) % PADDING == 0
    asked = ys[mask > 0]
    assert torch.equal(asked, xs[:length, :, :2].argmax(-1)) and xs[length, :, 2].all()
    assert not xs[length + 1 :].any() and torch.equal(
        mask.nonzero()[0, 0], torch.tensor(length + 1)
    )


def test_rotation_turns_by_one_orthogonal_matrix():
    turn = random_rotation(5)
    np.testing.assert_allclose(turn @ turn.T, np.eye(8), atol=1e-12)
    assert np.linalg.det(turn) == pytest.approx(1)
    episode = rotation(10, np.random.default_rng(3), turn)
    point = episode.xs[0, :, :8]
    for answer in episode.ys:
        point = point @ turn.T
        np.testing.assert_allclose(answer, point, atol=1e-5)
    assert not episode.xs[1:].any()


@pytest.mark.parametrize("task", ["evidence", *VARIANTS])
def test_spiking_networks_fire_before_training(task):
    """A silent network at the start learns nothing with any rule; 10 Hz is what rates are pulled to."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    if task == "evidence":
        net, (xs, _) = AdaptiveNet(40, 50, 50, 2, 2000, 5), evidence_batch(Size(), generator)
        assert float(net.beta.max()) == pytest.approx(0.0174, rel=0.01)  # of the published network
    else:
        net = make_network(task, Size())
        xs, _ = match_batch(VARIANTS[task], 300, Size(), generator)
    with torch.no_grad():
        spikes = net(xs[:400, :16])[1]
    assert 0.002 < float(spikes.mean()) < 0.08
    assert float((spikes.mean((0, 1)) > 0).float().mean()) > 0.8


@pytest.mark.parametrize(("name", "start", "asked"), [("LIF + ALIF", 0, 200), ("GIF", 10, 500)])
def test_a_trial_of_match_to_sample_shows_what_its_label_says(name, start, asked):
    xs, (label, counts) = match_batch(VARIANTS[name], 300, Size(), torch.Generator().manual_seed(0))
    rates = xs.unflatten(2, (10, 10)).mean(-1)  # ten groups of neighbouring inputs
    sample = rates[start : start + 500].mean(0)
    test = rates[start + 800 : start + 1300].mean(0)
    assert rates[start + 500 : start + 800].mean() < 0.003  # nothing is shown in the delay
    assert torch.equal((sample - test).abs().amax(1) < 0.02, label[0].bool())
    assert 0.2 < label[0].float().mean() < 0.8
    assert not counts[:-asked].any() and (counts[-asked:] > 0).all()
    assert counts.mean() == pytest.approx(1)
