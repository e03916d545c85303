"""Checkpoints: everything comes back bit for bit, a kill leaves the old or the new one, and what
does not fit is listed.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import brainstate
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.torch
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from etrace_bridge.learning import checkpoint, checkpoint_files
from learner_models import I, assert_same, make_data, make_net

SCRIPT = Path(__file__).with_name("resume_script.py")


def everything(learner: eb.OnlineLearner) -> dict[str, np.ndarray]:
    """Every array that a learner holds, by name."""
    tensors = {
        name: checkpoint.as_tensor(x)
        for name, x in checkpoint.named_arrays(learner.runtime.store).items()
    }
    tensors |= {f"torch {n}": t for n, t in learner.net.state_dict().items()}
    return {
        n: (t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy()
        for n, t in tensors.items()
    }


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, e in expected.items():
        assert found[name].dtype == e.dtype and np.array_equal(found[name], e), name


def make_learner(**options) -> eb.OnlineLearner:
    given = {
        "rule": eb.rules.DRTRL(credit="step", trace_dtype="bfloat16"),
        "loss": mse_loss,
        "optimizer": optax.adam(0.02),
        "chunk": 2,
        "seed": 5,
    } | options
    return eb.OnlineLearner(make_net(dropout=0.3), **given)


@pytest.fixture(scope="module")
def trained() -> eb.OnlineLearner:
    """A learner in the middle of a stream, with dropout's random key, momenta and a trace."""
    learner = make_learner()
    for x, y in zip(*make_data(), strict=True):
        learner.step(x, y)
    return learner


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory) -> Path:
    return trained.save(tmp_path_factory.mktemp("run") / "model")


def test_everything_comes_back(trained, saved):
    expected = everything(trained)
    kinds = {name.split()[0] for name in expected}
    assert {"parameter", "hidden", "carried", "trace", "optimizer", "alarm", "torch"} <= kinds
    assert any(name.startswith("carried") and "rng_key" in name for name in expected)
    assert all(np.any(expected[n]) for n in expected if n.startswith("trace ")), (
        "an empty trace shows nothing"
    )
    loaded = eb.OnlineLearner.load(
        saved, make_net(dropout=0.3), loss=mse_loss, optimizer=optax.adam(0.02)
    )
    assert_equal(everything(loaded), expected)
    assert (loaded.steps, loaded.updates) == (trained.steps, trained.updates) == (6, 6)
    assert loaded.rule == trained.rule and loaded.runtime.options.chunk == 2
    xs, ys = make_data(seed=1)
    for x, y in zip(xs[:3], ys[:3], strict=True):
        one, other = trained.step(x, y), loaded.step(x, y)
        assert one.loss == other.loss and torch.equal(one.output, other.output)
    assert trained.update(xs, ys, carry=True).loss == loaded.update(xs, ys, carry=True).loss
    assert_equal(everything(loaded), everything(trained))
    assert (loaded.steps, loaded.updates) == (trained.steps, trained.updates) == (15, 10)


@pytest.mark.parametrize("rule", [*eb.rules.rule_names(), "otpe:leak=0.5", "decolle:seed=3"])
def test_every_rule_comes_back_by_itself(rule, tmp_path):
    learner = eb.OnlineLearner(torch.nn.GRUCell(I, 4), rule, mse_loss)
    loaded = eb.OnlineLearner.load(learner.save(tmp_path / "a"), torch.nn.GRUCell(I, 4))
    assert loaded.rule == learner.rule == eb.rules.make_rule(rule)


def test_the_weights_are_a_plain_file_for_torch(saved):
    found = safetensors.torch.load_file(saved)
    model = make_net()
    assert list(model.state_dict()) == sorted(found, key=list(model.state_dict()).index)
    with pytest.raises(AssertionError):
        # they were trained
        assert_same({n: found[n] for n in model.state_dict()}, model.state_dict(), 1e-6)
    model.load_state_dict(found)
    loaded = eb.OnlineLearner.load(
        saved, make_net(dropout=0.3), loss=mse_loss, optimizer=optax.adam(0.02)
    )
    assert_same(dict(loaded.net.state_dict()), model.state_dict(), 0)


def test_a_checkpoint_contains_no_pickle(saved):
    files = sorted(p.name for p in saved.parent.iterdir())
    assert len(files) == 2 and all(name.endswith(".safetensors") for name in files)
    for name in files:
        with safetensors.safe_open(saved.parent / name, "pt") as file:
            json.loads(file.metadata()["etrace_bridge"])  # arrays and JSON, nothing else


def test_a_new_learner_and_one_without_a_stream(tmp_path):
    empty = make_learner()
    empty.save(tmp_path / "empty")
    xs, ys = make_data()
    loaded = eb.OnlineLearner.load(
        tmp_path / "empty", make_net(dropout=0.3), loss=mse_loss, optimizer=optax.adam(0.02), seed=5
    )
    assert loaded.steps == 0
    first = loaded.fit([(xs, ys)]).batch_losses
    assert first == empty.fit([(xs, ys)]).batch_losses
    loaded.save(tmp_path / "empty")
    again = eb.OnlineLearner.load(
        tmp_path / "empty", make_net(dropout=0.3), loss=mse_loss, optimizer=optax.adam(0.02)
    )
    assert (
        again.updates == 1 and again.history.batch_losses == first and again.history["epoch"] == [1]
    )
    assert again.update(xs, ys).loss == loaded.update(xs, ys).loss
    assert again.updates == 2


OPTIMIZERS = {
    "translated": lambda model: torch.optim.Adam(
        [{"params": model.rnn.parameters()}, {"params": model.out.parameters(), "lr": 0.1}]
    ),
    "in torch": lambda model: torch.optim.NAdam(model.parameters(), lr=0.05),
    "of some, in torch": lambda model: torch.optim.NAdam(model.out.parameters(), lr=0.05),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_torch_optimizers_come_back(kind, tmp_path):
    batches = [make_data(seed=n) for n in range(5)]
    model, other = make_net(), make_net()
    options = {"accumulate": 2, "clip_norm": 0.1}
    learner = eb.OnlineLearner(model, "bptt", mse_loss, OPTIMIZERS[kind](model), **options)
    for batch in batches[:3]:
        learner.update(*batch)
    learner.runtime.optimizer.param_groups[0]["lr"] = 0.003  # as a scheduler does
    learner.save(tmp_path / "model")
    optimizer = OPTIMIZERS[kind](other)
    loaded = eb.OnlineLearner.load(
        tmp_path / "model", other, loss=mse_loss, optimizer=optimizer, **options
    )
    assert optimizer.param_groups[0]["lr"] == 0.003
    for batch in batches[3:]:
        assert learner.update(*batch).loss == loaded.update(*batch).loss
    assert_equal(everything(loaded), everything(learner))


SGD_PAIRS = {
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "maximize": {"maximize": True},
}


@pytest.mark.parametrize("option", SGD_PAIRS)
def test_loading_an_optimizer_with_other_equations_lists_the_differences(option, tmp_path):
    model = make_net()
    plain = {"momentum": 0.9} if option == "nesterov" else {}
    saved = torch.optim.SGD(model.parameters(), lr=0.1, **plain)
    learner = eb.OnlineLearner(model, "bptt", mse_loss, saved)
    learner.step(*(x[0] for x in make_data()))
    path = learner.save(tmp_path / "model")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **SGD_PAIRS[option])
    with pytest.raises(eb.StateError, match=f"group 0: `{option}` is .* in the checkpoint, "):
        eb.OnlineLearner.load(path, model, loss=mse_loss, optimizer=optimizer)
    assert optimizer.param_groups[0][option] == SGD_PAIRS[option][option]


def test_the_guard_goes_on_counting(trained, tmp_path):
    trained.save(tmp_path / "model")
    loaded = eb.OnlineLearner.load(
        tmp_path / "model", make_net(dropout=0.3), loss=mse_loss, optimizer=optax.adam(0.02)
    )
    xs, ys = make_data(seed=2)
    loaded.step(xs[0], ys[0])
    loaded.step(xs[1] * torch.nan, ys[1])
    with pytest.raises(eb.NonFiniteError, match=f"step {trained.steps + 2}"):
        loaded.save(tmp_path / "other")
    assert not (tmp_path / "other.safetensors").exists() and loaded.steps == trained.steps + 1


# -- what does not fit ----------------------------------------------------------------------------


def test_loading_into_another_model_lists_the_differences(saved):
    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = torch.nn.RNN(I, 4)
            self.extra = torch.nn.Linear(4, 2)

        def forward(self, x):
            return self.extra(self.rnn(x)[0])

    with pytest.raises(eb.StateError) as caught:
        eb.OnlineLearner.load(saved, Other().double(), loss=mse_loss)
    message = str(caught.value)
    for line in (
        "extra.weight: missing in the checkpoint",
        "out.weight: in the checkpoint only",
        "rnn.weight_hh_l0: float64(3, 3) in the checkpoint, float64(4, 4) here",
    ):
        assert line in message
    assert "rnn.bias_hh_l0" in message and message.index("extra.bias") < message.index(
        "extra.weight"
    )
    with pytest.raises(
        eb.StateError,
        match=r"rnn.weight_ih_l0: float64\(3, 2\) in the checkpoint, float32\(3, 2\) here",
    ):
        eb.OnlineLearner.load(saved, make_net(torch.float32), loss=mse_loss)


def test_loading_with_another_rule_or_optimizer_lists_the_differences(saved, tmp_path):
    model = make_net(dropout=0.3)
    with pytest.raises(eb.StateError, match="rule: d_rtrl .* in the checkpoint, rtrl"):
        eb.OnlineLearner.load(saved, model, "rtrl", loss=mse_loss)
    with pytest.raises(eb.StateError, match="rule: d_rtrl .*'credit': 'step'.*'credit': 'core'"):
        eb.OnlineLearner.load(saved, model, eb.rules.DRTRL(credit="core"), loss=mse_loss)
    with pytest.raises(eb.StateError, match="optimizer .*mu.*in the checkpoint only"):
        eb.OnlineLearner.load(saved, model, loss=mse_loss, optimizer=optax.sgd(0.1))
    with pytest.raises(eb.StateError, match="not a torch optimizer in the checkpoint"):
        eb.OnlineLearner.load(
            saved, model, loss=mse_loss, optimizer=torch.optim.SGD(model.parameters())
        )
    weights = tmp_path / "plain.safetensors"
    safetensors.torch.save_file(model.state_dict(), weights)
    with pytest.raises(eb.InputError, match="holds weights only"):
        eb.OnlineLearner.load(weights, model)
    with pytest.raises(eb.InputError, match="There is no checkpoint"):
        eb.OnlineLearner.load(tmp_path / "nothing", model)
    (tmp_path / "text.safetensors").write_text("hello, this is no checkpoint")
    with pytest.raises(eb.CheckpointError, match="not a checkpoint that can be read"):
        eb.OnlineLearner.load(tmp_path / "text", model)


# -- whole or not at all --------------------------------------------------------------------------


def write(folder: Path, number: int) -> None:
    """A small checkpoint whose parts all say the same number."""
    value = {"x": torch.full((100,), float(number))}
    checkpoint_files.write_checkpoint(folder / "run[1]", value, value, {"number": number})


def read(folder: Path) -> int:
    weights, arrays, facts = checkpoint_files.read_checkpoint(folder / "run[1]")
    assert torch.equal(weights["x"], arrays["x"]) and float(weights["x"][0]) == facts["number"], (
        "parts of two checkpoints"
    )
    return facts["number"]


class Killed(BaseException):
    """What a kill looks like from inside: nothing after it runs."""


def test_a_failure_at_any_file_operation_leaves_the_old_or_the_new(tmp_path, monkeypatch):
    operations = {
        "open": (builtins, "open"),
        "fsync": (os, "fsync"),
        "replace": (os, "replace"),
        "unlink": (os, "unlink"),
    }
    real = {name: getattr(*place) for name, place in operations.items()}

    def run(fail_at: int, late: bool) -> int:
        """Writes number 2 over number 1 and fails at one operation, before or after it; the
        operations begun.
        """
        folder = tmp_path / f"{fail_at}-{late}"
        write(folder, 1)
        begun = 0

        def wrapped(name):
            def call(*args, **options):
                nonlocal begun
                begun += 1
                if begun == fail_at and not late:
                    raise Killed
                result = real[name](*args, **options)
                if begun == fail_at:
                    if name == "open":
                        result.close()  # as the system does for a process that was killed
                    raise Killed
                return result

            return call

        with monkeypatch.context() as patch:
            for name, (module, attribute) in operations.items():
                patch.setattr(module, attribute, wrapped(name))
            with contextlib.suppress(Killed):
                write(folder, 2)
        number = read(folder)
        outcomes.append(number)
        write(folder, 3)  # what was left behind does no harm and is cleared away
        assert read(folder) == 3 and len(list(folder.iterdir())) == 2
        return begun

    outcomes: list[int] = []
    total = run(0, False)
    assert total >= 6 and outcomes == [2]
    for late in (False, True):
        for fail_at in range(1, total + 1):
            run(fail_at, late)
    assert outcomes.count(1) >= 6 and outcomes.count(2) >= 3


KILLED_SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_checkpoint import write
print("ready", flush=True)
number = 1
while True:
    write(Path(sys.argv[2]), number)
    number += 1
"""


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    write(tmp_path, 0)
    arguments = [sys.executable, "-c", KILLED_SCRIPT, str(Path(__file__).parent), str(tmp_path)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE)
    try:
        assert process.stdout.readline() == b"ready\n"
        # Stopping and looking is a kill after which the process can be asked again: many moments
        # from one process.
        seen: list[int] = []
        while len(seen) < 60 or seen[-1] < 3:
            process.send_signal(signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # until it has stopped
            seen.append(read(tmp_path))
            process.send_signal(signal.SIGCONT)
            time.sleep(0.0007 * (len(seen) % 7))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert len(set(seen)) > 5
    assert read(tmp_path) >= max(seen)


TWO_SCRIPT = KILLED_SCRIPT.replace("number = 1", "number = int(sys.argv[3])").replace(
    "number += 1", "number += 2"
)


def test_two_processes_that_save_to_one_path_never_mix(tmp_path):
    write(tmp_path, 0)
    arguments = [sys.executable, "-c", TWO_SCRIPT, str(Path(__file__).parent), str(tmp_path)]
    processes = [
        subprocess.Popen([*arguments, str(first)], stdout=subprocess.PIPE) for first in (1, 2)
    ]
    try:
        for process in processes:
            assert process.stdout.readline() == b"ready\n"
        seen: set[int] = set()
        while min(sum(n % 2 == k for n in seen) for k in (0, 1)) < 10:  # ten saves of each
            # raises if the files belong to two saves, or one is missing
            seen.add(read(tmp_path))
            time.sleep(0.001)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()
    read(tmp_path)
    write(tmp_path, 10**6)
    assert read(tmp_path) == 10**6 and len(list(tmp_path.iterdir())) == 2


def test_a_folder_without_locks_and_one_whose_lock_is_held(tmp_path, monkeypatch):
    write(tmp_path, 1)
    with checkpoint_files._only_writer(tmp_path) as alone:
        assert alone
        monkeypatch.setattr(checkpoint_files, "LOCK_SECONDS", 0.05)
        with pytest.raises(eb.CheckpointError, match="another process has been saving"):
            write(tmp_path, 2)
    assert read(tmp_path) == 1
    monkeypatch.setattr(checkpoint_files, "fcntl", None)  # as on Windows
    # May be another process's, about to be named
    bystander = tmp_path / "run[1].12345678.state.safetensors"
    bystander.write_bytes(b"")
    write(tmp_path, 3)
    assert read(tmp_path) == 3 and bystander.exists() and len(list(tmp_path.iterdir())) == 3


def test_a_brainstate_module_that_has_seen_no_input_keeps_its_weights(tmp_path):
    class Cell(brainstate.nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.w = brainstate.ParamState(
                {"a": scale * jnp.ones((2, 3)), "b": scale * jnp.ones(3)}
            )
            self.h = brainstate.HiddenState(jnp.zeros((3, 3)))

        def update(self, x):
            self.h.value = jnp.tanh(x @ self.w.value["a"] + self.w.value["b"] + self.h.value)
            return self.h.value

    def loss(output, target):
        return jnp.mean((output - target) ** 2)

    options = {"loss": loss, "optimizer": optax.sgd(0.1)}
    learner = eb.OnlineLearner(Cell(0.5), **options)
    path = learner.save(tmp_path / "run")
    loaded = eb.OnlineLearner.load(path, Cell(0.1), **options)
    x, y = np.ones((3, 2)), np.zeros((3, 3))
    assert loaded.step(x, y).loss == learner.step(x, y).loss > 0.1
    loaded.save(path)
    again = eb.OnlineLearner.load(path, Cell(0.1), **options)
    assert again.step(x, y).loss == loaded.step(x, y).loss == learner.step(x, y).loss


# -- a new process --------------------------------------------------------------------------------


def run_script(*arguments: str) -> list[float]:
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_resume_in_a_new_process_is_bit_exact(tmp_path):
    whole = run_script("0", "200", "-", str(tmp_path / "whole"))
    first = run_script("0", "100", "-", str(tmp_path / "half"))
    second = run_script("100", "200", str(tmp_path / "half"), str(tmp_path / "resumed"))
    assert len(whole) == 200 and first + second == whole
    assert len(set(whole)) > 190  # the losses do change
    one, two = (checkpoint_files.read_checkpoint(tmp_path / name) for name in ("whole", "resumed"))
    for part in (0, 1):
        assert list(one[part]) == list(two[part])
        for name in one[part]:
            assert torch.equal(one[part][name], two[part][name]), name
    assert one[2] == two[2] and one[2]["steps"] == 200
    assert any(name.startswith("trace ") and t.any() for name, t in one[1].items())
