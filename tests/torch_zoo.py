"""The zoo: every recurrent and spiking torch module that the front-end is compared on."""

from __future__ import annotations

import warnings

from zoo import (
    ncps_cases,
    norse_cases,
    snntorch_cases,
    spikingjelly_cases,
    torch_cells,
    torch_layers,
    torch_nets,
    torch_weights,
)
from zoo.case import STEPS, Case, Reference, Trajectory, check_live, reference, tensors

__all__ = [
    "CASES",
    "STEPS",
    "Case",
    "Reference",
    "Trajectory",
    "check_live",
    "find",
    "reference",
    "tensors",
    "trained_cases",
]

CASES: tuple[Case, ...] = (
    *torch_layers.CASES,
    *torch_cells.CASES,
    *torch_weights.CASES,
    *torch_nets.CASES,
    *snntorch_cases.CASES,
    *norse_cases.CASES,
    *spikingjelly_cases.CASES,
    *ncps_cases.CASES,
)


def find(name: str) -> Case:
    """The case of this name."""
    return {case.name: case for case in CASES}[name]


def trained_cases() -> list[Case]:
    """The cases whose modules have parameters and run in float64."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own, when they build a module
        return [
            case
            for case in CASES
            if case.available
            and not case.float32_only
            and any(p.requires_grad for p in case.build().parameters())
        ]
