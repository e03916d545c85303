"""A torch model's step, compiled for one kind of input, with the programs that `OnlineModule` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from etrace_bridge._errors import BridgeError, InputError
from etrace_bridge.frontend import InputForm, to_torch, wrap
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.inputs import as_array, check_float_dtypes
from etrace_bridge.learning.online_core import NamedCore, OnlineCore
from etrace_bridge.lowering import jit
from etrace_bridge.rules import Rule
from etrace_bridge.schedule.chunk_plan import ChunkPlan


class TorchStep:
    """One step of a torch model under a rule.

    Args:
        model: the model.
        rule: the learning rule.
        seed: seed of its random ops.
        args: one time step of each input tensor.
        form: how these stand in a call of the model.

    Attributes:
        core: the step as pure functions.
        text: its equations as text, with the roles of its variables: traces of one step fit another
            of the same text.
        inputs: shapes and dtypes of one time step.
        start: initial states; their trace is None, which stands for zeros.
        weight_names: the parameters that the step reads.
        buffer_names: the torch buffers and frozen parameters that it carries.
        written_buffers: those of them that it changes.
        out_tree: the structure of its output.
        batch_first: whether the model's sequences are (batch, time, …).
        takes_sequences: whether the model's `forward` takes sequences.
        reset: `(carry, mask) -> carry`, jitted.
    """

    def __init__(
        self, model: nn.Module, rule: Rule, seed: int, args: Sequence[Any], form: InputForm
    ) -> None:
        net = wrap(model, seed=seed)
        net.expect(tuple(args), form)
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if len(dtypes) == 1:
            check_float_dtypes(args, as_array(torch.empty(0, dtype=dtypes.pop())).dtype)
        compiled = CompiledStep(net, args)
        self.core = NamedCore(OnlineCore(compiled, rule))
        program = self.core.program
        roles = (compiled.weight_names, compiled.hidden_names, compiled.other_names)
        self.text = f"{roles}\n{program.graph.module_info.jaxpr}"
        self.inputs = compiled.signature
        self.start = self.core.start()._replace(trace=None)
        self.weight_names = tuple(compiled.weight_names)
        self._complex = {n for n, p in model.named_parameters() if p.is_complex()}
        tensors = {n for n, _ in (*model.named_parameters(), *model.named_buffers())}
        changed = [o is not i for i, o in program.other_vars]
        self.buffer_names = tuple(n for n in compiled.other_names if n in tensors)
        self.written_buffers = tuple(
            n for n, c in zip(compiled.other_names, changed, strict=True) if c and n in tensors
        )
        self.out_tree = program.graph.module_info.out_tree
        self.batch_first, self.takes_sequences = net.batch_first, net.takes_sequences
        self.reset = jit(self.core.reset, one_step=True)
        self._programs: dict[Any, Callable] = {}

    def plan(self, length: int, chunk: int | str) -> ChunkPlan:
        """How a sequence is divided."""
        return self.core.core.plan(length, chunk)

    def run(self, kind: str, plan: ChunkPlan | None) -> Callable:
        """A jitted program for a sequence or (without plan) one step: a function of weights, carry,
        inputs and, for gradients, the outputs' cotangents.

        Args:
            kind: `"infer"`: outputs and the carry after them. `"copy"`: the same, and copies of the
                weights. `"trace"`: the trace after the steps. `"learn"`: gradients and that trace.
                `"gradients"`: gradients. `"inputs"`: the inputs' gradients.
            plan: how the sequence is divided.
        """
        key = kind, plan
        if key not in self._programs:
            self._programs[key] = jit(self._make(kind, plan), one_step=plan is None)
        return self._programs[key]

    def _make(self, kind: str, plan: ChunkPlan | None) -> Callable:
        core, single = self.core, plan is None

        def lift(arrays: Sequence[Any]) -> list[Any]:
            return [jnp.asarray(a)[None] for a in arrays] if single else list(arrays)

        def lower(arrays: Sequence[Any]) -> list[Any]:
            return [a[0] if single and a is not None else a for a in arrays]

        def run(
            weights: Sequence[Any], carry: Any, args: Sequence[Any], cotangents: Sequence[Any] = ()
        ) -> Any:
            params = dict(zip(self.weight_names, weights, strict=True))
            # torch's gradient by a complex value is the conjugate of JAX's.
            args, y_bar = lift(args), [jnp.conj(c) for c in lift(cotangents)]
            if kind in ("infer", "copy"):
                outputs, new = core.infer(params, carry, args)
                copies = [jnp.copy(w) for w in weights] if kind == "copy" else None
                return lower(jax.tree.leaves(outputs)), new, copies
            if kind == "trace":
                return core.advance(params, carry, args, plan)[1].trace
            if kind == "learn":
                grads: Any
                grads, new = core.learn(params, carry, args, y_bar, plan)
                return [grads[n] for n in self.weight_names], new.trace
            if kind == "gradients":
                grads = core.gradients(params, carry, args, y_bar, plan)
                return [grads[n] for n in self.weight_names]
            found = core.input_gradients(params, carry, args, y_bar)
            return lower([None if g is None else jnp.conj(g) for g in found])

        return run

    def weight_gradients(self, grads: Sequence[Any], device: torch.device) -> list[torch.Tensor]:
        """Gradients in the order of `weight_names`, as torch has them: a complex weight's, whose
        parts the step holds on a last axis, is complex.
        """
        tensors = [to_tensor(g, device) for g in grads]
        return [
            torch.view_as_complex(g) if name in self._complex else g
            for name, g in zip(self.weight_names, tensors, strict=True)
        ]


def find_step(
    model: nn.Module,
    rule: Rule,
    seed: int,
    inputs: Sequence[Any],
    form: InputForm,
    sequence: bool | None,
    dims: tuple[int, ...] | None,
) -> tuple[TorchStep, bool]:
    """The compiled step for inputs that are one time step or a sequence; and which of the two they
    are.

    Args:
        model: the model.
        rule: the learning rule.
        seed: seed of its random ops.
        inputs: the tensors of a call.
        form: how these stand in the call.
        sequence: whether they are a sequence, if the user says.
        dims: the numbers of axes of one time step, where known.
    """
    arrays = [as_array(x) for x in inputs]
    given = tuple(np.ndim(a) for a in arrays)
    if sequence is None and dims is not None and given in (dims, tuple(d + 1 for d in dims)):
        sequence = given != dims

    def as_step() -> TorchStep:
        return TorchStep(model, rule, seed, arrays, form)

    def as_sequence() -> TorchStep:
        axis = 1 if wrap(model).batch_first else 0
        if min(given) <= max(axis, 1):
            raise InputError(
                f"Inputs of shapes {[tuple(a.shape) for a in arrays]} have no time and batch axes, "
                "so they are not a sequence."
            )
        if not all(a.shape[axis] for a in arrays):
            raise InputError("The sequence has no time steps.")
        return TorchStep(model, rule, seed, [a.take(0, axis) for a in arrays], form)

    if sequence is not None:
        return (as_sequence() if sequence else as_step()), sequence
    step, error = _attempt(as_step)
    could_be_sequence = any(
        np.ndim(a) > (1 if np.issubdtype(a.dtype, np.integer) else 2) for a in arrays
    )
    if step is not None and not (could_be_sequence and step.takes_sequences):
        return step, False
    other, _ = _attempt(as_sequence) if could_be_sequence else (None, None)
    if step is not None and other is not None:
        raise InputError(
            f"An input of shape {tuple(arrays[0].shape)} can be one time step of this model or a "
            "sequence. Say which: `online(x, sequence=True)` or `online(x, sequence=False)`."
        )
    if other is not None and other.takes_sequences:
        return other, True
    if step is None:
        raise error  # pyright: ignore[reportGeneralTypeIssues]
    return step, False


def _attempt(make: Callable[[], TorchStep]) -> tuple[TorchStep | None, Exception | None]:
    try:
        return make(), None
    except BridgeError as error:
        return None, error
    except Exception as error:  # the model's own code did not take the input
        made = InputError(f"The model cannot run on this input: {error}")
        made.__cause__ = error
        return None, made


def to_tensor(array: Any, device: torch.device) -> torch.Tensor:
    """A copy in torch's memory."""
    copy = np.array(array)
    if copy.dtype == jnp.bfloat16:
        return to_torch(copy).to(device)
    tensor = torch.from_numpy(copy)
    return tensor if device.type == "cpu" else tensor.to(device)
