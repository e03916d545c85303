"""`train`: a model from a Python file, data from a file, settings from flags or a TOML file; writes a checkpoint."""

from __future__ import annotations

import argparse
import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optax
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.check.text import table
from etrace_bridge.cli.arguments import OK, UsageError, add_common_arguments, as_chunk, at_least_one
from etrace_bridge.cli.data import CLASS_LOSSES, Sequences, make_sequences, read_arrays
from etrace_bridge.cli.model import LOSSES, existing_file, load_model, load_object, load_state
from etrace_bridge.frontend import wrap
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.rules import make_rule, rule_names

OPTIMIZERS: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "adam": optax.adam,
    "adamw": optax.adamw,
    "sgd": optax.sgd,
    "momentum": lambda lr: optax.sgd(lr, momentum=0.9),
    "rmsprop": optax.rmsprop,
}
_PATHS = ("model", "data", "targets", "state", "resume", "output", "state_dict")  # in a TOML file: relative to that file


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
    resume: str | None = None
    output: str = "trained.safetensors"
    state_dict: str | None = None


def add_train(commands: Any) -> None:
    """`train`: the model of a file on the data of a file."""
    parser = commands.add_parser(
        "train",
        help="train the model of a file online on the data of a file, and write a checkpoint",
        description="Trains a torch model online. Every setting is a flag, or a key of a TOML file named with --config; flags win.",
    )
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help="path/to/file.py:name of a torch module or its maker")
    own = parser.add_argument_group("data")
    _add(own, "data", metavar="FILE", help=".npz with xs and targets, .npy with inputs, or .csv with one row a time step")
    _add(own, "targets", metavar="FILE", help=".npy with targets, for inputs in a .npy")
    _add(own, "target_columns", metavar="NAMES", help="columns of a .csv that are targets (default: the last)")
    _add(own, "window", type=int, metavar="STEPS", help="cut a .csv into sequences of so many steps")
    _add(own, "layout", choices=("model", "time", "batch"), help="arrays are (T, N, …): time; (N, T, …): batch; default as the model takes")
    _add(own, "loss_at", choices=("all", "last"), help="which steps have a loss (default all)")
    _add(own, "validation", type=float, metavar="SHARE", help="share of the sequences kept for validation (default 0)")
    own = parser.add_argument_group("training")
    _add(own, "rule", metavar="NAME", help=f"{', '.join(rule_names())} (default d_rtrl)")
    _add(own, "loss", metavar="NAME", help=f"{', '.join(LOSSES)}, or path/to/file.py:name (default mse)")
    _add(own, "optimizer", metavar="NAME", help=f"{', '.join(OPTIMIZERS)} (default adam)")
    _add(own, "lr", type=float, help="learning rate (default 0.001)")
    _add(own, "clip_norm", type=float, metavar="NORM", help="most that the norm of all gradients may be")
    _add(own, "epochs", type=int, help="passes over the data (default 10)")
    _add(own, "chunk", help="steps in a chunk, or auto (default auto)")
    _add(own, "batch", type=int, help="sequences in a batch (default 32)")
    _add(own, "every", choices=("sequence", "chunk", "step"), help="one update a sequence, chunk or step (default sequence)")
    _add(own, "patience", type=int, metavar="EPOCHS", help="stop after so many epochs without improvement, and keep the best")
    _add(own, "state", metavar="FILE:NAME", help="initial state of a cell that does not accept None, as for `wrap`")
    _add(own, "seed", type=int, help="seed of weights and order (default 0)")
    _add(own, "resume", metavar="FILE", help="go on from this checkpoint")
    own = parser.add_argument_group("results")
    _add(own, "output", metavar="FILE", help="the checkpoint (default trained.safetensors)")
    _add(own, "state_dict", metavar="FILE", help="also write the torch state dict, for torch.load")
    parser.add_argument("--config", metavar="FILE", help="a TOML file with any of these settings; its paths are relative to itself")
    add_common_arguments(parser)
    parser.set_defaults(run=run_train)


def _add(group: Any, name: str, **options: Any) -> None:
    group.add_argument(f"--{name.replace('_', '-')}", dest=name, default=argparse.SUPPRESS, **options)


def run_train(args: argparse.Namespace) -> int:
    """Runs `train`."""
    settings = read_settings(args)
    model = load_model(settings.model, settings.seed)
    state = load_state(settings.state)
    net = wrap(model, state, seed=settings.seed)
    learner = _make_learner(net, settings)
    sequences = _load_sequences(model, net.batch_first, settings)
    learned, kept = _divide(len(sequences), settings)
    shuffle = torch.Generator().manual_seed(settings.seed)

    def batches() -> Iterator[tuple]:
        order = learned[torch.randperm(len(learned), generator=shuffle)]
        for index in order.split(settings.batch):
            yield sequences.pick(index, net.batch_first)

    def validate(held: OnlineLearner) -> dict[str, float]:
        return _validate(held, sequences, kept, net.batch_first, settings)

    history = learner.fit(
        batches, settings.epochs, validation=validate if len(kept) else None, early_stopping=settings.patience, every=settings.every,
        max_batches=-(-len(learned) // settings.batch), progress=False if args.json else None,
    )  # fmt: skip
    checkpoint = learner.save(settings.output)
    if settings.state_dict:
        learner.sync_to_torch()
        Path(settings.state_dict).parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), settings.state_dict)
    result = {
        "rule": learner.rule.name, "sequences": len(learned), "validation_sequences": len(kept), "steps": learner.steps,
        "updates": learner.updates, "stopped": history.stopped, "epochs": history.epochs, "checkpoint": str(checkpoint),
        "state_dict": settings.state_dict,
    }  # fmt: skip
    print(json.dumps(result, indent=2) if args.json else _render(result, sequences.xs.shape[0]))
    return OK


# -- settings -----------------------------------------------------------------------------------------------------


def read_settings(args: argparse.Namespace) -> Settings:
    """Defaults, then the TOML file, then flags; checked."""
    given = _read_toml(Path(args.config)) if args.config else {}
    names = {field.name for field in dataclasses.fields(Settings)}
    given |= {name: value for name, value in vars(args).items() if name in names}
    settings = Settings(**given)
    for name in ("model", "data"):
        if not getattr(settings, name):
            flag = "the model, path/to/file.py:name," if name == "model" else "--data FILE"
            raise UsageError(f"{flag} is missing: give it on the command line or as `{name}` in the file of --config.")
    for name in ("epochs", "batch", "window", "patience"):
        if getattr(settings, name) is not None:
            at_least_one(getattr(settings, name), f"--{name}")
    if settings.optimizer not in OPTIMIZERS:
        raise UsageError(f"There is no optimizer `{settings.optimizer}`. Known: {', '.join(OPTIMIZERS)}.")
    if not settings.lr > 0:
        raise UsageError(f"--lr is {settings.lr}; it must be positive.")
    if not 0 <= settings.validation < 1:
        raise UsageError(f"--validation is {settings.validation}; it is the share of the sequences kept for validation, such as 0.2.")
    choices = {"layout": ("model", "time", "batch"), "loss_at": ("all", "last"), "every": ("sequence", "chunk", "step")}
    for name, allowed in choices.items():
        if getattr(settings, name) not in allowed:
            raise UsageError(f"`{name}` is {getattr(settings, name)!r}; it must be one of {', '.join(allowed)}.")
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
        raise InputError(f"`{path}` has settings that are not known: {', '.join(unknown)}. Known: {', '.join(fields)}.")
    for name, value in found.items():
        kinds = {"str": str, "int": int, "float": (int, float)}
        allowed = [kinds[kind] for kind in fields[name].split(" | ") if kind in kinds]
        if isinstance(value, bool) or not any(isinstance(value, kind) for kind in allowed):
            raise InputError(f"`{name}` in `{path}` is {value!r}; it must be of type {fields[name].removesuffix(' | None')}.")
    for name in set(_PATHS) & set(found):
        found[name] = str(path.parent / found[name])
    if ":" in found.get("loss", ""):
        found["loss"] = str(path.parent / found["loss"])
    return found


# -- the run ------------------------------------------------------------------------------------------------------


def _make_learner(net: Any, settings: Settings) -> OnlineLearner:
    if ":" in settings.loss:
        loss = load_object(settings.loss)
    elif settings.loss in LOSSES:
        loss = LOSSES[settings.loss]
    else:
        raise InputError(f"There is no loss `{settings.loss}`. Known: {', '.join(LOSSES)}; or name one of your own: path/to/file.py:name.")
    options = {"optimizer": OPTIMIZERS[settings.optimizer](settings.lr), "clip_norm": settings.clip_norm, "seed": settings.seed}
    rule = make_rule(settings.rule)
    if settings.resume:
        return OnlineLearner.load(settings.resume, net, rule, loss, chunk=settings.chunk, **options)
    return OnlineLearner(net, rule, loss, chunk=settings.chunk, **options)


def _load_sequences(model: torch.nn.Module, batch_first: bool, settings: Settings) -> Sequences:
    columns = [name.strip() for name in settings.target_columns.split(",") if name.strip()]
    xs, targets, stream = read_arrays(settings.data, settings.targets, columns)
    by_batch = batch_first if settings.layout == "model" else settings.layout == "batch"
    return make_sequences(
        xs, targets, stream=stream, window=settings.window, batch_first=by_batch, loss_at=settings.loss_at, loss=settings.loss, model=model
    )


def _divide(count: int, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences to learn from and those kept for validation."""
    kept = round(count * settings.validation)
    if settings.validation and not 0 < kept < count:
        raise UsageError(
            f"--validation {settings.validation} of {count} sequences leaves {count - kept} to learn from and {kept} to validate."
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(settings.seed))
    return order[kept:], order[:kept]


def _validate(learner: OnlineLearner, sequences: Sequences, kept: torch.Tensor, batch_first: bool, settings: Settings) -> dict[str, float]:
    """Mean loss of the sequences that were kept; for classes also the share that is right at the last step."""
    loss, right, counted = 0.0, 0, 0
    for index in kept.split(settings.batch):
        batch = sequences.pick(index, batch_first)
        loss += learner.evaluate([batch]) * len(index)
        if settings.loss in CLASS_LOSSES:
            outputs = learner.predict(batch[0])
            if isinstance(outputs, torch.Tensor) and outputs.dim() == 3:
                last = outputs[:, -1] if batch_first else outputs[-1]
                right += int((last.argmax(1) == sequences.targets[-1, index]).sum())
                counted += len(index)
    found = {"validation_loss": loss / len(kept)}
    return found | {"validation_accuracy": right / counted} if counted else found


def _render(result: dict[str, Any], steps: int) -> str:
    """The run for people: a line an epoch, and where the files are."""
    shown = [name for name in ("loss", "validation_loss", "validation_accuracy") if name in result["epochs"][-1]]
    rows = [(str(r["epoch"]), *(f"{r[name]:.6g}" for name in shown), f"{r['seconds']:.2f} s") for r in result["epochs"]]
    lines = [
        f"{result['rule']} on {result['sequences']} sequences of {steps} steps, {result['validation_sequences']} more for validation",
        "",
        *(line.rstrip() for line in table(("epoch", *(name.replace("_", " ") for name in shown), "time"), rows)),
        "",
        *([f"Stopped: {result['stopped']}."] if result["stopped"] else []),
        f"Checkpoint: {result['checkpoint']}",
        *([f"Torch state dict: {result['state_dict']}"] if result["state_dict"] else []),
    ]
    return "\n".join(lines)
