"""The command line: `python -m etrace_bridge demo|check|explain|recommend|train|bench …`.

A command is one function that adds a parser to the sub-parsers and sets `run=`, a function of the parsed arguments that returns
the exit status. `COMMANDS` lists them; to add one, write such a function and append it.

Exit status: 0 ok, 1 it ran and the answer is no (gradients are not what they should be, no rule fits, training became NaN),
2 bad use.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from etrace_bridge._errors import BridgeError, NonFiniteError
from etrace_bridge.check.gradients import check_gradients
from etrace_bridge.check.recommend import recommend
from etrace_bridge.cli.arguments import (
    BAD_USE,
    NOT_OK,
    OK,
    UsageError,
    add_common_arguments,
    add_model_arguments,
    as_chunk,
    at_least_one,
    split_names,
)
from etrace_bridge.cli.bench import add_bench
from etrace_bridge.cli.model import (
    LOSSES,
    in_layout,
    load_model,
    load_state,
    make_inputs,
    make_loss_and_targets,
    parse_shape,
)
from etrace_bridge.cli.train import add_train
from etrace_bridge.compiler.diagnostics import show_path
from etrace_bridge.compiler.graph import ETraceGraph, compile_etrace_graph
from etrace_bridge.frontend import to_jax, wrap
from etrace_bridge.learning.footprint import parse_bytes
from etrace_bridge.rules import make_rule, rule_names


def add_check(commands: Any) -> None:
    """`check`: gradients next to torch BPTT."""
    parser = commands.add_parser(
        "check", help="compare a rule's gradients with torch BPTT", description=check_gradients.__doc__.splitlines()[0]
    )
    add_model_arguments(parser)
    parser.add_argument("--steps", type=int, default=30, help="time steps of the random sequence (default 30)")
    parser.add_argument("--rule", action="append", metavar="NAME", help="rule, several for a comparison: " + ", ".join(rule_names()))
    parser.add_argument("--chunk", default="auto", help="steps in a chunk (default: a third of the sequence)")
    parser.add_argument("--loss", default="mse", help=f"{', '.join(LOSSES)}, or path/to/file.py:name (default mse)")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float64", "float32", "model"), help="precision (default float64 where the model can)"
    )
    parser.add_argument("--budget", metavar="SIZE", help="with several rules: recommend one that fits, such as 500MB")
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--plot", metavar="FILE", help="write the report as a picture (one rule)")
    parser.set_defaults(run=run_check)


def run_check(args: argparse.Namespace) -> int:
    """Runs `check`."""
    model, state = load_model(args.model, args.seed), load_state(args.state)
    batch_first = wrap(model, state).batch_first
    steps = at_least_one(args.steps, "--steps")
    xs = in_layout(make_inputs(model, parse_shape(args.input), steps, args.classes, args.seed), batch_first)
    loss, targets = make_loss_and_targets(model, xs, args.loss, batch_first, args.seed, {"state": state})
    rules = [make_rule(name) for name in split_names(args.rule) or ["d_rtrl"]]
    chunk = as_chunk(args.chunk)
    found = check_gradients(
        model, xs, targets, loss, rules if len(rules) > 1 else rules[0], chunk, state=state, dtype=None if args.dtype == "model" else args.dtype
    )  # fmt: skip
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
            raise UsageError("--budget needs several rules (--rule rtrl,d_rtrl,pp_prop); or use the command `recommend`.")
        parse_bytes(args.budget)
        content["recommended"] = found.recommend(args.budget).rule
        text += f"\n\nUnder {args.budget}: {content['recommended']}"
    print(json.dumps(content, indent=2) if args.json else text)
    return OK if found.ok else NOT_OK


def add_explain(commands: Any) -> None:
    """`explain`: the graph's report."""
    parser = commands.add_parser("explain", help="show what the compiler reads in a model, parameter by parameter")
    add_model_arguments(parser)
    parser.set_defaults(run=run_explain)


def run_explain(args: argparse.Namespace) -> int:
    """Runs `explain`."""
    graph = graph_of(args)
    if args.json:
        print(json.dumps(_graph_dict(graph), indent=2))
    else:
        print(graph.report())
    return OK


def graph_of(args: argparse.Namespace) -> ETraceGraph:
    """The compiled graph of the model that the arguments name."""
    model = load_model(args.model, args.seed)
    x = make_inputs(model, parse_shape(args.input), 1, args.classes, args.seed)[0]
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
    groups = [{"index": g.index, "states": [show_path(p) for p in g.hidden_paths]} for g in graph.hidden_groups]
    return {"parameters": parameters, "hidden_groups": groups}


def add_recommend(commands: Any) -> None:
    """`recommend`: the most faithful rule that fits."""
    parser = commands.add_parser("recommend", help="the most faithful rule within a memory budget")
    add_model_arguments(parser)
    parser.add_argument("--budget", default="500MB", help="memory, such as 500MB or 2GiB (default 500MB)")
    parser.add_argument("--steps", type=int, default=50, help="length of the sequences (default 50)")
    parser.add_argument("--rule", action="append", metavar="NAME", help="only these rules")
    parser.set_defaults(run=run_recommend)


def run_recommend(args: argparse.Namespace) -> int:
    """Runs `recommend`."""
    model = load_model(args.model, args.seed)
    x = make_inputs(model, parse_shape(args.input), 1, args.classes, args.seed)[0]
    steps = at_least_one(args.steps, "--steps")
    found = recommend(model, x, args.budget, rules=split_names(args.rule) or None, steps=steps, state=load_state(args.state))
    print(found.to_json() if args.json else found)
    return OK if found.ok else NOT_OK


def add_demo(commands: Any) -> None:
    """`demo`: a torch GRU wrapped, explained, checked and trained online."""
    parser = commands.add_parser("demo", help="wrap, explain, check and train a torch GRU online, next to torch BPTT")
    parser.add_argument("--folder", default="demo-report", help="where the report goes (default demo-report)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training images (default 10)")
    add_common_arguments(parser)
    parser.set_defaults(run=run_demo_command)


def run_demo_command(args: argparse.Namespace) -> int:
    """Runs `demo`."""
    from etrace_bridge.cli.demo import run_demo  # imports scikit-learn and matplotlib, which the other commands do not need

    page = run_demo(args.folder, at_least_one(args.epochs, "--epochs"))
    if args.json:
        print(json.dumps({"report": str(page)}))
    return OK


# One function a command; others add theirs here.
COMMANDS: list[Callable[[Any], None]] = [add_demo, add_check, add_explain, add_recommend, add_train, add_bench]


def make_parser() -> argparse.ArgumentParser:
    """The parser with every command."""
    parser = argparse.ArgumentParser(
        prog="python -m etrace_bridge",
        description="Online learning for recurrent and spiking models written in PyTorch.",
        epilog="`python -m etrace_bridge COMMAND --help` shows a command's options. Exit status: 0 ok, 1 the answer is no, 2 bad use.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in COMMANDS:
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    try:
        args = make_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed its message
        return int(stop.code or 0)
    try:
        return args.run(args)
    except NonFiniteError as error:
        if getattr(args, "debug", False):
            raise
        return _fail(str(error), args, status=NOT_OK)
    except (BridgeError, UsageError) as error:
        if getattr(args, "debug", False):
            raise
        return _fail(str(error), args)
    except KeyboardInterrupt:
        return _fail("Interrupted.", args)
    except Exception as error:
        if getattr(args, "debug", False):
            raise
        return _fail(f"{type(error).__name__}: {error}", args, "Run again with --debug for the traceback.")


def _fail(message: str, args: argparse.Namespace, hint: str = "", status: int = BAD_USE) -> int:
    if getattr(args, "json", False):
        print(json.dumps({"error": message}))
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(hint, file=sys.stderr)
    return status
