"""Comparing a step that was found in a loop with torch on whole sequences."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from etrace_bridge._errors import StateError
from etrace_bridge.frontend import messages
from etrace_bridge.frontend.borders import to_jax
from etrace_bridge.frontend.examples import random_like, scaled
from etrace_bridge.frontend.names import NamedTensor
from etrace_bridge.frontend.plan import StepPlan
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import flatten_state
from etrace_bridge.frontend.time.draws import same_draws
from etrace_bridge.frontend.time.graph import evaluate, keys_of
from etrace_bridge.frontend.time.step import LoopStep
from etrace_bridge.lowering import jit

_CHECKED = 9  # the length of the sequence on which a step is compared with torch
_DIFFERENTIATED = 3  # that of the one on which derivatives are compared
_MOVED = 0.02  # by how much weights are moved for the comparison
_LOUDER = (5.0, 30.0)  # by how much inputs are enlarged where an output is all zeros
# Inputs on which exploding models are compared; values from which on they count as such
_SMALL, _LARGE = 0.03, 1e3


def find_difference(
    model: nn.Module,
    tensors: Sequence[NamedTensor],
    inputs: tuple,
    plan: StepPlan,
    given: tuple | None,
    step: LoopStep,
) -> StateError | None:
    """Run a step over a random sequence of another length, and torch on it and its beginnings;
    describe the first difference.

    The weights are moved a little, since a step must be right for all of them: a state that starts
    at minus a bias starts at zero while the bias is zero, and its gradient is wrong. Where the
    values explode on such numbers, so that rounding errors do too, smaller inputs decide.

    Where a start is guessed, the states after the first step are compared as well, since spikes may
    hide a difference between membrane potentials; and derivatives: a running maximum of spikes,
    say, has the same values from zeros as from its first spikes, but not the same derivatives. And
    the weights are moved far: a state that starts at `relu(bias)` starts at zero while the bias is
    negative.
    """
    steps = [tuple(random_like(x, 100 + t) for x in inputs) for t in range(_CHECKED)]
    pair = _Pair(model, tensors, plan, given, step)
    with _moved_weights(tensors):
        problem, scale = _difference_of_values(pair, steps)
        if problem is None and step.start_is_guessed:
            problem = pair.difference_of_states(scaled(steps[0], scale))
        if problem is None and step.start_is_guessed:
            problem = pair.difference_of_derivatives([scaled(x, scale) for x in steps])
    if problem is None and step.start_is_guessed:
        for signs in (1, -1):
            with _moved_weights(tensors, signs), contextlib.suppress(Exception):
                found = _difference_of_values(pair, steps)[0]  # raises if torch cannot run on these
                problem = problem or (None if isinstance(found, _Exploded) else found)
    return problem


def _difference_of_values(pair: _Pair, steps: list[tuple]) -> tuple[StateError | None, float]:
    """The first difference on inputs that make the model fire and do not make it explode, and by
    how much they were enlarged.
    """
    for scale in (1.0, *_LOUDER):  # a spiking model that is silent agrees with everything
        problem, silent = pair.difference([scaled(x, scale) for x in steps])
        if isinstance(problem, _Exploded):
            if scale != 1:
                return None, 1.0  # where it was silent
            return pair.difference([scaled(x, _SMALL) for x in steps])[0], _SMALL
        if problem is not None or not silent:
            return problem, scale
    return None, scale


@contextlib.contextmanager
def _moved_weights(tensors: Sequence[NamedTensor], signs: int = 0) -> Iterator[None]:
    """Within this, all trained parameters differ by a few percent, and at least by a little, in
    memory of their own; with `signs`, 1 or -1, they have random signs, or the opposite ones.
    """
    generator = torch.Generator().manual_seed(0)
    saved = [(named.tensor, named.tensor.data) for named in tensors if named.trained]
    try:
        for tensor, data in saved:
            noise = torch.randn(data.shape, generator=generator, dtype=torch.float64)
            moved = data + (_MOVED * noise * data.abs().clamp(min=0.5)).to(data.dtype)
            tensor.data = moved * (signs * noise.sign()).to(data.dtype) if signs else moved
        yield
    finally:
        for tensor, data in saved:
            tensor.data = data


class _Exploded(messages.NotChained):
    """A difference between values so large that rounding errors may be the reason."""


@dataclass(frozen=True)
class _Pair:
    """A step and the model that it was found in; attributes as in `find_difference`."""

    model: nn.Module
    tensors: Sequence[NamedTensor]
    plan: StepPlan
    given: tuple | None
    step: LoopStep

    @functools.cached_property
    def _run(self) -> Callable:
        """The compiled step, on values of tensors, states and inputs."""
        step = self.step
        return jit(lambda t, s, x: step(t, s, lambda: jnp.zeros(2, jnp.uint32), x), one_step=True)

    def difference(self, steps: list[tuple]) -> tuple[StateError | None, bool]:
        """Compare one sequence; give the first difference, and whether an output is all zeros."""
        model, tensors, step, silent = self.model, self.tensors, self.step, False
        values = [to_jax(named.tensor) for named in tensors]
        states, outputs = [to_jax(leaf.initial) for leaf in step.leaves], []
        for x in steps:
            now, states = self._run(values, states, [to_jax(v) for v in x])
            outputs.append([np.asarray(y) for y in now])
        lengths = [_CHECKED] if all(axis is not None for axis in step.axes) else [1, 2, 3, _CHECKED]
        for length in lengths:
            whole = _joined(steps[:length], step)
            try:
                wanted = self.run_whole(whole)
            except Exception:  # some models do not take sequences as short as this
                if length == _CHECKED:
                    raise
                continue
            for i, (target, axis, reduction) in enumerate(
                zip(wanted, step.axes, step.reductions, strict=True)
            ):
                column, expected = (
                    np.stack([y[i] for y in outputs[:length]]),
                    np.asarray(to_jax(target)),
                )
                if axis is None:
                    pairs = [(length, _reduced(column, reduction), expected)]
                else:
                    pairs = [(t + 1, column[t], axis.select(expected, t)) for t in range(length)]
                for number, found, value in pairs:
                    if not _agree(found, value, self.step.coarse):
                        problem = not_chained(
                            type(model).__name__,
                            i,
                            number,
                            [".".join(leaf.path) for leaf in step.leaves],
                        )
                        return (
                            problem if np.abs(expected).max() < _LARGE else _Exploded(str(problem))
                        ), False
                silent |= length == _CHECKED and not np.any(expected)
        return None, silent

    def difference_of_states(self, x: tuple) -> StateError | None:
        """Compare the states after the first step with those of the whole sequence."""
        step, make_key = self.step, lambda: jnp.zeros(2, jnp.uint32)
        values, rows = [to_jax(named.tensor) for named in self.tensors], [to_jax(v) for v in x]
        _, found = step(values, [to_jax(leaf.initial) for leaf in step.leaves], make_key, rows)
        after = [state.column[1] for state in step.split.states]
        seen = [i for i, node in enumerate(after) if node is not None and node.level <= 1]
        nodes = [node for i in seen if (node := after[i]) is not None]
        known = step.values_at(1, values, rows)
        known.update({id(key): make_key() for key in keys_of(nodes)})
        for i, value in zip(seen, evaluate(nodes, known), strict=True):
            if not _agree(np.asarray(found[i]), np.asarray(value), step.coarse):
                names = [".".join(leaf.path) for leaf in step.leaves]
                return not_started_alike(type(self.model).__name__, names[i], names)
        return None

    def run_whole(self, whole: tuple, with_grad: bool = False) -> list[torch.Tensor]:
        """Run torch on a whole sequence from the initial state; give the output tensors."""
        with (
            restored(self.model, values=False),
            torch.set_grad_enabled(with_grad),
            same_draws(lambda: jnp.zeros(2, jnp.uint32)),
        ):
            returned = self.plan.call_from(self.model, whole, self.given)
            return [t for _, t in flatten_state(self.plan.output_of(self.model, returned))[0]]

    def difference_of_derivatives(self, steps: list[tuple]) -> StateError | None:
        """Compare gradients by weights and inputs of a weighted sum of a short sequence's outputs."""
        model, tensors, step = self.model, self.tensors, self.step
        try:
            whole, outputs = self._run_with_grad(steps[:_DIFFERENTIATED])
            steps = steps[:_DIFFERENTIATED]
        except Exception:  # some models do not take sequences as short as this
            whole, outputs = self._run_with_grad(steps)
        generator = torch.Generator().manual_seed(1)
        factors = [
            torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.real.dtype)
            for y in outputs
        ]
        seen = [_is_inexact(y) and y.requires_grad for y in outputs]
        total = sum((f * y.real).sum() for f, y, s in zip(factors, outputs, seen, strict=True) if s)
        weights = [i for i, named in enumerate(tensors) if named.tensor.requires_grad]
        inputs = [i for i, x in enumerate(whole) if x.requires_grad]
        wanted = [*(tensors[i].tensor for i in weights), *(whole[i] for i in inputs)]
        if not isinstance(total, torch.Tensor) or not wanted:
            return None
        expected = torch.autograd.grad(total, wanted, allow_unused=True)
        values, rows = [to_jax(named.tensor) for named in tensors], [to_jax(x) for x in whole]

        def in_jax(chosen: list[Any]) -> Any:
            now, given_rows = list(values), list(rows)
            for i, value in zip(weights, chosen[: len(weights)], strict=True):
                now[i] = value
            for i, value in zip(inputs, chosen[len(weights) :], strict=True):
                given_rows[i] = value
            states: list[Any] = [to_jax(leaf.initial) for leaf in step.leaves]
            found = []
            for t in range(len(steps)):
                at = [jnp.take(x, t, min(step.time_axis, x.ndim - 1)) for x in given_rows]
                y, states = step(now, states, lambda: jnp.zeros(2, jnp.uint32), at)
                found.append(y)
            result = 0.0
            for i, (axis, reduction) in enumerate(zip(step.axes, step.reductions, strict=True)):
                if seen[i]:
                    factor, column = to_jax(factors[i]), jnp.stack([y[i] for y in found])
                    parts = (
                        [factor * _reduced(column, reduction).real]
                        if axis is None
                        else [axis.select(factor, t) * column[t].real for t in range(len(steps))]
                    )
                    result = result + sum(jnp.sum(part) for part in parts)
            return result

        chosen = [*(values[i] for i in weights), *(rows[i] for i in inputs)]
        for found, gradient in zip(jit(jax.grad(in_jax))(chosen), expected, strict=True):
            right = np.zeros(found.shape) if gradient is None else gradient.resolve_conj().numpy()
            if np.isfinite(right).all() and not _agree(
                np.conj(np.asarray(found)), right.astype(found.dtype), step.coarse
            ):
                names = [".".join(leaf.path) for leaf in step.leaves]
                return not_differentiated_alike(type(model).__name__, names)
        return None

    def _run_with_grad(self, steps: list[tuple]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inputs of several steps as sequences, and torch's outputs, in torch's graph."""
        whole = [x.detach().requires_grad_(_is_inexact(x)) for x in _joined(steps, self.step)]
        return whole, self.run_whole(tuple(whole), with_grad=True)


def _joined(steps: Sequence[tuple], step: LoopStep) -> tuple[torch.Tensor, ...]:
    """Inputs of several steps as sequences."""
    return tuple(torch.stack(x, min(step.time_axis, x[0].dim())) for x in zip(*steps, strict=True))


def _reduced(column: Any, reduction: str | None) -> Any:
    """The outputs of all steps as the model reduces them over time."""
    if reduction in ("sum", "mean"):
        return getattr(column, reduction)(0)
    return column[-1]


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _agree(found: np.ndarray, value: np.ndarray, coarse: bool) -> bool:
    scale = max(1.0, float(np.abs(value).max(initial=0.0)))
    tolerance = 1e-9 if value.dtype == np.float64 and not coarse else 1e-4
    return found.shape == value.shape and np.allclose(
        found, value, rtol=0, atol=tolerance * scale, equal_nan=True
    )


def not_differentiated_alike(model: str, states: list[str]) -> StateError:
    """A step with the right values and other derivatives."""
    return messages.NotChained(
        f"`{model}.forward` takes sequences, and the step that was found in it gives the same "
        "outputs as a whole sequence, but other gradients: the first step is unlike the others. "
        f"States: {', '.join(f'`{s}`' for s in states) or 'none'}. Start them from tensors that "
        "are made before the loop."
    )


def not_started_alike(model: str, state: str, states: list[str]) -> StateError:
    """A step with the right outputs and another state after the first step."""
    return messages.NotChained(
        f"`{model}.forward` takes sequences, and the step that was found in it gives another "
        f"`{state}` after the first step than the whole sequence: the first step is unlike the "
        f"others. States: {', '.join(f'`{s}`' for s in states)}. Start them from tensors that are "
        "made before the loop."
    )


def not_chained(model: str, output: int, step: int, states: list[str]) -> StateError:
    """A step that does not give what the whole sequence gives."""
    return messages.NotChained(
        f"`{model}.forward` takes sequences, and the step that was found in it does not give what "
        f"it gives for a whole sequence: output {output} differs from step {step} on. States: "
        f"{', '.join(f'`{s}`' for s in states) or 'none'}. The loop depends on the length of the "
        "sequence, on the step's number or on something that is in no tensor. Write one time step "
        "as `forward(x, state) -> (output, state)`, or pass `wrap(model, sequence=False)` if "
        "`forward` takes one time step."
    )
