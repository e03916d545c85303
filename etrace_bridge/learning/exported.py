"""`load_exported`: run a learner that `OnlineLearner.export` wrote, without the model's code."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.export
import numpy as np
import safetensors.numpy

from etrace_bridge._errors import InputError, NotSupportedError
from etrace_bridge.frontend import IndexRange, InputRange
from etrace_bridge.learning.export_files import FORMAT, checksum, manifest_bytes
from etrace_bridge.learning.guard import STOPPED
from etrace_bridge.learning.inputs import as_array, as_inputs
from etrace_bridge.lowering import jit


class ExportedLearner:
    """A learner read from files.

    Args:
        manifest: names and shapes.
        programs: the programs' StableHLO, by file name.
        state: arrays by name.

    Attributes:
        state: all arrays by name, in the order of the programs' arguments. Weights are `theta/0`,
            `theta/1`, …
        manifest: names, shapes and facts, as in the file.
    """

    def __init__(
        self, manifest: Mapping[str, Any], programs: Mapping[str, bytes], state: dict[str, Any]
    ) -> None:
        self.manifest, self.state = manifest, state
        open_rows = [(row, state[row["name"]]) for row in manifest["state"] if "b" in row["shape"]]
        self._batch = open_rows[0][1].shape[0] if open_rows else None
        if manifest["x64"] != bool(jax.config.jax_enable_x64):
            mode = "on" if manifest["x64"] else "off"
            raise InputError(
                f"The file was written with JAX's x64 mode {mode}. Set `jax_enable_x64` the same "
                "way before loading."
            )
        self._calls = {}
        for name, some in manifest["programs"].items():
            facts = _for_this_platform(some)
            self._calls[name] = jit(
                rebuild(name, manifest, facts, programs[facts["file"]]).call, one_step=True
            )

    def __repr__(self) -> str:
        facts = self.manifest
        inputs = ", ".join(f"{row['name']} {tuple(row['shape'])}" for row in facts["inputs"])
        return (
            f"ExportedLearner({facts['rule']}, {facts['steps']:,} steps; one step takes {inputs})"
        )

    def step(self, x: Any, target: Any) -> tuple[Any, Any]:
        """Run one online step with its update; return loss and output."""
        targets = jax.tree.leaves(target)
        rest = self._call(
            "learn",
            [*as_inputs(x), *targets],
            [*self.manifest["inputs"], *self.manifest["targets"]],
        )
        return rest[0], _unpack(rest[1:])

    def predict(self, x: Any) -> Any:
        """Run one step in evaluation mode: states advance, and traces are zero afterwards."""
        return _unpack(self._call("infer", list(as_inputs(x)), self.manifest["inputs"]))

    @property
    def stopped(self) -> bool:
        """Whether the guard has seen NaN or infinity; from then on the last finite values stay."""
        return bool(np.asarray(self.state["alarm"])[STOPPED])

    def _call(
        self, name: str, given: Sequence[Any], rows: Sequence[Mapping[str, Any]]
    ) -> Sequence[Any]:
        arrays = [as_array(a) for a in given]
        found = [(np.shape(a), str(a.dtype)) for a in arrays]
        expected = [(_sizes(row, self._batch), row["dtype"]) for row in rows]
        if found != expected:
            raise InputError(f"The arguments are {found}; this file was exported for {expected}.")
        for row, array in zip(rows, arrays, strict=True):
            for facts in row.get("indices", ()):
                _check_indices(array, facts, row["name"])
        results = self._calls[name](*self.state.values(), *arrays)
        count = len(self.state)
        self.state = dict(zip(self.state, results[:count], strict=True))
        return results[count:]


def load_exported(path: str | os.PathLike, batch: int | None = None) -> ExportedLearner:
    """Read what `OnlineLearner.export` wrote.

    Args:
        path: the folder.
        batch: the batch size, for files that leave it open.

    Raises:
        InputError: A file is missing or does not have the contents that were written.
    """
    path = Path(path)
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{str(path)!r} has no readable `manifest.json`: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("checksum") != checksum(
        manifest_bytes(manifest)
    ):
        raise InputError(
            f"`manifest.json` in {str(path)!r} was changed after it was written (its checksum does "
            "not match)."
        )
    if manifest["format"] != FORMAT:
        raise NotSupportedError(
            f"The files have format {manifest['format']}; this version reads format {FORMAT}."
        )
    contents = {}
    for name, expected in manifest["files"].items():
        try:
            contents[name] = (path / name).read_bytes()
        except OSError as error:
            raise InputError(f"{str(path)!r} lacks the file `{name}`: {error}") from error
        if checksum(contents[name]) != expected:
            raise InputError(
                f"`{name}` in {str(path)!r} is damaged: its checksum does not match "
                "`manifest.json`."
            )
    if (manifest["batch"] == "symbolic") != (batch is not None):
        need = (
            "leave the batch size open: give `batch=`"
            if batch is None
            else "are for one batch size: leave `batch` out"
        )
        raise InputError(f"The files in {str(path)!r} {need}.")
    arrays = safetensors.numpy.load(contents["state.safetensors"])
    state = {
        row["name"]: jax.numpy.asarray(np.broadcast_to(arrays[row["name"]], _sizes(row, batch)))
        for row in manifest["state"]
    }
    return ExportedLearner(manifest, contents, state)


def _for_this_platform(programs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the program for the device that JAX computes on."""
    here = jax.devices()[0].platform
    names = ("cuda", "rocm") if here == "gpu" else (here,)
    for facts in programs:
        if any(name in facts["platforms"] for name in names):
            return facts
    written = ", ".join(name for facts in programs for name in facts["platforms"])
    raise NotSupportedError(
        f"The files are for {written}; JAX computes on `{here}` here. Export the learner for this "
        "platform."
    )


def rebuild(
    name: str, manifest: Mapping[str, Any], facts: Mapping[str, Any], code: bytes
) -> jax.export.Exported:
    """Return JAX's object for a program.

    JAX's `serialize` would need the flatbuffers package on both sides.
    """
    rows = [
        *manifest["state"],
        *manifest["inputs"],
        *(manifest["targets"] if name == "learn" else ()),
    ]
    aval, scope = type(jax.typeof(0.0)), jax.export.SymbolicScope()
    shape = lambda r: jax.export.symbolic_shape(",".join(map(str, r["shape"])), scope=scope)
    avals = [
        tuple(aval(shape(r), np.dtype(r["dtype"])) for r in some)
        for some in (rows, facts["results"])
    ]
    known = {
        "fun_name": name,
        "in_tree": jax.tree.structure(((0,) * len(rows), {})),
        "in_avals": avals[0],
        "out_tree": jax.tree.structure((0,) * len(facts["results"])),
        "out_avals": avals[1],
        "_has_named_shardings": False,
        "nr_devices": 1,
        "platforms": tuple(facts["platforms"]),
        "mlir_module_serialized": code,
        "calling_convention_version": facts["calling_convention_version"],
        "module_kept_var_idx": tuple(facts["kept"]),
        "uses_global_constants": len(facts["platforms"]) > 1 or manifest["batch"] == "symbolic",
        "_get_vjp": None,
    }
    for some, count in (("in", len(rows)), ("out", len(facts["results"]))):
        known |= {
            f"_{some}_named_shardings": (None,) * count,
            f"{some}_shardings_hlo": (None,) * count,
        }
    fields = [field.name for field in dataclasses.fields(jax.export.Exported)]
    return jax.export.Exported(**{field: known.get(field, ()) for field in fields})


def _check_indices(array: Any, facts: Mapping[str, Any], name: str) -> None:
    demand = IndexRange(*(facts[key] for key in ("op", "low", "high", "ignore")))
    elements = None if facts["elements"] is None else np.array(facts["elements"])
    InputRange(0, elements, facts["size"], demand).check(array, f"`{name}`")


def _sizes(row: Mapping[str, Any], batch: int | None) -> tuple[int, ...]:
    return tuple(cast(int, batch) if size == "b" else size for size in row["shape"])


def _unpack(outputs: Sequence[Any]) -> Any:
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
