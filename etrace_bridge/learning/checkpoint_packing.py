"""One file of a checkpoint as bytes: safetensors with a list of its arrays and checksums."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from etrace_bridge._errors import CheckpointError, InputError

FORMAT = 2


SUFFIX = ".safetensors"


_BLANK = b"0" * 64


_DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')


Tensors = dict[str, torch.Tensor]


def pack(tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> bytes:
    """Make a safetensors file with a list of its arrays, `about` and its own checksum."""
    listed = {name: _describe(tensor) for name, tensor in tensors.items()}
    text = json.dumps({"format": FORMAT, "arrays": listed, **about}, default=_as_plain)
    stored = {name: _as_stored(tensor) for name, tensor in tensors.items()}
    content = safetensors.torch.save(stored, {"etrace_bridge": text, "sha256": _BLANK.decode()})
    start, _ = _find_digest(content)
    return content[:start] + hashlib.sha256(content).hexdigest().encode() + content[start + 64 :]


def unpack(content: bytes, path: Path) -> tuple[Tensors, dict[str, Any]]:
    """Return the arrays and `about` of a file made by `pack`; raise if anything in it has changed."""
    try:
        # `load` returns them in no particular order
        tensors = dict(sorted(safetensors.torch.load(content).items()))
        metadata = read_metadata(content)
        about = json.loads(metadata["etrace_bridge"]) if metadata else None
    except (
        safetensors.SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        RecursionError,
        AttributeError,
    ) as error:
        raise CheckpointError(
            f"{str(path)!r} is not a checkpoint that can be read: {error}"
        ) from error
    if about is None:
        raise InputError(
            f"{str(path)!r} holds weights only: it was not written by `save`. Load it with torch's "
            "`load_state_dict`."
        )
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(
            _other_format(path, about.get("format") if isinstance(about, dict) else about)
        )
    _check_digest(content, path)
    listed = about.get("arrays")
    tensors = {
        name: _as_listed(tensor, listed.get(name) if isinstance(listed, dict) else None)
        for name, tensor in tensors.items()
    }
    _check_arrays(tensors, listed, path)
    return tensors, about


def _other_format(path: Path, found: Any) -> str:
    fix = "Its weights can be used: `model.load_state_dict(safetensors.torch.load_file(path))`, and train on from there."
    if found in (1, None):
        return f"{str(path)!r} has format 1, which has no checksums, so damage in it would not be noticed; it is not read. {fix}"
    return f"{str(path)!r} has format {found!r}; this version reads format {FORMAT}. {fix}"


def _as_plain(value: Any) -> Any:
    """Convert a number of NumPy, torch or JAX for JSON."""
    return (
        value.item()
        if getattr(value, "size", None) == 1 or getattr(value, "ndim", None) == 0
        else str(value)
    )


def read_metadata(content: bytes) -> dict[str, str]:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]).get("__metadata__", {})


def _find_digest(content: bytes) -> tuple[int, bytes]:
    """Return the position and the text of a file's own checksum."""
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    found = list(_DIGEST.finditer(header))
    if len(found) != 1:
        raise ValueError(f"the header has {len(found)} checksums")
    return 8 + found[0].start(1), found[0].group(1)


def _check_digest(content: bytes, path: Path) -> None:
    try:
        start, stored = _find_digest(content)
    except ValueError as error:
        raise CheckpointError(
            f"{str(path)!r} is damaged: {error}. Use an older checkpoint."
        ) from error
    if (
        hashlib.sha256(content[:start] + _BLANK + content[start + 64 :]).hexdigest().encode()
        != stored
    ):
        raise CheckpointError(
            f"{str(path)!r} is damaged, or was changed after it was saved: its checksum does not "
            "match. Use an older checkpoint."
        )


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a dtype that safetensors knows.

    It does not know complex128, which is stored as pairs of real numbers.
    """
    return torch.view_as_real(tensor).contiguous() if tensor.dtype == torch.complex128 else tensor


def _as_listed(tensor: torch.Tensor, listed: Any) -> torch.Tensor:
    """Return the tensor that was stored, by its entry in the list."""
    is_pairs = (
        isinstance(listed, list)
        and listed[:1] == ["complex128"]
        and tensor.dtype == torch.float64
        and tensor.shape[-1:] == (2,)
    )
    return torch.view_as_complex(tensor) if is_pairs else tensor


def _describe(tensor: torch.Tensor) -> list[Any]:
    """Return dtype, shape and the number of NaN and infinite elements."""
    odd = (
        int((~torch.isfinite(tensor)).sum())
        if tensor.is_floating_point() or tensor.is_complex()
        else 0
    )
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), odd]


def _check_arrays(tensors: Tensors, listed: Any, path: Path) -> None:
    """Raise unless the arrays, with their NaN and infinities, are those listed when writing."""
    if not isinstance(listed, dict):
        raise CheckpointError(
            f"{str(path)!r} is damaged: it has no list of its arrays. Use an older checkpoint."
        )
    found = {name: _describe(tensor) for name, tensor in tensors.items()}
    wrong = sorted(
        name for name in found.keys() | listed.keys() if found.get(name) != listed.get(name)
    )
    if wrong:
        name = wrong[0]
        raise CheckpointError(
            f"{str(path)!r} is damaged: `{name}` is {found.get(name, 'missing')}, but "
            f"{listed.get(name, 'nothing')} was saved (dtype, shape, number of NaN and infinite "
            f"elements). {len(wrong)} of its arrays differ."
        )
