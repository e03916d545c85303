"""The certificate: whether a parameter's online gradient is exact, and if not, what is dropped.

One forward pass over the step collects facts: which *sources* (parameters, old states) reach a
variable, and through which first cut, if any. A trace follows uncut paths only. So a parameter's
gradient under D-RTRL is exact unless

1. the parameter enters a state that matters later through a cut, or

2. a state that its trace covers enters, through a cut, a state that matters later.

"Matters later" means that the state can still change a loss through derivatives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var, module_scope
from etrace_bridge.compiler.aliases import alias_equations, alias_roots, producers
from etrace_bridge.compiler.aligner import Alignment, Edge
from etrace_bridge.compiler.diagnostics import Path, show_path
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.positions import feeds_many
from etrace_bridge.compiler.primitives import (
    is_elementwise,
    is_float,
    is_structural,
    passes_derivative,
)
from etrace_bridge.compiler.source_line import source_line
from etrace_bridge.compiler.weight_views import WeightUse

Source = tuple[str, Any]  # ("weight", path) or ("state", variable)
Facts = dict[Source, frozenset[Any]]  # source -> first cuts; None among them: reached without a cut


@dataclass(frozen=True)
class Cut:
    """An operand at which credit is not followed.

    Attributes:
        edge: (equation, operand) in the step's jaxpr.
        primitive: the equation's primitive.
        reason: why alignment is lost, in words.
        weights: parameters of the other operand, when it is a product with a weight.
        module: name scope of the equation (the torch module path for wrapped models).
        line: the user's source line, if known.
    """

    edge: Edge
    primitive: str
    reason: str
    weights: tuple[Path, ...] = ()
    module: str = ""
    line: str = ""

    def __str__(self) -> str:
        where = ", ".join(
            part for part in (f"in `{self.module}`" if self.module else "", self.line) if part
        )
        return f"{self.reason} ({where})" if where else self.reason


@dataclass(frozen=True)
class Drop:
    """Credit that a trace does not carry: from a parameter or a state, through a cut, into a state."""

    cut: Cut
    source: Path
    into: Path

    def __str__(self) -> str:
        return f"`{show_path(self.source)}` -> {self.cut} -> `{show_path(self.into)}`"


@dataclass(frozen=True)
class ParameterCertificate:
    """What the compiler knows about one parameter's online gradient, with D-RTRL.

    Attributes:
        path: the parameter.
        kind: `"traced"` (has a trace), `"direct"` (outside the recurrence), `"upstream"` (reaches a
            state only through cuts) or `"unused"`.
        exact: whether the gradient equals BPTT's, whatever `credit` is.
        drops: what is not carried.
        groups: indices of the hidden groups that its traces follow.
    """

    path: Path
    kind: str
    exact: bool
    drops: tuple[Drop, ...] = ()
    groups: tuple[int, ...] = ()

    @property
    def reason(self) -> str:
        """One sentence for people."""
        if self.kind == "unused":
            return "no gradient can reach it"
        if self.kind == "direct":
            return "outside the recurrence: plain gradient of the step"
        if self.exact:
            return "every path through time is position by position"
        first = str(self.drops[0])
        more = f" and {len(self.drops) - 1} more" if len(self.drops) > 1 else ""
        return f"drops {first}{more}"


@dataclass(frozen=True)
class StepFacts:
    """Facts at every variable, and every cut that was met.

    Attributes:
        at: facts by variable.
        cuts: every cut, by edge.
        pre_cuts: where a value of the old states leaves the core on its way back to a new state of
            the same group; `credit="core"` stops there. What only an output or another group reads
            is not among them.
    """

    at: dict[Var, Facts]
    cuts: dict[Edge, Cut]
    pre_cuts: frozenset[Edge]


def collect_facts(
    minfo: ModuleInfo, use: WeightUse, alignment: Alignment, matter: set[Var]
) -> StepFacts:
    """Collect facts in one forward pass over the step."""
    cuts: dict[Edge, Cut] = {}
    start = {
        v: {("state", v): frozenset([None])}
        for leaves in minfo.state_tree_invars
        for v in leaves
        if v not in minfo.invar_to_weight_path and is_float(v)
    }
    at = _flow(minfo, use, alignment, start, cuts, matter)
    return StepFacts(at, cuts, _leaving_edges(minfo, alignment, matter))


def _leaving_edges(minfo: ModuleInfo, alignment: Alignment, matter: set[Var]) -> frozenset[Edge]:
    """Return the edges that leave the core and lead back to the same group.

    They start at old states, and at values of the core that are not part of a new state.
    """
    eqns, core = minfo.jaxpr.eqns, set(alignment.core)
    new = {leaf.outvar for leaf in alignment.leaves if not isinstance(leaf.outvar, Literal)}
    reach: dict[Var, set[int]] = {}  # groups whose new states a derivative comes to
    owners: dict[Var, set[int]] = {}  # groups on whose old states a value of the core depends
    for leaf, group in zip(alignment.leaves, alignment.joined, strict=True):
        owners.setdefault(leaf.invar, set()).add(group)
        for v in variables([leaf.outvar] if leaf.invar in matter else []):
            reach.setdefault(v, set()).add(group)
    for eqn in reversed(eqns):
        if is_structural(eqn) and any(v in new for v in eqn.outvars):
            new.update(variables(eqn.invars))
        if passes_derivative(eqn):
            groups = set().union(*(reach.get(o, ()) for o in eqn.outvars))
            for v in variables(eqn.invars):
                if groups and is_float(v):
                    reach.setdefault(v, set()).update(groups)
    edges = set()
    for i, eqn in enumerate(eqns):
        for k, v in enumerate(eqn.invars):
            if isinstance(v, Literal) or v not in owners:
                continue
            leaves = i not in core or (i, k) in alignment.cuts
            if leaves and any(owners[v] & reach.get(o, set()) for o in eqn.outvars):
                edges.add((i, k))
            elif not leaves:
                for o in eqn.outvars:
                    if is_float(o) and o not in new:
                        owners.setdefault(o, set()).update(owners[v])
    return frozenset(edges)


def _flow(minfo, use, alignment, at, cuts, matter) -> dict[Var, Facts]:
    """Return the facts at every variable.

    What has entered a state that matters through a cut is dropped there. It is not followed beyond
    that state, or the first of many layers would be followed into every later one.
    """
    made_by = producers(minfo.jaxpr.eqns)
    ends = [
        o
        for ins, outs in zip(minfo.state_tree_invars, minfo.state_tree_outvars, strict=True)
        for i, o in zip(ins, outs, strict=True)
        if i in matter and not isinstance(o, Literal)
    ]
    settled = {v for o in ends for v in (o, *alias_roots(made_by, o))}
    rearranging = {id(eqn) for o in ends for eqn in alias_equations(made_by, o)}
    for i, eqn in enumerate(minfo.jaxpr.eqns):
        if not passes_derivative(eqn):
            continue
        merged: dict[Source, set[Any]] = {}
        for k, v in enumerate(eqn.invars):
            if isinstance(v, Literal):
                continue
            contacts = [c for c in use.contact_of_eqn.get(i, ()) if c.eqn.invars[k] is c.view.var]
            if v in use.weight_paths:
                edge_cut = _weight_cut(eqn, i, k, contacts, alignment, use, cuts)
                facts: Facts = (
                    {("weight", p): frozenset([edge_cut]) for p in use.weight_paths[v]}
                    if contacts
                    else {}
                )
            else:
                facts = at.get(v, {})
                if v in settled and id(eqn) not in rearranging:
                    facts = {
                        source: frozenset([None]) for source, tags in facts.items() if None in tags
                    }
                edge_cut = _data_cut(eqn, i, k, alignment, use, cuts) if facts else None
            for source, tags in facts.items():
                passed = {edge_cut if t is None else t for t in tags}
                merged.setdefault(source, set()).update(passed)
        if merged:
            frozen = {s: frozenset(tags) for s, tags in merged.items()}
            for v in eqn.outvars:
                if is_float(v) and v not in use.weight_paths:
                    at[v] = frozen
    return at


def _weight_cut(eqn, i, k, contacts, alignment, use, cuts) -> Edge | None:
    """Return the cut at which a weight enters without a trace; None where it is traced."""
    if not contacts:
        return None
    contact = contacts[0]
    many = feeds_many(contact, alignment)
    if contact.form is not None and not many:
        return None
    name = eqn.primitive.name
    reason = (
        f"one value of `{name}` feeds many positions"
        if many
        else f"`{name}` joins a weight with data in no known way"
    )
    cuts.setdefault((i, k), _describe(eqn, (i, k), reason, ()))
    # a weight that enters one equation twice is reported once
    return (i, eqn.invars.index(eqn.invars[k]))


def _data_cut(
    eqn: JaxprEqn, i: int, k: int, alignment: Alignment, use: WeightUse, cuts: dict[Edge, Cut]
) -> Edge | None:
    """Return the cut at this operand, if it is one."""
    contacts = use.contact_of_eqn.get(i, ())
    if (i, k) in alignment.cuts:
        spreads = eqn.primitive.name == "broadcast_in_dim"
        reason = f"`{eqn.primitive.name}` {'spreads' if spreads else 'moves'} positions"
        weights = ()
    elif contacts:
        weights = tuple(p for c in contacts for p in c.view.paths)
        reason = f"product with `{'`, `'.join(show_path(p) for p in weights)}`"
    elif is_elementwise(eqn) or (is_structural(eqn) and i not in alignment.dynamic):
        return None
    else:
        reason, weights = f"`{eqn.primitive.name}` mixes positions", ()
    cuts.setdefault((i, k), _describe(eqn, (i, k), reason, weights))
    return (i, k)


def _describe(eqn: JaxprEqn, edge: Edge, reason: str, weights: tuple[Path, ...]) -> Cut:
    return Cut(edge, eqn.primitive.name, reason, weights, module_scope(eqn), source_line(eqn))


def certify(
    minfo: ModuleInfo,
    facts: StepFacts,
    alignment: Alignment,
    matter: set[Var],
    group_of: dict[Path, int],
) -> dict[Path, ParameterCertificate]:
    """One certificate a parameter, in the order the model takes them."""
    path_of = dict(minfo.invar_to_hidden_path)
    ends: list[tuple[Var, Any, bool]] = []  # (before, after, is hidden) of states that matter
    for state, ins, outs in zip(
        minfo.compiled_model_states, minfo.state_tree_invars, minfo.state_tree_outvars, strict=True
    ):
        for n, (i, o) in enumerate(zip(ins, outs, strict=True)):
            if i in minfo.invar_to_weight_path or isinstance(o, Literal):
                continue
            path_of.setdefault(i, minfo.state_path(state) or ("external", n))
            if i in matter:
                ends.append((i, o, i in minfo.invar_to_hidden_path))
    outputs = list(variables(minfo.jaxpr.outvars[: minfo.num_var_out]))
    at_outputs = {source for v in outputs for source in facts.at.get(v, {})}
    # source -> (state, is hidden, first cuts)
    entered: dict[Source, list[tuple[Var, bool, frozenset[Any]]]] = {}
    for i, o, is_hidden in ends:
        for source, tags in facts.at.get(o, {}).items():
            entered.setdefault(source, []).append((i, is_hidden, tags))
    return {
        path: _certify_one(("weight", path), facts, entered, at_outputs, path_of, group_of)
        for path in minfo.weight_path_to_invars
    }


def _certify_one(
    source: Source, facts: StepFacts, entered, at_outputs, path_of, group_of
) -> ParameterCertificate:
    path = source[1]
    covered: dict[Var, None] = {}  # states that the parameter's trace reaches
    pending = [source]
    while pending:
        for i, is_hidden, tags in entered.get(pending.pop(), ()):
            if is_hidden and None in tags and i not in covered:
                covered[i] = None
                pending.append(("state", i))
    drops: dict[tuple, Drop] = {}
    for origin, where in [(path, source), *((path_of[s], ("state", s)) for s in covered)]:
        for i, is_hidden, tags in entered.get(where, ()):
            for tag in tags:
                if tag is None and is_hidden:
                    continue
                cut = (
                    facts.cuts[tag]
                    if tag is not None
                    else Cut((-1, -1), "state", "a state that is not a HiddenState")
                )
                drops.setdefault((cut.edge, origin, path_of[i]), Drop(cut, origin, path_of[i]))
    if source not in entered:
        kind = "direct" if source in at_outputs else "unused"
    else:
        kind = "traced" if covered else "upstream"
    ordered = tuple(
        drops[key] for key in sorted(drops, key=lambda key: (key[0], str(key[1]), str(key[2])))
    )
    groups = tuple(sorted({group_of[path_of[s]] for s in covered}))
    return ParameterCertificate(path, kind, not drops, ordered, groups)
