"""Find the user's own line in the Python stack, for messages."""

from __future__ import annotations

import linecache
import os
import sys
from types import FrameType

import jax
import torch
import torch2jax

_FOREIGN = tuple(os.path.join(os.path.dirname(os.path.abspath(str(package.__file__))), "") for package in (torch, jax, torch2jax)) + (
    os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ""),
)
_ADAPTERS = f"{os.sep}adapters{os.sep}"


def is_user_file(filename: str) -> bool:
    """Tell whether a source file belongs to the model rather than to torch, JAX or this package."""
    if filename.startswith(("<", *_FOREIGN)):
        return False
    return not (_ADAPTERS in filename and "etrace" in filename.lower())


def user_line() -> str:
    """Describe the innermost line of user code that is running now, as `file.py:12, in forward: code`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_user_file(filename):
            code = linecache.getline(filename, frame.f_lineno).strip()
            place = f"{filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
            return f"{place}: `{code}`" if code else place
        frame = frame.f_back
    return "an unknown line"
