"""Values that a compiled step would freeze: Python counters wherever they are kept, and what no
attribute shows.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb

pytestmark = pytest.mark.usefixtures("without_single_steps")
B, H = 3, 4


class Alternates(nn.Module):
    """Adds and subtracts in turn; `count(self)` gives the number of the step and moves on."""

    def __init__(self, count: Callable[[Any], int], **attributes: Any) -> None:
        super().__init__()
        self.fc, self.count = nn.Linear(H, H), count
        self.register_buffer("h", torch.zeros(B, H))
        self.__dict__.update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        self.h = 0.5 * self.h + self.fc(x) * (1.0 if self.count(self) % 2 else -1.0)
        return self.h


def in_dict(m: Any) -> int:
    m.memory["t"] += 1
    return m.memory["t"]


def in_list(m: Any) -> int:
    m.memory[0] += 1
    return m.memory[0]


def in_nested(m: Any) -> int:
    m.memory["inner"][1] += 1
    return m.memory["inner"][1]


def beside_a_tensor(m: Any) -> int:
    m.memory["v"] = m.memory["v"] + 1
    return in_dict(m)


def beside_a_parameter(m: Any) -> int:
    return in_dict(m)


def in_history(m: Any) -> int:
    m.memory.append(0.0)
    return len(m.memory)


@pytest.mark.parametrize(
    ("count", "memory", "label"),
    [
        (in_dict, {"t": 0}, r"`memory\['t'\]`"),
        (in_list, [0, "x"], r"`memory\[0\]`"),
        (in_nested, {"inner": ["a", 3]}, r"`memory\['inner'\]\[1\]`"),
        (beside_a_tensor, {"t": 0, "v": torch.zeros(B)}, r"`memory\['t'\]`"),
        (beside_a_parameter, {"t": 0, "w": nn.Parameter(torch.zeros(2))}, r"`memory\['t'\]`"),
        (in_history, [], r"`memory\[\d\]`"),
    ],
)
def test_counter_in_a_container(count: Callable, memory: Any, label: str) -> None:
    module = Alternates(count, memory=memory)
    with pytest.raises(
        eb.TracingError,
        match=rf"Python value that changes from step to step \({label}.*tensor buffer",
    ):
        eb.wrap(module).init_state(B)
    assert module.memory is memory and list(memory) == list(type(memory)(memory))
    # the model is as it was
    assert memory == [] or 1 not in ((memory.get("t"),) if isinstance(memory, dict) else memory)


def test_counter_in_a_container_that_does_not_matter() -> None:
    module = Alternates(lambda m: 0 * in_dict(m), memory={"t": 0}).double()
    net = eb.wrap(module)
    net.init_state(B)
    x = torch.randn(B, H).double()
    for _ in range(3):
        found, wanted = np.asarray(net(x)), module(x).detach().numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert np.abs(found).max() > 0.1


def test_counter_that_matters_only_later() -> None:
    def warm_up(m: Any) -> int:
        m.t += 1
        return 0 if m.t < 50 else 1

    with pytest.raises(
        eb.TracingError, match=r"a Python value that changes from step to step \(.*`t`"
    ):
        eb.wrap(Alternates(warm_up, t=0)).init_state(B)


class ActsNowAndThen(nn.Module):
    """Does something to its state at every 12th step; the counter is beside the state."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.cell, self.how, self.log = nn.GRUCell(H, H), how, []

    def advance(self, x: Tensor, h: Tensor, t: int) -> Tensor:
        if t % 12 == 11 and self.how == "detach":
            h = h.detach()
        if t % 12 == 11 and self.how == "reset":
            h = torch.zeros_like(h)
        if t % 12 == 11 and self.how == "log":
            self.log.append(h.detach())
        return self.cell(x, h)


class InAttributes(ActsNowAndThen):
    h: Tensor | None = None
    t = 0

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.advance(x, x.new_zeros(B, H) if self.h is None else self.h, self.t)
        self.t += 1
        return self.h


class InADict(ActsNowAndThen):
    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.memory = {"h": torch.zeros(B, H), "t": 0}

    def forward(self, x: Tensor) -> Tensor:
        h, t = self.memory["h"], self.memory["t"]
        self.memory = {"h": self.advance(x, h, t), "t": t + 1}
        return self.memory["h"]


class InArguments(ActsNowAndThen):
    def forward(self, x: Tensor, state: Any = None) -> Any:
        h, t = (x.new_zeros(B, H), 0) if state is None else state
        h = self.advance(x, h, t)
        return h, (h, t + 1)


@pytest.mark.parametrize("kind", [InAttributes, InADict, InArguments])
@pytest.mark.parametrize("how", ["detach", "reset"])
def test_what_a_counter_does_at_a_late_step_is_seen(kind: type, how: str) -> None:
    with pytest.raises(eb.TracingError, match="a Python value that changes from step to step"):
        eb.wrap(kind(how), example_input=torch.randn(B, H)).init_state(B)


@pytest.mark.parametrize("kind", [InAttributes, InADict, InArguments])
def test_a_log_at_a_late_step_is_no_part_of_the_step(kind: type) -> None:
    model, xs = kind("log"), torch.randn(25, B, H)
    net = eb.wrap(model, example_input=xs[0])
    net.init_state(B)
    found, state = [np.asarray(net(x)) for x in xs], None
    for x, y in zip(xs, found, strict=True):
        if kind is InArguments:
            wanted, state = model(x, state)
        else:
            wanted = model(x)
        np.testing.assert_allclose(y, wanted.detach(), rtol=0, atol=1e-6)


def test_counter_that_runs_out_of_a_list() -> None:
    class Scheduled(Alternates):
        def forward(self, x: Tensor) -> Tensor:
            self.t += 1
            return super().forward(x * self.factors[self.t - 1])

    with pytest.raises(
        eb.TracingError, match=r"a Python value that changes from step to step \(.*`t`"
    ):
        eb.wrap(Scheduled(lambda m: 0, t=0, factors=[1.0] * 8)).init_state(B)


def test_batch_norm_through_time_of_spikingjelly() -> None:
    layer = pytest.importorskip("spikingjelly.activation_based.layer")
    module = nn.Sequential(layer.BatchNormThroughTime1d(4, H, step_mode="s"))
    with pytest.raises(eb.TracingError, match=r"`0\._memories\['t'\]`"):
        eb.wrap(module, example_input=torch.randn(B, H)).init_state(B)


# ---- what no attribute shows


def in_closure() -> Callable[[Any], int]:
    t = 0

    def count(_: Any) -> int:
        nonlocal t
        t += 1
        return t

    return count


def in_object(m: Any) -> int:
    m.clock.t += 1
    return m.clock.t


@pytest.mark.parametrize(
    ("count", "attributes"),
    [
        (in_closure(), {}),
        (in_object, {"clock": SimpleNamespace(t=0)}),
        (lambda m: next(m.clock), {"clock": iter(range(100))}),
        (lambda m: m.clock.append(0) or len(m.clock), {"clock": deque()}),
    ],
    ids=["closure", "object", "iterator", "deque"],
)
def test_state_that_the_bridge_cannot_see(count: Callable, attributes: dict) -> None:
    module = Alternates(count, **attributes)
    with pytest.raises(
        eb.StateError,
        match=r"second step from the same input and the same states \(`h`\).*closure.*tensor attribute",
    ):
        eb.wrap(module).init_state(B)
    if hasattr(attributes.get("clock"), "t"):
        assert module.clock.t == 0  # objects are put back too


def test_python_random_numbers_are_not_frozen_silently() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(H, H)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x * random.random())

    with pytest.raises(eb.StateError, match="random numbers"):
        eb.wrap(Noisy()).init_state(B)


def test_dropout_is_not_taken_for_state() -> None:
    net = eb.wrap(nn.Sequential(nn.Linear(H, H), nn.Dropout(0.5)))
    net.init_state(B)
    assert net.hidden_paths == ()


# ---- a learned initial state


class InForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.h0 = nn.GRUCell(H, H), nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor, h: Tensor | None = None) -> Tensor:
        return self.cell(x, self.h0.expand(x.shape[0], H) if h is None else h)


class InAttribute(InForward):
    h = None

    def forward(self, x: Tensor) -> Tensor:
        self.h = self.cell(x, self.h0.expand(x.shape[0], H) if self.h is None else self.h)
        return self.h


class Given(InForward):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.cell(x, h)


def learned_start(kind: type[InForward]) -> tuple[nn.Module, dict[str, Any]]:
    module = kind()
    if kind is not Given:
        return module, {}
    nn.init.normal_(module.h0)
    return module, {"state": lambda batch_size: module.h0.expand(batch_size, H)}


@pytest.mark.parametrize("kind", [InForward, InAttribute, Given])
def test_learned_initial_state_is_not_silent(kind: type[InForward]) -> None:
    module, options = learned_start(kind)
    net = eb.wrap(module, **options)
    with pytest.warns(
        UserWarning, match="`h0`: used only to make the initial state.*no gradient"
    ) as caught:
        net.init_state(B)
    assert caught[0].filename == __file__
    assert net.start_parameters == ("h0",)
    torch.manual_seed(0)
    data = torch.randn(6, B, H), torch.randn(6, B, H)
    report = eb.check_gradients(module, *data, loss=nn.functional.mse_loss, rule="rtrl", **options)
    assert not report.ok and [p.name for p in report if not p.ok] == ["h0"]
    assert "`h0` gets no gradient: used only to make the initial state" in str(report)
    assert eb.check_gradients(
        module, *data, loss=nn.functional.mse_loss, rule="rtrl", allow_zero=["h0"], **options
    ).ok
    module.h0.requires_grad_(False)
    assert eb.check_gradients(module, *data, loss=nn.functional.mse_loss, rule="rtrl", **options).ok


def test_parameters_of_the_step_are_not_taken_for_start_parameters() -> None:
    for module in (
        nn.LSTM(H, H, 2),
        nn.GRUCell(H, H),
        nn.Sequential(nn.Linear(H, H), nn.RNN(H, H)),
    ):
        net = eb.wrap(module)
        net.init_state(B)
        assert net.start_parameters == ()


# ---- running without brainstate's overhead


def test_steady_step_gives_what_the_module_gives_and_writes_back() -> None:
    module = nn.Sequential(nn.Linear(H, H), nn.LSTM(H, H)).double()
    net, xs = eb.wrap(module, sequence=True), torch.randn(5, B, H).double()
    net.init_state(B)
    net(xs[0])  # it starts from where the module is
    step = net.steady_step(xs[0])
    before = [np.asarray(v) for v in net.hidden_values()]
    found = [step(x) for x in xs[1:]]
    for old, now in zip(before, net.hidden_values(), strict=True):
        np.testing.assert_array_equal(old, now)  # the module waits for `write_back`
    wanted = [net(x) for x in xs[1:]]
    for (a, _), (b, _) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)
    for a, b in zip(step.states, net.hidden_values(), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)
    net.init_state(B)
    step.write_back()
    for a, b in zip(step.states, net.hidden_values(), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(eb.InputError, match=r"takes inputs of shapes \[\(3, 4\)\].*steady_step"):
        step(torch.randn(2, H).double())


def test_steady_step_draws_new_random_numbers() -> None:
    net = eb.wrap(nn.Sequential(nn.Linear(H, H), nn.Dropout(0.5)))
    net.init_state(B)
    x = torch.randn(B, H)
    step = net.steady_step(x)
    assert not np.array_equal(step(x), step(x))
