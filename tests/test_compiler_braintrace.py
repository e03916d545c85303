"""Against braintrace, for the cells it ships: the same hidden groups; relations for at least the
same parameters.
"""

from __future__ import annotations

import warnings

import brainstate
import braintrace
import jax.numpy as jnp
import pytest

import etrace_bridge as eb
import models
from models import B, H, I

X = jnp.ones((B, I))
CELLS = [
    "ValinaRNNCell", "GRUCell", "CFNCell", "MGUCell", "LSTMCell", "URLSTMCell", "MinimalRNNCell", "MiniGRU", "MiniLSTM",
    "LRUCell",
]  # fmt: skip


def theirs(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it leaves out
        groups, _ = braintrace.find_hidden_groups_from_module(model, X)
        relations = braintrace.find_hidden_param_op_relations_from_module(model, X)
    paths = {
        p for r in relations for p in getattr(r, "trainable_paths", {"weight": r.path}).values()
    }
    return [tuple(g.hidden_paths) for g in groups], paths


def ours(model):
    graph = eb.compile_etrace_graph(model, X)
    paths = {p for r in graph.hidden_param_op_relations for p in r.trainable_paths.values()}
    return [g.hidden_paths for g in graph.hidden_groups], paths, graph


@pytest.mark.implicit_promotion("braintrace's own code promotes")
@pytest.mark.parametrize("name", CELLS)
def test_its_own_cells(name):
    """Its layers multiply by primitives of their own, which are read as the plain operations that
    they stand for.
    """
    model = getattr(braintrace.nn, name)(I, H)
    brainstate.nn.init_all_states(model, batch_size=B)
    their_groups, their_paths = theirs(model)
    our_groups, our_paths, graph = ours(model)
    assert our_groups == their_groups
    assert their_paths
    assert our_paths == their_paths
    # What neither traces, ours accounts for: a reset gate is upstream of another weight, a readout
    # is direct.
    for path, certificate in graph.certificate().items():
        assert (certificate.kind == "traced") == (path in our_paths)
        assert certificate.kind in ("traced", "upstream", "direct")


@pytest.mark.parametrize("name", ["ValinaRNNCell", "GRUCell", "MGUCell", "LSTMCell"])
def test_plain_cells(name):
    """It reads only weights that go through its own layers, so plain cells have no relation there;
    ours need no mark.
    """
    model, _ = models.build(name)
    their_groups, their_paths = theirs(model)
    our_groups, our_paths, _ = ours(model)
    assert our_groups == their_groups
    assert their_paths == set()
    assert our_paths == {
        p for p, s in model.states().items() if isinstance(s, brainstate.ParamState)
    }
