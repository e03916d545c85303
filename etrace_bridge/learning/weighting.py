"""From targets and a mask to what the engine takes: a loss of one step, its targets, weights of the
steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from etrace_bridge._errors import InputError, TracingError
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.element_loss import Weighted
from etrace_bridge.learning.losses import JaxLoss, LossTable
from etrace_bridge.learning.masks import (
    blank_masked,
    check_mask,
    combine_masks,
    last_of,
    repeat_targets,
    share_within_steps,
    split_filled_mask,
    split_mask,
)
from etrace_bridge.learning.options import Options
from etrace_bridge.learning.reader import SequenceData, StepData, check_indices
from etrace_bridge.learning.sequence_loss import REDUCTIONS, LossInTorch, SequenceLoss
from etrace_bridge.rules import Rule


class Weighting:
    """Finds the loss for a learner's data.

    Args:
        losses: the learner's losses of one step.
        over_time: those over a whole sequence.
        options: the learner's options.
        rule: the learner's rule.
    """

    def __init__(
        self, losses: LossTable, over_time: LossTable, options: Options, rule: Rule
    ) -> None:
        self._losses, self._over_time, self._options, self._rule = losses, over_time, options, rule
        self._in_torch = LossInTorch(over_time.loss)

    def of_step(self, compiled: CompiledStep, data: StepData, mask: Any) -> tuple[Any, StepData]:
        """Return the loss of one step, and its data with the mask in the target."""
        if data.target is None:
            if mask is not None:
                raise InputError(
                    "`mask` says which batch elements have a loss, but there is no target."
                )
            check_indices(compiled, data.args, None, None)
            return None, data
        loss, wanted = self._losses.find(compiled, data.target), data.wanted
        if mask is None:
            check_indices(compiled, data.args, loss, wanted)
            return loss, data
        mask = np.asarray(mask)[None]
        if mask.ndim != 2:
            raise InputError(
                f"`mask` has shape {mask.shape[1:]}; for one step it must be (batch,), a weight "
                "for each batch element."
            )
        check_mask(mask, 1, compiled.batch)
        wanted = jax.tree.map(lambda t: blank_masked(t[None], mask), wanted)
        check_indices(compiled, data.args, loss, wanted)
        if loss.ignores(wanted) and loss.by_element.is_mean:
            loss.by_element.check_ignored()
        _, factors = split_mask(
            combine_masks([mask, loss.by_element.counts(jax.tree.leaves(wanted))])
        )
        wanted = jax.tree.map(lambda t: t[0], wanted)
        return loss.by_element, replace(data, wanted=Weighted(wanted, _like(compiled, factors[0])))

    def of_sequence(self, compiled: CompiledStep, data: SequenceData) -> tuple[Any, SequenceData]:
        """Return the loss of a sequence's steps, and its data with targets and weights for it."""
        if data.mask is not None:
            check_mask(data.mask, data.length, compiled.batch)
        if data.target is None:
            check_indices(compiled, data.args, None, None)
            return None, data
        kind = self._kind(compiled)
        if kind == "seq" or kind in REDUCTIONS:
            return self._over_outputs(compiled, data, kind)
        if kind is not None:
            batch = np.shape(data.args[0])[1]
            repeated = jax.tree.map(lambda t: repeat_targets(t, data.length, batch), data.targets)
            data = replace(
                data,
                targets=repeated,
                mask=last_of(data.mask, data.length) if kind == "last" else data.mask,
            )
        loss = self._losses.find(compiled, data.target)
        targets = jax.tree.map(lambda t: blank_masked(t, data.mask), data.targets)
        check_indices(compiled, data.args, loss, targets)
        return self._weighted(compiled, loss, replace(data, targets=targets))

    def _kind(self, compiled: CompiledStep) -> str | None:
        """Return where the loss is.

        None: at every step, each with its own target. Otherwise there is one target per sequence.
        """
        loss_at = self._options.loss_at
        if self._over_time.loss is not None:
            return "seq"
        if loss_at != "model":
            return loss_at
        return reduction_of(compiled.net)

    def _over_outputs(
        self, compiled: CompiledStep, data: SequenceData, kind: str
    ) -> tuple[Any, SequenceData]:
        if self._rule.needs_loss:
            raise InputError(
                f"The rule `{self._rule.name}` reads the loss of every step, and a loss over the "
                "whole sequence has none. Give a loss of one step (`loss_at='every'` or 'last'), "
                "or use another rule."
            )
        if data.mask is not None:
            raise InputError(
                "A loss over the whole sequence takes no `mask`: leave out what should not count "
                "within the loss itself."
            )
        if kind == "seq":
            batch_first = bool(getattr(compiled.net, "batch_first", False))
            try:
                loss = self._over_time.find(compiled, data.target, data.length, batch_first)
            except TracingError:  # it asks for values, so it must run in torch
                loss = self._in_torch
            arrange = (lambda x: x.swapaxes(0, 1)) if batch_first else (lambda x: x)
        else:
            loss, arrange = self._losses.find(compiled, data.target), REDUCTIONS[kind]
        check_indices(compiled, data.args, loss, data.targets)
        programs = compiled.programs
        return programs.setdefault(("sequence loss", loss, kind), SequenceLoss(loss, arrange)), data

    def _weighted(
        self, compiled: CompiledStep, loss: JaxLoss, data: SequenceData
    ) -> tuple[Any, SequenceData]:
        """Return the same for a mask of single sequences, or labels that are ignored."""
        found: Any = loss
        by_element = np.ndim(0 if data.mask is None else data.mask) == 2 or data.rows is not None
        ignores = loss.ignores(data.targets) and loss.by_element.is_mean
        if ignores:
            loss.by_element.check_ignored()
        if by_element or ignores:
            found = loss.by_element
            counts = found.counts(jax.tree.leaves(data.targets))
            is_single = data.mask is not None and np.ndim(data.mask) == 2
            over_steps = is_single and self._options.reduction == "mean"
            if counts is not None and not over_steps and not ignores:
                counts = share_within_steps(counts, data.mask if is_single else None, data.rows)
            mask = combine_masks([data.mask, counts])
            if data.rows is None:
                steps, factors = split_mask(mask)
            else:
                shape = data.length, np.shape(data.args[0])[1]
                steps, factors = split_filled_mask(mask, shape, data.rows, found.is_mean)
            data = replace(
                data,
                targets=Weighted(data.targets, _like(compiled, factors)),
                mask=_like(compiled, steps),
            )
        if (
            data.mask is not None
            and self._options.reduction == "mean"
            and not np.sum(np.asarray(data.mask)) > 0
        ):
            raise InputError(
                "`mask` has no step with a positive weight, or every label is to be ignored, so "
                "there is no mean loss."
            )
        return found, data


def reduction_of(net: Any) -> str:
    """Return how a model reduces its output over time; raise if it does not."""
    reduction = getattr(net, "reduction", None)
    if reduction is None:
        raise InputError(
            "`loss_at` is 'model', but the model's `forward` gives an output for every step. "
            "Use 'last' or 'every', or `seq_loss` for a loss of all outputs."
        )
    return reduction


def _like(compiled: CompiledStep, array: np.ndarray) -> np.ndarray:
    """Return weights in the dtype of the model's outputs."""
    kinds = [
        v.aval.dtype
        for v in compiled.program.weight_vars
        if jax.numpy.issubdtype(v.aval.dtype, np.floating)
    ]
    return array.astype(kinds[0]) if kinds else array
