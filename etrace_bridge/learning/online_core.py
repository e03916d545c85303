"""One compiled step and one learning rule as pure functions: the only way from the learner and its
siblings to the engine.

`OnlineCore` works on lists of arrays in the program's order; the learner's programs and `export`
are written on it. `NamedCore` gives the same by name, for `functional` and `OnlineModule`. There
the loss is not part of the program: a caller that knows the cotangents `ȳ_t` of the outputs asks
for the online gradient of the linear loss `sum of <ȳ_t, y_t>`. Every rule that may be used so is
linear in the derivative of the loss, so this is the gradient of any loss with that derivative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from etrace_bridge._errors import InputError
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.inputs import show_signature
from etrace_bridge.rules import Carry, Chunk, ChunkResult, Rule
from etrace_bridge.schedule.chunk import run_chunk
from etrace_bridge.schedule.chunk_plan import ChunkPlan, choose_chunk, divide
from etrace_bridge.schedule.sequence import run_sequence
from etrace_bridge.step.reverse import scan_steps

Params = Mapping[str, Any]


class OnlineCore:
    """Runs a compiled step under a rule. Every method is pure and may be traced by JAX.

    Arrays of several steps have time on their first axis.

    Args:
        compiled: the compiled step.
        rule: the learning rule.
    """

    def __init__(self, compiled: CompiledStep, rule: Rule) -> None:
        self.compiled, self.rule, self.program = compiled, rule, compiled.program
        self.unit_axes = rule.unit_axes(self.program)
        self._plans: dict[tuple, ChunkPlan] = {}

    def plan(self, length: int, chunk: int | str, budget: int | None = None) -> ChunkPlan:
        """How a sequence is divided into chunks."""
        key = length, repr(chunk), budget
        if key not in self._plans:
            self._plans[key] = divide(
                length, choose_chunk(self.program, self.rule, length, chunk, budget)
            )
        return self._plans[key]

    def tuned_for(self, platform: str) -> OnlineCore:
        """The same for another kind of device."""
        return OnlineCore(self.compiled.tuned_for(platform), self.rule)

    # -- the engine -------------------------------------------------------------------------------

    def chunk(
        self, theta: Sequence[Any], carry: Carry, data: Chunk, fresh: bool, final: bool
    ) -> ChunkResult:
        """Run the rule on one chunk."""
        return run_chunk(self.rule, self.program, theta, carry, data, fresh, final)

    def sequence(
        self,
        theta: Sequence[Any],
        carry: Carry,
        data: Chunk,
        plan: ChunkPlan,
        fresh: bool,
        final: bool,
    ) -> tuple[Any, Any, Any, Carry, Any]:
        """Run the rule on a sequence; arguments as in `run_sequence`.

        Returns:
            Summed gradients, losses, outputs, the carry after it, and what the rule left out of the
            gradients, as in `ReverseRule.discarded`.
        """

        def chunk(state: tuple, part: tuple, fresh: bool, final: bool):
            result = self.chunk(theta, Carry(*state), Chunk(*part, loss=data.loss), fresh, final)
            new, rows = result.carry, None
            # A row per step, as losses are joined: the first one is the chunk's
            if result.discarded is not None:
                rows = (
                    jnp.zeros((part[0][0].shape[0], 2), result.discarded.dtype)
                    .at[0]
                    .set(result.discarded)
                )
            return (
                result.grads,
                (result.losses, rows),
                result.outputs,
                (new.hidden, new.other, new.trace),
            )

        state = carry.hidden, carry.other, carry.trace
        arrays = list(data.args), data.targets, data.weights
        grads, (losses, rows), outputs, state = run_sequence(
            chunk, state, arrays, plan, fresh, final
        )
        return grads, losses, outputs, Carry(*state), None if rows is None else jnp.sum(rows, 0)

    # -- states -----------------------------------------------------------------------------------

    def zero_trace(self) -> Any:
        """The rule's memory before the first step."""
        return self.rule.init(self.program)

    def begin(self, start: tuple[Sequence[Any], Sequence[Any]], other: Sequence[Any]) -> Carry:
        """States and trace before a sequence: initial ones, save for what belongs to the model,
        which stays as in `other`.
        """
        return Carry(list(start[0]), self.compiled.join_other(start[1], other), self.zero_trace())

    def reset_elements(
        self, carry: Carry, start: tuple[Sequence[Any], Sequence[Any]], gone: Any
    ) -> Carry:
        """Initial states and a zero trace for the batch elements that `gone` (batch,) picks; a
        trace of None stays None.
        """
        batch = self.compiled.batch
        if gone.shape != (batch,):
            wanted = (
                "there is no batch axis"
                if batch is None
                else f"it must be ({batch},), one entry per batch element"
            )
            raise InputError(f"`mask` has shape {gone.shape}; {wanted}.")
        gone = gone.astype(bool)

        def put_back(old: Any, new: Any) -> Any:
            return jnp.where(gone.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

        other = [
            put_back(now, new) if resets and now.ndim and now.shape[0] == batch else now
            for now, new, resets in zip(carry.other, start[1], self.compiled.resets, strict=True)
        ]
        trace = carry.trace
        if trace is not None:
            dtype = self.program.weight_vars[0].aval.dtype
            trace = self.rule.reset(self.program, trace, 1 - gone.astype(dtype))
        return Carry(
            [put_back(old, new) for old, new in zip(carry.hidden, start[0], strict=True)],
            other,
            trace,
        )


class OnlineCarry(NamedTuple):
    """What goes from one step to the next: a pytree of arrays.

    Attributes:
        hidden: hidden states by name.
        other: other arrays that a step carries, by name: running statistics, frozen weights, random
            keys.
        trace: the rule's memory; None stands for a memory of zeros that need not be read.
    """

    hidden: dict[str, Any]
    other: dict[str, Any]
    trace: Any


class NamedCore:
    """`OnlineCore` by name, and for cotangents in place of a loss. Every method is pure and may be
    traced by JAX.

    Args:
        core: the step and its rule.
    """

    def __init__(self, core: OnlineCore) -> None:
        if core.rule.needs_loss:
            raise InputError(
                f"The rule `{core.rule.name}` needs the loss, and here only the loss's derivative "
                "by the outputs is known. Use `OnlineLearner`, which is given the loss, or another "
                "rule."
            )
        self.core, self.compiled, self.program = core, core.compiled, core.program
        self.float_outputs = tuple(
            jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in self.program.out_vars
        )

    # -- the engine -------------------------------------------------------------------------------

    def _run(
        self,
        params: Params,
        carry: OnlineCarry,
        args: Sequence[Any],
        cotangents: Any,
        plan: ChunkPlan | None,
        final: bool,
    ):
        """Gradients (None without cotangents), outputs and the carry after the steps."""
        theta, steps, fresh = self._theta(params), args[0].shape[0], carry.trace is None
        trace = self.core.zero_trace() if fresh else carry.trace
        loss = None if cotangents is None else self._linear_loss
        data = Chunk(args, cotangents, jnp.ones(steps, theta[0].dtype), loss)
        start = Carry(*self._states(carry), trace)
        grads, _, outputs, new, _ = self.core.sequence(
            theta, start, data, plan or divide(steps, steps), fresh, final
        )
        named = None if grads is None else self.compiled.by_weight_name(grads)
        return named, outputs, self._named(new)

    def advance(
        self, params: Params, carry: OnlineCarry, args: Sequence[Any], plan: ChunkPlan | None = None
    ) -> tuple[Any, OnlineCarry]:
        """Outputs, and states and trace after the steps."""
        _, outputs, carry = self._run(params, carry, args, None, plan, False)
        return outputs, carry

    def infer(
        self, params: Params, carry: OnlineCarry, args: Sequence[Any]
    ) -> tuple[Any, OnlineCarry]:
        """Outputs and states after the steps; the trace is zero afterwards, as for states that
        torch made under `no_grad`.
        """
        outputs, hidden, other = scan_steps(
            self.program, self._theta(params), *self._states(carry), list(args)
        )
        return outputs, self._named(Carry(list(hidden), list(other), None))

    def gradients(
        self,
        params: Params,
        carry: OnlineCarry,
        args: Sequence[Any],
        cotangents: Sequence[Any],
        plan: ChunkPlan | None = None,
    ):
        """The online gradient by name, from the carry before the steps and the cotangents of their
        floating-point outputs.
        """
        return self._run(params, carry, args, list(cotangents), plan, True)[0]

    def learn(
        self,
        params: Params,
        carry: OnlineCarry,
        args: Sequence[Any],
        cotangents: Sequence[Any],
        plan: ChunkPlan | None = None,
    ):
        """`gradients`, and the carry after the steps as `advance` gives it, in one pass."""
        grads, _, carry = self._run(params, carry, args, list(cotangents), plan, False)
        return grads, carry

    def input_gradients(
        self, params: Params, carry: OnlineCarry, args: Sequence[Any], cotangents: Sequence[Any]
    ) -> list[Any]:
        """Gradient of each input, None for integers: reverse mode through these steps, with the
        states before them fixed.
        """
        places = [n for n, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.inexact)]
        theta, states = self._theta(params), self._states(carry)

        def outputs_of(floats: Sequence[Any]) -> list[Any]:
            given = list(args)
            for n, value in zip(places, floats, strict=True):
                given[n] = value
            return self._float_leaves(scan_steps(self.program, theta, *states, given)[0])

        _, pull = jax.vjp(outputs_of, [args[n] for n in places])
        by_place = dict(zip(places, pull(list(cotangents))[0], strict=True))
        return [by_place.get(n) for n in range(len(args))]

    # -- states -----------------------------------------------------------------------------------

    def start(self) -> OnlineCarry:
        """Initial states and a trace of zeros."""
        hidden, other = self._start()
        return self._named(Carry(hidden, other, self.core.zero_trace()))

    def reset(self, carry: OnlineCarry, mask: Any = None) -> OnlineCarry:
        """Initial states and a zero trace for all batch elements, or for those that `mask` (batch,)
        picks.

        What belongs to the model rather than to a sequence (running statistics, the random key)
        stays.
        """
        start = self._start()
        hidden, other = self._states(carry)
        if mask is None:
            return self._named(self.core.begin(start, other))
        return self._named(
            self.core.reset_elements(Carry(hidden, other, carry.trace), start, jnp.asarray(mask))
        )

    def _start(self) -> tuple[list[Any], list[Any]]:
        return jax.tree.map(jnp.asarray, self.compiled.initial)

    # -- checks -----------------------------------------------------------------------------------

    def params(self) -> dict[str, Any]:
        """The model's weights of now, by name."""
        return self.compiled.by_weight_name(self.compiled.read()[0])

    def check_params(self, params: Params) -> None:
        """Raise unless `params` holds the weights that the step reads."""
        names = self.compiled.weight_names
        if set(params) != set(names):
            missing, unexpected = sorted(set(names) - set(params)), sorted(set(params) - set(names))
            parts = [
                f"{what}: {', '.join(which)}"
                for what, which in (("missing", missing), ("unexpected", unexpected))
                if which
            ]
            raise InputError(
                f"`params` does not hold the weights that the step reads ({'; '.join(parts)})."
            )

    def check_inputs(self, args: Sequence[Any]) -> None:
        """Raise unless these are K steps of the inputs that the step was compiled for."""
        given, wanted = (
            tuple((tuple(a.shape[1:]), str(a.dtype)) for a in args),
            self.compiled.signature,
        )
        if given != wanted or len({a.shape[0] for a in args}) != 1:
            raise InputError(
                f"One time step of this input is {show_signature(given)}, but the step was "
                f"compiled for {show_signature(wanted)}. Give inputs of that shape and dtype, or "
                "compile the model for these."
            )

    # -- names and lists --------------------------------------------------------------------------

    def _theta(self, params: Params) -> list[Any]:
        self.check_params(params)
        return [params[name] for name in self.compiled.weight_names]

    def _states(self, carry: OnlineCarry) -> tuple[list[Any], list[Any]]:
        """Hidden and other arrays in the program's order; dicts that went through JAX are sorted by
        name.
        """
        return [carry.hidden[n] for n in self.compiled.hidden_names], [
            carry.other[n] for n in self.compiled.other_names
        ]

    def _named(self, carry: Carry) -> OnlineCarry:
        hidden = dict(zip(self.compiled.hidden_names, carry.hidden, strict=True))
        return OnlineCarry(
            hidden, dict(zip(self.compiled.other_names, carry.other, strict=True)), carry.trace
        )

    def _float_leaves(self, output: Any) -> list[Any]:
        return [
            x
            for x, wanted in zip(jax.tree.leaves(output), self.float_outputs, strict=True)
            if wanted
        ]

    def _linear_loss(self, output: Any, cotangents: Sequence[Any]) -> Any:
        """`<ȳ, y>` of one step, real: with complex outputs its real part, as `jax.vjp` pairs them."""
        leaves = self._float_leaves(output)
        if not leaves:
            raise InputError(
                "The model's output has no floating-point values, so no loss of it has a gradient."
            )
        return sum(jnp.sum(y_bar * y).real for y_bar, y in zip(cotangents, leaves, strict=True))
