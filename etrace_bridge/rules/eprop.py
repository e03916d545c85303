"""e-prop: eligibility traces met by a learning signal, smoothed in time, symmetric or random.

    eps_t = D_t eps_(t-1) + df_t ⊗ x_t                                  (as in D-RTRL)
    e_t   = U_t eps_(t-1) + du_t ⊗ x_t
    ē_t  = kappa ē_(t-1) + e_t
    g_t   = dl_t/dtheta |_(h_(t-1) fixed)  +  b_t · eps_(t-1)  +  kappa L_t · ē_(t-1)

`u_t` are the *exits*: the values by which the rest of the step reads the hidden group (a new state, a spike; see
`engine.exits`). `U_t = du_t/dh_(t-1)` and `du_t` (by a contact's output) are their position by position derivatives,
`e_t` their eligibility, `L_t = dl_t/du_t` the learning signal, `b_t = dl_t/dh_(t-1)` through the core. The first two
terms of `g_t` are `L_t · e_t` for the weights of the recurrence and the plain gradient for all others, so that

    sum of g_t = sum over t, s <= t of  kappa^(t-s) L_t · e_s  +  the plain gradient of weights outside the recurrence,

which is e-prop (Bellec et al. 2020) with `kappa` the decay of the readout. With `kappa = 0` and symmetric feedback it
is `DRTRL(credit="core")`. `feedback="random"` replaces `L_t` by `dl_t/doutput_t` times a fixed random matrix, one for
each exit and output, with entries of variance 1 / outputs; nothing else of what the exits feed is then differentiated, and layers that
only pass their values on for a later step have a signal too. An exit that is an output itself, as that of a leaky readout, needs no
weights to know its error and keeps it.

For K steps, with `kappa^(t-s) L_t` summed backwards within the chunk, `P_(s-1) = kappa (L_s + P_s)` and `P_K = 0`:

    b_s += P_s U_s,   the taps' cotangents += P_s du_s,   and `P_0 · ē_0` for what came before the chunk;
    N_(s-1) = N_s D_s + kappa^(K-s) U_s     (N_K = 0)
    ē_K = kappa^K ē_0 + N_0 eps_0 + sum of (N_s df_s + kappa^(K-s) du_s) ⊗ x_s

Memory: B·P·S for each contact as in D-RTRL, and as much again for each exit if `kappa > 0`. Time a step: that of
D-RTRL, plus that of its trace for each exit. Exact when D-RTRL is, with `kappa = 0` and symmetric feedback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._errors import InputError
from etrace_bridge._jax_compat import Var
from etrace_bridge.compiler.jaxpr import read
from etrace_bridge.compiler.primitives import is_float
from etrace_bridge.engine.contraction import at_places, contact_inputs, in_view_order, join_outputs, outer_sum, weight_gradients
from etrace_bridge.engine.exits import GroupExits, at_exit, exit_cotangents, find_exits, linearise_exits
from etrace_bridge.engine.forward import Forward, run_forward
from etrace_bridge.engine.linearise import Grouped, LossGradient, group_states, step_env, step_outputs
from etrace_bridge.engine.program import StepProgram
from etrace_bridge.engine.suffix import suffix_scan
from etrace_bridge.rules.base import Carry, Chunk, ChunkResult, check_choice, register_rule
from etrace_bridge.rules.d_rtrl import DRTRL, add_contacts, read_traces, trace_rows


@register_rule
@dataclass(frozen=True)
class EProp(DRTRL):
    """e-prop.

    Attributes:
        kappa: how much of an eligibility is left for the next step's learning signal; 0 to below 1.
        feedback: `"symmetric"` (the loss's own derivative) or `"random"` (a fixed random projection of the outputs').
        seed: of the random matrices.
        upstream: as in `DRTRL`.
        trace_dtype: as in `DRTRL`.
    """

    credit: str = "core"
    kappa: float = 0.0
    feedback: str = "symmetric"
    seed: int = 0
    name: ClassVar[str] = "eprop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("credit", self.credit, ("core",))
        check_choice("feedback", self.feedback, ("symmetric", "random"))
        if not 0 <= self.kappa < 1:
            raise InputError(f"`kappa` is {self.kappa}; it must be at least 0 and below 1.")

    @property
    def passes(self) -> str:
        return "whole" if self.kappa else super().passes

    def init(self, program: StepProgram) -> Any:
        """D-RTRL's traces; with `kappa`, those and the filtered ones [leg][exit]."""
        eps = super().init(program)
        if not self.kappa:
            return eps
        exits = self.exits(program)
        filtered = []
        for leg, states in zip(program.traces, eps, strict=True):
            filtered.append([jnp.zeros_like(states[0]) for _ in exits[program.place_of(leg)].exits])
        return {"eps": eps, "filtered": filtered}

    def reset(self, program: StepProgram, trace: Any, keep: Any) -> Any:
        if not self.kappa:
            return super().reset(program, trace, keep)
        return {name: super(EProp, self).reset(program, traces, keep) for name, traces in trace.items()}

    def chunk(self, program: StepProgram, theta: Sequence[Any], carry: Carry, data: Chunk, fresh: bool, final: bool) -> ChunkResult:
        if not self.kappa:
            return super().chunk(program, theta, carry, data, fresh, final)
        env = program.weight_env(theta) | program.turned(theta)
        forward = run_forward(program, env, carry.hidden, carry.other, data.args)
        core = self.linearise(program, env, forward, data.args)
        xs = contact_inputs(program, env, forward, data.args)
        exits = self.exits(program)
        pulls = [linearise_exits(program, env, forward, data.args, g, own) for g, own in enumerate(exits)]
        grads = losses = None
        if data.loss is None:
            outputs = step_outputs(program, env, forward, data.args)
            b = jax.tree.map(jnp.zeros_like, group_states(program, forward.hidden))
            _, _, M, M0 = suffix_scan(b, core.D, not final)
        else:
            found = self.differentiate(program, theta, env, forward, data)
            losses, outputs = found.losses, found.outputs
            later, before = self._later_signals(self._signals(program, theta, env, forward, data, exits), len(data.weights))
            found = _ask_more(found, pulls, later)
            a, a0, M, M0 = suffix_scan(found.b, core.D, not final)
            direct, by_contact = self.gradient(program, theta, env, forward, data, found, core, a)
            by_contact = in_view_order(program, by_contact)
            if not fresh:
                past, M0 = self.past(program, a0, carry.trace["eps"], M0)
                some = [n for n, leg in enumerate(program.traces) if exits[program.place_of(leg)].exits]
                legs, traces = [program.traces[n] for n in some], [carry.trace["filtered"][n] for n in some]
                filtered, _ = read_traces(program, legs, before, traces, None)
                by_contact = add_contacts(add_contacts(by_contact, past), filtered)
            grads = [x + y for x, y in zip(direct, weight_gradients(program, theta, by_contact), strict=True)]
        trace, length = carry.trace, data.args[0].shape[0]
        if not final:
            trace = {
                "eps": self.advance(program, carry.trace["eps"], trace_rows(program, core, M), xs, M0, fresh),
                "filtered": self._advance_filtered(program, carry.trace, core, pulls, exits, xs, length, fresh),
            }
        return ChunkResult(grads, losses, outputs, Carry(forward.new_hidden, forward.new_other, trace))

    def exits(self, program: StepProgram) -> list[GroupExits]:
        """Where the learning signal comes in: a random one also where nothing is passed on to the outputs within the step."""
        return find_exits(program, broadcast=self.feedback == "random")

    # -- signals -----------------------------------------------------------------------------------------------

    def differentiate(self, program: StepProgram, theta, env: dict, forward: Forward, data: Chunk) -> LossGradient:
        if self.feedback == "symmetric":
            return super().differentiate(program, theta, env, forward, data)
        signals = self._random_signals(program, env, forward, data)
        return _differentiate_with(program, theta, forward, data, self.exits(program), signals)

    def _signals(self, program: StepProgram, theta, env, forward: Forward, data: Chunk, exits) -> Grouped:
        """`L_t`, [group][exit], at the group's places."""
        if self.feedback == "symmetric":
            return exit_cotangents(program, env, forward, data, exits)
        by_var = self._random_signals(program, env, forward, data)
        return [[at_exit(program, g, e, by_var[e.var]) for e in own.exits] for g, own in enumerate(exits)]

    def _random_signals(self, program: StepProgram, env, forward: Forward, data: Chunk) -> dict[Var, Any]:
        """`dl_t/doutput_t` projected to each exit, or itself where the exit is the output."""
        outputs = step_outputs(program, env, forward, data.args)
        flat, tree = jax.tree.flatten(outputs)
        floats = [n for n, v in enumerate(program.out_vars) if is_float(v)]
        loss: Any = data.loss

        def total(some: Sequence[Any]) -> Any:
            full = list(flat)
            for n, x in zip(floats, some, strict=True):
                full[n] = x
            return jnp.sum(jax.vmap(loss)(jax.tree.unflatten(tree, full), data.targets) * data.weights)

        by_output = dict(zip(floats, jax.grad(total)([flat[n] for n in floats]), strict=True))
        signals = {e.var: sum(by_output[n] for n in e.outputs) for own in self.exits(program) for e in own.exits if e.outputs}
        for (var, n), matrix in self.feedback_matrices(program).items():
            got = by_output[n]
            rows = got.reshape(got.shape[0], -1, matrix.shape[0])
            signal = (rows @ matrix.astype(got.dtype)).reshape(got.shape[0], *var.aval.shape)
            signals[var] = signals[var] + signal if var in signals else signal
        return signals

    def feedback_matrices(self, program: StepProgram) -> dict[tuple[Var, int], Any]:
        """The fixed random matrices, (outputs, elements of the exit), by exit and place of the output.

        Where exit and output have a batch axis, both leave it out: the same matrix serves every batch element.
        """
        rng = np.random.default_rng(self.seed)
        matrices: dict[tuple[Var, int], Any] = {}
        for g, own in enumerate(self.exits(program)):
            batched = len(program.groups[g].varshape) > 1
            for e in own.exits:
                for n, out in enumerate(program.out_vars):
                    if e.outputs or not is_float(out) or (e.var, n) in matrices:
                        continue
                    rows = 1
                    if batched and out.aval.shape[:1] == e.var.aval.shape[:1]:
                        rows = out.aval.shape[0]
                    shape = (math.prod(out.aval.shape) // rows, math.prod(e.var.aval.shape) // rows)
                    matrices[e.var, n] = jnp.asarray(rng.standard_normal(shape) / math.sqrt(shape[0]))
        return matrices

    def _later_signals(self, L: Grouped, length: int) -> tuple[Grouped, Grouped]:
        """`P_s` for every step, and `P_0`."""

        def body(P: Grouped, L_s: Grouped) -> tuple[Grouped, Grouped]:
            return jax.tree.map(lambda p, signal: self.kappa * (signal + p), P, L_s), P

        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), L)
        before, later = lax.scan(body, zeros, L, length, reverse=True)
        return later, before

    # -- the filtered trace ------------------------------------------------------------------------------------

    def _advance_filtered(self, program, trace, core, pulls, exits: Sequence[GroupExits], xs, length: int, fresh: bool):
        """`ē_K = kappa^K ē_0 + N_0 eps_0 + sum of (N_s df_s + kappa^(K-s) du_s) ⊗ x_s`."""
        left = self.kappa ** np.arange(length - 1, -1, -1.0)
        new: list[list[Any]] = [[] for _ in program.traces]
        for m in range(max((len(own.exits) for own in exits), default=0)):
            U, du = [], []
            for g, own in enumerate(exits):
                shape = (length, *program.groups[g].varshape)
                dtype = program.groups[g].hidden_invars[0].aval.dtype
                weight = jnp.broadcast_to(left.astype(dtype).reshape(-1, *(1,) * (len(shape) - 1)), shape)
                states, taps = pulls[g]([weight if n == m else jnp.zeros(shape, dtype) for n in range(len(own.exits))])
                U.append(states)
                du.append(taps)
            N, N0, _, _ = suffix_scan(U, core.D, False)
            through = [pull(N) for pull in core.pulls]
            for n, leg in enumerate(program.traces):
                place, taps = program.place_of(leg), program.taps_of(leg)
                if m >= len(exits[place].exits):
                    continue
                through_g = through[program.colour_of(leg)]
                g_s = join_outputs(taps, [through_g[t.index] + du[place][t.index] for t in taps])
                eps = outer_sum(leg, g_s, xs.get(leg.contact.index))
                if not fresh:
                    eps = eps + self.kappa**length * trace["filtered"][n][m].astype(eps.dtype)
                    for N0_s, old in zip(N0[place], trace["eps"][n], strict=True):
                        factor = at_places(leg, N0_s)
                        factor = factor.reshape(*factor.shape, *(1,) * len(leg.part.form.contracted))
                        eps = eps + factor * old.astype(eps.dtype)
                new[n].append(eps.astype(trace["filtered"][n][m].dtype))
        return new


def _ask_more(found: LossGradient, pulls: Sequence[Any], later: Grouped) -> LossGradient:
    """Adds what later steps of the chunk ask of the exits."""
    b, ybar = [list(states) for states in found.b], list(found.ybar)
    for g, pull in enumerate(pulls):
        states, taps = pull(later[g])
        b[g] = [x + y for x, y in zip(b[g], states, strict=True)]
        ybar = [x if y is None else x + y for x, y in zip(ybar, taps, strict=True)]
    return replace(found, b=b, ybar=ybar)


def _differentiate_with(
    program: StepProgram, theta, forward: Forward, data: Chunk, exits: Sequence[GroupExits], signals: dict[Var, Any]
) -> LossGradient:
    """As `loss_gradient`, with given signals at the exits in place of the loss's own derivative by them."""
    read_at = {edge for own in exits for e in own.exits for edge in e.edges}
    held: dict[int, tuple[int, ...]] = {}
    for i, k in read_at:
        held[id(program.eqns[i])] = (*held.get(id(program.eqns[i]), ()), k)
    core = dict(program.pre_cut_operands)
    for key, operands in held.items():
        core[key] = (*core.get(key, ()), *operands)
    stopped = {n for own in exits for e in own.exits for n in e.outputs}
    exit_vars = list(signals)
    tap_vars = [t.part.var for t in program.taps]
    loss_of_step: Any = data.loss

    def total(theta: Sequence[Any], hidden: Sequence[Any], deltas: Sequence[Any], held: dict):
        env = program.weight_env(theta)

        def one(args_t, hidden_t, other_t, saved_t, deltas_t, target_t, weight_t, signals_t):
            start = step_env(program, env, args_t, hidden_t, other_t)
            taps = dict(zip(tap_vars, deltas_t, strict=True))
            done = program.run_step(start, saved_t, taps, [*program.out_vars, *exit_vars], held)
            flat = [read(done, v) for v in program.out_vars]
            output = program.output_tree([lax.stop_gradient(o) if n in stopped else o for n, o in enumerate(flat)])
            loss = loss_of_step(output, target_t)
            surrogate = sum(jnp.sum(s * done[v]) for s, v in zip(signals_t, exit_vars, strict=True))
            return weight_t * loss + surrogate, (loss, output)

        summed, aux = jax.vmap(one)(
            list(data.args), hidden, forward.other, forward.saved, deltas, data.targets, data.weights,
            list(signals.values()),
        )  # fmt: skip
        return jnp.sum(summed), aux

    deltas = list(program.zero_taps((data.args[0].shape[0],)).values())
    grad = jax.grad(total, argnums=(0, 2), has_aux=True)
    (direct, ybar), (losses, outputs) = grad(list(theta), forward.hidden, deltas, held)
    b = jax.grad(lambda hidden: total(theta, hidden, deltas, core)[0])(forward.hidden)
    return LossGradient(losses, outputs, direct, ybar, group_states(program, b))
