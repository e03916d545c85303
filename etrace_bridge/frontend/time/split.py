"""One step of a model that consumes whole sequences, found in the programs of a few short
sequences.

`forward` is traced for one length, and taken apart into single-step values (`sequences`). A minimum
cut between two steps gives the state (`cut`). Then all steps are read side by side: what stands at
the same place of the outputs at step t and at step t + 1 is the same value one step later, so the
state's next value, and its value before the first step, are known.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from etrace_bridge._errors import BridgeError, NotSupportedError
from etrace_bridge._jax_compat import JaxprEqn, user_line
from etrace_bridge.frontend.time.cut import find_cut
from etrace_bridge.frontend.time.graph import Node, keys_of

Column = tuple[Node | None, ...]  # one value, at step 1, 2, ...; None where it is not known


class TooShort(Exception):
    """The sequence is too short to see the state's next value."""


class UnlikeSteps(NotSupportedError):
    """Steps that do something else than the one that was read; those of a longer sequence may not."""


@dataclass
class State:
    """A value that is carried from step to step.

    Attributes:
        before: It, before the step that is read.
        after: It, after that step.
        column: It, before each step.
    """

    before: Node
    after: Node
    column: Column


@dataclass
class Split:
    """One step: how outputs and new states follow from inputs and old states.

    Attributes:
        step: The step that was read; its input nodes have this number.
        outputs: What it gives.
        first_outputs: What the first step gives.
        states: What it carries.
        keys: The random keys that it draws.
        first_is_alike: The first step does what later ones do, save for where the states start.
    """

    step: int
    outputs: list[Node]
    first_outputs: list[Node | None]
    states: list[State]
    keys: list[Node]
    first_is_alike: bool


def split_steps(
    outputs: Sequence[Column], step: int, named: set[int], avoided: Collection[int] = ()
) -> Split | None:
    """Find the states and the step.

    Args:
        outputs: Each output, step by step.
        step: The step to read, late enough to be like all later ones.
        named: `id`s of nodes that have a name in the code.
        avoided: `id`s of nodes that cannot be states.

    Returns:
        The step; None if there is none without the avoided nodes.
    """
    for column in outputs:
        _check_order(column)
    demands = [node for column in outputs for node in column[step - 1 :] if node is not None]
    cut = find_cut(demands, step, named, avoided)
    if cut is None:
        if avoided:
            return None
        raise TooShort
    _check_detached(demands, step)
    side_by_side = _SideBySide(step, {id(node) for node in cut})
    for column in outputs:
        side_by_side.visit(column)
    side_by_side.finish()
    here = [node for column in outputs if (node := column[step - 1]) is not None]
    return Split(
        step,
        here,
        [column[0] for column in outputs],
        list(side_by_side.states.values()),
        list(side_by_side.keys.values()),
        side_by_side.first_is_alike,
    )


def _check_order(column: Column) -> None:
    for step, node in enumerate(column, 1):
        if node is not None and node.level > step:
            raise looks_ahead(node, step)


def looks_ahead(node: Node, step: int) -> BridgeError:
    """The error for an output that depends on later inputs."""
    seen: set[int] = set()
    stack, joins = [node], []
    while stack:
        here = stack.pop()
        if id(here) in seen or here.level <= step:
            continue
        seen.add(id(here))
        if here.eqn is not None and (
            any(0 < o.level <= step for o in here.operands)
            or all(o.level <= step or o.kind == "input" for o in here.operands)
        ):
            joins.append(here)
        stack.extend(here.operands)
    # A causal convolution joins steps too, but not the earliest with the latest; a recurrence
    # joins neighbouring steps.
    whole = [
        n for n in joins if n.level == node.level and any(0 < o.level <= step for o in n.operands)
    ]
    far = [n for n in joins if max(o.level for o in n.operands) > _earliest(n) + 1]
    placed = ([n for n in suspects if place_of(n)] for suspects in (whole, far, joins))
    suspects = next(filter(None, (*placed, joins)), [node])
    culprit = min(suspects, key=lambda n: n.number)
    name = culprit.kind if culprit.eqn is not None else "the input"
    return NotSupportedError(
        f"The output at one step depends on later inputs: output {step} reads input {node.level}, "
        f"through `{name}`{place_of(culprit)}. An online learner has not seen those yet (a "
        "reversed or bidirectional pass, a centred convolution, attention or statistics over the "
        "whole sequence). Use only the past there (a running statistic, a causal convolution), or "
        "train this model offline with torch."
    )


def _earliest(node: Node) -> int:
    """The earliest step that an operand depends on, of those that depend on one."""
    return min((o.level for o in node.operands if o.level), default=0)


def _check_detached(demands: Sequence[Node], step: int) -> None:
    """Raise if what goes on to the next step is detached in some late steps and not in others:
    their values are alike, but their gradients are not.
    """
    seen: set[int] = set()
    stack, last = list(demands), max((node.level for node in demands), default=0)
    carried: list[Node] = []
    while stack:
        node = stack.pop()
        if id(node) not in seen and node.level >= step - 1:
            seen.add(id(node))
            stack.extend(node.operands)
            carried += [o for o in node.operands if step - 1 <= o.level < node.level]
    seen.clear()
    detached: dict[int, list[Node]] = {level: [] for level in range(step - 1, last)}
    while carried:
        node = carried.pop()
        if id(node) not in seen:
            seen.add(id(node))
            carried += [o for o in node.operands if o.level == node.level]
            if node.kind == "stop_gradient":
                detached[node.level].append(node)
    if len({len(nodes) for nodes in detached.values()}) > 1:
        raise unequal_detaching(next(nodes[0] for nodes in detached.values() if nodes))


def unequal_detaching(node: Node) -> BridgeError:
    """The error for a loop that detaches its state now and then."""
    return NotSupportedError(
        f"The loop over time detaches values at some steps and not at others{place_of(node)} "
        "(truncated backpropagation). One step is compiled for all steps, and its gradients would "
        "not be torch's. Leave it out, since a learner does not store the past, or detach at every "
        "step."
    )


def place_of(node: Node) -> str:
    """Describe where in the user's code a value is computed."""
    return "" if node.eqn is None else _line_of(node.eqn)


def _line_of(eqn: JaxprEqn) -> str:
    line = user_line(eqn, ("etrace_bridge/frontend", "/adapters/", "/torch/", "torch2jax"))
    return f" at {line}" if line else ""


class _SideBySide:
    """Reads all steps at once, from the outputs back to states and inputs."""

    def __init__(self, step: int, cut: set[int]) -> None:
        self.step, self.cut = step, cut
        self.states: dict[tuple[int, int], State] = {}
        self.keys: dict[int, Node] = {}
        self._seen: dict[tuple, Column] = {}
        self._waiting: list[tuple[int, int]] = []
        self.first_is_alike = True

    def visit(self, column: Column) -> None:
        """Follow a column, and say what it cannot be."""
        stack = [column]
        while stack:
            column = stack.pop()
            base = column[self.step - 1]
            if base is None:
                raise TooShort
            later = [node for node in column[self.step :] if node is not None]
            key = (id(base), *map(id, later), *[id(n) for n in column[: self.step - 1]])
            if key in self._seen:
                continue
            self._seen[key] = column
            if base.level == 0 and base.kind != "key" and all(node is base for node in later):
                # drawn once for the whole sequence, as a dropout mask over time: carried along
                if keys_of([base]):
                    self.states[id(base), id(base)] = State(base, base, column)
                continue
            if base.kind == "key" and all(node.kind == "key" for node in later):
                self.keys[id(base)] = base
            elif base.kind in ("constant", "tensor", "key"):
                raise counts_steps(base)
            elif id(base) in self.cut:
                self._add_state(base, later, column)
            elif base.kind == "input":
                self._check_input(base, later)
            else:
                for node in later:
                    if not base.like(node):
                        raise unequal_steps(base, node)
                first = column[0]
                self.first_is_alike &= first is None or base.like(first)
                early = [
                    node if node is not None and base.like(node) else None
                    for node in column[: self.step - 1]
                ]
                rows = [*early, *column[self.step - 1 :]]
                for place in range(len(base.operands)):
                    stack.append(
                        tuple(None if node is None else node.operands[place] for node in rows)
                    )

    def _check_input(self, base: Node, later: list[Node]) -> None:
        index, number = base.value
        for offset, node in enumerate(later, 1):
            if (
                node.kind != "input"
                or node.value != (index, number + offset)
                or number != self.step
            ):
                raise unequal_steps(base, node)

    def _add_state(self, base: Node, later: list[Node], column: Column) -> None:
        if not later:
            raise TooShort
        key = (id(base), id(later[0]))
        known = self.states.get(key)
        if known is None:
            self.states[key] = State(base, later[0], column)
            self._waiting.append(key)
        else:
            known.column = tuple(
                a if a is not None else b for a, b in zip(known.column, column, strict=True)
            )

    def finish(self) -> None:
        """Follow the states' next values until no state is new."""
        while self._waiting:
            state = self.states[self._waiting.pop(0)]
            self.visit((*state.column[1:], None))


def counts_steps(node: Node) -> BridgeError:
    """The error for a step that depends on its number."""
    return NotSupportedError(
        "The step depends on its number in the sequence: a constant differs from step to "
        f"step{place_of(node)} (a position table, a schedule, `t` in a formula, a division by the "
        "length). A step of an endless stream has no number. Leave it out, or pass it as a second "
        "input."
    )


def unequal_steps(a: Node, b: Node) -> UnlikeSteps:
    """The error for steps that are not alike."""
    return UnlikeSteps(
        f"The steps of the loop over time are not alike: `{a.kind}`{place_of(a)} at one step "
        f"stands where another step has `{b.kind}`{place_of(b)} (an `if` on the step's number, a "
        "clock, a list that grows). One step is compiled for all steps. Write the choice with "
        "tensors (`torch.where`), or pass what differs as an input."
    )


def check_joins(output: Node, joins: Mapping[int, tuple[Node, JaxprEqn]]) -> None:
    """Raise if an output is computed from all steps at once.

    Args:
        output: The output of the last step.
        joins: Arrays of all steps by `id`, and what reads them.
    """
    seen: set[int] = set()
    stack = [output]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            stack.extend(node.operands)
    found = [joins[key] for key in seen if key in joins]
    if not found:
        return
    _, eqn = min(found, key=lambda join: join[0].number)
    raise NotSupportedError(
        f"`{eqn.primitive.name}`{_line_of(eqn)} reads all steps of the sequence at once, and an "
        "online learner sees one after the other. Over time, these can be computed step by step: "
        "the last step, a sum or mean, the values of a maximum or minimum (not the step where it "
        "is), `cumsum` and its like. Use one of them, or train this model offline with torch."
    )


def fixed_output(model: str, index: int, output: Node, length: int) -> NotSupportedError:
    """The error for an output that a longer sequence does not change."""
    return NotSupportedError(
        f"Output {index} of `{model}.forward` is that of step {output.level}{place_of(output)}, for "
        f"sequences of {length - 1} steps as for those of {length}. A learner gets an output at "
        "every step, or that of the last one. Return all steps, and select the one that counts in "
        "the loss (`mask=`)."
    )


def grows(model: str, outputs: Sequence[Node]) -> NotSupportedError:
    """The error for an output that reads steps of any age."""
    seen: set[int] = set()
    stack, readings = list(outputs), []
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        stack.extend(node.operands)
        levels = [o.level for o in node.operands if o.level]
        if node.eqn is not None and levels:
            readings.append((min(levels) - node.level, node.number, node))
    _, _, node = min(readings, key=lambda reading: reading[:2])
    oldest = min(o.level for o in node.operands if o.level)
    return NotSupportedError(
        f"`{node.kind}`{place_of(node)}, in `{model}.forward`, reads a value of step {oldest} "
        f"together with one of step {node.level}, and the state would grow with the sequence. A "
        "step has a state of fixed size. What reads all past steps again (a variance, a softmax, "
        "logsumexp or attention over time, a list of all states, the first step's value) has none; "
        "sums, means, extrema and running totals over time have one: of `x` and `x ** 2` for a "
        "variance, of `exp(x)` for logsumexp."
    )
