"""Every decision of the compiler as a record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import brainstate
import numpy as np

from etrace_bridge._jax_compat import Atom, Literal, Var
from etrace_bridge.compiler.aliases import alias_roots, producers
from etrace_bridge.compiler.certificate import Cut
from etrace_bridge.compiler.diagnostics import (
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
    Path,
    show_path,
)
from etrace_bridge.compiler.hidden_group import HiddenGroup
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.primitives import is_float, passes_derivative

if TYPE_CHECKING:
    from etrace_bridge.compiler.graph import StepStructure
    from etrace_bridge.compiler.weight_views import Contact

LARGE_TRACE_BYTES = 256 * 2**20


def records_of(
    minfo: ModuleInfo, structure: StepStructure, groups: Sequence[HiddenGroup]
) -> list[CompilationRecord]:
    """Return one record per decision.

    First come those made while reading the model, then the others in the order of the step.
    """
    enters = _states_entered(minfo, structure)
    return [
        *minfo.records,
        *_included(structure, groups),
        *_parameters(structure),
        *_unknown_contacts(structure, enters),
        *_cuts(minfo, structure, enters),
        *_states(minfo, structure),
        *_large_traces(structure, groups),
    ]


def contact_name(contact: Contact) -> str:
    """Return the name of a contact for people."""
    return (
        "element-wise"
        if contact.form is not None and contact.form.x_index is None
        else contact.eqn.primitive.name
    )


def _included(
    structure: StepStructure, groups: Sequence[HiddenGroup]
) -> Iterator[CompilationRecord]:
    fed: dict[int, list[int]] = {}
    for leg in structure.legs:
        fed.setdefault(leg.contact.index, []).append(leg.group)
    for index, indices in fed.items():
        contact = structure.use.contacts[index]
        hidden = tuple(p for n in dict.fromkeys(indices) for p in groups[n].hidden_paths)
        where = " and ".join(f"hidden group {n} ({groups[n].name})" for n in dict.fromkeys(indices))
        for path in contact.view.paths:
            yield CompilationRecord(
                DiagnosticKind.RELATION_INCLUDED,
                DiagnosticLevel.INFO,
                f"`{show_path(path)}` enters {where} by an {contact_name(contact)} contact"
                if contact.x is None
                else f"`{show_path(path)}` enters {where} by `{contact_name(contact)}`",
                contact.eqn.primitive.name,
                path,
                hidden,
                {"contact": index},
            )


def _parameters(structure: StepStructure) -> Iterator[CompilationRecord]:
    kinds = {
        "direct": (
            DiagnosticKind.NON_TEMPORAL,
            DiagnosticLevel.INFO,
            "reaches no state: it gets the step's plain gradient",
        ),
        "upstream": (
            DiagnosticKind.UPSTREAM,
            DiagnosticLevel.WARNING,
            "reaches the states only through another weight or a mixing operation: it has no "
            "trace of its own",
        ),
        "unused": (
            DiagnosticKind.UNUSED_PARAMETER,
            DiagnosticLevel.WARNING,
            "gets no gradient: no output and no state that matters can be differentiated by it",
        ),
    }
    for path, certificate in structure.certificates.items():
        if certificate.kind in kinds:
            kind, level, text = kinds[certificate.kind]
            into = tuple(dict.fromkeys(d.into for d in certificate.drops))
            yield CompilationRecord(
                kind, level, f"`{show_path(path)}` {text}", weight_path=path, hidden_paths=into
            )


def _unknown_contacts(
    structure: StepStructure, enters: dict[Var, int]
) -> Iterator[CompilationRecord]:
    reported: set[tuple[int, Path]] = set()
    for contact in structure.use.contacts:
        if contact.form is not None or not any(enters.get(v) for v in contact.eqn.outvars):
            continue
        name = contact.eqn.primitive.name
        for path in contact.view.paths:
            if (contact.eqn_index, path) in reported:
                continue
            reported.add((contact.eqn_index, path))
            yield CompilationRecord(
                DiagnosticKind.UNKNOWN_CONTACT,
                DiagnosticLevel.WARNING,
                f"`{show_path(path)}` meets data in `{name}`, for which there is no contact rule, "
                "so it gets no trace there; `register_contact` adds one",
                name,
                path,
            )


def _states_entered(minfo: ModuleInfo, structure: StepStructure) -> dict[Var, int]:
    """Return, for each variable, which states that matter it enters first.

    They are new states, as a bit mask over the hidden leaves.
    """
    made_by = producers(minfo.jaxpr.eqns)
    masks: dict[Var, int] = {}
    ends: set[Var] = set()
    for leaf in structure.alignment.leaves:
        if leaf.invar not in structure.matter or isinstance(leaf.outvar, Literal):
            continue
        for v in [leaf.outvar, *alias_roots(made_by, leaf.outvar)]:
            masks[v] = masks.get(v, 0) | 1 << leaf.index
            ends.add(v)
    for eqn in reversed(minfo.jaxpr.eqns):
        if not passes_derivative(eqn):
            continue
        mask = 0
        for v in eqn.outvars:
            mask |= masks.get(v, 0)
        if mask:
            for v in variables(eqn.invars):
                if is_float(v) and v not in ends:
                    masks[v] = masks.get(v, 0) | mask
    return masks


def _cuts(
    minfo: ModuleInfo, structure: StepStructure, enters: dict[Var, int]
) -> Iterator[CompilationRecord]:
    leaves = structure.alignment.leaves
    for edge, cut in sorted(structure.facts.cuts.items()):
        eqn = minfo.jaxpr.eqns[edge[0]]
        mask = 0
        for v in eqn.outvars:
            mask |= enters.get(v, 0)
        operand = eqn.invars[edge[1]]
        # a weight that enters twice
        reported = operand in structure.use.weight_paths and eqn.invars.index(operand) < edge[1]
        states, parameters = _stopped(minfo, structure, cut, operand)
        if reported or not mask or not (states or parameters):
            continue
        into = tuple(leaf.path for leaf in leaves if mask >> leaf.index & 1)
        names = ", ".join(f"`{show_path(p)}`" for p in (*states, *parameters))
        goals = ", ".join(f"`{show_path(p)}`" for p in into)
        yield CompilationRecord(
            DiagnosticKind.CUT,
            DiagnosticLevel.INFO,
            f"no trace follows {names} through {cut} into {goals}",
            cut.primitive,
            parameters[0] if parameters and not states else None,
            tuple(dict.fromkeys((*states, *into))),
            {
                "line": cut.line,
                "module": cut.module,
                "edge": edge,
                "cut": cut,
                "from": states,
                "parameters": parameters,
                "into": into,
            },
        )


def _stopped(
    minfo: ModuleInfo, structure: StepStructure, cut: Cut, operand: Atom
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the states and parameters that arrive at a cut uncut."""
    if isinstance(operand, Literal):
        return (), ()
    if operand in structure.use.weight_paths:
        return (), structure.use.weight_paths[operand]
    facts = structure.facts.at.get(operand, {})
    arriving = {source for source, tags in facts.items() if None in tags}
    states = tuple(p for p, v in minfo.hidden_path_to_invar.items() if ("state", v) in arriving)
    return states, tuple(p for p in minfo.weight_path_to_invars if ("weight", p) in arriving)


def _states(minfo: ModuleInfo, structure: StepStructure) -> Iterator[CompilationRecord]:
    read = {v for eqn in minfo.jaxpr.eqns for v in variables(eqn.invars)}
    read.update(variables(minfo.jaxpr.outvars))
    for leaf in structure.alignment.leaves:
        name = show_path(leaf.path)
        if leaf.invar not in read:
            yield CompilationRecord(
                DiagnosticKind.STATE_ONLY_WRITTEN,
                DiagnosticLevel.INFO,
                f"`{name}` is written, but its old value is never read",
                hidden_paths=(leaf.path,),
            )
        elif leaf.invar not in structure.matter:
            yield CompilationRecord(
                DiagnosticKind.STATE_UNUSED,
                DiagnosticLevel.INFO,
                f"no output of this or a later step depends on `{name}`",
                hidden_paths=(leaf.path,),
            )
        if leaf.count > 1:
            is_group = isinstance(
                minfo.retrieved_model_states[leaf.path], brainstate.HiddenGroupState
            )
            how = "is a HiddenGroupState of" if is_group else "packs"
            yield CompilationRecord(
                DiagnosticKind.STATE_PACKED,
                DiagnosticLevel.INFO,
                f"`{name}` {how} {leaf.count} states of shape {leaf.varshape} along axis "
                f"{leaf.axis}",
                hidden_paths=(leaf.path,),
                context={"axis": leaf.axis, "count": leaf.count},
            )


def _large_traces(
    structure: StepStructure, groups: Sequence[HiddenGroup]
) -> Iterator[CompilationRecord]:
    for leg in structure.legs:
        group = groups[leg.group]
        size = (
            leg.part.form.trace_size * group.num_state * np.dtype(leg.contact.y.aval.dtype).itemsize
        )
        if size > LARGE_TRACE_BYTES:
            path = leg.contact.view.paths[0]
            yield CompilationRecord(
                DiagnosticKind.LARGE_TRACE,
                DiagnosticLevel.WARNING,
                f"the trace of `{show_path(path)}` for hidden group {group.index} takes "
                f"{size / 2**20:.0f} MiB; a smaller batch, or `rule='pp_prop'`, needs less",
                leg.contact.eqn.primitive.name,
                path,
                group.hidden_paths,
                {"bytes": size},
            )
