"""`diagonal_jacobian` and `df` equal the matching entries of dense Jacobians of the step, and the rest is zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from oracle_compiler import Step

from etrace_bridge.compiler.core import split_leaf
from etrace_bridge.compiler.graph import compile_etrace_graph
from etrace_bridge.compiler.jaxpr import evaluate

TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(scope="module", params=list(models.ZOO))
def compiled(request):
    model, args = models.build(request.param)
    graph = compile_etrace_graph(model, *args, include_hidden_perturb=False)
    step = Step(graph, args)
    return graph, step, step.run({}, {})


def virtual(leaf):
    """The elements of a hidden state that belong to each of the states it holds, in the order of their places."""
    numbers = np.arange(np.prod(leaf.invar.aval.shape, dtype=int)).reshape(leaf.invar.aval.shape)
    return [np.asarray(part).ravel() for part in split_leaf(leaf, jnp.asarray(numbers), leaf.varshape)]


def test_diagonal_jacobian(compiled):
    graph, step, env = compiled
    dense = step.state_jacobian()
    at = {path: n for n, path in enumerate(step.hidden)}
    group_of = {path: g.index for g in graph.hidden_groups for path in g.hidden_paths}
    for group in graph.hidden_groups:
        group.check_consistent_varshape()
        old = [env[v] for v in group.hidden_invars]
        inputs = [env[v] for v in group.transition_jaxpr_constvars]
        diagonal = np.asarray(group.diagonal_jacobian(old, inputs))
        assert diagonal.shape == (*group.varshape, group.num_state, group.num_state)
        for new, value in zip(group.hidden_outvars, group.transition(old, inputs), strict=True):
            np.testing.assert_allclose(value, step.read(env, new), **TOLERANCE)
        columns = [(leaf, ids) for leaf in group.leaves for ids in virtual(leaf)]
        for i, (leaf_i, rows) in enumerate(columns):
            for j, (leaf_j, cols) in enumerate(columns):
                full = dense[at[leaf_i.path]][at[leaf_j.path]][np.ix_(rows, cols)]
                np.testing.assert_allclose(diagonal[..., i, j].ravel(), np.diag(full), **TOLERANCE)
                if leaf_i.invar in graph.structure.matter:
                    np.testing.assert_array_equal(full - np.diag(np.diag(full)), 0)
    # States of different groups do not meet in the core.
    for i in step.hidden:
        for j in step.hidden:
            if group_of[i] != group_of[j] and graph.module_info.hidden_path_to_invar[i] in graph.structure.matter:
                np.testing.assert_array_equal(dense[at[i]][at[j]], 0)


def test_transition_jaxpr_is_the_transition(compiled):
    graph, step, env = compiled
    for group in graph.hidden_groups:
        old = [env[v] for v in group.hidden_invars]
        inputs = [env[v] for v in group.transition_jaxpr_constvars]
        jaxpr = group.transition_jaxpr
        inside = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*inputs, *old), strict=True))
        evaluate(jaxpr.eqns, inside)
        for var, inner in zip(group.hidden_outvars, jaxpr.outvars, strict=True):
            np.testing.assert_allclose(step.read(inside, inner), step.read(env, var), **TOLERANCE)


def test_df(compiled):
    graph, step, env = compiled
    legs = graph.structure.legs
    variables = list(dict.fromkeys(leg.part.var for leg in legs))
    if not variables:
        pytest.skip("no contact of this model has a trace")
    dense = step.contact_jacobian(variables)
    at = {path: n for n, path in enumerate(step.hidden)}
    for leg in legs:
        group = graph.hidden_groups[leg.group]
        (relation,) = [r for r in graph.hidden_param_op_relations if r.y_var is leg.part.var]
        (n,) = [n for n, g in enumerate(relation.hidden_groups) if g.index == leg.group]

        def new(y, n=n, relation=relation):
            return relation.y_to_hidden_groups(y, env)[n]

        value, pull = jax.vjp(new, env[leg.part.var])
        np.testing.assert_allclose(
            value, group.concat_hidden([step.read(env, v) for v in group.hidden_outvars]), **TOLERANCE
        )
        states = [(leaf, rows) for leaf in group.leaves for rows in virtual(leaf)]
        for s, (leaf, rows) in enumerate(states):
            if leaf.invar not in graph.structure.matter:
                continue
            (df,) = pull(jnp.zeros_like(value).at[..., s].set(1))
            full = dense[at[leaf.path]][variables.index(leg.part.var)][rows]  # (places, elements of y)
            places = leg.places.ravel()
            expected = np.zeros(places.size)
            fed = places >= 0
            expected[fed] = full[places[fed], np.flatnonzero(fed)]
            np.testing.assert_allclose(np.asarray(df).ravel(), expected, **TOLERANCE)
            rest = full.copy()
            rest[places[fed], np.flatnonzero(fed)] = 0
            np.testing.assert_array_equal(rest, 0)
