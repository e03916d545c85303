"""Relations: a contact `y = op(x, v)`, or a gate of a fused one, and the hidden groups it feeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import brainstate
import jax
from jax import lax

from etrace_bridge._errors import InputError
from etrace_bridge._jax_compat import Jaxpr, JaxprEqn, Literal, Var, make_jaxpr_closed, sub_jaxpr
from etrace_bridge.compiler.diagnostics import Path, show_path
from etrace_bridge.compiler.extraction import extract_module_info
from etrace_bridge.compiler.feeds import MANY
from etrace_bridge.compiler.hidden_group import HiddenGroup
from etrace_bridge.compiler.jaxpr import evaluate, needed_equations, read, reads_of, variables
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.weight_views import Contact, WeightView

if TYPE_CHECKING:
    from etrace_bridge.compiler.graph import StepStructure


@dataclass(frozen=True)
class HiddenParamOpRelation:
    """One contact, or one gate of a fused contact, and the groups it feeds.

    Attributes:
        primitive: the contact's primitive.
        x_var: its data operand; None for an element-wise contact.
        y_var: its output; the gate's slice of it where a fused product is split.
        hidden_groups: the groups that `y_var` feeds.
        y_to_hidden_group_jaxprs: for each group, `y` -> new hidden states; its constvars are variables
            of the step.
        connected_hidden_paths: the hidden states that `y_var` feeds.
        eqn_params: the parameters of the contact's equation.
        trainable_vars: the parameter leaves that the weight view is computed from, by key
            (`"weight"`, `"bias"`).
        trainable_paths: their ParamStates' paths, by key.
        trainable_leaf_indices: which leaf of its ParamState each is, by key.
        trainable_param_states: their ParamStates, by key.
        weight_view: how the traced view is computed from the parameters.
        contact_index: the contact's index among the step's contacts.
    """

    primitive: Any
    x_var: Var | None
    y_var: Var
    hidden_groups: tuple[HiddenGroup, ...]
    y_to_hidden_group_jaxprs: tuple[Jaxpr, ...]
    connected_hidden_paths: tuple[Path, ...]
    eqn_params: dict[str, Any]
    trainable_vars: dict[str, Var]
    trainable_paths: dict[str, Path]
    trainable_leaf_indices: dict[str, int]
    trainable_param_states: dict[str, brainstate.State]
    weight_view: WeightView
    contact_index: int = 0

    def __repr__(self) -> str:
        weights = ", ".join(map(show_path, self.trainable_paths.values()))
        return f"HiddenParamOpRelation({weights} by {self.primitive} to {list(self.hidden_groups)})"

    @property
    def path(self) -> Path:
        """The path of the parameter; of the first one, if the view is computed from several."""
        return next(iter(self.trainable_paths.values()))

    def y_to_hidden_groups(
        self, y_val: Any, const_vals: dict[Var, Any], concat_hidden_vals: bool = True
    ) -> list[Any]:
        """Return new hidden values of each group from the contact's output.

        Args:
            y_val: the value of `y_var`.
            const_vals: values of the step's variables that the jaxprs read.
            concat_hidden_vals: one array per group, with the states along its last axis; else a list of
                values a group.
        """
        results = []
        for group, jaxpr in zip(self.hidden_groups, self.y_to_hidden_group_jaxprs, strict=True):
            missing = [v for v in jaxpr.constvars if v not in const_vals]
            if missing:
                raise InputError(
                    f"`const_vals` lacks {len(missing)} of the {len(jaxpr.constvars)} variables "
                    f"that hidden group {group.index} reads: {', '.join(map(str, missing))}. "
                    "Return them from the step with `module_info.add_jaxpr_outs(...)`."
                )
            env = {v: const_vals[v] for v in jaxpr.constvars}
            env[jaxpr.invars[0]] = y_val
            evaluate(jaxpr.eqns, env)
            hidden = [read(env, v) for v in jaxpr.outvars]
            results.append(group.concat_hidden(hidden) if concat_hidden_vals else hidden)
        return results

    def dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def build_relations(
    minfo: ModuleInfo, structure: StepStructure, groups: Sequence[HiddenGroup]
) -> list[HiddenParamOpRelation]:
    """Return the relations of a step, in the order of its equations."""
    readers = _readers(minfo.jaxpr.eqns)
    group_of = {path: group for group in groups for path in group.hidden_paths}
    held = {g.index: _with_stops(g) for g in groups}
    fed: dict[Var, tuple[Contact, list[HiddenGroup]]] = {}
    for leg in structure.legs:
        fed.setdefault(leg.part.var, (leg.contact, []))[1].append(groups[leg.group])
    relations = []
    for y, (contact, fed_groups) in fed.items():
        paths = [p for p in _fed_paths(y, structure) if group_of[p] in fed_groups]
        relations.append(_relation(minfo, contact, y, readers, paths, fed_groups, held))
    return relations


def _relation(
    minfo, contact: Contact, y: Var, readers, paths, groups, held
) -> HiddenParamOpRelation:
    keys = _leaf_keys(minfo, contact, readers)
    path_of = minfo.invar_to_weight_path
    return HiddenParamOpRelation(
        primitive=contact.eqn.primitive,
        x_var=None if isinstance(contact.x, Literal) else contact.x,
        y_var=y,
        hidden_groups=tuple(groups),
        y_to_hidden_group_jaxprs=tuple(
            _to_hidden(minfo.jaxpr, y, g, held[g.index]) for g in groups
        ),
        connected_hidden_paths=tuple(paths),
        eqn_params=dict(contact.eqn.params),
        trainable_vars=keys,
        trainable_paths={k: path_of[v] for k, v in keys.items()},
        trainable_leaf_indices={
            k: minfo.weight_path_to_invars[path_of[v]].index(v) for k, v in keys.items()
        },
        trainable_param_states={
            k: minfo.retrieved_model_states[path_of[v]] for k, v in keys.items()
        },
        weight_view=contact.view,
        contact_index=contact.index,
    )


def _readers(eqns: Sequence[JaxprEqn]) -> dict[Var, list[JaxprEqn]]:
    readers: dict[Var, list[JaxprEqn]] = {}
    for eqn in eqns:
        for v in dict.fromkeys(variables(eqn.invars)):
            readers.setdefault(v, []).append(eqn)
    return readers


def _fed_paths(y: Var, structure: StepStructure) -> list[Path]:
    alignment = structure.alignment
    feeds = alignment.feeds.get(y, {})
    return [alignment.leaves[t].path for t in sorted(feeds) if any(a is not MANY for a in feeds[t])]


def _leaf_keys(minfo: ModuleInfo, contact: Contact, readers) -> dict[str, Var]:
    """Return the leaves a view is computed from, by key.

    The keys are `weight`, `weight_1`, … (`bias` where the view is only added).
    """
    leaves = [
        v
        for v in reads_of(contact.view.eqns, [contact.view.var])
        if v in minfo.invar_to_weight_path
    ]
    added = all(e.primitive.name in ("add", "add_any") for e in readers.get(contact.y, ()))
    base = "bias" if contact.x is None and added else "weight"
    return {base if n == 0 else f"{base}_{n}": v for n, v in enumerate(leaves)}


def _with_stops(group: HiddenGroup) -> tuple[JaxprEqn, ...]:
    """Return a group's core, where an equation stops the gradient of each operand that is a cut."""
    eqns: list[JaxprEqn] = []
    for eqn in group.core.eqns:
        invars = list(eqn.invars)
        for k in group.core.held.get(id(eqn), ()):
            aval = jax.ShapeDtypeStruct(invars[k].aval.shape, invars[k].aval.dtype)
            stop = make_jaxpr_closed(lax.stop_gradient, aval).jaxpr.eqns[0]
            eqns.append(stop.replace(invars=[invars[k]]))
            invars[k] = stop.outvars[0]
        eqns.append(eqn.replace(invars=invars) if invars != eqn.invars else eqn)
    return tuple(eqns)


def _to_hidden(jaxpr: Jaxpr, y: Var, group: HiddenGroup, core: Sequence[JaxprEqn]) -> Jaxpr:
    # The other pieces of a split product are given too: the equation that makes them would make `y`
    # as well.
    beside = next((eqn.outvars for eqn in core if y in eqn.outvars), [y])
    chosen = needed_equations(core, group.hidden_outvars, given=beside)
    constvars = [v for v in reads_of(chosen, group.hidden_outvars) if v is not y]
    return sub_jaxpr(jaxpr, chosen, [y], group.hidden_outvars, constvars)


def find_hidden_param_op_relations_from_minfo(minfo: ModuleInfo) -> list[HiddenParamOpRelation]:
    """Return the relations of a traced step."""
    # The graph is made of relations
    from etrace_bridge.compiler.graph import compile_graph_from_minfo

    return list(
        compile_graph_from_minfo(minfo, include_hidden_perturb=False).hidden_param_op_relations
    )


def find_hidden_param_op_relations_from_module(
    model: brainstate.nn.Module, *args: Any, **kwargs: Any
) -> list[HiddenParamOpRelation]:
    """Return the relations of a model."""
    return find_hidden_param_op_relations_from_minfo(extract_module_info(model, *args, **kwargs))
