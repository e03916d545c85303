"""`eb.OnlineModule`: torch's own loop, with online gradients."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import etrace_bridge as eb
from learner_models import T, assert_same, make_data, make_net, torch_gradients

RULES = [
    "d_rtrl",
    "rtrl",
    "pp_prop",
    "eprop",
    "snap1",
    "bptt",
    eb.rules.EProp(kappa=0.5),
    eb.rules.EProp(feedback="random"),
]


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }


def run_online(online: eb.OnlineModule, xs, ys) -> dict[str, torch.Tensor]:
    """`backward` at every step."""
    online.zero_grad()
    online.reset()
    for x, y in zip(xs, ys, strict=True):
        mse_loss(online(x), y).backward()
    return grads_of(online.model)


@pytest.fixture(scope="module")
def exact():
    """A module with exact gradients, compiled once; tests leave its weights as they are."""
    return eb.OnlineModule(make_net(), rule="rtrl")


@pytest.fixture(scope="module")
def d_rtrl():
    return eb.OnlineModule(make_net(), rule="d_rtrl")


@pytest.fixture(autouse=True)
def _afresh(request):
    for name in ("exact", "d_rtrl"):
        if name in request.fixturenames:
            online = request.getfixturevalue(name)
            online.reset()
            online.zero_grad()
            online.train()


# -- gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_the_sum_over_steps_is_the_learner_s_gradient(rule):
    net, (xs, ys) = make_net(), make_data()
    expected = (
        eb.OnlineLearner(net, rule=rule, loss=mse_loss, chunk=1, reduction="sum")
        .gradients(xs, ys)
        .grads
    )
    assert_same(run_online(eb.OnlineModule(net, rule=rule), xs, ys), expected)


def test_rtrl_is_torch_s_bptt_by_step_by_sequence_and_delayed(exact):
    xs, ys = make_data()
    expected = {n: T * g for n, g in torch_gradients(make_net(), xs, ys).items()}
    assert_same(run_online(exact, xs, ys), expected)

    exact.zero_grad()
    exact.reset()
    outputs = [exact(x) for x in xs]  # every loss comes after the last step
    sum(mse_loss(o, y) for o, y in zip(outputs, ys, strict=True)).backward()
    assert_same(grads_of(exact.model), expected)

    exact.zero_grad()
    exact.reset()
    first, second = exact(xs[:4]), exact(xs[4:])  # two sequences of one stream
    sum(mse_loss(o, y) for o, y in zip([*first, *second], ys, strict=True)).backward()
    assert_same(grads_of(exact.model), expected)


def test_one_loss_of_several_steps_and_a_delayed_reward(exact):
    """A product of outputs of different steps, as a return times a log-probability is."""
    xs, _ = make_data()

    def loss(outputs):
        reward = outputs[-1].detach().sum()
        return (outputs[1] * outputs[3]).sum() ** 2 + reward * torch.log_softmax(outputs[2], -1)[
            :, 0
        ].sum()

    loss([exact(x) for x in xs]).backward()
    reference = make_net()
    loss(reference(xs)).backward()
    assert_same(grads_of(exact.model), grads_of(reference))


def test_layers_before_and_after_learn_with_it(exact):
    torch.manual_seed(1)
    before, after = nn.Linear(4, 2).double(), nn.Linear(2, 1).double()
    xs = torch.randn(T, 3, 4, dtype=torch.float64)
    after(exact(before(xs))).pow(2).mean().backward()
    found = [p.grad.clone() for p in (*before.parameters(), *after.parameters())]
    for layer in (before, after):
        layer.zero_grad()
    after(make_net()(before(xs))).pow(2).mean().backward()
    for f, p in zip(found, (*before.parameters(), *after.parameters()), strict=True):
        assert p.grad.abs().max() > 1e-6
        torch.testing.assert_close(f, p.grad, rtol=1e-9, atol=1e-12)


def test_a_step_gives_its_input_the_gradient_of_that_step(d_rtrl):
    xs, ys = make_data()
    with torch.no_grad():
        d_rtrl(xs[0])
    x = xs[1].clone().requires_grad_()
    mse_loss(d_rtrl(x), ys[1]).backward()
    reference = make_net()
    state = reference.rnn(xs[:1])[1].detach()
    y = xs[1:2].clone().requires_grad_()
    mse_loss(reference.out(reference.rnn(y, state)[0])[0], ys[1]).backward()
    assert y.grad.abs().max() > 1e-6
    torch.testing.assert_close(x.grad, y.grad[0], rtol=1e-9, atol=1e-12)


def test_steps_under_no_grad_advance_states_and_are_constants_afterwards(exact):
    xs, ys = make_data()
    with torch.no_grad():
        assert not exact(xs[:2]).requires_grad
        exact(xs[2])
    sum(mse_loss(exact(x), y) for x, y in zip(xs[3:], ys[3:], strict=True)).backward()
    reference = make_net()
    with torch.no_grad():
        state = reference.rnn(xs[:3])[1]
    outputs = reference.out(reference.rnn(xs[3:], state)[0])
    sum(mse_loss(o, y) for o, y in zip(outputs, ys[3:], strict=True)).backward()
    assert_same(grads_of(exact.model), grads_of(reference))


def test_weights_changed_between_steps_and_a_loss_that_comes_after_the_change():
    """The gradient of a late loss is that at the weights of its step."""
    xs, ys = make_data()
    net = make_net()
    online = eb.OnlineModule(net, rule="rtrl")
    output = online(xs[0])
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.3)
    second = online(xs[1])
    mse_loss(output, ys[0]).backward()
    assert_same(
        grads_of(net) | {"rnn.weight_hh_l0": torch.ones(1)},
        torch_gradients(make_net(), xs[:1], ys[:1]) | {"rnn.weight_hh_l0": torch.ones(1)},
    )
    reference = make_net()
    with torch.no_grad():
        state = reference.rnn(xs[:1])[1]
    torch.testing.assert_close(
        second.detach(), net.out(net.rnn(xs[1:2], state)[0])[0].detach(), rtol=1e-9, atol=0
    )


# -- torch's manners ------------------------------------------------------------------------------

CHANGES = {
    "in place": lambda p: p.add_(0.5),
    ".data in place": lambda p: p.data.add_(0.5),
    "new .data": lambda p: setattr(p, "data", p.data + 0.5),
    "one element": lambda p: p.data.view(-1)[0].add_(0.5),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_seen_however_torch_changed_them(d_rtrl, change):
    xs, _ = make_data()
    weight = d_rtrl.model.out.weight
    before = weight.detach().clone()
    with torch.no_grad():
        first = d_rtrl(xs[0])
        d_rtrl.reset()
        CHANGES[change](weight)
        found, expected = d_rtrl(xs[0]), d_rtrl.model(xs[:1])[0]
        weight.copy_(before)
    assert (first - found).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.x32
@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.Adam(p, fused=True), lambda p: torch.optim.SGD(p, 0.1, fused=True)],
    ids=["adam", "sgd"],
)
def test_fused_optimizers_leave_version_counters_and_are_seen(make):
    net, (xs, ys) = make_net(torch.float32), make_data(dtype=torch.float32)
    online = eb.OnlineModule(net)
    optimizer = make(net.parameters())
    mse_loss(online(xs[0]), ys[0]).backward()
    optimizer.step()
    online.reset()
    with torch.no_grad():
        torch.testing.assert_close(online(xs[0]), net(xs[:1])[0], rtol=1e-5, atol=1e-6)


def test_replaced_parameters_and_nothing_shares_torch_s_memory():
    net, (xs, _) = make_net(), make_data()
    online = eb.OnlineModule(net)
    with torch.no_grad():
        x = xs[0].clone()
        first = online(x)
        kept = first.clone()
        x.zero_()
        torch.testing.assert_close(first, kept, rtol=0, atol=0)
        first.zero_()  # an output may be written to as well
        online.reset()
        net.out.weight = nn.Parameter(2 * net.out.weight.detach())
        torch.testing.assert_close(online(xs[0]), net(xs[:1])[0], rtol=1e-9, atol=0)
        net.out.weight.zero_()
        online.reset()
        torch.testing.assert_close(online(xs[0]), net(xs[:1])[0], rtol=1e-9, atol=0)


def test_gradients_may_be_written_to(d_rtrl):
    """They are torch's own: nothing else reads that memory, and no two share it."""
    xs, ys = make_data()
    d_rtrl(xs[2])  # so that the state is not zero
    x = xs[0].clone().requires_grad_()
    loss = mse_loss(d_rtrl(x), ys[0])
    loss.backward(retain_graph=True)
    parameters = [p for p in d_rtrl.parameters() if p.grad is not None]
    once, x_once = [p.grad.clone() for p in parameters], x.grad.clone()
    assert len({p.grad.data_ptr() for p in parameters}) == len(parameters)
    second = d_rtrl(xs[1])
    with torch.no_grad():
        for n, p in enumerate(parameters):
            p.grad.fill_(n)
        x.grad.zero_()
        expected = second.clone()
    loss.backward()
    for n, (p, g) in enumerate(zip(parameters, once, strict=True)):
        assert g.abs().max() > 1e-6
        torch.testing.assert_close(p.grad, n + g, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(x.grad, x_once, rtol=0, atol=0)
    torch.testing.assert_close(second, expected, rtol=0, atol=0)


def test_gradients_accumulate_are_clipped_and_hooked(d_rtrl):
    xs, ys = make_data()
    seen = []
    handle = d_rtrl.model.out.weight.register_hook(lambda g: seen.append(g.clone()))
    outside = d_rtrl.register_forward_hook(lambda module, args, output: seen.append("forward"))
    mse_loss(d_rtrl(xs[0]), ys[0]).backward()
    handle.remove()
    outside.remove()
    assert seen[0] == "forward"
    once = grads_of(d_rtrl.model)
    torch.testing.assert_close(seen[1], once["out.weight"])
    d_rtrl.reset()
    mse_loss(d_rtrl(xs[0]), ys[0]).backward()
    assert_same(
        {n: g for n, g in grads_of(d_rtrl.model).items() if n != "rnn.weight_hh_l0"},
        {n: 2 * g for n, g in once.items() if n != "rnn.weight_hh_l0"},
    )
    norm = nn.utils.clip_grad_norm_(d_rtrl.parameters(), 1e-3)
    assert norm > 1e-3
    assert (
        abs(
            nn.utils.get_total_norm([p.grad for p in d_rtrl.parameters() if p.grad is not None])
            - 1e-3
        )
        < 1e-6
    )


def test_parameters_and_state_dict_are_the_model_s_own(d_rtrl):
    model = d_rtrl.model
    assert [id(p) for p in d_rtrl.parameters()] == [id(p) for p in model.parameters()]
    assert list(d_rtrl.state_dict()) == list(model.state_dict())
    other = eb.OnlineModule(make_net())
    changed = {n: t + 1 for n, t in model.state_dict().items()}
    other.load_state_dict(changed)
    assert_same(dict(other.model.state_dict()), changed)
    holder = nn.ModuleDict({"online": other})
    assert set(holder.state_dict()) == {f"online.{n}" for n in model.state_dict()}
    holder.load_state_dict({f"online.{n}": t for n, t in model.state_dict().items()})
    assert_same(dict(other.model.state_dict()), dict(model.state_dict()))
    with pytest.raises(RuntimeError, match="spare"):
        holder.load_state_dict({f"online.{n}": t for n, t in changed.items() if "spare" not in n})
    plain = make_net()
    plain.load_state_dict(other.state_dict())


def test_a_second_backward_and_what_waiting_outputs_keep(d_rtrl):
    xs, ys = make_data()
    loss = mse_loss(d_rtrl(xs[0]), ys[0])
    loss.backward(retain_graph=True)
    once = grads_of(d_rtrl.model)["out.weight"]
    loss.backward()
    torch.testing.assert_close(grads_of(d_rtrl.model)["out.weight"], 2 * once)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()

    outputs = [d_rtrl(x) for x in xs[1:4]]
    call = weakref.ref(d_rtrl._stream.last)
    d_rtrl(xs[4])
    gc.collect()
    assert call() is not None, "the output still waits for its loss"
    outputs[2].sum().backward()
    gc.collect()
    assert call() is None, "freed by its backward pass"
    call = weakref.ref(d_rtrl._stream.last)
    d_rtrl.reset()
    gc.collect()
    assert call() is None


def test_copies_and_pickles_go_on_with_states_and_traces():
    xs, ys = make_data()
    online = eb.OnlineModule(make_net(), rule="rtrl")
    online(xs[0])
    online(xs[1])
    for other in (copy.deepcopy(online), pickle.loads(pickle.dumps(online))):
        assert other.model is not online.model
        with pytest.raises(eb.StateError, match="copied"):
            other.reset(torch.ones(3))
        mse_loss(other(xs[2]), ys[2]).backward()
        reference = make_net()
        mse_loss(reference(xs[:3])[2], ys[2]).backward()
        assert_same(grads_of(other.model), grads_of(reference))
    assert all(p.grad is None for p in online.parameters())


class ForSequences(nn.Module):
    """A body with a loss, called as Hugging Face's models are."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if isinstance(self.body, eb.OnlineModule):
            self.body.reset()
        logits = self.body(inputs.transpose(0, 1)).transpose(0, 1)
        return {"loss": mse_loss(logits, labels), "logits": logits}


class Trainer:
    """A training loop in Hugging Face's style; it knows nothing of online learning."""

    def __init__(self, model: nn.Module, data: DataLoader, accumulation: int = 2) -> None:
        self.model, self.data, self.accumulation = model, data, accumulation
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=4)

    def train(self, epochs: int) -> list[float]:
        losses = []
        for _ in range(epochs):
            self.model.train()
            for n, (inputs, labels) in enumerate(self.data, 1):
                loss = self.model(inputs=inputs, labels=labels)["loss"] / self.accumulation
                loss.backward()
                if n % self.accumulation == 0:
                    norm = nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
                    assert norm > 0.1, "the clipping acts"
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()
            losses.append(self.evaluate())
        return losses

    @torch.no_grad()
    def evaluate(self) -> float:
        self.model.eval()
        return sum(self.model(inputs=x, labels=y)["loss"].item() for x, y in self.data)


def test_a_hugging_face_style_trainer_trains_it_as_it_trains_the_plain_model(exact):
    """Accumulation, clipping, a scheduler and evaluation in between; exact gradients, so the
    weights must go the same way.
    """
    xs, ys = make_data(batch=12)
    examples = TensorDataset(xs.transpose(0, 1), ys.transpose(0, 1))
    before = copy.deepcopy(exact.state_dict())
    plain = make_net()
    expected = Trainer(ForSequences(plain), DataLoader(examples, 3)).train(2)
    found = Trainer(ForSequences(exact), DataLoader(examples, 3)).train(2)
    after = copy.deepcopy(exact.state_dict())
    exact.load_state_dict(before)  # the fixture is shared
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert_same(after, dict(plain.state_dict()))
    assert (after["rnn.weight_hh_l0"] - before["rnn.weight_hh_l0"]).abs().max() > 1e-2


def test_a_dropped_output_frees_what_its_loss_would_have_needed(d_rtrl):
    xs, _ = make_data()
    output = d_rtrl(xs[0])
    call = weakref.ref(d_rtrl._stream.last)
    d_rtrl(xs[1])
    gc.collect()
    assert call() is not None, "the output still waits for its loss"
    del output
    gc.collect()
    assert call() is None


def test_to_another_dtype_and_back(d_rtrl):
    xs, _ = make_data()
    before = copy.deepcopy(d_rtrl.state_dict())
    first = d_rtrl(xs[0]).detach()
    d_rtrl.reset()
    d_rtrl.to(torch.float32)
    output = d_rtrl(xs[0].float())
    output.sum().backward()
    assert output.dtype == d_rtrl.model.out.weight.grad.dtype == torch.float32
    torch.testing.assert_close(output.detach(), first.float(), rtol=1e-5, atol=1e-6)
    d_rtrl.zero_grad()
    d_rtrl.reset()
    d_rtrl.to(torch.float64)
    d_rtrl.load_state_dict(before)
    torch.testing.assert_close(d_rtrl(xs[0]).detach(), first, rtol=1e-9, atol=0)


# -- streams --------------------------------------------------------------------------------------


def test_reset_of_finished_episodes(exact):
    xs, ys = make_data()
    exact(xs[0])
    exact(xs[1])
    exact.reset(torch.tensor([False, True, False]))
    mse_loss(exact(xs[2]), ys[2]).backward()
    reference = make_net()
    state = (
        reference.rnn(xs[:2])[1] * torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)[None, :, None]
    )
    mse_loss(reference.out(reference.rnn(xs[2:3], state)[0])[0], ys[2]).backward()
    assert_same(grads_of(exact.model), grads_of(reference))
    with pytest.raises(eb.InputError, match="mask"):
        exact.reset(torch.ones(2))


def test_another_batch_size_needs_a_reset(d_rtrl):
    xs, _ = make_data()
    d_rtrl(xs[0])
    with pytest.raises(eb.InputError, match=r"reset\(\)"):
        d_rtrl(xs[0, :2])
    d_rtrl(xs[1])  # and the stream is as it was
    d_rtrl.reset()
    assert d_rtrl(xs[0, :2]).shape == (2, 2)


def test_frozen_parameters_get_nothing_and_may_thaw(d_rtrl):
    xs, ys = make_data()
    net = make_net()
    net.out.weight.requires_grad_(False)
    online = eb.OnlineModule(net)
    mse_loss(online(xs[0]), ys[0]).backward()
    assert net.out.weight.grad is None and net.out.bias.grad is not None
    net.out.weight.requires_grad_(True)
    with pytest.raises(eb.StateError, match=r"reset\(\)"):
        online(xs[1])
    online.reset()
    mse_loss(online(xs[0]), ys[0]).backward()
    assert net.out.weight.grad.abs().max() > 0
    for p in net.parameters():
        p.requires_grad_(False)
    online.reset()
    # there is nothing to learn online
    with pytest.raises(eb.CompilationError, match="No parameter"):
        online(xs[0])


class Noisy(nn.Module):
    """Dropout and a norm around a GRU, on token numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(5, 4), nn.GRU(4, 6, batch_first=True)
        self.norm, self.drop, self.out = nn.LayerNorm(6), nn.Dropout(0.5), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.norm(self.gru(self.embed(x))[0])))


class Measuring(nn.Module):
    """A cell behind a batch norm, whose running statistics move with every step."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.cell = nn.BatchNorm1d(4), nn.GRUCell(4, 6)

    def forward(self, x: torch.Tensor, h: torch.Tensor | None = None) -> torch.Tensor:
        return self.cell(self.norm(x), h)


@pytest.mark.x32
def test_running_statistics_move_in_torch_s_buffers():
    net, twin = Measuring(), Measuring()
    twin.load_state_dict(net.state_dict())
    online, xs = eb.OnlineModule(net), torch.randn(3, 5, 4) + 2
    h = None
    for x in xs:
        online(x).sum().backward()
        h = twin(x, h)
    assert net.norm.running_mean.abs().max() > 0.1
    torch.testing.assert_close(net.norm.running_mean, twin.norm.running_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(net.norm.running_var, twin.norm.running_var, rtol=1e-5, atol=1e-6)


@pytest.mark.x32
def test_tokens_modes_and_batch_first_in_jax_s_default_mode():
    assert not jax.config.jax_enable_x64
    net = Noisy()
    online = eb.OnlineModule(net)
    tokens = torch.randint(0, 5, (3, 4))  # (batch, time)
    out = online(tokens, sequence=True)
    assert out.shape == (3, 4, 5) and out.dtype == torch.float32
    cross_entropy(out.flatten(0, 1), tokens.flatten()).backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())
    with torch.no_grad():
        online.reset()
        assert not torch.equal(online(tokens[:, 0]), (online.reset(), online(tokens[:, 0]))[1]), (
            "dropout draws anew"
        )
        online.reset()
        online.eval()
        torch.testing.assert_close(online(tokens), net(tokens), rtol=1e-5, atol=1e-6)
        online.train()
    online(tokens[:, 0])  # what ran under `no_grad` has no trace, so the mode may change
    online.eval()
    with pytest.raises(eb.StateError, match=r"eval\(\)"):
        online(tokens[:, 1])


@pytest.mark.x32
def test_in_float32_it_is_bptt_to_single_precision():
    xs, ys = make_data(dtype=torch.float32)
    expected = {n: T * g for n, g in torch_gradients(make_net(torch.float32), xs, ys).items()}
    assert_same(
        run_online(eb.OnlineModule(make_net(torch.float32), rule="rtrl"), xs, ys), expected, 1e-5
    )


# -- steps and sequences, errors ------------------------------------------------------------------


def test_wrong_inputs_are_refused(d_rtrl):
    xs, _ = make_data()
    with pytest.raises(eb.InputError, match="without an input"):
        d_rtrl()
    with pytest.raises(eb.InputError, match="takes torch tensors"):
        d_rtrl([1, 2])
    with pytest.raises(eb.InputError, match="float32"):
        d_rtrl(xs[0].float())
    with pytest.raises(eb.InputError, match="no time steps"):
        d_rtrl(xs[:0], sequence=True)
    with pytest.raises(eb.InputError, match="not online already"):
        eb.OnlineModule(d_rtrl)
    with pytest.raises(eb.StateError, match="no input yet"):
        _ = eb.OnlineModule(make_net()).graph
    assert np.isfinite(d_rtrl(xs[0]).detach().numpy()).all()
    assert "weight_hh_l0" in d_rtrl.graph.report()


@pytest.mark.x32
def test_one_example_at_a_time_by_the_convention_of_stream_libraries():
    net = make_net(torch.float32)
    stream = eb.StreamLearner(net, loss=mse_loss, optimizer=torch.optim.SGD(net.parameters(), 0.05))
    assert repr(stream).startswith("StreamLearner(OnlineLearner(")
    xs, ys = make_data(40, 1, dtype=torch.float32)
    first = stream.predict_one(xs[0, 0])
    torch.testing.assert_close(
        first, make_net(torch.float32)(xs[:1])[0, 0].detach(), rtol=1e-5, atol=1e-6
    )
    assert stream.learn_one(xs[0, 0], ys[0, 0]) is stream
    states = [h.copy() for h in map(np.asarray, stream.learner.runtime.store.state.hidden)]
    again = stream.predict_one(xs[1, 0])
    assert torch.equal(again, stream.predict_one(xs[1, 0])), "a prediction moves nothing"
    np.testing.assert_array_equal(
        states[0], np.asarray(stream.learner.runtime.store.state.hidden[0])
    )
    outputs = stream.learner.step(xs[1], ys[1]).output
    torch.testing.assert_close(again, outputs[0], rtol=1e-5, atol=1e-6)
    stream.reset()
    assert stream.learner.updates == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_around_it_is_refused(reentrant: bool):
    """It would run every step a second time, from the states after the last one."""
    online = eb.OnlineModule(make_net(), "d_rtrl")
    x = make_data()[0][0].requires_grad_()
    output = checkpoint(lambda x: online(x).tanh(), x, use_reentrant=reentrant)
    with pytest.raises(eb.StateError, match=r"within a backward pass.*checkpoint"):
        output.sum().backward()


def test_hooks_on_saved_tensors_see_nothing_of_the_tracing():
    """Checkpointing of a step that saves nothing else runs it once. The backward pass of a check
    while tracing used to run it once more, which moved the states.
    """
    (xs, ys), model = make_data(), make_net()
    online = eb.OnlineModule(model, "rtrl")
    outputs = [checkpoint(online, x, use_reentrant=False) for x in xs]
    mse_loss(torch.stack(outputs), ys).backward()
    assert_same(grads_of(model), torch_gradients(make_net(), xs, ys))
