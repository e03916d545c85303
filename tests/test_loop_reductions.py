"""Models whose `forward` reduces a loop's outputs over time: the reduction is known, or refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import etrace_bridge as eb
from loop_models import IN, B, H, Inline, Spike, T

pytestmark = pytest.mark.usefixtures("without_single_steps")


class Ends(Inline):
    """A classifier that ends in a reduction over time."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.out, self.how = nn.Linear(H, 2), how

    def forward(self, x: Tensor) -> Tensor:
        return REDUCTIONS[self.how][1](self.out, super().forward(x))


def in_a_loop(out: nn.Module, ys: Tensor) -> Tensor:
    total = torch.zeros(ys.shape[0], 2, dtype=ys.dtype)
    for t in range(ys.shape[1]):
        total = total + out(ys[:, t])
    return total


def in_place(out: nn.Module, ys: Tensor) -> Tensor:
    total = torch.zeros(ys.shape[0], 2, dtype=ys.dtype)
    for y in ys.unbind(1):
        total += out(y)
    return total / len(ys.unbind(1))


def from_the_first(out: nn.Module, ys: Tensor) -> Tensor:
    total = None
    for y in ys.unbind(1):
        total = y if total is None else y + total
    return out(total / ys.size(1))


def spikes_of(ys: Tensor) -> Tensor:
    return torch.stack([Spike.apply(y) for y in ys.unbind(1)], 1)


REDUCTIONS: dict[str, tuple[str, Callable[[nn.Module, Tensor], Tensor]]] = {
    "last": ("last", lambda out, ys: out(ys[:, -1])),
    "mean": ("mean", lambda out, ys: out(ys.mean(1))),
    "sum of logits": ("sum", lambda out, ys: out(ys).sum(1)),
    "a sum by six": ("sum", lambda out, ys: out(ys).sum(1) / 6),
    "total": ("last", in_a_loop),
    "total by length": ("mean", lambda out, ys: in_a_loop(out, ys) / ys.shape[1]),
    "total in place": ("mean", in_place),
    "total from the first": ("mean", from_the_first),
    "total of shares": ("mean", lambda out, ys: sum(out(y) / ys.shape[1] for y in ys.unbind(1))),
    "Python's sum": ("mean", lambda out, ys: sum(map(out, ys.unbind(1))) / ys.shape[1]),
    "amax": ("last", lambda out, ys: out(ys).amax(1)),
    "max": ("last", lambda out, ys: out(ys).max(1)[0]),
    "min": ("last", lambda out, ys: torch.min(out(ys), dim=1, keepdim=True).values.squeeze(1)),
    "max over units and time": (
        "last",
        lambda out, ys: out(ys.max(2)[0].max(1, True)[0].expand(B, H)),
    ),
    "amax of spikes": ("last", lambda out, ys: out(spikes_of(ys).amax(1))),
    "amax of all spikes": (
        "last",
        lambda out, ys: out(spikes_of(ys).amax((1, 2), True).expand(B, 1, H))[:, 0],
    ),
    "max of spikes": ("last", lambda out, ys: out(spikes_of(ys).max(dim=1).values)),
    "max of spikes made at once": ("last", lambda out, ys: out(Spike.apply(ys).max(1)[0])),
    "head of a mean": ("last", lambda out, ys: out(torch.relu(ys.mean(1)))),
    "softmax of a total by length": (
        "last",
        lambda out, ys: F.softmax(in_a_loop(out, ys) / ys.shape[1], -1),
    ),
    "deviation": ("last", lambda out, ys: out(((ys**2).mean(1) - ys.mean(1) ** 2 + 0.1).sqrt())),
    "mean over units too": ("last", lambda out, ys: torch.tanh(out(ys).mean((1, 2)))[:, None]),
    "mean and last": ("last", lambda out, ys: torch.tanh(out(ys.mean(1) + ys[:, -1]))),
    "mean beside last": (
        "last",
        lambda out, ys: torch.tanh(out(torch.cat([ys.mean(1), ys[:, -1]], 1)[:, 2 : 2 + H])),
    ),
    "tanh of a sum by six": ("last", lambda out, ys: torch.tanh(out(ys).sum(1) / 6)),
}


@pytest.mark.parametrize("how", list(REDUCTIONS))
def test_a_reduction_over_time_is_known(how: str) -> None:
    torch.manual_seed(2)
    model, x = Ends(how).double(), torch.randn(B, T, IN, dtype=torch.float64)
    net = eb.wrap(model)
    net.init_state(B)
    outputs = np.stack([np.asarray(net(x[:, t])) for t in range(T)])
    assert net.reduction == REDUCTIONS[how][0]
    found = {"last": outputs[-1], "sum": outputs.sum(0), "mean": outputs.mean(0)}[net.reduction]
    np.testing.assert_allclose(found, model(x).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "how",
    ["total by length", "total of shares", "max over units and time", "amax of spikes",
     "amax of all spikes", "max of spikes", "max of spikes made at once", "head of a mean",
     "softmax of a total by length", "deviation", "mean over units too", "mean and last",
     "mean beside last", "tanh of a sum by six"],
)  # fmt: skip
def test_gradients_of_a_reduced_output_equal_torchs(how: str) -> None:
    """Extrema of spikes have equals in most samples; torch shares the gradient of `amax` among
    them, and gives that of `max` to the first.
    """
    torch.manual_seed(2)
    model, x = Ends(how).double(), torch.randn(B, T, IN, dtype=torch.float64)
    learner = eb.OnlineLearner(model, "rtrl", F.mse_loss, chunk=5, loss_at="model")
    wanted = model(x)
    target = torch.randn_like(wanted)
    found = learner.gradients(x, target).grads
    names, parameters = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad(F.mse_loss(wanted, target), parameters)
    for name, grad in zip(names, grads, strict=True):
        assert grad.abs().max() > 1e-6, name
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=1e-9 * grad.abs().max())


ALL_AT_ONCE: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda ys: ys.topk(2, 1)[0].sum(1),
    "sort": lambda ys: ys.sort(1)[0][:, -1],
    "argmax": lambda ys: ys.max(1)[1] * ys[:, -1],
    "median": lambda ys: ys.median(1).values,
}


@pytest.mark.parametrize("how", list(ALL_AT_ONCE))
def test_what_needs_all_steps_at_once_is_refused_with_the_line(how: str) -> None:
    class AtOnce(Inline):
        def forward(self, x: Tensor) -> Tensor:
            return ALL_AT_ONCE[how](super().forward(x))

    with pytest.raises(
        eb.NotSupportedError,
        match=r"test_loop_reductions\.py:\d+.* reads all steps of the sequence",
    ):
        eb.wrap(AtOnce().double()).init_state(B)


READS_AGAIN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "variance": (lambda ys: ys.var(1), "`sub` at"),
    "softmax": (lambda ys: (ys.softmax(1) * ys).sum(1), "`sub` at"),
    "logsumexp": (lambda ys: ys.logsumexp(1), "`sub` at"),
    "first and last": (lambda ys: torch.cat([ys[:, 0], ys[:, -1]], -1), "`concatenate` at"),
    "first": (lambda ys: ys[:, 0], "that of step 1 at"),
    "third": (lambda ys: 2 * ys[:, 2], "that of step 3 at"),
}


@pytest.mark.parametrize("how", list(READS_AGAIN))
def test_what_reads_early_steps_at_the_end_is_refused_with_the_line(how: str) -> None:
    reads, reason = READS_AGAIN[how]

    class ReadsAgain(Inline):
        def forward(self, x: Tensor) -> Tensor:
            return reads(super().forward(x))

    with pytest.raises(eb.NotSupportedError, match=rf"{reason} .*test_loop_reductions\.py:\d+"):
        eb.wrap(ReadsAgain().double()).init_state(B)


def test_no_reduction_where_every_step_is_given() -> None:
    net = eb.wrap(Inline().double())
    net.init_state(B)
    assert net.reduction is None


@pytest.mark.parametrize("how", ["last", "mean", "max"])
def test_online_gradients_of_a_reduced_output_equal_bptt(how: str) -> None:
    torch.manual_seed(2)
    model, x = Ends(how).double(), torch.randn(B, T, IN, dtype=torch.float64)
    mask = torch.zeros(T)
    mask[-1] = 1
    targets = torch.randn(B, T, 2, dtype=torch.float64)
    report = eb.check_gradients(
        model, x, targets, loss=F.mse_loss, rule="rtrl", mask=mask if how != "mean" else None
    )
    assert report.ok, report
    assert report["rec.weight"].norm > 1e-6
    assert report["rec.weight"].relative_error < 1e-9
