"""One step, divided for the engine: what depends on weights, on inputs, and on states.

The three tiers of a step's equations:

- *weight tier*: weights and constants alone; runs once a chunk;
- *input tier*: the step's arguments, no state; runs in parallel over the K steps of a chunk;
- *state tier*: the rest; what new states need of it runs in scans over time, one for each level of states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var, bind_equation
from etrace_bridge.compiler.core import Core, build_core, held_operands
from etrace_bridge.compiler.graph import ETraceGraph, Leg
from etrace_bridge.compiler.hidden_group import HiddenGroup
from etrace_bridge.compiler.jaxpr import evaluate, needed_equations, read, variables
from etrace_bridge.compiler.positions import HiddenLeaf
from etrace_bridge.compiler.primitives import is_float, is_structural, passes_derivative
from etrace_bridge.compiler.views import Contact, Part
from etrace_bridge.engine.convolution import as_product
from etrace_bridge.engine.loop import turn_weights

_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
_SUMS = frozenset({"add", "add_any"})


@jax.custom_jvp
def with_value(computed: Any, value: Any) -> Any:
    """`value`, with the derivative of `computed`; what computes the latter is dead code after differentiation."""
    return value


@with_value.defjvp
def _with_value_jvp(primals, tangents):
    return primals[1], tangents[0]


@jax.custom_jvp
def tap(y: Any, delta: Any) -> Any:
    """`y`, with the derivative of `y + delta`: the cotangent of `delta` is that of `y`."""
    return y


@tap.defjvp
def _tap_jvp(primals, tangents):
    return primals[0], tangents[0] + tangents[1]


@dataclass(frozen=True)
class Tap:
    """A piece of a traced contact's output, and the legs that start from it."""

    index: int
    contact: Contact
    part: Part
    legs: tuple[Leg, ...]


@dataclass(frozen=True)
class StepProgram:
    """A compiled step with everything the engine needs to know about it, fixed before tracing.

    Attributes:
        graph: the compiled model.
    """

    graph: ETraceGraph

    # -- variables ---------------------------------------------------------------------------------------------

    @cached_property
    def eqns(self) -> list[JaxprEqn]:
        return list(self.graph.module_info.jaxpr.eqns)

    @cached_property
    def constants(self) -> dict[Var, Any]:
        info = self.graph.module_info
        return dict(zip(info.jaxpr.constvars, info.closed_jaxpr.consts, strict=True))

    @cached_property
    def arg_vars(self) -> list[Var]:
        info = self.graph.module_info
        return info.jaxpr.invars[: info.num_var_arg]

    @cached_property
    def out_vars(self) -> list[Any]:
        info = self.graph.module_info
        return info.jaxpr.outvars[: info.num_var_out]

    @cached_property
    def weight_vars(self) -> list[Var]:
        return list(self.graph.module_info.weight_invars)

    @cached_property
    def leaves(self) -> tuple[HiddenLeaf, ...]:
        return self.graph.structure.alignment.leaves

    @cached_property
    def other_vars(self) -> list[tuple[Var, Any]]:
        """(before, after) of states that are neither hidden nor parameters."""
        info = self.graph.module_info
        return [
            (i, o)
            for ins, outs in zip(info.state_tree_invars, info.state_tree_outvars, strict=True)
            for i, o in zip(ins, outs, strict=True)
            if i not in info.invar_to_weight_path and i not in info.invar_to_hidden_path
        ]

    @cached_property
    def new_vars(self) -> list[Any]:
        """What the step leaves: new hidden states, then new values of the other states."""
        return [leaf.outvar for leaf in self.leaves] + [o for _, o in self.other_vars]

    # -- tiers -------------------------------------------------------------------------------------------------

    @cached_property
    def tier(self) -> dict[Var, int]:
        """0: weights and constants, 1: inputs, 2: states."""
        tier = dict.fromkeys((*self.weight_vars, *self.constants), 0)
        tier.update((v, 1) for v in self.arg_vars)
        tier.update((leaf.invar, 2) for leaf in self.leaves)
        tier.update((i, 2) for i, _ in self.other_vars)
        for eqn in self.eqns:
            level = max((tier[v] for v in variables(eqn.invars)), default=0)
            tier.update((v, level) for v in eqn.outvars)
        return tier

    @cached_property
    def weight_eqns(self) -> list[JaxprEqn]:
        return [eqn for eqn in self.eqns if self.tier[eqn.outvars[0]] == 0]

    @cached_property
    def state_vars(self) -> list[Var]:
        """What the step starts from: old hidden states, then old values of the other states."""
        return [leaf.invar for leaf in self.leaves] + [i for i, _ in self.other_vars]

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The states, as places in `state_vars`, in the order in which whole sequences of them can be computed.

        States that depend on each other are in one level, and each level depends on earlier ones alone: a stack of recurrent
        layers has a level each.
        """
        by_var: dict[Var, frozenset[int]] = {v: frozenset([n]) for n, v in enumerate(self.state_vars)}
        for eqn in self.eqns:
            read_by = frozenset().union(*(by_var.get(v, frozenset()) for v in variables(eqn.invars)))
            by_var.update(dict.fromkeys(eqn.outvars, read_by))
        needs = [{n} | set(() if isinstance(v, Literal) else by_var.get(v, ())) for n, v in enumerate(self.new_vars)]
        for m in range(len(needs)):  # and what those need
            for own in needs:
                own |= needs[m] if m in own else set()
        depth: dict[int, int] = {}
        for n in sorted(range(len(needs)), key=lambda n: len(needs[n])):
            depth[n] = 1 + max((depth[m] for m in needs[n] if n not in needs[m]), default=-1)
        return tuple(tuple(n for n in depth if depth[n] == level) for level in sorted(set(depth.values())))

    @cached_property
    def step_eqns(self) -> list[JaxprEqn]:
        """Everything but the weight tier; element-wise contacts belong here, since each step taps them."""
        contact_eqns = {id(c.eqn) for c in self.graph.structure.use.contacts}
        return [eqn for eqn in self.eqns if self.tier[eqn.outvars[0]] > 0 or id(eqn) in contact_eqns]

    # -- contacts ----------------------------------------------------------------------------------------------

    @cached_property
    def taps(self) -> tuple[Tap, ...]:
        """The pieces of every contact that has a trace."""
        legs = self.graph.structure.legs
        traced = {leg.contact.index for leg in legs}
        pieces = [(c, p) for c in self.graph.structure.use.contacts if c.index in traced for p in c.parts]
        return tuple(Tap(n, c, p, tuple(leg for leg in legs if leg.part is p)) for n, (c, p) in enumerate(pieces))

    @cached_property
    def legs(self) -> tuple[Leg, ...]:
        """All legs, in the order of their traces."""
        return tuple(leg for t in self.taps for leg in t.legs)

    @cached_property
    def traces(self) -> tuple[Leg, ...]:
        """What each trace belongs to: all pieces of a contact, as one leg, where each feeds the same group and no other; else a leg."""
        found: list[Leg] = []
        for contact in self.traced_contacts:
            taps = self.taps_of(contact)
            one_group = {tuple(leg.group for leg in t.legs) for t in taps}
            if len(taps) > 1 and len(one_group) == 1 and len(one_group.pop()) == 1:
                found.append(_join_legs(contact, [t.legs[0] for t in taps]))
            else:
                found += [leg for t in taps for leg in t.legs]
        return tuple(found)

    def taps_of(self, of: Contact | Leg) -> list[Tap]:
        """The pieces of a contact, or of a leg or trace."""
        if isinstance(of, Contact):
            return [t for t in self.taps if t.contact is of]
        return [t for t in self.taps if t.contact is of.contact and (t.part is of.part or of.part.var is of.contact.y)]

    def tap_index(self, leg: Leg) -> int:
        """The place of the tap that a leg starts from."""
        return next(t.index for t in self.taps if t.part is leg.part)

    @cached_property
    def roots(self) -> tuple[Var, ...]:
        """For each tap, the sum that it ends up in: a piece that is only ever added to others has the cotangent of the sum.

        All gates' products and biases of one pre-activation share a root, so a rule need filter their cotangents only once.
        """
        readers: dict[Var, list[JaxprEqn]] = {}
        for eqn in self.eqns:
            for v in variables(eqn.invars):
                readers.setdefault(v, []).append(eqn)
        outputs = set(variables(self.graph.module_info.jaxpr.outvars))

        def root(v: Var) -> Var:
            while v not in outputs and len(readers.get(v, ())) == 1 and readers[v][0].primitive.name in _SUMS:
                v = readers[v][0].outvars[0]
            return v

        return tuple(root(t.part.var) for t in self.taps)

    @cached_property
    def distinct_taps(self) -> tuple[int, ...]:
        """Of the taps with legs, the first of each root."""
        first: dict[Var, int] = {}
        for t in self.taps:
            if t.legs:
                first.setdefault(self.roots[t.index], t.index)
        return tuple(first.values())

    def distinct_index(self, tap: Tap) -> int:
        """The place in `distinct_taps` of the tap with the same cotangents."""
        return next(n for n, t in enumerate(self.distinct_taps) if self.roots[t] is self.roots[tap.index])

    @cached_property
    def traced_contacts(self) -> tuple[Contact, ...]:
        seen = {t.contact.index: t.contact for t in self.taps}
        return tuple(seen.values())

    @cached_property
    def only_traced(self) -> tuple[bool, ...]:
        """For each weight, whether all that reads it, as it is or in pieces, has a trace."""
        traced = {id(c.eqn) for c in self.traced_contacts}
        others = [eqn for eqn in self.eqns if id(eqn) not in traced]
        read: set[Var] = set(variables([*self.out_vars, *self.new_vars]))
        for eqn in reversed(others):
            if not is_structural(eqn) or self.tier[eqn.outvars[0]] > 0 or any(v in read for v in eqn.outvars):
                read.update(variables(eqn.invars))
        return tuple(v not in read for v in self.weight_vars)

    @cached_property
    def saved_vars(self) -> tuple[Var, ...]:
        """Products on the way to new states, which the forward pass hands to the recomputation: their pieces, or the sums that the
        pieces end up in. Other products, such as a readout's, are left to the parallel passes.
        """
        entry = {t.part.var: v for t, v in zip(self.taps, self.entries, strict=True) if t.legs}
        pieces = {id(c.eqn): [entry.get(p.var, p.var) for p in c.parts] for c in self.graph.structure.use.contacts if c.parts}
        saved: list[Var] = []
        for eqn in needed_equations(self.eqns, self.new_vars):
            if eqn.primitive.name in _PRODUCTS and self.tier[eqn.outvars[0]] > 0:
                saved += pieces.get(id(eqn), eqn.outvars)
        return tuple(dict.fromkeys(saved))

    @cached_property
    def upstream(self) -> bool:
        """Whether a weight without a trace reaches a state that matters."""
        return bool(self.upstream_taps) or self.upstream_weights

    @cached_property
    def _reaches_state(self) -> set[Var]:
        matter = self.graph.structure.matter
        reach = {leaf.outvar for leaf in self.leaves if leaf.invar in matter and not isinstance(leaf.outvar, Literal)}
        for eqn in reversed(self.eqns):
            if passes_derivative(eqn) and any(v in reach for v in eqn.outvars):
                reach.update(v for v in variables(eqn.invars) if is_float(v))
        return reach

    @cached_property
    def upstream_taps(self) -> frozenset[int]:
        """Pieces of traced contacts that reach a state only through a cut."""
        return frozenset(t.index for t in self.taps if not t.legs and t.part.var in self._reaches_state)

    @cached_property
    def upstream_weights(self) -> bool:
        traced = {c.index for c in self.traced_contacts}
        return any(c.index not in traced and c.y in self._reaches_state for c in self.graph.structure.use.contacts)

    # -- core --------------------------------------------------------------------------------------------------

    @cached_property
    def groups(self) -> tuple[HiddenGroup, ...]:
        """The groups whose states matter."""
        matter = self.graph.structure.matter
        return tuple(g for g in self.graph.hidden_groups if any(v in matter for v in g.hidden_invars))

    @cached_property
    def colours(self) -> tuple[tuple[int, ...], ...]:
        """Places in `groups`, divided so that no two groups of one colour share a contact's piece."""
        place = {g.index: n for n, g in enumerate(self.groups)}
        clashes: dict[int, set[int]] = {n: set() for n in place.values()}
        for t in self.taps:
            mine = [place[leg.group] for leg in t.legs]
            for a in mine:
                clashes[a].update(b for b in mine if b != a)
        colours: list[list[int]] = []
        for n in clashes:
            home = next((c for c in colours if not clashes[n].intersection(c)), None)
            if home is None:
                colours.append([n])
            else:
                home.append(n)
        return tuple(tuple(c) for c in colours)

    def colour_of(self, leg: Leg) -> int:
        """The colour of the group that a leg feeds."""
        return next(c for c, members in enumerate(self.colours) if self.place_of(leg) in members)

    def place_of(self, leg: Leg) -> int:
        """The place in `groups` of the group that a leg feeds."""
        return next(n for n, g in enumerate(self.groups) if g.index == leg.group)

    @cached_property
    def entries(self) -> tuple[Var, ...]:
        """For each tap, the variable by which it enters the core: its root, if that is a sum of such taps and of constants of the step."""
        tapped = {t.part.var: t.index for t in self.taps if t.legs}
        core = self._core_from(list(tapped))
        moved = self._reached(core, [*tapped, *(leaf.invar for leaf in self.leaves)])
        made_by = {v: eqn for eqn in core.eqns for v in eqn.outvars}

        def is_sum(v: Any, root: Var) -> bool:
            if isinstance(v, Literal) or v not in moved:
                return True
            if v in tapped:
                return self.roots[tapped[v]] is root
            eqn = made_by.get(v)  # none: an old state
            if eqn is None or eqn.primitive.name not in _SUMS or id(eqn) in core.held:
                return False
            return all(is_sum(x, root) for x in eqn.invars)

        return tuple(root if root in made_by and is_sum(root, root) else t.part.var for t, root in zip(self.taps, self.roots, strict=True))

    @cached_property
    def core_inputs(self) -> tuple[Var, ...]:
        """The variables by which taps enter the core."""
        return tuple(dict.fromkeys(v for t, v in zip(self.taps, self.entries, strict=True) if t.legs))

    @cached_property
    def core(self) -> Core:
        return self._core_from(self.core_inputs)

    def _core_from(self, given: Sequence[Var]) -> Core:
        outvars = [v for g in self.groups for v in g.hidden_outvars]
        return build_core(self.eqns, self.graph.structure.alignment, outvars, given)

    @staticmethod
    def _reached(core: Core, sources: Sequence[Var]) -> set[Var]:
        """What depends on these through the core."""
        reach = set(sources)
        for eqn in core.eqns:
            held = core.held.get(id(eqn), ())
            live = (v in reach for k, v in enumerate(eqn.invars) if k not in held and not isinstance(v, Literal))
            if passes_derivative(eqn) and any(live):
                reach.update(v for v in eqn.outvars if is_float(v))
        return reach

    @cached_property
    def depends(self) -> dict[tuple[int, int], bool]:
        """Whether new leaf i depends on old leaf j through the core."""
        result = {}
        for j in self.leaves:
            reach = self._reached(self.core, [j.invar])
            for i in self.leaves:
                result[i.index, j.index] = not isinstance(i.outvar, Literal) and i.outvar in reach
        return result

    @cached_property
    def pre_cut_operands(self) -> dict[int, tuple[int, ...]]:
        """Operands at which `credit="core"` stops, by equation id."""
        return held_operands(self.eqns, set(self.graph.structure.facts.pre_cuts))

    @cached_property
    def weights_reach_pre_cuts(self) -> bool:
        """Whether a value that `credit="core"` holds constant depends on weights within the step."""
        facts = self.graph.structure.facts
        held: list[Any] = [self.eqns[i].invars[k] for i, k in facts.pre_cuts]
        return any(source[0] == "weight" for v in held for source in facts.at.get(v, {}))

    # -- running -----------------------------------------------------------------------------------------------

    def weight_env(self, theta: Sequence[Any]) -> dict[Any, Any]:
        """Values of the weight tier.

        A loop over blocks of steps computes them in its body: XLA then sees that whatever else the body differentiates starts from the
        same values, and takes them out of the loop by itself.
        """
        env: dict[Any, Any] = dict(self.constants)
        env.update(zip(self.weight_vars, theta, strict=True))
        return evaluate(self.weight_eqns, env)

    def turned(self, theta: Sequence[Any]) -> dict[Any, Any]:
        """The transposes that products in loops over time look for among the values of the weight tier; made before all loops."""
        return turn_weights(self.step_eqns, self.weight_env(theta))

    def run_step(
        self,
        env: dict[Var, Any],
        saved: Sequence[Any],
        deltas: dict[Var, Any],
        targets: Sequence[Any],
        held: dict[int, tuple[int, ...]] | None = None,
    ) -> dict[Var, Any]:
        """Runs what `targets` need of one step, differentiably.

        Args:
            env: weight tier, arguments and old states.
            saved: values of `saved_vars` from the forward pass; their derivative is still the product's.
            deltas: taps, by variable of a contact's piece; the contact's view is then held constant.
            targets: the variables wanted.
            held: operands to hold constant, by equation id.
        """
        tapped = {id(c.eqn): c.form.view_index for c in self.traced_contacts} if deltas else {}
        held = held or {}
        known = dict(zip(self.saved_vars, saved, strict=True))

        def on_equation(eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
            if id(eqn) in tapped:
                operands[tapped[id(eqn)]] = lax.stop_gradient(operands[tapped[id(eqn)]])
            for k in held.get(id(eqn), ()):
                operands[k] = lax.stop_gradient(operands[k])
            results = as_product(eqn, operands) or bind_equation(eqn, operands)
            for n, v in enumerate(eqn.outvars):
                if v in known:
                    results[n] = with_value(results[n], known[v])
                if v in deltas:
                    results[n] = tap(results[n], deltas[v])
            return results

        return evaluate(needed_equations(self.step_eqns, targets), dict(env), on_equation)

    def values(self, env: dict[Var, Any], saved: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
        """Values of `targets` in one step, nothing recomputed that `saved` has."""
        env = {**env, **dict(zip(self.saved_vars, saved, strict=True))}
        eqns = needed_equations(self.step_eqns, targets, given=list(env))
        env = evaluate(eqns, env, as_product)
        return [read(env, v) for v in targets]

    def output_tree(self, flat: Sequence[Any]) -> Any:
        """The model's own output."""
        return jax.tree.unflatten(self.graph.module_info.out_tree, flat)

    def zero_taps(self, lead: tuple[int, ...]) -> dict[Var, Any]:
        """Zeros for every tap, with leading axes."""
        return {t.part.var: jnp.zeros((*lead, *t.part.var.aval.shape), t.part.var.aval.dtype) for t in self.taps}


def _join_legs(contact: Contact, legs: Sequence[Leg]) -> Leg:
    form: Any = contact.form
    axis = form.out.index(legs[0].part.letter)
    places = np.concatenate([leg.places.reshape(leg.part.form.shape(form.out)) for leg in legs], axis)
    return Leg(contact, Part(contact.y, form), legs[0].group, places.reshape(contact.y.aval.shape))
