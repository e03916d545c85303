"""What the compiler knows about one step of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import brainstate
import jax
import jax.numpy as jnp

from etrace_bridge._errors import BridgeError, CompilationError, InputError, StateError
from etrace_bridge._jax_compat import ClosedJaxpr, Jaxpr, Literal, Var
from etrace_bridge.compiler.control_flow import normalise
from etrace_bridge.compiler.diagnostics import CompilationRecord, DiagnosticKind, DiagnosticLevel, Path, show_path
from etrace_bridge.compiler.jaxpr import evaluate, read


@dataclass(frozen=True)
class ModuleInfo:
    """One step of a model: its jaxpr, in plain equations, and which variable is which state.

    Attributes:
        stateful_model: the traced brainstate function.
        closed_jaxpr: the step, arguments + old states -> outputs + new states (+ added intermediates), normalised.
        retrieved_model_states: path -> State, as the module lists them.
        compiled_model_states: the States in the order the jaxpr takes them.
        state_id_to_path: `id(state)` -> path.
        state_tree_invars: for each compiled state, its variables before the step.
        state_tree_outvars: for each compiled state, its variables after the step.
        hidden_path_to_invar: hidden state -> its variable before the step.
        hidden_path_to_outvar: hidden state -> its variable after the step.
        invar_to_hidden_path: the other way round.
        outvar_to_hidden_path: the other way round.
        hidden_outvar_to_invar: variable after -> variable before.
        weight_invars: all variables that are leaves of a parameter.
        weight_path_to_invars: parameter -> its variables, one a leaf.
        invar_to_weight_path: the other way round.
        num_var_out: how many output variables the model itself returns.
        num_var_state: how many state variables follow them.
        out_tree: the structure of the model's own output.
        num_var_arg: how many of the inputs are arguments, the rest being states.
        records: what was noticed while reading the model.
    """

    stateful_model: brainstate.transform.StatefulFunction
    closed_jaxpr: ClosedJaxpr
    retrieved_model_states: dict[Path, brainstate.State]
    compiled_model_states: tuple[brainstate.State, ...]
    state_id_to_path: dict[int, Path]
    state_tree_invars: list[list[Var]]
    state_tree_outvars: list[list[Any]]
    hidden_path_to_invar: dict[Path, Var]
    hidden_path_to_outvar: dict[Path, Any]
    invar_to_hidden_path: dict[Var, Path]
    outvar_to_hidden_path: dict[Any, Path]
    hidden_outvar_to_invar: dict[Any, Var]
    weight_invars: list[Var]
    weight_path_to_invars: dict[Path, list[Var]]
    invar_to_weight_path: dict[Var, Path]
    num_var_out: int
    num_var_state: int
    out_tree: Any = None
    num_var_arg: int = 0
    records: tuple[CompilationRecord, ...] = field(default=())

    @property
    def jaxpr(self) -> Jaxpr:
        """The open jaxpr."""
        return self.closed_jaxpr.jaxpr

    @property
    def hidden_states(self) -> dict[Path, brainstate.State]:
        """Hidden state by path, in the order the jaxpr takes them."""
        return {p: self.retrieved_model_states[p] for p in self.hidden_path_to_invar}

    def state_path(self, state: brainstate.State) -> Path | None:
        """The path of a compiled state; None for one that the module does not list."""
        return self.state_id_to_path.get(id(state))

    def dict(self) -> dict[str, Any]:
        """The fields by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def add_jaxpr_outs(self, extra: Sequence[Var]) -> ModuleInfo:
        """A copy whose jaxpr also returns these intermediates."""
        made = {v for eqn in self.jaxpr.eqns for v in eqn.outvars} | set(self.jaxpr.invars)
        for v in extra:
            if v not in made:
                raise InputError(f"`{v}` is not a variable of this step's jaxpr, so it cannot be returned.")
        jaxpr = self.jaxpr.replace(outvars=[*self.jaxpr.outvars, *extra], debug_info=self.jaxpr.debug_info.with_unknown_names())
        return dataclasses.replace(self, closed_jaxpr=ClosedJaxpr(jaxpr, self.closed_jaxpr.consts))

    def split_state_outvars(self) -> tuple[dict[Path, list[Any]], dict[Path, Any], dict[Any, list[Any]]]:
        """The variables after the step: of weights, of hidden states, of other states (each by path)."""
        weights: dict[Path, list[Any]] = {}
        other: dict[Any, list[Any]] = {}
        for i, (state, outvars) in enumerate(zip(self.compiled_model_states, self.state_tree_outvars, strict=True)):
            path = self.state_path(state)
            if path in self.weight_path_to_invars:
                weights[path] = outvars
            elif path not in self.hidden_path_to_invar:
                other[path if path is not None else ("external", i)] = outvars
        return weights, dict(self.hidden_path_to_outvar), other

    def jaxpr_call(self, *args: Any, old_state_vals: Sequence[Any] | None = None):
        """Runs the step.

        Args:
            *args: the model's arguments.
            old_state_vals: one value a compiled state; the States' current values when None.

        Returns:
            The model's outputs; hidden-state values by path; other state values by path; added intermediates.
        """
        env = dict(zip(self.jaxpr.constvars, self.closed_jaxpr.consts, strict=True))
        env.update(zip(self.jaxpr.invars, self.flatten_inputs(args, old_state_vals), strict=True))
        evaluate(self.jaxpr.eqns, env)
        return self.arrange_outputs([read(env, v) for v in self.jaxpr.outvars])

    def flatten_inputs(self, args: Sequence[Any], old_state_vals: Sequence[Any] | None = None) -> list[Any]:
        """The arrays that the jaxpr takes, from the model's arguments and the states' old or current values."""
        if old_state_vals is None:
            old_state_vals = [s.value for s in self.compiled_model_states]
        if len(old_state_vals) != len(self.compiled_model_states):
            raise InputError(
                f"`old_state_vals` has {len(old_state_vals)} values, but the step takes {len(self.compiled_model_states)} states."
            )
        flat = [*jax.tree.leaves(tuple(args)), *jax.tree.leaves(list(old_state_vals))]
        if len(flat) != len(self.jaxpr.invars):
            raise InputError(f"The step takes {len(self.jaxpr.invars)} arrays in all, {len(flat)} were given.")
        return flat

    def arrange_outputs(self, outs: Sequence[Any]) -> tuple[Any, dict[Path, Any], dict[Any, list[Any]], list[Any]]:
        """The jaxpr's results as `jaxpr_call` returns them."""
        first_added = self.num_var_out + self.num_var_state
        after = _split(outs[self.num_var_out : first_added], [len(vs) for vs in self.state_tree_outvars])
        hidden: dict[Path, Any] = {}
        other: dict[Any, list[Any]] = {}
        for i, (state, values) in enumerate(zip(self.compiled_model_states, after, strict=True)):
            path = self.state_path(state)
            if path in self.hidden_path_to_invar:
                hidden[path] = values[0]
            elif path not in self.weight_path_to_invars:
                other[path if path is not None else ("external", i)] = values
        return jax.tree.unflatten(self.out_tree, outs[: self.num_var_out]), hidden, other, list(outs[first_added:])


def extract_module_info(model: brainstate.nn.Module, *args: Any, **kwargs: Any) -> ModuleInfo:
    """Traces one step of a model and names its variables.

    Args:
        model: any brainstate module whose states are initialised.
        *args: example arguments of one step.
        **kwargs: example keyword arguments of one step.
    """
    if not isinstance(model, brainstate.nn.Module):
        raise InputError(
            f"`model` is a {type(model).__name__}, not a brainstate module. For a torch module, call `etrace_bridge.wrap(module)` first."
        )
    retrieved = dict(model.states())
    _check_states(model, retrieved)
    stateful = _trace(model, args, kwargs)
    compiled = tuple(stateful.get_states(*args, **kwargs))
    raw = stateful.get_jaxpr(*args, **kwargs)
    id_to_path = {id(s): p for p, s in retrieved.items()}
    leaves = [len(jax.tree.leaves(s.value)) for s in compiled]
    n_state = sum(leaves)
    n_arg = len(raw.jaxpr.invars) - n_state
    n_out = len(raw.jaxpr.outvars) - n_state
    weight_of: list[Path | None] = [None] * n_arg
    for state, count in zip(compiled, leaves, strict=True):
        path = id_to_path.get(id(state)) if isinstance(state, brainstate.ParamState) else None
        weight_of += [path] * count
    _check_raw(raw, n_arg, n_out, weight_of, compiled, leaves, id_to_path)
    raw_outs = _split(raw.jaxpr.outvars[n_out:], leaves)
    new_states = [v for s, o in zip(compiled, raw_outs, strict=True) if isinstance(s, brainstate.HiddenState) for v in o]
    plain, records = normalise(raw, weight_of, new_states)
    invars = _split(plain.jaxpr.invars[n_arg:], leaves)
    outvars = _split(plain.jaxpr.outvars[n_out:], leaves)
    hidden = [
        (id_to_path[id(s)], i[0], o[0])
        for s, i, o in zip(compiled, invars, outvars, strict=True)
        if isinstance(s, brainstate.HiddenState) and id(s) in id_to_path
    ]
    weights = {
        id_to_path[id(s)]: i for s, i in zip(compiled, invars, strict=True) if isinstance(s, brainstate.ParamState) and id(s) in id_to_path
    }
    if not hidden:
        raise CompilationError(
            f"No hidden state of `{type(model).__name__}` takes part in this step, so there is nothing to learn online. "
            "Recurrent values must be `brainstate.HiddenState`s that the step reads or writes."
        )
    if not weights:
        raise CompilationError(
            f"No parameter of `{type(model).__name__}` takes part in this step. Trainable values must be "
            "`brainstate.ParamState`s that the step reads."
        )
    return ModuleInfo(
        stateful_model=stateful,
        closed_jaxpr=plain,
        retrieved_model_states=retrieved,
        compiled_model_states=compiled,
        state_id_to_path=id_to_path,
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
        num_var_out=n_out,
        num_var_state=n_state,
        out_tree=jax.tree.structure(stateful.get_out_shapes(*args, **kwargs)[0]),
        num_var_arg=n_arg,
        records=(*_state_records(retrieved, compiled, id_to_path), *records),
    )


def _trace(model: brainstate.nn.Module, args: tuple, kwargs: dict) -> brainstate.transform.StatefulFunction:
    stateful = brainstate.transform.StatefulFunction(model.__call__, return_only_write=False)
    try:
        stateful.make_jaxpr(*args, **kwargs)
    except BridgeError:
        raise
    except AttributeError as error:
        if any(hasattr(node, "init_state") for node in [model]) and "has no attribute" in str(error):
            raise StateError(
                f"The step of `{type(model).__name__}` failed because {error}. Its states are probably not initialised: "
                "call `model.init_state(batch_size)` or `brainstate.nn.init_all_states(model, batch_size=...)` first."
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
                f"The hidden state `{show_path(path)}` has no value yet. Call `model.init_state(batch_size)` or "
                "`brainstate.nn.init_all_states(model, batch_size=...)` first."
            )
        if len(leaves) > 1:
            raise StateError(
                f"The hidden state `{show_path(path)}` holds {len(leaves)} arrays; a hidden state must be one array. "
                "Make one `brainstate.HiddenState` for each, or stack them in a `brainstate.HiddenGroupState`."
            )
        if not jnp.issubdtype(jnp.result_type(leaves[0]), jnp.inexact):
            raise StateError(
                f"The hidden state `{show_path(path)}` has dtype {jnp.result_type(leaves[0])}, which has no gradient. "
                "Make it a float, or store counters and flags in a `brainstate.ShortTermState`."
            )


def _check_raw(raw, n_arg, n_out, weight_of, compiled, leaves, id_to_path) -> None:
    """What must hold of the jaxpr as brainstate made it."""
    invars, outvars = raw.jaxpr.invars[n_arg:], raw.jaxpr.outvars[n_out:]
    at = 0
    for state, count in zip(compiled, leaves, strict=True):
        name = show_path(id_to_path.get(id(state), ("external",)))
        for i, o in zip(invars[at : at + count], outvars[at : at + count], strict=True):
            if isinstance(state, brainstate.ParamState) and i is not o:
                raise CompilationError(
                    f"The step assigns to the parameter `{name}`. A parameter must stay as it is within a step, or its "
                    "gradient is not defined. Keep values that change in a `brainstate.ShortTermState`."
                )
            changed = i.aval.shape != o.aval.shape or i.aval.dtype != o.aval.dtype
            if isinstance(state, brainstate.HiddenState) and changed:
                raise StateError(
                    f"The step changes the hidden state `{name}` from {i.aval.str_short()} to {o.aval.str_short()}. "
                    "A hidden state must keep its shape and dtype from step to step: check the batch size given to "
                    "`init_state` and the layout of the input."
                )
        at += count


def _state_records(retrieved, compiled, id_to_path) -> list[CompilationRecord]:
    used = {id(s) for s in compiled}
    records = [
        CompilationRecord(
            DiagnosticKind.STATE_NOT_IN_JAXPR,
            DiagnosticLevel.WARNING if isinstance(s, (brainstate.ParamState, brainstate.HiddenState)) else DiagnosticLevel.INFO,
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
            f"the step uses a {type(s).__name__} that the module does not list; it is carried, not traced",
        )
        for s in compiled
        if id(s) not in id_to_path
    ]
    return records


def _split(flat: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    parts, at = [], 0
    for n in sizes:
        parts.append(list(flat[at : at + n]))
        at += n
    return parts
