"""snnTorch 1.0: its neurons with hidden or explicit state, its resets, surrogates and learnable
constants.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, attributes, boost, sequence, spread

BATCH, INPUT, HIDDEN = 2, 3, 4
FLOAT32_SPIKES = "snnTorch's surrogates return float32 spikes, which a float64 layer refuses"
FLOAT32_STATE = "snnTorch makes this neuron's initial state in float32"


def _snn() -> Any:
    import snntorch

    return snntorch


def _layered(neuron: str, *arguments: Any, **options: Any) -> Callable[[], nn.Module]:
    """A linear layer and one neuron with hidden state."""

    def make() -> nn.Module:
        neurons = getattr(_snn(), neuron)(*arguments, init_hidden=True, **_materialise(options))
        return boost(nn.Sequential(nn.Linear(INPUT, HIDDEN), neurons), 2.0)

    return make


def _materialise(options: dict[str, Any]) -> dict[str, Any]:
    """Replace surrogates given by name with the library's functions, once it may be imported."""
    options = dict(options)
    if "spike_grad" in options:
        from snntorch import surrogate

        name, arguments = options["spike_grad"]
        options["spike_grad"] = getattr(surrogate, name)(**arguments)
    return options


def _hidden(
    name: str,
    states: str,
    neuron: str,
    *arguments: Any,
    case: dict[str, Any] | None = None,
    **options: Any,
) -> Case:
    """A case of `_layered`; `states` are the neuron's state names, separated by spaces."""
    run = attributes(*(f"1.{state}" for state in states.split()))
    settings: dict[str, Any] = {"spikes": True, **(case or {})}
    make = _layered(neuron, *arguments, **options)
    return Case(f"snntorch-{name}", "snntorch", make, (BATCH, INPUT), run, **settings)


def _explicit(name: str, states: str, neuron: str, *arguments: Any, **options: Any) -> Case:
    """The bare neuron, called with its states and returning them."""
    case = options.pop("case", {})
    settings: dict[str, Any] = {"scale": 0.7, "shift": 0.3, "spikes": True, **case}
    make = lambda: getattr(_snn(), neuron)(*arguments, **_materialise(options))
    return Case(
        f"snntorch-{name}", "snntorch", make, (BATCH, HIDDEN), spread(*states.split()), **settings
    )


class ExplicitNet(nn.Module):
    """The tutorial network, one step: both membranes are arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        snn = _snn()
        self.fc1, self.lif1 = nn.Linear(INPUT, HIDDEN), snn.Leaky(beta=0.8)
        self.fc2, self.lif2 = nn.Linear(HIDDEN, 3), snn.Leaky(beta=torch.rand(3), learn_beta=True)
        boost(self, 3.0)

    def forward(
        self, x: Tensor, mem1: Tensor | None = None, mem2: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        spk1, mem1 = self.lif1(self.fc1(x), mem1)
        spk2, mem2 = self.lif2(self.fc2(spk1), mem2)
        return spk2, mem1, mem2


class TutorialNet(nn.Module):
    """The tutorial network as published: `forward` makes the membranes and loops over time."""

    def __init__(self) -> None:
        super().__init__()
        snn = _snn()
        self.fc1, self.lif1 = nn.Linear(INPUT, HIDDEN), snn.Leaky(beta=0.9)
        self.fc2, self.lif2 = nn.Linear(HIDDEN, 3), snn.Synaptic(alpha=0.6, beta=0.8)
        boost(self, 5.0)

    def forward(self, x: Tensor) -> Tensor:
        mem1 = self.lif1.reset_mem()
        syn2, mem2 = self.lif2.reset_mem()
        spikes = []
        for step in range(x.size(0)):
            spk1, mem1 = self.lif1(self.fc1(x[step]), mem1)
            spk2, syn2, mem2 = self.lif2(self.fc2(spk1), syn2, mem2)
            spikes.append(spk2)
        return torch.stack(spikes)


def _tutorial_states(name: str, result: Any) -> dict[str, Tensor]:
    names = ("mem1",) if name == "lif1" else ("syn2", "mem2")
    return dict(zip(names, result[1:], strict=True))


def _hidden_net() -> nn.Module:
    snn = _snn()
    net = nn.Sequential(
        nn.Linear(INPUT, HIDDEN),
        snn.Leaky(beta=0.9, init_hidden=True),
        nn.Linear(HIDDEN, HIDDEN),
        snn.Synaptic(alpha=0.7, beta=0.8, init_hidden=True),
        nn.Linear(HIDDEN, 3),
        snn.Leaky(beta=0.9, init_hidden=True, output=True),
    )
    return boost(net, 3.0)


def _conv_net() -> nn.Module:
    snn = _snn()
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.MaxPool2d(2),
        snn.Leaky(beta=0.8, init_hidden=True),
        nn.Flatten(),
        nn.Linear(8, 3),
        snn.Leaky(beta=0.6, init_hidden=True),
    )
    return boost(net, 3.0)


def _rleaky_conv() -> nn.Module:
    snn = _snn()
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        snn.RLeaky(beta=0.7, conv2d_channels=2, kernel_size=3, init_hidden=True),
    )


FLOAT32: dict[str, Any] = {"float32_only": FLOAT32_SPIKES, "scale": 2.0}
IMAGES: dict[str, Any] = {"scale": 2.0, "shift": 0.5, "spikes": True}
NETS: dict[str, Any] = {**IMAGES, "float32_only": FLOAT32_SPIKES}

CASES = (
    _hidden("leaky", "mem", "Leaky", 0.8),
    _hidden("leaky_zero", "mem", "Leaky", 0.8, reset_mechanism="zero"),
    _hidden("leaky_none", "mem", "Leaky", 0.6, reset_mechanism="none"),
    _hidden("leaky_learn", "mem", "Leaky", 0.8, learn_beta=True, learn_threshold=True),
    _hidden(
        "leaky_immediate_reset",
        "mem",
        "Leaky",
        0.8,
        reset_delay=False,
        threshold=0.7,
        learn_threshold=True,
    ),
    _hidden(
        "leaky_graded",
        "mem",
        "Leaky",
        0.8,
        graded_spikes_factor=1.5,
        learn_graded_spikes_factor=True,
    ),
    _hidden("leaky_fast_sigmoid", "mem", "Leaky", 0.8, spike_grad=("fast_sigmoid", {"slope": 5})),
    _hidden("leaky_sigmoid", "mem", "Leaky", 0.8, spike_grad=("sigmoid", {"slope": 3})),
    _hidden(
        "leaky_straight_through", "mem", "Leaky", 0.8, spike_grad=("straight_through_estimator", {})
    ),
    _hidden("leaky_inhibition", "mem", "Leaky", 0.8, inhibition=True),
    _hidden("lapicque", "mem", "Lapicque", 0.5),
    _hidden("lapicque_rc", "mem", "Lapicque", R=2.0, C=1.5, reset_mechanism="zero"),
    _hidden("synaptic", "syn mem", "Synaptic", 0.7, 0.8),
    _hidden(
        "synaptic_learn",
        "syn mem",
        "Synaptic",
        0.7,
        0.8,
        learn_alpha=True,
        learn_beta=True,
        learn_threshold=True,
    ),
    _hidden("synaptic_zero", "syn mem", "Synaptic", 0.7, 0.6, reset_mechanism="zero"),
    _hidden("alpha", "syn_exc syn_inh mem", "Alpha", 0.8, 0.6, case={"scale": 4.0, "shift": 2.0}),
    _hidden(
        "alpha_subtract",
        "syn_exc syn_inh mem",
        "Alpha",
        0.8,
        0.6,
        reset_mechanism="subtract",
        learn_beta=True,
        case={"scale": 4.0, "shift": 2.0},
    ),
    _hidden("rleaky", "spk mem", "RLeaky", 0.7, linear_features=HIDDEN, case=FLOAT32),
    _hidden(
        "rleaky_one_to_one",
        "spk mem",
        "RLeaky",
        0.7,
        V=torch.tensor([0.5, -0.5, 0.3, 1.0]),
        all_to_all=False,
    ),
    _hidden(
        "rsynaptic", "spk syn mem", "RSynaptic", 0.7, 0.6, linear_features=HIDDEN, case=FLOAT32
    ),
    _explicit("leaky_explicit", "mem", "Leaky", 0.8, learn_beta=True),
    _explicit("synaptic_explicit", "syn mem", "Synaptic", 0.7, 0.8),
    _explicit(
        "alpha_explicit",
        "syn_exc syn_inh mem",
        "Alpha",
        0.8,
        0.6,
        reset_mechanism="none",
        case={"scale": 3.0, "shift": 1.0},
    ),
    _explicit(
        "slstm",
        "syn mem",
        "SLSTM",
        HIDDEN,
        HIDDEN,
        threshold=0.1,
        case={"float32_only": FLOAT32_STATE},
    ),
    _explicit(
        "slstm_subtract",
        "syn mem",
        "SLSTM",
        HIDDEN,
        HIDDEN,
        threshold=0.1,
        reset_mechanism="subtract",
        learn_threshold=True,
        case={"float32_only": FLOAT32_STATE},
    ),
    Case(
        "snntorch-sconv2dlstm",
        "snntorch",
        lambda: _snn().SConv2dLSTM(2, 3, 3, max_pool=2, threshold=0.05, init_hidden=True),
        (BATCH, 2, 4, 4),
        attributes("syn", "mem"),
        **IMAGES,
    ),
    Case(
        "snntorch-sconv2dlstm_zero",
        "snntorch",
        lambda: _snn().SConv2dLSTM(1, 2, 3, avg_pool=2, threshold=0.05, reset_mechanism="zero"),
        (BATCH, 1, 4, 4),
        spread("syn", "mem"),
        **IMAGES,
    ),
    Case(
        "snntorch-rleaky_conv",
        "snntorch",
        _rleaky_conv,
        (BATCH, 1, 3, 3),
        attributes("1.spk", "1.mem"),
        **NETS,
    ),
    Case(
        "snntorch-conv_net",
        "snntorch",
        _conv_net,
        (BATCH, 1, 6, 6),
        attributes("2.mem", "5.mem"),
        **NETS,
    ),
    Case(
        "snntorch-hidden_net",
        "snntorch",
        _hidden_net,
        (BATCH, INPUT),
        attributes("1.mem", "3.syn", "3.mem", "5.mem"),
        **NETS,
    ),
    Case(
        "snntorch-tutorial_net",
        "snntorch",
        TutorialNet,
        (BATCH, INPUT),
        sequence("lif1,lif2", read=_tutorial_states),
        **NETS,
    ),
    Case(
        "snntorch-explicit_net",
        "snntorch",
        ExplicitNet,
        (BATCH, INPUT),
        spread("mem1", "mem2"),
        **NETS,
    ),
)
