"""What the commands share: arguments, exit statuses, and the error for arguments that contradict
each other.

Nothing here imports JAX or torch, so that `--help` is quick; a test compares the names with what
they name.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path

from etrace_bridge._errors import InputError

OK, NOT_OK, BAD_USE, INTERRUPTED = 0, 1, 2, 130

RULE_OPTIONS = "options follow a colon, as in low_rank:rank=2:hops=1"
RULE_NAMES = (
    "bptt", "d_rtrl", "decolle", "dni", "eprop", "fptt", "immediate", "kf_rtrl", "low_rank",
    "ok_rtrl", "ostl", "otpe", "ottt", "pp_prop", "rflo", "rtrl", "snap1", "snap_n",
    "three_factor", "uoro",
)  # fmt: skip
LOSS_NAMES = ("mse", "l1", "huber", "cross_entropy", "nll", "bce_with_logits")
OPTIMIZER_NAMES = ("adam", "adamw", "sgd", "momentum", "rmsprop")


class UsageError(Exception):
    """Arguments that contradict each other."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every command that takes a model and makes up data for it."""
    parser.add_argument(
        "model", help="path/to/file.py:name of a torch or brainstate module, or of its maker"
    )
    parser.add_argument(
        "--input",
        required=True,
        metavar="SIZES",
        help="shape of one time step, batch first, such as 8,32",
    )
    add_data_arguments(parser)
    add_common_arguments(parser)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that describe made-up data and the model's state."""
    parser.add_argument(
        "--classes",
        type=int,
        metavar="N",
        help="inputs are whole numbers below N (found out for an embedding)",
    )
    parser.add_argument(
        "--state",
        metavar="FILE:NAME",
        help="initial state of a cell that does not accept None, as for `wrap`",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default 0)")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every command."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def at_least_one(value: int, option: str) -> int:
    """Return a positive number, or raise a `UsageError`."""
    if value < 1:
        raise UsageError(f"{option} is {value}; it must be at least 1.")
    return value


def as_chunk(value: int | str, option: str = "--chunk") -> int | str:
    """Return `"auto"` or a positive number."""
    text = str(value)
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{option} is {text!r}; it must be `auto` or a positive number.")
    return int(text)


def split_names(groups: list[str] | None) -> list[str]:
    """Split names that were given as several options, or separated by commas."""
    return [name.strip() for group in groups or [] for name in group.split(",") if name.strip()]


def existing_file(name: str) -> Path:
    """Return the path of an existing file."""
    path = Path(name)
    if not path.is_file():
        raise InputError(
            f"There is no file `{name}`. Paths start from the current folder, {Path.cwd()}."
        )
    return path


def later(module: str, name: str) -> Callable[[argparse.Namespace], int]:
    """Return a command's function, whose module is imported when the command runs."""

    def run(args: argparse.Namespace) -> int:
        return getattr(importlib.import_module(f"etrace_bridge.cli.{module}"), name)(args)

    return run
