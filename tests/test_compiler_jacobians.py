"""`diagonal_jacobian` and `df` equal the matching entries of dense Jacobians of the step, and the
rest is zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import models
from etrace_bridge.compiler.core_equations import split_leaf
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.compiler.jaxpr import evaluate
from oracle_compiler import Step, compute

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


@dataclass(frozen=True)
class Measured:
    """Everything the tests compare, computed in one program."""

    graph: ETraceGraph
    step: Step
    new: list[Any]  # new hidden states, by the step itself
    by_state: list[list[Any]]  # dense d new state / d old state
    by_contact: list[list[Any]]  # dense d new state / d contact output
    transitions: list[tuple[list[Any], list[Any]]]  # per group: `transition` and `transition_jaxpr`
    diagonals: list[Any]  # per group: `diagonal_jacobian`
    # per leg: value, and one df a state, through `y_to_hidden_groups`
    dfs: list[tuple[Any, list[Any]]]


def contact_vars(graph: ETraceGraph) -> list[Any]:
    return list(dict.fromkeys(leg.part.var for leg in graph.structure.legs))


def transitions(group, env: dict) -> tuple[list[Any], list[Any], Any]:
    old = [env[v] for v in group.hidden_invars]
    inputs = [env[v] for v in group.transition_jaxpr_constvars]
    jaxpr = group.transition_jaxpr
    inside = evaluate(
        jaxpr.eqns, dict(zip((*jaxpr.constvars, *jaxpr.invars), (*inputs, *old), strict=True))
    )
    by_jaxpr = [Step.read(inside, v) for v in jaxpr.outvars]
    return group.transition(old, inputs), by_jaxpr, group.diagonal_jacobian(old, inputs)


def df_of(graph: ETraceGraph, leg, env: dict) -> tuple[Any, list[Any]]:
    (relation,) = [r for r in graph.hidden_param_op_relations if r.y_var is leg.part.var]
    (n,) = [n for n, g in enumerate(relation.hidden_groups) if g.index == leg.group]
    value, pull = jax.vjp(lambda y: relation.y_to_hidden_groups(y, env)[n], env[leg.part.var])
    states = range(graph.hidden_groups[leg.group].num_state)
    return value, [pull(jnp.zeros_like(value).at[..., s].set(1))[0] for s in states]


@pytest.fixture(scope="module", params=list(models.ZOO))
def measured(request):
    graph, (_, args) = models.graph_of(request.param), models.build(request.param)
    step = Step(graph, args)

    def measure():
        env = step.run({}, {})
        per_group = [transitions(g, env) for g in graph.hidden_groups]
        return (
            step.new_states(env),
            step.state_jacobian(),
            step.contact_jacobian(contact_vars(graph)),
            [(a, b) for a, b, _ in per_group],
            [d for _, _, d in per_group],
            [df_of(graph, leg, env) for leg in graph.structure.legs],
        )

    return Measured(graph, step, *compute(measure))


def elements(leaf) -> list[np.ndarray]:
    """The elements of a hidden state that belong to each of the states it holds, in the order of
    their places.
    """
    numbers = np.arange(np.prod(leaf.invar.aval.shape, dtype=int)).reshape(leaf.invar.aval.shape)
    return [
        np.asarray(part).ravel() for part in split_leaf(leaf, jnp.asarray(numbers), leaf.varshape)
    ]


def test_transitions(measured):
    new = dict(zip(measured.step.hidden, measured.new, strict=True))
    for group, (called, by_jaxpr) in zip(
        measured.graph.hidden_groups, measured.transitions, strict=True
    ):
        for path, a, b in zip(group.hidden_paths, called, by_jaxpr, strict=True):
            np.testing.assert_allclose(a, new[path], **TOLERANCE)
            np.testing.assert_allclose(b, new[path], **TOLERANCE)


def test_diagonal_jacobian(measured):
    graph = measured.graph
    at = {path: n for n, path in enumerate(measured.step.hidden)}
    for group, diagonal in zip(graph.hidden_groups, measured.diagonals, strict=True):
        group.check_consistent_varshape()
        assert diagonal.shape == (*group.varshape, group.num_state, group.num_state)
        states = [(leaf, ids) for leaf in group.leaves for ids in elements(leaf)]
        for i, (leaf_i, rows) in enumerate(states):
            for j, (leaf_j, cols) in enumerate(states):
                full = measured.by_state[at[leaf_i.path]][at[leaf_j.path]][np.ix_(rows, cols)]
                np.testing.assert_allclose(diagonal[..., i, j].ravel(), np.diag(full), **TOLERANCE)
                np.testing.assert_array_equal(full - np.diag(np.diag(full)), 0)


def test_states_of_different_groups_do_not_meet(measured):
    graph = measured.graph
    for i, row in zip(measured.step.hidden, measured.by_state, strict=True):
        if graph.module_info.hidden_path_to_invar[i] not in graph.structure.matter:
            continue
        for j, block in zip(measured.step.hidden, row, strict=True):
            if graph.hid_path_to_group[i] is not graph.hid_path_to_group[j]:
                np.testing.assert_array_equal(block, 0)


def test_df(measured):
    graph, variables = measured.graph, contact_vars(measured.graph)
    at = {path: n for n, path in enumerate(measured.step.hidden)}
    new = dict(zip(measured.step.hidden, measured.new, strict=True))
    for leg, (value, dfs) in zip(graph.structure.legs, measured.dfs, strict=True):
        group = graph.hidden_groups[leg.group]
        np.testing.assert_allclose(
            value, group.concat_hidden([new[p] for p in group.hidden_paths]), **TOLERANCE
        )
        fed = leg.positions.ravel() >= 0
        # (place of the state, element of the contact's output)
        own = leg.positions.ravel()[fed], np.flatnonzero(fed)
        states = [(leaf, rows) for leaf in group.leaves for rows in elements(leaf)]
        for (leaf, rows), df in zip(states, dfs, strict=True):
            full = measured.by_contact[at[leaf.path]][variables.index(leg.part.var)][rows]
            np.testing.assert_allclose(df.ravel()[fed], full[own], **TOLERANCE)
            np.testing.assert_array_equal(df.ravel()[~fed], 0)
            full[own] = 0
            np.testing.assert_array_equal(full, 0)
