"""The step with `h^t = f(x) + p`: a new input `p` for each hidden state, so that `dl/dh = dl/dp`.

Everything downstream of a new state in the same step reads the perturbed value. Where the state's
own variable is only a rearrangement of what is read, `p` is carried back to the value's roots (see
`aliases`) and added there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._errors import InputError
from etrace_bridge._jax_compat import (
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    Var,
    bind_equation,
    make_jaxpr_closed,
)
from etrace_bridge.compiler.aliases import alias_equations, is_alias, producers
from etrace_bridge.compiler.diagnostics import Path, show_path
from etrace_bridge.compiler.extraction import extract_module_info
from etrace_bridge.compiler.hidden_group import HiddenGroup
from etrace_bridge.compiler.jaxpr import evaluate, read, variables
from etrace_bridge.compiler.module_info import ModuleInfo


@dataclass(frozen=True)
class HiddenPerturbation:
    """The perturbed step.

    Attributes:
        perturb_vars: the new inputs of `perturb_jaxpr`, one per hidden state.
        perturb_hidden_paths: the hidden states, in the same order.
        perturb_hidden_states: their States.
        perturb_jaxpr: the step's inputs, then the perturbations -> the step's outputs.
    """

    perturb_vars: tuple[Var, ...]
    perturb_hidden_paths: tuple[Path, ...]
    perturb_hidden_states: tuple[brainstate.State, ...]
    perturb_jaxpr: ClosedJaxpr

    def eval_jaxpr(self, inputs: Sequence[Any], perturb_data: Sequence[Any]) -> list[Any]:
        """Return the step's flat outputs.

        Args:
            inputs: the step's flat inputs: arguments, then old states.
            perturb_data: one array per hidden state.
        """
        self._check(perturb_data)
        expected = len(self.perturb_jaxpr.jaxpr.invars) - len(self.perturb_vars)
        if len(inputs) != expected:
            raise InputError(f"`inputs` has {len(inputs)} arrays, but the step takes {expected}.")
        jaxpr = self.perturb_jaxpr.jaxpr
        env = dict(zip(jaxpr.constvars, self.perturb_jaxpr.consts, strict=True))
        env.update(zip(jaxpr.invars, (*inputs, *perturb_data), strict=True))
        evaluate(jaxpr.eqns, env)
        return [read(env, v) for v in jaxpr.outvars]

    def call(
        self,
        minfo: ModuleInfo,
        args: Sequence[Any],
        perturb_data: Sequence[Any],
        old_state_vals: Any = None,
    ) -> tuple[Any, dict[Path, Any], dict[Any, list[Any]], list[Any]]:
        """Run the perturbed step as `ModuleInfo.jaxpr_call` runs the step."""
        return minfo.arrange_outputs(
            self.eval_jaxpr(minfo.flatten_inputs(args, old_state_vals), perturb_data)
        )

    def init_perturb_data(self) -> list[Any]:
        """Return zeros of the right shape and dtype, one array per hidden state."""
        return [jnp.zeros(v.aval.shape, v.aval.dtype) for v in self.perturb_vars]

    def perturb_data_to_hidden_group_data(
        self, perturb_data: Sequence[Any], hidden_groups: Sequence[HiddenGroup]
    ) -> list[Any]:
        """Return one array per group, with the states along its last axis."""
        self._check(perturb_data)
        by_path = dict(zip(self.perturb_hidden_paths, perturb_data, strict=True))
        for path in (p for g in hidden_groups for p in g.hidden_paths):
            if path not in by_path:
                raise InputError(
                    f"The perturbed step has no hidden state `{show_path(path)}`; is the group "
                    "from another model? Pass the groups of this model's graph."
                )
        return [
            group.concat_hidden([by_path[p] for p in group.hidden_paths]) for group in hidden_groups
        ]

    def dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def _check(self, perturb_data: Sequence[Any]) -> None:
        if len(perturb_data) != len(self.perturb_vars):
            names = ", ".join(f"`{show_path(p)}`" for p in self.perturb_hidden_paths)
            raise InputError(
                f"`perturb_data` has {len(perturb_data)} arrays, but there are "
                f"{len(self.perturb_vars)} hidden states: {names}. `init_perturb_data()` makes "
                "zeros of the right form."
            )


def _undo(eqn: JaxprEqn, p: Any) -> list[Any]:
    """Return what a perturbation of an alias's output is at its operands."""
    name, params = eqn.primitive.name, eqn.params
    shape, dtype = eqn.invars[0].aval.shape, eqn.invars[0].aval.dtype
    if name == "transpose":
        return [jnp.transpose(p, [int(d) for d in np.argsort(params["permutation"])])]
    if name == "rev":
        return [lax.rev(p, params["dimensions"])]
    if name == "concatenate":
        axis = params["dimension"]
        ends = np.cumsum([v.aval.shape[axis] for v in eqn.invars])
        return jnp.split(p, ends[:-1], axis=axis)
    if name == "stack":
        return [
            lax.index_in_dim(p, n, params["axis"], keepdims=False) for n in range(len(eqn.invars))
        ]
    return [p.reshape(shape).astype(dtype)]


class _Perturber:
    """Runs the step with a perturbation added at the roots of every new hidden state."""

    def __init__(self, minfo: ModuleInfo) -> None:
        self.minfo = minfo
        self.made_by = producers(minfo.jaxpr.eqns)
        self.chains = {
            p: alias_equations(self.made_by, o) for p, o in minfo.hidden_path_to_outvar.items()
        }
        self.added: dict[Var, list[Any]] = {}  # root -> perturbations of the states it is read by
        self.plain: dict[Var, Any] = {}  # root -> its value without them

    def __call__(self, *flat: Any) -> list[Any]:
        minfo = self.minfo
        n_state = len(minfo.hidden_path_to_outvar)
        perturb = dict(zip(minfo.hidden_path_to_outvar, flat[len(flat) - n_state :], strict=True))
        for path, p in perturb.items():
            self._carry_back(minfo.hidden_path_to_outvar[path], p)
        env = dict(zip(minfo.jaxpr.constvars, minfo.closed_jaxpr.consts, strict=True))
        env.update(zip(minfo.jaxpr.invars, flat[: len(flat) - n_state], strict=True))
        evaluate(minfo.jaxpr.eqns, env, self._equation)
        outs = [read(env, v) for v in minfo.jaxpr.outvars]
        at = minfo.num_var_out
        for state, outvars in zip(
            minfo.compiled_model_states, minfo.state_tree_outvars, strict=True
        ):
            path = minfo.state_path(state)
            if path in perturb:
                outs[at] = self._new_state(path, outvars[0], env) + perturb[path]
            at += len(outvars)
        return outs

    def _carry_back(self, var: Any, p: Any) -> None:
        if isinstance(var, Literal) or var not in self.made_by:
            return  # an input of the step: its readers read the input, not the new state
        eqn = self.made_by[var]
        if not is_alias(eqn):
            self.added.setdefault(var, []).append(p)
            return
        for operand, part in zip(eqn.invars, _undo(eqn, p), strict=True):
            self._carry_back(operand, part)

    def _equation(self, eqn: JaxprEqn, operands: list[Any]) -> list[Any] | None:
        if not any(v in self.added for v in eqn.outvars):
            return None
        results = bind_equation(eqn, operands)
        for n, v in enumerate(eqn.outvars):
            if v in self.added:
                self.plain[v] = results[n]
                results[n] = sum(self.added[v], start=results[n])
        return results

    def _new_state(self, path: Path, outvar: Any, env: dict[Var, Any]) -> Any:
        # Two states may share a root; each takes only its own perturbation.
        chain = self.chains[path]
        own = {
            v: self.plain.get(v, env[v])
            for v in variables([outvar, *(v for eqn in chain for v in eqn.invars)])
        }
        return jnp.asarray(read(evaluate(chain, own), outvar))


def add_hidden_perturbation_from_minfo(minfo: ModuleInfo) -> HiddenPerturbation:
    """Add a perturbation to every hidden state of a traced step."""
    hidden = minfo.hidden_path_to_invar
    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=weak)
        for v, weak in [
            *((v, v.aval.weak_type) for v in minfo.jaxpr.invars),
            *((v, False) for v in hidden.values()),
        ]
    ]
    closed = make_jaxpr_closed(_Perturber(minfo), *avals)
    return HiddenPerturbation(
        perturb_vars=tuple(closed.jaxpr.invars[len(closed.jaxpr.invars) - len(hidden) :]),
        perturb_hidden_paths=tuple(hidden),
        perturb_hidden_states=tuple(minfo.retrieved_model_states[p] for p in hidden),
        perturb_jaxpr=closed,
    )


def add_hidden_perturbation_in_module(
    model: brainstate.nn.Module, *args: Any, **kwargs: Any
) -> HiddenPerturbation:
    """Add a perturbation to every hidden state of a model."""
    return add_hidden_perturbation_from_minfo(extract_module_info(model, *args, **kwargs))
