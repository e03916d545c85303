"""One call of an `OnlineModule`, and the node of torch's graph that waits for its loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from etrace_bridge.learning.online_core import OnlineCarry
from etrace_bridge.learning.torch_reader import Array, view_tensor
from etrace_bridge.learning.torch_step import TorchStep, to_tensor
from etrace_bridge.schedule.chunk_plan import ChunkPlan


@dataclass
class Call:
    """One call of the module: what its backward pass needs.

    Attributes:
        compiled: the step.
        weights: the weights that it ran with.
        carry: states and trace before it.
        args: its inputs.
        plan: how a sequence is divided; None for a single step.
        after: the trace after it, once something has computed it.
    """

    compiled: TorchStep
    weights: list[Array]
    carry: OnlineCarry
    args: list[Array]
    plan: ChunkPlan | None
    after: Any = None

    def _run(self, kind: str, *cotangents: list[Any]) -> Any:
        program = self.compiled.run(kind, self.plan)
        return program(self.weights, self.carry, self.args, *cotangents)

    def advance(
        self, device: torch.device, copies: bool
    ) -> tuple[tuple[torch.Tensor, ...], OnlineCarry]:
        """Outputs, and the states after them; goes on with copies of the weights if it should.

        The program has ended when this returns, so torch may change memory that it has read.
        """
        outputs, carry, weights = self._run("copy" if copies else "infer")
        self.weights = weights if copies else self.weights
        return tuple(to_tensor(y, device) for y in outputs), carry

    def trace_after(self) -> Any:
        """The trace after this call."""
        if self.after is None:
            self.after = self._run("trace")
        return self.after

    def gradients(self, cotangents: list[Any]) -> list[Any]:
        """The online gradient in the order of the weights; a single step computes its new trace in
        the same pass, since the next step will want it.
        """
        if self.plan is None and self.after is None:
            grads, self.after = self._run("learn", cotangents)
            return grads
        return self._run("gradients", cotangents)

    def input_gradients(self, cotangents: list[Any]) -> list[Any]:
        """The gradients of the inputs, None for integers."""
        return self._run("inputs", cotangents)


def attach(
    call: Call,
    outputs: tuple[torch.Tensor, ...],
    inputs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """The outputs as torch's functions of inputs and weights, with the gradients of the call."""
    with torch.autograd.graph.saved_tensors_hooks(lambda _: call, _hold):
        return _OnlineStep.apply(call, outputs, len(inputs), *inputs, *weights)


class _OnlineStep(torch.autograd.Function):
    """The call as a node of torch's graph."""

    @staticmethod
    def forward(
        ctx: Any,
        call: Call,
        outputs: tuple[torch.Tensor, ...],
        num_inputs: int,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.num_inputs = num_inputs
        ctx.save_for_backward(torch.empty(0))  # stands for the call, see `_hold`
        ctx.mark_non_differentiable(
            *(y for y in outputs if not (y.is_floating_point() or y.is_complex()))
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple:
        call: Call = ctx.saved_tensors[0].call
        count, needs, device = ctx.num_inputs, ctx.needs_input_grad[3:], cotangents[0].device
        y_bar = [
            view_tensor(c)
            for c, wanted in zip(cotangents, call.compiled.core.float_outputs, strict=True)
            if wanted
        ]
        found: list[torch.Tensor | None] = [None] * len(needs)
        if any(needs[count:]):
            found[count:] = call.compiled.weight_gradients(call.gradients(y_bar), device)
        if any(needs[:count]):
            grads = call.input_gradients(y_bar)
            found[:count] = [None if g is None else to_tensor(g, device) for g in grads]
        wanted = (g if need else None for g, need in zip(found, needs, strict=True))
        return None, None, None, *wanted


def _hold(call: Call) -> torch.Tensor:
    """A tensor that brings a call to the backward pass.

    torch frees what it has saved for a backward pass when that pass has run, or the graph is gone;
    so calls are kept there, and not in the node itself, which lives as long as any loss that a user
    collects.
    """
    holder = torch.empty(0)
    holder.call = call  # pyright: ignore[reportAttributeAccessIssue]
    return holder
