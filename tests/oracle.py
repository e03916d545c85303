"""The learning rules by brute force, written from their definitions: what the engine must equal.

Nothing here uses the engine or the rules. Two oracles:

- `Dense`: any plain brainstate model. The step's own jaxpr is evaluated, `stop_gradient` at the
  operands that the graph names as cuts, and differentiated into dense Jacobians, step by step; the
  rules are loops of matrix products. It takes the cuts and groups from the compiler: it shows that
  the engine computes the rule for these cuts, not that they are the right ones.
- `Cell`: one recurrent layer written out by hand, without the compiler: what meets a weight, and
  the core.

Where the cuts belong is shown without the compiler: by `Cell` here, by online_oracle.py,
test_stacks_in_torch.py and test_low_rank.py in torch, and by exact rules, which have none and must
be torch's BPTT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from etrace_bridge._jax_compat import Literal, bind_equation
from quick_jit import quick_jit
from strict import promotion


def loss_of(output: Any, target: Any) -> Any:
    """A loss with different weights on every element of every output, so that nothing cancels."""
    total = 0.0
    for leaf in jax.tree.leaves(output):
        ramp = jnp.linspace(0.5, 1.5, leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        total = total + jnp.sum(jnp.sin(ramp * leaf + target))
    return total


def assert_close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    """Relative to the largest entry of each array."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape
        assert np.abs(a - b).max(initial=0) <= tolerance * max(np.abs(b).max(initial=0), 1e-3)


def assert_live(grads: Sequence[Any]) -> None:
    """Every parameter has a gradient: equal zeros prove nothing."""
    for n, g in enumerate(grads):
        assert np.abs(np.asarray(g)).max() > 1e-6, f"the gradient of parameter {n} is zero"


# -- any plain model ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """A model's parameters and states, flat lists in the order of its jaxpr."""

    weights: list[Any]
    hidden: list[Any]
    other: list[Any]


@dataclass(frozen=True)
class DenseStep:
    """One step's value and Jacobians; states `s` are hidden states and then others, everything
    flattened.

    Attributes:
        loss: loss of the step.
        output: output of the step.
        after: states after it.
        l_w, l_s: derivative of the loss by weights and old states.
        s_w, s_s: Jacobian of the new states.
        h_w, h_h: Jacobian of the new hidden states with everything stopped at the cuts.
        l_h: derivative of the loss by old hidden states, stopped where they leave the core
            (`credit="core"`).
    """

    loss: Any
    output: Any
    after: Any
    l_w: Any
    l_s: Any
    s_w: Any
    s_s: Any
    h_w: Any
    h_h: Any
    l_h: Any


class Dense:
    """Brute-force rules for a compiled plain model on one sequence."""

    def __init__(
        self, graph: Any, values: Values, xs: Sequence[Any], targets: Any, loss: Callable = loss_of
    ) -> None:
        self.graph, self.loss = graph, loss
        minfo = self.minfo = graph.module_info
        self.jaxpr = minfo.jaxpr
        self.hidden_in = list(minfo.hidden_path_to_invar.values())
        self.hidden_out = [minfo.hidden_path_to_outvar[p] for p in minfo.hidden_path_to_invar]
        pairs = [
            (i, o)
            for ins, outs in zip(minfo.state_tree_invars, minfo.state_tree_outvars, strict=True)
            for i, o in zip(ins, outs, strict=True)
            if i not in minfo.invar_to_weight_path and i not in minfo.invar_to_hidden_path
        ]
        self.other_in, self.other_out = [i for i, _ in pairs], [o for _, o in pairs]
        w, self.unravel_w = ravel_pytree(values.weights)
        h, self.unravel_h = ravel_pytree(values.hidden)
        o, self.unravel_o = ravel_pytree(values.other)
        self.num_hidden, self.num_weights = h.size, w.size
        linear = quick_jit(self._linearise)
        self.steps: list[DenseStep] = []
        self.starts: list[tuple] = []
        for t in range(len(targets)):
            self.starts.append((w, h, o, [x[t] for x in xs], targets[t]))
            step = DenseStep(**jax.device_get(linear(*self.starts[t])))
            self.steps.append(step)
            h, o = step.after[: h.size], step.after[h.size :]
        self.hidden_after, self.other_after = self.unravel_h(h), self.unravel_o(o)
        self.outputs = [s.output for s in self.steps]

    def _run(
        self, cuts: Sequence[tuple[int, int]], w, h, o, args, target
    ) -> tuple[Any, Any, Any, Any]:
        minfo = self.minfo
        env = dict(zip(self.jaxpr.constvars, minfo.closed_jaxpr.consts, strict=True))
        env.update(zip(self.jaxpr.invars[: minfo.num_var_arg], args, strict=True))
        env.update(zip(minfo.weight_invars, self.unravel_w(w), strict=True))
        env.update(zip(self.hidden_in, self.unravel_h(h), strict=True))
        env.update(zip(self.other_in, self.unravel_o(o), strict=True))

        def read(v: Any) -> Any:
            return jnp.asarray(v.val) if isinstance(v, Literal) else env[v]

        for i, eqn in enumerate(self.jaxpr.eqns):
            operands = [
                lax.stop_gradient(read(v)) if (i, k) in cuts else read(v)
                for k, v in enumerate(eqn.invars)
            ]
            env.update(zip(eqn.outvars, bind_equation(eqn, operands), strict=True))
        output = jax.tree.unflatten(
            minfo.out_tree, [read(v) for v in self.jaxpr.outvars[: minfo.num_var_out]]
        )
        hidden = ravel_pytree([read(v) for v in self.hidden_out])[0]
        other = ravel_pytree([read(v) for v in self.other_out])[0]
        return self.loss(output, target), output, hidden, other

    def _linearise(self, w, h, o, args, target) -> dict[str, Any]:
        facts = self.graph.structure.facts
        n = h.size

        def joined(hidden, other):
            return jnp.concatenate([hidden, other.astype(hidden.dtype)])  # an empty one is float32

        def whole(w, s):
            loss, output, hidden, other = self._run((), w, s[:n], s[n:], args, target)
            return (loss, joined(hidden, other)), output

        def cut(w, h):
            return self._run(facts.cuts, w, h, o, args, target)[2]

        s = joined(h, o)
        (loss, after), output = whole(w, s)
        ((l_w, l_s), (s_w, s_s)), _ = jax.jacrev(whole, argnums=(0, 1), has_aux=True)(w, s)
        h_w, h_h = jax.jacrev(cut, argnums=(0, 1))(w, h)
        l_h = jax.grad(lambda h: self._run(facts.pre_cuts, w, h, o, args, target)[0])(h)
        found = (loss, output, after, l_w, l_s, s_w, s_s, h_w, h_h, l_h)
        return dict(zip((f.name for f in fields(DenseStep)), found, strict=True))

    def _grads(self, flat: np.ndarray) -> list[np.ndarray]:
        return [np.asarray(g) for g in self.unravel_w(jnp.asarray(flat))]

    def bptt(self, first: int = 0, last: int | None = None) -> tuple[list[np.ndarray], np.ndarray]:
        """Gradient of the losses of steps `first` to `last` by the chain rule backwards, and that
        of the states before them.
        """
        g, back = np.zeros(self.num_weights), 0.0
        for s in reversed(self.steps[first:last]):
            after = np.zeros(s.after.size) + back
            g, back = g + s.l_w + after @ s.s_w, s.l_s + after @ s.s_s
        return self._grads(g), back

    def d_rtrl(self, credit: str = "step", chunk: int = 1) -> list[np.ndarray]:
        """`eps_t = D_t eps_(t-1) + df_t ⊗ x_t`, `g_t = direct + b_t · eps_(t-1)`, with dense
        matrices.
        """
        n = self.num_hidden
        eps, total = np.zeros((n, self.num_weights)), np.zeros(self.num_weights)
        for t, s in enumerate(self.steps):
            if credit != "chunk":
                total += s.l_w + (s.l_h if credit == "core" else s.l_s[:n]) @ eps
            elif t % chunk == 0:
                grads, before = self.bptt(t, t + chunk)
                total += ravel_pytree(grads)[0] + before[:n] @ eps
            eps = s.h_h @ eps + s.h_w
        return self._grads(total)

    def upstream(self, credit: str, chunk: int) -> list[np.ndarray]:
        """Gradient of weights without any trace: direct, and what the rest of the chunk asks of the
        states.
        """
        n, total = self.num_hidden, np.zeros(self.num_weights)
        for first in range(0, len(self.steps), chunk):
            a = np.zeros(n)
            for s in reversed(self.steps[first : first + chunk]):
                total += s.l_w + a @ s.s_w[:n]
                a = (s.l_h if credit == "core" else s.l_s[:n]) + a @ s.h_h
        return self._grads(total)

    def snap1(self) -> list[np.ndarray]:
        """D-RTRL that keeps the diagonal of products with weights: all pairs of states of a group,
        same position.
        """
        contacts = self.graph.structure.use.contact_of_eqn
        mixing = {edge for edge in self.graph.structure.facts.cuts if edge[0] not in contacts}
        through_products = quick_jit(
            jax.jacrev(lambda *start: self._run(mixing, *start)[2], argnums=1)
        )
        owner = []
        for n, (path, var) in enumerate(self.minfo.hidden_path_to_invar.items()):
            group = self.graph.hid_path_to_group[path].index
            owner += [(group, n, p) for p in range(int(np.prod(var.aval.shape, dtype=int)))]
        same = np.array([[a[0] == b[0] and a[2] == b[2] for b in owner] for a in owner])
        eps, total = np.zeros((len(owner), self.num_weights)), np.zeros(self.num_weights)
        for s, start in zip(self.steps, self.starts, strict=True):
            total += s.l_w + s.l_s[: len(owner)] @ eps
            eps = np.where(same, through_products(*start), s.h_h) @ eps + s.h_w
        return self._grads(total)


def unrolled_bptt(model_step: Callable, weights: Any, state: Any, xs: Any, targets: Any) -> Any:
    """`jax.grad` through an unrolled loop; `model_step(weights, state, x) -> (state, output)`."""

    def total(weights: Any) -> Any:
        now, loss = state, 0.0
        for t in range(len(targets)):
            now, output = model_step(weights, now, jax.tree.map(lambda x, t=t: x[t], xs))
            loss = loss + loss_of(output, targets[t])
        return loss

    with promotion(implicit=True):  # the model's own code
        return quick_jit(jax.grad(total))(weights)


# -- one layer by hand ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One recurrent layer written by hand, for one batch element; all values are vectors.

    Attributes:
        views: `weights -> {contact: matrix}`, what multiplies the features; a vector for an
            element-wise contact.
        features: `(x, states) -> {contact: features}`; contacts that are left out are element-wise.
        core: `(contact outputs, x, states) -> (new states, exits)`; exits are what the rest of the
            step reads.
        readout: `(weights, exits) -> output`.
        biases: element-wise contacts that are only added to a product; pp-prop takes them for a
            column of its matrix.
    """

    views: Callable
    features: Callable
    core: Callable
    readout: Callable = lambda weights, exits: exits[0]
    biases: tuple[str, ...] = ()


class CellRules:
    """The rules' own equations on a hand-written cell, in loops over time; batch elements run side
    by side.
    """

    def __init__(
        self,
        cell: Cell,
        weights: dict,
        states: Sequence[Any],
        xs: Any,
        targets: Any,
        loss: Callable,
    ) -> None:
        self.cell, self.weights, self.loss = cell, weights, loss
        linear = quick_jit(jax.vmap(self._linearise, in_axes=(0, 0, None)))
        self.steps = []
        for x, target in zip(xs, targets, strict=True):
            self.steps.append(jax.device_get(linear(x, list(states), target)))
            states = self.steps[-1]["new"]
        self.views = cell.views(weights)
        self.shapes = {
            name: (self.steps[0]["h_h"].shape[:2] + v.shape) for name, v in self.views.items()
        }

    def _linearise(self, x: Any, states: Sequence[Any], target: Any) -> dict:
        cell, weights = self.cell, self.weights
        size, count = states[0].size, len(states)
        h = jnp.concatenate(states)

        def split(flat: Any) -> list[Any]:
            return [flat[n * size : (n + 1) * size] for n in range(flat.size // size)]

        def outputs(weights: dict, h: Any) -> dict:
            features = cell.features(x, split(h))
            return {
                n: v @ features[n] if n in features else v for n, v in cell.views(weights).items()
            }

        def core(y: dict, h: Any) -> tuple[Any, Any]:
            new, exits = cell.core(y, x, split(h))
            return jnp.concatenate(new), jnp.concatenate(exits)

        def through(weights: dict, h: Any, held: bool) -> Any:
            u = core(outputs(weights, h), h)[1]
            return self.loss(
                cell.readout(weights, split(lax.stop_gradient(u) if held else u)), target
            )

        y = outputs(weights, h)
        new, u = core(y, h)
        (h_y, u_y), (h_h, u_h) = (jax.jacrev(core, argnums=n)(y, h) for n in (0, 1))
        y_h = jax.jacrev(lambda h: outputs(weights, h))(h)
        same = jnp.tile(jnp.eye(size), (count, count))
        output = cell.readout(weights, split(u))
        return {
            "new": split(new), "x": cell.features(x, states), "h_h": h_h, "h_y": h_y, "u_h": u_h, "u_y": u_y,
            # The diagonal of the products with weights, for SnAp-1.
            "h_d": h_h + same * sum(h_y[n] @ y_h[n] for n in y),
            "u_d": u_h + jnp.tile(jnp.eye(size), (u.size // size, count)) * sum(u_y[n] @ y_h[n] for n in y),
            "l_u": jax.grad(lambda u: self.loss(cell.readout(weights, split(u)), target))(u),
            "l_h": jax.grad(through, argnums=1)(weights, h, False),
            "l_out": jax.grad(self.loss)(output, target),
            "direct": jax.grad(through)(weights, h, False),
            "outside": jax.grad(through)(weights, h, True),
        }  # fmt: skip

    def _add_views(self, total: dict, by_view: dict) -> dict:
        _, pull = jax.vjp(self.cell.views, self.weights)
        more = pull({n: jnp.asarray(by_view[n].sum(0)) for n in by_view})[0]
        return {n: total[n] + np.asarray(more[n]) for n in total}

    def _total(self, key: str) -> dict:
        return {n: sum(np.asarray(s[key][n]).sum(0) for s in self.steps) for n in self.weights}

    def _outer(self, left: Any, s: dict, name: str) -> Any:
        """`left ⊗ features`, or `left` alone for an element-wise contact; `left` is (batch, states,
        outputs).
        """
        return left[..., None] * s["x"][name][:, None, None] if name in s["x"] else left

    def pp_prop(self, decay: float, credit: str) -> dict:
        """Factored traces, a bias seeing a feature of 1; other element-wise contacts keep their
        D-RTRL trace.
        """
        total = self._total("direct")
        x_bar: dict[str, Any] = {}
        f_bar = dict.fromkeys(self.views, 0.0)
        for t, s in enumerate(self.steps):
            if t > 0:
                past = {}
                b = s["l_h"] if credit == "step" else np.einsum("bu,bus->bs", s["l_u"], s["u_h"])
                for n in self.views:
                    asked = np.einsum("bs,bso->bo", b, f_bar[n])
                    if n in s["x"]:
                        asked = (asked / (1 - decay**t))[..., None] * x_bar[n][:, None]
                    elif n in self.cell.biases:
                        asked = asked / (1 - decay**t) * x_bar[n]
                    past[n] = asked
                total = self._add_views(total, past)
            for n in self.views:
                factored = n in s["x"] or n in self.cell.biases
                a, b = (decay, 1 - decay) if factored else (1.0, 1.0)
                moved = np.einsum("bsr,bro->bso", s["h_h"], f_bar[n]) if t else 0.0
                f_bar[n] = a * moved + b * s["h_y"][n]
                if factored:
                    x_bar[n] = decay * x_bar.get(n, 0.0) + s["x"].get(n, 1.0)
        return total

    def eprop(self, kappa: float, feedback: Any = None) -> dict:
        """`sum over t, s <= t of kappa^(t-s) L_t · e_s`, and the plain gradient of what is outside
        the recurrence.

        Args:
            kappa: the filter.
            feedback: (outputs, exits) matrix in place of the readout's derivative; None for the
                derivative itself.
        """
        return self._eligibility("h_h", "u_h", kappa, feedback)

    def snap1(self) -> dict:
        """Textbook SnAp-1: `L_t · e_t` with the diagonal of the recurrent products kept everywhere."""
        return self._eligibility("h_d", "u_d", 0.0, None)

    def immediate(self) -> dict:
        """The gradients of single steps."""
        return self._total("direct")

    def rflo(self, feedback: Any) -> dict:
        """`s_t · eps_t` with `s_t = dl_t/dy_t F` for all states, and the plain gradient of what is
        outside the recurrence.

        Args:
            feedback: F, (outputs, states).
        """
        return self._signalled([s["l_out"] @ feedback for s in self.steps])

    def three_factor(self, losses: Sequence[float]) -> dict:
        """`m_t · eps_t`, summed over states, with the batch's loss as the one signal."""
        return self._signalled(
            [np.full(s["h_h"].shape[:2], m) for s, m in zip(self.steps, losses, strict=True)]
        )

    def _signalled(self, signals: Sequence[Any]) -> dict:
        """`s_t · eps_t` for signals (batch, states), and the plain gradient of what is outside the
        recurrence.
        """
        total = self._total("outside")
        eps = {n: np.zeros(shape) for n, shape in self.shapes.items()}
        for s, signal in zip(self.steps, signals, strict=True):
            for n in self.views:
                eps[n] = np.einsum("bsr,br...->bs...", s["h_h"], eps[n]) + self._outer(
                    s["h_y"][n], s, n
                )
            total = self._add_views(
                total, {n: np.einsum("bs,bs...->b...", signal, e) for n, e in eps.items()}
            )
        return total

    def _eligibility(self, D: str, U: str, kappa: float, feedback: Any) -> dict:
        total = self._total("outside")
        eps = {n: np.zeros(shape) for n, shape in self.shapes.items()}
        e_bar = dict.fromkeys(self.views, 0.0)
        for s in self.steps:
            signal = s["l_u"] if feedback is None else s["l_out"] @ feedback
            by_view = {}
            for n in self.views:
                e = np.einsum("bus,bs...->bu...", s[U], eps[n]) + self._outer(s["u_y"][n], s, n)
                e_bar[n] = kappa * e_bar[n] + e
                eps[n] = np.einsum("bsr,br...->bs...", s[D], eps[n]) + self._outer(
                    s["h_y"][n], s, n
                )
                by_view[n] = np.einsum("bu,bu...->b...", signal, e_bar[n])
            total = self._add_views(total, by_view)
        return total
