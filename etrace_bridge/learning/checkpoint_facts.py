"""The facts in a checkpoint besides its arrays: their names and allowed values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp

from etrace_bridge._errors import CheckpointError

STAGES = ("batches", "callbacks", "end", "over")


def check_facts(facts: Mapping[str, Any]) -> None:
    """Raise if a fact is missing, unknown or has a wrong value."""
    problems = [f"`{name}` is missing" for name in FACTS if name not in facts]
    problems += [f"`{name}` is not known" for name in sorted(set(facts) - set(FACTS))]
    for name, (allowed, is_allowed) in FACTS.items():
        if name in facts and not is_allowed(facts[name]):
            problems.append(f"`{name}` is {str(facts[name])[:60]!r}; it must be {allowed}")
    if not problems:
        if facts["updates"] > facts["steps"]:
            problems.append(f"there are {facts['updates']} updates in {facts['steps']} steps")
        if facts["in_stream"] and facts["inputs"] is None:
            problems.append("it is in a stream, but there was no input")
        if facts["fit"] is not None and facts["history"] is None:
            problems.append("it is in a call of `fit`, but has no history")
        elif facts["fit"] is not None and facts["fit"]["epoch"] != len(facts["history"]["epochs"]):
            problems.append("the epoch of `fit` is not the last one of the history")
    if problems:
        raise CheckpointError("The checkpoint's facts are wrong: " + "; ".join(problems) + ".")


# -- what a fact may be ---------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, None or a list of these."""
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _is_plain_dict(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_plain, value.values()))


def _is_rule(value: Any) -> bool:
    if (
        not isinstance(value, dict)
        or set(value) != {"name", "options"}
        or not isinstance(value["name"], str)
    ):
        return False
    return value["options"] is None or isinstance(value["options"], dict)


def _is_input(value: Any) -> bool:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not isinstance(value[0], list)
        or not isinstance(value[1], str)
    ):
        return False
    try:
        jnp.dtype(value[1])
    except TypeError:
        return False
    return all(map(_is_count, value[0]))


def _is_history(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"epochs", "batch_losses", "stopped"}:
        return False
    records, losses = value["epochs"], value["batch_losses"]
    if (
        not isinstance(records, list)
        or not isinstance(losses, list)
        or not isinstance(value["stopped"], str)
    ):
        return False
    return all(map(_is_record, records)) and all(map(_is_number, losses))


def _is_record(value: Any) -> bool:
    if (
        not isinstance(value, dict)
        or not _is_number(value.get("loss"))
        or not isinstance(value.get("complete"), bool)
    ):
        return False
    return all(_is_count(value.get(name)) for name in ("epoch", "batches", "steps"))


def _is_groups(value: Any) -> bool:
    def fits(group: Any) -> bool:
        return _is_plain_dict(group) and all(
            math.isfinite(v) for v in _numbers(list(group.values()))
        )

    return isinstance(value, list) and all(map(fits, value))


def _numbers(values: list[Any]) -> list[float]:
    found: list[float] = []
    for value in values:
        found += (
            _numbers(value) if isinstance(value, list) else [value] if _is_number(value) else []
        )
    return found


def _is_torch_optimizer(value: Any) -> bool:
    if (
        not isinstance(value, dict)
        or set(value) != {"waiting", "state"}
        or not isinstance(value["state"], dict)
    ):
        return False
    return _is_count(value["waiting"]) and all(map(_is_plain_dict, value["state"].values()))


def _is_fit(value: Any) -> bool:
    names = {"epoch", "batch", "total", "sums", "stage", "best", "scheduler"}
    if not isinstance(value, dict) or set(value) != names or value["stage"] not in STAGES:
        return False
    best, sums = value["best"], value["sums"]
    fits = best is None or (
        isinstance(best, dict) and set(best) == {"value", "since"} and _is_number(best["value"])
    )
    fits = fits and (best is None or _is_count(best["since"]))
    fits = (
        fits
        and isinstance(sums, dict)
        and all(
            isinstance(s, list) and len(s) == 2 and all(map(_is_number, s)) for s in sums.values()
        )
    )
    scheduler = value["scheduler"]
    fits = fits and (
        scheduler is None or (isinstance(scheduler, list) and all(map(_is_plain_dict, scheduler)))
    )
    return (
        fits
        and _is_count(value["epoch"])
        and value["epoch"] > 0
        and _is_count(value["batch"])
        and _is_number(value["total"])
    )


def _or_none(is_allowed: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_allowed(value)


FACTS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "rule": ("a rule's name and options", _is_rule),
    "steps": ("a count", _is_count),
    "updates": ("a count", _is_count),
    "chunk": ("'auto' or a positive number", lambda v: v == "auto" or (_is_count(v) and v > 0)),
    "reduction": ("'mean' or 'sum'", lambda v: v in ("mean", "sum")),
    "inputs": (
        "a list of shapes and dtypes",
        _or_none(lambda v: isinstance(v, list) and len(v) > 0 and all(map(_is_input, v))),
    ),
    "in_stream": ("true or false", lambda v: isinstance(v, bool)),
    "history": ("the epochs of `fit`", _or_none(_is_history)),
    "fit": ("a place in a call of `fit`", _or_none(_is_fit)),
    "optimizer": ("the name of a torch optimizer", _or_none(lambda v: isinstance(v, str))),
    "groups": ("parameter groups with finite numbers", _or_none(_is_groups)),
    "torch_optimizer": ("the state of a torch optimizer", _or_none(_is_torch_optimizer)),
    "versions": (
        "the versions that wrote it",
        lambda v: isinstance(v, dict) and all(isinstance(x, str) for x in v.values()),
    ),
}
