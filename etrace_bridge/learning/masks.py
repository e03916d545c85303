"""Which steps of which sequences count: masks, lengths, packed sequences, one target per sequence.

A mask of single sequences, m (T, B), becomes weights of the steps, `w_t`, the mean of `m_t` over
the batch; and factors of the batch elements within a step, `f_t = m_t / w_t`, whose mean is one.
The engine knows the weights; the factors travel with the targets to the loss (`element_loss`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from etrace_bridge._errors import InputError

LOSS_AT = (None, "last", "every", "model")


def length_mask(lengths: Any, steps: int | None = None, batch_first: bool = False) -> torch.Tensor:
    """Return a mask of padded sequences from their lengths.

    Args:
        lengths: (batch,) number of steps of each sequence.
        steps: number of steps of the padded batch; by default the longest sequence's.
        batch_first: whether the mask is `(batch, T)` rather than `(T, batch)`.

    Returns:
        Ones where a sequence has a step, zeros where it is padded.
    """
    lengths = torch.as_tensor(lengths).detach().cpu().reshape(-1)
    longest = int(lengths.max()) if len(lengths) else 0
    if steps is not None and longest > steps:
        raise InputError(f"`lengths` has {longest} steps, but the batch has only {steps}.")
    mask = torch.arange(longest if steps is None else steps)[:, None] < lengths
    return (mask.t() if batch_first else mask).float().contiguous()


def unpack_sequences(
    inputs: tuple, targets: Any, mask: Any, batch_first: bool
) -> tuple[tuple, Any, Any]:
    """Return inputs, targets and mask with packed sequences padded; their lengths become a mask."""
    if isinstance(targets, PackedSequence):
        targets, lengths = pad_packed_sequence(targets, batch_first)
        mask = _both(mask, length_mask(lengths, batch_first=batch_first), batch_first)
    padded = []
    for x in inputs:
        if isinstance(x, PackedSequence):
            x, lengths = pad_packed_sequence(x, batch_first)
            mask = _both(mask, length_mask(lengths, batch_first=batch_first), batch_first)
        padded.append(x)
    return tuple(padded), targets, mask


def pack_like(output: Any, inputs: tuple, batch_first: bool) -> Any:
    """Return an output as a packed sequence if one of the inputs was."""
    packed = next((x for x in inputs if isinstance(x, PackedSequence)), None)
    if packed is None or not isinstance(output, torch.Tensor):
        return output
    lengths = pad_packed_sequence(packed)[1]
    return pack_padded_sequence(output, lengths, batch_first, enforce_sorted=False)


def _both(mask: Any, lengths: torch.Tensor, batch_first: bool) -> torch.Tensor:
    """Return the mask of the lengths times the user's own weights."""
    if mask is None:
        return lengths
    given = (
        torch.as_tensor(np.asarray(mask) if not isinstance(mask, torch.Tensor) else mask)
        .detach()
        .cpu()
    )
    steps, batch = lengths.shape[::-1] if batch_first else lengths.shape
    check_mask(given.t() if batch_first and given.dim() == 2 else given, steps, batch)
    if given.dim() == 1:
        given = given[None, :] if batch_first else given[:, None]
    return given * lengths


def check_mask(mask: Any, length: int, batch: int | None) -> None:
    """Raise unless a time-major mask is (T,) or (T, B)."""
    allowed = [(length,)] if batch is None else [(length,), (length, batch)]
    if tuple(np.shape(mask)) not in allowed:
        shown = " or ".join(str(shape) for shape in allowed)
        raise InputError(
            f"`mask` has shape {tuple(np.shape(mask))}, time first; it must be {shown}: one weight "
            "for each time step, or one for each step of each sequence."
        )
    if np.ndim(mask) == 2 and np.any(np.asarray(mask) < 0):
        raise InputError(
            "`mask` has negative weights of single sequences; they must be positive or zero."
        )


def check_loss_at(loss_at: Any) -> None:
    """Raise if `loss_at` is not one of its values."""
    if loss_at not in LOSS_AT:
        raise InputError(
            f"`loss_at` is {loss_at!r}; it must be 'last', 'every' or 'model' for one target for "
            "each sequence, or None for targets of every step."
        )


def last_of(mask: Any, length: int) -> np.ndarray:
    """Return a mask of the last step that counts, with its weight; of each sequence if it has a
    batch axis.
    """
    mask = np.ones(length) if mask is None else np.asarray(mask)
    later = np.cumsum((mask != 0)[::-1], axis=0)[::-1]  # steps from here on that count
    return np.where((mask != 0) & (later == 1), mask, 0)


def repeat_targets(target: Any, length: int, batch: int | None) -> Any:
    """Repeat one target per sequence for every step."""
    shape = tuple(np.shape(target))
    if batch is not None and shape[:1] != (batch,):
        raise InputError(
            f"With `loss_at` there is one target for each sequence, ({batch}, …); this one has "
            f"shape {shape}. For targets of every step leave `loss_at` out, and choose the steps "
            "that count with `mask`."
        )
    return np.broadcast_to(np.asarray(target), (length, *shape))


def split_mask(mask: Any) -> tuple[Any, Any]:
    """Return weights of the steps, and factors of the batch elements; None if those are all one."""
    mask = np.asarray(mask, np.float64)
    if mask.ndim == 1:
        return mask, None
    steps = mask.mean(1)
    factors = np.divide(mask, steps[:, None], out=np.zeros_like(mask), where=steps[:, None] != 0)
    return steps, factors


def split_filled_mask(
    mask: Any, shape: tuple[int, int], rows: int, is_mean: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return `split_mask` of a batch's first `rows` elements, with the factor zero for the others.

    Args:
        mask: weights (T,) or (T, B); None: ones.
        shape: (T, B).
        rows: how many of B count.
        is_mean: the loss is a mean over B; it becomes that over the elements that count.
    """
    mask = np.ones(shape[0]) if mask is None else np.asarray(mask, np.float64)
    steps, some = split_mask(mask if mask.ndim == 1 else mask[:, :rows])
    factors = np.zeros(shape)
    factors[:, :rows] = (1 if some is None else some) * (shape[1] / rows if is_mean else 1)
    return steps, factors


def blank_masked(target: Any, mask: Any) -> Any:
    """Replace targets by zeros where a mask (T, B) is zero, so that their values do not matter."""
    if mask is None or np.ndim(mask) != 2:
        return target
    kept = np.reshape(np.asarray(mask) != 0, np.shape(mask) + (1,) * (np.ndim(target) - 2))
    return np.where(kept, np.asarray(target), np.zeros((), target.dtype))


def share_within_steps(counts: np.ndarray, mask: Any, rows: int | None) -> np.ndarray:
    """Return how much each element counts, (T, B), scaled so that each step counts as its mask
    says.

    Args:
        counts: class weights of the elements.
        mask: weights (T, B); None: ones.
        rows: how many of B count; None: all.
    """
    mask = np.ones(counts.shape) if mask is None else np.asarray(mask, np.float64)
    mask = mask * (np.arange(counts.shape[1]) < (counts.shape[1] if rows is None else rows))
    total = (mask * counts).sum(1, keepdims=True)
    return counts * np.divide(
        mask.sum(1, keepdims=True), total, out=np.zeros_like(total), where=total != 0
    )


def combine_masks(masks: Sequence[Any]) -> Any:
    """Return the product of masks (T,) and (T, B); None if there are none."""
    given = [np.asarray(m) for m in masks if m is not None]
    if not given:
        return None
    if any(m.ndim == 2 for m in given):
        given = [m[:, None] if m.ndim == 1 else m for m in given]
    found = given[0]
    for m in given[1:]:
        found = found * m
    return found
