"""Memory of a gradient program, as the compiler reports it, without running the program."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.online_core import OnlineCore
from etrace_bridge.learning.programs import ProgramSpec, make_gradients
from etrace_bridge.lowering import announcing, jit
from etrace_bridge.rules import Rule
from etrace_bridge.schedule.chunk_plan import divide


@dataclass(frozen=True)
class GradientProgram:
    """The compiled program of a sequence's gradients.

    Attributes:
        call: `(theta, (hidden, other), args, targets)` to gradients, losses and outputs.
        memory: bytes of arguments, results and temporary buffers together, inputs and targets
            aside.
    """

    call: Callable
    memory: int


def tree_bytes(tree: Any) -> int:
    """Return the bytes of arrays or shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def rule_bytes(compiled: CompiledStep, rule: Rule) -> int:
    """Return the bytes of a rule's own memory."""
    return tree_bytes(jax.eval_shape(lambda: rule.init(compiled.program)))


def compile_gradients(
    compiled: CompiledStep,
    rule: Rule,
    loss: Callable,
    args: Any,
    targets: Any,
    chunk: int,
    reduction: str = "mean",
) -> GradientProgram:
    """Compile a learner's gradient program for a sequence, and read how much memory it needs.

    Args:
        compiled: the compiled step.
        rule: the rule.
        loss: JAX callable.
        args: inputs `(T, …)`, as arrays or shapes.
        targets: targets, the same.
        chunk: steps in a chunk.
        reduction: over the steps' losses.
    """
    spec = ProgramSpec(OnlineCore(compiled, rule), loss, None, reduction, False)
    run = make_gradients(spec, divide(args[0].shape[0], chunk), carry=False)

    def call(theta, start, args, targets):
        return run(theta, (*start, None), args, targets, None)[:3]

    theta, _, _ = compiled.read()
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        (theta, compiled.initial, list(args), targets),
    )
    with announcing():
        program = jit(call, platform=compiled.platform).lower(*shapes).compile()
    found = program.memory_analysis()
    total = (
        found.argument_size_in_bytes
        + found.output_size_in_bytes
        + found.temp_size_in_bytes
        - found.alias_size_in_bytes
    )
    return GradientProgram(program, int(total) - tree_bytes((args, targets)))
