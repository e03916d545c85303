"""The files of an exported learner."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export

from etrace_bridge._errors import InputError
from etrace_bridge.frontend import InputRange

FORMAT = 2


def array_row(name: str, shape: Any) -> dict[str, Any]:
    return {
        "name": name,
        "shape": [d if isinstance(d, int) else str(d) for d in shape.shape],
        "dtype": str(shape.dtype),
    }


def index_facts(ranges: Sequence[InputRange], position: int, batch: str) -> dict[str, Any]:
    """Return what a program demands of an input that it uses as indices.

    A compiled program clamps indices that are out of range. Demands on some elements only are left out where the
    batch size is open.
    """
    facts = [
        {
            **{
                key: value if isinstance(value, str) or value is None else int(value)
                for key, value in dataclasses.asdict(r.range).items()
            },
            "elements": None if r.elements is None else [int(n) for n in r.elements],
            "size": int(r.size),
        }
        for r in ranges
        if r.position == position and (r.elements is None or batch == "fixed")
    ]
    return {"indices": facts} if facts else {}


def program_file(name: str, exported: jax.export.Exported) -> str:
    return f"{name}.{'-'.join(exported.platforms)}.stablehlo"


def program_facts(name: str, exported: jax.export.Exported) -> dict[str, Any]:
    """Return what a reader needs, besides the module, to make a `jax.export.Exported`."""
    return {
        "file": program_file(name, exported),
        "platforms": list(exported.platforms),
        "calling_convention_version": exported.calling_convention_version,
        "kept": list(exported.module_kept_var_idx),
        "results": [array_row(f"result {n}", aval) for n, aval in enumerate(exported.out_avals)],
    }


def checksum(content: bytes) -> str:
    """Return the SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """Return the manifest as it is signed: sorted, without its own checksum."""
    return json.dumps(
        {k: v for k, v in manifest.items() if k != "checksum"}, sort_keys=True
    ).encode()


def write_folder(path: Path, files: dict[str, bytes], manifest: dict[str, Any]) -> Path:
    """Write a new folder beside `path` and replace `path` by it."""
    if path.exists() and not (path / "manifest.json").is_file():
        raise InputError(
            f"{str(path)!r} exists and is not an exported learner. Choose another path."
        )
    manifest["files"] = {name: checksum(content) for name, content in files.items()}
    manifest["checksum"] = checksum(manifest_bytes(manifest))
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (
        path.with_name(f".{path.name}.{secrets.token_hex(4)}.{kind}") for kind in ("new", "old")
    )
    fresh.mkdir()
    try:
        for name, content in (
            files | {"manifest.json": json.dumps(manifest, indent=1).encode()}
        ).items():
            (fresh / name).write_bytes(content)
        if path.exists():
            os.replace(path, old)
        os.replace(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
    return path
