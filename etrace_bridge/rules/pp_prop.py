"""pp-prop: a factored trace, two low-pass filters in place of one trace of weight size.

    x̄_t = alpha x̄_(t-1) + x_t
    f̄_t = alpha D_t f̄_(t-1) + (1 - alpha) df_t
    n_t  = alpha n_(t-1) + (1 - alpha)                                 (= 1 - alpha^t after t steps from zero)
    g_t  = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t · (f̄_(t-1) / n_(t-1)) ⊗ x̄_(t-1)

`x_t` are a contact's features, `df_t` how the group's new states depend on the contact's output, `D_t` the core's
Jacobian, which acts on the states of the group at each position, `b_t = dl_t/dh_(t-1)` as in D-RTRL, through the
`core` or the whole `step`. `alpha` is the decay. Both filters start at zero; dividing by `n` removes the bias of
`f̄`'s start, so that after one step the factored trace is exactly `df_1 ⊗ x_1`, D-RTRL's.

A bias that is only added to a product is a column of that product's weight, with a feature that is always 1: it has the same `f̄`,
and its `x̄_t` is `n_t / (1 - alpha)`. An element-wise contact of its own (a decay, a threshold) has no `x`, and its D-RTRL trace is as
small as `f̄`, so that is kept, `eps_t = D_t eps_(t-1) + df_t`; its gradient is the sum of `b_t · eps_(t-1)` and the direct term.

For K steps, `c_t = b_t · f̄_(t-1) / n_(t-1)` is a cotangent at the contact's output, and the filter of `x` can act on it instead:

    c̃_(s-1) = c_s + alpha c̃_s                                        (c̃_K = 0)
    sum of c_t ⊗ x̄_(t-1)  =  sum of c̃_s ⊗ x_s  +  c̃_0 ⊗ x̄_0

so that there is one product over K·B for each weight, as in BPTT, and what runs step by step is hidden-sized. Products that are
only added up have one `f̄` together. The result does not depend on K, so a chunk runs in blocks of steps, one after the other, and its
buffers are those of one block. Weights without a trace that reach a state through another weight get the direct term only.

Memory: B·(I + S·H) for each contact; convolutions keep the patches of `x`. Time a step: with `core` less than that of BPTT by the product
that goes back through the recurrent weights, with `step` that of BPTT. Exact for one step; with `step`, for two steps from a zero trace.
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
from etrace_bridge.engine.blocks import run_blocks
from etrace_bridge.engine.contraction import (
    contact_inputs,
    features,
    in_view_order,
    take_places,
    view_gradients,
    weight_gradients,
)
from etrace_bridge.engine.forward import run_forward
from etrace_bridge.engine.linearise import CoreLinear, Grouped, linearise_core, loss_gradient, step_outputs
from etrace_bridge.engine.loop import scan_time
from etrace_bridge.engine.plan import block_steps
from etrace_bridge.engine.program import StepProgram
from etrace_bridge.rules.base import Carry, Chunk, ChunkResult, Rule, batch_rows, check_batch_axis, check_choice, register_rule
from etrace_bridge.rules.d_rtrl import no_credit


@dataclass(frozen=True)
class Channel:
    """Legs whose outputs are only added up and feed the same places: they share one filter.

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
    def has_product(self) -> bool:
        """Whether the filter is `f̄`, of products and of biases added to them; otherwise it is `eps`, of element-wise contacts."""
        return any(leg.contact.x is not None for leg in self.legs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the filter: that of the contact's piece."""
        return self.legs[0].part.var.aval.shape

    def at(self, array: Any, lead: int) -> Any:
        """Values of the group's places, at the piece's elements; `lead` axes are kept."""
        return take_places(self.legs[0], array, lead).reshape(*array.shape[:lead], *self.shape)

    def zeros(self, program: StepProgram) -> list[Any]:
        """A filter at its start, for each state of the group."""
        return [jnp.zeros(self.shape, self.legs[0].part.var.aval.dtype) for _ in range(program.groups[self.group].num_state)]


def find_channels(program: StepProgram) -> tuple[list[Channel], list[Channel]]:
    """The channels with products, and the others."""
    found: dict[Any, list[Leg]] = {}
    for leg in program.legs:
        key = (program.roots[program.tap_index(leg)], leg.group, leg.places.tobytes())
        found.setdefault(key, []).append(leg)
    channels = [
        Channel(tuple(legs), program.tap_index(legs[0]), program.place_of(legs[0]), program.colour_of(legs[0])) for legs in found.values()
    ]
    return [c for c in channels if c.has_product], [c for c in channels if not c.has_product]


@register_rule
@dataclass(frozen=True)
class PPProp(Rule):
    """Factored traces.

    Attributes:
        decay: `alpha`, between 0 and 1: how much of the filters is left after a step.
        time_constant: the same in steps, `alpha = exp(-1 / time_constant)`; replaces `decay` when given.
        credit: `"core"` or `"step"`, as in `DRTRL`. `"auto"` is `core`, since `step` costs a product more and the factored trace is the
            larger error; but `step` for a model with a layer whose core is empty, as a plain RNN's, where `core` has no credit to give.
    """

    decay: float = 0.9
    time_constant: float | None = None
    credit: str = "auto"
    name: ClassVar[str] = "pp_prop"

    def __post_init__(self) -> None:
        check_choice("credit", self.credit, ("auto", "core", "step"))
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
        return "stream"

    def init(self, program: StepProgram) -> dict[str, Any]:
        """Filters `x` by contact, `f` and `eps` [channel][state], and `n` by group, one a batch element."""
        products, others = find_channels(program)
        return {
            "x": {c.index: jnp.zeros(c.form.shape(c.form.feature), c.y.aval.dtype) for c in _products(program)},
            "f": [c.zeros(program) for c in products],
            "n": [jnp.zeros(g.varshape[:1], g.hidden_invars[0].aval.dtype) for g in program.groups],
            "eps": [c.zeros(program) for c in others],
        }

    def chunk(self, program: StepProgram, theta: Sequence[Any], carry: Carry, data: Chunk, fresh: bool, final: bool) -> ChunkResult:
        turned = program.turned(theta)
        length = data.args[0].shape[0]
        size = block_steps(program, length)
        fresh, final = fresh and size == length, final and size == length

        def block(before: Any, steps: Any) -> tuple[Any, Any, Any]:
            hidden, other, trace = before
            args, targets, weights = steps
            env = program.weight_env(theta) | turned
            forward = run_forward(program, env, hidden, other, args)
            core = linearise_core(program, env, forward, args)
            xs = contact_inputs(program, env, forward, args)
            losses = found = summed = None
            if data.loss is None:
                outputs, b = step_outputs(program, env, forward, args), no_credit(program, forward)
            else:
                found = loss_gradient(program, theta, forward, args, data.loss, targets, weights, self._credit(core))
                losses, outputs, b = found.losses, found.outputs, found.b
            credit, own, f, eps = self._filter(program, trace, core, b, len(weights))
            if found is not None:
                later, first = self._spread_back(credit, len(weights))
                ybar = list(found.ybar)
                for channel, value in zip(find_channels(program)[0], later, strict=True):
                    _add_at_taps(program, channel.legs, value, ybar)
                earlier = {} if fresh else {n: x[None] for n, x in trace["x"].items()}
                before = self._past(program, own, first, trace["n"]), earlier
                summed = found.direct, view_gradients(program, env, ybar, xs, before)
            if not final:
                n = [rows[-1] for rows in self._norms(trace["n"], len(weights))]
                trace = {"x": self._filter_features(program, trace["x"], xs), "f": f, "n": n, "eps": eps}
            return (forward.new_hidden, forward.new_other, trace), summed, (losses, outputs)

        start = list(carry.hidden), list(carry.other), carry.trace
        steps = list(data.args), data.targets, data.weights
        after, summed, (losses, outputs) = run_blocks(block, start, steps, size, reverse=False)
        grads = None
        if summed is not None:
            direct, by_contact = summed
            pulled = weight_gradients(program, theta, in_view_order(program, by_contact))
            grads = [d + g for d, g in zip(direct, pulled, strict=True)]
        return ChunkResult(grads, losses, outputs, Carry(*after))

    def _credit(self, core: CoreLinear) -> str:
        if self.credit != "auto":
            return self.credit
        return "step" if any(all(d is None for row in D for d in row) for D in core.D) else "core"

    def _norms(self, n: Sequence[Any], length: int) -> list[Any]:
        """`n` before each of the K steps, and after the last."""
        left = self.alpha ** np.arange(length + 1.0)
        return [jnp.asarray(left, x.dtype)[:, None] * x + jnp.asarray(1 - left, x.dtype)[:, None] for x in n]

    def _filter(self, program: StepProgram, trace: dict, core: CoreLinear, b: Grouped, length: int) -> tuple[list, list, list, list]:
        """`c_t` of every product's channel, the sum of `b_t · eps_(t-1)` of every other, and `f̄` and `eps` after the block."""
        norms = self._norms(trace["n"], length)
        scaled = [[_divide_rows(x, n[:-1]) for x in states] for states, n in zip(b, norms, strict=True)]
        products, others = find_channels(program)
        drives = _drives(products, scaled, core), _drives(others, b, core)

        def body(carry: Any, step: Any) -> tuple[Any, Any]:
            f, eps, own = carry
            products_t, others_t = step
            credit = [_dot(asked, old) for (asked, _, _), old in zip(products_t, f, strict=True)]
            own = [total + _dot(asked, old).astype(total.dtype) for total, (asked, _, _), old in zip(own, others_t, eps, strict=True)]
            f = [_next(old, D, df, self.alpha, 1 - self.alpha) for old, (_, D, df) in zip(f, products_t, strict=True)]
            eps = [_next(old, D, df, 1, 1) for old, (_, D, df) in zip(eps, others_t, strict=True)]
            return (f, eps, own), credit

        start = trace["f"], trace["eps"], [jnp.zeros_like(states[0]) for states in trace["eps"]]
        (f, eps, own), credit = scan_time(body, start, drives, length)
        return credit, own, f, eps

    def _spread_back(self, credit: list[Any], length: int) -> tuple[list[Any], list[Any]]:
        """`c̃_s` of every channel and step, and `c̃_0`: the sum of `alpha^(t-s-1) c_t` over t > s, as a product over time."""
        ages = np.arange(length) - np.arange(length + 1)[:, None]
        left = np.where(ages >= 0, self.alpha ** np.maximum(ages, 0.0), 0)
        found = [jnp.tensordot(jnp.asarray(left, c.dtype), c, 1) for c in credit]
        return [c[1:] for c in found], [c[0] for c in found]

    def _past(self, program: StepProgram, own: list[Any], first: list[Any], n: Sequence[Any]) -> list[Any]:
        """Cotangents (1, …) of what came before the block, as of one more step: `c̃_0`, to meet `x̄_0`; `own` of element-wise contacts."""
        asked: list[Any] = list(program.zero_taps((1,)).values())
        products, others = find_channels(program)
        for channel, value in zip(others, own, strict=True):
            _add_at_taps(program, channel.legs, value, asked)
        for channel, value in zip(products, first, strict=True):
            group = program.groups[channel.group]
            ones = (n[channel.group] / (1 - self.alpha)).reshape(-1, *(1,) * (len(group.varshape) - 1))
            ones = channel.at(jnp.broadcast_to(ones, group.varshape), 0)
            _add_at_taps(program, [leg for leg in channel.legs if leg.contact.x is not None], value, asked)
            _add_at_taps(program, [leg for leg in channel.legs if leg.contact.x is None], value * ones, asked)
        return asked

    def _filter_features(self, program: StepProgram, x: dict[int, Any], xs: dict[int, Any]) -> dict[int, Any]:
        """`x̄` after the block."""
        new = {}
        for contact in _products(program):
            old, length = x[contact.index], xs[contact.index].shape[0]
            left = self.alpha ** np.arange(length - 1, -1, -1.0)
            phi = features(contact.form, xs[contact.index]).astype(old.dtype)
            new[contact.index] = self.alpha**length * old + jnp.tensordot(jnp.asarray(left, old.dtype), phi, 1)
        return new

    def reset(self, program: StepProgram, trace: dict, keep: Any) -> dict:
        def cleared(channels: Sequence[Channel], filters: list[Any]) -> list[Any]:
            result = []
            for channel, states in zip(channels, filters, strict=True):
                group = program.groups[channel.group]
                check_batch_axis(group, keep)
                rows = batch_rows(channel.legs[0].places, group.leaves[0].num_places // group.varshape[0], keep).reshape(channel.shape)
                result.append([s * rows.astype(s.dtype) for s in states])
            return result

        x = dict(trace["x"])
        for contact in _products(program):
            axis = _batch_axis(program, contact)
            shape = [-1 if n == axis else 1 for n in range(x[contact.index].ndim)]
            x[contact.index] = x[contact.index] * keep.reshape(shape).astype(x[contact.index].dtype)
        products, others = find_channels(program)
        n = [n * keep.astype(n.dtype) for n in trace["n"]]
        return {"x": x, "f": cleared(products, trace["f"]), "n": n, "eps": cleared(others, trace["eps"])}


def _products(program: StepProgram) -> list[Any]:
    return [c for c in program.traced_contacts if c.x is not None]


def _drives(channels: Sequence[Channel], b: Grouped, core: CoreLinear) -> list[Any]:
    """For each channel what is asked of its filter at every step, `D_t` and `df_t`, all at the piece's elements."""
    return [
        (
            [c.at(x, 1) for x in b[c.group]],
            [[None if d is None else c.at(d, 1) for d in row] for row in core.D[c.group]],
            [core.df[c.colour][i][c.tap] for i in range(len(core.D[c.group]))],
        )
        for c in channels
    ]


def _add_at_taps(program: StepProgram, legs: Sequence[Leg], value: Any, ybar: list[Any]) -> None:
    """Adds a value to the cotangents at the taps of some legs, in place."""
    for leg in legs:
        n = program.tap_index(leg)
        ybar[n] = ybar[n] + value


def _dot(asked: Sequence[Any], states: Sequence[Any]) -> Any:
    return sum(x * y for x, y in zip(asked, states, strict=True))


def _next(f: Sequence[Any], D: Sequence[Sequence[Any]], df: Sequence[Any], keep: float, gain: float) -> list[Any]:
    """`keep D f + gain df` for every state."""
    after = []
    for row, new in zip(D, df, strict=True):
        new = gain * new
        for d, old in zip(row, f, strict=True):
            if d is not None:
                new = new + keep * d * old
        after.append(new.astype(f[0].dtype))
    return after


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
