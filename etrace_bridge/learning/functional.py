"""`functional`: a model and a rule as pure JAX functions, whose gradient is the online gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import torch
from jax import lax

from etrace_bridge._errors import InputError
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.learning.bridging import as_brainstate
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.inputs import as_array, read_inputs
from etrace_bridge.learning.online_core import NamedCore, OnlineCarry, OnlineCore, Params
from etrace_bridge.rules import Rule, make_rule


@dataclass(frozen=True)
class Functional:
    """What `functional` returns; unpacks to `init, step`.

    Attributes:
        init: `init(params) -> carry`: initial states and a trace of zeros.
        step: `step(params, carry, *x) -> (output, carry)`: one time step.
        chunk: `chunk(params, carry, *xs) -> (outputs, carry)`: K time steps, K on the first axis of
            inputs and outputs.
        reset: `reset(carry, mask=None) -> carry`: initial states and a zero trace, for all or some
            batch elements.
        params: the model's weights by name, as `functional` found them.
        graph: the compiled graph.
        rule: the learning rule.
    """

    init: Callable[[Params], OnlineCarry]
    step: Callable[..., tuple[Any, OnlineCarry]]
    chunk: Callable[..., tuple[Any, OnlineCarry]]
    reset: Callable[..., OnlineCarry]
    params: dict[str, jax.Array]
    graph: ETraceGraph
    rule: Rule

    def __repr__(self) -> str:
        rule, count = self.rule.name or type(self.rule).__name__, len(self.params)
        return f"Functional({rule}, {count} weights: init, step, chunk, reset, params, graph)"

    def _repr_html_(self) -> str:
        return f"<div><code>{escape(repr(self))}</code>{self.graph._repr_html_()}</div>"

    def __iter__(self) -> Iterator[Callable]:
        return iter((self.init, self.step))


def functional(
    net: torch.nn.Module | brainstate.nn.Module,
    *x: Any,
    rule: str | Rule = "d_rtrl",
    seed: int | None = None,
) -> Functional:
    """Return a model under a learning rule as pure functions of arrays.

    `jax.grad` of any function of `step`'s output with respect to `params` is the online gradient of
    this step: the derivative of the step itself, plus that of the past through the trace in
    `carry`. The carry passes no derivative on, as if by `lax.stop_gradient`. The functions work
    under `jit`, `scan` and `vmap`, and with any optimizer.

    Args:
        net: a torch module, a `BridgedModule`, or any brainstate module.
        *x: one time step of each input, `(batch, …)`, for shapes and dtypes. For a torch model also
            dicts and tuples of them, and one dict by the names of `forward`'s arguments; `step` and
            `chunk` then take the same, or the tensors in order.
        rule: a rule's name or object, see `etrace_bridge.rules`.
        seed: seed of a torch model's random ops (default 0).

    Returns:
        A `Functional`, which unpacks to `init, step`.

    Example:
        >>> init, step = eb.functional(net, x, rule="d_rtrl")
        >>> def loss(params, carry, x, y):
        ...     out, carry = step(params, carry, x)
        ...     return jnp.mean((out - y) ** 2), carry
        >>> grads, carry = jax.grad(loss, has_aux=True)(params, carry, x, y)
    """
    compiled = compile_step(net, x, seed)
    made = make_rule(rule)
    core = NamedCore(OnlineCore(compiled, made))

    @jax.custom_vjp
    def run(params: Params, carry: OnlineCarry, args: list[Any]) -> tuple[Any, OnlineCarry]:
        return core.advance(params, carry, args)

    def forward(params: Params, carry: OnlineCarry, args: list[Any]):
        return core.advance(params, carry, args), (params, carry, args)

    def backward(kept: tuple, cotangents: tuple):
        params, carry, args = kept
        y_bar = [
            c
            for c, wanted in zip(jax.tree.leaves(cotangents[0]), core.float_outputs, strict=True)
            if wanted
        ]
        return (
            core.gradients(params, carry, args, y_bar),
            None,
            core.input_gradients(params, carry, args, y_bar),
        )

    run.defvjp(forward, backward)

    def init(params: Params) -> OnlineCarry:
        core.check_params(params)
        return core.start()

    def chunk(params: Params, carry: OnlineCarry, *xs: Any) -> tuple[Any, OnlineCarry]:
        args = [jnp.asarray(as_array(a)) for a in _tensors(compiled.net, xs)]
        core.check_inputs(args)
        output, new = run(dict(params), lax.stop_gradient(carry), args)
        return output, lax.stop_gradient(new)

    def step(params: Params, carry: OnlineCarry, *x: Any) -> tuple[Any, OnlineCarry]:
        args = [jnp.asarray(as_array(a))[None] for a in _tensors(compiled.net, x)]
        outputs, new = chunk(params, carry, *args)
        return jax.tree.map(lambda o: o[0], outputs), new

    return Functional(init, step, chunk, core.reset, core.params(), core.program.graph, made)


def compile_step(net: Any, x: tuple, seed: int | None = None) -> CompiledStep:
    """Return the compiled step of a torch or brainstate module for inputs like these."""
    net = as_brainstate(net, seed, "net")
    if not x:
        raise InputError("`functional` needs an example of one time step: `eb.functional(net, x)`.")
    return CompiledStep(net, [as_array(a) for a in _tensors(net, x)])


def _tensors(net: brainstate.nn.Module, x: tuple) -> tuple:
    return read_inputs(net, x[0] if len(x) == 1 and isinstance(x[0], dict) else x)
