"""SpikingJelly 2.0: single-step neurons, recurrent containers, synapses and spiking RNNs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, Runner, Trajectory, attributes, boost, returned

BATCH, INPUT, HIDDEN = 2, 3, 4


def _sj(module: str) -> Any:
    import importlib

    return importlib.import_module(f"spikingjelly.activation_based.{module}")


def _neuron(kind: str, *arguments: Any, **options: Any) -> nn.Module:
    if "surrogate_function" in options:
        name, settings = options.pop("surrogate_function")
        options["surrogate_function"] = getattr(_sj("surrogate"), name)(**settings)
    return getattr(_sj("neuron"), kind)(*arguments, **options)


def _layered(
    name: str,
    states: str,
    kind: str,
    *arguments: Any,
    case: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """A linear layer and one neuron; `states` are the neuron's memories, separated by spaces."""

    def make() -> nn.Module:
        return boost(
            nn.Sequential(nn.Linear(INPUT, HIDDEN), _neuron(kind, *arguments, **options)), 3.0
        )

    run = attributes(*(f"1.{state}" for state in states.split()))
    settings: dict[str, Any] = {"spikes": True, "scale": 1.5, "shift": 0.5, **(case or {})}
    return Case(f"spikingjelly-{name}", "spikingjelly", make, (BATCH, INPUT), run, **settings)


def _net(
    name: str, make: Callable[[], nn.Module], run: Runner, size: int = INPUT, **options: Any
) -> Case:
    settings: dict[str, Any] = {"spikes": True, "scale": 1.5, "shift": 0.5, **options}
    return Case(f"spikingjelly-{name}", "spikingjelly", make, (BATCH, size), run, **settings)


def _elementwise_container() -> nn.Module:
    container = _sj("layer").ElementWiseRecurrentContainer(
        nn.Sequential(
            nn.Linear(HIDDEN, HIDDEN), _neuron("LIFNode", surrogate_function=("ATan", {}))
        ),
        lambda y, x: y + x,
    )
    return boost(nn.Sequential(nn.Linear(INPUT, HIDDEN), container), 2.0)


def _linear_container() -> nn.Module:
    return boost(_sj("layer").LinearRecurrentContainer(_neuron("IFNode"), HIDDEN, HIDDEN), 3.0)


def _deep_net() -> nn.Module:
    layer = _sj("layer")
    net = nn.Sequential(
        layer.Linear(INPUT, 6),
        _neuron("LIFNode", tau=2.0, detach_reset=True, surrogate_function=("ATan", {})),
        layer.Dropout(0.3),
        layer.Linear(6, HIDDEN, bias=False),
        layer.SynapseFilter(tau=4.0, learnable=True),
        _neuron("ParametricLIFNode", init_tau=1.5),
        layer.Linear(HIDDEN, 2),
    )
    return boost(net, 3.0)


def _conv_net() -> nn.Module:
    layer = _sj("layer")
    net = nn.Sequential(
        layer.Conv2d(1, 2, 3, padding=1, bias=False),
        layer.BatchNorm2d(2),
        _neuron("IFNode", surrogate_function=("ATan", {})),
        layer.AvgPool2d(2),
        layer.Flatten(),
        layer.Linear(8, HIDDEN),
        _neuron("LIFNode", v_reset=None),
        layer.VotingLayer(2),
    )
    return boost(net, 4.0)


def _cell(kind: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: boost(getattr(_sj("rnn"), kind)(INPUT, HIDDEN, **options), 3.0)


def _layer(kind: str, layers: int) -> Callable[[], nn.Module]:
    return lambda: boost(getattr(_sj("rnn"), kind)(INPUT, HIDDEN, layers), 3.0)


def _over_time(*names: str) -> Runner:
    """Spiking RNN layers take `(T, B, I)` and the stacked states of all layers."""

    def run(module: nn.Module, xs: Tensor) -> Trajectory:
        state, outputs, states = None, [], []
        for x in xs:
            out, state = module(x[None], state)
            outputs.append(out[0])
            states.append(
                dict(zip(names, (state,) if isinstance(state, Tensor) else state, strict=True))
            )
        return Trajectory(outputs, states)

    return run


CASES = (
    _layered("if", "v", "IFNode"),
    _layered("if_soft_reset", "v", "IFNode", v_reset=None, detach_reset=True),
    _layered("lif", "v", "LIFNode"),
    _layered("lif_no_decay_input", "v", "LIFNode", tau=3.0, decay_input=False, v_reset=None),
    _layered(
        "lif_v_reset", "v", "LIFNode", v_reset=-0.2, surrogate_function=("ATan", {"alpha": 3.0})
    ),
    _layered(
        "lif_piecewise_quadratic", "v", "LIFNode", surrogate_function=("PiecewiseQuadratic", {})
    ),
    _layered("lif_leaky_relu_k", "v", "LIFNode", surrogate_function=("LeakyKReLU", {"leak": 0.1})),
    _layered(
        "lif_erf", "v", "LIFNode", surrogate_function=("Erf", {"alpha": 0.7}), detach_reset=True
    ),
    _layered("simple_lif", "v", "SimpleLIFNode", 2.0, True),
    _layered("parametric_lif", "v", "ParametricLIFNode"),
    _layered("qif", "v", "QIFNode"),
    _layered("eif", "v", "EIFNode"),
    _layered("izhikevich", "v w", "IzhikevichNode", a=0.2, b=0.3),
    _layered("klif", "v", "KLIFNode"),
    _layered("complementary_lif", "v m", "ComplementaryLIFNode", case={"train": True}),
    _layered("cuba_lif", "v c", "CUBALIFNode"),
    _layered("liaf", "v", "LIAFNode", torch.nn.functional.leaky_relu, True, case={"spikes": False}),
    _layered("resonate", "v u", "RAFNode"),
    _layered("ternary_lif", "v", "TernaryLIFNode"),
    _layered("half_threshold_if", "v", "HalfThresholdIFNode"),
    _layered("integer_lif", "v", "ILIFNode"),
    _layered("mpbn_lif", "v", "MPBNLIFNode", out_features=HIDDEN, learnable_vth=True),
    _net("elementwise_container", _elementwise_container, attributes("1.y", "1.sub_module.1.v")),
    _net("linear_container", _linear_container, attributes("y", "sub_module.v"), HIDDEN),
    _net("deep_net", _deep_net, attributes("1.v", "4.out_i", "5.v"), spikes=False),
    Case(
        "spikingjelly-conv_net",
        "spikingjelly",
        _conv_net,
        (BATCH, 1, 4, 4),
        attributes("2.v", "6.v"),
        spikes=True,
        scale=1.5,
        shift=0.5,
    ),
    _net("rnn_cell", _cell("SpikingVanillaRNNCell"), returned()),
    _net("gru_cell", _cell("SpikingGRUCell"), returned()),
    _net("lstm_cell", _cell("SpikingLSTMCell"), returned(None, "h", "c")),
    _net("gru_2_layers", _layer("SpikingGRU", 2), _over_time("h")),
    _net("lstm", _layer("SpikingLSTM", 1), _over_time("h", "c")),
)
