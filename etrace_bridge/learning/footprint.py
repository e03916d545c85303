"""Memory of a gradient program, as XLA counts it for the compiled program, without running it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from etrace_bridge._errors import InputError
from etrace_bridge._jit import jit
from etrace_bridge.engine.plan import divide
from etrace_bridge.learning.programs import Recipe, make_gradients
from etrace_bridge.learning.session import Session
from etrace_bridge.rules import Rule

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(budget: int | float | str) -> int:
    """A number of bytes from a number or from text such as `"500MB"` or `"2 GiB"`."""
    if isinstance(budget, str):
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", budget)
        if found is None or found[2].lower() not in _UNITS:
            raise InputError(f"`budget` is {budget!r}; write a number of bytes, or one with a unit such as '500MB' or '2GiB'.")
        budget = float(found[1]) * _UNITS[found[2].lower()]
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0 or not math.isfinite(budget):
        raise InputError(f"`budget` is {budget!r}; it must be a positive number of bytes.")
    return int(budget)


@dataclass(frozen=True)
class GradientProgram:
    """The compiled program of a sequence's gradients.

    Attributes:
        call: `(theta, (hidden, other), args, targets)` to gradients, losses and outputs.
        memory: bytes of arguments, results and temporary buffers together, inputs and targets aside.
    """

    call: Callable
    memory: int


def tree_bytes(tree: Any) -> int:
    """Bytes of arrays or shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def rule_bytes(session: Session, rule: Rule) -> int:
    """Bytes of a rule's own memory."""
    return tree_bytes(jax.eval_shape(lambda: rule.init(session.program)))


def compile_gradients(
    session: Session, rule: Rule, loss: Callable, args: Any, targets: Any, chunk: int, reduction: str = "mean"
) -> GradientProgram:
    """Compiles a learner's gradient program for a sequence and asks XLA what it needs.

    Args:
        session: the compiled step.
        rule: the rule.
        loss: JAX callable.
        args: inputs `(T, …)`, as arrays or shapes.
        targets: targets, the same.
        chunk: steps in a chunk.
        reduction: over the steps' losses.
    """
    recipe = Recipe(session.program, rule, loss, None, tuple(session.weight_names), tuple(session.resets), reduction, False)
    run = make_gradients(recipe, divide(args[0].shape[0], chunk), carry=False)

    def call(theta, start, args, targets):
        return run(theta, (*start, None), args, targets, None)[:3]

    theta, _, _ = session.read()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (theta, session.initial, list(args), targets))
    compiled = jit(call).lower(*shapes).compile()
    found = compiled.memory_analysis()
    total = found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes - found.alias_size_in_bytes
    return GradientProgram(compiled, int(total) - tree_bytes((args, targets)))
