"""`OnlineModule`: a torch module whose `backward` gives online gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.frontend import InputForm, is_in_backward, read_call
from etrace_bridge.learning.inputs import as_array, show_signature
from etrace_bridge.learning.online_core import OnlineCarry
from etrace_bridge.learning.torch_mirror import TensorMirror, view_tensor
from etrace_bridge.learning.torch_step import TorchStep, find_step, to_tensor
from etrace_bridge.rules import Rule, make_rule
from etrace_bridge.schedule.chunk_plan import ChunkPlan


@dataclass
class Call:
    """One call of the module: what its backward pass needs.

    Attributes:
        compiled: the step.
        params: the weights that it ran with.
        carry: states and trace before it.
        args: its inputs.
        plan: how a sequence is divided; None for a single step.
        after: the trace after it, once something has computed it.
    """

    compiled: TorchStep
    params: dict[str, Any]
    carry: OnlineCarry
    args: list[Any]
    plan: ChunkPlan | None
    after: Any = None

    def trace_after(self) -> Any:
        """The trace after this call."""
        if self.after is None:
            self.after = self.compiled.run("trace", self.plan)(self.params, self.carry, self.args)
        return self.after

    def gradients(self, cotangents: list[Any]) -> list[Any]:
        """The online gradient in the order of the weights; a single step computes its new trace in
        the same pass, since the next step will want it.
        """
        given = self.params, self.carry, self.args, cotangents
        if self.plan is None and self.after is None:
            grads, self.after = self.compiled.run("learn", None)(*given)
            return grads
        return self.compiled.run("gradients", self.plan)(*given)


@dataclass
class Stream:
    """Where the module is: the states, and the trace or the call that it follows from.

    Attributes:
        text: the step's equations; another step with the same ones may go on with the trace.
        inputs: shapes and dtypes of one time step.
        carry: states after the last call; its trace is None while `last` is to give it.
        last: the last call, whose trace nothing has needed yet.
    """

    text: str
    inputs: tuple
    carry: OnlineCarry
    last: Call | None = None

    def settle(self) -> OnlineCarry:
        """States and trace."""
        if self.last is not None:
            self.carry, self.last = self.carry._replace(trace=self.last.trace_after()), None
        return self.carry


class OnlineModule(nn.Module):
    """A torch module around a recurrent model: `backward` of any loss of its outputs gives the
    model's parameters online gradients.

    The module keeps the model's hidden states and the rule's traces from call to call. The loss may
    come later than the next step, may join the outputs of several steps, or may never come. An
    output that waits for its loss keeps the states, the trace and the weights of its step; they are
    freed with the output's graph.

    Args:
        model: a torch module with recurrent or spiking layers. Its parameters stay its own.
        rule: a rule's name or object, see `etrace_bridge.rules`.
        chunk: steps in a chunk of a sequence, or `"auto"`.
        seed: seed of the model's random ops, e.g. dropout.

    Attributes:
        model: the model.
        rule: the learning rule.

    Example:
        >>> online = eb.OnlineModule(model, rule="d_rtrl")
        >>> for x, y in stream:
        ...     F.cross_entropy(online(x), y).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        rule: str | Rule = "d_rtrl",
        *,
        chunk: int | str = "auto",
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module) or isinstance(model, OnlineModule):
            raise InputError(
                f"`model` is a {type(model).__name__}; it must be a `torch.nn.Module` that is not "
                "online already."
            )
        self.model = model
        self.rule = make_rule(rule)
        self._chunk, self._seed = chunk, seed
        # what outlives a sequence and is not a torch buffer: the random key
        self._persistent: dict[str, Any] = {}
        self._stream: Stream | None = None
        self._dims: tuple[int, ...] | None = None  # axes of one time step of each input
        self._make_caches()

    def _make_caches(self) -> None:
        self._mirror = TensorMirror(self.model)
        # and whether such inputs are a sequence
        self._steps: dict[Any, tuple[TorchStep, bool]] = {}

    # -- a call -----------------------------------------------------------------------------------

    def forward(self, *args: Any, sequence: bool | None = None, **kwargs: Any) -> Any:
        """Run one time step, or a sequence.

        Args:
            *args: one time step of each input, `(batch, …)`; or, where the model itself takes
                sequences, a sequence in its layout, `(T, batch, …)` or `(batch, T, …)`; or dicts
                and tuples of them, as the model's own `forward` takes them.
            **kwargs: inputs that the model takes by keyword.
            sequence: which of the two it is; by default told from the number of axes.

        Returns:
            The model's output, as the model's own structure of torch tensors.
        """
        if is_in_backward():
            raise StateError(
                "`OnlineModule` was called within a backward pass, as gradient checkpointing does "
                "to compute a forward pass again. The module's states and traces are already those "
                "after that call, so the outputs would be others. Leave `OnlineModule` out of "
                "`torch.utils.checkpoint`: it keeps one step, whatever the sequence's length."
            )
        inputs, form = read_call(self.model.forward, args, kwargs)
        if not inputs:
            raise InputError("`OnlineModule` was called without an input.")
        inputs = tuple(map(_as_tensor, inputs))
        compiled, is_sequence = self._compiled_for(inputs, form, sequence)
        flip = is_sequence and compiled.batch_first
        if flip:
            inputs = tuple(x.transpose(0, 1) for x in inputs)
        plan = compiled.plan(len(inputs[0]), self._chunk) if is_sequence else None
        tensors = [self._mirror.tensor(name) for name in compiled.weight_names]
        learns = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (*inputs, *tensors)
        )
        call = Call(
            compiled, {}, self._carry_for(compiled, learns), [view_tensor(x) for x in inputs], plan
        )
        if learns:
            with torch.autograd.graph.saved_tensors_hooks(lambda _: call, _hold):
                flat = _OnlineStep.apply(self, call, len(inputs), *inputs, *tensors)
        else:
            flat = self._advance(call, False)
        return jax.tree.unflatten(
            compiled.out_tree, [y.transpose(0, 1) for y in flat] if flip else flat
        )

    def _advance(self, call: Call, learns: bool) -> tuple[torch.Tensor, ...]:
        """Runs a call forward and moves the stream; the trace follows when something needs it.

        Weights and inputs lie in torch's memory until the program has ended. A call that may get a
        loss keeps copies of them, which the program makes; weights that torch has not changed since
        the last call share one copy.
        """
        compiled, mirror = call.compiled, self._mirror
        if learns:
            held = mirror.held(compiled.weight_names)
            run = compiled.run("copy all" if held is None else "copy inputs", call.plan)
            call.params = mirror.views(compiled.weight_names) if held is None else held
            outputs, new, (params, call.args) = run(call.params, call.carry, call.args)
            if held is None:
                mirror.hold(params)
                call.params = params
        else:
            params = mirror.views(compiled.weight_names)
            outputs, new = compiled.run("infer", call.plan)(params, call.carry, call.args)
        # This waits for the program, all of whose results are there at once: torch may change its
        # memory again.
        flat = tuple(to_tensor(y, compiled.device(mirror)) for y in outputs)
        for name in compiled.written_buffers:
            self._mirror.write(name, new.other[name])
        self._stream = Stream(compiled.text, compiled.inputs, new, call if learns else None)
        return flat

    def _compiled_for(
        self, inputs: Sequence[torch.Tensor], form: InputForm, sequence: bool | None
    ) -> tuple[TorchStep, bool]:
        """The compiled step for these inputs, and whether they are a sequence."""
        if self._mirror.find_again():
            self._steps.clear()
        key = (self._mirror.kind(), sequence, form, *[(x.shape, x.dtype) for x in inputs])
        found = self._steps.get(key)
        if found is None:
            # Tracing runs the model in torch. A user's hooks, such as those of gradient
            # checkpointing, are for the call itself.
            with torch.autograd.graph.saved_tensors_hooks(_same, _same):
                step, is_sequence = find_step(
                    self.model, self.rule, self._seed, inputs, form, sequence, self._dims
                )
            self._dims = tuple(len(shape) for shape, _ in step.inputs)
            same = (
                s
                for k, (s, _) in self._steps.items()
                if (k[0], k[2], s.inputs) == (key[0], form, step.inputs)
            )
            self._steps[key] = found = next(same, step), is_sequence
        return found

    def _carry_for(self, compiled: TorchStep, learns: bool) -> OnlineCarry:
        """States and trace before the next call."""
        stream, start = self._stream, compiled.start
        buffers = self._mirror.read(compiled.buffer_names) if compiled.buffer_names else {}
        if stream is None:
            return start._replace(other=start.other | self._persistent_of(start.other) | buffers)
        if stream.inputs != compiled.inputs:
            raise InputError(
                f"The states are those of inputs {show_signature(stream.inputs)}; this input is "
                f"{show_signature(compiled.inputs)}. They cannot go on with another batch. Call "
                "`reset()` first to start with new states, or use the same batch size."
            )
        carry = stream.settle() if learns else stream.carry
        if stream.text != compiled.text:
            carry = _adopt(carry, start, learns)
        return carry._replace(other=carry.other | buffers) if buffers else carry

    def _persistent_of(self, other: dict[str, Any]) -> dict[str, Any]:
        return {n: x for n, x in self._persistent.items() if n in other}

    # -- states -----------------------------------------------------------------------------------

    def reset(self, mask: Any = None) -> None:
        """Set hidden states and traces back to their initial values; `mask` (batch,) picks batch
        elements.

        Outputs of earlier steps may still get their loss. Running statistics and the random key are
        the model's and stay. After a full reset the batch size may change.
        """
        stream = self._stream
        if stream is None:
            return
        if mask is None:
            self._persistent = {n: x for n, x in stream.carry.other.items() if n == "rng_key"}
            self._stream = None
            return
        known = (
            s
            for s, _ in self._steps.values()
            if s.text == stream.text and s.inputs == stream.inputs
        )
        compiled = next(known, None)
        if compiled is None:  # this is a copy that has not run yet
            raise StateError(
                "The module has not run since it was copied or its layers changed. Call it before "
                "`reset(mask)`."
            )
        gone = np.asarray(as_array(mask)).astype(bool)
        self._stream = Stream(stream.text, stream.inputs, compiled.reset(stream.settle(), gone))

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph of the last new kind of input; there is one after the first call."""
        if not self._steps:
            raise StateError(
                "The module has seen no input yet, so there is no graph. Call it first."
            )
        return next(reversed(self._steps.values()))[0].core.program.graph

    # -- state dicts, copies ----------------------------------------------------------------------

    def state_dict(self, *args: Any, **options: Any) -> Any:
        """The model's own state dict, under the model's names; hidden states and traces are not in
        it.
        """
        return self.model.state_dict(*args, **options)

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *rest: Any) -> None:
        for name in [n for n in state_dict if n.startswith(prefix)]:
            state_dict[f"{prefix}model.{name[len(prefix) :]}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a pickle takes along: model, rule, states and traces; compiled programs
        are made anew.
        """
        state = super().__getstate__() if hasattr(super(), "__getstate__") else self.__dict__.copy()
        state = {n: v for n, v in state.items() if n not in ("_mirror", "_steps", "_stream")}
        stream = self._stream
        if stream is not None:
            stream = Stream(stream.text, stream.inputs, jax.tree.map(np.asarray, stream.settle()))
        return state | {"_stream": stream}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_caches()

    def extra_repr(self) -> str:
        return f"rule={self.rule.name!r}"


class _OnlineStep(torch.autograd.Function):
    """The call as a node of torch's graph."""

    @staticmethod
    def forward(
        ctx: Any, module: OnlineModule, call: Call, num_inputs: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.num_inputs = num_inputs
        ctx.save_for_backward(torch.empty(0))  # stands for the call, see `_hold`
        outputs = module._advance(call, True)
        ctx.mark_non_differentiable(*(y for y in outputs if not _has_gradient(y)))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple:
        call: Call = ctx.saved_tensors[0].call
        y_bar = [
            view_tensor(c)
            for c, wanted in zip(cotangents, call.compiled.core.float_outputs, strict=True)
            if wanted
        ]
        needs = ctx.needs_input_grad[3:]
        found: list[torch.Tensor | None] = [None] * len(needs)
        device = cotangents[0].device
        if any(needs[ctx.num_inputs :]):
            found[ctx.num_inputs :] = call.compiled.weight_gradients(call.gradients(y_bar), device)
        if any(needs[: ctx.num_inputs]):
            grads = call.compiled.run("inputs", call.plan)(
                call.params, call.carry, call.args, y_bar
            )
            found[: ctx.num_inputs] = [None if g is None else to_tensor(g, device) for g in grads]
        return (
            None,
            None,
            None,
            *(g if wanted else None for g, wanted in zip(found, needs, strict=True)),
        )


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _has_gradient(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _hold(call: Call) -> torch.Tensor:
    """A tensor that brings a call to the backward pass.

    torch frees what it has saved for a backward pass when that pass has run, or the graph is gone;
    so calls are kept there, and not in the node itself, which lives as long as any loss that a user
    collects.
    """
    holder = torch.empty(0)
    holder.call = call  # pyright: ignore[reportAttributeAccessIssue]
    return holder


def _adopt(carry: OnlineCarry, start: OnlineCarry, learns: bool) -> OnlineCarry:
    """The states of one step for another, as after `eval()`; its trace is zero."""
    if learns and carry.trace is not None:
        raise StateError(
            "The model's step has changed within a stream (`train()`, `eval()`, `requires_grad_` "
            "or a new layer), and its traces belong to the step before. Call `reset()` first, or "
            "run the other mode under `torch.no_grad()`."
        )
    if {n: h.shape for n, h in carry.hidden.items()} != {
        n: h.shape for n, h in start.hidden.items()
    }:
        raise StateError(
            "The model has other hidden states than before. Call `reset()` first to start with "
            "new ones."
        )
    return OnlineCarry(
        carry.hidden, start.other | {n: x for n, x in carry.other.items() if n in start.other}, None
    )


def _as_tensor(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x)
    raise InputError(f"`OnlineModule` takes torch tensors, not `{type(x).__name__}`.")
