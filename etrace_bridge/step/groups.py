"""The hidden groups of a step that matter, and the core as the engine differentiates it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etrace_bridge._jax_compat import Literal, Var
from etrace_bridge.compiler.core_equations import Core, build_core, held_operands
from etrace_bridge.compiler.graph import Leg
from etrace_bridge.compiler.hidden_group import HiddenGroup
from etrace_bridge.compiler.jaxpr import needed_equations
from etrace_bridge.compiler.primitives import is_float, passes_derivative
from etrace_bridge.step.taps import SUMS, StepTaps, Tap

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


@dataclass(frozen=True)
class StepGroups(StepTaps):
    """A step's equations and contacts, and its hidden groups.

    Attributes:
        groups: the groups whose states matter.
        colours: indices of `groups`, divided so that no two groups of one colour share a contact's
            piece.
        entries: for each tap, the variable by which it enters the core: its root, if that is a sum
            of such taps and of constants of the step; else the piece.
        core_inputs: the variables by which taps enter the core.
        core: the core from these inputs.
        depends: whether new leaf i depends on old leaf j through the core.
        saved_vars: products on the way to new states, which the forward pass hands to the
            recomputation: their pieces, or the sums that the pieces end up in. Other products, such
                as a readout's, are left to the parallel passes.
        first_taps: for each tap with legs, the first tap of the same root: it has the same
            cotangents. None without legs.
        pre_cut_operands: operands at which `credit="core"` stops, by equation id.
        weights_reach_pre_cuts: whether a value that `credit="core"` holds constant depends on
            weights within the step.
    """

    groups: tuple[HiddenGroup, ...]
    colours: tuple[tuple[int, ...], ...]
    entries: tuple[Var, ...]
    core_inputs: tuple[Var, ...]
    core: Core
    depends: dict[tuple[int, int], bool]
    saved_vars: tuple[Var, ...]
    first_taps: tuple[int | None, ...]
    pre_cut_operands: dict[int, tuple[int, ...]]
    weights_reach_pre_cuts: bool

    def group_index(self, leg: Leg) -> int:
        """Return the index in `groups` of the group that a leg feeds."""
        return next(n for n, g in enumerate(self.groups) if g.index == leg.group)

    def colour_of(self, leg: Leg) -> int:
        """Return the colour of the group that a leg feeds."""
        return next(c for c, members in enumerate(self.colours) if self.group_index(leg) in members)


def read_groups(step: StepTaps) -> StepGroups:
    """Find the groups that matter and how taps enter their core."""
    structure = step.graph.structure
    groups = tuple(
        g for g in step.graph.hidden_groups if any(v in structure.matter for v in g.hidden_invars)
    )
    entries = _entries(step, groups)
    core_inputs = tuple(dict.fromkeys(v for t, v in zip(step.taps, entries, strict=True) if t.legs))
    core = _core_from(step, groups, core_inputs)
    facts = structure.facts
    held: list[Any] = [step.eqns[i].invars[k] for i, k in facts.pre_cuts]
    return StepGroups(
        **vars(step),
        groups=groups,
        colours=_colours(step, groups),
        entries=entries,
        core_inputs=core_inputs,
        core=core,
        depends=_depends(step, core),
        saved_vars=_saved_vars(step, entries),
        first_taps=_first_taps(step),
        pre_cut_operands=held_operands(step.eqns, set(facts.pre_cuts)),
        weights_reach_pre_cuts=any(
            source[0] == "weight" for v in held for source in facts.at.get(v, {})
        ),
    )


def _colours(step: StepTaps, groups: Sequence[HiddenGroup]) -> tuple[tuple[int, ...], ...]:
    index = {g.index: n for n, g in enumerate(groups)}
    clashes: dict[int, set[int]] = {n: set() for n in index.values()}
    for t in step.taps:
        fed = [index[leg.group] for leg in t.legs]
        for a in fed:
            clashes[a].update(b for b in fed if b != a)
    colours: list[list[int]] = []
    for n in clashes:
        home = next((c for c in colours if not clashes[n].intersection(c)), None)
        if home is None:
            colours.append([n])
        else:
            home.append(n)
    return tuple(tuple(c) for c in colours)


def _entries(step: StepTaps, groups: Sequence[HiddenGroup]) -> tuple[Var, ...]:
    tapped = {t.part.var: t.index for t in step.taps if t.legs}
    core = _core_from(step, groups, list(tapped))
    moved = _reached(core, [*tapped, *(leaf.invar for leaf in step.leaves)])
    made_by = {v: eqn for eqn in core.eqns for v in eqn.outvars}

    def is_sum(v: Any, root: Var) -> bool:
        if isinstance(v, Literal) or v not in moved:
            return True
        if v in tapped:
            return step.roots[tapped[v]] is root
        eqn = made_by.get(v)  # none: an old state
        if eqn is None or eqn.primitive.name not in SUMS or id(eqn) in core.held:
            return False
        return all(is_sum(x, root) for x in eqn.invars)

    def entry(t: Tap, root: Var) -> Var:
        return root if root in made_by and is_sum(root, root) else t.part.var

    return tuple(entry(t, root) for t, root in zip(step.taps, step.roots, strict=True))


def _core_from(step: StepTaps, groups: Sequence[HiddenGroup], given: Sequence[Var]) -> Core:
    outvars = [v for g in groups for v in g.hidden_outvars]
    return build_core(step.eqns, step.graph.structure.alignment, outvars, given)


def _reached(core: Core, sources: Sequence[Var]) -> set[Var]:
    """Return what depends on these through the core."""
    reach = set(sources)
    for eqn in core.eqns:
        held = core.held.get(id(eqn), ())
        live = (
            v in reach
            for k, v in enumerate(eqn.invars)
            if k not in held and not isinstance(v, Literal)
        )
        if passes_derivative(eqn) and any(live):
            reach.update(v for v in eqn.outvars if is_float(v))
    return reach


def _depends(step: StepTaps, core: Core) -> dict[tuple[int, int], bool]:
    depends = {}
    for j in step.leaves:
        reach = _reached(core, [j.invar])
        for i in step.leaves:
            depends[i.index, j.index] = not isinstance(i.outvar, Literal) and i.outvar in reach
    return depends


def _saved_vars(step: StepTaps, entries: Sequence[Var]) -> tuple[Var, ...]:
    entry = {t.part.var: v for t, v in zip(step.taps, entries, strict=True) if t.legs}
    contacts = step.graph.structure.use.contacts
    pieces = {id(c.eqn): [entry.get(p.var, p.var) for p in c.parts] for c in contacts if c.parts}
    saved: list[Var] = []
    for eqn in needed_equations(step.eqns, step.new_vars):
        if eqn.primitive.name in _PRODUCTS and step.tier[eqn.outvars[0]] > 0:
            saved += pieces.get(id(eqn), eqn.outvars)
    return tuple(dict.fromkeys(saved))


def _first_taps(step: StepTaps) -> tuple[int | None, ...]:
    first: dict[Var, int] = {}
    for t in step.taps:
        if t.legs:
            first.setdefault(step.roots[t.index], t.index)
    return tuple(first[step.roots[t.index]] if t.legs else None for t in step.taps)
