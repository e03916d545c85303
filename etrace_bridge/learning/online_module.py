"""`OnlineModule`: a torch module whose `backward` gives online gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.frontend import InputForm, is_in_backward, read_call
from etrace_bridge.learning.inputs import as_array
from etrace_bridge.learning.module_tensors import ModuleTensors
from etrace_bridge.learning.online_call import Call, attach
from etrace_bridge.learning.online_core import OnlineCarry
from etrace_bridge.learning.online_stream import Stream
from etrace_bridge.learning.torch_reader import view_tensor
from etrace_bridge.learning.torch_step import TorchStep, find_step
from etrace_bridge.rules import Rule, make_rule


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
        self._tensors = ModuleTensors(self.model)
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
        outputs = self._advance(compiled, inputs, is_sequence)
        return jax.tree.unflatten(
            compiled.out_tree, [y.transpose(0, 1) for y in outputs] if flip else outputs
        )

    def _advance(
        self, compiled: TorchStep, inputs: tuple[torch.Tensor, ...], is_sequence: bool
    ) -> tuple[torch.Tensor, ...]:
        """Runs a call forward and moves the stream; the trace follows when something needs it.

        A call that may get a loss keeps copies of weights and inputs; weights that torch has not
        changed since the last call share one copy. Any other call reads torch's memory.
        """
        reader = self._tensors.reader(compiled.weight_names)
        args = [view_tensor(x) for x in inputs]
        plan = compiled.plan(len(inputs[0]), self._chunk) if is_sequence else None
        learns = torch.is_grad_enabled() and any(
            t.requires_grad for t in (*inputs, *reader.tensors)
        )
        kept = reader.kept() if learns else None
        call = Call(
            compiled,
            reader.views() if kept is None else kept,
            self._carry_before(compiled, learns),
            [a.copy() if isinstance(a, np.ndarray) else a for a in args] if learns else args,
            plan,
        )
        outputs, carry = call.advance(reader.tensors[0].device, learns and kept is None)
        if learns and kept is None:
            reader.keep(call.weights)
        for name in compiled.written_buffers:
            self._tensors.write(name, carry.other[name])
        self._stream = Stream(compiled.text, compiled.inputs, carry, call if learns else None)
        return attach(call, outputs, inputs, reader.tensors) if learns else outputs

    def _compiled_for(
        self, inputs: Sequence[torch.Tensor], form: InputForm, sequence: bool | None
    ) -> tuple[TorchStep, bool]:
        """The compiled step for these inputs, and whether they are a sequence."""
        if self._tensors.find_again():
            self._steps.clear()
        key = (self._tensors.kind(), sequence, form, *[(x.shape, x.dtype) for x in inputs])
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

    def _carry_before(self, compiled: TorchStep, learns: bool) -> OnlineCarry:
        """States and trace before the next call."""
        if self._stream is not None:
            carry = self._stream.before(compiled, learns)
        else:
            carry = compiled.start
            kept = {n: x for n, x in self._persistent.items() if n in carry.other}
            carry = carry._replace(other=carry.other | kept)
        if not compiled.buffer_names:
            return carry
        buffers = self._tensors.reader(compiled.buffer_names).copies()
        now = dict(zip(compiled.buffer_names, buffers, strict=True))
        return carry._replace(other=carry.other | now)

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
        state = {n: v for n, v in state.items() if n not in ("_tensors", "_steps", "_stream")}
        stream = self._stream
        if stream is not None:
            stream = Stream(stream.text, stream.inputs, jax.tree.map(np.asarray, stream.settle()))
        return state | {"_stream": stream}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_caches()

    def extra_repr(self) -> str:
        return f"rule={self.rule.name!r}"


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _as_tensor(x: Any) -> torch.Tensor:
    if isinstance(x, torch.Tensor):
        return x
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x)
    raise InputError(f"`OnlineModule` takes torch tensors, not `{type(x).__name__}`.")
