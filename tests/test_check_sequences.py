"""`check_gradients` with one target for each sequence, and with losses of all outputs."""

from __future__ import annotations

import brainstate
import jax.numpy as jnp
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import etrace_bridge as eb

T, B, IN, H = 7, 3, 2, 4


class Every(nn.Module):
    """Gives an output at every step; batch-first."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(IN, H, batch_first=True), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0])


class Ends(nn.Module):
    """A classifier with a loop, which gives the mean over time or the last step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.cell, self.out, self.how = nn.GRUCell(IN, H), nn.Linear(H, 2), how

    def forward(self, x: Tensor) -> Tensor:
        h, ys = x.new_zeros(x.shape[0], H), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            ys.append(self.out(h))
        return torch.stack(ys, 1).mean(1) if self.how == "mean" else ys[-1]


def count_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs.sigmoid().sum(1), labels)


def make_data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(B, T, IN), torch.tensor([1, 0, 1])


Wanted = tuple[float, dict[str, Tensor]]


def torch_s(model: nn.Module, whole: Tensor) -> Wanted:
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(whole, parameters)
    return float(whole.detach()), dict(zip(names, grads, strict=True))


def assert_compares(report: eb.GradientReport, wanted: Wanted) -> None:
    """The report is about torch's gradients, and they come from the past."""
    assert report.ok, report
    assert report.torch_loss == pytest.approx(wanted[0], rel=1e-6)
    for name, grad in wanted[1].items():
        assert report[name].norm == pytest.approx(float(grad.norm()), rel=1e-5), name
        assert report[name].relative_error < 1e-9
    assert max(p.past for p in report) > 1e-2


@pytest.mark.parametrize("how", ["mean", "last"])
def test_a_model_that_reduces_over_time(how: str) -> None:
    (xs, labels), model = make_data(), Ends(how)
    wanted = torch_s(model, F.cross_entropy(model(xs), labels))
    report = eb.check_gradients(model, xs, labels, F.cross_entropy, rule="rtrl", loss_at="model")
    assert_compares(report, wanted)
    assert report.single_steps is not None and report.single_steps.ok


@pytest.mark.parametrize("at", ["last", "every"])
def test_one_label_for_each_sequence(at: str) -> None:
    (xs, labels), model = make_data(), Every()
    outputs = model(xs)
    losses = [F.cross_entropy(outputs[:, t], labels) for t in range(T)]
    wanted = torch_s(model, losses[-1] if at == "last" else torch.stack(losses).mean())
    report = eb.check_gradients(model, xs, labels, F.cross_entropy, rule="rtrl", loss_at=at)
    assert_compares(report, wanted)


def test_the_last_step_that_the_mask_leaves() -> None:
    (xs, labels), model = make_data(), Every()
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0, 0])
    wanted = torch_s(model, F.cross_entropy(model(xs)[:, 4], labels))
    report = eb.check_gradients(
        model, xs, labels, F.cross_entropy, rule="rtrl", chunk=2, loss_at="last", mask=mask
    )
    assert_compares(report, wanted)


LENGTHS = torch.tensor([7, 5, 3])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_mask_of_single_sequences(reduction: str) -> None:
    """One mean, or sum, over everything that counts, as torch's own loss over it, whatever stands
    in the padding; the second rule shows that the mask is not forgotten in its measurements.
    """
    (xs, _), model = make_data(), Every()
    mask = eb.length_mask(LENGTHS, batch_first=True)
    kept, labels = mask > 0, torch.randint(0, 2, (B, T))
    labels[~kept] = 9
    entropy = nn.CrossEntropyLoss(reduction=reduction)
    wanted = torch_s(model, entropy(model(xs)[kept], labels[kept]))
    comparison = eb.check_gradients(
        model, xs, labels, entropy, ["rtrl", "d_rtrl"], 2, mask=mask, reduction=reduction
    )
    assert_compares(comparison["rtrl"], wanted)
    assert comparison["rtrl"].verdict == "exact" and comparison.ok


def test_the_last_step_of_each_sequence() -> None:
    (xs, labels), model = make_data(), Every()
    mask = eb.length_mask(LENGTHS, batch_first=True)
    ends = model(xs)[torch.arange(B), LENGTHS - 1]
    wanted = torch_s(model, F.cross_entropy(ends, labels))
    report = eb.check_gradients(
        model, xs, labels, F.cross_entropy, "rtrl", 2, loss_at="last", mask=mask
    )
    assert_compares(report, wanted)


def test_a_loss_of_all_outputs() -> None:
    (xs, labels), model = make_data(), Every()
    wanted = torch_s(model, count_loss(model(xs), labels))
    report = eb.check_gradients(model, xs, labels, rule="rtrl", seq_loss=count_loss)
    assert_compares(report, wanted)
    assert report.single_steps is None


def test_several_rules_have_time_and_memory() -> None:
    (xs, labels), model = make_data(), Ends("mean")
    found = eb.check_gradients(
        model, xs, labels, F.cross_entropy, rule=["rtrl", "d_rtrl"], loss_at="model"
    )
    memory = [report.memory for report in found.reports]
    assert all(m is not None and m > 0 for m in memory) and memory[0] > memory[1]


def test_targets_without_time_say_what_to_do() -> None:
    (xs, labels), model = make_data(), Ends("mean")
    with pytest.raises(eb.InputError, match="`loss_at='model'` if the model itself reduces"):
        eb.check_gradients(model, xs, labels, F.cross_entropy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": None}, "`loss` is a NoneType"),
        ({"seq_loss": count_loss}, "both given"),
        ({"loss": None, "seq_loss": count_loss, "loss_at": "last"}, "`seq_loss` reads every step"),
        ({"loss_at": "end"}, "`loss_at` is 'end'"),
        ({"loss_at": "model"}, "gives an output for every step"),
        ({"loss": None, "seq_loss": count_loss, "mask": torch.ones(T)}, "takes no `mask`"),
        ({"loss_at": "every", "mask": torch.ones(T, B)}, r"it must be \(7,\) or \(7, 3\)"),
        (
            {"loss": lambda o, y: F.mse_loss(o[:, 0], y * 1.0) ** 2, "loss_at": "every"}
            | {"mask": torch.ones(B, T)},
            "neither a mean nor a sum",
        ),
    ],
)
def test_losses_that_do_not_fit(options: dict, message: str) -> None:
    xs, labels = make_data()
    with pytest.raises(eb.InputError, match=message):
        eb.check_gradients(Every(), xs, labels, **({"loss": F.cross_entropy} | options))


def test_packed_sequences_are_padded_sequences_with_a_mask() -> None:
    torch.manual_seed(0)
    model, xs, lengths = Every(), torch.randn(B, T, IN), torch.tensor([4, 7, 2])
    labels = torch.randint(0, 2, (B, T))
    packed, packed_labels = (
        pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for x in (xs, labels)
    )
    mask = eb.length_mask(lengths, batch_first=True)
    wanted = eb.check_gradients(model, xs, labels, F.cross_entropy, "rtrl", mask=mask)
    found = eb.check_gradients(model, packed, packed_labels, F.cross_entropy, "rtrl")
    assert wanted.verdict == found.verdict == "exact"
    assert found.loss == wanted.loss


def test_a_brainstate_module() -> None:
    class Leak(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = brainstate.ParamState(jnp.array([[0.3, -0.2], [0.5, 0.4]]))
            self.h = brainstate.HiddenState(jnp.zeros((B, 2)))

        def update(self, x):
            self.h.value = 0.9 * self.h.value + jnp.tanh(x @ self.w.value)
            return self.h.value

    xs, target = jnp.array(torch.randn(T, B, 2).double().numpy()), jnp.ones((B, 2))
    loss = lambda y, t: jnp.mean((y - t) ** 2)
    report = eb.check_gradients(Leak(), xs, target, loss, loss_at="last")
    assert report.ok, report

    w = torch.tensor([[0.3, -0.2], [0.5, 0.4]], dtype=torch.float64, requires_grad=True)
    h, states = torch.zeros(B, 2, dtype=torch.float64), []
    for x in torch.tensor(xs.tolist(), dtype=torch.float64):
        h = 0.9 * h + torch.tanh(x @ w)
        states.append(h)
    ends = torch.stack(states)[LENGTHS - 1, torch.arange(B)]
    mask = eb.length_mask(LENGTHS)
    masked = eb.check_gradients(Leak(), xs, target, loss, "rtrl", loss_at="last", mask=mask)
    for found, last in ((report, h), (masked, ends)):
        whole = ((last - 1) ** 2).mean()
        (grad,) = torch.autograd.grad(whole, w, retain_graph=True)
        assert found.ok and found.torch_loss == pytest.approx(float(whole.detach()), rel=1e-5)
        assert found["w"].norm == pytest.approx(float(grad.norm()), rel=1e-5)
    with pytest.raises(eb.InputError, match="neither the mean nor the sum"):
        squared = lambda y, t: loss(y, t) ** 2
        eb.check_gradients(Leak(), xs, target, squared, "rtrl", loss_at="every", mask=mask)
    with pytest.raises(eb.NotSupportedError, match="`seq_loss`"):
        eb.check_gradients(Leak(), xs, target, seq_loss=loss)
