"""Find the user's own line in the Python stack, for messages."""

from __future__ import annotations

import linecache
import os
import sys
import traceback
from types import FrameType

import jax
import torch
import torch2jax

from etrace_bridge._jax_compat import JaxprEqn, module_scope
from etrace_bridge._jax_compat import user_line as traced_line

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_FOREIGN = (
    *(
        os.path.join(os.path.dirname(os.path.abspath(str(package.__file__))), "")
        for package in (torch, jax, torch2jax)
    ),
    _PACKAGE,
)
_ADAPTERS = f"{os.sep}adapters{os.sep}"


def is_user_file(filename: str) -> bool:
    """Return whether a source file belongs to the model rather than to torch, JAX or this package."""
    if filename.startswith(("<", *_FOREIGN)):
        return False
    return not (_ADAPTERS in filename and "etrace" in filename.lower())


def equation_line(eqn: JaxprEqn) -> str:
    """Describe the line of user code that an equation was traced from, and its module."""
    scope = module_scope(eqn).replace("/", ".")
    line = traced_line(eqn, skip=_FOREIGN) or "an unknown line"
    return f"module `{scope}`, {line}" if scope else line


def user_line() -> str:
    """Describe the innermost line of user code that is running now, as `file.py:12, in forward:
    code`.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_user_file(filename):
            code = linecache.getline(filename, frame.f_lineno).strip()
            place = f"{filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
            return f"{place}: `{code}`" if code else place
        frame = frame.f_back
    return "an unknown line"


def raised_inside(model: object, error: BaseException) -> bool:
    """Return whether an error was raised inside a call of the model, that is in one of its methods."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        frame.f_locals.get("self") is model and not frame.f_code.co_filename.startswith(_PACKAGE)
        for frame in frames
    )
