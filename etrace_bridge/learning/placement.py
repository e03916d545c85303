"""Where arrays live: one device, or a mesh along the batch, of one process or of several."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from etrace_bridge._errors import BridgeError, InputError
from etrace_bridge.learning.processes import gather, gather_float64
from etrace_bridge.step.program import StepProgram
from etrace_bridge.step.units import weight_unit_axes

T = TypeVar("T")
REFUSED = -1  # what a process tells the others if it cannot go on


def private_copy(x: Any) -> Any:
    """An array of the same values that nobody else holds, so that it may be donated."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.numpy.asarray(np.array(jax.random.key_data(x)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return jax.numpy.asarray(np.array(x))


class Placement:
    """Puts arrays where the learner computes.

    Args:
        device: `"cpu"`, `"gpu"`, `"tpu"`, a `jax.Device`, or None for JAX's default.
        mesh: devices over which the batch is divided; all axes of the mesh divide it. They may
            belong to several processes, each of which then passes its own part of the batch.
        partition: an axis of the mesh that divides hidden units, and with them weights and traces,
            and not the batch. Processes that have units of the same batch elements pass the same
            part of the batch.

    Attributes:
        spans_processes: the mesh has devices of other processes.
    """

    def __init__(
        self, device: Any = None, mesh: Mesh | None = None, partition: str | None = None
    ) -> None:
        if device is not None and mesh is not None:
            raise InputError(
                "`device` and `mesh` were both given; a mesh already names its devices."
            )
        if mesh is not None and not isinstance(mesh, Mesh):
            raise InputError(
                f"`mesh` is a {type(mesh).__name__}; it must be a `jax.sharding.Mesh`."
            )
        self.mesh = mesh
        self.device = find_device(device)
        self.spans_processes = mesh is not None and mesh.is_multi_process
        axes = () if mesh is None else mesh.axis_names
        if partition is not None and partition not in axes:
            known = f"its axes are {', '.join(map(repr, axes))}" if axes else "there is no `mesh`"
            raise InputError(
                f"`partition` is {partition!r}; it must name an axis of the mesh, and {known}."
            )
        self.partition = partition
        self._batch_axes = tuple(name for name in axes if name != partition)
        self._parts = (
            math.prod(mesh.shape[name] for name in self._batch_axes) if mesh is not None else 1
        )

    @cached_property
    def _own_parts(self) -> int:
        """How many parts of the batch lie on this process's devices."""
        mesh: Any = self.mesh
        sharding = NamedSharding(mesh, PartitionSpec(self._batch_axes))
        places = sharding.addressable_devices_indices_map((self._parts,)).values()
        return len({place[0].indices(self._parts) for place in places if place is not None})

    @property
    def is_single(self) -> bool:
        """Whether there is one device only, so that a step's inputs follow the learner's own arrays
        there.
        """
        return self.mesh is None

    @property
    def is_first(self) -> bool:
        """Whether this is the process that talks to the user."""
        return not self.spans_processes or jax.process_index() == 0

    @property
    def platform(self) -> str:
        """The kind of device: `"cpu"`, `"gpu"` or `"tpu"`."""
        device = self.mesh.devices.flat[0] if self.mesh is not None else self.device
        return jax.default_backend() if device is None else device.platform

    # -- arrays that every process knows -----------------------------------------------------------

    def put(self, tree: Any) -> Any:
        """Weights and other arrays that every device has."""
        if self.mesh is not None:
            return jax.tree.map(lambda x: self._place(x, PartitionSpec()), tree)
        return tree if self.device is None else jax.device_put(tree, self.device)

    def put_batch(self, tree: Any, axis: int, batch: int | None) -> Any:
        """Arrays with the batch on an axis; those without it go to every device."""
        if self.mesh is None:
            return self.put(tree)
        self.check_batch(batch)
        return jax.tree.map(lambda x: self._place(x, self.spec(np.shape(x), axis, batch)), tree)

    def put_state(self, tree: Any, batch: int | None, unit_axes: Any = None) -> Any:
        """Hidden states, or a rule's memory, divided along batch and units.

        Args:
            tree: the arrays.
            batch: the batch size.
            unit_axes: as in `Rule.unit_axes`.
        """
        if self.mesh is None:
            return self.put(tree)
        self.check_batch(batch)
        place = lambda x, axis: self._place(x, self._state_spec(np.shape(x), batch, axis))
        return _map_with_axes(place, tree, unit_axes)

    def put_weights(self, tree: Any, program: StepProgram) -> Any:
        """Weights, and what an optimizer keeps of their shapes."""
        if self.partition is None:
            return self.put(tree)
        specs = self._weight_specs(program)
        return jax.tree.map(lambda x: self._place(x, specs.get(np.shape(x), PartitionSpec())), tree)

    def check_batch(self, batch: int | None) -> None:
        """Raises if a batch cannot be divided over the mesh."""
        count = self._parts
        if count > 1 and (batch is None or batch % count):
            fewer, more = (batch or 0) // count * count, ((batch or 0) // count + 1) * count
            sizes = f"{fewer} or {more}" if fewer else str(more)
            raise InputError(
                f"The batch of {batch} cannot be divided over the mesh's {count} devices. Use a "
                f"multiple of {count}, such as {sizes}."
            )

    def spec(self, shape: Sequence[int], axis: int, batch: int | None) -> PartitionSpec:
        """How an array is divided: along the batch if that is on this axis, else not at all."""
        if self.mesh is None or len(shape) <= axis or shape[axis] != batch:
            return PartitionSpec()
        return PartitionSpec(*(None,) * axis, self._batch_axes)

    def _state_spec(
        self, shape: Sequence[int], batch: int | None, units: int | None = None
    ) -> PartitionSpec:
        """Of a hidden state or a rule's memory: along the batch, and along the units, whose axis
        comes next unless it is given.
        """
        axis = next((n for n, size in enumerate(shape) if size == batch), 0)
        units = axis + 1 if units is None else units
        spec = self.spec(shape, axis, batch)
        if self._divides_units(shape, units) and spec:
            spec = PartitionSpec(*spec, *(None,) * (units - axis - 1), self.partition)
        return spec

    def _divides_units(self, shape: Sequence[int], axis: int) -> bool:
        mesh: Any = self.mesh
        return (
            self.partition is not None
            and len(shape) > axis
            and shape[axis] % mesh.shape[self.partition] == 0
        )

    def _weight_specs(self, program: StepProgram) -> dict[tuple[int, ...], PartitionSpec]:
        """How weights of each shape are divided: those that meet data at a trace, along the axis of
        their units.
        """
        specs: dict[tuple[int, ...], PartitionSpec] = {}
        axes = {} if self.partition is None else weight_unit_axes(program)
        for weight, axis in axes.items():
            if self._divides_units(weight.aval.shape, axis):
                spec = PartitionSpec(*(None,) * axis, self.partition)
                specs.setdefault(tuple(weight.aval.shape), spec)
        return specs

    # -- inside programs ---------------------------------------------------------------------------

    def settle(self, tree: Any, axis: int | None, batch: int | None) -> Any:
        """Results of a program, divided along the batch on this axis; None: every device has all of
        them.
        """
        if self.mesh is None:
            return tree
        spec = (
            (lambda x: PartitionSpec())
            if axis is None
            else (lambda x: self.spec(x.shape, axis, batch))
        )
        return self._constrain(tree, spec)

    def settle_state(self, tree: Any, batch: int | None, unit_axes: Any = None) -> Any:
        """The same for hidden states and a rule's memory, along batch and units; arguments as in
        `put_state`.
        """
        if self.mesh is None:
            return tree
        settle = lambda x, axis: self._constrain(
            x, lambda x: self._state_spec(x.shape, batch, axis)
        )
        return _map_with_axes(settle, tree, unit_axes)

    def settle_weights(self, tree: Any, program: StepProgram) -> Any:
        """The same for weights and what an optimizer keeps of their shapes."""
        if self.mesh is None:
            return tree
        specs = self._weight_specs(program)
        return self._constrain(tree, lambda x: specs.get(x.shape, PartitionSpec()))

    def _constrain(self, tree: Any, spec: Callable[[Any], PartitionSpec]) -> Any:
        mesh: Any = self.mesh
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(x))), tree
        )

    def _place(self, x: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(self.mesh, spec)  # pyright: ignore[reportArgumentType] - there is a mesh
        is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
        if is_global or not self.spans_processes:
            return jax.device_put(x, sharding)
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = self._place(np.asarray(jax.random.key_data(x)), spec)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    # -- each process's own part -------------------------------------------------------------------

    def whole(self, tree: Any) -> Any:
        """Weights, and what an optimizer keeps of their shapes, so that this process can read them.

        Where units are divided, every process must call it.
        """
        return self.put(tree) if self.spans_processes and self.partition is not None else tree

    def join(self, tree: Any, axis: int) -> Any:
        """Whole batches from the parts that each process has; arrays that are whole already stay.

        Arrays without the axis are the same in every process, and stay as they are.
        """
        if not self.spans_processes:
            return tree
        return jax.tree.map(lambda x: self._join(x, axis), tree)

    def _join(self, x: Any, axis: int) -> Any:
        if np.ndim(x) <= axis or (isinstance(x, jax.Array) and not x.is_fully_addressable):
            return x
        mesh: Any = self.mesh
        each, rows = self._own_parts, np.shape(x)[axis]
        if rows % each:
            raise InputError(
                f"This process's part of the batch has {rows} elements, which cannot be divided "
                f"over its {each} devices. Use a multiple of {each}."
            )
        sharding = NamedSharding(mesh, PartitionSpec(*(None,) * axis, self._batch_axes))
        return jax.make_array_from_process_local_data(sharding, np.asarray(x))

    def stand_in(self, tree: Any) -> Any:
        """One step's targets as large as those of all processes, as the user gave them; their
        values do not matter.
        """
        if not self.spans_processes:
            return tree
        times = self._parts // self._own_parts

        def whole(x: Any) -> Any:
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                return np.zeros(x.shape, x.dtype)
            if np.ndim(x) == 0:
                return x
            return (
                torch.cat([x] * times)
                if isinstance(x, torch.Tensor)
                else np.concatenate([np.asarray(x)] * times)
            )

        return jax.tree.map(whole, tree)

    def together(
        self,
        call: str,
        read: Callable[[], T],
        shapes_of: Callable[[T], Sequence[Any]] = lambda _: (),
    ) -> T:
        """What `read` gives; raises in every process if it raises in one, or if they do not make
        the same call.

        Otherwise they would wait for each other for ever, or add up what does not belong together.

        Args:
            call: what the processes are about to do.
            read: this process's part of it.
            shapes_of: arrays of the result whose shapes must be those of the other processes.
        """
        if not self.spans_processes:
            return read()
        problem, found, shapes = None, None, ()
        try:
            found = read()
            shapes = [(tuple(np.shape(a)), str(a.dtype)) for a in shapes_of(found)]
        except BridgeError as error:
            problem = error
        code = (
            REFUSED if problem is not None else zlib.crc32(f"{call} {shapes}".encode()) & 0x7FFFFFFF
        )
        codes = gather(np.array(code, np.int32)).reshape(-1)
        if problem is not None:
            raise problem
        if (codes == code).all():
            return found  # pyright: ignore[reportReturnType] - there was no problem
        refused = [str(n) for n in np.flatnonzero(codes == REFUSED)]
        if refused:
            raise InputError(
                f"Process {', '.join(refused)} refused its data; its own error says why."
            )
        here = "".join(f" of {dtype}{shape}" for shape, dtype in shapes)
        others = ", ".join(str(n) for n in np.flatnonzero(codes != code))
        raise InputError(
            f"The processes do not do the same. Process {jax.process_index()} is at "
            f"`{call}`{here}; process {others} is elsewhere, or has data of another shape. All "
            "must make the same calls with parts of one shape: give the loaders `drop_last=True`, "
            "and samplers of equal length."
        )

    def largest(self, value: int) -> int:
        """The largest of all processes' numbers."""
        return int(gather(np.array(value, np.int32)).max()) if self.spans_processes else value

    def mean(self, values: Mapping[str, tuple[float, float]]) -> Mapping[str, tuple[float, float]]:
        """Means and their weights over all processes, from each process's own."""
        if not self.spans_processes or not values:
            return values
        sums = np.array([(mean * weight, weight) for mean, weight in values.values()], np.float64)
        total = np.sum(gather_float64(sums), axis=0)
        return {
            name: (float(s / w) if w else float("nan"), float(w))
            for name, (s, w) in zip(values, total, strict=True)
        }


def _map_with_axes(function: Callable[[Any, int | None], Any], tree: Any, axes: Any) -> Any:
    """`function` of every array and its axis of units; None for `axes`: of none of them is known."""
    if axes is None or tree is None:
        return jax.tree.map(lambda x: function(x, None), tree)
    return jax.tree.map(function, tree, axes)


def find_device(device: Any) -> Any:
    """A `jax.Device` from its kind."""
    if device is None or isinstance(device, jax.Device):
        return device
    if not isinstance(device, str):
        raise InputError(
            f"`device` is a {type(device).__name__}; it must be 'cpu', 'gpu', 'tpu' or a "
            "`jax.Device`."
        )
    try:
        return jax.local_devices(backend="gpu" if device == "cuda" else device)[0]
    except RuntimeError as error:
        there = sorted({d.platform for d in jax.devices()})
        raise InputError(
            f"There is no device {device!r} here; JAX sees: {', '.join(there)}. Install JAX for "
            "that device, or leave `device` out."
        ) from error
