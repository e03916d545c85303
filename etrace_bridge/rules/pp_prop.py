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

For K steps, `c_t = b_t · f̄_(t-1) / n_(t-1)` is a cotangent at the contact's output, and the filter of `x` can act on it instead:

    c̃_(s-1) = c_s + alpha c̃_s                                        (c̃_K = 0)
    sum of c_t ⊗ x̄_(t-1)  =  sum of c̃_s ⊗ x_s  +  c̃_0 ⊗ x̄_0

so that there is one product over K·B for each weight, as in BPTT, and what runs step by step is hidden-sized. Products and
biases that are only added up have one `f̄` together. The result does not depend on K. Weights without a trace that reach a
state through another weight get the direct term only.

Memory: B·(I + S·H) for each contact; convolutions keep the patches of `x`. Time a step: that of BPTT. Exact for one
step, and for two steps from a zero trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import InputError
from etrace_bridge.compiler.graph import Leg
from etrace_bridge.engine.contraction import contact_inputs, features, join_pieces, take_places, view_gradients, weight_gradients
from etrace_bridge.engine.forward import run_forward
from etrace_bridge.engine.linearise import CoreLinear, Grouped, linearise_core, loss_gradient, step_outputs
from etrace_bridge.engine.loop import scan_time
from etrace_bridge.engine.program import StepProgram
from etrace_bridge.engine.suffix import suffix_scan
from etrace_bridge.rules.base import Carry, Chunk, ChunkResult, Rule, batch_rows, check_batch_axis, check_choice, register_rule
from etrace_bridge.rules.d_rtrl import add_contacts, advance_traces, clear_rows, no_credit, read_traces, trace_rows


@dataclass(frozen=True)
class Channel:
    """Legs of products whose outputs are only added up and feed the same places: they share one `f̄`.

    Attributes:
        legs: the legs.
        tap: index of the tap of one of them.
        group: place of the group in `program.groups`.
        colour: its colour.
    """

    legs: tuple[Leg, ...]
    tap: int
    group: int
    colour: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `f̄`: that of the contact's piece."""
        return self.legs[0].part.var.aval.shape

    def at(self, array: Any, lead: int) -> Any:
        """Values of the group's places, at the piece's elements; `lead` axes are kept."""
        return take_places(self.legs[0], array, lead).reshape(*array.shape[:lead], *self.shape)


def find_channels(program: StepProgram) -> list[Channel]:
    """The channels of all legs of products."""
    found: dict[Any, list[Leg]] = {}
    for leg in program.legs:
        if leg.contact.x is not None:
            key = (program.roots[program.tap_index(leg)], leg.group, leg.places.tobytes())
            found.setdefault(key, []).append(leg)
    return [
        Channel(tuple(legs), program.tap_index(legs[0]), program.place_of(legs[0]), program.colour_of(legs[0])) for legs in found.values()
    ]


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

    @property
    def passes(self) -> str:
        return "short"

    def init(self, program: StepProgram) -> dict[str, Any]:
        """Filters `x` by contact, `f` [channel][state], `n` by group, one a batch element, and `eps` [element-wise leg][state]."""
        x = {c.index: jnp.zeros(c.form.shape(c.form.feature), c.y.aval.dtype) for c in _products(program)}
        f = [
            [jnp.zeros(c.shape, c.legs[0].part.var.aval.dtype) for _ in range(program.groups[c.group].num_state)]
            for c in find_channels(program)
        ]
        n = [jnp.zeros(g.varshape[:1], g.hidden_invars[0].aval.dtype) for g in program.groups]
        eps = []
        for leg in _elementwise(program):
            form, states = leg.part.form, program.groups[program.place_of(leg)].num_state
            eps.append([jnp.zeros(form.shape(form.trace), leg.part.var.aval.dtype) for _ in range(states)])
        return {"x": x, "f": f, "n": n, "eps": eps}

    def chunk(self, program: StepProgram, theta: Sequence[Any], carry: Carry, data: Chunk, fresh: bool, final: bool) -> ChunkResult:
        env = program.weight_env(theta)
        forward = run_forward(program, env, carry.hidden, carry.other, data.args)
        core = linearise_core(program, env, forward, data.args)
        xs = contact_inputs(program, env, forward, data.args)
        length, trace = data.args[0].shape[0], carry.trace
        grads = losses = found = None
        if data.loss is None:
            outputs, b = step_outputs(program, env, forward, data.args), no_credit(program, forward)
        else:
            found = loss_gradient(program, theta, forward, data.args, data.loss, data.targets, data.weights, self.credit)
            losses, outputs, b = found.losses, found.outputs, found.b
        a, a0, M, M0 = suffix_scan(b, core.D, not final)
        credit, f = self._filter(program, trace, core, b, length)
        if found is not None:
            later, first = self._spread_back(credit, length)
            ybar = self._cotangents(program, found.ybar, core, a, later)
            by_contact = view_gradients(program, env, ybar, xs)
            if not fresh:
                past, M0 = read_traces(program, _elementwise(program), a0, trace["eps"], M0)
                past |= self._past(program, first, trace["x"])
                by_contact = add_contacts(by_contact, past)
            pulled = weight_gradients(program, theta, by_contact)
            grads = [d + g for d, g in zip(found.direct, pulled, strict=True)]
        if not final:
            eps = advance_traces(program, _elementwise(program), trace["eps"], trace_rows(program, core, M), xs, M0, fresh)
            trace = {
                "x": self._filter_features(program, trace["x"], xs, length),
                "f": f,
                "n": self._norms(trace["n"], length)[1],
                "eps": eps,
            }
        return ChunkResult(grads, losses, outputs, Carry(forward.new_hidden, forward.new_other, trace))

    def _norms(self, n: Sequence[Any], length: int) -> tuple[list[Any], list[Any]]:
        """`n` before each of the K steps, and after them."""
        left = self.alpha ** np.arange(length + 1.0)
        rows = [jnp.asarray(left, x.dtype)[:, None] * x + jnp.asarray(1 - left, x.dtype)[:, None] for x in n]
        return [r[:-1] for r in rows], [r[-1] for r in rows]

    def _filter(self, program: StepProgram, trace: dict, core: CoreLinear, b: Grouped, length: int) -> tuple[list[Any], list[Any]]:
        """`c_t` of every channel, and `f̄` after the chunk."""
        channels = find_channels(program)
        norms, _ = self._norms(trace["n"], length)
        scaled = [[_divide_rows(x, n) for x in states] for states, n in zip(b, norms, strict=True)]
        asked = [[c.at(x, 1) for x in scaled[c.group]] for c in channels]
        D = [[[None if d is None else c.at(d, 1) for d in row] for row in core.D[c.group]] for c in channels]
        df = [[core.df[c.colour][i][c.tap] for i in range(len(core.D[c.group]))] for c in channels]

        def body(f: list[Any], step: Any) -> tuple[list[Any], list[Any]]:
            asked_t, D_t, df_t = step
            credit = [sum(x * y for x, y in zip(xs, ys, strict=True)) for xs, ys in zip(asked_t, f, strict=True)]
            after = [
                [_next(old, D_c[i], self.alpha, (1 - self.alpha) * df_c[i]) for i in range(len(old))]
                for old, D_c, df_c in zip(f, D_t, df_t, strict=True)
            ]
            return after, credit

        after, credit = scan_time(body, trace["f"], (asked, D, df), length)
        return credit, after

    def _spread_back(self, credit: list[Any], length: int) -> tuple[list[Any], list[Any]]:
        """`c̃_s` of every channel and step, and `c̃_0`."""

        def body(later: list[Any], credit_t: list[Any]) -> tuple[list[Any], list[Any]]:
            return [c + self.alpha * x for c, x in zip(credit_t, later, strict=True)], later

        first, later = scan_time(body, [jnp.zeros_like(c[0]) for c in credit], credit, length, reverse=True)
        return later, first

    def _cotangents(self, program: StepProgram, ybar: Sequence[Any], core: CoreLinear, a: Grouped, later: list[Any]) -> list[Any]:
        """What steps ask of each tap: directly, and by what they ask of earlier steps."""
        total = list(ybar)
        for channel, c in zip(find_channels(program), later, strict=True):
            for leg in channel.legs:
                n = program.tap_index(leg)
                total[n] = total[n] + c
        legs = _elementwise(program)
        if legs:
            pulled = core.pull(a)
            for n in {t.index for leg in legs for t in program.taps_of(leg)}:
                total[n] = total[n] + pulled[n]
        return total

    def _past(self, program: StepProgram, first: list[Any], x: dict[int, Any]) -> dict[int, Any]:
        """`c̃_0 ⊗ x̄_0`, by contact."""
        asked = {id(leg): c for channel, c in zip(find_channels(program), first, strict=True) for leg in channel.legs}
        by_contact = {}
        for contact in _products(program):
            taps = [t for t in program.taps if t.contact is contact]
            pieces = []
            for t in taps:
                form = t.part.form
                total = jnp.zeros(form.shape(form.view), t.part.var.aval.dtype)
                for leg in t.legs:
                    c = asked[id(leg)].reshape(form.shape(form.out))
                    total = total + jnp.einsum(f"{form.out},{form.feature}->{form.view}", c, x[contact.index])
                pieces.append(total)
            by_contact[contact.index] = join_pieces(taps, pieces)
        return by_contact

    def _filter_features(self, program: StepProgram, x: dict[int, Any], xs: dict[int, Any], length: int) -> dict[int, Any]:
        """`x̄` after the chunk."""
        left = self.alpha ** np.arange(length - 1, -1, -1.0)
        new = {}
        for contact in _products(program):
            old = x[contact.index]
            phi = features(contact.form, xs[contact.index]).astype(old.dtype)
            new[contact.index] = self.alpha**length * old + jnp.tensordot(jnp.asarray(left, old.dtype), phi, 1)
        return new

    def reset(self, program: StepProgram, trace: dict, keep: Any) -> dict:
        f = []
        for channel, states in zip(find_channels(program), trace["f"], strict=True):
            group = program.groups[channel.group]
            check_batch_axis(group, keep)
            rows = batch_rows(channel.legs[0].places, group.leaves[0].num_places // group.varshape[0], keep).reshape(channel.shape)
            f.append([s * rows.astype(s.dtype) for s in states])
        x = dict(trace["x"])
        for contact in _products(program):
            axis = _batch_axis(program, contact)
            shape = [-1 if n == axis else 1 for n in range(x[contact.index].ndim)]
            x[contact.index] = x[contact.index] * keep.reshape(shape).astype(x[contact.index].dtype)
        eps = clear_rows(program, _elementwise(program), trace["eps"], keep)
        return {"x": x, "f": f, "n": [n * keep.astype(n.dtype) for n in trace["n"]], "eps": eps}


def _products(program: StepProgram) -> list[Any]:
    return [c for c in program.traced_contacts if c.x is not None]


def _elementwise(program: StepProgram) -> list[Leg]:
    return [leg for leg in program.traces if leg.contact.x is None]


def _next(f: list[Any], D_row: list[Any], keep: float, new: Any) -> Any:
    for d, old in zip(D_row, f, strict=True):
        if d is not None:
            new = new + keep * d * old
    return new.astype(f[0].dtype)


def _divide_rows(b: Any, n: Any) -> Any:
    """`b / n` by batch element; nothing has been seen where `n` is zero."""
    inverse = jnp.where(n > 0, 1 / jnp.where(n > 0, n, 1), 0)
    return b * inverse.reshape(*inverse.shape, *(1,) * (b.ndim - inverse.ndim))


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
