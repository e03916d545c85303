"""Exports a learner: programs as StableHLO, arrays as safetensors, and a JSON manifest.

A folder contains

- `learn.….stablehlo`: `(state…, inputs…, targets…) -> (state…, loss, outputs…)`, one online step
  with its update;
- `infer.….stablehlo`: `(state…, inputs…) -> (state…, outputs…)`, one step in evaluation mode;
- `state.safetensors`: weights, optimizer state, hidden states, other arrays, traces and the guard's
  alarm;
- `manifest.json`: names, shapes and dtypes in the order of the arguments (the batch is `b` where it
  is open), platforms, compiler options and the files' SHA-256.

A program is laid out for the device that it runs on, so platforms that want different layouts have
files of their own; those that share a layout share a file. The file's name lists its platforms.

Reading it needs only JAX and NumPy: docs/howto/device.md has the reader in 30 lines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from etrace_bridge._errors import InputError, NotSupportedError, StateError
from etrace_bridge.learning.export_batch import map_step
from etrace_bridge.learning.export_files import (
    FORMAT,
    array_row,
    index_facts,
    program_facts,
    program_file,
    write_folder,
)
from etrace_bridge.learning.guard import FIRST, new_alarm
from etrace_bridge.learning.losses import JaxLoss
from etrace_bridge.learning.programs import make_step
from etrace_bridge.learning.state import LearnerState
from etrace_bridge.lowering import announcing, compiler_options, jit, tuning_for
from etrace_bridge.rules import Carry

if TYPE_CHECKING:
    from etrace_bridge.learning.learner import OnlineLearner
    from etrace_bridge.learning.runtime import Runtime

PLATFORMS = ("cpu", "cuda", "tpu")


@dataclass(frozen=True)
class _Parts:
    """What is written: the two programs on flat arguments, and the arrays that they start from.

    Attributes:
        learn: gives for a platform `(state…, inputs…, targets…) -> (state…, loss, outputs…)`.
        infer: gives for a platform `(state…, inputs…) -> (state…, outputs…)`.
        state: the arrays; for any batch size, those of one element.
        by_element: for each of their leaves, whether there is one for every batch element.
        inputs: shapes of the inputs.
        targets: shapes of the targets.
    """

    learn: Callable[[str], Callable]
    infer: Callable[[str], Callable]
    state: LearnerState
    by_element: list[bool]
    inputs: list[Any]
    targets: list[Any]


@announcing("exporting …")
def export_learner(
    learner: OnlineLearner, path: str | os.PathLike, platforms: Sequence[str], batch: str
) -> Path:
    """Write a learner that has made a step with a target; return the folder."""
    if batch not in ("fixed", "symbolic"):
        raise InputError(f"`batch` is {batch!r}; it must be 'fixed' or 'symbolic'.")
    runtime, store = learner.runtime, learner.runtime.store
    if store.placement.spans_processes:
        raise NotSupportedError(
            "The learner's arrays lie in several processes. `save` it, load it in a single "
            "process, and export there."
        )
    if runtime.options.freeze:
        raise NotSupportedError(
            "A learner with `freeze=True` cannot be exported: its step has one more input. "
            "Make a learner without `freeze`."
        )
    target, loss = _last_target(runtime)
    runtime.watch.look()
    parts = (_any_batch if batch == "symbolic" else _one_batch)(runtime, target, loss)
    leaves = jax.tree.leaves(parts.state)
    if any(jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves):
        raise NotSupportedError(
            "The model holds typed random keys, which the file format does not know. Use "
            "`jax.random.PRNGKey` keys."
        )
    state, inputs, targets = _shapes(parts, symbolic=batch == "symbolic")
    programs = {
        "learn": _lower(parts.learn, [*state, *inputs, *targets], platforms),
        "infer": _lower(parts.infer, [*state, *inputs], platforms),
    }
    names = [
        jax.tree_util.keystr(at, simple=True, separator="/")
        for at, _ in jax.tree_util.tree_flatten_with_path(parts.state)[0]
    ]
    manifest = {
        "format": FORMAT,
        "rule": learner.rule.name,
        "steps": store.steps,
        "batch": batch,
        "weights": list(store.compiled.weight_names),
        "state": [array_row(n, s) for n, s in zip(names, state, strict=True)],
        "inputs": [
            array_row(name, s) | index_facts(store.compiled.ranges, n, batch)
            for n, (name, s) in enumerate(zip(_input_names(store), inputs, strict=True))
        ],
        "targets": [
            array_row(f"target {n}", s) | index_facts(loss.ranges, n, batch)
            for n, s in enumerate(targets)
        ],
        "programs": {
            name: [program_facts(name, e) for e in some] for name, some in programs.items()
        },
        "compiler_options": {"cpu": compiler_options(one_step=True)},
        "x64": bool(jax.config.jax_enable_x64),
        "jax": jax.__version__,
    }
    arrays = {n: np.asarray(x) for n, x in zip(names, leaves, strict=True)}
    files = {
        program_file(name, e): e.mlir_module_serialized
        for name, some in programs.items()
        for e in some
    }
    files["state.safetensors"] = safetensors.numpy.save(arrays)
    return write_folder(Path(path), files, manifest)


def _shapes(parts: _Parts, symbolic: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """Return shapes of state, inputs and targets, for the batch as it is or of any size."""
    size = jax.export.symbolic_shape("b") if symbolic else ()
    state = [
        _shape((*size, *x.shape) if each else x.shape, x.dtype)
        for x, each in zip(jax.tree.leaves(parts.state), parts.by_element, strict=True)
    ]
    inputs, targets = (
        [_shape((*size, *t.shape[len(size) :]), t.dtype) for t in some]
        for some in (parts.inputs, parts.targets)
    )
    return state, inputs, targets


# -- programs -------------------------------------------------------------------------------------


def _one_batch(runtime: Runtime, target: Any, loss: JaxLoss) -> _Parts:
    """Return the learner's own step, starting from its current state."""
    store = runtime.store
    store.need_trace()
    spec, evaluation = runtime.programs.spec(loss), store.evaluation()

    def learn(platform: str) -> Callable:
        step = make_step(replace(spec, core=spec.core.tuned_for(platform)), own_update=True)
        return lambda state, args, targets: step(state, args, targets)[:3]

    def infer(platform: str) -> Callable:
        tuned = evaluation.tuned_for(platform)

        def run(state: LearnerState, args: list[Any]) -> tuple[LearnerState, Any]:
            """Run one step; the trace is zero afterwards, since it does not include this step."""
            outputs, hidden, other = tuned.run(
                state.theta, state.hidden, state.other, [a[None] for a in args]
            )
            trace = jax.tree.map(jnp.zeros_like, state.trace)
            return state.with_carry(Carry(hidden, other, trace)), jax.tree.map(
                lambda o: o[0], outputs
            )

        return run

    state = store.state
    return _flat(runtime, state, [False] * len(jax.tree.leaves(state)), target, learn, infer)


def _any_batch(runtime: Runtime, target: Any, loss: JaxLoss) -> _Parts:
    """Return the step for any batch size.

    It starts from the learner's weights and optimizer state and from initial states.
    """
    store = runtime.store
    mapped = map_step(runtime, loss, target)
    now, compiled = store.state, mapped.core.compiled
    hidden, other, trace = mapped.start()
    current = dict(zip(store.compiled.other_names, now.other, strict=True))
    of_model = [current.get(n, o) for n, o in zip(compiled.other_names, other, strict=True)]
    alarm = jnp.asarray(new_alarm(0, len(now.alarm) - FIRST))
    state = LearnerState(
        now.theta, now.opt, list(hidden), compiled.join_other(other, of_model), trace, alarm
    )
    nowhere = jax.tree.map(lambda _: False, state)
    each = nowhere.replace(
        hidden=[True] * len(hidden),
        other=list(compiled.resets),
        trace=jax.tree.map(lambda _: True, trace),
    )
    learn = lambda platform: mapped.tuned_for(platform).learn
    infer = lambda platform: mapped.tuned_for(platform).infer
    return _flat(runtime, state, jax.tree.leaves(each), target, learn, infer)


def _input_names(store: Any) -> Sequence[str]:
    named = getattr(store.net, "input_names", ())
    return named or [f"input {n}" for n in range(len(store.compiled.signature))]


def _flat(
    runtime: Runtime,
    start: LearnerState,
    by_element: list[bool],
    target: Any,
    learn: Callable[[str], Callable],
    infer: Callable[[str], Callable],
) -> _Parts:
    """Return the programs on flat arguments; `learn` and `infer` give them for a platform."""
    tree, wanted = jax.tree.structure(start), jax.tree.structure(target)
    inputs = [_shape(shape, jnp.dtype(dtype)) for shape, dtype in runtime.store.compiled.signature]
    states, given = tree.num_leaves, tree.num_leaves + len(inputs)

    def flat_learn(platform: str) -> Callable:
        function = learn(platform)

        def run(*arrays: Any) -> tuple:
            state = jax.tree.unflatten(tree, arrays[:states])
            targets = jax.tree.unflatten(wanted, arrays[given:])
            new, value, output = function(state, list(arrays[states:given]), targets)
            return *jax.tree.leaves(new), value, *jax.tree.leaves(output)

        return run

    def flat_infer(platform: str) -> Callable:
        function = infer(platform)

        def run(*arrays: Any) -> tuple:
            new, output = function(jax.tree.unflatten(tree, arrays[:states]), list(arrays[states:]))
            return *jax.tree.leaves(new), *jax.tree.leaves(output)

        return run

    return _Parts(flat_learn, flat_infer, start, by_element, inputs, jax.tree.leaves(target))


def _lower(
    make: Callable[[str], Callable], shapes: Sequence[Any], platforms: Sequence[str]
) -> list[jax.export.Exported]:
    """Lower a program for the platforms that can run it; those that share a layout share one."""
    able: dict[type, list[str]] = {}
    refused: dict[str, Exception] = {}
    for platform in platforms:
        try:
            jax.export.export(jit(make(platform), one_step=True).jitted, platforms=[platform])(
                *shapes
            )
            able.setdefault(type(tuning_for(platform)), []).append(platform)
        except Exception as error:
            # a primitive without a rule for this platform, in whatever way JAX says so
            refused[platform] = error
    if not able:
        reasons = "; ".join(f"{name}: {error}" for name, error in refused.items())
        raise NotSupportedError(f"The step cannot be lowered for any of the platforms ({reasons}).")
    return [
        jax.export.export(jit(make(some[0]), one_step=True).jitted, platforms=some)(*shapes)
        for some in able.values()
    ]


def _last_target(runtime: Runtime) -> tuple[Any, JaxLoss]:
    """Return the shapes of the last new kind of target, and the loss for it."""
    store = runtime.store
    if store.updater is None or runtime.torch_update is not None:
        raise NotSupportedError(
            "The optimizer runs in torch, so the update is not part of a compiled step. Use "
            "optax, or SGD, Adam or AdamW."
        )
    if runtime.optimizer is None:
        raise InputError(
            "This learner has no optimizer, so there is no learning step to export. "
            "Make it with `optimizer=`."
        )
    if not store.started or store.stream is None:
        raise StateError(
            "The learner has made no step yet, so shapes are unknown. Call `step(x, target)` "
            "before `export`."
        )
    store.return_to_stream()
    last = runtime.losses.last(store.compiled)
    if last is None:
        raise StateError(
            "The learner has seen no target yet. Call `step(x, target)` before `export`."
        )
    return last


# -- files ----------------------------------------------------------------------------------------


def _shape(shape: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)
