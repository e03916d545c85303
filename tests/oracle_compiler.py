"""What the compiler's results must equal, computed the slow way: dense Jacobians of the whole step.

Nothing here uses the compiler's core, groups or traces. The step's own jaxpr is evaluated, with
`stop_gradient` at the operands that the graph names as cuts, and differentiated by reverse mode.
That the cuts are the right ones is not shown here: see oracle.py for the oracles that know nothing
of the compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from etrace_bridge._jax_compat import Literal, bind_equation
from quick_jit import quick_jit


def compute(fun: Callable) -> Any:
    """The results of `fun()`, on the host, as one program (eager mode would compile every
    operation).
    """
    return jax.device_get(quick_jit(fun)())


class Step:
    """A traced step as a function of arguments, states, parameters and values added to chosen
    variables.
    """

    def __init__(self, graph: Any, args: Sequence[Any]) -> None:
        self.minfo = minfo = graph.module_info
        self.graph, self.args = graph, jax.tree.leaves(tuple(args))
        self.jaxpr, self.consts = minfo.jaxpr, minfo.closed_jaxpr.consts
        at = len(self.args)
        self.values = dict(zip(self.jaxpr.invars[at:], self._state_values(), strict=True))
        self.hidden = list(minfo.hidden_path_to_invar)
        self.new = [minfo.hidden_path_to_outvar[p] for p in self.hidden]

    def _state_values(self) -> list[Any]:
        return [leaf for s in self.minfo.compiled_model_states for leaf in jax.tree.leaves(s.value)]

    def run(
        self,
        replaced: dict,
        added: dict,
        cuts: Sequence[tuple[int, int]] = (),
        args: Sequence[Any] | None = None,
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

    @staticmethod
    def read(env: dict, var: Any) -> Any:
        """A variable's or literal's value."""
        return jnp.asarray(var.val) if isinstance(var, Literal) else env[var]

    def new_states(self, env: dict) -> list[Any]:
        """The hidden states after the step."""
        return [self.read(env, v) for v in self.new]

    def old_states(self) -> list[Any]:
        """The hidden states before it."""
        return [self.values[v] for v in self.hidden_invars()]

    def state_jacobian(self) -> list[list[Any]]:
        """`[i][j]`: d new state i / d old state j, flattened, gradients stopped at the graph's
        cuts.
        """
        cuts = list(self.graph.structure.facts.cuts)

        def new(*old: Any) -> list[Any]:
            return self.new_states(
                self.run(dict(zip(self.hidden_invars(), old, strict=True)), {}, cuts)
            )

        return _dense(new, self.old_states())

    def contact_jacobian(self, variables: Sequence[Any]) -> list[list[Any]]:
        """`[i][j]`: d new state i / d contact variable j, flattened, gradients stopped at the
        graph's cuts.
        """
        cuts = list(self.graph.structure.facts.cuts)

        def new(*added: Any) -> list[Any]:
            return self.new_states(self.run({}, dict(zip(variables, added, strict=True)), cuts))

        return _dense(new, [jnp.zeros(v.aval.shape, v.aval.dtype) for v in variables])


def _dense(fun: Callable, at: Sequence[Any]) -> list[list[Any]]:
    if not at:
        return [[] for _ in fun()]
    jacobians = jax.jacrev(fun, argnums=tuple(range(len(at))))(*at)
    return [[j.reshape(-1, a.size) for j, a in zip(row, at, strict=True)] for row in jacobians]


# BPTT and brute-force D-RTRL over a sequence
# ------------------------------------------------------------------------


class Unrolled:
    """Gradients of `sum_t loss(output_t)` over a few steps, by BPTT and by D-RTRL with dense
    influence matrices.
    """

    def __init__(self, graph: Any, inputs: Sequence[Any]) -> None:
        self.step = Step(graph, inputs[0])
        self.graph = graph
        self.inputs = [
            jnp.stack(xs) for xs in zip(*(jax.tree.leaves(tuple(x)) for x in inputs), strict=True)
        ]
        minfo = graph.module_info
        pairs = [
            (i, o)
            for ins, outs in zip(minfo.state_tree_invars, minfo.state_tree_outvars, strict=True)
            for i, o in zip(ins, outs, strict=True)
        ]
        hidden = self.step.hidden_invars()
        after = dict(pairs)
        self.weights = minfo.weight_invars
        others = [i for i, _ in pairs if i not in hidden and i not in minfo.invar_to_weight_path]
        self.carried = [*hidden, *others]
        self.after = [after[v] for v in self.carried]
        self.n_hidden = len(hidden)
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

    def _run(
        self, args: Sequence[Any], states: Sequence[Any], weights: Sequence[Any], cuts=()
    ) -> tuple[Any, list[Any]]:
        replaced = dict(zip((*self.carried, *self.weights), (*states, *weights), strict=True))
        env = self.step.run(replaced, {}, cuts, args)
        return self._loss(env), [self.step.read(env, v) for v in self.after]

    def _start(self) -> tuple[list[Any], list[Any]]:
        values = self.step.values
        return [values[v] for v in self.carried], [values[v] for v in self.weights]

    def bptt(self) -> list[Any]:
        """The gradient of each parameter leaf, by reverse mode through all steps."""
        states, weights = self._start()

        def total(weights: list[Any]) -> Any:
            def body(now, args):
                loss, new = self._run(args, now, weights)
                return new, loss

            return lax.scan(body, states, self.inputs)[1].sum()

        return jax.grad(total)(weights)

    def d_rtrl(self, credits: Sequence[str] = ("step", "core")) -> dict[str, list[Any]]:
        """The same by D-RTRL: influence of the parameters on the hidden states, carried through
        uncut paths only.

        Args:
            credits: which of the two to compute.

        Returns:
            For each `credit`, the gradients. It says how a step's loss is differentiated by the
            hidden states before the step: through the whole step (`"step"`), or not through cuts
            between an old and a new state (`"core"`).
        """
        facts, n = self.graph.structure.facts, self.n_hidden
        states, weights = self._start()
        sizes = [w.size for w in weights]

        def body(carry, args):
            states, influence, grads = carry
            hidden, others = states[:n], states[n:]

            def loss(hidden, weights, cuts):
                return self._run(args, [*hidden, *others], weights, cuts)

            def new(hidden, weights):
                return self._run(args, [*hidden, *others], weights, list(facts.cuts))[1][:n]

            differentiate = jax.grad(loss, argnums=(0, 1), has_aux=True)
            (back, direct), states = differentiate(hidden, weights, [])
            backs = dict.fromkeys(credits, back)
            if facts.pre_cuts and "core" in credits:
                back, _ = jax.grad(loss, has_aux=True)(hidden, weights, list(facts.pre_cuts))
                backs["core"] = back
            grads = {
                credit: [
                    grad
                    + d.ravel()
                    + sum(
                        b.ravel() @ row[j] for b, row in zip(backs[credit], influence, strict=True)
                    )
                    for j, (grad, d) in enumerate(zip(grads[credit], direct, strict=True))
                ]
                for credit in grads
            }
            # [new state][0: hidden, 1: weights][which]
            jacobian = jax.jacrev(new, argnums=(0, 1))(hidden, weights)
            influence = [
                [
                    jacobian[i][1][j].reshape(-1, size)
                    + sum(
                        jacobian[i][0][k].reshape(-1, hidden[k].size) @ influence[k][j]
                        for k in range(n)
                    )
                    for j, size in enumerate(sizes)
                ]
                for i in range(n)
            ]
            return (states, influence, grads), None

        zeros = [[jnp.zeros((h.size, size)) for size in sizes] for h in states[:n]]
        start = {credit: [jnp.zeros(size) for size in sizes] for credit in credits}
        (_, _, grads), _ = lax.scan(body, (states, zeros, start), self.inputs)
        return {
            c: [g.reshape(w.shape) for g, w in zip(gs, weights, strict=True)]
            for c, gs in grads.items()
        }
