"""What the compiler knows about one step of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import brainstate
import jax

from etrace_bridge._errors import InputError
from etrace_bridge._jax_compat import ClosedJaxpr, Jaxpr, Var
from etrace_bridge.compiler.diagnostics import CompilationRecord, Path
from etrace_bridge.compiler.jaxpr import evaluate, read


@dataclass(frozen=True)
class ModuleInfo:
    """One step of a model: its jaxpr, in plain equations, and which variable is which state.

    Attributes:
        stateful_model: the traced brainstate function.
        closed_jaxpr: the step, arguments + old states -> outputs + new states (+ added
            intermediates), normalised.
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
        weight_path_to_invars: parameter -> its variables, one per leaf.
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
        """Return the path of a compiled state; None for one that the module does not list."""
        return self.state_id_to_path.get(id(state))

    def dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def add_jaxpr_outs(self, extra: Sequence[Var]) -> ModuleInfo:
        """Return a copy whose jaxpr also returns these intermediates."""
        made = {v for eqn in self.jaxpr.eqns for v in eqn.outvars} | set(self.jaxpr.invars)
        for v in extra:
            if v not in made:
                raise InputError(
                    f"`{v}` is not a variable of this step's jaxpr, so it cannot be returned."
                )
        jaxpr = self.jaxpr.replace(
            outvars=[*self.jaxpr.outvars, *extra],
            debug_info=self.jaxpr.debug_info.with_unknown_names(),
        )
        return dataclasses.replace(self, closed_jaxpr=ClosedJaxpr(jaxpr, self.closed_jaxpr.consts))

    def split_state_outvars(
        self,
    ) -> tuple[dict[Path, list[Any]], dict[Path, Any], dict[Any, list[Any]]]:
        """Return the variables after the step: of weights, of hidden states, of other states.

        Each is a dict by path.
        """
        weights: dict[Path, list[Any]] = {}
        other: dict[Any, list[Any]] = {}
        for i, (state, outvars) in enumerate(
            zip(self.compiled_model_states, self.state_tree_outvars, strict=True)
        ):
            path = self.state_path(state)
            if path in self.weight_path_to_invars:
                weights[path] = outvars
            elif path not in self.hidden_path_to_invar:
                other[path if path is not None else ("external", i)] = outvars
        return weights, dict(self.hidden_path_to_outvar), other

    def jaxpr_call(self, *args: Any, old_state_vals: Sequence[Any] | None = None):
        """Run the step.

        Args:
            *args: the model's arguments.
            old_state_vals: one value per compiled state; None for the States' current values.

        Returns:
            The model's outputs; hidden-state values by path; other state values by path; added
            intermediates.
        """
        env = dict(zip(self.jaxpr.constvars, self.closed_jaxpr.consts, strict=True))
        env.update(zip(self.jaxpr.invars, self.flatten_inputs(args, old_state_vals), strict=True))
        evaluate(self.jaxpr.eqns, env)
        return self.arrange_outputs([read(env, v) for v in self.jaxpr.outvars])

    def flatten_inputs(
        self, args: Sequence[Any], old_state_vals: Sequence[Any] | None = None
    ) -> list[Any]:
        """Return the arrays that the jaxpr takes.

        They come from the model's arguments and the states' old or current values.
        """
        if old_state_vals is None:
            old_state_vals = [s.value for s in self.compiled_model_states]
        if len(old_state_vals) != len(self.compiled_model_states):
            raise InputError(
                f"`old_state_vals` has {len(old_state_vals)} values, but the step takes "
                f"{len(self.compiled_model_states)} states."
            )
        flat = [*jax.tree.leaves(tuple(args)), *jax.tree.leaves(list(old_state_vals))]
        if len(flat) != len(self.jaxpr.invars):
            raise InputError(
                f"The step takes {len(self.jaxpr.invars)} arrays in all, but {len(flat)} were given: those of "
                "the arguments and of the states."
            )
        return flat

    def arrange_outputs(
        self, outs: Sequence[Any]
    ) -> tuple[Any, dict[Path, Any], dict[Any, list[Any]], list[Any]]:
        """Arrange the jaxpr's results as `jaxpr_call` returns them."""
        first_added = self.num_var_out + self.num_var_state
        after = split_by_sizes(
            outs[self.num_var_out : first_added], [len(vs) for vs in self.state_tree_outvars]
        )
        hidden: dict[Path, Any] = {}
        other: dict[Any, list[Any]] = {}
        for i, (state, values) in enumerate(zip(self.compiled_model_states, after, strict=True)):
            path = self.state_path(state)
            if path in self.hidden_path_to_invar:
                hidden[path] = values[0]
            elif path not in self.weight_path_to_invars:
                other[path if path is not None else ("external", i)] = values
        return (
            jax.tree.unflatten(self.out_tree, outs[: self.num_var_out]),
            hidden,
            other,
            list(outs[first_added:]),
        )


def split_by_sizes(flat: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Split a flat sequence into consecutive pieces."""
    parts, at = [], 0
    for n in sizes:
        parts.append(list(flat[at : at + n]))
        at += n
    return parts
