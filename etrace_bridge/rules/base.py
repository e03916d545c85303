"""What a learning rule is: a small pure object with `init` and `chunk`; and the registry of rules by name.

Symbols used in all rule files, for step t:

- `h_t`: hidden states; `theta`: weights; `l_t`: loss of the step, already weighted;
- `D_t = dh_t/dh_(t-1)` through the core, position by position (see `compiler.positions`);
- `df_t`: how `h_t` depends on a contact's output, `x_t`: the contact's features, so `df_t ⊗ x_t` is the direct
  influence of a weight on `h_t`;
- `eps_t`: the eligibility trace, an approximation of `dh_t/dtheta`;
- `b_t = dl_t/dh_(t-1)`; B: batch, I: features, H: hidden size, P = H·I, S: states in a group, K: steps in a chunk.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from etrace_bridge._errors import InputError
from etrace_bridge.compiler.hidden_group import HiddenGroup
from etrace_bridge.engine.program import StepProgram


@dataclass(frozen=True)
class Chunk:
    """K steps of data.

    Attributes:
        args: the step's arguments, flat, each with K steps on its first axis.
        targets: the targets, a tree with K steps on the first axis; None for steps without a loss.
        weights: (K,) factors of the steps' losses.
        loss: `(output, target) -> scalar`; None for steps without a loss.
    """

    args: Sequence[Any]
    targets: Any
    weights: Any
    loss: Callable[[Any, Any], Any] | None


@dataclass(frozen=True)
class Carry:
    """What goes from chunk to chunk.

    Attributes:
        hidden: hidden states, one array a leaf.
        other: other states.
        trace: the rule's own memory.
    """

    hidden: list[Any]
    other: list[Any]
    trace: Any


@dataclass(frozen=True)
class ChunkResult:
    """What a chunk gives back.

    Attributes:
        grads: gradient of the weighted losses, one array a weight; None without a loss.
        losses: (K,) unweighted losses; None without a loss.
        outputs: the model's outputs, K on the first axis.
        carry: states and trace after the chunk.
        factors: arrays of which, with the memory before, the new memory and the gradients of weights with a trace and no other use are
            sums of products. The guard may watch these in place of the gradients, which then need not exist as arrays. None: there are none
            to name.
    """

    grads: list[Any] | None
    losses: Any
    outputs: Any
    carry: Carry
    factors: Any = None


class Rule:
    """Base of all rules; a rule is a frozen dataclass of options.

    `init` makes the rule's memory, `chunk` advances K steps. Both are pure and are traced by `jax.jit`; which parts of
    the memory matter is said by two flags: `fresh` (the memory is all zeros, so it need not be read) and `final` (the
    memory is not wanted afterwards, so it need not be written).
    """

    name: ClassVar[str] = ""

    @property
    def passes(self) -> str:
        """How `chunk` goes over its steps, from which `chunk="auto"` knows what a chunk costs.

        `"whole"`: all at once. `"blocks"`: in blocks (`engine.blocks`), so that longer chunks fit into the same memory. `"stream"`: in
        blocks, none of which leaves anything behind but the rule's memory, so that a chunk of any length takes the same room.
        """
        return "whole"

    def init(self, program: StepProgram) -> Any:
        """The memory before the first step."""
        raise InputError(f"The rule `{type(self).__name__}` does not define `init(program)`.")

    def chunk(self, program: StepProgram, theta: Sequence[Any], carry: Carry, data: Chunk, fresh: bool, final: bool) -> ChunkResult:
        """Advances K steps; returns their gradient and the new memory."""
        raise InputError(f"The rule `{type(self).__name__}` does not define `chunk(...)`.")

    def reset(self, program: StepProgram, trace: Any, keep: Any) -> Any:
        """The memory with the rows of some batch elements set to zero; `keep` is (B,) of zeros and ones."""
        raise InputError(f"The rule `{type(self).__name__}` cannot reset single batch elements.")


_RULES: dict[str, type[Rule]] = {}


def register_rule(rule: type[Rule]) -> type[Rule]:
    """Adds a rule class under its `name`; usable as a decorator.

    Example:
        >>> @register_rule
        ... @dataclass(frozen=True)
        ... class MyRule(DRTRL):
        ...     name = "my_rule"
    """
    if not rule.name:
        raise InputError(f"The rule `{rule.__name__}` needs a `name`, under which users ask for it.")
    _RULES[rule.name] = rule
    return rule


def rule_names() -> tuple[str, ...]:
    """The names that `rule=` accepts."""
    return tuple(_RULES)


def make_rule(rule: str | Rule) -> Rule:
    """A rule from its name, or the rule itself."""
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, type) and issubclass(rule, Rule):
        return rule()
    if rule not in _RULES:
        near = difflib.get_close_matches(str(rule), _RULES, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(f"There is no rule {rule!r}.{meant} Known rules: {', '.join(sorted(_RULES))}.")
    return _RULES[rule]()


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises unless an option has one of its values."""
    if value not in allowed:
        raise InputError(f"`{name}` is {value!r}; it must be one of {', '.join(map(repr, allowed))}.")


def check_batch_axis(group: HiddenGroup, keep: Any) -> None:
    """Raises unless the batch is the first axis of a group's states."""
    if not group.varshape or group.varshape[0] != keep.shape[0]:
        raise InputError(
            f"The hidden state `{group.name}` has shape {group.varshape}, so its first axis is not the batch of {keep.shape[0]}. "
            "Single batch elements can only be reset where the batch comes first; call `reset()` without a mask."
        )


def batch_rows(places: Any, places_per_row: int, keep: Any) -> Any:
    """`keep` spread to elements whose places are numbered row by row; elements that feed nothing are kept as zero."""
    rows = jnp.asarray(places) // places_per_row
    return jnp.where(jnp.asarray(places) >= 0, jnp.take(keep, jnp.maximum(rows, 0)), 0)
