"""Loops that cannot be one step: refused, with the reason and the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import etrace_bridge as eb
from loop_models import IN, B, H, Inline, Shifted, T


class Normalised(Inline):
    """Looks ahead in one of several ways before the loop."""

    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.how(x))


LOOK_AHEAD: dict[str, Callable[[Tensor], Tensor]] = {
    "statistics": lambda x: x - x.mean(1, keepdim=True),
    "reversed": lambda x: x.flip(1),
    "centred convolution": lambda x: F.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "attention": lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
}


@pytest.mark.parametrize("how", list(LOOK_AHEAD))
def test_a_loop_that_looks_ahead_is_refused_with_the_line(how: str) -> None:
    with pytest.raises(
        eb.NotSupportedError,
        match=r"depends on later inputs.*(test_loop_refusals|loop_models)\.py:\d+",
    ):
        eb.wrap(Normalised(LOOK_AHEAD[how]).double()).init_state(B)


class Clocked(Inline):
    """Every other step is different."""

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros(x.shape[0], H, dtype=x.dtype), []
        for t in range(x.shape[1]):
            h = (
                torch.tanh(self.inp(x[:, t]) + self.rec(h))
                if t % 2
                else 0.5 * h + self.inp(x[:, t])
            )
            out.append(h)
        return torch.stack(out, 1)


class Positions(Inline):
    """A table of positions is added."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(30, IN))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table[: x.shape[1]])


@pytest.mark.parametrize(
    ("kind", "reason"), [(Clocked, "not alike"), (Positions, "not alike|depends on its number")]
)
def test_steps_that_differ_are_refused(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(eb.NotSupportedError, match=reason):
        eb.wrap(kind().double()).init_state(B)


def test_a_layout_that_was_assumed_wrong_is_not_trained_on() -> None:
    learner = eb.OnlineLearner(Shifted().double(), rule="d_rtrl", loss=F.mse_loss)
    assert not learner.runtime.batch_first  # nothing tells yet
    with pytest.raises(eb.InputError, match=r"batch_first=True"):
        learner.gradients(
            torch.randn(B, T, IN, dtype=torch.float64), torch.randn(B, T, H, dtype=torch.float64)
        )


def test_a_loop_that_writes_running_statistics_is_refused_in_training_mode():
    """The step that is found in a loop carries no buffers, so the statistics would silently stay as
    they are.
    """

    class Measuring(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.cell = nn.BatchNorm1d(3), nn.GRUCell(3, 4)

        def forward(self, x):
            h, outputs = torch.zeros(x.shape[1], 4, dtype=x.dtype), []
            for x_t in x:
                h = self.cell(self.norm(x_t), h)
                outputs.append(h)
            return torch.stack(outputs)

    model = Measuring().double()
    x = torch.randn(5, 3).double()
    with pytest.raises(
        eb.NotSupportedError, match="writes to `norm.running_mean`, `norm.running_var`"
    ):
        eb.wrap(model, example_input=x).init_state(batch_size=5)
    net = eb.wrap(model.eval(), example_input=x)
    net.init_state(batch_size=5)
    expected = model(x[None])[0]
    torch.testing.assert_close(eb.to_torch(net(x)), expected, rtol=1e-9, atol=1e-12)


class TimeMajor(Inline):
    """Time-major loops that also run on one step `(batch, ...)`, sample by sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def cell(self, x: Tensor, h: Tensor) -> Tensor:
        return torch.tanh(self.inp(x) + self.rec(h))

    def forward(self, x: Tensor) -> Tensor:
        h, past, out = x.new_zeros(x.shape[1], H), [], []
        if self.how == "both directions":
            for x_t in x.flip(0):
                h = self.cell(x_t, h)
                past.insert(0, h)
            h = torch.zeros_like(h)
        for t, x_t in enumerate(x):
            h = self.cell(x_t, h)
            if self.how == "both directions":
                out.append(h + past[t])
                continue
            past.append(h)
            seen = torch.stack(past)
            weights = torch.softmax((seen * h).sum(-1, keepdim=True), 0)
            out.append((weights * seen).sum(0))
        return torch.stack(out)


@pytest.mark.parametrize(
    ("how", "reason"), [("both directions", "later inputs"), ("attention", "the state would grow")]
)
def test_the_reason_is_that_of_the_layout_that_keeps_samples_apart(how: str, reason: str) -> None:
    """In the other layout the loop runs over samples, and what fails there says nothing."""
    net = eb.wrap(TimeMajor(how).double())
    with pytest.raises(eb.NotSupportedError, match=reason):
        net.init_state(B)
        net(torch.randn(B, IN, dtype=torch.float64))


class ChannelsFirst(nn.Module):
    """A loop over `(batch, channels, time)`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(IN, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        h, out = x.new_zeros(len(x), H), []
        for x_t in x.unbind(2):
            h = torch.tanh(self.inp(x_t) + self.rec(h))
            out.append(h)
        return torch.stack(out, 2)


class ChannelsFirstMaps(nn.Module):
    """A leaky sum over `(batch, channels, time, width)` that also runs on one step."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, :, 0]), []
        for t in range(x.shape[2]):
            h = self.decay * h + x[:, :, t]
            out.append(h)
        return torch.stack(out, 2)


@pytest.mark.parametrize("shown", [True, False])
def test_time_on_the_third_axis_is_refused_with_the_axis(shown: bool) -> None:
    model, x = ChannelsFirst().double(), torch.randn(B, IN, T, dtype=torch.float64)
    with pytest.raises(eb.NotSupportedError, match=r"loops over axis 2.*movedim\(1, 2\)"):
        if shown:
            eb.wrap(model, example_input=x[:, :, 0]).init_state(B)
        else:
            learner = eb.OnlineLearner(model, "bptt", F.mse_loss)
            learner.gradients(x, torch.randn(B, H, T, dtype=torch.float64))


def test_a_stateless_step_with_time_on_the_third_axis_warns() -> None:
    net = eb.wrap(ChannelsFirstMaps().double(), example_input=torch.randn(B, 2, 5).double())
    with pytest.warns(UserWarning, match="loops over axis 2 of its input"):
        net.init_state(B)
    assert not net.hidden_paths


class Transformed(Inline):
    """A transform of `torch.func` inside a loop."""

    def __init__(self, transform: Callable) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros(x.shape[0], H, dtype=x.dtype), []
        for x_t in x.unbind(1):
            h = self.transform(lambda h: torch.tanh(self.rec.weight @ h))(h) + self.inp(x_t)
            out.append(h)
        return torch.stack(out, 1)


TRANSFORMS: dict[str, Callable] = {
    "vmap": torch.vmap,
    "grad": lambda f: torch.vmap(torch.func.grad(lambda h: f(h).sum())),
}


@pytest.mark.parametrize("how", list(TRANSFORMS))
def test_a_transform_of_torch_func_is_refused_with_the_line(how: str) -> None:
    with pytest.raises(eb.NotSupportedError, match=r"torch\.vmap.*test_loop_refusals\.py:\d+"):
        eb.wrap(Transformed(TRANSFORMS[how]).double()).init_state(B)
