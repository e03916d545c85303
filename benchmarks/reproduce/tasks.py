"""What a task of the reproduction is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from benchmarks.reproduce.training import Loss, Method
from etrace_bridge.rules import make_rule, rule_names

T = TypeVar("T")

# Rules that the tasks on a stream leave out: a gradient there is the derivative of what was
# predicted, whatever loss is made of it.
NEED_LOSS = {n: "needs the loss itself" for n in rule_names() if make_rule(n).needs_loss}


@dataclass(frozen=True)
class Size:
    """How large a run is.

    Attributes:
        small: a miniature that takes seconds, to see that the task runs and learns something.
        scale: the share of the full training to run.
    """

    small: bool = False
    scale: float = 1.0

    def pick(self, full: T, small: T) -> T:
        """Choose a number by size."""
        return small if self.small else full

    def steps(self, full: int, small: int) -> int:
        """The length of training: the miniature's, or a share of the full one."""
        return small if self.small else max(round(full * self.scale), 1)


@dataclass(frozen=True)
class Piece:
    """A trained model, and a part of its task on which gradients are compared.

    Attributes:
        model: maps the sequence `xs` to outputs, from states of zero.
        xs: inputs, (steps, batch, …).
        ys: targets, (steps, batch, …).
        weights: (steps,) factors of the losses.
        loss: `(outputs, targets) -> (batch,)` of one step.
    """

    model: torch.nn.Module
    xs: np.ndarray
    ys: np.ndarray
    weights: np.ndarray
    loss: Loss


@dataclass(frozen=True)
class Outcome:
    """What one run gave.

    Attributes:
        score: the task's measure at the end.
        curve: the course of training, of any length.
        steps: how long training was, in the task's unit.
        seconds: processor time of training, without compiling.
        piece: the model at the end, and a part of the task.
    """

    score: float
    curve: np.ndarray
    steps: int
    seconds: float
    piece: Piece


@dataclass(frozen=True)
class Task:
    """One published experiment.

    Attributes:
        key: its letter.
        title: what it is about.
        measure: what the score is.
        curve: what its picture shows.
        lower_is_better: whether a small score is a good one.
        steps: the length of training by setting, in `unit`; each setting is a column of the table.
        unit: what `steps` counts.
        source: where the published numbers are from.
        published: the published score of each setting by method; None where there is none.
        setup: the set-up in words, and how it differs from the published one.
        run: `(setting, method, seed, size) -> Outcome`.
        notes: what the results show or leave open, printed below the table.
        extra: methods of this task alone, by name.
        without: methods that this task leaves out, and why.
    """

    key: str
    title: str
    measure: str
    curve: str
    lower_is_better: bool
    steps: Mapping[str, int]
    unit: str
    source: str
    published: Mapping[str, tuple[float | None, ...] | None]
    setup: str
    run: Callable[[str, Method, int, Size], Outcome]
    notes: str = ""
    extra: Mapping[str, Method] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> tuple[str, ...]:
        """Variants of the task."""
        return tuple(self.steps)
