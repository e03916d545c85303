"""Where arrays live: one device, or a mesh along the batch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from etrace_bridge._errors import InputError


def private_copy(x: Any) -> Any:
    """An array of the same values that nobody else holds, so that it may be donated."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(np.array(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    return jax.numpy.asarray(np.array(x))


class Placement:
    """Puts arrays where the learner computes.

    Args:
        device: `"cpu"`, `"gpu"`, `"tpu"`, a `jax.Device`, or None for JAX's default.
        mesh: devices over which the batch is divided; all axes of the mesh divide it.
    """

    def __init__(self, device: Any = None, mesh: Mesh | None = None) -> None:
        if device is not None and mesh is not None:
            raise InputError("`device` and `mesh` were both given; a mesh already names its devices.")
        if mesh is not None and not isinstance(mesh, Mesh):
            raise InputError(f"`mesh` is a {type(mesh).__name__}; it must be a `jax.sharding.Mesh`.")
        self.mesh = mesh
        self.device = find_device(device)

    @property
    def is_single(self) -> bool:
        """Whether there is one device only, so that a step's inputs follow the learner's own arrays there."""
        return self.mesh is None

    def put(self, tree: Any) -> Any:
        """Weights and other arrays that every device has."""
        if self.mesh is not None:
            return jax.device_put(tree, NamedSharding(self.mesh, PartitionSpec()))
        return tree if self.device is None else jax.device_put(tree, self.device)

    def put_batch(self, tree: Any, axis: int, batch: int | None) -> Any:
        """Arrays with the batch on an axis; those without it go to every device."""
        if self.mesh is None:
            return self.put(tree)
        if batch is None or batch % self.mesh.size:
            raise InputError(
                f"The batch of {batch} cannot be divided over the mesh's {self.mesh.size} devices. Use a multiple of {self.mesh.size}."
            )
        spec = NamedSharding(self.mesh, PartitionSpec(*(None,) * axis, self.mesh.axis_names))
        return jax.tree.map(lambda x: jax.device_put(x, spec) if np.ndim(x) > axis and np.shape(x)[axis] == batch else self.put(x), tree)


def find_device(device: Any) -> Any:
    """A `jax.Device` from its kind."""
    if device is None or isinstance(device, jax.Device):
        return device
    if not isinstance(device, str):
        raise InputError(f"`device` is a {type(device).__name__}; it must be 'cpu', 'gpu', 'tpu' or a `jax.Device`.")
    try:
        return jax.local_devices(backend="gpu" if device == "cuda" else device)[0]
    except RuntimeError as error:
        there = sorted({d.platform for d in jax.devices()})
        raise InputError(
            f"There is no device {device!r} here; JAX sees: {', '.join(there)}. Install JAX for that device, or leave `device` out."
        ) from error
