"""The arguments of `train`, `evaluate` and `predict`; nothing here imports JAX or torch."""

from __future__ import annotations

import argparse
from typing import Any

from etrace_bridge.cli.arguments import (
    LOSS_NAMES,
    OPTIMIZER_NAMES,
    RULE_NAMES,
    RULE_OPTIONS,
    add_common_arguments,
    later,
)


def add_train(commands: Any) -> None:
    """Add `train`: train the model of a file on the data of a file."""
    parser = commands.add_parser(
        "train",
        help="train the model of a file online on the data of a file, and write a checkpoint",
        description="Trains a torch or brainstate model online. Every setting is a flag, or a key of a TOML file named with --config; flags win.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        help="path/to/file.py:name of a torch or brainstate module or its maker",
    )
    own = parser.add_argument_group("data")
    _add_data(own)
    _add(own, "loss_at", choices=("all", "last"), help="which steps have a loss (default all)")
    _add(
        own,
        "validation",
        type=float,
        metavar="SHARE",
        help="share of the sequences kept for validation (default 0)",
    )
    own = parser.add_argument_group("training")
    _add(
        own,
        "rule",
        metavar="NAME",
        help=f"{', '.join(RULE_NAMES)} (default d_rtrl); {RULE_OPTIONS}",
    )
    _add(
        own,
        "loss",
        metavar="NAME",
        help=f"{', '.join(LOSS_NAMES)}, or path/to/file.py:name (default mse)",
    )
    _add(own, "optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZER_NAMES)} (default adam)")
    _add(own, "lr", type=float, help="learning rate (default 0.001)")
    _add(
        own,
        "clip_norm",
        type=float,
        metavar="NORM",
        help="most that the norm of all gradients may be",
    )
    _add(own, "epochs", type=int, help="passes over the data (default 10)")
    _add(own, "chunk", help="steps in a chunk, or auto (default auto)")
    _add(own, "batch", type=int, help="sequences in a batch (default 32)")
    _add(
        own,
        "every",
        choices=("sequence", "chunk", "step"),
        help="one update a sequence, chunk or step (default sequence)",
    )
    _add(
        own,
        "patience",
        type=int,
        metavar="EPOCHS",
        help="stop after so many epochs without improvement, and keep the best",
    )
    _add(
        own,
        "state",
        metavar="FILE:NAME",
        help="initial state of a cell that does not accept None, as for `wrap`",
    )
    _add(own, "seed", type=int, help="seed of weights and order (default 0)")
    _add(
        own,
        "processes",
        type=int,
        metavar="N",
        help="train in N processes of this machine, each with its part of a batch (default 1)",
    )
    _add(
        own,
        "metric",
        metavar="NAMES",
        help="further numbers: accuracy, or path/to/file.py:name (default accuracy for class losses)",
    )
    _add(
        own,
        "fidelity",
        action="store_true",
        help="measure with every batch whether updates go downhill on the true loss",
    )
    _add(
        own,
        "resume",
        metavar="FILE",
        help="go on from this checkpoint: with the rest of an interrupted run, else with --epochs more",
    )
    own = parser.add_argument_group("results")
    _add(own, "output", metavar="FILE", help="the checkpoint (default trained.safetensors)")
    _add(
        own,
        "save_minutes",
        type=float,
        metavar="MINUTES",
        help="write the checkpoint every so many minutes (default 10)",
    )
    _add(
        own,
        "save_updates",
        type=int,
        metavar="N",
        help="write the checkpoint every N updates as well",
    )
    _add(own, "state_dict", metavar="FILE", help="also write the torch state dict, for torch.load")
    _add(
        own,
        "cache_dir",
        metavar="FOLDER",
        help="keep compiled programs there, for a quick start the next time",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="a TOML file with any of these settings; its paths are relative to itself",
    )
    add_common_arguments(parser)
    parser.set_defaults(run=later("train", "run_train"))


def add_evaluate(commands: Any) -> None:
    """Add `evaluate`: loss and metrics of a trained model on the data of a file."""
    parser = commands.add_parser(
        "evaluate", help="loss and metrics of a checkpoint on the data of a file"
    )
    own = _add_trained(parser)
    _add(own, "loss_at", choices=("all", "last"), help="which steps have a loss (default all)")
    _add(
        own,
        "loss",
        metavar="NAME",
        help=f"{', '.join(LOSS_NAMES)}, or path/to/file.py:name (default mse)",
    )
    _add(
        own,
        "metric",
        metavar="NAMES",
        help="further numbers: accuracy, or path/to/file.py:name (default accuracy for class losses)",
    )
    add_common_arguments(parser)
    parser.set_defaults(run=later("trained", "run_evaluate"))


def add_predict(commands: Any) -> None:
    """Add `predict`: outputs of a trained model for the data of a file."""
    parser = commands.add_parser(
        "predict", help="outputs of a checkpoint for the data of a file, as a .npy file"
    )
    own = _add_trained(parser)
    _add(
        own,
        "output",
        metavar="FILE",
        help="the outputs, laid out as the inputs (default predictions.npy)",
    )
    add_common_arguments(parser)
    parser.set_defaults(run=later("trained", "run_predict"))


def _add_trained(parser: argparse.ArgumentParser) -> Any:
    parser.add_argument("model", help="path/to/file.py:name of the module or its maker")
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FILE",
        help="what `train` or `OnlineLearner.save` wrote",
    )
    own = parser.add_argument_group("data")
    _add_data(own)
    _add(own, "batch", type=int, help="sequences in a batch (default 32)")
    _add(
        own,
        "state",
        metavar="FILE:NAME",
        help="initial state of a cell that does not accept None, as for `wrap`",
    )
    return own


def _add_data(own: Any) -> None:
    _add(
        own,
        "data",
        metavar="FILE",
        help=".npz with xs, targets and, if they are padded, lengths or a mask; .npy with inputs, or .csv with one row a time step",
    )
    _add(own, "targets", metavar="FILE", help=".npy with targets, for inputs in a .npy")
    _add(
        own,
        "target_columns",
        metavar="NAMES",
        help="columns of a .csv that are targets (default: the last)",
    )
    _add(
        own, "window", type=int, metavar="STEPS", help="cut a .csv into sequences of so many steps"
    )
    _add(
        own,
        "layout",
        choices=("model", "time", "batch"),
        help="arrays are (T, N, …): time; (N, T, …): batch; default as the model takes",
    )


def _add(group: Any, name: str, **options: Any) -> None:
    group.add_argument(
        f"--{name.replace('_', '-')}", dest=name, default=argparse.SUPPRESS, **options
    )
