"""States are found by what flows from call to call; models that mix time are right or refused,
never silently wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb

IN, H, T = 3, 4, 5


def double(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def steps_of(net: eb.BridgedModule, xs: Tensor, *others: Tensor) -> np.ndarray:
    """Run the bridged module step by step; inputs are time-major."""
    net.init_state(xs.shape[1])
    return np.stack([np.asarray(net(*inputs)) for inputs in zip(xs, *others, strict=True)])


def loop(step: Callable, xs: Tensor, state: Any) -> np.ndarray:
    """The user's own loop: `step(x, state) -> (output, state)`."""
    outputs = []
    for x in xs:
        output, state = step(x, state)
        outputs.append(output.detach().numpy())
    return np.stack(outputs)


def sequence(batch: int, size: int = IN) -> Tensor:
    return torch.randn(T, batch, size, dtype=torch.float64)


# ---- cells: which returned value is the state


class Pair(nn.Module):
    """`forward(x, state=None) -> (h, c)`: what is returned is the state."""

    def __init__(self, indexed: bool) -> None:
        super().__init__()
        self.cell, self.indexed = nn.LSTMCell(IN, H), indexed

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Tensor]:
        if state is None:
            zeros = x.new_zeros(x.shape[0], H)
            state = zeros, zeros
        if self.indexed:
            h, c = self.cell(
                x, (state[0] + torch.zeros_like(x[:, :1]), state[1] + torch.zeros_like(x[:, :1]))
            )
        else:
            h, c = state
            h, c = self.cell(x, (h + torch.zeros_like(x[:, :1]), c + torch.zeros_like(x[:, :1])))
        return h, c


@pytest.mark.parametrize(("batch", "indexed"), [(2, False), (2, True), (3, True), (5, True)])
def test_a_returned_pair_is_the_state_at_every_batch_size(batch: int, indexed: bool) -> None:
    model, xs = double(Pair(indexed)), sequence(batch)

    def step(x: Tensor, state: Any) -> Any:
        state = model(x, state)
        return state[0], state

    np.testing.assert_allclose(steps_of(eb.wrap(model), xs), loop(step, xs, None), atol=1e-12)


class StateFirst(nn.Module):
    """`forward(x, h=None) -> (h, y)`, both of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(IN, H), nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return h, self.out(h)


class UnnamedFirst(StateFirst):
    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        new = self.cell(x, h)
        return new, self.out(new)


def test_a_state_that_comes_back_first_is_found_by_its_assignment() -> None:
    model, xs = double(StateFirst()), sequence(3)
    np.testing.assert_allclose(
        steps_of(eb.wrap(model), xs), loop(lambda x, h: model(x, h)[::-1], xs, None), atol=1e-12
    )


def test_two_readings_with_different_results_are_refused_by_name() -> None:
    with pytest.raises(
        eb.StateError,
        match=r"more than one way.*`h` <- returned\[1\]; `h` <- returned\[0\].*state=\{'h'",
    ):
        eb.wrap(double(UnnamedFirst())).init_state(3)


class Gated(nn.Module):
    """A state between two inputs, all of one shape."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.cell, self.assigns = nn.GRUCell(H, H), assigns

    def forward(self, x: Tensor, h: Tensor, gate: Tensor) -> Tensor:
        if self.assigns:
            h = self.cell(x, h) * torch.sigmoid(gate)
            return h
        return self.cell(x, h) * torch.sigmoid(gate)


@pytest.mark.parametrize("named", [False, True])
def test_a_state_between_two_inputs(named: bool) -> None:
    model, xs, gates = double(Gated(not named)), sequence(3, H), sequence(3, H)
    zeros = lambda batch_size: torch.zeros(batch_size, H)
    net = eb.wrap(model, state={"h": zeros} if named else zeros)
    net.init_state(3)
    found = np.stack([np.asarray(net(x, gate)) for x, gate in zip(xs, gates, strict=True)])
    h, wanted = torch.zeros(3, H, dtype=torch.float64), []
    for x, gate in zip(xs, gates, strict=True):
        h = model(x, h, gate)
        wanted.append(h.detach().numpy())
    np.testing.assert_allclose(found, np.stack(wanted), atol=1e-12)


def test_a_state_between_two_inputs_is_refused_if_nothing_tells_which() -> None:
    net = eb.wrap(double(Gated(False)), state=lambda batch_size: torch.zeros(batch_size, H))
    net.init_state(3)
    with pytest.raises(eb.StateError, match="`gate` <- .*`h` <- |`h` <- .*`gate` <- "):
        net(torch.randn(3, H, dtype=torch.float64), torch.randn(3, H, dtype=torch.float64))


def cell_with(name: str, assigns: bool) -> nn.Module:
    """A leaky cell whose state argument has a given name."""
    new = name if assigns else "new"
    code = f"""
def forward(self, x, {name}=None):
    {new} = torch.tanh(self.fc(x) + (0 if {name} is None else {name}))
    return self.out({new}), {new}
"""
    space: dict[str, Any] = {"torch": torch}
    exec(code, space)
    kind = type("Named", (nn.Module,), {"forward": space["forward"]})
    model = kind()
    model.fc, model.out = nn.Linear(IN, H), nn.Linear(H, 2)
    return model


@pytest.mark.parametrize("name", ["cache", "past", "hid", "a", "r", "buffer"])
def test_a_state_argument_of_any_name(name: str) -> None:
    model, xs = double(cell_with(name, assigns=True)), sequence(3)
    net = eb.wrap(model)
    np.testing.assert_allclose(steps_of(net, xs), loop(model, xs, None), atol=1e-12)
    assert [p for p in net.states() if p == (name,)]


@pytest.mark.parametrize("name", ["cache", "r"])
def test_an_argument_that_may_be_a_state_is_never_forgotten_silently(name: str) -> None:
    model = double(cell_with(name, assigns=False))
    with pytest.raises(eb.StateError, match=rf"state=\{{'{name}'"):
        eb.wrap(model).init_state(3)
    xs = sequence(3)
    net = eb.wrap(model, state={name: lambda batch_size: torch.zeros(batch_size, H)})
    np.testing.assert_allclose(steps_of(net, xs), loop(model, xs, None), atol=1e-12)


# ---- time mixed outside the recurrence


class Around(nn.Module):
    """A GRU behind code over the whole sequence."""

    def __init__(self, before: Callable[[Tensor], Tensor] | nn.Module) -> None:
        super().__init__()
        self.before, self.gru = before, nn.GRU(IN, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.before(x))[0]


class InstanceNormOverTime(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.instance_norm(x.permute(1, 2, 0)).permute(2, 0, 1)


class BatchNormOverTime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, IN)).reshape(x.shape)


def attend(x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return (torch.softmax(x @ x.transpose(1, 2), -1) @ x).transpose(0, 1)


LOOK_AHEAD: dict[str, Any] = {
    "mean": lambda x: x - x.mean(0, keepdim=True),
    "instance norm": InstanceNormOverTime(),
    "batch norm": BatchNormOverTime(),
    "attention": attend,
    "centred convolution": lambda x: nn.functional.avg_pool1d(
        nn.functional.pad(x.permute(1, 2, 0), (1, 1), mode="replicate"), 3, 1
    ).permute(2, 0, 1),
}


@pytest.mark.parametrize("name", list(LOOK_AHEAD))
def test_statistics_over_time_before_a_layer_are_refused(name: str) -> None:
    model = Around(LOOK_AHEAD[name]).double().train()
    net = eb.wrap(model)
    why = "depends on later inputs: output 1 reads input|writes to .*running_mean"
    with pytest.raises(eb.NotSupportedError, match=why):
        net.init_state(3)
        net(torch.randn(3, IN, dtype=torch.float64))


def test_batch_norm_over_time_is_fine_where_it_does_not_measure() -> None:
    model, xs = double(Around(BatchNormOverTime())).eval(), sequence(3)
    np.testing.assert_allclose(steps_of(eb.wrap(model), xs), model(xs).detach(), atol=1e-12)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(IN, H)
        self.fc = nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(h)
        return y, h


def test_autocast_is_refused() -> None:
    with pytest.raises(
        eb.NotSupportedError, match=r"`torch\.autocast` is on, in .*test_frontend_flow"
    ):
        eb.wrap(Autocast()).init_state(2)


class Unbatched(nn.Module):
    """`nn.GRU` on a 2-D input: torch reads it as one sequence without batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(IN, H)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y, h = self.gru(x, h)
        return y, h


def test_a_layer_called_with_a_2d_input_is_not_a_step_over_a_batch() -> None:
    model, xs = double(Unbatched()), sequence(3)
    np.testing.assert_allclose(steps_of(eb.wrap(model), xs), model(xs)[0].detach(), atol=1e-12)
    with pytest.raises(eb.BridgeError, match="reads the samples of the batch one after the other"):
        net = eb.wrap(model, sequence=False)
        net.init_state(3)
        net(xs[0])


# ---- models that have run before they are wrapped


def left_over(library: str) -> nn.Module:
    if library == "snntorch":
        snn = pytest.importorskip("snntorch")
        return nn.Sequential(nn.Linear(IN, H), snn.Leaky(beta=0.9, init_hidden=True, output=False))
    neuron = pytest.importorskip("spikingjelly.activation_based.neuron")
    return nn.Sequential(nn.Linear(IN, H), neuron.LIFNode(detach_reset=True))


@pytest.mark.parametrize("library", ["snntorch", "spikingjelly"])
def test_a_library_model_that_has_run_starts_from_its_reset_state(library: str) -> None:
    xs = 3 * torch.rand(T, 3, IN)
    torch.manual_seed(0)
    model = left_over(library)
    with torch.no_grad():
        model[0].weight.abs_()
    fresh = steps_of(eb.wrap(model), xs)
    for x in xs:
        model(x)
    assert fresh.any()
    np.testing.assert_array_equal(steps_of(eb.wrap(model), xs), fresh)
