"""Several processes that train together, over loopback: each has its part of the batch, and all is
as on one device.

Two groups are started, since every start costs seconds: four processes of one device, of which one
dies at the end, and two of two devices, which go on from the checkpoint of the first. Each rule runs
in both, in float32 in one and in float64 in the other; with `make test-full` in both in both.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import brainstate
import jax
import numpy as np
import optax
import pytest
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
import process_script
from etrace_bridge.cli import main
from etrace_bridge.learning import processes
from etrace_bridge.learning.placement import Placement
from etrace_bridge.learning.processes import in_cluster
from etrace_bridge.learning.results import StepInfo
from etrace_bridge.learning.signals import Shield
from learner_models import make_net
from share import path_of_scripts

SCRIPT = Path(process_script.__file__)
LIMIT = 900  # seconds


@dataclass
class Group:
    """Processes that have ended.

    Attributes:
        folder: where they wrote.
        count: how many there were.
        status: their exit status.
        errors: what each of them wrote about errors.
        seconds: from the end of the first one to that of the last one.
    """

    folder: Path
    count: int
    status: list[int]
    errors: list[str]
    seconds: float

    def read(self, name: str, process: int = 0) -> dict[str, list[np.ndarray]]:
        found: dict[str, list[np.ndarray]] = {}
        with np.load(self.folder / f"{name}-{process}.npz") as arrays:
            for key in arrays:
                found.setdefault(key.split("/")[0], []).append(arrays[key])
        return found


def start(folder: Path, count: int, devices: int, *load: str) -> Group:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = os.environ.get("XLA_FLAGS", "")
    environment = os.environ | {
        "PYTHONPATH": path_of_scripts(),
        "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}",
    }
    errors = [(folder / f"errors-{n}.txt").open("w+") for n in range(count)]
    arguments = [
        [sys.executable, str(SCRIPT), str(n), str(count), str(port), str(folder), *load]
        for n in range(count)
    ]
    workers = [
        subprocess.Popen(a, env=environment, stderr=e, stdout=e)
        for a, e in zip(arguments, errors, strict=True)
    ]
    begun, first = time.monotonic(), None
    try:
        while any(w.poll() is None for w in workers) and time.monotonic() < begun + LIMIT:
            if first is None and any(w.poll() is not None for w in workers):
                first = time.monotonic()
            time.sleep(0.2)
        seconds = time.monotonic() - (first or begun)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    texts = []
    for file in errors:
        file.seek(0)
        texts.append(file.read())
        file.close()
    return Group(folder, count, [w.returncode for w in workers], texts, seconds)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Group:
    return start(tmp_path_factory.mktemp("four"), 4, 1)


@pytest.fixture(scope="module")
def two(four: Group, tmp_path_factory: pytest.TempPathFactory) -> Group:
    group = start(tmp_path_factory.mktemp("two"), 2, 2, str(four.folder / "checkpoint"))
    assert group.status == [0, 0], group.errors[0][-3000:]
    return group


def apart(one: list, other: list) -> float:
    pairs = list(zip(one, other, strict=True))
    assert pairs and all(np.shape(a) == np.shape(b) for a, b in pairs)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max(initial=0)) for a, b in pairs)


def compare(group: Group, rule: str, kind: str) -> None:
    tolerance = 1e-12 if kind == "float64" else 1e-6
    expected = process_script.run_case(rule, kind)
    parts = [group.read(f"{rule}-{kind}", n) for n in range(group.count)]
    names, is_factored = ["losses", "weights", "hidden"], rule in process_script.FACTORED
    names += ["influence"] if is_factored else ["trace"]
    if (rule, kind) == ("low_rank", "float64"):
        names.append("trace")
    for name in names:
        if expected[name]:
            assert apart(parts[0][name], expected[name]) <= tolerance, name
    assert not is_factored or max(float(abs(x).max()) for x in expected["influence"]) > 1e-3
    outputs = np.concatenate([p["outputs"][0] for p in parts])
    assert apart([outputs], expected["outputs"]) <= tolerance
    model = make_net(getattr(torch, kind))
    start = [p.detach() for n, p in model.named_parameters() if not n.startswith("spare")]
    assert apart(start, expected["weights"]) > 1e-2, "the weights have moved"


@pytest.mark.parametrize(("rule", "kind"), process_script.cases(4))
def test_four_processes_equal_one_device(four: Group, rule: str, kind: str) -> None:
    compare(four, rule, kind)


@pytest.mark.parametrize(("rule", "kind"), process_script.cases(2))
def test_two_processes_of_two_devices_equal_one_device(two: Group, rule: str, kind: str) -> None:
    compare(two, rule, kind)


def test_every_rule_is_run() -> None:
    """In both groups, and in both dtypes."""
    four, two = process_script.cases(4), process_script.cases(2)
    every = set(eb.rules.rule_names())
    assert {rule for rule, _ in four} == {rule for rule, _ in two} == every
    assert {*four, *two} == {(rule, kind) for rule in every for kind in process_script.KINDS}


def test_every_call(two: Group) -> None:
    """Sequences, `fit` with validation and metrics, `reset` with a mask, and weights back in torch."""
    dtype = torch.float64
    learner, (xs, ys) = process_script.make_learner("d_rtrl", dtype), process_script.data(dtype)
    process_script.run_steps(learner, xs, ys, 3)
    expected = process_script.all_calls(learner, xs, ys, slice(None))
    parts = [two.read("calls", n) for n in range(2)]
    for name, wanted in expected.items():
        if name == "sequence outputs":
            found = [
                np.concatenate(pair, 1) for pair in zip(*(p[name] for p in parts), strict=True)
            ]
        else:
            found = parts[0][name]
            assert apart(found, parts[1][name]) == 0, f"{name}: the same in every process"
        assert apart(found, wanted) <= 1e-12, name


def test_errors_reach_every_process(two: Group) -> None:
    for index in range(2):
        text = (two.folder / f"messages-{index}.txt").read_text()
        same, empty, unequal, labels, word, ok = text.splitlines()
        assert float(same) == float(labels) == 0.0, "global arrays in place of parts"
        assert ("the value 5, which is out of range" if index else "Process 1 refused") in word
        assert ("the batch is empty" if index else "process 1 refused its data") in empty.lower()
        assert "The processes do not do the same" in unequal and "`drop_last=True`" in unequal
        assert ok == "True", "check_gradients"


@pytest.mark.parametrize("units", ["within", "across"])
def test_units_are_divided_over_processes(two: Group, units: str) -> None:
    """Beside the batch, on two by two devices, with the units of a batch element in one process and
    in both; the checkpoint is read by a single process, bit for bit.
    """
    _, expected = process_script.divided_units()
    parts = [two.read(units, n) for n in range(2)]
    for name in ("losses", "synced", "weights", "hidden", "trace"):
        assert apart(parts[0][name], expected[name]) <= 1e-12, name
        assert apart(parts[0][name], parts[1][name]) == 0, name
    outputs = [p["outputs"][0] for p in parts]
    outputs = [np.concatenate(outputs)] if units == "within" else outputs
    assert all(apart([output], expected["outputs"]) <= 1e-12 for output in outputs)
    model = make_net(torch.float64, hidden=4)
    options = {"loss": mse_loss, "optimizer": optax.adam(0.01)}
    loaded = eb.OnlineLearner.load(two.folder / f"checkpoint-{units}", model, **options)
    here = process_script.whole_state(loaded)
    for name in ("weights", "hidden", "trace"):
        assert apart(parts[0][name], here[name]) == 0, name


# -- checkpoints and death ------------------------------------------------------------------------


def test_the_others_stop_when_a_process_dies(four: Group) -> None:
    assert four.status[3] == -9 and all(four.status[:3]), four.errors[0][-3000:]
    assert four.seconds < 60
    for text in four.errors[:3]:
        assert "another task died" in text or "heartbeat" in text, text[-2000:]


@pytest.mark.x32
def test_checkpoints_go_from_four_processes_to_two_to_one(four: Group, two: Group) -> None:
    """Bit for bit, and what comes after the restart is what would have come without it."""
    saved, loaded, later = four.read("saved"), two.read("loaded"), two.read("saved")
    for name in ("weights", "hidden", "trace"):
        assert apart(saved[name], loaded[name]) == 0, name
    options = {"loss": mse_loss, "optimizer": optax.adam(0.01)}
    with brainstate.environ.context(precision=32):
        learner = eb.OnlineLearner.load(
            two.folder / "checkpoint", make_net(torch.float32), **options
        )
        here = process_script.whole_state(learner)
        for name in ("weights", "hidden", "trace"):
            assert apart(later[name], here[name]) == 0, name
        alone = process_script.make_learner("d_rtrl", torch.float32)
        (xs, ys) = process_script.data(torch.float32)
        process_script.run_steps(alone, xs, ys, 4), process_script.run_steps(alone, xs, ys, 4)
        assert learner.steps == alone.steps == 8
        assert apart(here["weights"], process_script.whole_state(alone)["weights"]) <= 1e-6
        assert abs(learner.step(xs[2], ys[2]).loss - alone.step(xs[2], ys[2]).loss) <= 1e-6


def test_a_restart_continues_exactly(two: Group) -> None:
    """Bit for bit, on as many processes and devices as before."""
    on, again = two.read("on"), two.read("again")
    for name in ("losses", "weights", "hidden", "trace"):
        assert apart(on[name], again[name]) == 0, name
    assert apart(on["weights"], two.read("saved")["weights"]) > 1e-3


# `python -m etrace_bridge`, also where a shell's `... &` lets programs ignore Ctrl-C.
START = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("etrace_bridge", run_name="__main__", alter_sys=True)
"""
INTERRUPTING = """
import os, signal, time
import torch


def make():
    torch.manual_seed(0)
    return torch.nn.RNN(2, 3)


batches = 0


def size(outputs, targets):
    global batches
    batches += 1
    if INTERRUPT and batches >= 5:
        if batches == 5 and os.environ.get("ETRACE_BRIDGE_PROCESS") == "1":
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(0.05)  # the signal comes long before the end
    return outputs.abs().mean()


"""


def test_train_in_two_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """`train --processes 2` learns what one process learns, also if Ctrl-C stops it as a whole and
    the line that it prints goes on.
    """
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    arrays = {"xs": draw.standard_normal((5, 8, 2)), "targets": draw.standard_normal((5, 8, 3))}
    np.savez("data.npz", **{name: x.astype(np.float32) for name, x in arrays.items()})
    given = ["train", "model.py:make", "--data", "data.npz", "--epochs", "30", "--batch", "4"]
    given += ["--metric", "model.py:size"]

    def train(*more: str) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, "-c", START, *more], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    Path("model.py").write_text(f"{INTERRUPTING}INTERRUPT = True")
    status, out, errors = train(*given, "--processes", "2", "--output", "several")
    assert status == 130 and out == "" and errors.count("everything is saved") == 1, errors
    assert "Error" not in errors and "error" not in errors, errors
    Path("model.py").write_text(f"{INTERRUPTING}INTERRUPT = False")
    line = shlex.split(errors[errors.index("  python -m") :].splitlines()[0])[3:]
    assert line[-2:] == ["--resume", str(tmp_path / "several")], line
    status, out, errors = train(*line, "--json")
    assert status == 0, errors
    together = json.loads(out)
    with brainstate.environ.context(precision=32):
        assert main([*given, "--output", "one", "--json"]) == 0
        alone = json.loads(capsys.readouterr().out)
    assert together["updates"] == alone["updates"] == 60
    for name in ("loss", "size"):
        found = [[epoch[name] for epoch in run["epochs"]] for run in (together, alone)]
        assert apart(*found) <= 1e-6 and found[0][0] > found[0][1] > 0


# -- one process ----------------------------------------------------------------------------------


def test_a_signal_waits_for_the_other_processes() -> None:
    """Until all stop together, whichever of them got it; the same signal again does not wait."""
    told = []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Shield(
            terminate=True, agree=lambda number: told.append(number) or max(told)
        ) as shield:
            shield.check()
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)  # from the command that has started it
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGINT)
            assert told == [0] and not shield.is_agreed
            with pytest.raises(SystemExit):
                shield.check()
            assert told == [0, signal.SIGTERM] and shield.is_agreed
        with Shield(agree=lambda number: signal.SIGINT) as shield, pytest.raises(KeyboardInterrupt):
            shield.check()  # another process got it
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_usual_mesh_of_one_process() -> None:
    mesh = eb.distributed_mesh()
    assert mesh.axis_names == ("batch",) and not Placement(mesh=mesh).spans_processes
    with pytest.raises(
        eb.InputError, match="`process` is missing: give `coordinator`, `processes` and `process`"
    ):
        eb.distributed_mesh("host:1", 2)
    with pytest.raises(eb.InputError, match="`units` is 2; it must divide .* devices, which is 1"):
        eb.distributed_mesh(units=2)


def test_processes_connect_when_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at their first step, which one of them may reach much later than the others."""
    calls: list[str] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *a, **more: calls.append("join"))
    monkeypatch.setattr(processes, "gather", lambda x: calls.append("connect"))
    eb.distributed_mesh("host:1", 2, 0)
    assert calls == ["join", "connect"]


def test_a_lost_process_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(x: np.ndarray) -> None:
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection reset by peer\nmore")

    monkeypatch.setattr(processes.multihost_utils, "process_allgather", lost)
    with pytest.raises(eb.BridgeError, match="Another process has ended .* by peer. Look for"):
        processes.gather_float64(np.ones(2))


def test_a_process_lost_inside_a_step_is_named_as_the_cause() -> None:
    """Where the program is run, and where its results are read; other errors stay as they are."""
    learner = eb.OnlineLearner(make_net(), loss=mse_loss)

    def read(text: str) -> None:
        class Loss:
            def item(self) -> float:
                raise jax.errors.JaxRuntimeError(text)

        _ = StepInfo(Loss(), None, lambda: None).loss

    def run(text: str) -> None:
        with learner.runtime.store.transaction():
            raise jax.errors.JaxRuntimeError(text)

    for call in (read, run):
        with pytest.raises(eb.BridgeError, match="Another process has ended .* by peer. Look for"):
            call("UNKNOWN: Gloo all-reduce failed: Connection reset by peer")
        with pytest.raises(jax.errors.JaxRuntimeError, match="^RESOURCE_EXHAUSTED"):
            call("RESOURCE_EXHAUSTED: out of memory")


def test_what_counts_as_a_cluster() -> None:
    assert not in_cluster({}) and not in_cluster({"SLURM_NTASKS": "1"})
    assert in_cluster({"SLURM_NTASKS": "8"}) and in_cluster({"JAX_COORDINATOR_ADDRESS": "host:1"})
