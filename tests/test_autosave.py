"""Checkpoints that `fit` writes: a resumed run ends bit for bit where an uninterrupted one does,
and no disk stops a training.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import numpy as np
import optax
import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import etrace_bridge as eb
from etrace_bridge.learning import checkpoint_files
from learner_models import B, make_data, make_net
from test_checkpoint import assert_equal, everything

TIMES = ("seconds", "steps_per_second")


class Stop:
    """Interrupts at the n-th call."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class Sequences(TensorDataset):
    """Single sequences of 12, each read with some noise, as an augmentation does."""

    def __init__(self, read) -> None:
        xs, ys = make_data(batch=4 * B)
        super().__init__(xs.transpose(0, 1), ys.transpose(0, 1))
        self.read = read

    def __getitem__(self, index):
        self.read()
        x, y = super().__getitem__(index)
        return x + 0.1 * torch.randn(()) + 0.1 * np.random.randn(), y


def collate(items: list) -> tuple[torch.Tensor, torch.Tensor]:
    xs, ys = zip(*items, strict=True)
    return torch.stack(xs, 1), torch.stack(ys, 1)


def nothing() -> None:
    pass


def run(
    path: Path,
    resume: bool,
    *,
    read=nothing,
    validate=nothing,
    call=nothing,
    seed: int = 1,
    epochs: int = 4,
) -> eb.OnlineLearner:
    """A run with everything that has a state: shuffling, noise, dropout, momenta, accumulation, a
    scheduler, early stopping, metrics.
    """
    torch.manual_seed(seed)
    np.random.seed(seed)
    model = make_net(dropout=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    options = {
        "rule": "bptt",
        "loss": mse_loss,
        "optimizer": optimizer,
        "accumulate": 3,
        "seed": 5,
        "track_norm": True,
    }
    if resume:
        learner = eb.OnlineLearner.load(
            path, model, **{k: v for k, v in options.items() if k != "rule"}
        )
        # made after the load
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=3)
    else:
        learner = eb.OnlineLearner(model, **options)

    def validation(given: eb.OnlineLearner) -> float:
        validate()
        epoch = given.history.epochs[-1]["epoch"]
        return [2.0, 3.0, 2.5, 1.0][epoch - 1] + float(torch.rand(()))

    loader = DataLoader(Sequences(read), batch_size=B, shuffle=True, collate_fn=collate)
    learner.fit(
        loader, epochs, validation=validation, early_stopping=eb.EarlyStopping(patience=5), scheduler=scheduler,
        metrics={"mean": lambda output, target: output.mean()}, callbacks=[lambda *_: call()], checkpoint=path, resume=True,
    )  # fmt: skip
    return learner


def assert_same_run(found: eb.OnlineLearner, expected: eb.OnlineLearner) -> None:
    assert_equal(everything(found), everything(expected))
    assert (found.steps, found.updates) == (expected.steps, expected.updates)
    plain = [{k: v for k, v in record.items() if k not in TIMES} for record in found.history.epochs]
    assert plain == [
        {k: v for k, v in record.items() if k not in TIMES} for record in expected.history.epochs
    ]
    assert (
        found.history.batch_losses == expected.history.batch_losses
        and found.history.stopped == expected.history.stopped
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> eb.OnlineLearner:
    """The run that nothing interrupts."""
    learner = run(tmp_path_factory.mktemp("whole") / "run", resume=False)
    assert len(learner.history) == 4 and len(set(learner.history.batch_losses)) == 16
    assert (
        len(set(learner.history["gradient_norm"])) == 4
        and min(learner.history["gradient_norm"]) > 0
    )
    return learner


MOMENTS = {
    "in the middle of an epoch": {"read": Stop(4 * B + 2 * B + 2)},
    "in the validation": {"validate": Stop(2)},
    "in a callback": {"call": Stop(3)},
    "in the first batch of an epoch": {"read": Stop(4 * B + 1)},
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_resumed_run_is_the_uninterrupted_one(moment, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt) as caught:
        run(tmp_path / "run", resume=False, **MOMENTS[moment])
    assert any("Saved in" in note and "resume=True" in note for note in caught.value.__notes__)
    assert_same_run(run(tmp_path / "run", resume=True, seed=77), whole)


def test_a_finished_run_can_be_extended_and_is_not_trained_again(whole, tmp_path):
    run(tmp_path / "run", resume=False, epochs=1)
    extended = run(tmp_path / "run", resume=True, seed=77)
    assert_same_run(extended, whole)
    again = run(tmp_path / "run", resume=True, seed=78)
    assert_same_run(again, whole)


# -- when it saves --------------------------------------------------------------------------------

BATCHES = [make_data(seed=n) for n in range(4)]


@pytest.fixture(scope="module")
def shared() -> eb.OnlineLearner:
    return eb.OnlineLearner(make_net(), rule="bptt", loss=mse_loss, optimizer=optax.sgd(0.1))


def saves_of(learner: eb.OnlineLearner, monkeypatch) -> list[int]:
    """The numbers of batches done at each save."""
    found, real = [], learner.save
    monkeypatch.setattr(
        learner, "save", lambda path: found.append(len(learner.history.batch_losses)) or real(path)
    )
    return found


def test_it_saves_after_updates_or_minutes_and_at_the_end(shared, tmp_path, monkeypatch):
    saves = saves_of(shared, monkeypatch)
    shared.fit(BATCHES, 2, checkpoint=eb.Checkpoints(tmp_path / "a", minutes=None, updates=3))
    assert saves == [3, 6, 8]
    clock = iter(range(0, 10**6, 61))
    monkeypatch.setattr("etrace_bridge.learning.autosave.time.monotonic", lambda: next(clock))
    saves.clear()
    shared.fit(BATCHES, 1, checkpoint=eb.Checkpoints(tmp_path / "a", minutes=1))
    assert saves == [1, 2, 3, 4, 4]
    saves.clear()
    shared.fit(BATCHES, 1)
    assert saves == []
    for wrong in ({"minutes": 0}, {"updates": -1}):
        with pytest.raises(eb.InputError, match="must be positive"):
            eb.Checkpoints("x", **wrong)


def test_sigterm_saves_and_ends_the_process_in_order(shared, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    assert before is signal.SIG_DFL
    with pytest.raises(SystemExit) as caught:
        shared.fit(
            BATCHES,
            5,
            callbacks=[lambda *_: os.kill(os.getpid(), signal.SIGTERM)],
            checkpoint=tmp_path / "run",
        )
    assert caught.value.code == 143 and shared.history.stopped == "SystemExit"
    assert signal.getsignal(signal.SIGTERM) is before
    loaded = eb.OnlineLearner.load(
        tmp_path / "run", make_net(), loss=mse_loss, optimizer=optax.sgd(0.1)
    )
    assert_equal(everything(loaded), everything(shared))
    assert loaded.place_in_fit.epoch == 1 and loaded.place_in_fit.stage == "callbacks"


def test_an_unwritable_path_is_reported_before_training(shared, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder.safetensors" / "model.safetensors").mkdir(parents=True)
    updates = shared.updates
    for path in (tmp_path / "file" / "run", tmp_path / "folder"):
        with pytest.raises(eb.CheckpointError, match="cannot be written"):
            shared.fit(
                BATCHES, checkpoint=path if path.name == "run" else tmp_path / "folder.safetensors"
            )
    assert shared.updates == updates
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder.safetensors"]


def full_disk(monkeypatch, after: int) -> None:
    """From now on, a file takes so many bytes and no more."""

    def write(path: Path, content: bytes) -> None:
        path.write_bytes(content[:after])
        if len(content) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint_files, "_write", write)


@pytest.mark.parametrize("after", [100, 4000])
def test_a_full_disk_loses_nothing(shared, tmp_path, monkeypatch, after):
    shared.fit(BATCHES[:1], checkpoint=tmp_path / "run")
    old = everything(shared)
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    full_disk(monkeypatch, after)
    with (
        pytest.warns(RuntimeWarning, match=r"No space left.*unchanged.*Training goes on"),
        pytest.raises(eb.CheckpointError) as caught,
    ):
        shared.fit(BATCHES, 2, checkpoint=eb.Checkpoints(tmp_path / "run", updates=3))
    assert "No space left" in str(caught.value)
    # all of it was trained
    assert len(shared.history.batch_losses) == 8 and shared.history["complete"] == [True, True]
    # nothing half-written, nothing lost
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == files
    monkeypatch.undo()
    loaded = eb.OnlineLearner.load(
        tmp_path / "run", make_net(), loss=mse_loss, optimizer=optax.sgd(0.1)
    )
    assert_equal(everything(loaded), old)
    shared.save(tmp_path / "run")  # and with room again, what was learned is there
    loaded = eb.OnlineLearner.load(
        tmp_path / "run", make_net(), loss=mse_loss, optimizer=optax.sgd(0.1)
    )
    assert_equal(everything(loaded), everything(shared))


def test_a_file_that_grows_too_large_for_the_system(shared, tmp_path):
    resource = pytest.importorskip("resource")
    path = shared.save(tmp_path / "run")
    files = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        with pytest.raises(eb.CheckpointError, match="File too large"):
            shared.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == files


def test_training_that_becomes_infinite_does_not_replace_the_checkpoint(shared, tmp_path):
    shared.fit(BATCHES, checkpoint=tmp_path / "run")
    good = (tmp_path / "run.safetensors").read_bytes()
    with pytest.raises(eb.NonFiniteError):
        shared.fit(
            [BATCHES[0], (BATCHES[1][0] * torch.inf, BATCHES[1][1])], checkpoint=tmp_path / "run"
        )
    assert (tmp_path / "run.safetensors").read_bytes() == good


def test_data_that_changed_are_noticed(shared, tmp_path):
    def interrupted():
        yield from BATCHES[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shared.fit(interrupted, checkpoint=tmp_path / "run")
    loaded = eb.OnlineLearner.load(
        tmp_path / "run", make_net(), loss=mse_loss, optimizer=optax.sgd(0.1)
    )
    with pytest.raises(
        eb.InputError, match="had done 3 batches of epoch 1, but `batches` now gives 2"
    ):
        loaded.fit(BATCHES[:2], resume=True)


def test_a_stream_is_read_on_from_where_it_is(shared, tmp_path):
    shared.fit(iter(BATCHES), epochs=2, max_batches=1, checkpoint=tmp_path / "run")
    loaded = eb.OnlineLearner.load(
        tmp_path / "run", make_net(), loss=mse_loss, optimizer=optax.sgd(0.1)
    )
    rest = iter(BATCHES[2:])
    loaded.fit(rest, epochs=4, max_batches=1, resume=True)
    assert next(rest, None) is None and [r["epoch"] for r in loaded.history.epochs] == [1, 2, 3, 4]
