"""The compiler's public classes and builders, its report, and that the same model gives the same
graph every time.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import etrace_bridge as eb
import models
from models import B, H, I
from oracle_compiler import Step


def test_names_are_exported():
    for name in (
        "ModuleInfo HiddenGroup HiddenParamOpRelation HiddenPerturbation ETraceGraph "
        "CompilationRecord DiagnosticKind DiagnosticLevel NotSupportedError compile_etrace_graph "
        "extract_module_info find_hidden_groups_from_module find_hidden_groups_from_minfo "
        "find_hidden_param_op_relations_from_module find_hidden_param_op_relations_from_minfo "
        "add_hidden_perturbation_in_module add_hidden_perturbation_from_minfo register_contact "
        "register_elementwise"
    ).split():
        assert name in eb.__all__
        assert getattr(eb, name).__doc__


def test_what_the_report_is_made_of_is_named_in_the_compiler_s_package():
    for name in ("ContactForm", "Cut", "Drop", "WeightView"):
        assert getattr(eb.compiler, name).__doc__
        assert name not in eb.__all__


# Hidden groups
# ------------------------------------------------------------------------------------------------------


def test_group_fields():
    graph = models.graph_of("torch_lstm")
    (group,) = graph.hidden_groups
    assert list(group.dict())[:7] == [
        "index", "hidden_paths", "hidden_states", "hidden_invars", "hidden_outvars", "transition_jaxpr",
        "transition_jaxpr_constvars",
    ]  # fmt: skip
    assert group.hidden_paths == (("h",), ("c",))
    assert group.varshape == (B, H)
    assert group.num_state == 2
    assert graph.hid_path_to_group == {("h",): group, ("c",): group}


@pytest.mark.parametrize(
    ("name", "shapes", "joined"),
    [
        ("torch_lstm", [(B, H), (B, H)], (B, H, 2)),
        ("packed_concat", [(B, 2 * H)], (B, H, 2)),
        ("packed_stack", [(B, H, 2)], (B, H, 2)),
        ("group_state", [(B, H, 3)], (B, H, 3)),
        ("lstm_unbatched", [(H,), (H,)], (H, 2)),
        ("leading_axis", [(1, B, H)], (1, B, H, 1)),
    ],
)
def test_concat_and_split(name, shapes, joined):
    (group,) = models.graph_of(name).hidden_groups
    values = [jnp.arange(float(np.prod(s))).reshape(s) + 100 * n for n, s in enumerate(shapes)]
    array = group.concat_hidden(values)
    assert array.shape == joined
    for value, back in zip(values, group.split_hidden(array), strict=True):
        np.testing.assert_array_equal(back, value)


def test_packed_states_come_apart_in_order():
    (group,) = models.graph_of("packed_concat").hidden_groups
    h, c = jnp.zeros((B, H)), jnp.ones((B, H))
    array = group.concat_hidden([jnp.concatenate([h, c], axis=1)])
    np.testing.assert_array_equal(array[..., 0], h)
    np.testing.assert_array_equal(array[..., 1], c)


def test_group_errors():
    (group,) = models.graph_of("torch_lstm").hidden_groups
    with pytest.raises(eb.InputError, match="has 2 states, but 1 values were given"):
        group.concat_hidden([jnp.zeros((B, H))])
    with pytest.raises(eb.InputError, match="has 2 states; the last axis of the array is 3"):
        group.split_hidden(jnp.zeros((B, H, 3)))
    with pytest.raises(
        eb.InputError, match=r"takes 2 hidden values and \d+ input values; 1 and 0 were given"
    ):
        group.transition([jnp.zeros((B, H))], [])
    other = models.graph_of("two_shapes").hidden_groups
    mixed = dataclasses.replace(group, leaves=(other[0].leaves[0], other[1].leaves[0]))
    with pytest.raises(eb.NotSupportedError, match=r"different shapes: `h` \(2, 4\), `k` \(2, 6\)"):
        mixed.check_consistent_varshape()


def test_an_example_may_be_a_torch_tensor():
    model, (x,) = models.build("stacked")
    given = eb.compile_etrace_graph(model, torch.from_numpy(np.array(x)))
    assert str(given.module_info.jaxpr) == str(eb.compile_etrace_graph(model, x).module_info.jaxpr)


def test_group_builders():
    model, args = models.build("stacked")
    for groups, by_path in (
        eb.find_hidden_groups_from_module(model, *args),
        eb.find_hidden_groups_from_minfo(eb.extract_module_info(model, *args)),
    ):
        assert [g.hidden_paths for g in groups] == [(("h1",),), (("h2",),)]
        assert by_path == {("h1",): groups[0], ("h2",): groups[1]}


# Relations
# ----------------------------------------------------------------------------------------------------------


def test_relation_fields():
    graph, (model, _) = models.graph_of("pytree"), models.build("pytree")
    kernel, bias = graph.hidden_param_op_relations
    assert list(kernel.dict())[:12] == [
        "primitive", "x_var", "y_var", "hidden_groups", "y_to_hidden_group_jaxprs", "connected_hidden_paths",
        "eqn_params", "trainable_vars", "trainable_paths", "trainable_leaf_indices", "trainable_param_states",
        "weight_view",
    ]  # fmt: skip
    assert str(kernel.primitive) == "dot_general"
    assert "dimension_numbers" in kernel.eqn_params
    assert kernel.x_var is graph.module_info.jaxpr.invars[0]
    assert bias.x_var is None
    assert (kernel.path, bias.path) == (("p",), ("p",))
    assert kernel.trainable_leaf_indices == {"weight": 1}
    assert bias.trainable_leaf_indices == {"bias": 0}
    assert kernel.trainable_paths == {"weight": ("p",)}
    assert kernel.trainable_vars["weight"].aval.shape == (I, H)
    assert (
        kernel.trainable_param_states["weight"] is graph.module_info.retrieved_model_states[("p",)]
    )
    assert kernel.connected_hidden_paths == (("h",),)
    assert kernel.hidden_groups == graph.hidden_groups
    np.testing.assert_array_equal(
        model.p.value["kernel"], kernel.trainable_param_states["weight"].value["kernel"]
    )


def test_y_to_hidden_groups():
    graph = models.graph_of("two_groups_one_weight")
    (_, args) = models.build("two_groups_one_weight")
    (relation,) = graph.hidden_param_op_relations
    step = Step(graph, args)
    env = step.run({}, {})
    joined = relation.y_to_hidden_groups(env[relation.y_var], env)
    apart = relation.y_to_hidden_groups(env[relation.y_var], env, concat_hidden_vals=False)
    for group, new, together, (alone,) in zip(
        graph.hidden_groups, step.new_states(env), joined, apart, strict=True
    ):
        assert group.num_state == 1
        np.testing.assert_allclose(together[..., 0], new)
        np.testing.assert_allclose(alone, new)
    with pytest.raises(
        eb.InputError, match=r"`const_vals` lacks \d of the \d variables that hidden group 0 reads"
    ):
        relation.y_to_hidden_groups(env[relation.y_var], {})


def test_relation_builders():
    model, args = models.build("rnn")
    for relations in (
        eb.find_hidden_param_op_relations_from_module(model, *args),
        eb.find_hidden_param_op_relations_from_minfo(eb.extract_module_info(model, *args)),
    ):
        assert [r.path for r in relations] == [("w",), ("u",), ("b",)]


# The graph, its records and its report
# ------------------------------------------------------------------------------


def test_graph_fields():
    graph = models.graph_of("stacked")
    assert list(graph.dict())[:6] == [
        "module_info", "hidden_groups", "hid_path_to_group", "hidden_param_op_relations", "hidden_perturb",
        "diagnostics",
    ]  # fmt: skip
    assert list(graph.certificate()) == list(graph.module_info.weight_path_to_invars)
    assert "drops `h2` -> product with `u2`" in graph.certificate()[("w2",)].reason
    assert (
        models.graph_of("masked").certificate()[("w",)].reason
        == "every path through time is position by position"
    )


def test_explain():
    graph = models.graph_of("stacked")
    assert graph.explain() == list(graph.diagnostics)
    included = graph.explain(weight_path=("w1",), kind="relation_included")
    assert [r.message for r in included] == ["`w1` enters hidden group 0 (h1) by `dot_general`"]
    assert included == graph.explain(weight_path=["w1"], kind=eb.DiagnosticKind.RELATION_INCLUDED)
    cuts = graph.explain(hidden_path=("h2",), kind="cut")
    assert [r.context["into"] for r in cuts] == [(("h2",),), (("h2",),)]
    assert cuts[0].context["parameters"] == (("w1",), ("u1",))
    assert "models.py" in cuts[0].context["line"]
    assert cuts[0].level is eb.DiagnosticLevel.INFO
    assert str(cuts[1]).startswith("[info] cut: no trace follows `h2` through product with `u2`")
    with pytest.raises(ValueError, match="no_such_kind"):
        graph.explain(kind="no_such_kind")


def test_records_of_parameters_outside_the_recurrence():
    graph = models.graph_of("encoder_readout")
    assert [r.weight_path for r in graph.explain(kind="upstream_of_another_weight")] == [
        ("w_in",),
        ("b_in",),
    ]
    assert [r.weight_path for r in graph.explain(kind="non_temporal")] == [("w_out",), ("b_out",)]
    (unused,) = models.graph_of("unused_state").explain(kind="unused_parameter")
    assert unused.weight_path == ("spare",)
    (packed,) = models.graph_of("packed_stack").explain(kind="state_packed")
    assert packed.context == {"axis": 2, "count": 2}


def test_report():
    report = models.graph_of("two_shapes").report()
    table, groups, cuts = report.split("\n\n")[1:]
    assert report.startswith("Online gradients (D-RTRL) of 3 parameters: 2 exact, 1 approximate\n")
    assert table == (
        "parameter  contact      hidden group  gradient\n"
        "---------  -----------  ------------  ----------------------\n"
        "w          dot_general  0: h          approximate: drops [1]\n"
        "u          dot_general  1: k          exact\n"
        "mix        dot_general  1: k          exact"
    )
    assert groups == (
        "hidden group  state  shape\n"
        "------------  -----  ------\n"
        "0             h      (2, 4)\n"
        "1             k      (2, 6)"
    )
    assert cuts.splitlines()[1].startswith("  [1] h, w -> product with `mix` (tests/models.py:")
    assert cuts.endswith("(two_shapes)) -> k")


@pytest.mark.parametrize("name", list(models.ZOO))
def test_every_report_accounts_for_every_parameter(name):
    graph = models.graph_of(name)
    lines = graph.report().splitlines()
    assert all(len(line) == len(line.rstrip()) for line in lines)
    for path, certificate in graph.certificate().items():
        (row,) = [line for line in lines if line.split("  ")[0] == ".".join(path)]
        verdict = (
            "none"
            if certificate.kind == "unused"
            else "exact"
            if certificate.exact
            else "approximate"
        )
        assert verdict in row
        for number in [part for part in row.replace(",", " ").split() if part.startswith("[")]:
            assert any(line.startswith(f"  {number} ") for line in lines)


SCRIPT = """
import brainstate
brainstate.environ.set(precision=64)
import models
from test_compiler_graph import describe
for name in models.ZOO:
    graph = models.graph_of(name)
    print(name, graph.report(), describe(graph), *graph.diagnostics, graph.module_info.jaxpr, sep="\\n")
    print([(str(r.weight_view), str(r.y_to_hidden_group_jaxprs[0])) for r in graph.hidden_param_op_relations])
    print([(leg.contact.index, leg.group, leg.positions.tolist()) for leg in graph.structure.legs])
"""


def test_the_hash_seed_changes_nothing():
    here = Path(__file__).parent
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=here,
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    (first, error), (second, _) = (run.communicate() for run in runs)
    assert [run.returncode for run in runs] == [0, 0], error
    assert "torch_gru" in first
    assert first == second
