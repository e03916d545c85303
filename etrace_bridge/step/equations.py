"""The equations of one step and its variables, sorted by what they depend on.

The three tiers of a step's equations:

- *weight tier*: weights and constants alone; runs once per chunk;
- *input tier*: the step's arguments, no state; runs in parallel over the K steps of a chunk;
- *state tier*: the rest; what new states need of it runs in scans over time, one for each level of
  states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from etrace_bridge._jax_compat import JaxprEqn, Literal, Var
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.compiler.hidden_leaves import HiddenLeaf
from etrace_bridge.compiler.jaxpr import variables

Levels = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class StepEquations:
    """A compiled step's equations and variables.

    Attributes:
        graph: the compiled model.
        eqns: all equations, in order.
        constants: values of the constants.
        arg_vars: the step's arguments, flat.
        out_vars: the step's outputs, flat.
        weight_vars: the weights.
        leaves: the hidden states.
        other_vars: (before, after) of states that are neither hidden nor parameters.
        state_vars: what the step starts from: old hidden states, then old values of the other
            states.
        new_vars: what the step leaves: new hidden states, then new values of the other states.
        tier: for each variable, 0: weights and constants, 1: inputs, 2: states.
        weight_eqns: the weight tier.
        step_eqns: all others; element-wise contacts are among them, since each step taps them.
        levels: the states, as indices of `state_vars`, in the order in which whole sequences of
            them can be computed. States that depend on each other are in one level, and each level
            depends on earlier ones only: a stack of recurrent layers has one level per layer.
    """

    graph: ETraceGraph
    eqns: list[JaxprEqn]
    constants: dict[Var, Any]
    arg_vars: list[Var]
    out_vars: list[Any]
    weight_vars: list[Var]
    leaves: tuple[HiddenLeaf, ...]
    other_vars: list[tuple[Var, Any]]
    state_vars: list[Var]
    new_vars: list[Any]
    tier: dict[Var, int]
    weight_eqns: list[JaxprEqn]
    step_eqns: list[JaxprEqn]
    levels: Levels


def read_equations(graph: ETraceGraph) -> StepEquations:
    """Sort the equations of a compiled model's step."""
    info = graph.module_info
    eqns = list(info.jaxpr.eqns)
    constants = dict(zip(info.jaxpr.constvars, info.closed_jaxpr.consts, strict=True))
    arg_vars, weight_vars = info.jaxpr.invars[: info.num_var_arg], list(info.weight_invars)
    leaves = graph.structure.alignment.leaves
    other_vars = [
        (i, o)
        for ins, outs in zip(info.state_tree_invars, info.state_tree_outvars, strict=True)
        for i, o in zip(ins, outs, strict=True)
        if i not in info.invar_to_weight_path and i not in info.invar_to_hidden_path
    ]
    state_vars = [leaf.invar for leaf in leaves] + [i for i, _ in other_vars]
    new_vars = [leaf.outvar for leaf in leaves] + [o for _, o in other_vars]
    tier = (
        dict.fromkeys((*weight_vars, *constants), 0)
        | dict.fromkeys(arg_vars, 1)
        | dict.fromkeys(state_vars, 2)
    )
    for eqn in eqns:
        level = max((tier[v] for v in variables(eqn.invars)), default=0)
        tier.update((v, level) for v in eqn.outvars)
    contact_eqns = {id(c.eqn) for c in graph.structure.use.contacts}
    return StepEquations(
        graph=graph,
        eqns=eqns,
        constants=constants,
        arg_vars=arg_vars,
        out_vars=info.jaxpr.outvars[: info.num_var_out],
        weight_vars=weight_vars,
        leaves=leaves,
        other_vars=other_vars,
        state_vars=state_vars,
        new_vars=new_vars,
        tier=tier,
        weight_eqns=[eqn for eqn in eqns if tier[eqn.outvars[0]] == 0],
        step_eqns=[eqn for eqn in eqns if tier[eqn.outvars[0]] > 0 or id(eqn) in contact_eqns],
        levels=_levels(eqns, state_vars, new_vars),
    )


def _levels(eqns: list[JaxprEqn], state_vars: list[Var], new_vars: list[Any]) -> Levels:
    by_var: dict[Var, frozenset[int]] = {v: frozenset([n]) for n, v in enumerate(state_vars)}
    for eqn in eqns:
        read_by = frozenset().union(*(by_var.get(v, frozenset()) for v in variables(eqn.invars)))
        by_var.update(dict.fromkeys(eqn.outvars, read_by))
    needs = [
        {n} | set(() if isinstance(v, Literal) else by_var.get(v, ()))
        for n, v in enumerate(new_vars)
    ]
    for m in range(len(needs)):  # and what those need
        for needed in needs:
            needed |= needs[m] if m in needed else set()
    depth: dict[int, int] = {}
    for n in sorted(range(len(needs)), key=lambda n: len(needs[n])):
        depth[n] = 1 + max((depth[m] for m in needs[n] if n not in needs[m]), default=-1)
    return tuple(
        tuple(n for n in depth if depth[n] == level) for level in sorted(set(depth.values()))
    )
