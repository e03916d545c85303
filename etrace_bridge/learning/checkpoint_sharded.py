"""Checkpoints of learners whose arrays are spread over several processes: a folder, written by
orbax.

Every process writes its own part. A new checkpoint is a new numbered folder inside, which counts
once it is complete; then its predecessor is removed. Any number of processes and devices can read
it: each reads the parts that its own mesh assigns to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from etrace_bridge._errors import BridgeError, CheckpointError, InputError
from etrace_bridge.frontend import to_torch
from etrace_bridge.learning.checkpoint_arrays import raise_differences
from etrace_bridge.learning.placement import Placement

FORMAT = 1
STATE, HOST, ABOUT = "state", "host", "about"  # the items of a checkpoint


def is_sharded(path: str | os.PathLike) -> bool:
    """Return whether `write_sharded` made this folder."""
    path = sharded_folder(path)
    return path.is_dir() and any(
        child.name.isdigit() and child.is_dir() for child in path.iterdir()
    )


def sharded_folder(path: str | os.PathLike) -> Path:
    """Return the folder of a checkpoint: `path` without `.safetensors`."""
    path = Path(path).absolute()
    return path.with_suffix("") if path.suffix == ".safetensors" else path


def write_sharded(
    path: str | os.PathLike,
    state: Mapping[str, Any],
    held: Mapping[str, torch.Tensor],
    facts: Mapping[str, Any],
) -> Path:
    """Write a learner; every process must call this.

    Args:
        path: the folder.
        state: JAX arrays by name, each process with its own parts.
        held: further tensors by name, the same in every process.
        facts: what JSON can hold, likewise.
    """
    ocp, folder = _orbax(), sharded_folder(path)
    arrays = {name: _as_numpy(tensor) for name, tensor in held.items()}
    numbers = {name: _as_numbers(x) for name, x in state.items()}
    about = {
        "format": FORMAT,
        "facts": dict(facts),
        STATE: _describe(numbers),
        HOST: _describe(arrays),
    }
    options = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
    with _explained(folder, "written"), ocp.CheckpointManager(folder, options=options) as manager:
        parts = ((STATE, numbers), (HOST, arrays))
        items = {item: ocp.args.StandardSave(_numbered(x)) for item, x in parts if _numbered(x)}
        items[ABOUT] = ocp.args.JsonSave(about)
        manager.save((manager.latest_step() or 0) + 1, args=ocp.args.Composite(**items))
    return folder


def read_host(path: str | os.PathLike) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the facts and the tensors that are the same in every process."""
    about = _about(path)
    like = {name: np.zeros(shape, jnp.dtype(dtype)) for name, shape, dtype in about[HOST]}
    found = _read(path, HOST, about, like)
    return {name: to_torch(x) for name, x in found.items()}, about["facts"]


def read_state(path: str | os.PathLike, own: Mapping[str, Any], place: Placement) -> dict[str, Any]:
    """Return the state by name, placed as `own` is; every process must call this.

    Raises with a list if names, shapes or dtypes differ. Optimizer arrays that only the checkpoint
    has go to every device.
    """
    about = _about(path)
    saved = {name: (tuple(shape), dtype) for name, shape, dtype in about[STATE]}
    numbers = {name: _as_numbers(x) for name, x in own.items()}
    raise_differences(_differences(saved, numbers))
    like = {}
    for name, (shape, dtype) in saved.items():
        array = numbers[name] if name in own else place.put(jnp.zeros(shape, jnp.dtype(dtype)))
        like[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=array.sharding)
    found = _read(path, STATE, about, like)
    return {name: _as_kind(jnp.asarray(x), own.get(name)) for name, x in found.items()}


def _differences(saved: Mapping[str, tuple], own: Mapping[str, Any]) -> list[str]:
    """Return one line for each name, shape or dtype that differs."""
    here = {name: (tuple(shape), dtype) for name, shape, dtype in _describe(own)}
    extra = [n for n in sorted(set(saved) - set(here)) if not n.startswith("optimizer ")]
    lines = [f"{n}: missing in the checkpoint" for n in sorted(set(here) - set(saved))]
    lines += [f"{n}: in the checkpoint only" for n in extra]
    for n in sorted(set(here) & set(saved)):
        (shape, dtype), (own_shape, own_dtype) = saved[n], here[n]
        if here[n] != saved[n]:
            lines.append(f"{n}: {dtype}{shape} in the checkpoint, {own_dtype}{own_shape} here")
    return lines


# -- orbax -----------------------------------------------------------------------------------------


def _about(path: str | os.PathLike) -> dict[str, Any]:
    ocp, folder = _orbax(), sharded_folder(path)
    with _explained(folder, "read"), ocp.CheckpointManager(folder) as manager:
        items = ocp.args.Composite(**{ABOUT: ocp.args.JsonRestore()})
        about = manager.restore(manager.latest_step(), args=items)[ABOUT]
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} has format {about.get('format')}; this version reads "
            f"{FORMAT}."
        )
    return about


def _read(
    path: str | os.PathLike, item: str, about: Mapping[str, Any], like: Mapping[str, Any]
) -> dict[str, Any]:
    names = [name for name, _, _ in about[item]]
    wanted = _numbered({name: like[name] for name in names})
    if not wanted:
        found = {}
    else:
        ocp, folder = _orbax(), sharded_folder(path)
        with _explained(folder, "read"), ocp.CheckpointManager(folder) as manager:
            items = ocp.args.Composite(**{item: ocp.args.StandardRestore(wanted)})
            found = manager.restore(manager.latest_step(), args=items)[item]
    keys = {name: f"{n:05}" for n, name in enumerate(names)}
    empty = {
        name: np.zeros(like[name].shape, like[name].dtype) for name in names if not like[name].size
    }
    return {name: found[key] if key in found else empty[name] for name, key in keys.items()}


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise InputError(
            "Checkpoints of several processes are written by orbax. "
            "Install it: `pip install 'etrace-bridge[distributed]'`."
        ) from error
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every file that it writes
    return ocp


@contextlib.contextmanager
def _explained(folder: Path, what: str) -> Iterator[None]:
    """Turn errors of orbax or of the disk into a `CheckpointError` in this context."""
    try:
        yield
    except BridgeError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} cannot be {what}: {error}"
        ) from error


def _numbered(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays by number, without empty ones.

    orbax would read dots and brackets in names as a tree, and it rejects empty arrays.
    """
    return {f"{n:05}": x for n, x in enumerate(arrays.values()) if x.size}


def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's numbers in its dtype, also where JAX would use a smaller one."""
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(jnp.bfloat16)
    # `np.ascontiguousarray` would make a scalar one-dimensional
    return tensor.detach().contiguous().numpy()


def _describe(arrays: Mapping[str, Any]) -> list[list[Any]]:
    return [[name, list(np.shape(x)), str(x.dtype)] for name, x in arrays.items()]


def _is_key(x: Any) -> bool:
    return x is not None and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _as_numbers(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _as_kind(x: Any, like: Any) -> Any:
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like)) if _is_key(like) else x
