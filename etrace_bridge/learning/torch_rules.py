"""torch's optimizers as equations on one parameter.

Symbols: p: parameter, g: gradient, s: slots, n: numbers of its group, t: number of updates
including this one. Each equation returns the change of p and the new slots. `1 - beta` and
`log(beta)` are computed in double precision on the host: in float32 they lose five digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import torch

Arrays = dict[str, Any]
Numbers = dict[str, Any]


@dataclass(frozen=True)
class TorchRule:
    """A torch optimizer as equations.

    Attributes:
        numbers: a parameter group's options as the numbers that the equations use.
        slots: the slots that a parameter has, with their initial values.
        update: `(p, g, slots, numbers, t, group) -> (change, slots)`.
        fixed: options that decide which equations are used; they cannot change later.
    """

    numbers: Callable[[Mapping], Numbers]
    slots: Callable[[Mapping], dict[str, float]]
    update: Callable[..., tuple[Any, Arrays]]
    fixed: tuple[str, ...]


def _sgd_numbers(group: Mapping) -> Numbers:
    return {
        "lr": group["lr"],
        "decay": group["weight_decay"],
        "momentum": group["momentum"],
        "fresh": 1 - group["dampening"],
    }


def _sgd(p, g, s, n, t, group) -> tuple[Any, Arrays]:
    g = g + n["decay"] * p
    if not s:
        return -n["lr"] * g, s
    fresh = jnp.where(t == 1, 1, n["fresh"]) if group["dampening"] else 1
    buffer = n["momentum"] * s["momentum_buffer"] + fresh * g
    g = g + n["momentum"] * buffer if group["nesterov"] else buffer
    return -n["lr"] * g, {"momentum_buffer": buffer}


def _adam_numbers(group: Mapping) -> Numbers:
    beta1, beta2 = (float(b) for b in group["betas"])
    return {
        "lr": group["lr"],
        "decay": group["weight_decay"],
        "eps": group["eps"],
        "beta1": beta1,
        "fresh1": 1 - beta1,
        "log1": _log(beta1),
        "beta2": beta2,
        "fresh2": 1 - beta2,
        "log2": _log(beta2),
    }


def _adam(p, g, s, n, t, group) -> tuple[Any, Arrays]:
    decoupled = group.get("decoupled_weight_decay", False)
    if not decoupled:
        g = g + n["decay"] * p
    m = n["beta1"] * s["exp_avg"] + n["fresh1"] * g
    v = n["beta2"] * s["exp_avg_sq"] + n["fresh2"] * g * g
    new = {"exp_avg": m, "exp_avg_sq": v}
    if group["amsgrad"]:
        v = new["max_exp_avg_sq"] = jnp.maximum(s["max_exp_avg_sq"], v)
    correct1, correct2 = -jnp.expm1(t * n["log1"]), -jnp.expm1(t * n["log2"])
    change = -(n["lr"] / correct1) * m / (jnp.sqrt(v) / jnp.sqrt(correct2) + n["eps"])
    if decoupled:
        change = change - n["lr"] * n["decay"] * p
    return change, new


def _rmsprop_numbers(group: Mapping) -> Numbers:
    return {
        "lr": group["lr"],
        "decay": group["weight_decay"],
        "eps": group["eps"],
        "momentum": group["momentum"],
        "alpha": group["alpha"],
        "fresh": 1 - group["alpha"],
    }


def _rmsprop(p, g, s, n, t, group) -> tuple[Any, Arrays]:
    g = g + n["decay"] * p
    square = n["alpha"] * s["square_avg"] + n["fresh"] * g * g
    new = {"square_avg": square}
    if group["centered"]:
        mean = new["grad_avg"] = n["alpha"] * s["grad_avg"] + n["fresh"] * g
        square = square - mean * mean
    change = g / (jnp.sqrt(square) + n["eps"])
    if "momentum_buffer" in s:
        change = new["momentum_buffer"] = n["momentum"] * s["momentum_buffer"] + change
    return -n["lr"] * change, new


def _adagrad_numbers(group: Mapping) -> Numbers:
    return {
        "lr": group["lr"],
        "decay": group["weight_decay"],
        "eps": group["eps"],
        "slowing": group["lr_decay"],
    }


def _adagrad(p, g, s, n, t, group) -> tuple[Any, Arrays]:
    g = g + n["decay"] * p
    total = s["sum"] + g * g
    rate = n["lr"] / (1 + (t - 1) * n["slowing"])
    return -rate * g / (jnp.sqrt(total) + n["eps"]), {"sum": total}


def _adam_slots(group: Mapping) -> dict[str, float]:
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0} | (
        {"max_exp_avg_sq": 0.0} if group["amsgrad"] else {}
    )


def _rmsprop_slots(group: Mapping) -> dict[str, float]:
    slots = {"square_avg": 0.0}
    if group["centered"]:
        slots["grad_avg"] = 0.0
    if group["momentum"] > 0:
        slots["momentum_buffer"] = 0.0
    return slots


_ADAM = TorchRule(
    _adam_numbers, _adam_slots, _adam, ("amsgrad", "decoupled_weight_decay", "maximize")
)
TORCH_RULES: dict[type, TorchRule] = {
    torch.optim.SGD: TorchRule(
        _sgd_numbers,
        lambda group: {"momentum_buffer": 0.0} if group["momentum"] else {},
        _sgd,
        ("nesterov", "dampening", "maximize"),
    ),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.RMSprop: TorchRule(
        _rmsprop_numbers, _rmsprop_slots, _rmsprop, ("centered", "maximize")
    ),
    torch.optim.Adagrad: TorchRule(
        _adagrad_numbers,
        lambda group: {"sum": group["initial_accumulator_value"]},
        _adagrad,
        ("maximize",),
    ),
}


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -1e30
