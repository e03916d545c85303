"""What the compiler's results must equal, computed the slow way: dense Jacobians of the whole step.

Nothing here uses the compiler's core, groups or traces. The step's own jaxpr is evaluated, with `stop_gradient` at the
operands that the graph names as cuts, and differentiated by reverse mode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._jax_compat import Literal, bind_equation


class Step:
    """A traced step as a function of arguments, states, parameters and values added to chosen variables."""

    def __init__(self, graph: Any, args: Sequence[Any]) -> None:
        self.minfo = minfo = graph.module_info
        self.graph, self.args = graph, jax.tree.leaves(tuple(args))
        self.jaxpr, self.consts = minfo.jaxpr, minfo.closed_jaxpr.consts
        at = len(self.args)
        self.values = {v: a for v, a in zip(self.jaxpr.invars[at:], self._state_values(), strict=True)}
        self.hidden = list(minfo.hidden_path_to_invar)
        self.new = [minfo.hidden_path_to_outvar[p] for p in self.hidden]

    def _state_values(self) -> list[Any]:
        return [leaf for s in self.minfo.compiled_model_states for leaf in jax.tree.leaves(s.value)]

    def run(
        self, replaced: dict, added: dict, cuts: Sequence[tuple[int, int]] = (), args: Sequence[Any] | None = None
    ) -> dict:
        """The values of all variables.

        Args:
            replaced: values of inputs that differ from the current ones.
            added: by variable, what is added to it where it is made.
            cuts: (equation, operand) pairs at which gradients stop.
            args: other arguments of the step.
        """
        at = len(self.args)
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env.update(zip(self.jaxpr.invars[:at], self.args if args is None else args, strict=True))
        env.update(self.values | replaced)
        stops: dict[int, set[int]] = {}
        for i, k in cuts:
            stops.setdefault(i, set()).add(k)
        for i, eqn in enumerate(self.jaxpr.eqns):
            operands = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            for k in stops.get(i, ()):
                operands[k] = lax.stop_gradient(operands[k])
            for v, value in zip(eqn.outvars, bind_equation(eqn, operands), strict=True):
                env[v] = value + added[v] if v in added else value
        return env

    def hidden_invars(self) -> list[Any]:
        """The hidden states' variables before the step."""
        return [self.minfo.hidden_path_to_invar[p] for p in self.hidden]

    def read(self, env: dict, var: Any) -> Any:
        """A variable's or literal's value."""
        return jnp.asarray(var.val) if isinstance(var, Literal) else env[var]

    def new_states(self, env: dict) -> list[Any]:
        """The hidden states after the step."""
        return [self.read(env, v) for v in self.new]

    def old_states(self) -> list[Any]:
        """The hidden states before it."""
        return [self.values[v] for v in self.hidden_invars()]

    def state_jacobian(self) -> list[list[np.ndarray]]:
        """`[i][j]`: d new state i / d old state j, flattened, gradients stopped at the graph's cuts."""
        cuts = list(self.graph.structure.facts.cuts)

        def new(*old: Any) -> list[Any]:
            return self.new_states(self.run(dict(zip(self.hidden_invars(), old, strict=True)), {}, cuts))

        return _dense(new, self.old_states())

    def contact_jacobian(self, variables: Sequence[Any]) -> list[list[np.ndarray]]:
        """`[i][j]`: d new state i / d contact variable j, flattened, gradients stopped at the graph's cuts."""
        cuts = list(self.graph.structure.facts.cuts)

        def new(*added: Any) -> list[Any]:
            return self.new_states(self.run({}, dict(zip(variables, added, strict=True)), cuts))

        return _dense(new, [jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables])


def _dense(fun: Callable, at: Sequence[Any]) -> list[list[np.ndarray]]:
    jacobians = jax.jacrev(fun, argnums=tuple(range(len(at))))(*at)
    return [
        [np.asarray(j).reshape(np.size(j) // max(a.size, 1), a.size) for j, a in zip(row, at, strict=True)]
        for row in jacobians
    ]


# Brute-force D-RTRL and BPTT over a sequence --------------------------------------------------------------------------


class Unrolled:
    """Gradients of `sum_t loss(output_t)` over a few steps, by BPTT and by D-RTRL with dense influence matrices."""

    def __init__(self, graph: Any, inputs: Sequence[Any]) -> None:
        self.step = Step(graph, inputs[0])
        self.graph, self.inputs = graph, [jax.tree.leaves(tuple(x)) for x in inputs]
        minfo = graph.module_info
        self.weights = minfo.weight_invars
        self.hidden = self.step.hidden_invars()
        self.carried = [v for vs in minfo.state_tree_invars for v in vs if v not in minfo.invar_to_weight_path]
        self.after = {
            i: o for ins, outs in zip(minfo.state_tree_invars, minfo.state_tree_outvars, strict=True)
            for i, o in zip(ins, outs, strict=True)
        }
        self.outputs = minfo.jaxpr.outvars[: minfo.num_var_out]

    def _loss(self, env: dict) -> Any:
        """A loss with different weights on every element, so that nothing cancels."""
        total = jnp.zeros(())
        for v in self.outputs:
            value = self.step.read(env, v)
            if jnp.issubdtype(value.dtype, jnp.inexact):
                ramp = jnp.linspace(0.5, 1.5, value.size, dtype=value.dtype).reshape(value.shape)
                total = total + (ramp * value + 0.5 * (value - 0.3) ** 2).sum()
        return total

    def _run(self, t: int, states: dict, weights: Sequence[Any], cuts=()) -> tuple[Any, dict]:
        replaced = states | dict(zip(self.weights, weights, strict=True))
        env = self.step.run(replaced, {}, cuts, self.inputs[t])
        return self._loss(env), {i: self.step.read(env, self.after[i]) for i in self.carried}

    def _start(self) -> tuple[dict, list[Any]]:
        values = self.step.values
        return {v: values[v] for v in self.carried}, [values[v] for v in self.weights]

    def bptt(self) -> list[np.ndarray]:
        """The gradient of each parameter leaf, by reverse mode through all steps."""
        states, weights = self._start()

        def total(weights: list[Any]) -> Any:
            loss, now = jnp.zeros(()), states
            for t in range(len(self.inputs)):
                here, now = self._run(t, now, weights)
                loss = loss + here
            return loss

        return [np.asarray(g) for g in jax.grad(total)(weights)]

    def d_rtrl(self, credit: str = "step") -> list[np.ndarray]:
        """The same by D-RTRL: influence of the parameters on the hidden states, carried through uncut paths only.

        Args:
            credit: how the loss of a step is differentiated by the hidden states before it: through the whole step
                (`"step"`), or stopping at cuts on the way from an old to a new state (`"core"`).
        """
        facts = self.graph.structure.facts
        trace_cuts = list(facts.cuts)
        credit_cuts = list(facts.pre_cuts) if credit == "core" else []
        states, weights = self._start()
        influence = [[np.zeros((states[h].size, w.size)) for w in weights] for h in self.hidden]
        grads = [np.zeros(w.size) for w in weights]
        for t in range(len(self.inputs)):

            def loss(hidden, weights, cuts, t=t, states=states):
                return self._run(t, states | dict(zip(self.hidden, hidden, strict=True)), weights, cuts)[0]

            def new(hidden, weights, t=t, states=states):
                after = self._run(t, states | dict(zip(self.hidden, hidden, strict=True)), weights, trace_cuts)[1]
                return [after[h] for h in self.hidden]

            hidden = [states[h] for h in self.hidden]
            direct = jax.grad(loss, argnums=1)(hidden, weights, [])
            back = jax.grad(loss, argnums=0)(hidden, weights, credit_cuts)
            for j, g in enumerate(direct):
                grads[j] += np.asarray(g).ravel()
                grads[j] += sum(np.asarray(b).ravel() @ influence[i][j] for i, b in enumerate(back))
            by_hidden, by_weight = jax.jacrev(new, argnums=(0, 1))(hidden, weights)
            influence = [
                [
                    np.asarray(by_weight[i][j]).reshape(-1, w.size)
                    + sum(
                        np.asarray(by_hidden[i][k]).reshape(-1, hidden[k].size) @ influence[k][j]
                        for k in range(len(hidden))
                    )
                    for j, w in enumerate(weights)
                ]
                for i in range(len(hidden))
            ]
            states = self._run(t, states, weights)[1]
        return [g.reshape(w.shape) for g, w in zip(grads, weights, strict=True)]
