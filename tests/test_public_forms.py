"""Ways to write a model that were met in public repositories, each in a small model of our own,
against torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import etrace_bridge as eb

B, IN, H, T = 2, 3, 4, 5


def inputs(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def agrees(
    model: nn.Module, xs: object, outputs: tuple[int, ...], **options: object
) -> eb.GradientReport:
    """Compare outputs and gradients of a sequence with torch's own; `outputs` is the shape of the
    targets.
    """
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    report = eb.check_gradients(
        model, xs, inputs(*outputs), F.mse_loss, rule="bptt", chunk=T, **options
    )
    assert report.ok, report
    return report


class StateRequired(nn.Module):
    """A required state argument that goes to a cell, which takes None."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(IN + 2, H), nn.Linear(H, 2)

    def forward(
        self, action: Tensor, x: Tensor, hidden: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = self.cell(torch.cat([action, x], 1), hidden)
        return self.out(hidden[0]), hidden


class LanguageModel(nn.Module):
    """Ids in, a required state, and time and batch as one axis of the output."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(7, IN), nn.LSTM(IN, H, batch_first=batch_first)
        self.out = nn.Linear(H, 6)

    def forward(
        self, ids: Tensor, hidden: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        y, hidden = self.rnn(self.embed(ids), hidden)
        return F.log_softmax(self.out(y.reshape(-1, H)), 1), hidden


class FlatLoop(nn.Module):
    """A loop of its own whose outputs have time and batch as one axis."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(IN, H), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, ys = x.new_zeros(x.shape[0], H), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            ys.append(h)
        return self.out(torch.stack(ys, 1).view(-1, H))


class TimeSpans(nn.Module):
    """A second input, required or with a default of None, and a third argument that may be left
    out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(IN + H, H)

    def forward(
        self, x: Tensor, timespans: Tensor | None = None, extra: Tensor | None = None
    ) -> Tensor:
        h, ys = x.new_zeros(x.shape[0], H), []
        for t in range(x.size(1)):
            span = timespans[:, t].reshape(-1, 1)  # type: ignore[index]
            h = h + span * torch.tanh(self.cell(torch.cat([x[:, t], h], 1)))
            ys.append(h)
        return torch.stack(ys, 1)


class Bounded(nn.Module):
    """Writes bounds to its weight in `forward`, if any are set; no unit drives itself."""

    def __init__(self, bound: float | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(IN, H))
        self.u = nn.Parameter(torch.randn(H, H))
        self.bound = bound

    def bounded(self, weight: Tensor) -> Tensor:
        return weight if self.bound is None else weight.clamp(-self.bound, self.bound)

    def forward(self, x: Tensor) -> Tensor:
        self.u.data = self.bounded(self.u.data)
        u, h, ys = self.u.clone().fill_diagonal_(0), x.new_zeros(x.shape[1], H), []
        for x_t in x:
            h = torch.tanh(x_t @ self.w + h @ u)
            ys.append(h)
        return torch.stack(ys)


class LogScan(nn.Module):
    """A gated recurrence as a parallel scan in logarithms."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(IN, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.lin(x).chunk(2, -1)
        decay = -F.softplus(gate)
        total = decay.cumsum(1)
        value = -F.softplus(-gate) + F.logsigmoid(hidden)
        return (total + (value - total).logcumsumexp(1)).exp()


class Unbatched(nn.Module):
    """A loop over a sequence without batch, into an empty tensor, with the state in an attribute
    that it clears.
    """

    def __init__(self, width: int = H) -> None:
        super().__init__()
        self.w, self.a = nn.Parameter(torch.randn(width, IN)), nn.Parameter(torch.rand(width))
        self.state = torch.zeros(width, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(*x.shape[:-1], len(self.a), dtype=x.dtype)
        if x.dim() == 2:
            for i, step in enumerate(x):
                self.state = self.a * self.state + self.w @ step
                out[i] = self.state
            self.state = torch.zeros_like(self.state)
        return out


def test_a_required_state_that_a_cell_takes_needs_no_state_argument() -> None:
    agrees(StateRequired(), (inputs(T, B, 2), inputs(T, B, IN)), (T, B, 2))


@pytest.mark.parametrize("batch_first", [False, True])
def test_time_and_batch_may_be_one_axis_of_the_output(batch_first: bool) -> None:
    shape = (B, T) if batch_first else (T, B)
    ids = torch.randint(0, 7, shape, generator=torch.Generator().manual_seed(0))
    agrees(LanguageModel(batch_first), ids, (*shape, 6))


def test_a_loop_may_flatten_its_outputs() -> None:
    agrees(FlatLoop(), inputs(B, T, IN), (B, T, 2))


class TimeSpansRequired(TimeSpans):
    def forward(self, x: Tensor, timespans: Tensor, extra: Tensor | None = None) -> Tensor:
        return super().forward(x, timespans, extra)


@pytest.mark.parametrize("model", [TimeSpans, TimeSpansRequired])
def test_an_argument_that_is_no_state_may_be_an_input(model: type[nn.Module]) -> None:
    agrees(model(), (inputs(B, T, IN), inputs(B, T, 1).abs()), (B, T, H))


def test_a_write_of_the_same_data_to_a_parameter_is_none() -> None:
    agrees(Bounded(), inputs(T, B, IN), (T, B, H))
    with pytest.raises(eb.TracingError, match="writes to its parameter `u` in place"):
        agrees(Bounded(0.1), inputs(T, B, IN), (T, B, H))


def test_a_scan_in_logarithms_is_a_recurrence() -> None:
    agrees(LogScan(), inputs(B, T, IN), (B, T, H))


def steps_equal_the_sequence(model: nn.Module, x: Tensor) -> None:
    net = eb.wrap(model)
    net.init_state()
    outputs = np.stack([np.asarray(net(step)) for step in x])
    np.testing.assert_allclose(outputs, model(x).detach(), rtol=0, atol=1e-12)


def test_a_loop_over_a_sequence_without_batch() -> None:
    torch.manual_seed(0)
    steps_equal_the_sequence(Unbatched().double(), inputs(T, IN))


class Uninitialised(Unbatched):
    """Leaves other numbers in the memory of its output at every call, as any program may."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Uninitialised.calls += 1
        dirty = [
            torch.full((*x.shape[:-1], len(self.a)), float(self.calls), dtype=x.dtype)
            for _ in range(64)
        ]
        del dirty  # the next tensor of this size gets the memory of one of them
        return super().forward(x)


def test_memory_that_is_never_written_is_not_taken_for_a_hidden_change() -> None:
    torch.manual_seed(0)
    steps_equal_the_sequence(Uninitialised(width=256).double(), inputs(T, IN))


class RandomStart(nn.Module):
    """Starts from a random state, as some spiking models do, and adds noise to each step in
    evaluation mode too.
    """

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.lin, self.noise = nn.Linear(IN, H), noise

    def step(self, x: Tensor, u: Tensor) -> Tensor:
        return 0.9 * u + torch.tanh(self.lin(x))

    def forward(self, x: Tensor) -> Tensor:
        u, ys = torch.rand(x.shape[0], H, dtype=x.dtype), []
        for t in range(x.shape[1]):
            u = self.step(x[:, t], u)
            if self.noise:
                u = u + self.noise * torch.randn_like(u)
            ys.append(u)
        return torch.stack(ys, 1)


def test_a_random_start_is_drawn_for_every_sequence() -> None:
    model, x = RandomStart().double().eval(), inputs(B, T, IN)
    net = eb.wrap(model)
    starts = []
    for _ in range(2):
        net.init_state(batch_size=B)
        ys = [torch.tensor(np.asarray(net(x[:, t]))) for t in range(3)]
        starts.append((ys[0] - torch.tanh(model.lin(x[:, 0]))) / 0.9)
        for t in (1, 2):
            torch.testing.assert_close(
                ys[t], model.step(x[:, t], ys[t - 1]).detach(), rtol=0, atol=1e-12
            )
    assert not torch.equal(*starts) and all(s.min() >= 0 and s.max() <= 1 for s in starts)


def test_noise_in_a_loop_is_drawn_for_every_step() -> None:
    model, x = RandomStart(0.1).double().eval(), inputs(B, T, IN)
    net = eb.wrap(model)
    net.init_state(batch_size=B)
    ys = [torch.tensor(np.asarray(net(x[:, t]))) for t in range(3)]
    noise = [ys[t] - model.step(x[:, t], ys[t - 1]).detach() for t in (1, 2)]
    assert not torch.allclose(*noise) and all(0 < n.abs().max() < 1 for n in noise)


class Locked(nn.Module):
    """Dropout with one mask for a whole sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(IN, 32)

    def forward(self, x: Tensor) -> Tensor:
        y, h, ys = self.lin(x), x.new_zeros(x.shape[1], 32), []
        if self.training:
            y = y * torch.empty(1, *y.shape[1:], dtype=y.dtype).bernoulli_(0.5)
        for y_t in y:
            h = 0.5 * h + y_t
            ys.append(h)
        return torch.stack(ys)


def test_a_mask_for_a_whole_sequence_is_drawn_once() -> None:
    net = eb.wrap(Locked().double())
    x, patterns = inputs(T, B, IN), []
    for _ in range(2):
        net.init_state(batch_size=B)
        zeros = [np.asarray(net(step)) == 0 for step in x]
        assert all(np.array_equal(z, zeros[0]) for z in zeros) and 0 < zeros[0].mean() < 1
        patterns.append(zeros[0])
    assert not np.array_equal(*patterns)


class Centred(nn.Module):
    """Runs on one step, but mixes the steps of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(IN, IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x - x.mean(1, keepdim=True))


def test_a_model_without_state_that_mixes_the_steps_of_a_sequence_warns() -> None:
    net = eb.wrap(Centred().double())
    with pytest.warns(UserWarning, match="keeps no state.*sequence=False"):
        net.init_state(batch_size=B)
        net(inputs(B, IN))


class Exploding(nn.Module):
    """Exponential gates without a bound: on inputs of size one its values explode, and rounding
    errors with them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(IN, 2 * H), nn.Linear(H, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        h, ys = x.new_zeros(x.shape[0], H), []
        for t in range(x.shape[1]):
            i, f = (self.inp(x[:, t]) + self.rec(h)).exp().chunk(2, 1)
            h = f * h + i
            ys.append(h)
        return torch.stack(ys, 1)


def test_a_model_that_explodes_on_random_inputs_is_compared_on_small_ones() -> None:
    torch.manual_seed(0)
    model = Exploding().double()
    nn.init.constant_(model.inp.bias, -2)
    net, x = eb.wrap(model), 0.05 * inputs(B, T, IN)
    net.init_state(batch_size=B)
    found = np.stack([np.asarray(net(x[:, t])) for t in range(T)], 1)
    np.testing.assert_allclose(found, model(x).detach(), rtol=1e-9)


class NormedCell(nn.Module):
    """A state that ends in a bias: the value before the bias would do as a state, but starts at
    minus the bias.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.rec, self.norm = nn.Linear(IN, H), nn.Linear(H, H), nn.LayerNorm(H)

    def forward(self, x: Tensor) -> Tensor:
        c, ys = x.new_zeros(x.shape[1], H), []
        for x_t in x:
            c = self.norm(0.9 * c + torch.tanh(self.inp(x_t) + self.rec(c)))
            ys.append(torch.tanh(c))
        return torch.stack(ys)


def test_a_state_does_not_start_right_by_a_bias_that_happens_to_be_zero() -> None:
    torch.manual_seed(0)
    model = NormedCell().double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert model.norm.bias.abs().max() == 0
    report = eb.check_gradients(
        model, inputs(T, B, IN), inputs(T, B, H), F.mse_loss, rule="bptt", chunk=T
    )
    assert report.ok, report
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class FiringRates(nn.Module):
    """Returns its last potential and firing rates, a mean over batch and time; on inputs of size
    one no unit fires.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(IN, H)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        u, spikes = x.new_zeros(x.shape[0], H), []
        for t in range(x.shape[1]):
            u = 0.9 * u + self.lin(x[:, t])
            spikes.append(torch.sigmoid(50 * (u - 12)).round() * u)
        return u, torch.stack(spikes, 1).mean((0, 1))


def test_a_mean_over_batch_and_time_is_a_mean_also_where_it_is_zero_at_first() -> None:
    torch.manual_seed(0)
    model, x = FiringRates().double(), 20 * inputs(B, 7, IN)
    net = eb.wrap(model)
    net.init_state(batch_size=B)
    rates = np.stack([np.asarray(net(x[:, t])[1]) for t in range(7)])
    wanted = model(x)[1].detach()
    assert wanted.abs().max() > 0
    np.testing.assert_allclose(rates.mean(0), wanted, rtol=0, atol=1e-12)


def test_a_mean_of_spikes_that_are_zero_at_first_is_not_a_last_step() -> None:
    from spikingjelly.activation_based import functional, layer, neuron

    class Rate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            node = layer.LinearRecurrentContainer(
                neuron.IFNode(v_threshold=4.0), H, H, bias=True, step_mode="m"
            )
            self.fc = nn.Sequential(layer.Linear(IN, H, step_mode="m"), node)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).mean(0)

    torch.manual_seed(0)
    model, x = Rate(), 30 * inputs(T, B, IN).float()
    wanted = model(x).detach()
    functional.reset_net(model)
    assert wanted.abs().max() > 0
    net = eb.wrap(model)
    net.init_state(batch_size=B)
    found = np.stack([np.asarray(net(step)) for step in x])
    assert net.reduction == "mean"
    np.testing.assert_allclose(found.mean(0), wanted, rtol=0, atol=1e-6)


class Adaptive(nn.Module):
    """A threshold that starts at one where no state is given, and shows in the output only later."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(IN, H)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        v, b = (x.new_zeros(x.shape[0], H), x.new_ones(x.shape[0], H)) if state is None else state
        y, v = torch.relu(v - b), 0.9 * v + self.lin(x)
        return y, (v, 0.5 * b)


def test_a_start_that_is_not_zero_is_refused_also_where_the_first_output_does_not_show_it() -> None:
    net = eb.wrap(Adaptive().double())
    with pytest.raises(eb.StateError, match="starts from a state that is not zero"):
        net.init_state(batch_size=B)
        net(inputs(B, IN))


def test_a_state_that_inner_layers_make_starts_as_they_start() -> None:
    from norse.torch.module.lsnn import LSNNParameters, LSNNRecurrentCell

    class Cells(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = LSNNRecurrentCell(
                IN, H, LSNNParameters(v_th=torch.as_tensor(0.3)), dt=0.001
            )

        def forward(self, x: Tensor, state: object) -> tuple[Tensor, object]:
            spikes, state = self.cell(x, state)
            return spikes, state

    torch.manual_seed(0)
    report = eb.check_gradients(
        Cells(),
        20 * torch.rand(8, B, IN),
        torch.randn(8, B, H),
        F.mse_loss,
        rule="bptt",
        chunk=8,
        dtype=None,
    )
    assert report.ok, report
    net = eb.wrap(Cells())
    net.init_state(batch_size=B)
    net(torch.rand(B, IN))
    net.reset_state()
    assert any(np.allclose(value, 0.3) for value in net.hidden_values())


class Pairs(nn.Module):
    """A loop that returns all outputs and the last state, in one order or the other; `start` says
    what its argument is.
    """

    def __init__(self, swapped: bool, start: str) -> None:
        super().__init__()
        self.lin, self.u = nn.Linear(IN, H), nn.Parameter(torch.rand(H))
        self.swapped, self.start = swapped, start

    def forward(self, x: Tensor, init: Tensor | None = None) -> tuple[Tensor, ...]:
        v = x.new_zeros(x.shape[1], H)
        if init is not None:
            v = init if self.start == "state" else init[0]
        ys = []
        for z in self.lin(x):
            v = torch.tanh(z + self.u * v)
            ys.append(v)
        last = v[None] if self.start == "layers" else v
        return (last, torch.stack(ys)) if self.swapped else (torch.stack(ys), last)


class GivenLayer(nn.Module):
    """torch's own pair the other way round: with one layer and one step both have one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(IN, H)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, new = self.rnn(x, h)
        return new, y


PAIRS = {
    # `init[0]` of what comes back is one sample: the argument does not carry the state
    "not the argument": (lambda: Pairs(False, "not what is returned"), ["ys", "last"]),
    "state": (lambda: Pairs(False, "state"), ["ys"]),
    "state first": (lambda: Pairs(True, "state"), ["ys"]),
    "layers": (lambda: Pairs(False, "layers"), ["ys"]),
    "layers first": (lambda: Pairs(True, "layers"), ["ys"]),
    "layer's own": (GivenLayer, ["ys"]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_of_all_outputs_and_a_last_state_no_output_disappears(name: str) -> None:
    """A returned state is left out only if the argument carries it on; all steps are given."""
    make, kept = PAIRS[name]
    model, x = make().double(), inputs(T, B, IN)
    net = eb.wrap(model)
    net.init_state(B)
    found = [net(x_t) for x_t in x]
    returned = sorted((t.detach() for t in model(x)), key=lambda t: -len(t))
    ys = np.stack([np.asarray(y[0] if len(kept) == 2 else y) for y in found])
    np.testing.assert_allclose(ys, returned[0].numpy(), rtol=1e-12)
    assert np.ptp(ys, axis=0).max() > 0.1
    if len(kept) == 2:
        np.testing.assert_allclose(np.asarray(found[-1][1]), returned[1].numpy(), rtol=1e-12)


class ByColumns(nn.Module):
    """A batch-first loop that also runs on a square 2-D input."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.rec = nn.Linear(IN, H), nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h, hs = x.new_zeros(x.shape[0], H) if h is None else h, []
        for t in range(x.shape[1]):
            h = torch.tanh(self.lin(x[:, t]) + self.rec(h))
            hs.append(h)
        return torch.stack(hs, 1), h


@pytest.mark.parametrize("width", [2, IN])
def test_a_batch_as_large_as_the_input_is_not_taken_for_it(width: int) -> None:
    """With batch = features one step looks like a sequence of numbers; the guess of a layout uses
    a batch of two.
    """
    model = ByColumns()
    model.lin = nn.Linear(width, H)
    report = agrees(model.double(), inputs(width, T, width), (width, T, H))
    assert report["rec.weight"].norm > 1e-3


class QuietLayer(nn.Module):
    """A library's layer whose readout is silent on random inputs, reduced over time."""

    def __init__(self, how: str, surrogate: bool) -> None:
        super().__init__()
        self.rnn, self.how, self.surrogate = nn.GRU(IN, H), how, surrogate

    def forward(self, x: Tensor) -> Tensor:
        v = self.rnn(x)[0] - 2
        y = torch.relu(v) + (v - v.detach()) if self.surrogate else torch.relu(v)
        return getattr(y, self.how)(0)


@pytest.mark.parametrize("surrogate", [True, False])  # with a derivative in silence, and without
@pytest.mark.parametrize("how", ["sum", "mean"])
def test_a_silent_sum_over_time_behind_a_layer_is_not_a_last_step(
    how: str, surrogate: bool
) -> None:
    net = eb.wrap(QuietLayer(how, surrogate).double())
    net.init_state(B)
    assert net.reduction == how


class DetachesItsState(nn.Module):
    """Detaches the state that it gets, so that a long sequence may be trained in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(IN, H), nn.Linear(H, 2)

    def forward(self, x: Tensor, h: Any = None) -> tuple[Tensor, Tensor]:
        y, h = self.rnn(x, None if h is None else h.detach())
        return self.out(y), h


def test_a_state_that_forward_detaches_between_sequences_is_not_detached_at_each_step() -> None:
    report = agrees(DetachesItsState(), inputs(T, B, IN), (T, B, 2))
    assert report["rnn.weight_hh_l0"].norm > 1e-6


NOW_AND_THEN: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "every 3": lambda h, t, T: h.detach() if t % 3 == 0 else h,
    "every 7, from the 7th on": lambda h, t, T: h.detach() if t and t % 7 == 0 else h,
    "every 20, at the end of 20": lambda h, t, T: h.detach() if t % 20 == 19 else h,
    "every 50, as .data": lambda h, t, T: h.data if t % 50 == 49 else h,
    "all but every 10th": lambda h, t, T: h if t % 10 == 9 else h.detach(),
    "all but the last 20": lambda h, t, T: h.detach() if T - t > 20 else h,
}


class DetachesNowAndThen(nn.Module):
    """Truncated backpropagation inside `forward`."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.cell, self.when = nn.GRUCell(IN, H), when

    def forward(self, x: Tensor) -> Tensor:
        h, ys, truncated = x.new_zeros(x.shape[1], H), [], NOW_AND_THEN[self.when]
        for t, step in enumerate(x):
            h = self.cell(step, truncated(h, t, len(x)))
            ys.append(h)
        return torch.stack(ys)


@pytest.mark.parametrize("when", NOW_AND_THEN)
def test_a_loop_that_detaches_its_state_now_and_then_is_refused_with_the_line(when: str) -> None:
    with pytest.raises(eb.NotSupportedError, match=r"detaches values at some steps.*forms\.py:\d+"):
        eb.wrap(DetachesNowAndThen(when).double()).init_state(B)


class ActsNowAndThen(nn.Module):
    """What a loop does at a few late steps only."""

    log: list[Tensor]

    def __init__(self, how: str) -> None:
        super().__init__()
        self.cell, self.late, self.how = nn.GRUCell(IN, H), nn.GRUCell(IN, H), how

    def forward(self, x: Tensor) -> Tensor:
        h, ys = x.new_zeros(x.shape[1], H), []
        for t, step in enumerate(x):
            if self.how == "burn-in" and t < 15:
                with torch.no_grad():
                    h = self.cell(step, h)
            elif self.how == "another cell" and t >= 40:
                h = self.late(step, h)
            else:
                h = self.cell(step, h)
            if self.how == "reset once" and t == 11:
                h = torch.zeros_like(h)
            if t % 16 == 15:
                if self.how == "reset":
                    h = torch.zeros_like(h)
                if self.how == "log":
                    self.log = [h.detach()]
            ys.append(h)
        return torch.stack(ys)


@pytest.mark.parametrize("how", ["burn-in", "another cell", "reset", "reset once"])
def test_a_loop_whose_late_steps_are_unlike_the_early_ones_is_refused(how: str) -> None:
    with pytest.raises(eb.NotSupportedError, match="not alike|not at others|on its number"):
        eb.wrap(ActsNowAndThen(how).double()).init_state(B)


def test_a_loop_that_writes_a_log_now_and_then_is_taken() -> None:
    model = ActsNowAndThen("log").double()
    report = agrees(model, inputs(T, B, IN), (T, B, H))
    assert report["cell.weight_hh"].norm > 1e-6


class OtherwiseIfLong(nn.Module):
    """Library layers, and code for sequences of more than 12 steps only."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.rnn, self.where = nn.GRU(IN, H), where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before" and len(x) > 12:
            x = x * 0.5
        y, _ = self.rnn(x)
        return y * 0.3 if self.where == "after" and len(x) > 12 else y


@pytest.mark.parametrize("where", ["before", "after"])
def test_layers_with_code_for_long_sequences_are_refused(where: str) -> None:
    with pytest.raises(eb.StateError, match="differ"):
        eb.wrap(OtherwiseIfLong(where).double()).init_state(B)


STARTS = {
    "in the call": lambda x: torch.zeros(x.shape[0], H, dtype=x.dtype, requires_grad=True),
    "afterwards": lambda x: torch.zeros(x.shape[0], H, dtype=x.dtype).requires_grad_(),
    "like another": lambda x: x.new_zeros(x.shape[0], H, requires_grad=True),
}


class StartsFromALeaf(nn.Module):
    """A start of zeros that requires grad, as older tutorials write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.cell, self.how = nn.GRUCell(IN, H), how

    def forward(self, x: Tensor) -> Tensor:
        h, ys = STARTS[self.how](x), []
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
            ys.append(h)
        return torch.stack(ys, 1)


@pytest.mark.parametrize("how", list(STARTS))
def test_a_start_made_in_forward_may_require_grad(how: str) -> None:
    model, x = StartsFromALeaf(how).double(), inputs(B, T, IN)
    net = eb.wrap(model)
    net.init_state(B)
    found = np.stack([np.asarray(net(x[:, t])) for t in range(T)], 1)
    np.testing.assert_allclose(found, model(x).detach(), rtol=0, atol=1e-12)


class KeepsItsState(nn.Module):
    """Starts where the last sequence ended."""

    h: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(IN, H)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[1], H) if self.h is None else self.h
        ys = []
        for step in x:
            h = self.cell(step, h)
            ys.append(h)
        self.h = h.detach()
        return torch.stack(ys)


def test_a_loop_that_starts_from_what_an_earlier_run_left_warns() -> None:
    model = KeepsItsState().double()
    eb.wrap(model).init_state(B)
    model(inputs(T, B, IN))
    with pytest.warns(UserWarning, match="an earlier run seems to have left: `h`"):
        eb.wrap(model).init_state(B)


class LockedLayers(nn.Module):
    """Library layers, and dropout masks that all steps of a sequence share: variational dropout."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.rnn, self.how = nn.LSTM(IN, 32), how
        self.weight, self.rows = nn.Parameter(torch.randn(32, 32)), torch.ones(32, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.rnn(x)
        if self.how == "mask" and self.training:
            y = y * y.new_empty(1, *y.shape[1:]).bernoulli_(0.5)
        if self.how == "function":
            y = y * F.dropout(torch.ones_like(y[:1]), 0.5, self.training)
        if self.how == "every step":
            y = F.dropout(y, 0.5, self.training)
        if self.how == "weight":
            y = F.linear(y, self.weight * F.dropout(self.rows, 0.5, self.training))
        return y


@pytest.mark.parametrize("how", ["mask", "function", "weight", "every step"])
def test_what_layers_of_one_sequence_share_is_drawn_once(how: str) -> None:
    net = eb.wrap(LockedLayers(how).double())
    x, starts = inputs(T, B, IN), []
    for _ in range(2):
        net.init_state(batch_size=B)
        pattern = [np.asarray(net(step)) == 0 for step in x]
        same = all(np.array_equal(p, pattern[0]) for p in pattern)
        assert same == (how != "every step")
        starts.append(pattern[0])
    assert not np.array_equal(*starts)


class SaysFloat(nn.Module):
    """A loop in which a part is computed in single precision, whatever the model's precision is."""

    def __init__(self) -> None:
        super().__init__()
        self.a_log, self.lin = nn.Parameter(torch.rand(H)), nn.Linear(IN, H)

    def forward(self, x: Tensor) -> Tensor:
        decay, h, ys = torch.exp(-self.a_log.exp().float()), x.new_zeros(x.shape[0], H), []
        for t in range(x.shape[1]):
            h = decay * h + torch.tanh(self.lin(x[:, t]).float() * 3).to(x.dtype)
            ys.append(h)
        return torch.stack(ys, 1)


def test_a_model_in_float64_may_say_float_on_the_way() -> None:
    torch.manual_seed(0)
    model, x = SaysFloat().double(), inputs(B, T, IN)
    net = eb.wrap(model)
    net.init_state(batch_size=B)
    steps = np.stack([np.asarray(net(x[:, t])) for t in range(T)], 1)
    np.testing.assert_allclose(steps, model(x).detach(), rtol=0, atol=1e-6)


class StatesOfLayers(nn.Module):
    """Two cells; what is returned is the list of their states, of which a loss reads the last."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.GRUCell(IN, H), nn.GRUCell(H, 2)

    def forward(self, x: Tensor, hidden: list[Tensor | None] | None = None) -> list[Tensor]:
        low, high = (None, None) if hidden is None else hidden
        low = self.low(x, low)
        return [low, self.high(low, high)]


def test_a_list_of_states_is_an_output_as_a_whole() -> None:
    model, xs, targets = StatesOfLayers().double(), inputs(T, B, IN), inputs(T, B, 2)
    state, total = None, torch.zeros((), dtype=torch.float64)
    for x, target in zip(xs, targets, strict=True):
        state = model(x, state)
        total = total + F.mse_loss(state[-1], target)
    wanted = torch.autograd.grad(total, list(model.parameters()))
    learner = eb.OnlineLearner(
        model, rule="rtrl", loss=lambda y, t: F.mse_loss(y[-1], t), chunk=2, reduction="sum"
    )
    found = learner.gradients(xs, targets).grads
    for (name, _), gradient in zip(model.named_parameters(), wanted, strict=True):
        assert gradient.norm() > 1e-4
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


class FirstInSingle(nn.Module):
    """A first parameter in float32 among float64 ones, and a sequence normalised before the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.zeros(H, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(IN, dtype=torch.float64))
        self.lin = nn.Linear(IN, H).double()

    def forward(self, x: Tensor) -> Tensor:
        u = self.lin(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * self.scale)
        h, ys = u.new_zeros(u.shape[0], H), []
        for t in range(u.shape[1]):
            h = torch.exp(-torch.exp(self.decay)) * h + u[:, t]
            ys.append(h)
        return torch.stack(ys, 1)


def test_an_input_of_another_dtype_than_was_guessed_gets_a_step_of_its_own() -> None:
    model, x = FirstInSingle(), inputs(B, T, IN)
    net = eb.wrap(model)
    net.init_state(batch_size=B)  # the guess takes the first parameter's dtype
    steps = np.stack([np.asarray(net(x[:, t])) for t in range(T)], 1)
    np.testing.assert_allclose(steps, model(x).detach(), rtol=1e-12)
    with jax.numpy_dtype_promotion("standard"):  # weights of two precisions
        report = eb.check_gradients(
            model, x, inputs(B, T, H), F.mse_loss, rule="rtrl", dtype=None, tolerance=1e-5
        )
    assert report.ok, report


class Normalised(nn.Module):
    """Statistics over time after a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(IN, H)

    def forward(self, x: Tensor) -> Tensor:
        h, ys = x.new_zeros(x.shape[0], H), []
        for t in range(x.shape[1]):
            h = 0.9 * h + self.lin(x[:, t])
            ys.append(h)
        y = torch.stack(ys, 1)
        return (y - y.mean(1, keepdim=True)) / y.std(1, keepdim=True)  # the line to name


def test_a_look_ahead_behind_a_loop_is_named_by_its_own_line() -> None:
    source = Path(__file__).read_text().split("\n")
    line = next(i for i, text in enumerate(source, 1) if text.endswith("# the line to name"))
    net = eb.wrap(Normalised())
    with pytest.raises(eb.NotSupportedError, match=rf"later inputs.*test_public_forms\.py:{line}"):
        net.init_state(batch_size=B)


class ConvolvedThenCentred(nn.Module):
    """A causal convolution, a loop, and then the mean over time taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(IN, H, 4, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        u = self.conv(x.mT)[..., : x.shape[1]].mT
        h, ys = u.new_zeros(u.shape[0], H), []
        for t in range(u.shape[1]):
            h = 0.9 * h + u[:, t]
            ys.append(h)
        y = torch.stack(ys, 1)
        return y - y.mean(1, keepdim=True)  # this is the line


def test_a_causal_convolution_is_not_named_for_a_look_ahead_behind_it() -> None:
    source = Path(__file__).read_text().split("\n")
    line = next(i for i, text in enumerate(source, 1) if text.endswith("# this is the line"))
    net = eb.wrap(ConvolvedThenCentred())
    with pytest.raises(eb.NotSupportedError, match=rf"later inputs.*test_public_forms\.py:{line}"):
        net.init_state(batch_size=B)
        net(torch.zeros(B, IN))


class DroppedWeight(nn.Module):
    """Dropout on a layer's recurrent weight, and a call of the layer's `forward` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(IN, H)
        self.raw = nn.Parameter(self.rnn.weight_hh_l0.detach().clone())
        del self.rnn.weight_hh_l0

    def forward(self, x: Tensor, h: Any = None) -> tuple[Tensor, Any]:
        self.rnn.weight_hh_l0 = F.dropout(self.raw, 0.5, self.training)
        return self.rnn.forward(x, h)


@pytest.mark.x32
def test_a_layer_in_single_precision_may_be_called_by_its_forward() -> None:
    torch.manual_seed(0)
    model, x = DroppedWeight().float().eval(), inputs(T, B, IN).float()
    wanted = model(x)[0].detach()
    net = eb.wrap(model)
    net.init_state(batch_size=B)
    steps = np.stack([np.asarray(net(x_t)) for x_t in x])
    np.testing.assert_allclose(steps, wanted, rtol=0, atol=1e-6)
