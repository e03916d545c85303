"""`FidelityMeter` beside torch BPTT: in `fit`, on streams, under dropout, complex weights and
chunks.
"""

from __future__ import annotations

import math

import optax
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import etrace_bridge as eb

T, B, IN, H = 8, 3, 2, 4


class Net(nn.Module):
    """A plain RNN with dropout, complex input weights and a readout: what D-RTRL drops matters."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inp = nn.Parameter(0.3 * torch.randn(H, IN, dtype=torch.complex128))
        self.rec, self.out, self.drop = nn.Linear(H, H), nn.Linear(H, 2), nn.Dropout(dropout)
        self.double().out.requires_grad_(False)  # its gradient is always exact

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x.new_zeros(x.shape[0], H) if h is None else h
        h = torch.tanh((x.to(self.inp.dtype) @ self.inp.T).abs() + 2 * self.rec(self.drop(h)))
        return self.out(h), h


def data(steps: int = T, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(steps, B, IN, generator=generator).double(),
        torch.randn(steps, B, 2, generator=generator).double(),
    )


def learner_of(model: nn.Module, rule: str = "d_rtrl", **options) -> eb.OnlineLearner:
    return eb.OnlineLearner(
        model,
        rule,
        mse_loss,
        options.pop("optimizer", optax.sgd(0.0)),
        options.pop("chunk", 4),
        **options,
    )


def bptt(
    model: nn.Module, xs: Tensor, targets: Tensor, counted: slice = slice(None)
) -> dict[str, Tensor]:
    """torch's gradient of the mean loss of the counted steps."""
    h, losses = None, []
    for x, target in zip(xs, targets, strict=True):
        y, h = model(x, h)
        losses.append(mse_loss(y, target))
    model.zero_grad()
    torch.stack(losses[counted]).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum(float((a[n].conj() * b[n]).real.sum()) for n in a)


def test_a_batch_is_measured_exactly_and_the_record_has_it():
    torch.manual_seed(0)
    model, (xs, targets) = Net(), data()
    learner, meter = learner_of(model), eb.FidelityMeter()
    history = learner.fit([(xs, targets), data(seed=1)], 1, callbacks=[meter])
    assert len(meter.readings) == 2
    for reading, batch in zip(meter.readings, ((xs, targets), data(seed=1)), strict=True):
        online, true = learner.gradients(*batch).grads, bptt(model, *batch)
        assert abs(dot(true, online) / dot(online, online) - 1) > 1e-3  # D-RTRL is not exact here
        assert reading.predicted == pytest.approx(math.sqrt(dot(online, online)), rel=1e-10)
        assert reading.slope == pytest.approx(dot(true, online) / reading.predicted, rel=1e-8)
    record = history.epochs[0]
    assert record["fidelity"] == pytest.approx(meter.ratio, rel=1e-12)
    assert record["downhill"] == meter.downhill == sum(r.descends for r in meter.readings) / 2


def test_masks_and_losses_over_a_whole_sequence_are_measured_too():
    torch.manual_seed(0)
    model, (xs, targets) = Net(), data()
    mask = (torch.rand(T, B, generator=torch.Generator().manual_seed(2)) > 0.4).double()
    meter = eb.FidelityMeter()
    learner_of(model, "rtrl").fit([(xs, targets, mask)], 1, callbacks=[meter])
    whole = eb.OnlineLearner(
        model,
        "rtrl",
        optimizer=optax.sgd(0.0),
        chunk=4,
        seq_loss=lambda ys, t: (ys.mean(0) - t[-1]).pow(2).sum(),
    )
    whole.fit([(xs, targets)], 1, callbacks=[meter])
    assert len(meter.readings) == 2
    for reading in meter.readings:
        assert reading.ratio == pytest.approx(1, abs=1e-9) and reading.predicted > 1e-3


def test_the_meter_changes_nothing_and_sees_the_dropout_of_the_update():
    torch.manual_seed(0)
    model, batches = Net(0.4), [data(), data(seed=1)]
    with_meter, without = (
        learner_of(model, "rtrl", optimizer=optax.sgd(0.1), seed=3) for _ in range(2)
    )
    meter = eb.FidelityMeter()
    watched = with_meter.fit(batches, 2, callbacks=[meter])
    plain = without.fit(batches, 2)
    assert watched.batch_losses == plain.batch_losses
    # the masks are those of the gradient
    assert len(meter.readings) == 4 and all(abs(r.ratio - 1) < 1e-10 for r in meter.readings)


def test_a_stream_is_measured_along_the_last_windows_gradient():
    """Weights held: the slope is BPTT's gradient of the counted steps times the direction; the
    rule's is its own.
    """
    torch.manual_seed(0)
    model, (xs, targets) = Net(), data(12)
    learner, meter = learner_of(model, "rtrl"), eb.FidelityMeter(window=12, warmup=4)
    for x, target in zip(xs, targets, strict=True):
        meter.step(learner, x, target)
    assert meter.readings == []  # the first window gives the first direction
    learner.reset()
    for x, target in zip(xs, targets, strict=True):
        info = meter.step(learner, x, target)
    (reading,) = meter.readings
    direction = bptt(model, xs, targets)
    counted = bptt(model, xs, targets, slice(4, None))
    size = math.sqrt(dot(direction, direction))
    assert abs(dot(counted, direction)) > 1e-3
    assert reading.slope == pytest.approx(dot(counted, direction) / size, rel=1e-8)
    assert reading.ratio == pytest.approx(1, abs=1e-8) and reading.step == 24
    assert info.loss == pytest.approx(
        float(mse_loss(model_output(model, xs), targets[-1])), rel=1e-9
    )


def model_output(model: nn.Module, xs: Tensor) -> Tensor:
    y = h = None
    with torch.no_grad():
        for x in xs:
            y, h = model(x, h)
    assert y is not None
    return y


def test_batches_that_continue_one_another_are_a_stream():
    torch.manual_seed(0)
    model, (xs, targets) = Net(), data(16)
    steps, batches = eb.FidelityMeter(window=8, warmup=4), eb.FidelityMeter(window=8, warmup=4)
    learner = learner_of(model, chunk=2, reduction="sum")
    for x, target in zip(xs, targets, strict=True):
        steps.step(learner, x, target)
    parts = [(xs[n : n + 4], targets[n : n + 4]) for n in range(0, 16, 4)]
    learner_of(model, chunk=2, reduction="sum").fit(parts, 1, carry=True, callbacks=[batches])
    (one,), (other,) = steps.readings, batches.readings
    assert one.slope == pytest.approx(other.slope, rel=1e-9) and one.predicted == pytest.approx(
        other.predicted, rel=1e-9
    )
    assert abs(one.ratio - 1) > 1e-3


def test_a_learner_that_moved_without_the_meter_starts_a_new_window():
    torch.manual_seed(0)
    model, (xs, targets) = Net(), data(12)
    learner, meter = learner_of(model), eb.FidelityMeter(window=4, warmup=1)
    for n, (x, target) in enumerate(zip(xs, targets, strict=True)):
        (learner.step if n == 6 else lambda *args: meter.step(learner, *args))(x, target)
    # steps 1-4 give a direction; 5 and 6 are lost; 8-11 are a window
    assert [r.step for r in meter.readings] == [11]


def test_reports_are_for_people(tmp_path):
    meter = eb.FidelityMeter()
    assert "no reading yet" in repr(meter) == meter.report()
    meter.readings += [eb.Reading(10 * n, 1.0 - 0.05 * n, 1.0) for n in range(30)]
    text = meter.report()
    assert (
        text.startswith("FidelityMeter: 67% of 30 readings downhill")
        and "NO" in text
        and len(text.splitlines()) < 25
    )
    assert "<table>" in meter._repr_html_()
    figure = meter.plot(tmp_path / "meter.png")
    assert len(figure.axes) == 2 and (tmp_path / "meter.png").stat().st_size > 5_000


def test_bad_use_is_named():
    model, (xs, targets) = Net(), data()
    for options in ({"every": 0}, {"window": 1}, {"window": 4, "warmup": 4}, {"window": 2.5}):
        with pytest.raises(eb.InputError, match=next(reversed(options))):
            eb.FidelityMeter(**options)
    with pytest.raises(eb.InputError, match="no loss"):
        eb.FidelityMeter().step(
            eb.OnlineLearner(model, optimizer=optax.sgd(0.0)), xs[0], targets[0]
        )
    with pytest.raises(eb.InputError, match="no reading to draw"):
        eb.FidelityMeter().plot()
    in_torch = torch.optim.LBFGS(model.parameters())
    with pytest.raises(eb.BridgeError, match="LBFGS|inside the compiled step"):
        eb.FidelityMeter().step(
            eb.OnlineLearner(model, loss=mse_loss, optimizer=in_torch), xs[0], targets[0]
        )


def test_a_learner_and_its_history_print_as_one_can_read_them():
    learner = eb.OnlineLearner(nn.GRU(2, 3), loss=mse_loss, optimizer=optax.sgd(0.1))
    assert repr(learner) == "OnlineLearner(GRU by d_rtrl: 0 steps, 0 updates)"
    history = eb.History([{"epoch": 1, "loss": 0.5, "complete": True}], [0.5, 0.5], "")
    assert repr(history) == "History of 1 epoch, 2 batches, loss 0.5 → 0.5"
    assert "<td" in history._repr_html_() and "0.5" in history._repr_html_()
