"""What the commands share: arguments, exit statuses, and the error for arguments that do not go together."""

from __future__ import annotations

import argparse

OK, NOT_OK, BAD_USE = 0, 1, 2


class UsageError(Exception):
    """The arguments do not go together."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command that takes a model and makes up data for it."""
    parser.add_argument("model", help="path/to/file.py:name of a torch module, or of a function that makes one")
    parser.add_argument("--input", required=True, metavar="SIZES", help="shape of one time step, batch first, such as 8,32")
    add_data_arguments(parser)
    add_common_arguments(parser)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """What made-up data and the model's state look like."""
    parser.add_argument("--classes", type=int, metavar="N", help="inputs are whole numbers below N (found out for an embedding)")
    parser.add_argument("--state", metavar="FILE:NAME", help="initial state of a cell that does not accept None, as for `wrap`")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default 0)")


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of every command."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def at_least_one(value: int, option: str) -> int:
    """A positive number."""
    if value < 1:
        raise UsageError(f"{option} is {value}; it must be at least 1.")
    return value


def as_chunk(value: int | str, option: str = "--chunk") -> int | str:
    """`"auto"`, or a positive number, from a number or text."""
    text = str(value)
    if text == "auto":
        return text
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"{option} is {text!r}; it must be `auto` or a positive number.")
    return int(text)


def split_names(groups: list[str] | None) -> list[str]:
    """Names given as several options, or in one with commas."""
    return [name.strip() for group in groups or [] for name in group.split(",") if name.strip()]
