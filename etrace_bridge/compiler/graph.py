"""The compiler's result: one graph per model, and the call that makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import numpy as np

from etrace_bridge._errors import StateError
from etrace_bridge._jax_compat import Var
from etrace_bridge.compiler.aligner import Alignment
from etrace_bridge.compiler.certificate import (
    ParameterCertificate,
    StepFacts,
    certify,
    collect_facts,
)
from etrace_bridge.compiler.diagnostics import CompilationRecord, DiagnosticKind, Path
from etrace_bridge.compiler.extraction import extract_module_info
from etrace_bridge.compiler.feeds import feeds_by_group
from etrace_bridge.compiler.graph_report import render_html, render_line, render_report
from etrace_bridge.compiler.hidden_group import HiddenGroup, build_groups
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.perturbation import (
    HiddenPerturbation,
    add_hidden_perturbation_from_minfo,
)
from etrace_bridge.compiler.positions import feeds_many, find_alignment
from etrace_bridge.compiler.records import records_of
from etrace_bridge.compiler.relation import HiddenParamOpRelation, build_relations
from etrace_bridge.compiler.weight_views import Contact, Part, WeightUse


@dataclass(frozen=True)
class Leg:
    """A piece of a contact and a group that it feeds; each leg has its own trace.

    Attributes:
        contact: the contact.
        part: the piece of its output.
        group: index of the hidden group.
        positions: for each element of the piece, the position of the group that it feeds (-1: none).
    """

    contact: Contact
    part: Part
    group: int
    positions: np.ndarray


@dataclass(frozen=True)
class StepStructure:
    """What the passes give to the engine: weight use, alignment, facts, and the traces to keep."""

    use: WeightUse
    alignment: Alignment
    matter: set[Var]
    facts: StepFacts
    legs: tuple[Leg, ...]
    certificates: dict[Path, ParameterCertificate]


@dataclass(frozen=True, repr=False)
class ETraceGraph:
    """A model's hidden groups and contacts, and what is known about each parameter's gradient.

    Attributes:
        module_info: one step of the model.
        hidden_groups: hidden states joined by the recurrence.
        hid_path_to_group: the group of each hidden state.
        hidden_param_op_relations: one per contact (per gate of a fused product) and the
            groups that it feeds.
        hidden_perturb: the step with `h + p`; None if it was not requested.
        diagnostics: every decision, in order.
        structure: what the engine reads.
    """

    module_info: ModuleInfo
    hidden_groups: tuple[HiddenGroup, ...]
    hid_path_to_group: dict[Path, HiddenGroup]
    hidden_param_op_relations: tuple[HiddenParamOpRelation, ...]
    hidden_perturb: HiddenPerturbation | None
    diagnostics: tuple[CompilationRecord, ...]
    structure: StepStructure

    def call_hidden_perturb(
        self, args: Sequence[Any], perturb_data: Sequence[Any], old_state_vals=None
    ):
        """Run the step with `perturb_data` added to the new hidden states.

        Otherwise as `ModuleInfo.jaxpr_call`.
        """
        perturb = self.hidden_perturb or add_hidden_perturbation_from_minfo(self.module_info)
        return perturb.call(self.module_info, args, perturb_data, old_state_vals)

    def explain(
        self,
        *,
        weight_path: Path | None = None,
        hidden_path: Path | None = None,
        kind: DiagnosticKind | str | None = None,
    ) -> list[CompilationRecord]:
        """Return the records on a parameter, a hidden state or a kind of decision, in order."""
        return [
            r
            for r in self.diagnostics
            if (weight_path is None or r.weight_path == tuple(weight_path))
            and (hidden_path is None or tuple(hidden_path) in r.hidden_paths)
            and (kind is None or r.kind == DiagnosticKind(kind))
        ]

    def certificate(self) -> dict[Path, ParameterCertificate]:
        """Return for each parameter: exact or not, what is dropped, and where its traces are."""
        return dict(self.structure.certificates)

    def report(self) -> str:
        """Return a table: parameter, contact, hidden group, and exact or what is dropped and why."""
        return render_report(self)

    def __copy__(self) -> ETraceGraph:
        return self

    def __deepcopy__(self, memo: Any) -> ETraceGraph:
        return self  # nothing in it changes

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "A graph holds a program of JAX, so it cannot be pickled. Compile it again in the other "
            "process; `report()` and `certificate()` give what it says as text and plain data."
        )

    def __repr__(self) -> str:
        return render_line(self)

    def _repr_html_(self) -> str:
        return render_html(self)

    def dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def compile_etrace_graph(
    model: brainstate.nn.Module, *args: Any, include_hidden_perturb: bool = True, **kwargs: Any
) -> ETraceGraph:
    """Read one step of a model into an `ETraceGraph`.

    Args:
        model: any brainstate module with initialised states.
        *args: example arguments of one step.
        include_hidden_perturb: whether to build the perturbed step too.
        **kwargs: example keyword arguments of one step.
    """
    return compile_graph_from_minfo(
        extract_module_info(model, *args, **kwargs), include_hidden_perturb
    )


def compile_graph_from_minfo(minfo: ModuleInfo, include_hidden_perturb: bool = True) -> ETraceGraph:
    """Run the compiler's passes on a traced step."""
    use, alignment, matter = find_alignment(minfo)
    groups, by_path = build_groups(minfo, use, alignment)
    facts = collect_facts(minfo, use, alignment, matter)
    certificates = certify(
        minfo, facts, alignment, matter, {p: g.index for p, g in by_path.items()}
    )
    legs = find_legs(use, alignment, by_path)
    structure = StepStructure(use, alignment, matter, facts, legs, certificates)
    relations = build_relations(minfo, structure, groups)
    return ETraceGraph(
        module_info=minfo,
        hidden_groups=tuple(groups),
        hid_path_to_group=by_path,
        hidden_param_op_relations=tuple(relations),
        hidden_perturb=add_hidden_perturbation_from_minfo(minfo)
        if include_hidden_perturb
        else None,
        diagnostics=tuple(records_of(minfo, structure, groups)),
        structure=structure,
    )


def find_legs(
    use: WeightUse, alignment: Alignment, by_path: dict[Path, HiddenGroup]
) -> tuple[Leg, ...]:
    """Return the traces to keep, where each value feeds one position.

    There is one for each piece of a contact and each group that it feeds.
    """
    index = {leaf.index: by_path[leaf.path].index for leaf in alignment.leaves}
    legs = []
    for contact in use.contacts:
        for part in () if feeds_many(contact, alignment) else contact.parts:
            by_group = feeds_by_group(alignment.feeds.get(part.var, {}), alignment.joined)
            legs += [
                Leg(contact, part, index[root], arrays[0])
                for root, arrays in sorted(by_group.items())
            ]
    return tuple(legs)
