"""Modes, numbers and hooks of a torch model that change after its step was compiled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import etrace_bridge as eb
from etrace_bridge.frontend.inside import Inside

T, B, IN, H = 5, 3, 2, 4


class Net(nn.Module):
    """A GRU cell with numbers of its own, also in containers, a clock that nothing reads, dropout."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop, self.out = nn.GRUCell(IN, H), nn.Dropout(0.0), nn.Linear(H, 2)
        self.gain, self.squash, self.calls = 1.0, torch.tanh, 0
        self.options, self.config = {"gains": [1.0, 5.0]}, SimpleNamespace(shift=0.0, unread=0)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self.calls += 1
        h = self.cell(x, h)
        gain = self.gain * self.options["gains"][0]
        return self.scale * self.squash(gain * self.out(self.drop(h)) + self.config.shift), h


def set_gain(model: Net) -> None:
    model.gain = 3.0


def set_class_attribute(model: Net) -> None:
    model.scale = 2.0


def set_function(model: Net) -> None:
    model.squash = torch.sigmoid


def set_in_list(model: Net) -> None:
    model.options["gains"][0] = 2.0


def set_in_object(model: Net) -> None:
    model.config.shift = 0.5


def add_hook(model: Net) -> None:
    model.out.register_forward_hook(lambda module, args, out: 2 * out)


def add_pre_hook(model: Net) -> None:
    model.out.register_forward_pre_hook(lambda module, args: (-args[0],))


CHANGES = [
    set_gain, set_class_attribute, set_function, set_in_list, set_in_object, add_hook, add_pre_hook,
]  # fmt: skip


def data() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(T, B, IN, dtype=torch.float64), torch.randn(T, B, 2, dtype=torch.float64)


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def torch_gradients(model: nn.Module, xs: Tensor, ys: Tensor) -> dict[str, Tensor]:
    """Each step alone in a fresh state, so that any rule is exact."""
    total: Any = sum(F.mse_loss(model(x)[0], y) for x, y in zip(xs, ys, strict=True))
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(total, parameters), strict=True))


@pytest.mark.parametrize("change", CHANGES)
def test_a_learner_names_what_changed_and_stays_as_it_was(change: Any) -> None:
    model, (xs, ys) = make(), data()
    learner = eb.OnlineLearner(
        model, loss=F.mse_loss, optimizer=torch.optim.SGD(model.parameters())
    )
    learner.step(xs[0], ys[0])
    before = learner.predict(xs)
    change(model)
    for call in (
        lambda: learner.step(xs[1], ys[1]),
        lambda: learner.step(xs[1]),
        lambda: learner.gradients(xs, ys),
        lambda: learner.update(xs, ys),
        lambda: learner.predict(xs),
        lambda: learner.evaluate([(xs, ys)]),
    ):
        with pytest.raises(eb.StateError, match="has changed since the learner compiled its step"):
            call()
    for name in ("gain", "scale", "squash", "options", "config"):  # set it back
        vars(model)[name] = getattr(make(), name)
    model.out._forward_hooks.clear()
    model.out._forward_pre_hooks.clear()
    assert torch.equal(torch.as_tensor(before), torch.as_tensor(learner.predict(xs)))
    learner.step(xs[1], ys[1])


def test_a_learner_in_training_mode_refuses_to_learn_in_evaluation_mode() -> None:
    model, (xs, ys) = make(), data()
    model.drop.p = 0.5
    learner = eb.OnlineLearner(model, loss=F.mse_loss)
    learner.gradients(xs, ys)
    model.eval()
    with pytest.raises(eb.StateError, match="`training` is False and was True"):
        learner.gradients(xs, ys)
    with torch.no_grad():
        h, outputs = None, []
        for x in xs:
            out, h = model(x, h)
            outputs.append(out)
    torch.testing.assert_close(
        torch.as_tensor(learner.predict(xs)), torch.stack(outputs), rtol=1e-9, atol=1e-12
    )
    model.train()
    learner.gradients(xs, ys)


def test_changes_that_the_step_does_not_see_are_accepted() -> None:
    model, (xs, ys) = make(), data()
    learner = eb.OnlineLearner(model, loss=F.mse_loss)
    first = learner.gradients(xs, ys)
    model.eval()  # its dropout does nothing
    model(xs[0])  # moves the clock on
    model.note, model.config.unread, model.config.note = "run 7", 7, "run 7"
    model.options = {"gains": [1.0, 5.0]}
    second = learner.gradients(xs, ys)
    for name, grad in first.grads.items():
        assert torch.equal(torch.as_tensor(grad), torch.as_tensor(second.grads[name]))
        assert torch.as_tensor(grad).abs().max() > 0


@pytest.mark.parametrize("change", CHANGES)
def test_online_module_and_wrap_follow_a_change(change: Any) -> None:
    model, (xs, ys) = make(), data()
    online, net = eb.OnlineModule(model, rule="d_rtrl"), eb.wrap(model)
    net.init_state(B)
    old, old_net = online(xs[0]), torch.as_tensor(net(xs[0]))
    online.reset()
    net.reset_state()
    change(model)
    for x, y in zip(xs, ys, strict=True):
        online.reset()
        F.mse_loss(online(x), y).backward()
    expected = torch_gradients(model, xs, ys)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12)
    new = model(xs[0])[0]
    torch.testing.assert_close(torch.as_tensor(net(xs[0])), new, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(old, new, rtol=1e-3)
    assert not torch.allclose(old_net, new, rtol=1e-3)


def test_online_module_follows_the_share_of_dropout() -> None:
    model, (xs, _) = make(), data()
    online = eb.OnlineModule(model)
    with torch.no_grad():
        online(xs[0])
        model.drop.p = 1.0
        online.reset()
        dropped = online(xs[0])
    torch.testing.assert_close(
        dropped, torch.tanh(model.out.bias).expand(B, 2), rtol=1e-12, atol=1e-12
    )


def test_what_is_inside_containers() -> None:
    """Plain values that changed, came or went; states, and attributes that no code names, may change."""
    names = frozenset({"inner", "rate"})
    inner = SimpleNamespace(rate=0.5, other=1)
    value = {"list": [1, (2.0, "a")], "state": torch.ones(1), "object": inner, "itself": None}
    value["itself"] = value
    inside = Inside(value, names)
    assert inside.holds(value) and not list(inside.differences("a", value))
    inner.other = 2
    assert inside.holds(value)
    value["state"] = torch.zeros(2)
    assert not inside.holds(value) and not list(inside.differences("a", value))
    value["list"][1] = (2.0, "b")
    inner.rate = 0.7
    value["new"] = 3
    assert list(inside.differences("a", value)) == [
        "`a['list'][1][1]` is 'b' and was 'a'",
        "`a['object'].rate` is 0.7 and was 0.5",
        "`a['new']` is new",
    ]
    assert list(inside.differences("a", {"list": [], "state": 0, "object": inner})) == [
        "`a['list'][0]` is gone",
        "`a['list'][1][0]` is gone",
        "`a['list'][1][1]` is gone",
        "`a['object'].rate` is 0.7 and was 0.5",
    ]
