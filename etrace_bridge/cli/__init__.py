"""The command line: `python -m etrace_bridge`."""

from etrace_bridge.cli.commands import main

__all__ = ["main"]
