"""How far a call of `fit` has come, so that another process can continue it, bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch

from etrace_bridge._errors import CheckpointError
from etrace_bridge.learning.checkpoint_arrays import as_tensor, compare, like, raise_differences
from etrace_bridge.learning.checkpoint_packing import Tensors
from etrace_bridge.learning.placement import private_copy

if TYPE_CHECKING:
    from etrace_bridge.learning.store import Store

PREFIX = "fit "


@dataclass
class BestEpoch:
    """The best epoch so far, for early stopping.

    Attributes:
        value: its number, to be minimised.
        since: epochs since then.
        kept: weights and running statistics after it, by name; empty if they are not wanted.
    """

    value: float
    since: int = 0
    kept: dict[str, Any] = field(default_factory=dict)

    def keep(self, store: Store) -> None:
        """Store a copy of the learner's weights and running statistics."""
        self.kept = jax.tree.map(private_copy, model_arrays(store))

    def restore(self, store: Store) -> None:
        """Put the stored copy back into the learner."""
        compiled, state = store.compiled, store.state
        kept = store.placement.put(self.kept)
        theta = [kept[f"parameter {n}"] for n in compiled.weight_names]
        other = [
            kept.get(f"carried {n}", x)
            for n, x in zip(compiled.other_names, state.other, strict=True)
        ]
        store.state = state.replace(theta=theta, other=other)


def model_arrays(store: Store) -> dict[str, Any]:
    """Return weights and running statistics by name: what belongs to the model and not to a
    sequence.
    """
    compiled, state = store.compiled, store.state
    named = {f"parameter {n}": x for n, x in compiled.by_weight_name(state.theta).items()}
    others = zip(compiled.other_names, state.other, compiled.resets, strict=True)
    return named | {f"carried {n}": x for n, x, resets in others if not resets}


@dataclass
class PlaceInFit:
    """A position in a call of `fit`.

    Attributes:
        epoch: number of the epoch, from 1.
        batch: batches of it that are done.
        total: sum of their losses.
        sums: for each further number of the epoch its weighted sum, and the sum of the weights.
        stage: `"batches"` while there are batches or a validation to come, `"callbacks"` after the
            scheduler's step, `"end"` after the epoch, `"over"` if training has ended before the
            last epoch.
        best: the best epoch, if early stopping is on.
        scheduler: what the learning-rate scheduler holds.
        generators: states of the random generators before the epoch's first batch.
    """

    epoch: int = 0
    batch: int = 0
    total: float = 0.0
    sums: dict[str, list[float]] = field(default_factory=dict)
    stage: str = "end"
    best: BestEpoch | None = None
    scheduler: list[dict[str, Any]] | None = None
    generators: Tensors = field(default_factory=dict)

    def start_epoch(self, source: Any) -> None:
        """Move to the next epoch, before its first batch."""
        self.epoch += 1
        self.batch = 0
        self.total = 0.0
        self.sums = {}
        self.stage = "batches"
        self.generators = generator_states(source)

    def pack(self) -> tuple[Tensors, dict[str, Any]]:
        """Return arrays and facts for a checkpoint."""
        arrays = {f"{PREFIX}random {name}": state for name, state in self.generators.items()}
        if self.best is not None:
            arrays |= {f"{PREFIX}best {name}": as_tensor(x) for name, x in self.best.kept.items()}
        return arrays, {
            "epoch": self.epoch,
            "batch": self.batch,
            "total": self.total,
            "sums": self.sums,
            "stage": self.stage,
            "best": None
            if self.best is None
            else {"value": self.best.value, "since": self.best.since},
            "scheduler": self.scheduler,
        }

    @classmethod
    def unpack(cls, arrays: Tensors, facts: dict[str, Any], store: Store) -> PlaceInFit:
        """Return the position that `pack` has described; raise if it does not fit the learner."""
        saved = {name: t for name, t in arrays.items() if name.startswith(PREFIX)}
        kept = {name: saved.pop(name) for name in list(saved) if name.startswith(f"{PREFIX}best ")}
        place = cls(
            **{**facts, "best": None if facts["best"] is None else BestEpoch(**facts["best"])}
        )
        if kept:
            if place.best is None or not store.started:
                raise CheckpointError(
                    "The checkpoint has the weights of a best epoch, but there was none."
                )
            own = {f"{PREFIX}best {name}": x for name, x in model_arrays(store).items()}
            raise_differences(compare({name: as_tensor(x) for name, x in own.items()}, kept, ""))
            place.best.kept = {
                name.removeprefix(f"{PREFIX}best "): like(x, kept[name]) for name, x in own.items()
            }
        place.generators = {name.removeprefix(f"{PREFIX}random "): t for name, t in saved.items()}
        check_generator_states(place.generators)
        return place


# -- random generators ----------------------------------------------------------------------------


def generator_states(source: Any) -> Tensors:
    """Return the states of torch's, NumPy's and Python's global generators, and of a DataLoader's
    own.
    """
    _, keys, place, has_gauss, gauss = np.random.get_state()
    version, numbers, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*map(int, keys), int(place), int(has_gauss)]),
        "numpy gauss": torch.tensor(float(gauss), dtype=torch.float64),
        "python": torch.tensor([version, *numbers, int(next_gauss is not None)]),
        "python gauss": torch.tensor(next_gauss or 0.0, dtype=torch.float64),
    }
    own = getattr(source, "generator", None)
    return states | {"loader": own.get_state()} if isinstance(own, torch.Generator) else states


def set_generator_states(states: Tensors, source: Any) -> None:
    """Restore the states of the generators."""
    torch.set_rng_state(states["torch"])
    numbers = states["numpy"].tolist()
    np.random.set_state(
        (
            "MT19937",
            np.array(numbers[:-2], np.uint32),
            numbers[-2],
            numbers[-1],
            float(states["numpy gauss"]),
        )
    )
    version, *numbers, has_gauss = states["python"].tolist()
    random.setstate((version, tuple(numbers), float(states["python gauss"]) if has_gauss else None))
    own = getattr(source, "generator", None)
    if isinstance(own, torch.Generator) and "loader" in states:
        own.set_state(states["loader"])


def check_generator_states(states: Tensors) -> None:
    """Raise if these are not states that generators can have."""
    plain = generator_states(None)
    expected = {name: (t.dtype, t.shape) for name, t in plain.items()} | {
        "loader": (torch.uint8, plain["torch"].shape)
    }
    found = {"loader": expected["loader"]} | {
        name: (t.dtype, t.shape) for name, t in states.items()
    }
    fits = found == expected
    if fits:
        keys, python = states["numpy"], states["python"]
        fits = bool(((keys >= 0) & (keys < 2**32)).all() & (keys[-2] <= 624) & (keys[-1] <= 1))
        fits = fits and bool(
            ((python >= 0) & (python < 2**32)).all()
            & (python[0] == 3)
            & (python[-2] <= 624)
            & (python[-1] <= 1)
        )
    if not fits:
        raise CheckpointError("The checkpoint's states of random generators are damaged.")


# -- learning-rate schedulers ---------------------------------------------------------------------


def scheduler_state(scheduler: Any) -> list[dict[str, Any]] | None:
    """Return the numbers that a torch scheduler and its inner schedulers have changed, without
    their arguments.
    """
    if scheduler is None:
        return None
    return [
        {key: value for key, value in vars(one).items() if _is_numbers(value)}
        for one in _with_inner(scheduler)
    ]


def set_scheduler_state(scheduler: Any, state: list[dict[str, Any]] | None) -> None:
    """Restore the numbers of a torch scheduler."""
    inner = [] if scheduler is None else _with_inner(scheduler)
    if len(inner) != len(state or []):
        raise CheckpointError(
            f"The interrupted `fit` had {len(state or [])} learning-rate schedulers, this one has "
            f"{len(inner)}. Pass the same `scheduler`."
        )
    for one, numbers in zip(inner, state or [], strict=True):
        vars(one).update(numbers)
    # A scheduler that is made after `load` has changed the learning rates when it was made.
    for group, rate in (
        zip(inner[0].optimizer.param_groups, inner[0].get_last_lr(), strict=True) if inner else ()
    ):
        group["lr"] = rate


def _with_inner(scheduler: Any) -> list[Any]:
    return [
        scheduler,
        *(each for one in getattr(scheduler, "_schedulers", ()) for each in _with_inner(one)),
    ]


def _is_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_numbers, value))
    return value is None or isinstance(value, (bool, int, float, str))
