"""The settings of a training run: defaults, then a TOML file, then flags."""

from __future__ import annotations

import argparse
import dataclasses
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax

from etrace_bridge._errors import InputError
from etrace_bridge.cli.arguments import UsageError, as_chunk, at_least_one, existing_file

OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "sgd": optax.sgd,
    "momentum": lambda lr: optax.sgd(lr, momentum=0.9),
    "rmsprop": optax.rmsprop,
}
# in a TOML file: relative to that file
_PATHS = ("model", "data", "targets", "state", "resume", "output", "state_dict", "cache_dir")


@dataclass(frozen=True)
class Settings:
    """The settings of a training run: the names of the flags and of the keys in a TOML file."""

    model: str = ""
    data: str = ""
    targets: str | None = None
    target_columns: str = ""
    window: int | None = None
    layout: str = "model"
    loss_at: str = "all"
    state: str | None = None
    rule: str = "d_rtrl"
    loss: str = "mse"
    optimizer: str = "adam"
    lr: float = 1e-3
    clip_norm: float | None = None
    epochs: int = 10
    chunk: int | str = "auto"
    batch: int = 32
    every: str = "sequence"
    validation: float = 0.0
    patience: int | None = None
    seed: int = 0
    metric: str = ""
    fidelity: bool = False
    resume: str | None = None
    output: str = "trained.safetensors"
    save_minutes: float | None = 10.0
    save_updates: int | None = None
    state_dict: str | None = None
    processes: int = 1
    cache_dir: str | None = None


def read_settings(args: argparse.Namespace) -> Settings:
    """Return defaults, overridden by the TOML file, overridden by flags; checked."""
    given = _read_toml(Path(args.config)) if args.config else {}
    names = {field.name for field in dataclasses.fields(Settings)}
    given |= {name: value for name, value in vars(args).items() if name in names}
    settings = Settings(**given)
    for name in ("model", "data"):
        if not getattr(settings, name):
            flag = "the model, path/to/file.py:name," if name == "model" else "--data FILE"
            raise UsageError(
                f"{flag} is missing: give it on the command line or as `{name}` in the file of "
                "--config."
            )
    for name in ("epochs", "batch", "window", "patience", "save_updates", "processes"):
        if getattr(settings, name) is not None:
            at_least_one(getattr(settings, name), f"--{name.replace('_', '-')}")
    if settings.save_minutes is not None and not settings.save_minutes > 0:
        raise UsageError(f"--save-minutes is {settings.save_minutes}; it must be positive.")
    if settings.optimizer not in OPTIMIZERS:
        raise UsageError(
            f"There is no optimizer `{settings.optimizer}`. Known: {', '.join(OPTIMIZERS)}."
        )
    if not settings.lr > 0:
        raise UsageError(f"--lr is {settings.lr}; it must be positive.")
    if not 0 <= settings.validation < 1:
        raise UsageError(
            f"--validation is {settings.validation}; it is the share of the sequences kept for "
            "validation, such as 0.2."
        )
    choices = {
        "layout": ("model", "time", "batch"),
        "loss_at": ("all", "last"),
        "every": ("sequence", "chunk", "step"),
    }
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            raise UsageError(
                f"`{name}` is {getattr(settings, name)!r}; it must be one of {', '.join(allowed)}."
            )
    return dataclasses.replace(settings, chunk=as_chunk(settings.chunk))


def _read_toml(path: Path) -> dict[str, Any]:
    existing_file(str(path))
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"`{path}` is not a TOML file: {error}.") from error
    found = {key.replace("-", "_"): value for key, value in found.items()}
    fields = {field.name: str(field.type) for field in dataclasses.fields(Settings)}
    unknown = sorted(set(found) - set(fields))
    if unknown:
        raise InputError(
            f"`{path}` has settings that are not known: {', '.join(unknown)}. Known: "
            f"{', '.join(fields)}."
        )
    for name, value in found.items():
        kinds = {"str": str, "int": int, "float": (int, float), "bool": bool}
        allowed = [kinds[kind] for kind in fields[name].split(" | ") if kind in kinds]
        if isinstance(value, bool) != (allowed == [bool]) or not any(
            isinstance(value, kind) for kind in allowed
        ):
            raise InputError(
                f"`{name}` in `{path}` is {value!r}; it must be of type "
                f"{fields[name].removesuffix(' | None')}."
            )
    for name in set(_PATHS) & set(found):
        found[name] = str(path.parent / found[name])
    for name in {"loss", "metric"} & set(found):
        parts = found[name].split(",")
        found[name] = ",".join(
            str(path.parent / part.strip()) if ":" in part else part for part in parts
        )
    return found
