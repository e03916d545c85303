"""`evaluate` and `predict`: a checkpoint on the data of a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

import brainstate
import jax
import numpy as np
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.cli.arguments import OK, UsageError, at_least_one
from etrace_bridge.cli.data import (
    CLASS_LOSSES,
    Sequences,
    make_sequences,
    read_arrays,
    read_inputs,
    read_mask,
)
from etrace_bridge.cli.model import load_loss, load_net, load_object
from etrace_bridge.cli.processes import Part
from etrace_bridge.frontend import to_torch
from etrace_bridge.learning.filling import size_to_fill
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.learning.metrics import Metric, evaluate_with, named_metrics

DEFAULTS: dict[str, Any] = {
    "data": "", "targets": None, "target_columns": "", "window": None, "layout": "model", "loss_at": "all", "loss": "mse", "metric": "",
    "batch": 32, "state": None, "output": "predictions.npy",
}  # fmt: skip


def run_evaluate(args: argparse.Namespace) -> int:
    """Run `evaluate`."""
    settings = _with_defaults(args)
    net = load_net(settings.model, settings.state)
    sequences = load_sequences(net, settings)
    learner = OnlineLearner.load(settings.checkpoint, net, loss=load_loss(settings.loss))
    metrics = load_metrics(settings.metric, settings.loss)
    found = evaluate_sequences(
        learner, sequences, torch.arange(len(sequences)), settings.batch, metrics, Part()
    )
    text = f"{len(sequences)} sequences of {sequences.xs.shape[0]} steps: " + ", ".join(
        f"{name} {x:.6g}" for name, x in found.items()
    )
    print(json.dumps({"sequences": len(sequences), **found}, indent=2) if args.json else text)
    return OK


def run_predict(args: argparse.Namespace) -> int:
    """Run `predict`."""
    settings = _with_defaults(args)
    net = load_net(settings.model, settings.state)
    learner = OnlineLearner.load(settings.checkpoint, net)
    batch_first = learner.runtime.batch_first
    xs, stream = read_inputs(settings.data, _columns(settings))
    by_batch = batch_first if settings.layout == "model" else settings.layout == "batch"
    nothing = np.zeros(xs.shape[:1] if stream else xs.shape[:2])
    sequences = make_sequences(
        xs,
        nothing,
        stream=stream,
        window=settings.window,
        batch_first=by_batch,
        loss_at="all",
        loss="mse",
        model=net,
    )
    parts = []
    for index in torch.arange(len(sequences)).split(settings.batch):
        with learner.runtime.filling.up_to(size_to_fill(len(sequences), settings.batch)):
            outputs = learner.predict(sequences.pick(index, batch_first)[0])
        if isinstance(outputs, jax.Array):  # of a brainstate module
            outputs = to_torch(outputs)
        if not isinstance(outputs, torch.Tensor):
            raise InputError(
                f"The model gives a {type(outputs).__name__}; `predict` writes one tensor. Use "
                "`OnlineLearner.predict` in Python."
            )
        parts.append(outputs.transpose(0, 1) if batch_first else outputs)
    found = torch.cat(parts, 1)
    found = found.transpose(0, 1) if by_batch and not stream else found
    np.save(settings.output, found.numpy())
    written = settings.output if settings.output.endswith(".npy") else f"{settings.output}.npy"
    print(
        json.dumps({"output": written, "shape": list(found.shape)})
        if args.json
        else f"{written}: {tuple(found.shape)}"
    )
    return OK


def _with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    settings = argparse.Namespace(**(DEFAULTS | vars(args)))
    if not settings.data:
        raise UsageError("--data FILE is missing.")
    at_least_one(settings.batch, "--batch")
    return settings


def _columns(settings: Any) -> list[str]:
    return [name.strip() for name in settings.target_columns.split(",") if name.strip()]


def load_sequences(net: brainstate.nn.Module, settings: Any) -> Sequences:
    """Return the data that the settings name, for a model."""
    xs, targets, stream = read_arrays(settings.data, settings.targets, _columns(settings))
    by_batch = (
        getattr(net, "batch_first", False)
        if settings.layout == "model"
        else settings.layout == "batch"
    )
    time, batch = (1, 0) if by_batch else (0, 1)
    mask = (
        read_mask(settings.data, xs.shape[time], xs.shape[batch], by_batch) if xs.ndim > 1 else None
    )
    return make_sequences(
        xs,
        targets,
        stream=stream,
        window=settings.window,
        batch_first=by_batch,
        loss_at=settings.loss_at,
        loss=settings.loss,
        model=net,
        mask=mask,
    )


def load_metrics(names: str, loss: str) -> dict[str, Metric]:
    """Return metrics by name or from `path/to/file.py:name`; the accuracy for losses of classes."""
    given = [name.strip() for name in names.split(",") if name.strip()] or (
        ["accuracy"] if loss in CLASS_LOSSES else []
    )
    return named_metrics([load_object(name) if ":" in name else name for name in given])


def evaluate_sequences(
    learner: OnlineLearner,
    sequences: Sequences,
    index: torch.Tensor,
    batch: int,
    metrics: Mapping[str, Metric],
    part: Part,
) -> dict[str, float]:
    """Return mean loss and metrics over some sequences, weighted as their masks say.

    `part` is this process's share of each batch.
    """
    totals: dict[str, float] = {}
    counted = sequences.counted(index)
    if not counted:
        raise InputError(f"The mask leaves no step of the {len(index)} sequences to evaluate.")
    with learner.runtime.filling.up_to(size_to_fill(len(index), batch)):
        for some in index.split(batch):
            if not sequences.counted(some):
                continue
            found = evaluate_with(
                learner, [sequences.pick(part.own(some), learner.runtime.batch_first)], metrics
            )
            share = sequences.counted(some) / counted
            for name, value in found.items():
                totals[name] = totals.get(name, 0.0) + value * share
    return totals
