"""The benchmarks run, in small: what `make bench` measures is not for tests, but it must not fail."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import jax
import pytest
import torch

from etrace_bridge.rules import rule_names

pytestmark = pytest.mark.implicit_promotion("benchmarks run in processes of their own")
ROOT = Path(__file__).resolve().parent.parent
MODULES = sorted(
    path.stem
    for path in (ROOT / "benchmarks").glob("*.py")
    if path.stem not in ("__init__", "__main__")
)


@pytest.fixture(autouse=True)
def beside_the_package(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported(name):
    importlib.import_module(f"benchmarks.{name}")


def test_compile_cost(capsys):
    assert importlib.import_module("benchmarks.compile_cost").main([1, 2]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.x32
def test_loop_cost(monkeypatch):
    """Both forms of the GRU have the same gradients, which `gradient_seconds` compares."""
    loop_cost = importlib.import_module("benchmarks.loop_cost")
    for name, size in {"STEPS": 5, "BATCH": 2, "INPUTS": 3, "HIDDEN": 4}.items():
        monkeypatch.setattr(loop_cost, name, size)
    assert min(loop_cost.gradient_seconds(True, 5, 1, loop_cost.CLOCKS["cpu"])) > 0
    equations, seconds = loop_cost.wrap_seconds(1, loop_cost.CLOCKS["cpu"])
    assert equations > 15 and seconds > 0


@pytest.mark.x32
def test_the_online_step_grows_linearly_with_layers():
    """The second four layers add as many lines as the first four; a guard that repeats its verdict
    everywhere adds more.
    """
    step_size = importlib.import_module("benchmarks.step_size")
    first, second, third = (step_size.measure(layers, torch.nn.RNN)[0] for layers in (2, 6, 10))
    assert second > first + 100
    assert third - second < 1.05 * (second - first)


@pytest.mark.parametrize(
    ("mode", "rule", "credit"),
    [("gradients", "d_rtrl", "step"), ("step", "d_rtrl", "step"), ("gradients", "pp_prop", "core")],
)
def test_a_row(mode, rule, credit):
    harness = importlib.import_module("benchmarks.harness")
    workloads = importlib.import_module("benchmarks.workloads")
    steps = 1 if mode == "step" else 12
    workload = workloads.Workload(
        "small",
        "gru",
        6,
        3,
        2,
        steps,
        rule=rule,
        credit=credit,
        mode=mode,
        chunk=4 if steps > 1 else 1,
    )
    makers = {name: harness.MAKERS[name] for name in ("ours", "yardstick", harness.REFERENCE)}
    with jax.enable_x64(False):
        row = harness.measure(workload, makers, repeats=1)
    assert all(row["programs"][name]["seconds"] > 0 for name in makers), row
    assert ("difference_to_yardstick" in row["programs"]["ours"]) == (mode == "gradients")
    assert "small" in harness.table([row]) and "small" in harness.page(
        {"rows": [row], "environment": {}}
    )


def test_programs_for_a_tpu_need_its_compiler(monkeypatch, capsys):
    """Without libtpu the command says where it is to be had; with it, every rule compiles."""
    tpu = importlib.import_module("benchmarks.tpu")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert tpu.main([]) == 1 and "pip install libtpu" in capsys.readouterr().err


@pytest.mark.x32
def test_what_users_send_back(capsys):
    """The script for their device runs here, with an error in none of its rows."""
    accelerator = importlib.import_module("benchmarks.accelerator")
    assert accelerator.main(["--small"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["platform"] == "cpu" and found["jax"]
    assert [row["rule"] for row in found["rows"]] == list(accelerator.RULES)
    for row in found["rows"]:
        assert min(row["seconds_per_online_step"], row["seconds_per_sequence"]) > 0


@pytest.mark.x32
def test_what_accelerators_need_is_counted(capsys):
    """The formulas of large models are checked by the command itself, at small sizes."""
    roofline = importlib.import_module("benchmarks.roofline")
    assert roofline.main(["--paper"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(roofline.FORMULAS) and set(roofline.FORMULAS) == set(rule_names())
    # 12 layers of batch 4,096 by 3 gates of 16,384 units by 2 · 16,384 weights and 2 biases, float32
    size = 12 * 4096 * 3 * 16384 * (2 * 16384 + 2) * 4
    assert f"| {size:.2g} | {size / 1024:.2g} |" in lines[2]
    assert roofline.main(["--units", "8", "--inputs", "4", "--batch", "2"]) == 0
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines()[-3:]]
    assert [row[1].strip(" `") for row in rows] == list(roofline.RULES)
    # of one step, products alone: 2 · B · 3H · (I + H)
    assert all(float(row[3]) * 1e9 >= 2 * 2 * 24 * 12 for row in rows)
