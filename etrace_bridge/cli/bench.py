"""`bench`: time and memory of each rule's gradients of a sequence, compared with torch BPTT, on
this machine.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch import nn

from etrace_bridge._tables import text_table
from etrace_bridge.check.text import seconds, size
from etrace_bridge.cli.arguments import OK, UsageError, as_chunk, at_least_one, split_names
from etrace_bridge.cli.model import (
    LOSSES,
    in_layout,
    load_model,
    load_state,
    make_inputs,
    make_loss_and_targets,
    parse_shape,
)
from etrace_bridge.frontend import TorchRun, run_torch, to_jax, wrap
from etrace_bridge.learning.footprint import compile_gradients
from etrace_bridge.learning.learner import OnlineLearner
from etrace_bridge.rules import make_rule


class BenchGRU(nn.Module):
    """The model that is measured if none is named: a torch GRU with a readout."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.gru, self.readout = nn.GRU(inputs, hidden), nn.Linear(hidden, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.readout(self.gru(x)[0])


def run_bench(args: argparse.Namespace) -> int:
    """Run `bench`."""
    if args.model and not args.input:
        raise UsageError(
            "--input is missing: the shape of one time step of your model, batch first, such as "
            "8,32."
        )
    shape = parse_shape(args.input or "16,32")
    if not args.model and len(shape) != 2:
        raise UsageError(
            f"--input {args.input} is not of the form batch,features, which the GRU takes."
        )
    steps, repeats = at_least_one(args.steps, "--steps"), at_least_one(args.repeats, "--repeats")
    rules = [make_rule(name) for name in split_names(args.rule) or ["d_rtrl", "pp_prop"]]
    torch.manual_seed(args.seed)
    model = (
        load_model(args.model, args.seed)
        if args.model
        else BenchGRU(shape[1], at_least_one(args.hidden, "--hidden"))
    )
    state, chunk = load_state(args.state), as_chunk(args.chunk)
    batch_first = wrap(model, state).batch_first
    xs = in_layout(make_inputs(model, shape, steps, args.classes, args.seed), batch_first)
    loss, targets = make_loss_and_targets(
        model, xs, args.loss, batch_first, args.seed, {"state": state}
    )
    learners = [OnlineLearner(wrap(model, state), rule, loss, chunk=chunk) for rule in rules]
    calls = [
        TorchCall(model, xs, targets, loss, state, batch_first),
        *(RuleCall(learner, xs, targets) for learner in learners),
    ]
    rows = [call.first() for call in calls]
    for _ in range(repeats):  # in turn, so that other work on the machine meets all of them
        for row, call in zip(rows, calls, strict=True):
            row["seconds"] = min(row.get("seconds", math.inf), call.run())
    reference = rows[0]
    for row in rows:
        row["time_ratio"], row["memory_ratio"] = (
            row["seconds"] / reference["seconds"],
            row["memory"] / reference["memory"],
        )
    result = {
        "model": args.model or f"GRU({shape[1]}, {args.hidden}) + Linear", "input": list(shape), "steps": steps, "repeats": repeats,
        "machine": {"system": platform.system(), "processor": platform.machine(), "device": jax.devices()[0].platform},
        "versions": {"torch": torch.__version__, "jax": jax.__version__},
        "rows": rows,
    }  # fmt: skip
    print(json.dumps(result, indent=2) if args.json else _render(result))
    return OK


class RuleCall:
    """`gradients` of a learner: takes tensors, and leaves gradients on the device."""

    def __init__(self, learner: OnlineLearner, xs: torch.Tensor, targets: torch.Tensor) -> None:
        self.learner, self.xs, self.targets = learner, xs, targets

    def run(self) -> float:
        """Return the seconds of one call."""
        begin = time.perf_counter()
        jax.block_until_ready(self.learner.gradients(self.xs, self.targets).raw_grads)
        return time.perf_counter() - begin

    def first(self) -> dict[str, Any]:
        """Make the first call, which compiles, and return the memory of the compiled program:
        weights, gradients, trace and buffers.
        """
        taken, runtime = self.run(), self.learner.runtime
        xs, targets = (
            t.transpose(0, 1) if runtime.batch_first and t.dim() > 1 else t
            for t in (self.xs, self.targets)
        )
        steps = runtime.sequences.plan(len(xs)).steps
        compiled = runtime.store.compiled
        loss = runtime.losses.find(compiled, targets[0])
        program = compile_gradients(
            compiled, self.learner.rule, loss, [to_jax(xs)], to_jax(targets), steps
        )
        return {
            "name": self.learner.rule.name,
            "chunk": steps,
            "first_seconds": taken,
            "memory": program.memory,
        }


class TorchCall:
    """The same in torch: forward and backward."""

    def __init__(
        self,
        model: nn.Module,
        xs: torch.Tensor,
        targets: torch.Tensor,
        loss: Callable,
        state: Any,
        batch_first: bool,
    ) -> None:
        self.model, self.xs, self.loss, self.state = model, xs, loss, state
        self.targets = targets.transpose(0, 1) if batch_first and targets.dim() > 1 else targets

    def run(self) -> float:
        """Return the seconds of one forward and backward pass."""
        found = run_torch(self.model, self.xs, state=self.state)
        begin = time.perf_counter()
        _mean_loss(found, self.targets, self.loss).backward()
        taken = found.seconds + time.perf_counter() - begin
        self.model.zero_grad(set_to_none=True)
        return taken

    def first(self) -> dict[str, Any]:
        """Make the first call, and return the bytes that torch stores between forward and backward,
        with weights and gradients.
        """
        parameters = list(self.model.parameters())
        own = {t.untyped_storage().data_ptr() for t in (self.xs, *parameters)}
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            taken = self.run()
        weights = sum(p.numel() * p.element_size() for p in parameters)
        return {
            "name": "torch BPTT",
            "chunk": None,
            "first_seconds": taken,
            "memory": sum(kept.values()) + 2 * weights,
        }


def _mean_loss(run: TorchRun, targets: torch.Tensor, loss: Callable) -> torch.Tensor:
    """Return the mean over steps; in one call, as a torch user would, where the loss is a mean over
    the batch anyway.
    """
    if loss in LOSSES.values() and all(isinstance(output, torch.Tensor) for output in run.outputs):
        return loss(torch.stack(run.outputs).flatten(0, 1), targets.flatten(0, 1))
    return torch.stack(
        [loss(output, target) for output, target in zip(run.outputs, targets, strict=True)]
    ).mean()


def _render(result: dict[str, Any]) -> str:
    rows = [
        (
            row["name"], "-" if row["chunk"] is None else str(row["chunk"]), seconds(row["seconds"]), f"{row['time_ratio']:.2f} x",
            size(row["memory"]), f"{row['memory_ratio']:.2f} x", seconds(row["first_seconds"]),
        )
        for row in result["rows"]
    ]  # fmt: skip
    shape = " x ".join(map(str, result["input"]))
    return "\n".join([
        f"{result['model']}: gradients of {result['steps']} steps of {shape}, least of "
        f"{result['repeats']} times",
        "",
        *(line.rstrip() for line in text_table(("rule", "chunk", "time", "of torch", "memory", "of torch", "first call, compiling"), rows)),
        "",
        "memory: weights, gradients and what is kept for them, inputs aside; for torch, tensors "
        "saved for the backward pass.",
    ])  # fmt: skip
