"""`fit`: what it reads, what it records, when it ends, and what is left when something breaks."""

from __future__ import annotations

import io
import math
import os
import re
import signal
from collections.abc import Iterator

import numpy as np
import optax
import pytest
import torch
from rich.console import Console
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import etrace_bridge as eb
from etrace_bridge.learning import fit as fit_module
from etrace_bridge.learning import progress
from etrace_bridge.learning.progress import TerminalLine, describe, resident_memory
from learner_models import B, T, assert_same, make_data, make_net, torch_gradients

BATCHES = [make_data(seed=n) for n in range(4)]


@pytest.fixture(scope="module")
def shared() -> eb.OnlineLearner:
    """One learner whose programs are compiled once; `fresh` starts it anew."""
    return eb.OnlineLearner(make_net(), rule="bptt", loss=mse_loss, optimizer=optax.sgd(0.1))


@pytest.fixture
def learner(shared: eb.OnlineLearner) -> eb.OnlineLearner:
    shared.net.load_state_dict(make_net().state_dict())
    shared.history = None
    return shared


def weights(learner: eb.OnlineLearner) -> dict[str, torch.Tensor]:
    return {name: t.clone() for name, t in learner.net.state_dict().items()}


def by_hand(learner: eb.OnlineLearner, batches) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights and losses after a plain loop from the first weights."""
    learner.net.load_state_dict(make_net().state_dict())
    losses = [learner.update(*batch).loss for batch in batches]
    found = weights(learner)
    learner.net.load_state_dict(make_net().state_dict())
    return found, losses


def generate() -> Iterator:
    yield from BATCHES


def collate(items: list) -> tuple[torch.Tensor, torch.Tensor]:
    xs, ys = zip(*items, strict=True)
    return torch.stack(xs, 1), torch.stack(ys, 1)


def loader() -> DataLoader:
    """The same batches from a data set of single sequences."""
    xs, ys = (torch.cat([pair[n] for pair in BATCHES], 1).transpose(0, 1) for n in (0, 1))
    return DataLoader(TensorDataset(xs, ys), batch_size=B, collate_fn=collate)


SOURCES = {
    "list": lambda: BATCHES,
    "generator": generate,
    "function": lambda: generate,
    "dicts": lambda: [{"xs": x, "targets": y} for x, y in BATCHES],
    "numpy": lambda: [[x.numpy(), y.numpy()] for x, y in BATCHES],
    "loader": loader,
    "masked": lambda: ((x, y, torch.ones(T)) for x, y in BATCHES),
}


@pytest.mark.parametrize("source", SOURCES)
def test_any_iterable_trains_like_a_loop_of_updates(learner, source):
    expected, losses = by_hand(learner, BATCHES)
    steps = learner.steps
    history = learner.fit(SOURCES[source]())
    assert history is learner.history
    assert_same(weights(learner), expected, 1e-12)
    assert np.allclose(history.batch_losses, losses, rtol=1e-12)
    (record,) = history.epochs
    assert record["loss"] == pytest.approx(sum(losses) / 4) and history["loss"] == [record["loss"]]
    assert record["batches"] == 4 and record["steps"] == 4 * T == learner.steps - steps
    assert record["complete"] and record["seconds"] > 0 and record["steps_per_second"] > 0
    assert history.stopped == "" and len(history) == 1


def test_batch_first_loader_needs_no_collate():
    xs, ys = make_data()
    model, plain = make_net(batch_first=True), make_net()
    data = DataLoader(TensorDataset(xs.transpose(0, 1), ys.transpose(0, 1)), batch_size=B)
    learner = eb.OnlineLearner(model, rule="bptt", loss=mse_loss, optimizer=optax.sgd(0.1))
    found = learner.fit(data, epochs=2).batch_losses
    other = eb.OnlineLearner(plain, rule="bptt", loss=mse_loss, optimizer=optax.sgd(0.1))
    assert np.allclose(found, other.fit([(xs, ys)], epochs=2).batch_losses, rtol=1e-12)


def test_epochs_validation_and_callbacks(learner):
    seen = []

    def stop_after_two(given, record):
        seen.append((given, record["epoch"], record["validation_loss"]))
        return record["epoch"] == 2

    held_out = [make_data(seed=9), make_data(seed=10)]
    history = learner.fit(
        BATCHES,
        epochs=5,
        validation=held_out,
        callbacks=[stop_after_two, lambda *_: seen.append("last")],
    )
    assert [e["epoch"] for e in history.epochs] == [1, 2]
    assert "callback" in history.stopped and "epoch 2" in history.stopped
    assert [s for s in seen if s == "last"] == ["last"] * 2  # the one after it still ran
    assert history["loss"][1] < history["loss"][0]
    assert history["validation_loss"][-1] == pytest.approx(learner.evaluate(held_out), rel=1e-12)
    assert seen[0][0] is learner and seen[2][1:] == (2, history["validation_loss"][1])
    before = weights(learner)
    learner.evaluate(held_out)
    assert_same(weights(learner), before, 0)
    named = learner.fit(
        BATCHES[:1], validation=lambda given: {"accuracy": 0.25, "right": given is learner}
    )
    assert named["accuracy"] == [0.25] and named["right"] == [True]


def test_early_stopping_keeps_the_best_weights(learner):
    numbers = iter([3.0, 1.0, 2.0, 1.5, 0.1])
    kept: list[dict] = []
    history = learner.fit(
        BATCHES[:1], epochs=5, validation=lambda given: next(numbers), early_stopping=2,
        callbacks=[lambda given, record: kept.append(weights(given))],
    )  # fmt: skip
    assert history["validation_loss"] == [3.0, 1.0, 2.0, 1.5]
    assert history.stopped == "no improvement of validation_loss for 2 epochs"
    assert_same(weights(learner), kept[1], 0)
    with pytest.raises(AssertionError):
        assert_same(kept[3], kept[1], 1e-6)  # training had gone on from there


def test_early_stopping_upwards_with_a_least_change(learner):
    numbers = iter([0.5, 0.52, 0.9, 0.9])
    rule = eb.EarlyStopping(
        patience=1, monitor="accuracy", min_delta=0.1, mode="max", restore=False
    )
    history = learner.fit(
        BATCHES[:1],
        epochs=4,
        validation=lambda given: {"accuracy": next(numbers)},
        early_stopping=rule,
    )
    assert history["accuracy"] == [0.5, 0.52]  # 0.02 does not count
    with pytest.raises(
        eb.InputError, match=r"watches 'recall', but an epoch's record has only: epoch, loss"
    ):
        learner.fit(BATCHES[:1], early_stopping=eb.EarlyStopping(monitor="recall"))
    with pytest.raises(eb.InputError, match="must be 'min' or 'max'"):
        eb.EarlyStopping(mode="up")


def test_nan_is_not_an_improvement(learner):
    history = learner.fit(
        BATCHES[:1], epochs=6, validation=lambda given: math.nan, early_stopping=2
    )
    assert len(history) == 2


@pytest.mark.implicit_promotion("optax's schedules promote")
def test_schedulers_of_torch_and_optax_schedules():
    model, plain = make_net(), make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    learner = eb.OnlineLearner(model, rule="bptt", loss=mse_loss, optimizer=optimizer)
    learner.fit(
        BATCHES[:2], epochs=3, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    )
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    own = torch.optim.SGD(plain.parameters(), lr=0.4)
    for factor in (1, 0.5, 0.25):
        own.param_groups[0]["lr"] = 0.4 * factor
        for batch in BATCHES[:2]:
            torch_gradients(plain, *batch)
            own.step()
    expected = plain.state_dict()
    assert_same(weights(learner), expected, 1e-10)
    schedule = optax.piecewise_constant_schedule(1.0, {2: 0.5, 4: 0.5})
    other = eb.OnlineLearner(
        make_net(), rule="bptt", loss=mse_loss, optimizer=optax.sgd(0.4), schedule=schedule
    )
    other.fit(BATCHES[:2], epochs=3)
    assert_same(weights(other), expected, 1e-10)


def test_a_plateau_scheduler_sees_the_validation():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    learner = eb.OnlineLearner(model, rule="bptt", loss=mse_loss, optimizer=optimizer)
    learner.fit(BATCHES[:1], epochs=2, scheduler=plateau, validation=lambda given: 1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.04)


def test_clipping_and_accumulation_of_batches():
    plain = make_net()
    own = torch.optim.SGD(plain.parameters(), lr=0.5)
    for pair in (BATCHES[:2], BATCHES[2:]):
        first, second = (torch_gradients(plain, *batch) for batch in pair)
        for name, p in plain.named_parameters():
            p.grad = (first[name] + second[name]) / 2
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1) > 0.1
        own.step()
    learner = eb.OnlineLearner(
        make_net(),
        rule="bptt",
        loss=mse_loss,
        optimizer=optax.sgd(0.5),
        accumulate=2,
        clip_norm=0.1,
    )
    learner.fit(BATCHES)
    assert_same(weights(learner), plain.state_dict(), 1e-10)


def test_batches_that_continue_one_another(learner):
    xs, ys = make_data(steps=2 * T)
    learner.fit([(xs[:T], ys[:T]), (xs[T:], ys[T:])], carry=True)
    hidden = np.asarray(learner.net.hidden_values()[0])
    learner.reset()
    assert np.abs(hidden).max() > 0.01
    assert not np.asarray(learner.net.hidden_values()[0]).any()
    learner.fit([(xs[:T], ys[:T]), (xs[T:], ys[T:])])
    assert not np.asarray(learner.net.hidden_values()[0]).any()


def test_streams_are_cut_into_epochs(learner):
    read = []

    def endless():
        while True:
            read.append(1)
            yield BATCHES[len(read) % 4]

    history = learner.fit(endless(), epochs=3, max_batches=2)
    assert history["batches"] == [2, 2, 2] and len(read) == 6


def test_what_fit_refuses(learner):
    with pytest.raises(
        eb.InputError, match=r"generator, which can be read only once, but there are 2 epochs"
    ):
        learner.fit(generate(), epochs=2)
    with pytest.raises(eb.InputError, match="`epochs` is 0"):
        learner.fit(BATCHES, epochs=0)
    with pytest.raises(eb.InputError, match="gave nothing in epoch 1"):
        learner.fit([])
    with pytest.raises(
        eb.InputError, match=r"A batch is a Tensor of 6; it must be `\(xs, targets\)`"
    ):
        learner.fit([BATCHES[0][0]])
    with pytest.raises(eb.InputError, match="no batch to evaluate"):
        learner.fit(BATCHES[:1], validation=[])
    assert learner.history.stopped == "InputError" and learner.history["loss"]


def test_a_loader_that_raises_midway(learner):
    def broken():
        yield from BATCHES[:2]
        raise OSError("the disk is gone")

    expected, losses = by_hand(learner, BATCHES[:2])
    with pytest.raises(OSError, match="the disk is gone") as caught:
        learner.fit(broken)
    assert any("epoch 1, after 2 batches" in note for note in caught.value.__notes__)
    history = learner.history
    assert history.stopped == "OSError" and np.allclose(history.batch_losses, losses)
    assert history.epochs[0]["batches"] == 2 and not history.epochs[0]["complete"]
    assert_same(weights(learner), expected, 1e-12)
    learner.fit(BATCHES[2:])  # and it goes on
    assert_same(weights(learner), by_hand(learner, BATCHES)[0], 1e-12)


@pytest.mark.parametrize(
    "moment", ["in the loader", "in an update", "in the validation", "in a callback"]
)
def test_ctrl_c_leaves_a_whole_learner_and_its_history(learner, moment, monkeypatch):
    expected, losses = by_hand(learner, BATCHES[:2])
    press = lambda: os.kill(os.getpid(), signal.SIGINT)
    handler = signal.default_int_handler  # a process in the background starts with Ctrl-C ignored
    signal.signal(signal.SIGINT, handler)

    def batches():
        yield from BATCHES[:2] if moment != "in an update" else BATCHES[:1]
        if moment == "in an update":
            inner = learner.runtime.store.refresh_numbers
            monkeypatch.setattr(
                learner.runtime.store, "refresh_numbers", lambda: (press(), inner())
            )
            yield BATCHES[1]
            yield BATCHES[2]
        if moment == "in the loader":
            press()
            yield BATCHES[2]

    options = {}
    if moment == "in the validation":
        options["validation"] = lambda given: press() or 1.0
    if moment == "in a callback":
        options["callbacks"] = [lambda *_: press()]
    with pytest.raises(KeyboardInterrupt):
        learner.fit(batches, epochs=2, **options)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is handler
    assert learner.history.stopped == "KeyboardInterrupt"
    assert (
        np.allclose(learner.history.batch_losses, losses)
        and learner.history.epochs[0]["batches"] == 2
    )
    assert_same(weights(learner), expected, 1e-12)
    assert np.isfinite(learner.update(*BATCHES[2]).loss)


def test_a_log_has_one_plain_line_for_each_epoch(learner, capfd):
    learner.fit(BATCHES, epochs=2, validation=BATCHES[:1], progress=True)
    first, *lines = capfd.readouterr().err.splitlines()
    assert first == "compiling …" and len(lines) == 2
    for epoch, (record, line) in enumerate(
        zip(learner.history.epochs, lines, strict=True), start=1
    ):
        assert line.startswith(
            f"epoch {epoch}/2  loss {record['loss']:.4g}  validation_loss "
            f"{record['validation_loss']:.4g}  "
        )
        assert re.search(r"  [\d,]+ steps/s  [\d,]+ MB  [\d.]+ s$", line) and "\x1b" not in line
    learner.fit(BATCHES[:1])
    assert capfd.readouterr().err == ""  # nobody is watching


def test_a_terminal_has_one_live_line_however_many_epochs(learner, monkeypatch):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, width=200, color_system=None)
    made = []
    monkeypatch.setattr(
        fit_module, "open_progress", lambda show: made.append(TerminalLine(console)) or made[0]
    )
    learner.fit(
        [*BATCHES[:1], (BATCHES[0][0][:, :2], BATCHES[0][1][:, :2])], epochs=30, metrics="accuracy"
    )
    (task,) = made[0]._bar.tasks  # a task for each epoch would make drawing slower and slower
    assert task.completed == 2 and task.fields["epoch"] == "30/30"
    text = shown.getvalue()
    finished = [
        line
        for line in re.split(r"[\r\n]|\x1b\[\d*[A-Za-z]", text)
        if re.match(r"epoch \d+/30  loss", line)
    ]
    assert [line.split()[1] for line in finished] == [f"{n}/30" for n in range(1, 31)]
    assert all(
        re.search(r"accuracy [\d.]+  [\d,]+ steps/s  [\d,]+ MB  [\d.]+ s$", line.rstrip())
        for line in finished
    )


def test_the_live_line_shows_the_stage():
    console = Console(file=io.StringIO(), force_terminal=True, width=200, color_system=None)
    line, record = TerminalLine(console), {"loss": math.nan, "batches": 0}
    line.start_epoch(1, 5, 10, record)
    line.say("compiling …")
    draw = lambda: "".join(segment.text for segment in console.render(line._bar.get_renderable()))
    assert "epoch 1/5" in draw() and "compiling …" in draw() and "loss" not in draw()
    record.update(loss=0.25, batches=3, steps_per_second=10.0)
    line.say("")
    line.advance(record)
    assert "3/10" in draw() and "loss 0.25" in draw() and "compiling" not in draw()


def test_a_notebook_has_a_line_that_is_drawn_anew(learner, monkeypatch, capsys):
    drawn = []

    class Handle:
        def update(self, content, raw):
            drawn.append(content["text/plain"])

    monkeypatch.setattr(
        progress, "notebook_display", lambda: lambda content, raw, display_id: Handle()
    )
    learner.fit(BATCHES, epochs=3)
    assert (
        any(re.match(r"epoch \d/3  \d/4  loss", text) for text in drawn)
        and "epoch 1/3  compiling …" in drawn
        and drawn[-1] == ""
    )
    assert len(drawn) < 3 * len(BATCHES)  # not for every batch
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [
        "1/3",
        "2/3",
        "3/3",
    ]


# -- metrics --------------------------------------------------------------------------------------


def test_metrics_of_training_and_validation(learner):
    """Training metrics are those of the outputs before each update, validation metrics those after
    the epoch; each by hand in torch.
    """

    def outputs() -> torch.Tensor:
        model = make_net()
        model.load_state_dict(learner.net.state_dict())
        with torch.no_grad():
            return model(xs)

    (xs, ys), mask = BATCHES[0], torch.tensor([0.0, 1.0, 0.0, 2.0, 0.5, 0.0], dtype=torch.float64)
    kept = mask != 0
    before = outputs()
    mean_error = lambda output, target: (output - target).abs().mean()
    history = learner.fit(
        [(xs, ys, mask)],
        validation=[(xs, ys, mask), (xs, ys)],
        metrics={"mae": mean_error, "sign": "accuracy"},
    )
    after = outputs()
    (record,) = history.epochs
    assert record["mae"] == pytest.approx(float((before[kept] - ys[kept]).abs().mean()), rel=1e-9)
    assert record["sign"] == pytest.approx(
        float(((before[kept] > 0) == (ys[kept] > 0.5)).double().mean())
    )
    error = (after - ys).abs()
    assert record["validation_mae"] == pytest.approx(
        float((error[kept].sum() + error.sum()) / (error[kept].numel() + error.numel())), rel=1e-9
    )
    assert record["validation_mae"] != record["mae"] and 0 < record["sign"] < 1


def test_accuracy_of_classes():
    model = make_net(torch.float32)
    learner = eb.OnlineLearner(
        model, rule="bptt", loss=torch.nn.functional.cross_entropy, optimizer=optax.sgd(0.1)
    )
    xs, ys = make_data(dtype=torch.float32)
    labels = (ys[..., 0] > 0).long()
    with torch.no_grad():
        expected = (model(xs).argmax(2) == labels).double().mean()
    history = learner.fit([(xs, labels)], metrics="accuracy")
    assert history["accuracy"] == [pytest.approx(float(expected))] and 0 < expected < 1


def test_what_metrics_refuse(learner):
    for metrics, message in (
        ("recall", "There is no metric 'recall'. Known: accuracy"),
        ({"x": 3}, "The metric 'x' is a int"),
        ({"x": lambda output, target: output}, "'x' gave a Tensor; it must give one number"),
        ({"x": lambda output, target: None}, "'x' gave a NoneType"),
    ):
        with pytest.raises(eb.InputError, match=re.escape(message)):
            learner.fit(BATCHES[:1], metrics=metrics)


def test_fit_without_an_optimizer_is_refused():
    learner = eb.OnlineLearner(make_net(), rule="bptt", loss=mse_loss)
    with pytest.raises(eb.InputError, match="has no optimizer"):
        learner.fit(BATCHES)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optax.sgd(0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.NAdam(p, lr=0.1),
    ],
)
def test_the_norm_of_the_gradients(make):
    model, plain = make_net(), make_net()
    learner = eb.OnlineLearner(
        model,
        rule="bptt",
        loss=mse_loss,
        optimizer=make(model.parameters()),
        track_norm=True,
        clip_norm=0.01,
    )
    assert learner.gradient_norm is None
    seen = []
    learner.fit(
        BATCHES[:1],
        callbacks=[
            lambda given, record: seen.append((given.gradient_norm, record["gradient_norm"]))
        ],
    )
    grads = torch_gradients(plain, *BATCHES[0])
    expected = float(torch.nn.utils.get_total_norm(grads.values()))
    assert expected > 0.01 and seen == [(pytest.approx(expected, rel=1e-9),) * 2]
    assert (
        eb.OnlineLearner(make_net(), rule="bptt", loss=mse_loss, optimizer=optax.sgd(0.1)).fit(
            BATCHES[:1]
        )["gradient_norm"]
        == []
    )


def test_a_system_that_does_not_tell_its_memory_shows_none(monkeypatch):
    monkeypatch.setattr("etrace_bridge.learning.progress.resource", None)
    assert describe({"loss": 0.5, "steps_per_second": 3.0}) == "loss 0.5  3 steps/s"


def test_memory_is_that_of_the_process():
    before = resident_memory()
    held = np.ones(2**25)  # 256 MB, touched
    assert 0.9 * held.nbytes < resident_memory() - before < 1.3 * held.nbytes
    assert describe({"loss": 0.5, "steps_per_second": 1234.5, "accuracy": 0.75}).startswith(
        "loss 0.5  accuracy 0.75  1,234 steps/s"
    )


@pytest.mark.parametrize("name", ["epochs", "max_batches", "early_stopping"])
@pytest.mark.parametrize("value", [0, 1.5])
def test_numbers_of_epochs_and_batches_are_whole(name: str, value: float) -> None:
    model = make_net()
    learner = eb.OnlineLearner(
        model, "d_rtrl", mse_loss, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    options = {name: eb.EarlyStopping(patience=1) if name == "early_stopping" else value}
    with pytest.raises(eb.InputError, match=f"is {value}; it must be a whole number, 1 or more"):
        if name == "early_stopping":
            eb.EarlyStopping(patience=value)
        learner.fit([make_data()], **options)
