"""D-RTRL: real-time recurrent learning with the per-position part of the recurrent Jacobian.

    eps_t = D_t eps_(t-1) + df_t ⊗ x_t
    g_t   = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t · eps_(t-1)

`credit` says how `b_t = dl_t/dh_(t-1)` is computed: through the `core` only (the textbook rule), through the whole
unmodified `step` (default), or, with `chunk`, by exact reverse mode inside each chunk, the trace being used only for
what came before it.

For K steps with fixed weights the sum of `g_t` is, exactly,

    a_(t-1) = b_t + D_t^T a_t,   M_(t-1) = M_t D_t          (a_K = 0, M_K = I)
    sum of g_t = direct + sum of (a_t df_t) ⊗ x_t + a_0 · eps_0
    eps_K      = M_0 eps_0 + sum of (M_t df_t) ⊗ x_t

so the trace is read and written once a chunk, not once a step.

Weights without a trace that reach a state through another weight: `upstream="chunk"` (default) gives them credit
within the chunk, `<a_t, h_t>` differentiated through the whole step; `upstream="step"` gives them the direct term only.

Memory: B·P·S for each contact. Time a step: that of BPTT plus (B·P·S²)/K for the trace and B·P·S for its outer
products. Exact when the certificate says so: diagonal recurrences, or one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from etrace_bridge.compiler.graph import Leg
from etrace_bridge.engine.blocks import forward_in_blocks, run_blocks
from etrace_bridge.engine.chunk_bptt import chunk_gradient
from etrace_bridge.engine.contraction import (
    at_places,
    contact_inputs,
    contract_traces,
    in_view_order,
    join_outputs,
    join_pieces,
    outer_sum,
    view_gradients,
    weight_gradients,
)
from etrace_bridge.engine.forward import Forward
from etrace_bridge.engine.linearise import (
    CoreLinear,
    Grouped,
    LossGradient,
    group_states,
    linearise_core,
    loss_gradient,
    step_outputs,
    upstream_gradient,
)
from etrace_bridge.engine.plan import block_steps
from etrace_bridge.engine.program import StepProgram
from etrace_bridge.engine.suffix import suffix_scan, suffix_start
from etrace_bridge.rules.base import Carry, Chunk, ChunkResult, Rule, batch_rows, check_batch_axis, check_choice, register_rule

Traces = list[list[Any]]  # one a leg of `program.traces`, [leg][state]


@register_rule
@dataclass(frozen=True)
class DRTRL(Rule):
    """D-RTRL with a choice of credit.

    Attributes:
        credit: `"core"`, `"step"` or `"chunk"`.
        upstream: `"chunk"` or `"step"`.
        trace_dtype: dtype in which traces are stored, e.g. `"bfloat16"`; None keeps the states' dtype.
    """

    credit: str = "step"
    upstream: str = "chunk"
    trace_dtype: str | None = None
    name: ClassVar[str] = "d_rtrl"

    def __post_init__(self) -> None:
        check_choice("credit", self.credit, ("core", "step", "chunk"))
        check_choice("upstream", self.upstream, ("chunk", "step"))

    @property
    def passes(self) -> str:
        return "whole" if self.credit == "chunk" else "blocks"

    def init(self, program: StepProgram) -> Traces:
        traces = []
        for leg in program.traces:
            group = program.groups[program.place_of(leg)]
            dtype = self.trace_dtype or leg.part.var.aval.dtype
            shape = leg.part.form.shape(leg.part.form.trace)
            traces.append([jnp.zeros(shape, dtype) for _ in range(group.num_state)])
        return traces

    def chunk(self, program: StepProgram, theta: Sequence[Any], carry: Carry, data: Chunk, fresh: bool, final: bool) -> ChunkResult:
        length = data.args[0].shape[0]
        size = block_steps(program, length)
        env = program.weight_env(theta)
        forward = forward_in_blocks(program, env | program.turned(theta), carry.hidden, carry.other, data.args, size)
        exact = chunk_gradient(program, theta, carry, data) if data.loss is not None and self.credit == "chunk" else None

        def block(later: Any, steps: Any):
            """Steps of the chunk, the later ones being done: (a, M) before them; sums; arrays by step."""
            kept, args, targets, weights = steps
            env = program.weight_env(theta)
            some, part = forward.with_steps(kept), Chunk(args, targets, weights, data.loss)
            core = self.linearise(program, env, some, args)
            summed = losses = outputs = None
            ybar: list[Any] = []
            if data.loss is None or exact is not None:
                b = no_credit(program, some)
                outputs = step_outputs(program, env, some, args) if exact is None else None
                a, a0, M, M0 = suffix_scan(b, core.D, not final, later)
            else:
                found = self.differentiate(program, theta, env, some, part)
                losses, outputs, ybar = found.losses, found.outputs, found.ybar
                a, a0, M, M0 = suffix_scan(found.b, core.D, not final, later)
                # Of one step alone, nothing later asks for anything.
                asked = None if later is None and len(weights) == 1 else a
                summed = self.gradient(program, theta, env, some, part, found, core, asked)
            rows = None if final else trace_rows(program, core, M, later is None)
            return (a0, M0), summed, (losses, outputs, rows, ybar if length == 1 else None)

        start = suffix_start(group_states(program, forward.new_hidden), not final) if size < length else None
        steps = (forward.steps(), list(data.args), data.targets, data.weights)
        (a0, M0), summed, (losses, outputs, rows, ybar) = run_blocks(block, start, steps, size, reverse=True)
        if exact is not None:
            a0, summed, losses, outputs = exact.a0, (exact.grads, {}), exact.losses, exact.outputs
        grads = None
        if summed is not None:
            direct, by_contact = summed[0], in_view_order(program, summed[1])
            if not fresh:
                past, M0 = self.past(program, a0, carry.trace, M0)
                by_contact = add_contacts(by_contact, past)
            grads = _add(direct, weight_gradients(program, theta, by_contact))
        trace, factors = carry.trace, None
        if not final:
            xs = contact_inputs(program, env, forward, data.args)
            trace = self.advance(program, carry.trace, rows, xs, M0, fresh)
            if length == 1 and exact is None:
                factors = (a0, ybar, M0, rows, xs)
        return ChunkResult(grads, losses, outputs, Carry(forward.new_hidden, forward.new_other, trace), factors)

    def linearise(self, program: StepProgram, env: dict, forward: Forward, args: Sequence[Any]) -> CoreLinear:
        """`D_t` and `df_t`; rules that keep more of the Jacobian override this."""
        return linearise_core(program, env, forward, args)

    def differentiate(self, program: StepProgram, theta, env: dict, forward: Forward, data: Chunk) -> LossGradient:
        """The one-step losses and their derivatives; rules with another `b_t` override this."""
        loss: Any = data.loss
        return loss_gradient(program, theta, forward, data.args, loss, data.targets, data.weights, self.credit)

    def gradient(self, program, theta, env, forward, data, found: LossGradient, core, a: Grouped | None) -> tuple[list[Any], dict]:
        """Direct gradient and credit within the chunk: of the weights outside traced contacts, and by contact as in `view_gradients`."""
        ybar = list(found.ybar)
        direct = found.direct
        if a is not None:
            ybar = [y if p is None else y + p for y, p in zip(ybar, core.pull(a), strict=True)]
            if self.upstream == "chunk" and program.upstream:
                more, taps = upstream_gradient(program, theta, forward, data.args, a)
                direct = _add(direct, more)
                ybar = [y + taps[n] if n in program.upstream_taps else y for n, y in enumerate(ybar)]
        return direct, view_gradients(program, env, ybar, contact_inputs(program, env, forward, data.args))

    def past(self, program: StepProgram, a0: Grouped, traces: Traces, M0: Any) -> tuple[dict[int, Any], Any]:
        """`a_0 · eps_0`, by contact; and `M0`, to be used only after the traces were read."""
        return read_traces(program, program.traces, a0, traces, M0)

    def advance(self, program: StepProgram, traces: Traces, rows: Any, xs: dict[int, Any], M0: Any, fresh: bool) -> Traces:
        """`eps_K = M_0 eps_0 + sum of (M_t df_t) ⊗ x_t`."""
        return advance_traces(program, program.traces, traces, rows, xs, M0, fresh)

    def reset(self, program: StepProgram, trace: Traces, keep: Any) -> Traces:
        return clear_rows(program, program.traces, trace, keep)


def read_traces(program: StepProgram, legs: Sequence[Leg], a0: Grouped, traces: Traces, M0: Any) -> tuple[dict[int, Any], Any]:
    """`a_0 · eps_0` of some legs, by contact; and `M0`, to be used only after the traces were read."""
    asked = [[at_places(leg, a) for a in a0[program.place_of(leg)]] for leg in legs]
    sums, M0 = contract_traces(legs, asked, traces, M0)
    by_contact: dict[int, Any] = {}
    for contact in dict.fromkeys(leg.contact.index for leg in legs):
        own = [(leg, total) for leg, total in zip(legs, sums, strict=True) if leg.contact.index == contact]
        by_contact[contact] = _sum_of_view(program, own)
    return by_contact, M0


def _sum_of_view(program: StepProgram, found: Sequence[tuple[Leg, Any]]) -> Any:
    """Gradient of a contact's view, from those of its traces."""
    contact = found[0][0].contact
    taps = program.taps_of(contact)
    if all(len(program.taps_of(leg)) == len(taps) for leg, _ in found):
        return sum(total for _, total in found)
    pieces = []
    for t in taps:
        zero = jnp.zeros(t.part.form.shape(t.part.form.view), t.part.var.aval.dtype)
        pieces.append(sum((total for leg, total in found if leg.part is t.part), zero))
    return join_pieces(taps, pieces)


def trace_rows(program: StepProgram, core: CoreLinear, M: Any, alone: bool = True) -> list[list[list[Any]]]:
    """`M_t df_t` at every step: [colour][state][distinct tap]; `alone` if no steps follow these, so that the last `M_t` is I."""
    if alone and jax.tree.leaves(core.df) and jax.tree.leaves(core.df)[0].shape[0] == 1:
        return [[[row[t] for t in program.distinct_taps] for row in rows] for rows in core.df]
    result = []
    for pull, rows in zip(core.pulls, core.df, strict=True):
        pulled = [pull(_row(M, r)) for r in range(len(rows))]
        result.append([[row[t] for t in program.distinct_taps] for row in pulled])
    return result


def advance_traces(program, legs: Sequence[Leg], traces: Traces, rows: Any, xs: dict[int, Any], M0: Any, fresh: bool) -> Traces:
    """`eps_K = M_0 eps_0 + sum of (M_t df_t) ⊗ x_t` of some legs."""
    new: Traces = []
    for n, leg in enumerate(legs):
        place, found = program.place_of(leg), rows[program.colour_of(leg)]
        states = []
        for r in range(program.groups[place].num_state):
            taps = program.taps_of(leg)
            row = join_outputs(taps, [found[r][program.distinct_index(t)] for t in taps])
            eps = outer_sum(leg, row, xs.get(leg.contact.index))
            if not fresh:
                for s, old in enumerate(traces[n]):
                    m = at_places(leg, M0[place][r][s])
                    eps = eps + m.reshape(*m.shape, *(1 for _ in leg.part.form.contracted)) * old.astype(eps.dtype)
            states.append(eps.astype(traces[n][r].dtype))
        new.append(states)
    return new


def clear_rows(program: StepProgram, legs: Sequence[Leg], traces: Traces, keep: Any) -> Traces:
    """The traces of some legs with the rows of some batch elements set to zero."""
    cleared = []
    for leg, states in zip(legs, traces, strict=True):
        group = program.groups[program.place_of(leg)]
        check_batch_axis(group, keep)
        per_row = group.leaves[0].num_places // group.varshape[0]
        rows = batch_rows(leg.places, per_row, keep)
        form = leg.part.form
        rows = rows.reshape(form.shape(form.out)).transpose([form.out.index(c) for c in form.trace_out])
        rows = rows.reshape(*rows.shape, *(1 for _ in form.contracted))
        cleared.append([eps * rows.astype(eps.dtype) for eps in states])
    return cleared


def _row(M: list[list[list[Any]]], r: int) -> Grouped:
    """Row r of every group's product; groups with fewer states ask for nothing."""
    return [rows[r] if r < len(rows) else [jnp.zeros_like(x) for x in rows[0]] for rows in M]


def no_credit(program: StepProgram, forward: Forward) -> Grouped:
    """`b` where there is no loss."""
    return jax.tree.map(jnp.zeros_like, group_states(program, forward.hidden))


def add_contacts(a: dict[int, Any], b: dict[int, Any]) -> dict[int, Any]:
    """Gradients of views, by contact, added up."""
    return {n: a[n] + b[n] if n in a and n in b else a.get(n, b.get(n)) for n in {**a, **b}}


def _add(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    return [x + y for x, y in zip(a, b, strict=True)]
