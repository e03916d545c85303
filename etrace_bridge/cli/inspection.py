"""Run `check`, `explain` and `recommend`."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import brainstate
import torch

from etrace_bridge._bytes import parse_bytes
from etrace_bridge.check.gradients import check_gradients
from etrace_bridge.check.recommend import recommend
from etrace_bridge.cli.arguments import NOT_OK, OK, UsageError, as_chunk, at_least_one, split_names
from etrace_bridge.cli.model import (
    in_layout,
    load_any_model,
    load_state,
    make_inputs,
    make_loss_and_targets,
    make_module_data,
    parse_shape,
)
from etrace_bridge.compiler.diagnostics import show_path
from etrace_bridge.compiler.graph import ETraceGraph, compile_etrace_graph
from etrace_bridge.frontend import to_jax, wrap
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.inputs import as_array
from etrace_bridge.rules import make_rule


def run_check(args: argparse.Namespace) -> int:
    """Run `check`."""
    model, state = load_any_model(args.model, args.seed), load_state(args.state)
    steps, shape = at_least_one(args.steps, "--steps"), parse_shape(args.input)
    if isinstance(model, brainstate.nn.Module):
        xs, loss, targets = make_module_data(
            model, shape, steps, args.classes, args.loss, args.seed
        )
    else:
        batch_first = wrap(model, state).batch_first
        xs = in_layout(make_inputs(model, shape, steps, args.classes, args.seed), batch_first)
        loss, targets = make_loss_and_targets(
            model, xs, args.loss, batch_first, args.seed, {"state": state}
        )
    rules = [make_rule(name) for name in split_names(args.rule) or ["d_rtrl"]]
    chunk = as_chunk(args.chunk)
    dtype = None if args.dtype == "model" else args.dtype
    run = partial(check_gradients, model, xs, targets, loss, state=state, dtype=dtype)
    found = run(rule=rules if len(rules) > 1 else rules[0], chunk=chunk)
    content = found.to_dict()
    if args.html:
        found.to_html(args.html)
    if args.plot:
        if len(rules) > 1:
            raise UsageError("--plot shows one rule; use --html for several.")
        found.plot(args.plot)
    text = str(found)
    if args.budget:
        if len(rules) < 2:
            raise UsageError(
                "--budget needs several rules (--rule rtrl,d_rtrl,pp_prop); or use the command "
                "`recommend`."
            )
        parse_bytes(args.budget)
        content["recommended"] = found.recommend(args.budget).rule
        text += f"\n\nUnder {args.budget}: {content['recommended']}"
    print(json.dumps(content, indent=2) if args.json else text)
    return OK if found.ok else NOT_OK


def _one_step(model: Any, args: argparse.Namespace) -> torch.Tensor:
    """Return a random input of one time step."""
    torch_model = model if isinstance(model, torch.nn.Module) else torch.nn.Identity()
    return make_inputs(torch_model, parse_shape(args.input), 1, args.classes, args.seed)[0]


def run_explain(args: argparse.Namespace) -> int:
    """Run `explain`."""
    graph = graph_of(args)
    if args.json:
        print(json.dumps(_graph_dict(graph), indent=2))
    else:
        print(graph.report())
    return OK


def graph_of(args: argparse.Namespace) -> ETraceGraph:
    """Return the compiled graph of the model that the arguments name."""
    model = load_any_model(args.model, args.seed)
    x = _one_step(model, args)
    if isinstance(model, brainstate.nn.Module):
        return CompiledStep(model, [as_array(x)]).program.graph
    net = wrap(model, load_state(args.state), example_input=x)
    net.init_state(batch_size=x.shape[0])
    return compile_etrace_graph(net, to_jax(x), include_hidden_perturb=False)


def _graph_dict(graph: ETraceGraph) -> dict[str, Any]:
    parameters = [
        {
            "name": show_path(path),
            "kind": c.kind,
            "exact": c.exact,
            "reason": c.reason,
            "drops": [str(d) for d in c.drops],
            "hidden_groups": list(c.groups),
        }
        for path, c in graph.certificate().items()
    ]
    groups = [
        {"index": g.index, "states": [show_path(p) for p in g.hidden_paths]}
        for g in graph.hidden_groups
    ]
    return {"parameters": parameters, "hidden_groups": groups}


def run_recommend(args: argparse.Namespace) -> int:
    """Run `recommend`."""
    model = load_any_model(args.model, args.seed)
    x = _one_step(model, args)
    steps = at_least_one(args.steps, "--steps")
    found = recommend(
        model,
        x,
        args.budget,
        rules=split_names(args.rule) or None,
        steps=steps,
        state=load_state(args.state),
    )
    print(found.to_json() if args.json else found)
    return OK if found.ok else NOT_OK
