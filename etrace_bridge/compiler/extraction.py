"""Reads a module: traces one step, normalises it, and names its variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import brainstate
import jax
import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import BridgeError, CompilationError, InputError, StateError
from etrace_bridge._jax_compat import ClosedJaxpr, Literal
from etrace_bridge.compiler.copies import copy_for_each_position
from etrace_bridge.compiler.diagnostics import (
    CompilationRecord,
    DiagnosticKind,
    DiagnosticLevel,
    Path,
    show_path,
)
from etrace_bridge.compiler.module_info import ModuleInfo, split_by_sizes
from etrace_bridge.compiler.normalise import normalise


def extract_module_info(model: brainstate.nn.Module, *args: Any, **kwargs: Any) -> ModuleInfo:
    """Trace one step of a model and name its variables.

    Args:
        model: any brainstate module whose states are initialised.
        *args: example arguments of one step.
        **kwargs: example keyword arguments of one step.
    """
    if not isinstance(model, brainstate.nn.Module):
        raise InputError(
            f"`model` is a {type(model).__name__}, not a brainstate module. For a torch module, "
            "call `etrace_bridge.wrap(module)` first."
        )
    retrieved = cast(dict[Path, brainstate.State], dict(model.states().items()))
    _check_states(model, retrieved)
    args, kwargs = jax.tree.map(_example, (args, kwargs))
    stateful = _trace(model, args, kwargs)
    layout = _read_layout(stateful, retrieved, args, kwargs)
    _check_raw(layout)
    raw, states = layout.raw, layout.states
    is_hidden = [isinstance(s, brainstate.HiddenState) for s in states]
    new_states = [
        v for outs, h in zip(layout.split_outvars(raw), is_hidden, strict=True) if h for v in outs
    ]
    plain, records = normalise(raw, layout.weight_of_invar, new_states)
    invars, outvars = layout.split_invars(plain), layout.split_outvars(plain)
    listed = [layout.path_of(s) for s in states]
    hidden = [
        (path, i[0], o[0])
        for path, h, i, o in zip(listed, is_hidden, invars, outvars, strict=True)
        if h and path is not None
    ]
    weights = {
        path: i
        for path, s, i in zip(listed, states, invars, strict=True)
        if isinstance(s, brainstate.ParamState) and path is not None
    }
    _check_found(model, hidden, weights)
    minfo = ModuleInfo(
        stateful_model=stateful,
        closed_jaxpr=plain,
        retrieved_model_states=retrieved,
        compiled_model_states=states,
        state_id_to_path=layout.paths,
        state_tree_invars=invars,
        state_tree_outvars=outvars,
        hidden_path_to_invar={p: i for p, i, _ in hidden},
        hidden_path_to_outvar={p: o for p, _, o in hidden},
        invar_to_hidden_path={i: p for p, i, _ in hidden},
        outvar_to_hidden_path={o: p for p, _, o in hidden if not isinstance(o, Literal)},
        hidden_outvar_to_invar={o: i for _, i, o in hidden if not isinstance(o, Literal)},
        weight_invars=[v for vs in weights.values() for v in vs],
        weight_path_to_invars=weights,
        invar_to_weight_path={v: p for p, vs in weights.items() for v in vs},
        num_var_out=layout.num_out,
        num_var_state=sum(layout.sizes),
        out_tree=jax.tree.structure(stateful.get_out_shapes(*args, **kwargs)[0]),
        num_var_arg=layout.num_arg,
        records=(*_state_records(retrieved, states, layout.paths), *records),
    )
    return copy_for_each_position(minfo)


@dataclass(frozen=True)
class _Layout:
    """How the inputs and outputs of a traced step are divided.

    Attributes:
        raw: the jaxpr as brainstate made it: arguments and old states in, outputs and new states
            out.
        states: the states that take part in the step.
        sizes: number of arrays of each state.
        paths: paths of the module's states, by the identity of the state.
    """

    raw: ClosedJaxpr
    states: tuple[brainstate.State, ...]
    sizes: list[int]
    paths: dict[int, Path]

    @property
    def num_arg(self) -> int:
        """Number of inputs before the states."""
        return len(self.raw.jaxpr.invars) - sum(self.sizes)

    @property
    def num_out(self) -> int:
        """Number of outputs before the states."""
        return len(self.raw.jaxpr.outvars) - sum(self.sizes)

    @property
    def weight_of_invar(self) -> list[Path | None]:
        """For each input, the path of the parameter that it is an array of; None for others."""
        paths: list[Path | None] = [None] * self.num_arg
        for state, count in zip(self.states, self.sizes, strict=True):
            is_weight = isinstance(state, brainstate.ParamState)
            paths += [self.path_of(state) if is_weight else None] * count
        return paths

    def path_of(self, state: brainstate.State) -> Path | None:
        """Return the path of a state; None if the module does not list it."""
        return self.paths.get(id(state))

    def split_invars(self, closed: ClosedJaxpr) -> list[list[Any]]:
        """Return the variables of each state before the step."""
        return split_by_sizes(closed.jaxpr.invars[self.num_arg :], self.sizes)

    def split_outvars(self, closed: ClosedJaxpr) -> list[list[Any]]:
        """Return the variables of each state after the step."""
        return split_by_sizes(closed.jaxpr.outvars[self.num_out :], self.sizes)


def _read_layout(
    stateful: brainstate.transform.StatefulFunction,
    retrieved: dict[Path, brainstate.State],
    args: tuple,
    kwargs: dict,
) -> _Layout:
    states = tuple(stateful.get_states(*args, **kwargs))
    return _Layout(
        stateful.get_jaxpr(*args, **kwargs),
        states,
        [len(jax.tree.leaves(s.value)) for s in states],
        {id(s): p for p, s in retrieved.items()},
    )


def _check_found(model: brainstate.nn.Module, hidden: Sequence[Any], weights: Any) -> None:
    """Raise if no hidden state or no parameter takes part in the step."""
    if not hidden:
        raise CompilationError(
            f"No hidden state of `{type(model).__name__}` takes part in this step, so there is "
            "nothing to learn online. Recurrent values must be `brainstate.HiddenState`s that the "
            "step reads or writes."
        )
    if not weights:
        raise CompilationError(
            f"No parameter of `{type(model).__name__}` takes part in this step. Trainable values "
            "must be `brainstate.ParamState`s that the step reads."
        )


def _example(leaf: Any) -> Any:
    """Return an argument that JAX can read: a tensor of another library becomes a NumPy array."""
    return (
        np.asarray(leaf)
        if hasattr(leaf, "__array__") and not isinstance(leaf, (np.ndarray, np.generic, jax.Array))
        else leaf
    )


@contextlib.contextmanager
def fitting() -> Iterator[None]:
    """Trace brainstate's dropout and batch norm as for training, unless the user has set `fit`."""
    if brainstate.environ.get("fit", None) is not None:
        yield
        return
    with brainstate.environ.context(fit=True):
        yield


def _trace(
    model: brainstate.nn.Module, args: tuple, kwargs: dict
) -> brainstate.transform.StatefulFunction:
    stateful = brainstate.transform.StatefulFunction(model.__call__, return_only_write=False)
    try:
        with fitting():
            stateful.make_jaxpr(*args, **kwargs)
    except BridgeError:
        raise
    except AttributeError as error:
        if any(hasattr(node, "init_state") for node in [model]) and "has no attribute" in str(
            error
        ):
            raise StateError(
                f"The step of `{type(model).__name__}` failed because {error}. Its states are "
                "probably not initialised: call `model.init_state(batch_size)` or "
                "`brainstate.nn.init_all_states(model, batch_size=...)` first."
            ) from error
        raise
    return stateful


def _check_states(model: brainstate.nn.Module, states: dict[Path, brainstate.State]) -> None:
    for path, state in states.items():
        if not isinstance(state, brainstate.HiddenState):
            continue
        leaves = jax.tree.leaves(state.value)
        if not leaves:
            raise StateError(
                f"The hidden state `{show_path(path)}` has no value yet. Call "
                "`model.init_state(batch_size)` or `brainstate.nn.init_all_states(model, "
                "batch_size=...)` first."
            )
        if len(leaves) > 1:
            raise StateError(
                f"The hidden state `{show_path(path)}` holds {len(leaves)} arrays; a hidden state "
                "must be one array. Make one `brainstate.HiddenState` for each, or stack them in "
                "a `brainstate.HiddenGroupState`."
            )
        if not jnp.issubdtype(jnp.result_type(leaves[0]), jnp.inexact):
            raise StateError(
                f"The hidden state `{show_path(path)}` has dtype {jnp.result_type(leaves[0])}, "
                "which has no gradient. Make it a float, or store counters and flags in a "
                "`brainstate.ShortTermState`."
            )


def _check_raw(layout: _Layout) -> None:
    """Raise if the step assigns to a parameter or changes the shape of a hidden state."""
    invars, outvars = layout.split_invars(layout.raw), layout.split_outvars(layout.raw)
    for state, before, after in zip(layout.states, invars, outvars, strict=True):
        name = show_path(layout.path_of(state) or ("external",))
        for i, o in zip(before, after, strict=True):
            if isinstance(state, brainstate.ParamState) and i is not o:
                raise CompilationError(
                    f"The step assigns to the parameter `{name}`. A parameter must stay as it is "
                    "within a step, or its gradient is not defined. Keep values that change in a "
                    "`brainstate.ShortTermState`."
                )
            changed = i.aval.shape != o.aval.shape or i.aval.dtype != o.aval.dtype
            if isinstance(state, brainstate.HiddenState) and changed:
                raise StateError(
                    f"The step changes the hidden state `{name}` from {i.aval.str_short()} to "
                    f"{o.aval.str_short()}. A hidden state must keep its shape and dtype from step "
                    "to step: check the batch size given to `init_state` and the layout of the "
                    "input."
                )


def _state_records(
    retrieved: dict[Path, brainstate.State],
    compiled: Sequence[brainstate.State],
    id_to_path: dict[int, Path],
) -> list[CompilationRecord]:
    used = {id(s) for s in compiled}
    records = [
        CompilationRecord(
            DiagnosticKind.STATE_NOT_IN_JAXPR,
            DiagnosticLevel.WARNING
            if isinstance(s, (brainstate.ParamState, brainstate.HiddenState))
            else DiagnosticLevel.INFO,
            f"`{show_path(p)}` is a state of the module that this step neither reads nor writes",
            weight_path=p if isinstance(s, brainstate.ParamState) else None,
            hidden_paths=(p,) if isinstance(s, brainstate.HiddenState) else (),
        )
        for p, s in retrieved.items()
        if id(s) not in used
    ]
    records += [
        CompilationRecord(
            DiagnosticKind.STATE_NOT_IN_MODULE,
            DiagnosticLevel.INFO,
            f"the step uses a {type(s).__name__} that the module does not list; it has no trace",
        )
        for s in compiled
        if id(s) not in id_to_path
    ]
    return records
