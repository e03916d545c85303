"""Sequences from .npy, .npz and .csv files, time-major: what `train` learns from."""

from __future__ import annotations

import contextlib
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import brainstate
import jax
import numpy as np
import torch
from torch import nn

from etrace_bridge._errors import BridgeError, InputError
from etrace_bridge.cli.arguments import existing_file
from etrace_bridge.frontend import BridgedModule
from etrace_bridge.learning.masks import (
    blank_masked,
    check_mask,
    combine_masks,
    last_of,
    length_mask,
)

CLASS_LOSSES = ("cross_entropy", "nll")
_INPUTS, _TARGETS = ("xs", "x", "inputs"), ("targets", "target", "ys", "y", "labels")


@dataclass(frozen=True)
class Sequences:
    """N sequences of T steps.

    Attributes:
        xs: inputs `(T, N, …)`.
        targets: targets `(T, N, …)`.
        mask: weights of the steps, (T,), or of the steps of each sequence, (T, N); None for all
            alike.
    """

    xs: torch.Tensor
    targets: torch.Tensor
    mask: torch.Tensor | None

    def __len__(self) -> int:
        return self.xs.shape[1]

    def pick(self, index: torch.Tensor, batch_first: bool) -> tuple:
        """Return some sequences as a batch `(xs, targets[, mask])`, laid out as the model takes
        them.
        """
        parts = [self.xs, self.targets]
        if self.mask is not None and self.mask.dim() == 2:
            parts.append(self.mask)
        parts = [part[:, index] for part in parts]
        if batch_first:
            parts = [part.transpose(0, 1).contiguous() for part in parts]
        if self.mask is not None and self.mask.dim() == 1:
            parts.append(self.mask)
        return tuple(parts)

    def counted(self, index: torch.Tensor) -> float:
        """How much some sequences count in a mean over all: each alike, or as their masks say."""
        if self.mask is None or self.mask.dim() == 1:
            return len(index)
        return float(self.mask[:, index].sum())


def read_arrays(
    data: str, targets: str | None, target_columns: list[str]
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return inputs and targets as stored in the files, and whether they are one long sequence
    without a batch axis.

    Args:
        data: a `.npz` with inputs and targets, a `.npy` with inputs, or a `.csv` with one row a
            time step.
        targets: a `.npy` with targets, for inputs in a `.npy`.
        target_columns: columns of a `.csv` that are targets; the last one if empty.
    """
    path = existing_file(data)
    if path.suffix == ".csv":
        if targets is not None:
            raise InputError(
                "A `.csv` holds inputs and targets; name the targets' columns with "
                "`target_columns` and leave `targets` out."
            )
        return *_read_csv(path, target_columns), True
    if target_columns:
        raise InputError(
            f"`target_columns` names columns of a `.csv`, but the data are in {path.name!r}."
        )
    if path.suffix == ".npz":
        if targets is not None:
            raise InputError(
                f"{path.name!r} holds inputs and targets, so `targets` is one file too many."
            )
        with _reading(path) as file, np.load(file, allow_pickle=False) as held:
            return _array_of(held, _INPUTS, path), _array_of(held, _TARGETS, path), False
    if path.suffix != ".npy":
        raise InputError(
            f"{path.name!r} ends in {path.suffix!r}; data are read from .npy, .npz and .csv files."
        )
    if targets is None:
        raise InputError(
            f"{path.name!r} holds the inputs. Name the targets' file as well: `--targets "
            "targets.npy`."
        )
    return _read_npy(path), _read_npy(existing_file(targets)), False


def _read_npy(path: Path) -> np.ndarray:
    with _reading(path) as file:
        return np.load(file, allow_pickle=False)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[BinaryIO]:
    """Open a file; NumPy's errors become one that names it, since some of them advise to unpickle
    it.
    """
    try:
        with path.open("rb") as file:
            yield file
    except BridgeError:
        raise
    except Exception as error:  # of NumPy, zipfile, zlib or the system
        raise InputError(
            f"{path.name!r} cannot be read: it is damaged, holds Python objects, or was not "
            f"written by NumPy's `save` or `savez` ({type(error).__name__})."
        ) from error


def read_inputs(data: str, target_columns: list[str]) -> tuple[np.ndarray, bool]:
    """Return the inputs alone, and whether they are one long sequence.

    They come from a `.npz`, a `.npy`, or the columns of a `.csv` that are not targets.
    """
    path = existing_file(data)
    if path.suffix == ".npy":
        return _read_npy(path), False
    if path.suffix == ".npz":
        with _reading(path) as file, np.load(file, allow_pickle=False) as held:
            return _array_of(held, _INPUTS, path), False
    xs, _, stream = read_arrays(data, None, target_columns)
    return xs, stream


def read_mask(data: str, steps: int, count: int, batch_first: bool) -> np.ndarray | None:
    """Which steps count, time-major, from the arrays `mask` and `lengths` of a `.npz`.

    Args:
        data: the file that the inputs are from.
        steps: T.
        count: N, the number of sequences.
        batch_first: a mask of single sequences is `(N, T)`.
    """
    path = Path(data)
    if path.suffix != ".npz":
        return None
    with _reading(path) as file, np.load(file, allow_pickle=False) as held:
        mask, lengths = held.get("mask"), held.get("lengths")
    for name, array in (("mask", mask), ("lengths", lengths)):
        if array is not None and (array.dtype.kind not in "fiub" or not np.isfinite(array).all()):
            raise InputError(f"`{name}` in {path.name!r} must be finite numbers.")
    if mask is not None:
        mask = mask.T if batch_first and mask.ndim == 2 else mask
        check_mask(mask, steps, count)
    if lengths is not None:
        if lengths.dtype.kind not in "iu" or lengths.shape != (count,) or lengths.min() < 0:
            raise InputError(
                f"`lengths` in {path.name!r} is {lengths.dtype} of shape {lengths.shape}; it must "
                f"be the number of steps of each sequence: {count} whole numbers, none negative."
            )
        mask = combine_masks([mask, length_mask(torch.as_tensor(lengths), steps)])
    if mask is not None and not np.any(mask):
        raise InputError(f"The mask in {path.name!r} leaves no step of these sequences.")
    return mask


def make_sequences(
    xs: np.ndarray,
    targets: np.ndarray,
    *,
    stream: bool,
    window: int | None,
    batch_first: bool,
    loss_at: str,
    loss: str,
    model: nn.Module | brainstate.nn.Module,
    mask: np.ndarray | None = None,
) -> Sequences:
    """Arrange arrays as sequences for a model.

    Args:
        xs: inputs: `(T, N, …)`, `(N, T, …)` if `batch_first`, or `(T, …)` if `stream`.
        targets: one per step, laid out as the inputs, or one per sequence, `(N, …)`.
        stream: the arrays are one long sequence.
        window: cuts a long sequence into sequences of so many steps; what is left at the end is not
            used.
        batch_first: where the batch axis of the arrays is.
        loss_at: `"all"` steps count, or only the `"last"` that the mask leaves.
        loss: the loss's name; classes are whole numbers.
        model: the model, for the type of its numbers; whole numbers stay whole only for one that
            begins with an embedding.
        mask: which steps count, time-major; what the targets are elsewhere does not matter.
    """
    if stream:
        xs, targets = _cut(xs, window), _cut(targets, window)
        if loss in CLASS_LOSSES and targets.shape[2:] == (1,):
            targets = targets[..., 0]
    elif window is not None:
        raise InputError(
            "`window` cuts one long sequence, such as a `.csv`, into pieces; these data have "
            "sequences already."
        )
    elif xs.ndim < 2:
        raise InputError(
            f"The inputs have shape {xs.shape}; they need a time and a batch axis: (T, N, …), or "
            "(N, T, …) for batch_first."
        )
    elif batch_first:
        xs = np.swapaxes(xs, 0, 1)
        targets = (
            np.swapaxes(targets, 0, 1)
            if targets.ndim > 1 and targets.shape[:2] == (xs.shape[1], xs.shape[0])
            else targets
        )
    if targets.shape[:2] != xs.shape[:2]:
        if targets.shape[:1] != (xs.shape[1],):
            layout = "(N, T, …)" if batch_first else "(T, N, …)"
            raise InputError(
                f"The inputs are {xs.shape[0]} steps of {xs.shape[1]} sequences, but the targets "
                f"have shape {targets.shape}. There must be one target per step, {layout} as the "
                "inputs, or one per sequence, (N, …). Is the layout of the inputs right? See "
                "`layout`."
            )
        # one per sequence: the same at every step
        targets = np.broadcast_to(targets, (xs.shape[0], *targets.shape))
    if mask is not None and mask.ndim == 2:
        targets = blank_masked(targets, mask)
    for name, array in (("inputs", xs), ("targets", targets)):
        if array.dtype.kind not in "fiub":
            raise InputError(f"The {name} are of type {array.dtype}; they must be numbers.")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise InputError(
                f"The {name} have {int((~np.isfinite(array)).sum())} values that are NaN or "
                "infinite. Clean the data first."
            )
    floating, embeds = number_types(model)
    whole = xs.dtype.kind in "iu" and embeds
    if loss_at == "last":
        mask = last_of(mask, xs.shape[0])
    return Sequences(
        torch.tensor(np.ascontiguousarray(xs), dtype=torch.int64 if whole else floating),
        torch.tensor(
            np.ascontiguousarray(targets), dtype=torch.int64 if loss in CLASS_LOSSES else floating
        ),
        None if mask is None else torch.tensor(np.ascontiguousarray(mask), dtype=torch.float32),
    )


def number_types(model: nn.Module | brainstate.nn.Module) -> tuple[torch.dtype, bool]:
    """Return the dtype of a model's floating-point numbers, and whether its first layer looks up
    integers.
    """
    if isinstance(model, BridgedModule):
        model = model.model
    if isinstance(model, nn.Module):
        floating = (p.dtype for p in model.parameters() if p.is_floating_point())
        first = next((m for m in model.modules() if not list(m.children())), None)
        return next(floating, torch.float32), isinstance(first, nn.Embedding)
    # A brainstate module's numbers are of JAX's default type.
    embeds = any(isinstance(node, brainstate.nn.Embedding) for node in model.nodes().values())
    return torch.float64 if jax.config.jax_enable_x64 else torch.float32, embeds


def _array_of(held: np.lib.npyio.NpzFile, names: tuple[str, ...], path: Path) -> np.ndarray:
    for name in names:
        if name in held:
            return held[name]
    raise InputError(
        f"{path.name!r} has no array named {', '.join(names[:-1])} or {names[-1]}; it has "
        f"{', '.join(held) or 'none'}."
    )


def _read_csv(path: Path, target_columns: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of a table with a header and one row per time step: (T, columns)
    each.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row]
    if len(rows) < 2:
        raise InputError(f"{path.name!r} needs a header and at least one row.")
    header = [name.strip() for name in rows[0]]
    wanted = target_columns or header[-1:]
    missing = [name for name in wanted if name not in header]
    if missing:
        raise InputError(
            f"{path.name!r} has no column {', '.join(missing)}. It has {', '.join(header)}."
        )
    try:
        values = np.array([[float(cell) for cell in row] for row in rows[1:]], dtype=np.float64)
    except ValueError as error:
        raise InputError(f"{path.name!r} cannot be read as a table of numbers: {error}.") from error
    places = [header.index(name) for name in wanted]
    rest = [n for n in range(len(header)) if n not in places]
    if values.ndim != 2 or values.shape[1] != len(header):
        raise InputError(
            f"{path.name!r} has rows with other than the header's {len(header)} cells."
        )
    if not rest:
        raise InputError(f"All columns of {path.name!r} are targets; there is no input left.")
    return values[:, rest], values[:, places]


def _cut(sequence: np.ndarray, window: int | None) -> np.ndarray:
    """Return one sequence (T, …) as (window, N, …)."""
    steps = window or len(sequence)
    if steps > len(sequence):
        raise InputError(f"`window` is {steps}, but there are only {len(sequence)} time steps.")
    count = len(sequence) // steps
    return np.swapaxes(sequence[: count * steps].reshape(count, steps, *sequence.shape[1:]), 0, 1)
