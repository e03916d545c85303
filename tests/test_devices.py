"""Where a learner computes: named devices, and a mesh along the batch that gives what one device
gives.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from etrace_bridge.learning.placement import Placement, find_device
from etrace_bridge.lowering import CPUTuning, Tuning
from learner_models import make_data, make_net
from mesh_script import BATCH, RULES, UNITS
from share import path_of_scripts


def test_devices_by_name_and_as_objects():
    first = jax.local_devices(backend="cpu")[0]
    assert find_device("cpu") == find_device(first) == first and find_device(None) is None
    xs, ys = make_data()
    losses = {}
    for device in ("cpu", first, None):
        learner = eb.OnlineLearner(
            make_net(), rule="d_rtrl", loss=mse_loss, optimizer=optax.sgd(0.1), device=device
        )
        losses[str(device)] = [learner.step(x, y).loss for x, y in zip(xs, ys, strict=True)]
        assert {d for leaf in learner.runtime.store.arrays() for d in leaf.devices()} == {first}
    assert losses["cpu"] == losses[str(first)] == losses["None"]


@pytest.mark.parametrize("device", ["gpu", "cuda", "tpu", "abacus"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(eb.InputError, match=f"There is no device '{device}' here; JAX sees: cpu"):
        eb.OnlineLearner(make_net(), loss=mse_loss, device=device)


def test_the_tuning_is_that_of_the_learners_device(monkeypatch):
    """Not that of JAX's default one."""
    xs, ys = make_data()
    # what a learner on a GPU would see; its arrays stay here
    monkeypatch.setattr(Placement, "platform", "gpu")
    learner = eb.OnlineLearner(make_net(), rule="d_rtrl", loss=mse_loss, optimizer=optax.sgd(0.1))
    learner.step(xs[0], ys[0])
    assert type(learner.runtime.store.compiled.program.tuning) is Tuning
    monkeypatch.undo()
    on_cpu = eb.OnlineLearner(
        make_net(), rule="d_rtrl", loss=mse_loss, optimizer=optax.sgd(0.1), device="cpu"
    )
    on_cpu.step(xs[0], ys[0])
    assert type(on_cpu.runtime.store.compiled.program.tuning) is CPUTuning
    for a, b in zip(
        learner.runtime.store.state.theta, on_cpu.runtime.store.state.theta, strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_what_is_no_device_or_mesh():
    with pytest.raises(
        eb.InputError, match="`device` is a int; it must be 'cpu', 'gpu', 'tpu' or a `jax.Device`"
    ):
        Placement(device=0)
    with pytest.raises(eb.InputError, match="`mesh` is a str; it must be a `jax.sharding.Mesh`"):
        Placement(mesh="x")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    with pytest.raises(eb.InputError, match="both given"):
        Placement(device="cpu", mesh=mesh)


SCRIPT = Path(__file__).with_name("mesh_script.py")


@pytest.fixture(scope="module")
def on_four_devices() -> dict:
    environment = os.environ | {
        "PYTHONPATH": path_of_scripts(),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4",
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(SCRIPT)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_mesh_equals_one_device(on_four_devices):
    found = on_four_devices
    assert found["devices"] == 4 and found["moved"] > 1e-3
    assert set(found["differences"]) == {
        "losses",
        "outputs",
        "gradients",
        "weights",
        "hidden",
        "trace",
        "resumed",
    }
    for what, difference in found["differences"].items():
        assert difference <= 1e-6, (what, difference)


def test_the_batch_is_divided(on_four_devices):
    assert on_four_devices["batch shards"] == [[2, 3]] * 4  # of (8, 3) hidden states
    assert on_four_devices["weight shards"] == 4  # each device has all of them
    assert "batch of 6 cannot be divided over the mesh's 4 devices" in on_four_devices["error"]


def test_any_device_of_several(on_four_devices):
    assert on_four_devices["second device"] == [1]


# -- collectives, and divided units ---------------------------------------------------------------


def test_a_divided_batch_gathers_no_trace(on_four_devices):
    """Gradients are added up; what is gathered is at most as large as a hidden state, (8, 3), and a
    trace is (8, 3, 2) or (8, 3, 3).
    """
    found = on_four_devices["batch only"]
    assert "all-reduce" in {name for name, _ in found}
    assert max((size for name, size in found if name != "all-reduce"), default=0) <= 8 * 3, found


@pytest.mark.parametrize("rule", RULES)
def test_units_are_divided_beside_the_batch(on_four_devices, rule):
    """As on one device; each device has a quarter of a trace and half of the weights."""
    found = on_four_devices["divided"][rule]
    assert found["apart"] <= 1e-6
    assert found["weights"] == [0.5], found["weights"]
    assert found["shards"] and set(found["shards"]) == {0.25}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "pp_prop"])
def test_no_collective_moves_a_trace(on_four_devices, rule):
    """In a step, and in chunks: gradients are added up, and no more is moved than weights and
    Jacobians have. `rtrl` once gathered its whole influence matrix, 98,304 elements, and `snap_n`
    and `ostl` parts of theirs. The filters of `pp_prop` are no larger than hidden states, which
    move.
    """
    found = on_four_devices["divided"][rule]
    sizes = [size for _, size in found["collectives"]]
    assert sizes and max(sizes) < found["largest trace"], found["collectives"]


def test_low_rank_moves_no_factor(on_four_devices):
    """Only the step's Jacobian, n × n of each batch element, whatever the rank; `A` was gathered."""
    found = on_four_devices["low rank"]
    assert found["apart"] <= 1e-6
    jacobian = BATCH // 2 * UNITS * UNITS
    assert max(size for _, size in found["collectives"]) <= jacobian < found["factor"]


def test_what_is_no_partition():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("batch",))
    with pytest.raises(
        eb.InputError,
        match="`partition` is 'units'; it must name an axis of the mesh, and its axes are 'batch'",
    ):
        Placement(mesh=mesh, partition="units")
    with pytest.raises(eb.InputError, match="and there is no `mesh`"):
        Placement(partition="units")
