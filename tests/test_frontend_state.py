"""Where state lives: arguments, attributes, layers inside sequence models, adapters; and how it
starts.
"""

from __future__ import annotations

import contextlib
import cProfile
import importlib.metadata
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import brainstate
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import etrace_bridge as eb
from etrace_bridge.frontend import adapter as adapter_module
from etrace_bridge.frontend.adapter import find_adapter
from etrace_bridge.frontend.state_values import flatten_state, state_names, unflatten_state

B, H, T = 3, 4, 6
X = torch.float64


def xs(*shape: int) -> Tensor:
    return torch.randn(T, *(shape or (B, H)), dtype=X)


def hidden(net: eb.BridgedModule) -> set[str]:
    return {
        ".".join(path) for path, s in net.states().items() if isinstance(s, brainstate.HiddenState)
    }


def compare(
    module: nn.Module, inputs: Tensor, states: set[str], **options: Any
) -> eb.BridgedModule:
    """Run torch and bridge over a sequence; outputs must agree at every step, and change."""
    module = module.double()
    net = eb.wrap(module, **options)
    net.init_state(inputs.shape[1])
    found = np.stack([np.asarray(net(x)) for x in inputs])
    sequence = inputs.transpose(0, 1) if net.batch_first else inputs
    wanted = eb.run_torch(
        module, sequence, options.get("state"), sequence=options.get("sequence")
    ).stacked()
    np.testing.assert_allclose(found, wanted.detach(), atol=1e-12)
    assert np.abs(np.diff(found, axis=0)).max() > 1e-3
    assert hidden(net) == states
    return net


# ---- models that have already run


class Keeper(nn.Module):
    """Keeps its state in an attribute of its own."""

    def __init__(self, start: Tensor | None = None) -> None:
        super().__init__()
        self.inp, self.rec = nn.Linear(H, H), nn.Linear(H, H)
        self.h, self.shown = start, torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.shown = self.inp(x)  # written only, for a plot
        h = torch.zeros(len(x), H) if self.h is None else self.h
        self.h = torch.tanh(self.shown + self.rec(h))
        return self.h


@pytest.mark.parametrize("gradients", [True, False])
def test_state_that_an_earlier_run_left_is_named(gradients: bool) -> None:
    model, x = nn.Sequential(Keeper(), nn.Linear(H, 2)), torch.randn(B, H)
    with torch.set_grad_enabled(gradients):
        model(x)
    net = eb.wrap(model)
    with pytest.warns(
        UserWarning, match=r"earlier run seems to have left: `0.h` \(shape \(3, 4\)"
    ) as caught:
        net.init_state(B)
    message = str(caught[0].message)
    assert len(caught) == 1 and "shown" not in message
    assert "set `0.h` to None or zeros" in message and "filterwarnings" in message
    # it does start from there
    np.testing.assert_allclose(np.asarray(net(x)), model(x).detach(), atol=1e-6)
    eb.wrap(nn.Sequential(Keeper(), nn.Linear(H, 2))).init_state(B)  # a new one warns of nothing


@pytest.mark.parametrize("start", [None, torch.zeros(B, H), torch.full((B, H), 0.5)])
def test_a_start_as_the_author_set_it_is_no_left_over(start: Tensor | None) -> None:
    net = eb.wrap(Keeper(start))
    net.init_state(B)
    assert hidden(net) == {"h"}


def test_a_registered_buffer_may_hold_any_start() -> None:
    model = Keeper()
    del model.h
    model.register_buffer("h", torch.randn(B, H))
    net = eb.wrap(model)
    net.init_state(B)
    assert hidden(net) == {"h"}
    x = torch.randn(B, H)
    np.testing.assert_allclose(np.asarray(net(x)), model(x).detach(), atol=1e-6)


def test_left_over_state_of_another_batch_size_is_named_in_the_error() -> None:
    model = Keeper()
    model(torch.randn(B, H))
    net = eb.wrap(model)
    net.init_state(B + 1)
    with pytest.raises(eb.InputError, match="itself fails") as caught:
        net(torch.randn(B + 1, H))
    cause = caught.value.__cause__
    assert cause is not None and "left: `h` (shape (3, 4)" in cause.__notes__[0]


# ---- flattening


class Pair(NamedTuple):
    a: Tensor
    b: Any


@dataclass
class Data:
    x: Tensor
    n: int = 3


def test_flatten_and_unflatten_any_nesting() -> None:
    t = [torch.tensor(float(i)) for i in range(6)]
    value = {
        "p": Pair(t[0], (t[1], None)),
        "d": Data(t[2]),
        "l": [t[3], {"k": t[4]}],
        "t": (t[5],),
        "s": "text",
    }
    leaves, skeleton = flatten_state(value)
    assert [path for path, _ in leaves] == [
        ("p", "a"),
        ("p", "b", "0"),
        ("d", "x"),
        ("l", "0"),
        ("l", "1", "k"),
        ("t", "0"),
    ]
    back = unflatten_state(skeleton, [tensor + 1 for _, tensor in leaves])
    assert (
        isinstance(back["p"], Pair)
        and isinstance(back["d"], Data)
        and back["d"].n == 3
        and back["s"] == "text"
    )
    assert back["p"].b == (t[1] + 1, None) and back["l"][1]["k"] == 5.0


def test_state_names() -> None:
    assert state_names("h", [()]) == [("h",)]
    assert state_names("s", [("0",), ("1",)]) == [("s", "0"), ("s", "1")]
    assert state_names("s", [("v",), ("i",)]) == [("v",), ("i",)]


# ---- arguments


class Cell(nn.Module):
    """`forward(x, first, second)` with two state arguments and all of them returned."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(H, H)

    def forward(
        self, x: Tensor, syn: Tensor | None = None, mem: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        syn = torch.zeros_like(x) if syn is None else syn
        mem = torch.zeros_like(x) if mem is None else mem
        syn = 0.7 * syn + self.fc(x)
        mem = torch.tanh(0.9 * mem + syn)
        return mem * 2, syn, mem


def test_two_state_arguments() -> None:
    compare(Cell(), xs(), {"syn", "mem"})


class ReturnsPair(Cell):
    def forward(self, x: Tensor, syn: Tensor | None = None, mem: Tensor | None = None) -> Any:  # type: ignore[override]
        out, syn, mem = super().forward(x, syn, mem)
        return out, (syn, mem)


def test_states_are_found_under_a_profiler() -> None:
    """The frame of `forward` used to be found by a profile function, which put an end to cProfile's
    and made the state unseen.
    """

    class Assigns(nn.Module):
        """Which of the two returned tensors is the state, only the code tells."""

        def __init__(self) -> None:
            super().__init__()
            self.inp, self.rec = nn.Linear(H, H), nn.Linear(H, H, bias=False)

        def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
            h = torch.zeros_like(x) if h is None else h
            h = torch.tanh(self.inp(x) + self.rec(h))
            return h, 2 * h

    module, profile = Assigns().to(X), cProfile.Profile()
    profile.enable()
    try:
        compare(module, xs(), {"h"})
        assert sys.version_info >= (3, 12) or sys.getprofile() is profile
    finally:
        profile.disable()


def test_state_arguments_returned_as_a_tuple() -> None:
    compare(ReturnsPair(), xs(), {"syn", "mem"})


class Masked(nn.Module):
    """The optional second argument is no state."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(H, H)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.gru(x)[0]
        return y if mask is None else y * mask


def test_optional_argument_that_is_no_state() -> None:
    compare(Masked(), xs(), {"gru.h_l0"})


def test_example_state_in_place_of_a_callable() -> None:
    class Needs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(H, H)

        def forward(self, x: Tensor, carry: Pair) -> tuple[Tensor, Pair]:
            a = torch.tanh(self.fc(x) + carry.a)
            return a + carry.b, Pair(a, carry.b * 0.9 + a)

    compare(Needs(), xs(), {"a", "b"}, state=Pair(torch.ones(1, H), torch.zeros(1, H)))


def test_explicit_state_of_a_fused_layer_is_the_models_own() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(H, H, num_layers=2)

        def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
            y, h = self.gru(x[None], h)
            return y[0], h

    net = compare(Step(), xs(), {"h"})
    assert net.states()["h",].value.shape == (2, B, H)


def test_cell_without_state_in_a_step_model_restarts_as_in_torch() -> None:
    module = nn.Sequential(nn.Linear(H, H), nn.GRUCell(H, H)).double()
    net = eb.wrap(module)
    net.init_state(B)
    for x in xs():
        np.testing.assert_allclose(net(x), module(x).detach(), atol=1e-12)
    assert hidden(net) == set()


# ---- layers inside sequence models


class Starts(nn.Module):
    """Makes the initial state of its layer inside `forward`, once from constants and once from a
    parameter.
    """

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.rnn, self.learned = nn.LSTM(H, H), learned
        self.h0 = nn.Parameter(torch.randn(1, 1, H))

    def forward(self, x: Tensor) -> Tensor:
        c = torch.full((1, x.shape[1], H), 0.5, dtype=x.dtype)
        h = self.h0.expand(1, x.shape[1], H).contiguous() if self.learned else torch.zeros_like(c)
        return self.rnn(x, (h, c))[0]


@pytest.mark.parametrize("learned", [False, True])
def test_initial_state_made_inside_forward(learned: bool) -> None:
    with (
        pytest.warns(UserWarning, match="`h0`: used only to make the initial state")
        if learned
        else contextlib.nullcontext()
    ):
        net = compare(Starts(learned), xs(), {"rnn.h_l0", "rnn.c_l0"})
    assert net.start_parameters == (("h0",) if learned else ())
    net.init_state(B)
    np.testing.assert_array_equal(net.states()["rnn", "c_l0"].value, np.full((B, H), 0.5))


class Twice(nn.Module):
    """One layer called on two sequences: two states."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0] + self.rnn(torch.sin(3 * x))[0]


def test_layer_called_twice_has_two_states() -> None:
    compare(Twice(), xs(), {"rnn.h_l0", "rnn.call2.h_l0"})


class LastOnly(nn.Module):
    """A classifier that reads the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.fc = nn.GRU(H, H, batch_first=True), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.rnn(x)[0][:, -1])


def test_output_of_the_last_step_only() -> None:
    compare(LastOnly(), xs(), {"rnn.h_l0"})


class LoopOverCells(nn.Module):
    """The textbook loop over time with torch's cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.fc = nn.LSTMCell(H, H), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> Tensor:
        state, out = None, []
        for t in range(x.shape[0]):
            state = self.cell(x[t], state)
            out.append(self.fc(state[0]))
        return torch.stack(out)


def test_loop_over_a_cell_is_found_to_take_sequences() -> None:
    compare(LoopOverCells(), xs(), {"state.0", "state.1"})


def test_model_that_looks_ahead_is_refused() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(H, H, num_layers=2)

        def forward(self, x: Tensor) -> Tensor:
            y, h = self.rnn(x)
            return y + h.sum(0)

    module = Reads()
    with pytest.raises(eb.NotSupportedError, match="output 1 reads input 6, through"):
        # over a sequence h_n is the last step's, for every step
        eb.wrap(module, sequence=True).init_state(B)


# ---- attributes


class Held(nn.Module):
    """A counter that does not matter, a cache that is only written, a state that is a Python float
    at first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.v, self.steps, self.cache = nn.Linear(H, H), 0.5, 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.v = 0.8 * self.v + self.fc(x)
        self.cache = self.v * 2
        return torch.tanh(self.cache)


def test_only_what_is_read_is_state() -> None:
    net = compare(Held(), xs(), {"v"})
    net.init_state(B)
    np.testing.assert_array_equal(net.states()["v",].value, np.full((B, H), 0.5))


class FirstStep(nn.Module):
    """Resets itself in the first step, by a Python flag."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.started = nn.Linear(H, H), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.started:
            self.h, self.started = torch.zeros_like(x), True
        self.h = torch.tanh(self.fc(x) + self.h)
        return self.h


def test_first_step_flag() -> None:
    compare(FirstStep(), xs(), {"h"})


def test_shapes_that_wait_for_the_first_input() -> None:
    class Filter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.v = nn.Conv1d(1, 2, 3, padding=1), None

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            self.v = y if self.v is None else 0.5 * self.v + y
            return self.v

    module, inputs = Filter().double(), xs(B, 1, 5)
    net = eb.wrap(module)
    net.init_state(B)
    with pytest.raises(eb.StateError, match=r"run `net\(x\)` once"):
        _ = net.hidden_paths
    step = brainstate.transform.StatefulFunction(net, return_only_write=False)
    states = step.get_states(jnp.array(inputs[0].numpy()))  # the states are made during this trace
    assert any(isinstance(s, brainstate.HiddenState) for s in states) and hidden(net) == {"v"}
    found = np.stack([np.asarray(net(x)) for x in inputs])
    np.testing.assert_allclose(found, eb.run_torch(module, inputs).stacked().detach(), atol=1e-12)

    other = eb.wrap(module, example_input=inputs[0])
    other.init_state(7)
    assert other.states()["v",].value.shape == (7, 2, 5)


# ---- adapters


class Odd(nn.Module):
    """A cell with its state first, and returned inside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(H, H)

    def forward(self, memory: Any, x: Tensor, gain: float = 1.0) -> dict[str, Tensor]:
        memory = torch.tanh(self.fc(x) * gain + memory)
        return {"out": memory * 3, "new": memory}


class OddAdapter(eb.Adapter):
    library, layers = "odd", (Odd,)

    def arguments(self, module: nn.Module) -> tuple[str, ...]:
        return ("memory",)

    def split(self, module: nn.Module, returned: Any) -> tuple[Any, tuple]:
        return returned["out"], (returned["new"],)

    def initial(self, module: nn.Module, inputs: tuple) -> tuple:
        return (torch.full_like(inputs[0], 0.25),)

    def state_path(self, module: nn.Module, path: tuple[str, ...]) -> tuple[str, ...]:
        return ("m",)


@pytest.fixture
def adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_module.load_adapters()
    monkeypatch.setattr(adapter_module, "_ADAPTERS", dict(adapter_module._ADAPTERS))


@pytest.mark.usefixtures("adapters")
def test_a_third_party_adapter() -> None:
    eb.register_adapter(OddAdapter())
    assert eb.supported_layers()["odd"] == ("Odd",)
    net = compare(Odd(), xs(), {"m"})
    net.init_state(B)
    assert float(net.states()["m",].value[0, 0]) == 0.25


@pytest.mark.usefixtures("adapters")
def test_subclasses_follow_their_base() -> None:
    class Special(nn.GRU):
        pass

    assert find_adapter(Special(H, H)) is find_adapter(nn.GRU(H, H))
    compare(Special(H, H), xs(), {"h_l0"})


@pytest.mark.usefixtures("adapters")
def test_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint(
        "odd", f"{__name__}:register", adapter_module.ENTRY_POINT_GROUP
    )
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda group: [entry] if group == "etrace_bridge.adapters" else [],
    )
    monkeypatch.setattr(adapter_module, "_loaded", False)
    assert "Odd" in eb.supported_layers()["odd"]


def register() -> None:
    """What a package's entry point names."""
    eb.register_adapter(OddAdapter())


def test_register_adapter_checks_its_argument() -> None:
    with pytest.raises(eb.InputError, match="an instance of a subclass of `eb.Adapter`"):
        eb.register_adapter(OddAdapter)  # type: ignore[arg-type]
    with pytest.raises(eb.InputError, match=r"`Empty\.layers` is empty"):
        eb.register_adapter(type("Empty", (eb.Adapter,), {})())
    with pytest.raises(eb.InputError, match="not a subclass of `torch.nn.Module`"):
        eb.register_adapter(type("Wrong", (eb.Adapter,), {"layers": (int,)})())


def test_supported_layers_of_torch() -> None:
    assert {"GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell", "BatchNorm1d"} <= set(
        eb.supported_layers()["torch"]
    )
