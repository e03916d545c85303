"""Norse 1.1: its neurons as cells and as layers over time, with and without recurrence, and its
containers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, Runner, Trajectory, boost, carried, last_state, name_states, sequence

BATCH, INPUT, HIDDEN = 2, 3, 4


def _norse() -> Any:
    import norse.torch

    return norse.torch


def _over_time(module: nn.Module, xs: Tensor) -> Trajectory:
    """`out, state = layer(x[None], state)`: Norse's layers loop over the first axis."""
    state, outputs, states = None, [], []
    for x in xs:
        out, state = module(x[None], state)
        outputs.append(out[0])
        states.append(name_states(module, state))
    return Trajectory(outputs, states)


def _recurrent(kind: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: boost(getattr(_norse(), kind)(INPUT, HIDDEN, **_parameters(options)), 3.0)


def _plain(kind: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(_norse(), kind)(**_parameters(options))


def _parameters(options: dict[str, Any]) -> dict[str, Any]:
    """Build `p=(class name, {field: value})` when the library may be imported; values become
    tensors.
    """
    options = dict(options)
    if "p" in options:
        name, values = options["p"]
        values = {
            key: torch.tensor(value) if isinstance(value, float) else value
            for key, value in values.items()
        }
        options["p"] = getattr(_norse(), name)(**values)
    if isinstance(options.get("spiking_method"), str):
        from norse.torch.functional import izhikevich

        options["spiking_method"] = getattr(izhikevich, options["spiking_method"])
    return options


def _case(
    name: str, make: Callable[[], nn.Module], size: int, run: Runner | None = None, **options: Any
) -> Case:
    settings: dict[str, Any] = {"scale": 3.0, "shift": 2.0, "spikes": True, **options}
    return Case(f"norse-{name}", "norse", make, (BATCH, size), run or carried(), **settings)


class LIFNet(nn.Module):
    """Linear layers between LIF cells and a leaky readout; the user hands the states through."""

    def __init__(self) -> None:
        super().__init__()
        norse = _norse()
        self.fc1, self.lif1 = nn.Linear(INPUT, HIDDEN), norse.LIFCell()
        self.fc2, self.out = nn.Linear(HIDDEN, 2), norse.LICell()
        boost(self, 4.0)

    def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        s1, s2 = (None, None) if state is None else state
        z, s1 = self.lif1(self.fc1(x), s1)
        v, s2 = self.out(self.fc2(z), s2)
        return v, (s1, s2)


class TimeNet(nn.Module):
    """A module over whole sequences that never mentions state."""

    def __init__(self) -> None:
        super().__init__()
        norse = _norse()
        self.fc, self.lif = nn.Linear(INPUT, HIDDEN), norse.LIFRecurrent(HIDDEN, HIDDEN)
        self.readout, self.li = nn.Linear(HIDDEN, 2, bias=False), norse.LI()
        boost(self, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        spikes, _ = self.lif(self.fc(x))
        voltages, _ = self.li(self.readout(spikes))
        return voltages


def _sequential() -> nn.Module:
    norse = _norse()
    return boost(
        norse.SequentialState(
            nn.Linear(INPUT, HIDDEN),
            norse.LIFCell(),
            nn.Linear(HIDDEN, HIDDEN),
            norse.LSNNCell(),
            nn.Linear(HIDDEN, 2),
        ),
        4.0,
    )


def _sequential_recurrent() -> nn.Module:
    norse = _norse()
    return boost(
        norse.SequentialState(
            norse.LIFRecurrentCell(INPUT, HIDDEN), nn.Linear(HIDDEN, 2), norse.LICell()
        ),
        3.0,
    )


def _feedback() -> nn.Module:
    norse = _norse()
    return boost(norse.RecurrentSequential(nn.Linear(HIDDEN, HIDDEN), norse.LIFCell()), 4.0)


def _after_linear(kind: str, **options: Any) -> Callable[[], nn.Module]:
    """A linear layer and a cell without weights of its own."""
    return lambda: boost(
        _norse().SequentialState(nn.Linear(INPUT, HIDDEN), _plain(kind, **options)()), 3.0
    )


CASES = (
    _case("lif_cell", _plain("LIFCell"), HIDDEN),
    _case("lif_cell_linear", _after_linear("LIFCell"), INPUT),
    _case(
        "lif_cell_tanh",
        _plain("LIFCell", p=("LIFParameters", {"method": "tanh", "alpha": 2.0, "v_th": 0.6})),
        HIDDEN,
    ),
    _case(
        "lif_cell_triangle",
        _plain("LIFCell", p=("LIFParameters", {"method": "triangle", "alpha": 0.5})),
        HIDDEN,
    ),
    _case("lif_recurrent_cell", _recurrent("LIFRecurrentCell"), INPUT),
    _case("lif_recurrent_cell_autapses", _recurrent("LIFRecurrentCell", autapses=True), INPUT),
    _case("lif", _plain("LIF"), HIDDEN, _over_time),
    _case("lif_recurrent", _recurrent("LIFRecurrent"), INPUT, _over_time, shift=-2.0),
    _case("lif_box_cell", _after_linear("LIFBoxCell"), INPUT, scale=8.0, shift=8.0),
    _case("lif_refrac_cell", _plain("LIFRefracCell"), HIDDEN),
    _case("lif_refrac_recurrent_cell", _recurrent("LIFRefracRecurrentCell"), INPUT),
    _case("lif_adex_cell", _after_linear("LIFAdExCell"), INPUT),
    _case("lif_adex_recurrent_cell", _recurrent("LIFAdExRecurrentCell"), INPUT),
    _case("lif_ex_cell", _plain("LIFExCell"), HIDDEN),
    _case("lsnn_cell", _after_linear("LSNNCell"), INPUT),
    _case("lsnn_recurrent_cell", _recurrent("LSNNRecurrentCell"), INPUT),
    _case("li_cell", _after_linear("LICell"), INPUT, spikes=False),
    _case("li", _plain("LI"), HIDDEN, _over_time, spikes=False),
    _case("li_linear_cell", _recurrent("LILinearCell"), INPUT, spikes=False),
    _case("iaf_cell", _plain("IAFCell"), HIDDEN, scale=0.5, shift=0.4),
    _case("iaf_cell_linear", _after_linear("IAFCell"), INPUT),
    _case(
        "izhikevich_cell",
        _plain("IzhikevichCell", spiking_method="tonic_spiking"),
        HIDDEN,
        scale=30.0,
        shift=60.0,
    ),
    _case(
        "izhikevich_recurrent_cell",
        _recurrent("IzhikevichRecurrentCell", spiking_method="tonic_spiking"),
        INPUT,
        scale=30.0,
        shift=60.0,
    ),
    _case("sequential", _sequential, INPUT, spikes=False),
    _case("sequential_recurrent", _sequential_recurrent, INPUT, spikes=False),
    _case(
        "feedback", _feedback, HIDDEN, carried(None, "cache", "module.1.v", "module.1.i"), shift=0.0
    ),
    _case("net", LIFNet, INPUT, spikes=False),
    _case("time_net", TimeNet, INPUT, sequence("lif,li", read=last_state), spikes=False),
)
