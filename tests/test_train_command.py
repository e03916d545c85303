"""`train` and `bench` on the command line: what is read, what is learned, what is written."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.torch
import torch
from torch import nn

import etrace_bridge as eb
from etrace_bridge.cli import commands as cli
from etrace_bridge.cli.data import make_sequences, read_arrays
from etrace_bridge.cli.model import load_model, load_net
from etrace_bridge.learning import checkpoint_files

# as on a user's command line
pytestmark = pytest.mark.x32

MODELS = """
from torch import nn


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.gru, self.out = nn.GRU(3, 4, **options), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.gru(x)[0])


def make_model():
    return Net()


def make_batch_first():
    return Net(batch_first=True)


def my_loss(output, target):
    return ((output - target) ** 2).sum() * 1e30


def worst(output, target):
    return (output - target).abs().max()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with models and data; the current one."""
    (tmp_path / "models.py").write_text(MODELS)
    random = np.random.default_rng(0)
    xs = random.normal(size=(6, 10, 3))
    # a running sum: something to learn through time
    targets = np.stack([xs[..., 0].cumsum(0), xs[..., 1]], -1) / 3
    np.savez(tmp_path / "data.npz", xs=xs, targets=targets)
    np.save(tmp_path / "xs.npy", xs)
    np.save(tmp_path / "labels.npy", (xs[..., 0].sum(0) > 0).astype(int))  # one a sequence
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(list(arguments))
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_training_learns_and_writes_what_it_learned(capsys, folder):
    arguments = (
        "--data",
        "data.npz",
        "--epochs",
        "8",
        "--batch",
        "5",
        "--lr",
        "0.02",
        "--validation",
        "0.2",
        "--chunk",
        "2",
    )
    files = ("--output", "run/model", "--state-dict", "run/weights.pt")
    status, out, err = run(capsys, "train", "models.py:make_model", *arguments, *files, "--json")
    assert status == 0, err
    result = json.loads(out)
    assert (
        result["sequences"] == 8 and result["validation_sequences"] == 2 and result["updates"] == 16
    )
    assert result["epochs"][-1]["loss"] < 0.8 * result["epochs"][0]["loss"]
    assert result["epochs"][-1]["validation_loss"] < result["epochs"][0]["validation_loss"]

    weights = torch.load(folder / "run" / "weights.pt", weights_only=True)
    model = load_model("models.py:make_model")
    start = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    assert all((weights[name] != start[name]).any() for name in start)
    with torch.no_grad():
        held = np.load("data.npz")
        loss = nn.functional.mse_loss(
            model(torch.tensor(held["xs"]).float()), torch.tensor(held["targets"]).float()
        )
    assert loss < result["epochs"][0]["loss"]

    learner = eb.OnlineLearner.load(
        result["checkpoint"], model, loss=nn.functional.mse_loss, optimizer=optax.adam(0.02)
    )
    assert learner.updates == 16
    torch.testing.assert_close(
        learner.net.state_dict()["gru.weight_hh_l0"], weights["gru.weight_hh_l0"]
    )


def test_settings_from_a_file_flags_win_and_resume(capsys, folder):
    (folder / "configs").mkdir()
    (folder / "configs" / "run.toml").write_text(
        'model = "../models.py:make_batch_first"\ndata = "../xs.npy"\ntargets = "../labels.npy"\nlayout = "time"\n'
        'loss = "cross_entropy"\nloss_at = "last"\nrule = "pp_prop"\nepochs = 7\nbatch = 10\nvalidation = 0.3\noutput = "../first"\n'
        "fidelity = true\n"
    )
    status, out, err = run(capsys, "train", "--config", "configs/run.toml", "--epochs", "2")
    assert status == 0, err
    assert (
        "pp_prop on 7 sequences of 6 steps, 3 more for validation" in out
        and "validation accuracy" in out
    )
    assert "FidelityMeter: " in out and "of 2 readings downhill" in out and "fidelity" in err
    assert "first.safetensors" in out and (folder / "first.safetensors").is_file()
    rows = [line for line in err.splitlines() if line.startswith("epoch ")]
    assert [row.split()[1] for row in rows] == ["1/2", "2/2"] and all(
        "validation_accuracy" in row for row in rows
    )

    more = ("--epochs", "1", "--resume", "first.safetensors", "--output", "second", "--json")
    status, out, err = run(capsys, "train", "--config", "configs/run.toml", *more)
    assert status == 0, err
    assert json.loads(out)["updates"] == 3  # two before, one now


def test_a_table_of_numbers_is_cut_into_sequences(folder):
    rows = ["a,b,c,wanted"] + [f"{n},{n + 1},{n + 2},{10 * n}" for n in range(11)]
    (folder / "table.csv").write_text("\n".join(rows) + "\n")
    xs, targets, stream = read_arrays("table.csv", None, [])
    sequences = make_sequences(
        xs,
        targets,
        stream=stream,
        window=5,
        batch_first=False,
        loss_at="last",
        loss="mse",
        model=nn.GRU(3, 1),
    )
    assert sequences.xs.shape == (5, 2, 3) and sequences.targets.shape == (5, 2, 1)
    assert sequences.xs[:, 1, 0].tolist() == [5, 6, 7, 8, 9] and sequences.targets[4, 0, 0] == 40
    assert sequences.mask is not None and sequences.mask.tolist() == [0, 0, 0, 0, 1]
    named = read_arrays("table.csv", None, ["a", "wanted"])
    assert named[0].shape == (11, 2) and named[1][3].tolist() == [3, 30]


def test_batches_are_laid_out_as_the_model_takes_them(folder):
    xs, targets, _ = read_arrays("data.npz", None, [])
    options = {
        "stream": False,
        "window": None,
        "loss_at": "all",
        "loss": "mse",
        "model": nn.GRU(3, 2),
    }
    by_time = make_sequences(xs, targets, batch_first=False, **options)
    by_batch = make_sequences(
        xs.swapaxes(0, 1), targets.swapaxes(0, 1), batch_first=True, **options
    )
    assert torch.equal(by_time.xs, by_batch.xs) and torch.equal(by_time.targets, by_batch.targets)
    batch = by_time.pick(torch.tensor([4, 1]), batch_first=True)
    assert batch[0].shape == (2, 6, 3) and torch.equal(batch[0][0], by_time.xs[:, 4])


@pytest.mark.parametrize("maker", ["make_model", "make_batch_first"])
def test_sequences_of_different_lengths(capsys, folder, maker):
    """One update and the loss after it are torch's, whatever stands behind a sequence's end."""
    swap = (lambda x: x.swapaxes(0, 1)) if maker == "make_batch_first" else (lambda x: x)
    xs, targets = np.load("data.npz").values()
    lengths = np.array([6, 2, 1, 5, 3, 6, 4, 2, 6, 1])
    mask = np.arange(6)[:, None] < lengths
    padded = {"xs": swap(xs), "targets": swap(np.where(mask[..., None], targets, np.nan))}
    np.savez("lengths.npz", **padded, lengths=lengths)
    np.savez("mask.npz", **padded, mask=swap(mask))

    def masked_loss(model):
        outputs = swap(model(torch.tensor(swap(xs)).float()))
        return (outputs - torch.tensor(targets).float())[torch.tensor(mask)].square().mean()

    model = load_model(f"models.py:{maker}")
    masked_loss(model).backward()
    with torch.no_grad():
        for p in model.parameters():
            p -= 0.5 * p.grad
    settings = ("--rule", "bptt", "--chunk", "6", "--optimizer", "sgd", "--lr", "0.5")
    train = ("train", f"models.py:{maker}", *settings, "--epochs", "1", "--output", "trained")
    status, _, err = run(capsys, *train, "--data", "lengths.npz")
    assert status == 0, err
    found = safetensors.torch.load_file("trained.safetensors")
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
    for file in ("lengths.npz", "mask.npz"):  # batches that count differently much
        some = ("--data", file, "--batch", "4", "--checkpoint", "trained", "--json")
        status, out, err = run(capsys, "evaluate", f"models.py:{maker}", *some)
        assert status == 0, err
        assert json.loads(out)["loss"] == pytest.approx(float(masked_loss(model).detach()), 1e-5)


def test_the_last_step_is_the_last_that_the_mask_leaves(folder):
    options = {"stream": False, "window": None, "batch_first": False, "loss": "cross_entropy"}
    labels = np.load("labels.npy")
    mask = np.arange(6)[:, None] < np.arange(1, 11).clip(max=6)
    sequences = make_sequences(
        np.load("xs.npy"), labels, loss_at="last", model=nn.GRU(3, 2), mask=mask, **options
    )
    last = sequences.mask
    assert last.sum(0).tolist() == [1] * 10 and last.argmax(0).tolist() == [0, 1, 2, 3, 4, *[5] * 5]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"mask": np.ones((6, 9))}, "`mask` has shape (6, 9), time first"),
        ({"mask": np.full(6, np.nan)}, "`mask` in 'own.npz' must be finite numbers"),
        ({"lengths": np.ones(9, int)}, "the number of steps of each sequence: 10 whole numbers"),
        ({"lengths": np.full(10, 7)}, "`lengths` has 7 steps, but the batch has only 6"),
        ({"lengths": np.zeros(10, int)}, "The mask in 'own.npz' leaves no step"),
    ],
)
def test_masks_that_do_not_fit_are_named(capsys, folder, arrays, message):
    np.savez("own.npz", **np.load("data.npz"), **arrays)
    status, _, err = run(capsys, "train", "models.py:make_model", "--data", "own.npz")
    assert status == 2 and message in err and "Traceback" not in err


# -- long runs ------------------------------------------------------------------------------------

LONG = (
    "models.py:make_model",
    "--data",
    "data.npz",
    "--epochs",
    "3",
    "--batch",
    "3",
    "--validation",
    "0.2",
    "--chunk",
    "2",
    "--lr",
    "0.02",
)


@pytest.fixture
def signal_after(monkeypatch):
    """Sends this process a signal after so many updates."""
    real = eb.OnlineLearner.update

    def arrange(number: int, updates: int) -> None:
        left = [updates]

        def update(self, *args, **options):
            result = real(self, *args, **options)
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)
            return result

        monkeypatch.setattr(eb.OnlineLearner, "update", update)

    return arrange


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_prints_the_line_that_goes_on_with_it(
    capsys, folder, signal_after, monkeypatch, number, status
):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert run(capsys, "train", *LONG, "--output", "whole")[0] == 0
    signal_after(number, 4)  # of 9 updates
    found, out, err = run(capsys, "train", *LONG, "--output", "run/model")
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    assert found == status and out == "" and "Traceback" not in err
    line = next(line.strip() for line in err.splitlines() if "--resume" in line)
    assert line.startswith("python -m etrace_bridge train models.py:make_model") and line.endswith(
        "--resume run/model.safetensors"
    )
    found, out, err = run(capsys, *shlex.split(line)[3:], "--json")
    assert found == 0, err
    result = json.loads(out)
    assert result["updates"] == 9 and [r["epoch"] for r in result["epochs"]] == [1, 2, 3]
    one, two = (checkpoint_files.read_checkpoint(name) for name in ("whole", "run/model"))
    for part in (0, 1):
        assert list(one[part]) == list(two[part]) and all(
            torch.equal(one[part][n], two[part][n]) for n in one[part]
        )
    assert (
        one[2]["history"]["batch_losses"] == two[2]["history"]["batch_losses"]
        and len(set(one[2]["history"]["batch_losses"])) == 9
    )


def test_an_output_that_cannot_be_written_is_found_before_training(capsys, folder, monkeypatch):
    (folder / "file").write_text("")
    monkeypatch.setattr(eb.OnlineLearner, "update", lambda *_: pytest.fail("it trains"))
    for files in (
        ("--output", "file/model"),
        ("--output", "model", "--state-dict", "file/weights.pt"),
    ):
        status, _, err = run(capsys, "train", *LONG, *files)
        assert status == 2 and "cannot be written" in err and "Not a directory" in err
    assert not list(folder.glob("*.safetensors"))


def test_what_was_learned_survives_a_full_disk(capsys, folder, monkeypatch):
    real = checkpoint_files._write

    def write(path, content):
        if path.suffix != ".part" and path.resolve().parent == folder.resolve():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, content)

    monkeypatch.setattr(checkpoint_files, "_write", write)
    monkeypatch.setattr("tempfile.tempdir", str(folder / "elsewhere"))
    (folder / "elsewhere").mkdir()
    status, out, err = run(capsys, "train", *LONG, "--output", "model")
    assert status == 1 and "No space left" in err and "What was learned is in" in err
    monkeypatch.undo()
    path = next(line for line in out.splitlines() if line.startswith("Checkpoint: ")).removeprefix(
        "Checkpoint: "
    )
    assert path.startswith(str(folder / "elsewhere"))
    learner = eb.OnlineLearner.load(
        path,
        load_model(f"{folder}/models.py:make_model"),
        loss=nn.functional.mse_loss,
        optimizer=optax.adam(0.02),
    )
    assert learner.updates == 9


@pytest.mark.parametrize("maker", ["make_model", "make_batch_first"])
def test_evaluate_and_predict_are_what_torch_gives(capsys, folder, maker):
    swap = (lambda x: x.swapaxes(0, 1)) if maker == "make_batch_first" else (lambda x: x)
    held = {name: swap(array) for name, array in np.load("data.npz").items()}
    np.savez("laid.npz", **held)
    common = (f"models.py:{maker}", "--data", "laid.npz", "--batch", "4")
    assert (
        run(
            capsys,
            "train",
            *common,
            "--epochs",
            "1",
            "--output",
            "model",
            "--metric",
            "models.py:worst",
        )[0]
        == 0
    )
    model = load_model(f"models.py:{maker}")
    model.load_state_dict(safetensors.torch.load_file("model.safetensors"))
    with torch.no_grad():
        expected = model(torch.tensor(held["xs"]).float())
        targets = torch.tensor(held["targets"]).float()
    status, out, err = run(
        capsys, "predict", *common, "--checkpoint", "model", "--output", "out.npy"
    )
    assert status == 0, err
    assert out == f"out.npy: {tuple(expected.shape)}\n"
    np.testing.assert_allclose(np.load("out.npy"), expected.numpy(), rtol=1e-5, atol=1e-6)
    status, out, err = run(
        capsys,
        "evaluate",
        *common,
        "--checkpoint",
        "model",
        "--metric",
        "models.py:worst",
        "--json",
    )
    assert status == 0, err
    found = json.loads(out)
    assert found["sequences"] == 10 and found["loss"] == pytest.approx(
        float(nn.functional.mse_loss(expected, targets)), rel=1e-5
    )
    parts = [
        (swap(expected)[:, n : n + 4] - swap(targets)[:, n : n + 4]).abs().max() * min(4, 10 - n)
        for n in (0, 4, 8)
    ]
    assert found["worst"] == pytest.approx(float(sum(parts)) / 10, rel=1e-5)
    for command in ("evaluate", "predict"):
        assert run(capsys, command, f"models.py:{maker}", "--checkpoint", "model")[0] == 2
        status, _, err = run(capsys, command, *common, "--checkpoint", "none")
        assert status == 2 and "There is no checkpoint" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("models.py:make_model",), "--data FILE is missing"),
        (("--data", "data.npz"), "the model, path/to/file.py:name, is missing"),
        (("nowhere.py:make_model", "--data", "data.npz"), "There is no file `nowhere.py`"),
        (("models.py:make_model", "--data", "nothing.npz"), "There is no file `nothing.npz`"),
        (("models.py:make_model", "--data", "models.py"), "data are read from .npy, .npz and .csv"),
        (("models.py:make_model", "--data", "xs.npy"), "Name the targets' file as well"),
        (
            ("models.py:make_model", "--data", "xs.npy", "--targets", "xs.npy", "--window", "2"),
            "`window` cuts one long sequence",
        ),
        (
            ("models.py:make_batch_first", "--data", "xs.npy", "--targets", "labels.npy"),
            "Is the layout of the inputs right?",
        ),
        (
            ("models.py:make_model", "--data", "data.npz", "--rule", "drtrl"),
            "There is no rule 'drtrl'",
        ),
        (
            ("models.py:make_model", "--data", "data.npz", "--loss", "hinge"),
            "There is no loss `hinge`",
        ),
        (
            ("models.py:make_model", "--data", "data.npz", "--optimizer", "lion"),
            "There is no optimizer `lion`",
        ),
        (("models.py:make_model", "--data", "data.npz", "--epochs", "0"), "--epochs is 0"),
        (
            ("models.py:make_model", "--data", "data.npz", "--validation", "0.01"),
            "leaves 10 to learn from and 0 to validate",
        ),
        (
            ("models.py:make_model", "--data", "data.npz", "--resume", "none"),
            "There is no checkpoint",
        ),
        (("--config", "bad.toml"), "has settings that are not known: epoch"),
        (("--config", "worse.toml"), "`epochs` in `worse.toml` is 'ten'"),
        (("--config", "models.py"), "is not a TOML file"),
    ],
)
def test_bad_use_is_explained(capsys, folder, arguments, message):
    (folder / "bad.toml").write_text("epoch = 3\n")
    (folder / "worse.toml").write_text('epochs = "ten"\n')
    status, _, err = run(capsys, "train", *arguments)
    assert status == 2 and message in err and "Traceback" not in err


def test_training_that_becomes_infinite_is_not_ok(capsys, folder):
    arguments = (
        "--data",
        "data.npz",
        "--loss",
        "models.py:my_loss",
        "--optimizer",
        "sgd",
        "--lr",
        "1e20",
        "--epochs",
        "3",
    )
    status, _, err = run(capsys, "train", "models.py:make_model", *arguments)
    assert status == 1 and "Traceback" not in err and ("NaN" in err or "infinite" in err)


def test_bench_of_the_built_in_gru(capsys):
    arguments = (
        "--input",
        "2,3",
        "--hidden",
        "4",
        "--steps",
        "6",
        "--repeats",
        "2",
        "--rule",
        "d_rtrl",
        "--chunk",
        "3",
        "--json",
    )
    status, out, err = run(capsys, "bench", *arguments)
    assert status == 0, err
    result = json.loads(out)
    torch_row, rule_row = result["rows"]
    assert (torch_row["name"], rule_row["name"], rule_row["chunk"]) == ("torch BPTT", "d_rtrl", 3)
    assert torch_row["time_ratio"] == 1 and rule_row["time_ratio"] == pytest.approx(
        rule_row["seconds"] / torch_row["seconds"]
    )
    weights = sum(p.numel() * 4 for p in nn.GRU(3, 4).parameters()) + (4 * 10 + 10) * 4
    # a float for each weight and batch element
    trace = 2 * 4 * sum(p.numel() for p in nn.GRU(3, 4).parameters())
    assert torch_row["memory"] > 2 * weights and rule_row["memory"] > 2 * weights + trace


def test_torch_memory_grows_with_the_sequence(capsys):
    def memory(steps: int) -> int:
        arguments = (
            "--input",
            "2,3",
            "--hidden",
            "4",
            "--steps",
            str(steps),
            "--repeats",
            "1",
            "--rule",
            "bptt",
            "--json",
        )
        return json.loads(run(capsys, "bench", *arguments)[1])["rows"][0]["memory"]

    by_step = (memory(50) - memory(10)) / 40, (memory(90) - memory(50)) / 40
    assert by_step[0] > 2 * 4 * 4  # at least a state of 4 floats for both sequences
    assert by_step[1] == pytest.approx(by_step[0], rel=0.1)


def test_bench_of_a_model_of_ones_own(capsys, folder):
    arguments = (
        "--input",
        "2,3",
        "--steps",
        "6",
        "--repeats",
        "1",
        "--rule",
        "pp_prop",
        "--loss",
        "cross_entropy",
    )
    status, out, err = run(capsys, "bench", "models.py:make_batch_first", *arguments)
    assert status == 0, err
    assert "gradients of 6 steps of 2 x 3" in out and "pp_prop" in out and "torch BPTT" in out
    status, _, err = run(capsys, "bench", "models.py:make_model")
    assert status == 2 and "--input is missing" in err


# -- brainstate modules ---------------------------------------------------------------------------

MODULE = """
import brainstate
import jax.numpy as jnp


class Net(brainstate.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = brainstate.nn.Linear(3, 4), brainstate.nn.Linear(4, 2)
        self.recurrent = brainstate.nn.Linear(4, 4)

    def init_state(self, batch_size, **_):
        self.h = brainstate.HiddenState(jnp.zeros((batch_size, 4)))

    def update(self, x):
        self.h.value = jnp.tanh(self.inner(x) + self.recurrent(self.h.value))
        return self.out(self.h.value)


def squared(output, target):
    return jnp.mean((output - target) ** 2)
"""


def by_hand(weights, xs):
    """Outputs of `module.py:Net`, written out."""
    h, outputs = jnp.zeros((xs.shape[1], 4)), []
    inner, recurrent, out = (weights[name, "weight"] for name in ("inner", "recurrent", "out"))
    for x in xs:
        h = x @ inner["weight"] + inner["bias"] + h @ recurrent["weight"] + recurrent["bias"]
        h = jnp.tanh(h)
        outputs.append(h @ out["weight"] + out["bias"])
    return jnp.stack(outputs)


@pytest.mark.implicit_promotion("as users write their modules")
def test_a_brainstate_module_trains_as_by_hand(capsys, folder):
    """One update by exact gradients, next to `jax.grad` through a plain loop over time."""
    (folder / "module.py").write_text(MODULE)
    held = np.load("data.npz")
    xs, targets = (jnp.asarray(held[name], jnp.float32) for name in ("xs", "targets"))

    def loss(weights):
        return jnp.mean((by_hand(weights, xs) - targets) ** 2)

    states = load_net("module.py:Net").states(brainstate.ParamState)
    start = {path: state.value for path, state in states.items()}
    moved = jax.tree.map(lambda w, g: w - 0.2 * g, start, jax.grad(loss)(start))
    assert loss(moved) < 0.99 * loss(start), "nothing is learned: nothing is compared"
    common = ("module.py:Net", "--data", "data.npz", "--loss", "module.py:squared")
    flags = ("--rule", "rtrl", "--optimizer", "sgd", "--lr", "0.2", "--epochs", "1")
    status, out, err = run(capsys, "train", *common, *flags, "--output", "model", "--json")
    assert status == 0, err
    np.testing.assert_allclose(json.loads(out)["epochs"][0]["loss"], loss(start), rtol=1e-5)
    status, out, err = run(capsys, "evaluate", *common, "--checkpoint", "model", "--json")
    assert status == 0, err
    np.testing.assert_allclose(json.loads(out)["loss"], loss(moved), rtol=1e-5)
    status, out, err = run(capsys, "predict", *common[:3], "--checkpoint", "model")
    assert status == 0, err
    np.testing.assert_allclose(np.load("predictions.npy"), by_hand(moved, xs), atol=1e-5)

    status, _, err = run(capsys, "train", *common, "--state-dict", "w.pt", "--epochs", "1")
    assert status == 2 and "--state-dict is for torch modules" in err
    for command in ("explain", "recommend --rule d_rtrl", "check --rule rtrl --steps 3"):
        status, out, err = run(capsys, *command.split(), "module.py:Net", "--input", "2,3")
        assert status == 0 and len(out.splitlines()) > 3, out + err


def test_damaged_data_are_named(tmp_path) -> None:
    """Without NumPy's advice to unpickle them."""
    fine = tmp_path / "fine.npz"
    np.savez(fine, x=np.zeros((4, 2, 3)), y=np.zeros((4, 2, 2)))
    changed = fine.read_bytes()
    (tmp_path / "cut.npz").write_bytes(changed[: len(changed) // 2])
    (tmp_path / "text.npz").write_bytes(b"nonsense")
    np.savez(tmp_path / "objects.npz", x=np.array([{}], dtype=object), y=np.zeros(1))
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("cut.npz", "text.npz", "objects.npz", "empty.npy"):
        targets = str(fine) if name.endswith("npy") else None
        with pytest.raises(eb.InputError, match=f"'{name}' cannot be read") as caught:
            read_arrays(str(tmp_path / name), targets, [])
        assert "allow_pickle" not in str(caught.value)
