"""Write a report to a text or JSON file."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from etrace_bridge._errors import InputError


def write_json(content: dict[str, Any], path: str | PathLike | None) -> str:
    """Return content as JSON text, and write it to `path` if one is given."""
    text = json.dumps(content, indent=2, allow_nan=False)
    if path is not None:
        write_text(text + "\n", path)
    return text


def write_text(text: str, path: str | PathLike) -> Path:
    """Write a text file; raise an `InputError` that names the path if that fails."""
    path = Path(path)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"Cannot write `{path}`: {error.strerror}. Pass the path of a file in a folder that exists."
        ) from error
    return path
