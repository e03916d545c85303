"""The command line: `python -m etrace_bridge
demo|check|explain|recommend|train|evaluate|predict|bench|completion …`.

A command is one function that adds a parser to the sub-parsers and sets `run=`, a function of the
parsed arguments that returns the exit status. `COMMANDS` lists them; to add one, write such a
function and append it. What a command needs is imported when it runs, so that `--help` is quick.

Exit status: 0 ok, 1 it ran and the answer is no (gradients are not what they should be, no rule
fits, training became NaN), 2 bad use, 130 and 143 after Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import etrace_bridge
from etrace_bridge._errors import BridgeError, NonFiniteError
from etrace_bridge.cli.arguments import (
    BAD_USE,
    INTERRUPTED,
    LOSS_NAMES,
    NOT_OK,
    RULE_NAMES,
    RULE_OPTIONS,
    UsageError,
    add_common_arguments,
    add_data_arguments,
    add_model_arguments,
    later,
)
from etrace_bridge.cli.completion import add_completion
from etrace_bridge.cli.training_arguments import add_evaluate, add_predict, add_train


def add_check(commands: Any) -> None:
    """Add `check`: gradients compared with BPTT's."""
    parser = commands.add_parser(
        "check",
        help="compare a rule's gradients with BPTT's",
        description="Compares the gradients of a rule with those of torch's BPTT, for a brainstate "
        "module with jax.grad through time, parameter by parameter.",
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--steps", type=int, default=30, help="time steps of the random sequence (default 30)"
    )
    parser.add_argument(
        "--rule",
        action="append",
        metavar="NAME",
        help=f"rule, several for a comparison: {', '.join(RULE_NAMES)}; {RULE_OPTIONS}",
    )
    parser.add_argument(
        "--chunk", default="auto", help="steps in a chunk (default: a third of the sequence)"
    )
    parser.add_argument(
        "--loss",
        default="mse",
        help=f"{', '.join(LOSS_NAMES)}, or path/to/file.py:name (default mse)",
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float64", "float32", "model"),
        help="precision (default float64 where the model can)",
    )
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="with several rules: recommend one that fits, such as 500MB",
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file")
    parser.add_argument("--plot", metavar="FILE", help="write the report as a picture (one rule)")
    parser.set_defaults(run=later("inspection", "run_check"))


def add_explain(commands: Any) -> None:
    """Add `explain`: the graph's report."""
    parser = commands.add_parser(
        "explain", help="show what the compiler reads in a model, parameter by parameter"
    )
    add_model_arguments(parser)
    parser.set_defaults(run=later("inspection", "run_explain"))


def add_recommend(commands: Any) -> None:
    """Add `recommend`: the most faithful rule that fits."""
    parser = commands.add_parser("recommend", help="the most faithful rule within a memory budget")
    add_model_arguments(parser)
    parser.add_argument(
        "--budget", default="500MB", help="memory, such as 500MB or 2GiB (default 500MB)"
    )
    parser.add_argument(
        "--steps", type=int, default=50, help="length of the sequences (default 50)"
    )
    parser.add_argument(
        "--rule", action="append", metavar="NAME", help=f"only these rules; {RULE_OPTIONS}"
    )
    parser.set_defaults(run=later("inspection", "run_recommend"))


def add_demo(commands: Any) -> None:
    """Add `demo`: a torch GRU wrapped, explained, checked and trained online."""
    parser = commands.add_parser(
        "demo", help="show memory, and train a torch GRU online on a stream, next to torch BPTT"
    )
    parser.add_argument(
        "--folder", default="demo-report", help="where the report goes (default demo-report)"
    )
    parser.add_argument(
        "--steps", type=int, default=24_400, help="samples of the stream (default 24400)"
    )
    add_common_arguments(parser)
    parser.set_defaults(run=later("demo", "run_demo_command"))


def add_bench(commands: Any) -> None:
    """Add `bench`: rules compared with torch BPTT."""
    parser = commands.add_parser(
        "bench",
        help="time and memory of each rule's gradients, next to torch BPTT",
        description="Measures the gradients of one random sequence. Other work on the machine shows in the times; ratios suffer less.",
    )
    parser.add_argument(
        "model",
        nargs="?",
        help="path/to/file.py:name of a torch module or its maker (default: a GRU with a readout)",
    )
    parser.add_argument(
        "--input",
        metavar="SIZES",
        help="shape of one time step, batch first (default 16,32 for the GRU)",
    )
    parser.add_argument(
        "--hidden", type=int, default=64, metavar="N", help="hidden size of the GRU (default 64)"
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="time steps of the sequence (default 200)"
    )
    parser.add_argument(
        "--rule",
        action="append",
        metavar="NAME",
        help=f"{', '.join(RULE_NAMES)} (default d_rtrl,pp_prop); {RULE_OPTIONS}",
    )
    parser.add_argument("--chunk", default="auto", help="steps in a chunk, or auto (default auto)")
    parser.add_argument(
        "--loss",
        default="mse",
        help=f"{', '.join(LOSS_NAMES)}, or path/to/file.py:name (default mse)",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="the least of so many times counts (default 5)",
    )
    add_data_arguments(parser)
    add_common_arguments(parser)
    parser.set_defaults(run=later("bench", "run_bench"))


# One function a command; others add theirs here.
COMMANDS: list[Callable[[Any], None]] = [
    add_demo,
    add_check,
    add_explain,
    add_recommend,
    add_train,
    add_evaluate,
    add_predict,
    add_bench,
    add_completion,
]


# print nothing before their result
QUIET = ("check", "explain", "recommend", "evaluate", "predict", "bench")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser with every command."""
    parser = argparse.ArgumentParser(
        prog="python -m etrace_bridge",
        description="Online learning for recurrent and spiking models written in PyTorch.",
        epilog="`python -m etrace_bridge COMMAND --help` shows a command's options. Exit status: 0 ok, 1 the answer is no, 2 bad use.",
    )
    parser.add_argument(
        "--version", action="version", version=f"etrace-bridge {etrace_bridge.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in COMMANDS:
        add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        args = make_parser().parse_args(given)
    except SystemExit as stop:  # argparse has printed its message
        return int(stop.code or 0)
    args.given = given
    word = threading.Timer(1.0, _say_working)
    word.daemon = True
    try:
        if args.command in QUIET and sys.stderr.isatty():
            word.start()
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
        return _fail("Interrupted.", args, status=INTERRUPTED)
    except Exception as error:
        if getattr(args, "debug", False):
            raise
        return _fail(
            f"{type(error).__name__}: {error}", args, "Run again with --debug for the traceback."
        )
    finally:
        word.cancel()


def _say_working() -> None:
    print("compiling and running …", file=sys.stderr, flush=True)


def _fail(message: str, args: argparse.Namespace, hint: str = "", status: int = BAD_USE) -> int:
    if getattr(args, "json", False):
        print(json.dumps({"error": message}))
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(hint, file=sys.stderr)
    return status
