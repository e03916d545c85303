"""Masks of single sequences, labels per sequence and losses over whole sequences, beside torch on
one sequence at a time.
"""

from __future__ import annotations

import functools

import numpy as np
import optax
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import etrace_bridge as eb
from etrace_bridge.learning.masks import unpack_sequences
from learner_models import O, assert_same, make_data, make_net

LENGTHS = torch.tensor([6, 2, 4])
STEPS = 6


def lengths_mask(batch_first: bool = False) -> torch.Tensor:
    """(T, B) ones where a sequence has a step."""
    mask = (torch.arange(STEPS)[:, None] < LENGTHS).double()
    return mask.t().contiguous() if batch_first else mask


def by_sequence(
    model: nn.Module, xs: torch.Tensor, targets, mask: torch.Tensor, loss, mean_over: float
) -> dict[str, torch.Tensor]:
    """torch's gradient of the masked losses, each sequence and step by itself; arrays are
    time-major.
    """
    total = torch.zeros((), dtype=torch.float64)
    for b in range(xs.shape[1]):
        outputs = model(xs[:, b : b + 1])
        for t in range(xs.shape[0]):
            if mask[t, b]:
                total = total + mask[t, b] * loss(outputs[t], targets[t, b : b + 1])
    return gradients_of(model, total / mean_over)


def gradients_of(model: nn.Module, total: torch.Tensor) -> dict[str, torch.Tensor]:
    """torch's gradients of a scalar, zero where there is no path."""
    model.zero_grad()
    total.backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }


def labels(seed: int = 5) -> torch.Tensor:
    """(T, B) class labels."""
    return torch.randint(0, O, (STEPS, 3), generator=torch.Generator().manual_seed(seed))


def masks() -> list[torch.Tensor]:
    """Lengths; and weights with gaps and a step at which nothing counts."""
    gaps = (
        lengths_mask() * torch.tensor([0.5, 0.0, 2.0, 1.0, 0.0, 1.0], dtype=torch.float64)[:, None]
    )
    gaps[2] = 0
    return [lengths_mask(), gaps]


@pytest.mark.parametrize("rule, chunk", [("bptt", 6), ("rtrl", 2)])
def test_mask_of_single_sequences_is_exact(rule: str, chunk: int) -> None:
    """Also, what stands in masked targets does not matter, NaN included."""
    model, (xs, targets) = make_net(), make_data()
    learner = eb.OnlineLearner(model, rule, F.mse_loss, chunk=chunk)
    for mask in masks():
        wanted = by_sequence(model, xs, targets, mask, F.mse_loss, float(mask.sum()))
        padded = torch.where(mask[..., None] == 0, torch.nan, targets)
        assert_same(learner.gradients(xs, padded, mask).grads, wanted)


def test_mask_of_a_batch_first_model() -> None:
    model, (xs, targets) = make_net(batch_first=True), make_data()
    plain = make_net()
    mask = lengths_mask()
    learner = eb.OnlineLearner(model, "rtrl", F.mse_loss, chunk=2)
    result = learner.gradients(
        xs.transpose(0, 1), targets.transpose(0, 1), lengths_mask(batch_first=True)
    )
    assert_same(result.grads, by_sequence(plain, xs, targets, mask, F.mse_loss, float(mask.sum())))


def test_a_sum_over_the_batch_is_masked_too() -> None:
    model, (xs, targets), mask = make_net(), make_data(), lengths_mask()
    loss = functools.partial(F.mse_loss, reduction="sum")
    learner = eb.OnlineLearner(model, "rtrl", loss, chunk=2, reduction="sum")
    result = learner.gradients(xs, targets, mask)
    assert_same(result.grads, by_sequence(model, xs, targets, mask, loss, 1.0))


def test_mask_equal_for_all_sequences_is_the_mask_of_steps() -> None:
    (xs, targets), steps = make_data(), torch.tensor([1.0, 0.0, 2.0, 0.0, 1.0, 0.5])
    learner = eb.OnlineLearner(make_net(), "d_rtrl", F.mse_loss, chunk=2)
    one = learner.gradients(xs, targets, steps)
    other = learner.gradients(xs, targets, steps[:, None].expand(-1, 3))
    assert one.loss == pytest.approx(other.loss, rel=1e-12)
    assert_same(other.grads, one.grads, 1e-12)


def test_update_evaluate_and_fit_take_such_masks() -> None:
    xs, targets = make_data()
    mask = lengths_mask()
    model = make_net()
    wanted = by_sequence(model, xs, targets, mask, F.mse_loss, float(mask.sum()))
    learner = eb.OnlineLearner(model, "rtrl", F.mse_loss, optax.sgd(0.1), chunk=2)
    before = learner.evaluate([(xs, targets, mask)])
    assert learner.gradients(xs, targets, mask).loss == pytest.approx(before, rel=1e-12)
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    history = learner.fit(
        [(xs, targets, mask)], metrics={"error": lambda y, t: ((y - t) ** 2).mean()}, progress=False
    )
    assert history["error"][0] == pytest.approx(before, rel=1e-9)
    learner.sync_to_torch()
    assert_same({n: (first[n] - p.detach()) / 0.1 for n, p in model.named_parameters()}, wanted)


def test_one_step_with_a_mask() -> None:
    (xs, targets), model = make_data(1), make_net()
    learner = eb.OnlineLearner(model, "d_rtrl", F.mse_loss, optax.sgd(0.1))
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    mask = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    wanted = by_sequence(model, xs, targets, mask[None], F.mse_loss, 2.0)
    info = learner.step(xs[0], targets[0], mask)
    assert info.loss == pytest.approx(
        float(F.mse_loss(model(xs).detach()[0, [0, 2]], targets[0, [0, 2]])), rel=1e-12
    )
    learner.sync_to_torch()
    found = {n: (first[n] - p.detach()) / 0.1 for n, p in model.named_parameters()}
    del found["rnn.weight_hh_l0"], wanted["rnn.weight_hh_l0"]  # zero: the first step has no past
    assert_same(found, wanted)
    assert learner.step(xs[0], targets[0], torch.zeros(3)).loss == 0.0


@pytest.mark.parametrize(("weighted", "ignored"), [(False, -100), (True, -100), (False, 0)])
def test_ignored_targets_weigh_as_in_torch(weighted: bool, ignored: int) -> None:
    """One mean over all targets that are not ignored; a step of padding alone included.

    Token 0 is padding in many vocabularies: the value to ignore is then one of the classes.
    """
    model, (xs, _), targets = make_net(), make_data(), labels()
    targets[lengths_mask() == 0] = ignored
    targets[3] = ignored
    weights = torch.tensor([0.3, 1.7], dtype=torch.float64) if weighted else None
    loss = nn.CrossEntropyLoss(weights, ignore_index=ignored)
    learner = eb.OnlineLearner(model, "rtrl", loss, chunk=2)
    result = learner.gradients(xs, targets)
    whole = loss(model(xs).flatten(0, 1), targets.flatten())
    assert result.loss == pytest.approx(float(whole.detach()), rel=1e-12)
    assert_same(result.grads, gradients_of(model, whole))
    assert learner.evaluate([(xs, targets)]) == pytest.approx(result.loss, rel=1e-12)


def test_metrics_leave_out_labels_that_are_ignored() -> None:
    """As they leave out masked steps: a label of padding is neither right nor wrong."""
    model, (xs, _), targets = make_net(), make_data(), labels()
    right = (model(xs).argmax(-1) == targets)[lengths_mask().bool()].double().mean()
    targets[lengths_mask() == 0] = -100
    learner = eb.OnlineLearner(model, "bptt", F.cross_entropy, optax.sgd(0.0))
    batches = [(xs, targets)]
    history = learner.fit(batches, metrics="accuracy", validation=batches, progress=False)
    assert 0 < right < 1
    assert history["accuracy"] == history["validation_accuracy"] == [pytest.approx(float(right))]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_class_weights_count_under_a_mask(reduction: str) -> None:
    """They used to be lost where no label was ignored: in the mean of one element they cancel."""
    model, (xs, _), targets, mask = make_net(), make_data(), labels(), lengths_mask()
    weights = torch.tensor([0.3, 1.7], dtype=torch.float64)
    learner = eb.OnlineLearner(
        model, "rtrl", nn.CrossEntropyLoss(weights), chunk=2, reduction=reduction
    )
    each = F.cross_entropy(model(xs).flatten(0, 1), targets.flatten(), reduction="none")
    share = mask * weights[targets]
    losses = each.reshape(mask.shape) * share
    if reduction == "mean":
        whole = losses.sum() / share.sum()
    else:  # each step's own mean, weighted by how much of the batch counts there
        whole = (losses.sum(1) / share.sum(1) * mask.mean(1)).sum()
    result = learner.gradients(xs, targets, mask)
    assert result.loss == pytest.approx(float(whole.detach()), rel=1e-12)
    assert_same(result.grads, gradients_of(model, whole))


def test_class_weights_count_in_a_masked_step() -> None:
    (xs, _), model = make_data(1), make_net()
    weights = torch.tensor([0.3, 1.7], dtype=torch.float64)
    targets, mask = torch.tensor([0, 1, 1]), torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    learner = eb.OnlineLearner(model, "d_rtrl", nn.CrossEntropyLoss(weights), optax.sgd(0.1))
    expected = F.cross_entropy(model(xs)[0, [0, 2]], targets[[0, 2]], weights)
    assert learner.step(xs[0], targets, mask).loss == pytest.approx(
        float(expected.detach()), rel=1e-12
    )


def test_ignored_targets_need_a_loss_that_can_leave_them_out() -> None:
    """The mean of the steps' own losses would weigh the rest in another way than torch does."""

    def squared(output, target):
        return F.cross_entropy(output, target) ** 2

    (xs, _), targets = make_data(), labels()
    learner = eb.OnlineLearner(make_net(), "d_rtrl", squared, chunk=2)
    assert learner.gradients(xs, targets).loss > 0
    targets[lengths_mask() == 0] = -100
    with pytest.raises(eb.InputError, match=r"`squared` cannot .*labels that are to be ignored"):
        learner.gradients(xs, targets)


@pytest.mark.parametrize("masked", [False, True])
def test_ignored_targets_add_nothing_to_a_sum(masked: bool) -> None:
    """The mean over time of sums over the batch: it used to be divided by the share of labels that
    count, in place of the number of steps.
    """
    model, (xs, _), targets = make_net(), make_data(), labels()
    targets[lengths_mask() == 0] = -100
    mask = torch.ones(targets.shape, dtype=torch.float64)
    mask[2, 0] = 0.0 if masked else 1.0
    loss = nn.CrossEntropyLoss(reduction="sum")
    learner = eb.OnlineLearner(model, "rtrl", loss, chunk=2, reduction="sum")
    result = learner.gradients(xs, targets, mask if masked else None)
    each = F.cross_entropy(model(xs).flatten(0, 1), targets.flatten(), reduction="none")
    whole = (each * mask.flatten()).sum()
    assert result.loss == pytest.approx(float(whole.detach()), rel=1e-12)
    assert_same(result.grads, gradients_of(model, whole))
    if not masked:
        mean = eb.OnlineLearner(model, "rtrl", loss, chunk=2).gradients(xs, targets)
        assert mean.loss == pytest.approx(float(whole.detach()) / STEPS, rel=1e-12)


def test_a_penalty_beside_ignored_targets_is_refused() -> None:
    """torch's mean leaves ignored labels out, and the penalty counts every element."""

    def penalised(output, target):
        return F.cross_entropy(output, target) + output.pow(2).mean()

    (xs, _), targets, model = make_data(), labels(), make_net()
    learner = eb.OnlineLearner(model, "rtrl", penalised, chunk=2)
    whole = penalised(model(xs).flatten(0, 1), targets.flatten())
    assert_same(learner.gradients(xs, targets).grads, gradients_of(model, whole))
    targets[lengths_mask() == 0] = -100
    with pytest.raises(eb.InputError, match="it is not the loss of the other elements"):
        learner.gradients(xs, targets)


def test_an_online_step_of_ignored_targets_alone() -> None:
    learner = eb.OnlineLearner(make_net(), "d_rtrl", F.cross_entropy, optax.sgd(0.1))
    xs, _ = make_data()
    learner.step(xs[0], torch.tensor([0, 1, 1]))
    weights = {n: p.clone() for n, p in learner.net.state_dict().items()}
    assert learner.step(xs[1], torch.full((3,), -100)).loss == 0.0
    assert all(torch.equal(weights[n], p) for n, p in learner.net.state_dict().items())


def test_packed_sequences() -> None:
    model, (xs, targets), mask = make_net(), make_data(), lengths_mask()
    packed = pack_padded_sequence(xs, LENGTHS, enforce_sorted=False)
    wanted = pack_sequence(
        [targets[:n, b] for b, n in enumerate(LENGTHS.tolist())], enforce_sorted=False
    )
    learner = eb.OnlineLearner(model, "rtrl", F.mse_loss, chunk=2)
    expected = by_sequence(model, xs, targets, mask, F.mse_loss, float(mask.sum()))
    assert_same(learner.gradients(packed, wanted).grads, expected)
    assert_same(learner.gradients(packed, targets).grads, expected)
    assert learner.evaluate([(packed, wanted)]) == pytest.approx(
        learner.evaluate([(xs, targets, mask)]), rel=1e-12
    )
    outputs = learner.predict(packed)
    assert torch.allclose(
        outputs.data,
        pack_padded_sequence(model(xs), LENGTHS, enforce_sorted=False).data,
        atol=1e-12,
    )
    assert torch.equal(eb.length_mask(LENGTHS), mask.float())
    assert torch.equal(eb.length_mask(LENGTHS, 8, batch_first=True)[:, :6], mask.t().float())


def test_weights_of_steps_beside_packed_sequences() -> None:
    """A mask (T,) weighs steps in both layouts, also where there are as many steps as sequences."""
    lengths, weights = torch.tensor([2, 3, 1]), torch.tensor([1.0, 2.0, 5.0])
    for batch_first in (False, True):
        time = 1 if batch_first else 0
        packed = pack_padded_sequence(torch.ones(3, 3, 2), lengths, batch_first, False)
        _, _, mask = unpack_sequences((packed,), None, weights, batch_first)
        expected = eb.length_mask(lengths, batch_first=batch_first) * weights.unsqueeze(1 - time)
        assert torch.equal(mask, expected)
    wrong = pack_padded_sequence(torch.ones(3, 4, 2), torch.tensor([2, 3, 1, 1]), False, False)
    with pytest.raises(eb.InputError, match=r"`mask` has shape \(4,\)"):
        unpack_sequences((wrong,), None, torch.ones(4), False)


@pytest.mark.parametrize("masked", [False, True])
def test_one_label_for_each_sequence_at_its_last_step(masked: bool) -> None:
    model, (xs, _) = make_net(), make_data()
    target = torch.tensor([1, 0, 1])
    mask = lengths_mask() if masked else None
    learner = eb.OnlineLearner(model, "rtrl", F.cross_entropy, chunk=2, loss_at="last")
    last = LENGTHS - 1 if masked else torch.full((3,), STEPS - 1)
    whole = F.cross_entropy(model(xs)[last, torch.arange(3)], target)
    result = learner.gradients(xs, target, mask)
    assert result.loss == pytest.approx(float(whole.detach()), rel=1e-12)
    assert_same(result.grads, gradients_of(model, whole))


def test_one_label_for_each_sequence_at_every_step() -> None:
    model, (xs, _) = make_net(batch_first=True), make_data()
    xs, target = xs.transpose(0, 1).contiguous(), torch.tensor([1, 0, 1])
    learner = eb.OnlineLearner(
        model, "rtrl", F.cross_entropy, optax.sgd(0.1), chunk=2, loss_at="every"
    )
    whole = F.cross_entropy(model(xs).flatten(0, 1), target.repeat_interleave(STEPS))
    assert_same(learner.gradients(xs, target).grads, gradients_of(model, whole))
    history = learner.fit([(xs, target)], metrics="accuracy", progress=False)
    assert history["accuracy"][0] == pytest.approx(
        float((model(xs).argmax(-1) == target[:, None]).double().mean())
    )


def test_losses_that_do_not_split_are_refused() -> None:
    def spread(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).var()

    xs, targets = make_data()
    learner = eb.OnlineLearner(make_net(), "d_rtrl", spread, chunk=2)
    learner.gradients(xs, targets)
    with pytest.raises(eb.InputError, match="neither the mean nor the sum"):
        learner.gradients(xs, targets, lengths_mask())


def test_wrong_masks_are_named() -> None:
    xs, targets = make_data()
    learner = eb.OnlineLearner(make_net(), "d_rtrl", F.mse_loss, chunk=2)
    with pytest.raises(eb.InputError, match=r"`mask` has shape \(6, 2\)"):
        learner.gradients(xs, targets, torch.ones(6, 2))
    with pytest.raises(eb.InputError, match="no step with a positive weight"):
        learner.gradients(xs, targets, torch.zeros(6, 3))
    with pytest.raises(eb.InputError, match="`loss_at`"):
        eb.OnlineLearner(make_net(), loss=F.mse_loss, loss_at="first")
    with pytest.raises(eb.InputError, match="one target for each sequence"):
        eb.OnlineLearner(make_net(), loss=F.mse_loss, loss_at="last").gradients(xs, targets)


class Reduced(nn.Module):
    """A model whose own forward takes the mean of its outputs over time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.recurrent, self.out = nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, O)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, outputs = torch.zeros(x.shape[1], 3, dtype=x.dtype), []
        for x_t in x:
            h = torch.tanh(self.inner(x_t) + self.recurrent(h))
            outputs.append(self.out(h))
        return torch.stack(outputs).mean(0)


def softest_step(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss of all outputs that is no sum over time."""
    return F.cross_entropy(outputs.logsumexp(0) + outputs.mean(0), target)


def test_a_loss_over_the_whole_sequence_is_exact() -> None:
    model, (xs, _), target = make_net(), make_data(), torch.tensor([1, 0, 1])
    learner = eb.OnlineLearner(
        model, "rtrl", optimizer=optax.sgd(0.1), seq_loss=softest_step, chunk=2
    )
    whole = softest_step(model(xs), target)
    wanted = gradients_of(model, whole)
    result = learner.gradients(xs, target)
    assert result.loss == pytest.approx(float(whole.detach()), rel=1e-12)
    assert_same(result.grads, wanted)
    assert learner.evaluate([(xs, target)]) == pytest.approx(result.loss, rel=1e-12)
    first = {n: p.detach().clone() for n, p in model.named_parameters()}
    learner.update(xs, target)
    learner.sync_to_torch()
    assert_same({n: (first[n] - p.detach()) / 0.1 for n, p in model.named_parameters()}, wanted)
    with pytest.raises(eb.InputError, match="one update for it"):
        learner.update(xs, target, every="chunk")
    with pytest.raises(eb.InputError, match="takes no `mask`"):
        learner.gradients(xs, target, torch.ones(6))


def test_a_model_that_takes_the_mean_over_time() -> None:
    model, (xs, _), target = Reduced(), make_data(), torch.tensor([1, 0, 1])
    learner = eb.OnlineLearner(model, "rtrl", F.cross_entropy, chunk=2, loss_at="model")
    result = learner.gradients(xs, target)
    whole = F.cross_entropy(model(xs), target)
    assert learner.net.reduction == "mean"
    assert result.loss == pytest.approx(float(whole.detach()), rel=1e-12)
    assert_same(result.grads, gradients_of(model, whole))


class Twice(nn.Module):
    """A model that gives two outputs, of which a loss may read one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = self.inner(x)
        return 2 * outputs, outputs


@pytest.mark.parametrize(
    "name",
    [
        "ce_rate_loss",
        "ce_count_loss",
        "ce_max_membrane_loss",
        "mse_membrane_loss",
        "mse_count_loss",
    ],
)
def test_losses_of_snntorch(name: str) -> None:
    functional = pytest.importorskip("snntorch.functional")
    loss = getattr(functional, name)()
    model = make_net(torch.float32)
    (xs, _) = make_data(dtype=torch.float32)
    target = torch.tensor([1, 0, 1])
    whole = loss(model(xs), target)
    if name.startswith("mse"):  # run in torch; spiking layers give spikes and membranes
        model, of_one = Twice(model), loss
        loss = lambda outputs, target: of_one(outputs[1], target)
    result = eb.OnlineLearner(model, "bptt", seq_loss=loss).gradients(xs, target)
    assert result.loss == pytest.approx(float(whole.detach()), rel=1e-5)
    assert_same(result.grads, gradients_of(model, whole), 1e-5)


@pytest.mark.parametrize("rule", ["rtrl", "d_rtrl"])
def test_frozen_steps_are_as_if_they_had_not_been(rule: str) -> None:
    """Sequences with gaps: gradients, states and trace are those of the sequences without their
    gaps.
    """
    (xs, targets) = make_data()
    mask = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [0, 0, 1], [1, 0, 1], [1, 1, 0.0]])
    learner = eb.OnlineLearner(make_net(), rule, F.mse_loss, chunk=2, freeze=True)
    plain = eb.OnlineLearner(make_net(), rule, F.mse_loss, chunk=2)
    learner.gradients(xs, targets, mask, carry=True)
    later = learner.gradients(xs, targets, carry=True)
    states = [np.asarray(h) for h in learner.runtime.store.state.hidden]
    mean = dict.fromkeys(later.grads, 0.0)
    for b in range(3):
        rows = mask[:, b].bool()
        plain.reset()
        plain.gradients(xs[rows, b : b + 1], targets[rows, b : b + 1], carry=True)
        wanted = plain.gradients(xs[:, b : b + 1], targets[:, b : b + 1], carry=True)
        for found, h in zip(states, plain.runtime.store.state.hidden, strict=True):
            np.testing.assert_allclose(found[b : b + 1], np.asarray(h), atol=1e-12)
        mean = {n: mean[n] + g / 3 for n, g in wanted.grads.items()}
    assert_same(later.grads, mean)


def test_frozen_steps_need_a_rule_that_follows_the_states() -> None:
    with pytest.raises(eb.InputError, match="advances with the states only"):
        eb.OnlineLearner(make_net(), "pp_prop", F.mse_loss, freeze=True)
