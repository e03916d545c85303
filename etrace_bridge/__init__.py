"""Online learning for recurrent and spiking models written in PyTorch.

The public names are those of `_public`. They are imported when the first of them is used: JAX,
torch and brainstate take seconds, which `python -m etrace_bridge --help` does not need.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etrace_bridge._public import *  # noqa: F403


__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = importlib.import_module("etrace_bridge._public")
    globals().update(
        {
            each: vars(public)[each]
            for each in ("__all__", *vars(public).get("__all__", ()))
            if each in vars(public)
        }
    )
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def _version() -> str:
    """The version of the installed distribution; it is read only when it is asked for."""
    try:
        return importlib.metadata.version("etrace-bridge")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return "0+not.installed"


def __dir__() -> list[str]:
    private = {"annotations", "importlib", "Any", "TYPE_CHECKING"}
    public = importlib.import_module("etrace_bridge._public").__all__
    return sorted(({*globals()} - private) | {"__version__", *public})
