"""`train`: a model from a Python file, data from a file, settings from flags or a TOML file; writes
a checkpoint.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etrace_bridge._errors import CheckpointError
from etrace_bridge.cli.arguments import (
    INTERRUPTED,
    NOT_OK,
    OK,
    UsageError,
)
from etrace_bridge.cli.data import Sequences
from etrace_bridge.cli.model import load_loss, load_net
from etrace_bridge.cli.processes import Part, is_worker, join_processes, run_processes
from etrace_bridge.cli.train_settings import OPTIMIZERS, Settings, read_settings
from etrace_bridge.cli.trained import evaluate_sequences, load_metrics, load_sequences
from etrace_bridge.frontend import BridgedModule
from etrace_bridge.learning.autosave import Checkpoints
from etrace_bridge.learning.checkpoint_files import check_writable, weights_file
from etrace_bridge.learning.fidelity import FidelityMeter
from etrace_bridge.learning.filling import size_to_fill
from etrace_bridge.learning.history import History
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.rules import make_rule


def run_train(args: argparse.Namespace) -> int:
    """Run `train`, in this process or in several."""
    settings = read_settings(args)
    check_writable(weights_file(settings.output))
    if settings.state_dict:
        check_writable(Path(settings.state_dict))
    if settings.processes > 1 and not is_worker():
        return run_processes(settings.processes, args.given)
    part = join_processes() if is_worker() else Part()
    net = load_net(settings.model, settings.state, settings.seed)
    if settings.state_dict and not isinstance(net, BridgedModule):
        raise UsageError(
            "--state-dict is for torch modules; the weights of a brainstate module are in the "
            "checkpoint, a safetensors file."
        )
    metrics = load_metrics(settings.metric, settings.loss)
    learner = _make_learner(net, settings, part)
    sequences = load_sequences(net, settings)
    learned, kept = (part.whole(index) for index in _divide(len(sequences), settings))
    part.check_batch(settings.batch)

    batches = _Batches(learner, sequences, learned, settings, part)

    def validate(held: OnlineLearner) -> dict[str, float]:
        found = evaluate_sequences(held, sequences, kept, settings.batch, metrics, part)
        return {f"validation_{name}": value for name, value in found.items()}

    meter = FidelityMeter()
    try:
        history = learner.fit(
            batches, settings.epochs, callbacks=[meter] if settings.fidelity else (), validation=validate if len(kept) else None, metrics=metrics, early_stopping=settings.patience,
            every=settings.every, max_batches=-(-len(learned) // settings.batch), progress=not args.json,
            checkpoint=Checkpoints(settings.output, settings.save_minutes, settings.save_updates), resume=_is_interrupted(learner),
        )  # fmt: skip
        checkpoint = part.checkpoint(settings.output)
    except CheckpointError as error:
        if part.mesh is not None:  # saving elsewhere would take all processes
            raise
        history, checkpoint = learner.history or History(), _save_elsewhere(learner, error)
    except (KeyboardInterrupt, SystemExit) as stop:
        return _end_interrupted(stop, args, part.checkpoint(settings.output), part.index == 0)
    if settings.state_dict and part.index == 0:
        learner.sync_to_torch()
        torch.save(net.model.state_dict(), settings.state_dict)
    result = {
        "rule": learner.rule.name, "sequences": len(learned), "validation_sequences": len(kept), "steps": learner.steps,
        "updates": learner.updates, "stopped": history.stopped, "epochs": history.epochs, "checkpoint": str(checkpoint),
        "state_dict": settings.state_dict,
    }  # fmt: skip
    print(json.dumps(result, indent=2) if args.json else _render(result, sequences.xs.shape[0]))
    if settings.fidelity and not args.json:
        print(f"\n{meter.report()}")
    return OK if checkpoint == part.checkpoint(settings.output) else NOT_OK


@dataclass(frozen=True)
class _Batches:
    """The batches of an epoch, in the epoch's own order."""

    learner: OnlineLearner
    sequences: Sequences
    learned: torch.Tensor
    settings: Settings
    part: Part

    @property
    def full_batch_size(self) -> int | None:
        """The size of all batches but the last, if the last is shorter."""
        return size_to_fill(len(self.learned), self.settings.batch)

    def __iter__(self) -> Iterator[tuple]:
        order = _order_of_epoch(self.learner, self.learned, self.settings.seed)
        for index in order.split(self.settings.batch):
            yield self.sequences.pick(self.part.own(index), self.learner.runtime.batch_first)


def _order_of_epoch(learner: OnlineLearner, learned: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the sequences in an order that depends on the seed and the epoch alone, so that a
    resumed run repeats it.
    """
    epoch = len(learner.history or ())
    return learned[
        torch.randperm(
            len(learned), generator=torch.Generator().manual_seed(1_000_003 * seed + epoch)
        )
    ]


def _is_interrupted(learner: OnlineLearner) -> bool:
    """Return whether the learner comes from a checkpoint in the middle of a run."""
    place = learner.place_in_fit
    return place is not None and (
        place.stage in ("batches", "callbacks")
        or (place.stage == "end" and learner.history is not None and bool(learner.history.stopped))
    )


def _save_elsewhere(learner: OnlineLearner, error: CheckpointError) -> Path:
    """Save the learner in a temporary folder, because it cannot be saved where it should be."""
    path = learner.save(Path(tempfile.mkdtemp(prefix="etrace-bridge-")) / "trained")
    print(f"error: {error}\nWhat was learned is in {path} instead.", file=sys.stderr)
    return path


def _end_interrupted(
    stop: BaseException, args: argparse.Namespace, checkpoint: Path, is_first: bool
) -> int:
    """Say how to go on, in the first process; return the exit status."""
    notes = getattr(stop, "__notes__", [])
    if any(note.startswith("Saved in ") for note in notes):
        given = [*args.given]
        if "--resume" in given:
            del given[given.index("--resume") : given.index("--resume") + 2]
        line = shlex.join(["python", "-m", "etrace_bridge", *given, "--resume", str(checkpoint)])
        text = f"Interrupted; everything is saved. Go on with\n  {line}"
    else:
        shown = [note for note in notes if not note.startswith("In `fit`")]
        text = "\n".join(["Interrupted; nothing new is saved.", *shown])
    if is_first:
        print(text, file=sys.stderr)
    return int(stop.code or 0) if isinstance(stop, SystemExit) else INTERRUPTED


# -- the run --------------------------------------------------------------------------------------


def _make_learner(net: Any, settings: Settings, part: Part) -> OnlineLearner:
    loss = load_loss(settings.loss)
    options = {
        "optimizer": OPTIMIZERS[settings.optimizer](settings.lr),
        "clip_norm": settings.clip_norm,
    }
    options["mesh"] = part.mesh
    options["cache_dir"] = settings.cache_dir
    rule = make_rule(settings.rule)
    if settings.resume:
        return OnlineLearner.load(settings.resume, net, rule, loss, chunk=settings.chunk, **options)
    return OnlineLearner(net, rule, loss, chunk=settings.chunk, **options)


def _divide(count: int, settings: Settings) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences to learn from and those for validation."""
    kept = round(count * settings.validation)
    if settings.validation and not 0 < kept < count:
        raise UsageError(
            f"--validation {settings.validation} of {count} sequences leaves {count - kept} to "
            f"learn from and {kept} to validate."
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(settings.seed))
    return order[kept:], order[:kept]


def _render(result: dict[str, Any], steps: int) -> str:
    """Show the run to people; its epochs have been shown before."""
    last = result["epochs"][-1]
    shown = [
        f"{name.replace('_', ' ')} {last[name]:.6g}"
        for name in last
        if name == "loss" or name.endswith(("_loss", "accuracy"))
    ]
    lines = [
        f"{result['rule']} on {result['sequences']} sequences of {steps} steps, "
        f"{result['validation_sequences']} more for validation",
        f"{last['epoch']} epochs, {result['updates']} updates; at the end {', '.join(shown)}",
        *([f"Stopped: {result['stopped']}."] if result["stopped"] else []),
        f"Checkpoint: {result['checkpoint']}",
        *([f"Torch state dict: {result['state_dict']}"] if result["state_dict"] else []),
    ]
    return "\n".join(lines)
