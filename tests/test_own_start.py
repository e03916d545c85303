"""Required states that need no `state=`, because the module itself tells how they start; and methods
that have to be called before a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb

B, T, IN, H = 2, 5, 3, 4


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def agrees(
    model: nn.Module, torch_run: Callable[[nn.Module, Tensor], Tensor], x: Tensor, axis: int = 0
) -> eb.BridgedModule:
    """Compare outputs and exact online gradients with torch's, run as the author of a model would."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    net = eb.wrap(model)
    net.init_state(batch_size=x.shape[1 - axis])
    steps = np.stack([np.asarray(net(x.select(axis, t))) for t in range(T)], axis)
    whole = torch_run(model, x)
    np.testing.assert_allclose(steps, whole.detach(), rtol=0, atol=1e-12)
    weights = inputs(*whole.shape)
    names = [name for name, _ in model.named_parameters()]
    wanted = torch.autograd.grad((weights * whole).sum(), list(model.parameters()))
    learner = eb.OnlineLearner(
        model, rule="rtrl", chunk=2, reduction="sum", loss=lambda y, w: (w * y).sum()
    )
    found = learner.gradients(x, weights).grads
    for name, gradient in zip(names, wanted, strict=True):
        assert gradient.any(), name
        np.testing.assert_allclose(np.asarray(found[name]), gradient, rtol=0, atol=1e-10)
    return net


def loop(model: Any, x: Tensor, state: Any) -> Tensor:
    """Run a cell over a sequence as its author would."""
    outputs = []
    for step in x:
        y, *rest = model(step, state)
        state = rest[0] if len(rest) == 1 else tuple(rest)
        outputs.append(y)
    return torch.stack(outputs)


class Cell(nn.Module):
    """A cell with a packed state of two tensors of different rank, and no layer that takes it."""

    value = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.wx, self.wh = nn.Linear(IN, 2 * H), nn.Linear(H, 2 * H)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        h, c = hidden
        a, b = (self.wx(x) + self.wh(h)).chunk(2, -1)
        c = 0.7 * c + torch.tanh(a).unflatten(-1, (2, 2))
        h = torch.sigmoid(b) * torch.tanh(c).flatten(-2)
        return h, (h, c)


class WithInitHidden(Cell):
    def init_hidden(self, bsz: int) -> tuple[Tensor, Tensor]:
        """As many models write it: float32, whatever the model is."""
        return torch.zeros(bsz, H) + self.value, torch.zeros(bsz, 2, 2)


class StartsElsewhere(WithInitHidden):
    value = 0.3


class CamelCase(Cell):
    def initHidden(self) -> tuple[Tensor, Tensor]:
        return torch.full((1, H), 0.5), torch.zeros(1, 2, 2)


class FromTheInput(Cell):
    def default_hidden(self, input: Tensor) -> tuple[Tensor, Tensor]:
        return input.new_zeros(input.size(0), H), input.new_ones(input.size(0), 2, 2)


class InASubmodule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = StartsElsewhere()

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        return self.cell(x, hidden)


@pytest.mark.parametrize(
    ("kind", "start"),
    [
        (WithInitHidden, lambda m, x: m.init_hidden(B)),
        (StartsElsewhere, lambda m, x: m.init_hidden(B)),
        (CamelCase, lambda m, x: tuple(s.expand(B, *s.shape[1:]) for s in m.initHidden())),
        (FromTheInput, lambda m, x: m.default_hidden(x[0])),
        (InASubmodule, lambda m, x: m.cell.init_hidden(B)),
    ],
)
def test_a_method_of_the_module_makes_the_required_state(
    kind: type[nn.Module], start: Callable
) -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        return loop(model, x, tuple(s.double() for s in start(model, x)))

    net = agrees(kind().double(), run, inputs(T, B, IN))
    net.init_state(batch_size=3)  # another batch size
    assert np.asarray(net(inputs(3, IN))).shape == (3, H)


class TakesNone(nn.Module):
    """A cell that takes None too, but whose author starts from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(IN, H)

    def init_hidden(self, batch_size: int) -> Tensor:
        return torch.full((batch_size, H), 0.4)

    def forward(self, x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.cell(x, hidden)
        return hidden, hidden


def test_the_method_counts_where_none_would_do_too() -> None:
    agrees(
        TakesNone().double(), lambda m, x: loop(m, x, m.init_hidden(B).double()), inputs(T, B, IN)
    )


class TwoArguments(nn.Module):
    """A recurrent policy whose two state arguments go to a layer as a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(IN, H, batch_first=True), nn.Linear(H, 2)

    def forward(self, x: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, (h, c) = self.lstm(torch.tanh(x), (hidden, cell))
        return self.out(y), h, c


class Unpacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(IN, H)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.cell(x, (h, c))
        return torch.relu(h), h, c


def test_a_layer_that_takes_the_arguments_makes_them() -> None:
    def whole(model: nn.Module, x: Tensor) -> Tensor:
        return model(x, *torch.zeros(2, 1, B, H, dtype=x.dtype))[0]

    agrees(TwoArguments().double(), whole, inputs(B, T, IN), axis=1)

    def stepwise(model: nn.Module, x: Tensor) -> Tensor:
        return loop(lambda v, s: model(v, *s), x, tuple(torch.zeros(2, B, H, dtype=x.dtype)))

    agrees(Unpacked().double(), stepwise, inputs(T, B, IN))


class RandomStart(Cell):
    def init_hidden(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, H), torch.zeros(batch_size, 2, 2)


def test_a_method_that_draws_its_state_is_not_taken_and_the_error_says_what_fits() -> None:
    net = eb.wrap(RandomStart(), example_input=torch.zeros(B, IN))
    with pytest.raises(eb.StateError, match="needs a state in `hidden`"):
        net.init_state(batch_size=B)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wx, self.wh = nn.Linear(IN, 2 * H), nn.Linear(H, 2 * H)

    def forward(self, x: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        h, c = hidden
        a, b = (self.wx(x) + self.wh(h)).chunk(2, -1)
        c = 0.7 * c + torch.tanh(a)
        h = torch.sigmoid(b) * torch.tanh(c)
        return h, (h, c)


def test_where_nothing_tells_the_error_names_a_state_that_works() -> None:
    net = eb.wrap(Plain(), example_input=torch.zeros(B, IN))
    zeros = "(torch.zeros(batch_size, 4), torch.zeros(batch_size, 4))"
    with pytest.raises(eb.StateError) as error:
        net.init_state(batch_size=B)
    assert f"wrap(model, state=lambda batch_size: {zeros})" in str(error.value)
    net = eb.wrap(Plain(), lambda batch_size: (torch.zeros(batch_size, 4),) * 2)
    net.init_state(batch_size=B)
    assert np.asarray(net(torch.ones(B, IN))).any()


class LearnedStart(Cell):
    def __init__(self) -> None:
        super().__init__()
        self.h0 = nn.Parameter(torch.ones(H))

    def init_hidden(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return self.h0.expand(batch_size, H), torch.zeros(batch_size, 2, 2)


def test_a_learned_start_of_such_a_method_is_named() -> None:
    net = eb.wrap(LearnedStart(), example_input=torch.zeros(B, IN))
    with pytest.warns(UserWarning, match="`h0`"):
        net.init_state(batch_size=B)


class Memory(nn.Module):
    """State in attributes that `init_sequence` makes, and without which nothing runs."""

    def __init__(self) -> None:
        super().__init__()
        self.wx, self.wh, self.bank = nn.Linear(IN, H), nn.Linear(H, H), Bank()

    def init_sequence(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.bank.reset(batch_size)
        self.previous = torch.zeros(batch_size, H, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        read = self.bank.memory.mean(1)
        self.previous = torch.tanh(self.wx(x) + self.wh(self.previous) + read)
        self.bank.memory = 0.8 * self.bank.memory + self.previous.unsqueeze(1) / self.batch_size
        return self.previous


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("start", torch.linspace(-1, 1, 3 * H).reshape(1, 3, H))

    def reset(self, batch_size: int) -> None:
        self.memory = self.start.repeat(batch_size, 1, 1)


def test_a_method_that_begins_a_sequence_is_called() -> None:
    def run(model: Any, x: Tensor) -> Tensor:
        model.init_sequence(x.shape[1])
        outputs = torch.stack([model(step) for step in x])
        del model.previous, model.bank.memory, model.batch_size
        return outputs

    model = Memory().double()
    net = agrees(model, run, inputs(T, B, IN))
    assert not hasattr(model, "previous")
    x = inputs(T, 4, IN)
    net.init_state(batch_size=4)
    steps = np.stack([np.asarray(net(step)) for step in x])
    np.testing.assert_allclose(steps, run(model, x).detach(), rtol=0, atol=1e-12)
