"""ncps 1.0: CfC and LTC networks, their cells and wirings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case, Runner, Trajectory, carried, name_states, sequence, tensors

BATCH, INPUT, UNITS = 2, 3, 6
FLOAT32_STATE = "ncps makes the initial state in torch's default dtype"


def _ncps(kind: str, *arguments: Any, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import ncps.torch
        import ncps.wirings

        built = [
            getattr(ncps.wirings, a[0])(*a[1:]) if isinstance(a, tuple) else a for a in arguments
        ]
        return getattr(ncps.torch, kind)(*built, **options)

    return make


def _over_time(batch_first: bool = True) -> Runner:
    """`out, hx = rnn(x[:, None], hx)` from zeros of the input's dtype."""

    def run(module: nn.Module, xs: Tensor) -> Trajectory:
        axis = 1 if batch_first else 0
        h = torch.zeros(xs.shape[1], module.state_size, dtype=xs.dtype)
        state: Any = (h, h) if module.use_mixed else h
        outputs, states = [], []
        for x in xs:
            out, state = module(x.unsqueeze(axis), state)
            outputs.append(out.select(axis, 0) if module.return_sequences else out)
            states.append(name_states(module, state, ("h", "c") if module.use_mixed else ("h",)))
        return Trajectory(outputs, states)

    return run


def _layer(name: str, make: Callable[[], nn.Module], **options: Any) -> Case:
    run = _over_time(options.pop("batch_first", True))
    return Case(f"ncps-{name}", "ncps", make, (BATCH, INPUT), run, **options)


class CfCReadout(nn.Module):
    """A module over whole sequences with a CfC inside."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(INPUT, 4)
        self.cfc = _ncps("CfC", 4, UNITS, backbone_units=5, batch_first=False)()
        self.readout = nn.Linear(UNITS, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.cfc(torch.relu(self.encoder(x)))[0])


CASES = (
    _layer("cfc", _ncps("CfC", INPUT, UNITS, backbone_units=5)),
    _layer(
        "cfc_time_major_proj",
        _ncps("CfC", INPUT, UNITS, proj_size=2, backbone_units=5, batch_first=False),
        batch_first=False,
    ),
    _layer(
        "cfc_pure", _ncps("CfC", INPUT, UNITS, mode="pure", backbone_units=5, activation="relu")
    ),
    _layer(
        "cfc_no_gate_2_layers",
        _ncps(
            "CfC",
            INPUT,
            UNITS,
            mode="no_gate",
            backbone_units=5,
            backbone_layers=2,
            backbone_dropout=0.3,
            activation="silu",
        ),
    ),
    _layer(
        "cfc_mixed_memory",
        _ncps("CfC", INPUT, UNITS, mixed_memory=True, backbone_units=5, activation="gelu"),
    ),
    _layer("cfc_wired", _ncps("CfC", INPUT, ("AutoNCP", UNITS + 2, 2))),
    _layer("ltc", _ncps("LTC", INPUT, 4, ode_unfolds=3)),
    _layer("ltc_wired", _ncps("LTC", INPUT, ("AutoNCP", UNITS, 2), ode_unfolds=2)),
    _layer(
        "ltc_explicit_mixed",
        _ncps(
            "LTC",
            INPUT,
            4,
            ode_unfolds=2,
            implicit_param_constraints=False,
            mixed_memory=True,
            input_mapping="linear",
            output_mapping="linear",
        ),
    ),
    _layer(
        "ltc_last_only",
        _ncps("LTC", INPUT, ("Random", 4, 2, 0.3), ode_unfolds=2, return_sequences=False),
    ),
    Case(
        "ncps-ltc_cell",
        "ncps",
        _ncps("LTCCell", ("FullyConnected", 4), INPUT, ode_unfolds=2),
        (BATCH, INPUT),
        carried(lambda b: torch.zeros(b, 4), "h"),
        state=lambda b: torch.zeros(b, 4),
    ),
    Case(
        "ncps-cfc_readout",
        "ncps",
        CfCReadout,
        (BATCH, INPUT),
        sequence("cfc", read=lambda _, result: tensors(result[1], "cfc.h")),
        float32_only=FLOAT32_STATE,
    ),
)
