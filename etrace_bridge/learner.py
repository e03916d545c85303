"""`OnlineLearner`: train a torch model online and carry it home."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import brainstate
import jax
import numpy as np
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.frontend import to_torch
from etrace_bridge.runtime import Runtime
from etrace_bridge.rules import Rule, make_rule


class StepInfo:
    """What one online step gave; values leave the device only when read.

    Attributes:
        loss: the step's loss as a float; None for a step without a target.
        output: the model's output as torch tensors.
    """

    __slots__ = ("raw_loss", "raw_output")

    def __init__(self, raw_loss: Any, raw_output: Any) -> None:
        self.raw_loss = raw_loss
        self.raw_output = raw_output

    @property
    def loss(self) -> float | None:
        return None if self.raw_loss is None else float(self.raw_loss)

    @property
    def output(self) -> Any:
        return jax.tree.map(to_torch, self.raw_output)


@dataclass(frozen=True)
class GradientResult:
    """Gradients of a sequence's loss, nothing updated.

    Attributes:
        raw_grads: JAX arrays by torch name.
        raw_losses: (T,) losses of the steps.
        raw_outputs: the model's outputs, time on the first axis.
        weights: (T,) factors with which the steps' losses were summed.
    """

    raw_grads: dict[str, Any]
    raw_losses: Any
    raw_outputs: Any
    weights: Any

    @cached_property
    def grads(self) -> dict[str, torch.Tensor]:
        """Gradients by torch parameter name."""
        return {name: to_torch(g) for name, g in self.raw_grads.items()}

    @cached_property
    def loss(self) -> float:
        """The sequence's loss."""
        return float(np.sum(np.asarray(self.raw_losses) * np.asarray(self.weights)))

    @cached_property
    def losses(self) -> torch.Tensor:
        """The loss of each step."""
        return to_torch(self.raw_losses)

    @cached_property
    def outputs(self) -> Any:
        """The model's outputs, time on the first axis, as torch tensors."""
        return jax.tree.map(to_torch, self.raw_outputs)


class OnlineLearner:
    """Trains a recurrent model online.

    Args:
        model: a torch module, a `BridgedModule`, or any brainstate module.
        rule: a rule's name or object, see `etrace_bridge.rules`.
        loss: torch or JAX callable `(output_t, target_t) -> scalar`.
        optimizer: an optax transformation or a `torch.optim` instance; None for learners that only give gradients.
        chunk: steps in a chunk, or `"auto"`.
        reduction: `"mean"` or `"sum"` over the steps of a sequence.
        budget: bytes that a chunk's buffers may take; None for no more than the trace itself.
        seed: seed of the model's random ops.
    """

    def __init__(
        self,
        model: torch.nn.Module | brainstate.nn.Module,
        rule: str | Rule = "d_rtrl",
        loss: Callable[..., Any] | None = None,
        optimizer: Any = None,
        chunk: int | str = "auto",
        *,
        reduction: str = "mean",
        budget: int | None = None,
        seed: int = 0,
    ) -> None:
        self.rule = make_rule(rule)
        self._runtime = Runtime(model, self.rule, loss, optimizer, chunk, reduction, budget, seed)

    @property
    def net(self) -> brainstate.nn.Module:
        """The brainstate module, with the learner's current weights and states in it."""
        self._runtime.write_back()
        return self._runtime.net

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph; there is one after the first input."""
        return self._runtime.program.graph

    def step(self, x: Any, target: Any = None) -> StepInfo:
        """One time step: forward, trace, gradient, update.

        Args:
            x: the input, `(batch, …)`, or a tuple of inputs.
            target: the target; None advances states and trace only.
        """
        return StepInfo(*self._runtime.step(_as_inputs(x), target))

    def gradients(self, xs: Any, targets: Any, mask: Any = None, carry: bool = False) -> GradientResult:
        """Gradients of a whole sequence, without an update.

        Args:
            xs: inputs `(T, batch, …)`, or `(batch, T, …)` for a `batch_first` module; a tuple for several inputs.
            targets: targets, time where the inputs have it.
            mask: (T,) weights of the steps' losses.
            carry: start from the current states and trace and keep those after the sequence; otherwise the sequence
                starts from initial states, and the learner's own stay as they are.
        """
        return GradientResult(*self._runtime.gradients(_as_inputs(xs), targets, mask, carry))

    def fill_grad(self, result: GradientResult | Mapping[str, torch.Tensor]) -> None:
        """Puts gradients into `.grad` of the torch model's parameters, for a torch optimizer."""
        grads = result.grads if isinstance(result, GradientResult) else result
        named = dict(self._torch_model().named_parameters(remove_duplicate=False))
        unknown = sorted(set(grads) - set(named))
        if unknown:
            raise InputError(f"The model has no parameters named {', '.join(unknown)}.")
        for name, grad in grads.items():
            named[name].grad = grad.detach().to(named[name].dtype).clone()

    def sync_to_torch(self) -> None:
        """Writes weights and buffers into the torch model, in place."""
        self._torch_model().load_state_dict(self.net.state_dict(), strict=False)

    def reset(self, mask: Any = None) -> None:
        """Sets hidden states and traces back to their initial values; `mask` (batch,) picks elements."""
        self._runtime.reset(mask)

    def _torch_model(self) -> torch.nn.Module:
        model = getattr(self._runtime.net, "model", None)
        if model is None:
            raise InputError("This learner was made from a brainstate module, so there is no torch model to write to.")
        return model


def _as_inputs(x: Any) -> tuple:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)
