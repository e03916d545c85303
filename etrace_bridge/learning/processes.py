"""Several processes: joining them, the usual mesh over all their devices, and what each has of an
array.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from etrace_bridge._errors import BridgeError, InputError

# What `python -m etrace_bridge train --processes N` tells the processes that it starts.
COORDINATOR, COUNT, INDEX = (
    f"ETRACE_BRIDGE_{name}" for name in ("COORDINATOR", "PROCESSES", "PROCESS")
)
CONNECTION = re.compile("Gloo|NCCL|RCCL|UNAVAILABLE|DEADLINE_EXCEEDED")  # in an error's text
HEARTBEAT_SECONDS = 30  # after which a silent process counts as dead, and the others stop


def distributed_mesh(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    units: int = 1,
    heartbeat_seconds: int = HEARTBEAT_SECONDS,
) -> Mesh:
    """The mesh over the devices of all processes, along which a learner divides its batch.

    With `units` above 1 it has a second axis, `"units"`, of as many devices, for
    `OnlineLearner(..., partition="units")`. Devices of one process are next to each other along it.

    Joins the processes first, if `jax.distributed` is not initialised yet. Without arguments that
    is left to JAX, which knows SLURM, Open MPI and Kubernetes, or to `JAX_COORDINATOR_ADDRESS`,
    `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`; where there is none of these, this process is the only
    one. Call it before anything else uses JAX.

    A process that dies is noticed within `heartbeat_seconds`; the others then end with an error,
    and a run goes on from its last checkpoint.

    Args:
        coordinator: `"host:port"` of process 0.
        processes: how many there are.
        process: which one this is, from 0.
        units: devices that share the units of a model.
        heartbeat_seconds: after which a silent process counts as dead.
    """
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise InputError(
            f"`{missing[0]}` is missing: give `coordinator`, `processes` and `process`, or none of "
            "them."
        )
    if not jax.distributed.is_initialized():
        _join(coordinator, processes, process, heartbeat_seconds)
    devices = np.array(jax.devices())
    if units == 1:
        return Mesh(devices, ("batch",))
    if units < 1 or devices.size % units:
        raise InputError(
            f"`units` is {units}; it must divide the number of devices, which is {devices.size}."
        )
    return Mesh(devices.reshape(-1, units), ("batch", "units"))


def _join(
    coordinator: str | None, processes: int | None, process: int | None, seconds: int
) -> None:
    found = os.environ
    if coordinator is None and COORDINATOR in found:
        coordinator, processes, process = found[COORDINATOR], int(found[COUNT]), int(found[INDEX])
    if coordinator is None and "JAX_NUM_PROCESSES" in found and "JAX_PROCESS_ID" in found:
        coordinator = found.get("JAX_COORDINATOR_ADDRESS")
        processes, process = int(found["JAX_NUM_PROCESSES"]), int(found["JAX_PROCESS_ID"])
    if coordinator is None and not in_cluster(found):
        return
    on_sigterm = signal.getsignal(signal.SIGTERM)
    jax.distributed.initialize(coordinator, processes, process, heartbeat_timeout_seconds=seconds)
    # JAX takes SIGTERM for its preemption service, which only notes it: nothing would end.
    if on_sigterm is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)
    # Connect now, when all are here: a first collective that one of them reaches half a minute after
    # the others would fail, and reading data or a model may take longer.
    gather(np.zeros((), np.int32))


def in_cluster(environment: Mapping[str, str]) -> bool:
    """Whether a scheduler has started several processes."""
    sizes = [environment.get(name, "1") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    return "JAX_COORDINATOR_ADDRESS" in environment or any(
        n.isdigit() and int(n) > 1 for n in sizes
    )


# -- arrays of several processes -------------------------------------------------------------------


def own_part(x: Any) -> Any:
    """What this process has of an array: all of it, or its rows of a batch that is divided over
    processes.
    """
    if not isinstance(x, jax.Array) or x.is_fully_addressable:
        return x
    if x.is_fully_replicated:
        return x.addressable_data(0)
    parts = {
        tuple((s.start or 0) for s in shard.index): shard.data for shard in x.addressable_shards
    }
    starts = sorted(parts)
    axes = [n for n in range(x.ndim) if len({start[n] for start in starts}) > 1]
    if len(axes) > 1:
        raise InputError(
            f"An array of shape {x.shape} is divided along several axes; gather it before it is "
            "read."
        )
    return np.concatenate([np.asarray(parts[start]) for start in starts], axes[0] if axes else 0)


def readable(x: Any, instead: Any) -> Any:
    """An array that this process can read whole, else what stands in for it."""
    is_whole = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
    return x if is_whole else instead


def gather(x: np.ndarray) -> np.ndarray:
    """An array of every process, along a new first axis."""
    try:
        return np.asarray(multihost_utils.process_allgather(x))
    except (ValueError, RuntimeError) as error:
        raise_if_lost(error)
        raise


def raise_if_lost(error: Exception) -> None:
    """Raise a `BridgeError` if this is what JAX raises for a broken connection to a process."""
    if isinstance(error, (ValueError, RuntimeError)) and CONNECTION.search(str(error)):
        raise BridgeError(
            "Another process has ended or cannot be reached, and this one cannot go on without "
            f"it: {str(error).splitlines()[0]}. Look for an error in the output of the others, "
            "start all processes again, and load the last checkpoint with `OnlineLearner.load`."
        ) from error


def gather_float64(x: np.ndarray) -> np.ndarray:
    """An array of every process; JAX may be in 32-bit mode, so the bytes travel."""
    found = gather(np.frombuffer(x.tobytes(), np.uint8))
    return np.frombuffer(found.tobytes(), np.float64).reshape(-1, *x.shape)
