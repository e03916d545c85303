"""pp-prop: a factored trace, two low-pass filters in place of one trace of weight size.

    x̄_t = alpha x̄_(t-1) + x_t
    f̄_t = alpha D_t f̄_(t-1) + (1 - alpha) df_t
    n_t  = alpha n_(t-1) + (1 - alpha)                                 (= 1 - alpha^t after t steps from zero)
    g_t  = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t · (f̄_(t-1) / n_(t-1)) ⊗ x̄_(t-1)

`x_t` are a contact's features, `df_t` how the group's new states depend on the contact's output, `D_t` the core's
Jacobian, which acts on the states of the group at each position, `b_t = dl_t/dh_(t-1)` as in D-RTRL, through the
`core` or the whole `step`. `alpha` is the decay. Both filters start at zero; dividing by `n` removes the bias of
`f̄`'s start, so that after one step the factored trace is exactly `df_1 ⊗ x_1`, D-RTRL's.

An element-wise contact (bias, decay, threshold) has no `x`; its D-RTRL trace is as small as `f̄`, so it is kept
as it is: `eps_t = D_t eps_(t-1) + df_t`.

For K steps one scan runs the filters on hidden-sized arrays, and the rest is parallel: `b_t · f̄_(t-1)` are cotangents
at the contact's output whose features are `x̄_(t-1)`, one product over K·B. The result does not depend on K. Weights
without a trace that reach a state through another weight get the direct term only.

Memory: B·(I + S·H) for each contact; convolutions keep the patches of `x`. Time a step: that of BPTT. Exact for one
step, and for two steps from a zero trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._errors import InputError
from etrace_bridge.compiler.contacts import ContactForm
from etrace_bridge.compiler.graph import Leg
from etrace_bridge.engine.contraction import (
    at_places,
    contact_inputs,
    features,
    join_pieces,
    view_gradients,
    weight_gradients,
)
from etrace_bridge.engine.forward import run_forward
from etrace_bridge.engine.linearise import CoreLinear, Grouped, linearise_core, loss_gradient, step_outputs
from etrace_bridge.engine.program import StepProgram
from etrace_bridge.rules.base import Carry, Chunk, ChunkResult, Rule, batch_rows, check_choice, register_rule


@register_rule
@dataclass(frozen=True)
class PPProp(Rule):
    """Factored traces.

    Attributes:
        decay: `alpha`, between 0 and 1: how much of the filters is left after a step.
        time_constant: the same in steps, `alpha = exp(-1 / time_constant)`; replaces `decay` when given.
        credit: `"step"` or `"core"`, as in `DRTRL`.
    """

    decay: float = 0.9
    time_constant: float | None = None
    credit: str = "step"
    name: ClassVar[str] = "pp_prop"

    def __post_init__(self) -> None:
        check_choice("credit", self.credit, ("core", "step"))
        if self.time_constant is not None and not self.time_constant > 0:
            raise InputError(f"`time_constant` is {self.time_constant}; it is a number of steps and must be positive.")
        if not 0 <= self.decay < 1:
            raise InputError(
                f"`decay` is {self.decay}; it must be at least 0 and below 1. A time constant in steps goes into `time_constant=`."
            )

    @property
    def alpha(self) -> float:
        """What is left of a filter after one step."""
        return self.decay if self.time_constant is None else math.exp(-1 / self.time_constant)

    def init(self, program: StepProgram) -> dict[str, Any]:
        """Filters `x` by contact, `f` [leg][state], and `n` by group, one a batch element."""
        x = {}
        for contact in _products(program):
            dtype = contact.y.aval.dtype
            x[contact.index] = jnp.zeros(contact.form.shape(contact.form.feature), dtype)
        f = []
        for leg in program.legs:
            form, states = leg.part.form, program.groups[program.place_of(leg)].num_state
            f.append([jnp.zeros(form.shape(form.trace_out), leg.part.var.aval.dtype) for _ in range(states)])
        n = [jnp.zeros(g.varshape[:1], g.hidden_invars[0].aval.dtype) for g in program.groups]
        return {"x": x, "f": f, "n": n}

    def chunk(self, program: StepProgram, theta: Sequence[Any], carry: Carry, data: Chunk, fresh: bool, final: bool) -> ChunkResult:
        env = program.weight_env(theta)
        forward = run_forward(program, env, carry.hidden, carry.other, data.args)
        core = linearise_core(program, env, forward, data.args)
        xs = contact_inputs(program, env, forward, data.args)
        before, trace = self._filter(program, carry.trace, core, xs, data.args[0].shape[0])
        grads = losses = None
        if data.loss is None:
            outputs = step_outputs(program, env, forward, data.args)
        else:
            found = loss_gradient(program, theta, forward, data.args, data.loss, data.targets, data.weights, self.credit)
            losses, outputs = found.losses, found.outputs
            here = view_gradients(program, env, found.ybar, xs)
            past = self._past(program, found.b, before)
            pulled = weight_gradients(program, theta, {n: here[n] + past[n] for n in here})
            grads = [a + b for a, b in zip(found.direct, pulled, strict=True)]
        return ChunkResult(grads, losses, outputs, Carry(forward.new_hidden, forward.new_other, trace))

    def _filter(self, program: StepProgram, trace: dict, core: CoreLinear, xs: dict, length: int) -> tuple[dict, dict]:
        """The filters before each of the K steps, and after them."""
        alpha = self.alpha
        phi = {c.index: features(c.form, xs[c.index]).astype(trace["x"][c.index].dtype) for c in _products(program)}
        D = [_jacobian_at(program, leg, core) for leg in program.legs]
        df = [_influence_at(program, leg, core) for leg in program.legs]
        gains = [(1.0, 1.0) if leg.contact.x is None else (alpha, 1 - alpha) for leg in program.legs]

        def body(state: dict, step: Any) -> tuple[dict, dict]:
            phi_t, D_t, df_t = step
            after = {
                "x": {n: alpha * old + phi_t[n] for n, old in state["x"].items()},
                "f": [
                    [_next(f, D_leg[i], keep, add * df_leg[i]) for i in range(len(f))]
                    for f, D_leg, df_leg, (keep, add) in zip(state["f"], D_t, df_t, gains, strict=True)
                ],
                "n": [alpha * n + (1 - alpha) for n in state["n"]],
            }
            return after, state

        steps = (phi, D, df)
        if length == 1:
            after, before = body(trace, jax.tree.map(lambda a: a[0], steps))
            return jax.tree.map(lambda a: a[None], before), after
        after, before = lax.scan(body, trace, steps, length=length)
        return before, after

    def _past(self, program: StepProgram, b: Grouped, before: dict) -> dict[int, Any]:
        """`b_t · (f̄_(t-1) / n_(t-1)) ⊗ x̄_(t-1)` summed over the chunk, by contact."""
        scaled = [[_divide_rows(x, n) for x in states] for states, n in zip(b, before["n"], strict=True)]
        by_contact = {}
        for contact in program.traced_contacts:
            taps = [t for t in program.taps if t.contact is contact]
            pieces = []
            for t in taps:
                form = t.part.form
                total = jnp.zeros(form.shape(form.view), t.part.var.aval.dtype)
                for leg in t.legs:
                    credit = b if contact.x is None else scaled
                    f = before["f"][program.leg_index(leg)]
                    states = zip(credit[program.place_of(leg)], f, strict=True)
                    ybar = sum(at_places(leg, x, 1) * f_s for x, f_s in states)
                    total = total + _to_view(form, ybar, before["x"].get(contact.index))
                pieces.append(total)
            by_contact[contact.index] = join_pieces(taps, pieces)
        return by_contact

    def reset(self, program: StepProgram, trace: dict, keep: Any) -> dict:
        x = dict(trace["x"])
        f = []
        for leg, states in zip(program.legs, trace["f"], strict=True):
            group = program.groups[program.place_of(leg)]
            rows = batch_rows(leg.places, group.leaves[0].num_places // group.varshape[0], keep)
            form = leg.part.form
            rows = _to_trace_order(form, rows.reshape(form.shape(form.out)), 0)
            f.append([s * rows.astype(s.dtype) for s in states])
        for contact in _products(program):
            axis = _batch_axis(program, contact)
            shape = [-1 if n == axis else 1 for n in range(x[contact.index].ndim)]
            x[contact.index] = x[contact.index] * keep.reshape(shape).astype(x[contact.index].dtype)
        return {"x": x, "f": f, "n": [n * keep.astype(n.dtype) for n in trace["n"]]}


def _products(program: StepProgram) -> list[Any]:
    return [c for c in program.traced_contacts if c.x is not None]


def _jacobian_at(program: StepProgram, leg: Leg, core: CoreLinear) -> list[list[Any]]:
    D = core.D[program.place_of(leg)]
    return [[None if d is None else at_places(leg, d, 1) for d in row] for row in D]


def _influence_at(program: StepProgram, leg: Leg, core: CoreLinear) -> list[Any]:
    rows = core.df[program.colour_of(leg)]
    form, tap = leg.part.form, program.tap_index(leg)
    states = range(program.groups[program.place_of(leg)].num_state)
    return [_to_trace_order(form, rows[i][tap].reshape(-1, *form.shape(form.out)), 1) for i in states]


def _to_trace_order(form: ContactForm, array: Any, lead: int) -> Any:
    return jnp.transpose(array, [*range(lead), *(form.out.index(c) + lead for c in form.trace_out)])


def _next(f: list[Any], D_row: list[Any], keep: float, new: Any) -> Any:
    for d, old in zip(D_row, f, strict=True):
        if d is not None:
            new = new + keep * d * old
    return new


def _divide_rows(b: Any, n: Any) -> Any:
    """`b / n` by batch element; nothing has been seen where `n` is zero."""
    inverse = jnp.where(n > 0, 1 / jnp.where(n > 0, n, 1), 0)
    return b * inverse.reshape(*inverse.shape, *(1,) * (b.ndim - inverse.ndim))


def _to_view(form: ContactForm, ybar: Any, x: Any) -> Any:
    if x is None:
        return jnp.einsum(f"T{form.trace_out}->{form.view}", ybar)
    x = x.reshape(x.shape[0], *form.shape(form.feature))
    return jnp.einsum(f"T{form.trace_out},T{form.feature}->{form.view}", ybar, x)


def _batch_axis(program: StepProgram, contact: Any) -> int:
    """The axis of a contact's features that counts batch elements."""
    leg = next(leg for leg in program.legs if leg.contact is contact)
    group = program.groups[program.place_of(leg)]
    form = leg.part.form
    rows = leg.places.reshape(form.shape(form.out)) // (group.leaves[0].num_places // group.varshape[0])
    for letter in form.feature:
        if letter in form.out and form.sizes[letter] == group.varshape[0]:
            axis = form.out.index(letter)
            shape = [-1 if n == axis else 1 for n in range(len(form.out))]
            if ((rows < 0) | (rows == np.arange(group.varshape[0]).reshape(shape))).all():
                return contact.form.feature.index(letter)
    raise InputError(
        f"`reset` for single batch elements needs a batch axis, and the data that meets `{contact.view}` has none that "
        "its hidden states share. Reset the whole batch instead."
    )
