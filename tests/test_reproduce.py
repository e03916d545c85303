"""Every task of `make reproduce` in miniature: it runs, it is the same from the same seed, and what
is stored makes a page.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.reproduce.__main__ import TASKS
from benchmarks.reproduce.methods import all_methods, methods_for
from benchmarks.reproduce.page import _section, draw, normalised
from benchmarks.reproduce.results import Results
from benchmarks.reproduce.tasks import Outcome, Size
from etrace_bridge.rules import rule_names

pytestmark = pytest.mark.x32

# What a miniature must reach: better than what a network that has learned nothing gets.
FIRST = {
    "A": ("Hénon", 0.95),
    "D": ("GRU", None),
    "E": ("50 LIF + 50 ALIF", None),
    "G": ("delay 300 ms", None),
    "H": ("GRU-32", 1),
    "I": ("2 GRU layers", 0.2),
}


@pytest.mark.parametrize("key", sorted(TASKS))
def test_a_task_runs_in_miniature_and_learns(key):
    task = TASKS[key]
    setting, bound = FIRST.get(key, (task.settings[0], None))
    outcome = task.run(setting, methods_for(task)["d_rtrl"], 0, Size(small=True))
    assert (
        np.isfinite(outcome.score) and np.isfinite(outcome.curve).all() and len(outcome.curve) > 1
    )
    if bound is not None:
        assert outcome.score < bound if task.lower_is_better else outcome.score >= bound


def test_every_rule_is_a_method_and_bad_names_are_refused():
    names = set(all_methods())
    assert {n for n in rule_names() if n not in ("bptt", "low_rank")} <= names
    assert {"tbptt 1", "bptt", "low_rank 1"} <= names
    with pytest.raises(SystemExit, match="has no method nonsense"):
        methods_for(TASKS["A"], ["nonsense"])


def test_results_are_on_disk_after_each_run_and_make_a_page(tmp_path):
    task = TASKS["A"]
    scores = {"tbptt 1": (0.5, 0.7), "rtrl": (0.1, 0.1), "d_rtrl": (0.2, 0.4)}
    for seed in (0, 1):
        for name, found in scores.items():
            results = Results("A", tmp_path)  # a new process goes on
            assert not results.has("Hénon", name, seed)
            results.add("Hénon", name, seed, Outcome(found[seed], np.linspace(1, 0, 120)), 3.0)
    results = Results("A", tmp_path)
    assert len(results.runs) == 6 and all(len(r["curve"]) == 50 for r in results.runs)
    # an error: small is good
    assert [normalised(task, results, n) for n in ("tbptt 1", "rtrl")] == [0.0, 1.0]
    assert normalised(task, results, "d_rtrl") == pytest.approx(0.6)
    text = _section(task, results)
    assert (
        "- Hénon: 0.6 ± 0.1 without credit through time (`tbptt 1`), 0.1 ± 0 with an exact "
        "gradient (`rtrl`)." in text
    )
    assert "| `d_rtrl` | 0.3 ± 0.1 | – | – |" in text
    assert "| `rtrl` | 0.1 ± 0 | – | – | 0.0052 / 0.018 / 0.0051 | 2 | 3 |" in text
    draw({"A": task}, {"A": results}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5000
