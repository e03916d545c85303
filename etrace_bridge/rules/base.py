"""What a learning rule is: a small pure object that states an equation; the registry of rules.

Symbols used in all rule files, for step t:

- `h_t`: hidden states; `theta`: weights; `l_t`: loss of the step, already weighted;
- `D_t = dh_t/dh_(t-1)` through the core, position by position (see `compiler.positions`);
- `df_t`: how `h_t` depends on a contact's output, `x_t`: the contact's features, so `df_t ⊗ x_t` is
  the direct influence of a weight on `h_t`;
- `eps_t`: the eligibility trace, an approximation of `dh_t/dtheta`;
- `b_t = dl_t/dh_(t-1)`; B: batch, I: features, H: hidden size, P = H·I, S: states in a group, K:
  steps in a chunk.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import jax

from etrace_bridge._errors import InputError
from etrace_bridge.compiler.certificate import ParameterCertificate
from etrace_bridge.compiler.diagnostics import Path
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.step.program import StepProgram

EXACT, APPROXIMATE, TRUNCATED, NONE = "exact", "approximate", "truncated", "none"


@dataclass(frozen=True)
class Promise:
    """What a rule promises for one parameter's gradient, before anything is run.

    Attributes:
        kind: `"exact"`, `"approximate"`, `"truncated"` or `"none"` (no gradient).
        reason: why, for people.
    """

    kind: str
    reason: str


@dataclass(frozen=True)
class Chunk:
    """K steps of data.

    Attributes:
        args: the step's arguments, flat, each with K steps on its first axis.
        targets: the targets, a tree with K steps on the first axis; None for steps without a loss.
        weights: (K,) factors of the steps' losses.
        loss: `(output, target) -> scalar`; None for steps without a loss.
    """

    args: Sequence[jax.Array]
    targets: Any
    weights: jax.Array
    loss: Callable[[Any, Any], Any] | None


@dataclass(frozen=True)
class Carry:
    """What is passed from chunk to chunk.

    Attributes:
        hidden: hidden states, one array per leaf.
        other: other states.
        trace: the rule's own memory.
    """

    hidden: list[jax.Array]
    other: list[jax.Array]
    trace: Any


@dataclass(frozen=True)
class ChunkResult:
    """The result of a chunk.

    Attributes:
        grads: gradient of the weighted losses, one array per weight; None without a loss.
        losses: (K,) unweighted losses; None without a loss.
        outputs: the model's outputs, K on the first axis.
        carry: states and trace after the chunk.
        factors: arrays that the guard may watch instead of the gradients, which then need not exist
            as arrays. The new memory, and the gradients of weights with a trace and no other use,
            are sums of products of these and the memory before. None if there are no such arrays.
        discarded: as in `ReverseRule.discarded`; None where the rule does not know.
    """

    grads: list[jax.Array] | None
    losses: Any  # jax.Array, or None without a loss
    outputs: Any
    carry: Carry
    factors: Any = None
    discarded: Any = None


@dataclass(frozen=True)
class Rule:
    """Base of all rules; a rule is a frozen dataclass of options.

    There are two kinds. A `TraceRule` (rules/trace_rule.py) states a linear recursion, and the
    scheduler runs it. A `ReverseRule` is exact inside a chunk and says what it carries over from
    chunk to chunk. All methods are pure and are traced by `jax.jit`.

    Attributes:
        name: what `rule=` accepts.
        truncates: credit stops where a chunk begins, so that `chunk="auto"` is the whole sequence.
        follows_states: the memory of a batch element does not change if its states do not.
        own_signal: the rule replaces the loss's derivative, also for weights outside the
            recurrence.
        needs_loss: the gradient is not linear in the loss's derivative by the outputs, or reads
            values of the loss, so the rule needs a learner that knows the loss.
        needs_slope: the rule learns from derivatives of the loss, so a loss without one is refused.
        mixes_batch: what a batch element adds to the gradient depends on the others, by a random
            draw or a prediction for all of them.
    """

    name: ClassVar[str] = ""
    truncates: ClassVar[bool] = False
    follows_states: ClassVar[bool] = False
    needs_loss: ClassVar[bool] = False
    needs_slope: ClassVar[bool] = True
    mixes_batch: ClassVar[bool] = False

    @property
    def own_signal(self) -> bool:
        return False

    @property
    def schedule(self) -> str:
        """How the scheduler goes over the steps of a chunk.

        `"reverse"`: by reverse mode, all steps at once. `"backward"`: in blocks of steps, latest
        first, the memory being read and written once. `"forward"`: in blocks, each of which leaves
        nothing behind but the memory, so that a chunk of any length takes the same room.
        """
        raise InputError(
            f"The rule `{type(self).__name__}` is neither a `TraceRule` nor a `ReverseRule`; "
            "derive it from one of them."
        )

    @property
    def keeps_activations(self) -> bool:
        """Whether a chunk takes the room of all its steps' activations, as reverse mode does."""
        return self.schedule == "reverse"

    def variants(self) -> Iterator[Rule]:
        """Yield the rule with different amounts of memory, most faithful first, for `recommend`."""
        yield self

    def init(self, program: StepProgram) -> Any:
        """Return the memory before the first step: arrays of zeros."""
        raise InputError(
            f"The rule `{type(self).__name__}` does not define `init(program)`, "
            "which makes its memory. Define it."
        )

    def unit_axes(self, program: StepProgram) -> Any:
        """Return the axis of units of each array of the memory, in a tree like that of `init`.

        Along it a mesh may divide the memory. None: it follows the batch axis in all of them.
        """
        return None

    def reset(self, program: StepProgram, memory: Any, keep: jax.Array) -> Any:
        """Return the memory with the rows of some batch elements set to zero.

        `keep` is (B,) of zeros and ones.
        """
        raise InputError(
            f"The rule `{type(self).__name__}` cannot reset single batch elements. "
            "Call `reset()` without a mask, or define `reset(program, memory, keep)` in the rule."
        )

    def promise(self, certificate: ParameterCertificate, length: int, chunk: int) -> Promise:
        """Return what the rule promises for a parameter that reaches a state.

        Args:
            certificate: what the compiler knows about the parameter.
            length: steps in the sequence.
            chunk: steps in a chunk.
        """
        return Promise(
            APPROXIMATE,
            f"`{self.name or type(self).__name__}` makes no promise; {certificate.reason}",
        )

    def promises(self, graph: ETraceGraph, length: int, chunk: int) -> dict[Path, Promise]:
        """Return what the rule promises for each parameter that a step uses.

        Arguments as in `promise`.
        """
        found = {}
        for path, certificate in graph.certificate().items():
            if certificate.kind == "unused":
                found[path] = Promise(NONE, certificate.reason)
            elif certificate.kind == "direct" and not self.own_signal:
                found[path] = Promise(EXACT, certificate.reason)
            else:
                found[path] = self.promise(certificate, length, chunk)
        return found


class ReverseRule(Rule):
    """Base of rules that run reverse mode inside a chunk and carry a memory to the next chunk.

    They are exact inside a chunk.
    """

    @property
    def schedule(self) -> str:
        return "reverse"

    def past(
        self, program: StepProgram, theta: Sequence[jax.Array], memory: Any, h0: Sequence[jax.Array]
    ) -> dict[int, jax.Array]:
        """Return the gradient through what came before the chunk, by index of the weight.

        Args:
            program: the step.
            theta: the weights.
            memory: the rule's memory before the chunk.
            h0: cotangent of the hidden states before the chunk, one array per leaf.
        """
        return {}

    def future(
        self, program: StepProgram, memory: Any, hidden: Sequence[jax.Array]
    ) -> Sequence[jax.Array] | None:
        """Predict the cotangents of the chunk's last hidden states from losses after the chunk.

        One cotangent per leaf; None for rules that make no prediction. Not called while the memory
        is zero.
        """
        return None

    def discarded(self, program: StepProgram, memory: Any | None, h0: Sequence[jax.Array]) -> Any:
        """Return how much the rule left out of the chunk's gradient: an array of two numbers.

        The first is the estimated square of the error's norm, the second a bound of the norm. None
        for rules that do not know. Arguments as in `past`; `memory` is None where it is still zero.
        """
        return None

    def advance(
        self,
        program: StepProgram,
        theta: Sequence[jax.Array],
        carry: Carry,
        data: Chunk,
        memory: Any | None,
    ) -> Any:
        """Return the memory after the chunk; `memory` is None where it is still zero."""
        raise InputError(
            f"The rule `{type(self).__name__}` does not define `advance(...)`, "
            "which carries its memory over a chunk. Define it."
        )


_RULES: dict[str, type[Rule]] = {}


def register_rule(rule: type[Rule]) -> type[Rule]:
    """Add a rule class under its `name`; usable as a decorator.

    Example:
        >>> @register_rule
        ... @dataclass(frozen=True)
        ... class MyRule(DRTRL):
        ...     name = "my_rule"
    """
    if not rule.name:
        raise InputError(
            f"The rule `{rule.__name__}` needs a `name`, by which users select it, "
            "such as `name = 'my_rule'`."
        )
    _RULES[rule.name] = rule
    return rule


def rule_names() -> tuple[str, ...]:
    """Return the names that `rule=` accepts."""
    return tuple(_RULES)


def make_rule(rule: str | Rule) -> Rule:
    """Make a rule from its name; a rule is returned as it is.

    A name may be followed by options: `"low_rank:rank=2:hops=1"` is `LowRankRTRL(rank=2, hops=1)`.
    """
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, type) and issubclass(rule, Rule):
        return rule()
    name, *options = str(rule).split(":")
    if name not in _RULES:
        near = difflib.get_close_matches(name, _RULES, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"There is no rule {name!r}.{meant} Known rules: {', '.join(sorted(_RULES))}."
        )
    return _RULES[name](**dict(_read_option(_RULES[name], text) for text in options))


def rule_text(rule: Rule) -> str:
    """Return the text that `make_rule` reads as this rule: its name and its changed options."""
    changed = (
        f":{f.name}={getattr(rule, f.name)}"
        for f in fields(rule)
        if f.init and getattr(rule, f.name) != f.default
    )
    return (rule.name or type(rule).__name__) + "".join(changed)


def _read_option(rule: type[Rule], text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    known = [f.name for f in fields(rule) if f.init]
    if name not in known:
        raise InputError(
            f"The rule `{rule.name}` has no option {name!r}. Its options: "
            f"{', '.join(known) or 'none'}; write them as `{rule.name}:option=value`."
        )
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # text, such as credit=core


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise unless an option has one of its values."""
    if value not in allowed:
        raise InputError(
            f"`{name}` is {value!r}; it must be one of {', '.join(map(repr, allowed))}."
        )


def check_decay(name: str, value: float) -> None:
    """Raise unless an option is a decay: at least 0 and below 1."""
    if not 0 <= value < 1:
        raise InputError(f"`{name}` is {value}; it must be at least 0 and below 1.")
