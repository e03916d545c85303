"""Hand-written D-RTRL for one torch-layout GRU with a linear readout: the speed that the general
engine is measured by.

Nothing here is generic. Every derivative is written out, so the file also serves as a reading of
the chunk form:

    r = sigmoid(x W_ir' + b_ir + h W_hr' + b_hr)        m = h W_hn' + b_hn
    z = sigmoid(x W_iz' + b_iz + h W_hz' + b_hz)        n = tanh(x W_in' + b_in + r m)
    h_new = n + z (h - n)                               y = h_new W_o' + b_o

With the recurrent product held constant, `h_new` depends on `h` through `D = z` alone, position by
position. The online gradient is

    g_t = dl_t/dW (h fixed) + b_t . eps_(t-1)           b_t = dl_t/dh_(t-1) through the whole step
    eps_t = D_t eps_(t-1) + df_t (x) input_t            df_t = dh_t/d(gate's argument)

and a chunk of K steps computes its sum from one reverse scan of hidden-sized arrays, `a_(t-1) = b_t
+ D_t a_t` and `M_(t-1) = M_t D_t`. A weight's gradient is then one matrix product with `c_t + a_t`,
where `c_t = dl_t/dh_t`, plus one pass over the old trace with `a_0`; the new trace is `M_0 eps_0`
plus one batched product with `M_t`.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from etrace_bridge.lowering import jit

Params = dict[str, Array]
Gradients = dict[str, Array]


class Trace(NamedTuple):
    """Eligibility of every GRU weight: a batch axis, then the weight's own axes in torch's layout."""

    weight_ih: Array
    weight_hh: Array
    bias_ih: Array
    bias_hh: Array


class Gates(NamedTuple):
    """What the forward scan keeps of every step, each `(K, B, H)`: the old state and what the
    equations above name.
    """

    h: Array
    r: Array
    z: Array
    n: Array
    m: Array


def init_params(
    inputs: int, hidden: int, outputs: int, seed: int = 0, dtype: Any = jnp.float32
) -> Params:
    """Return parameters drawn as torch draws them, uniform within `1/sqrt(hidden)`."""
    shapes = {
        "weight_ih": (3 * hidden, inputs),
        "weight_hh": (3 * hidden, hidden),
        "bias_ih": (3 * hidden,),
        "bias_hh": (3 * hidden,),
        "weight_out": (outputs, hidden),
        "bias_out": (outputs,),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    bound = hidden**-0.5
    return {
        name: jax.random.uniform(key, shape, dtype, -bound, bound)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def zero_trace(params: Params, batch: int) -> Trace:
    """Return the trace before the first step."""
    return Trace(
        *(jnp.zeros((batch, *params[name].shape), params[name].dtype) for name in Trace._fields)
    )


def _forward(params: Params, h0: Array, xs: Array, feature_major: bool) -> tuple[Array, Gates]:
    """Run K steps and keep the gates; inputs enter the scan as three arrays, already multiplied and
    split.
    """
    hidden = h0.shape[1]
    # The recurrent biases of r and z are added to the hoisted product; that of n stays inside,
    # where r multiplies it.
    bias = params["bias_ih"] + params["bias_hh"].at[2 * hidden :].set(0)
    product = xs @ params["weight_ih"].T + bias
    weight, bias_n = params["weight_hh"], params["bias_hh"][2 * hidden :]
    if feature_major:
        # (H, B) states: XLA multiplies W @ h up to twice as fast as h @ W' when the batch is small.
        product, bias_n, axis = product.swapaxes(1, 2), bias_n[:, None], 0
        multiply = partial(jnp.matmul, weight)
    else:
        axis = 1
        transposed = weight.T
        multiply = lambda h: h @ transposed

    def step(h: Array, x: list[Array]) -> tuple[Array, Gates]:
        h_r, h_z, h_n = jnp.split(multiply(h), 3, axis)
        r = jax.nn.sigmoid(x[0] + h_r)
        z = jax.nn.sigmoid(x[1] + h_z)
        m = h_n + bias_n
        n = jnp.tanh(x[2] + r * m)
        return n + z * (h - n), Gates(h, r, z, n, m)

    inputs = jnp.split(product, 3, axis + 1)
    if not feature_major:
        return lax.scan(step, h0, inputs)
    h_end, gates = lax.scan(step, h0.T, inputs)
    return h_end.T, jax.tree.map(lambda array: array.swapaxes(1, 2), gates)


def _reverse(
    b: Array, decay: Array, with_products: bool
) -> tuple[Array, Array, Array | None, Array | None]:
    """Return `a_t`, `a_0` and the suffix products `M_t`, `M_0` (None, None if they are not needed)."""
    zero = jnp.zeros_like(b[0])
    if not with_products:
        a_0, a = lax.scan(lambda a, s: (s[0] + s[1] * a, a), zero, (b, decay), reverse=True)
        return a, a_0, None, None
    start = (zero, jnp.ones_like(zero))
    (a_0, m_0), (a, m) = lax.scan(
        lambda c, s: ((s[0] + s[1] * c[0], s[1] * c[1]), c), start, (b, decay), reverse=True
    )
    return a, a_0, m, m_0


def _align(values: Array, ndim: int) -> Array:
    """Append axes of size one, up to `ndim` axes."""
    return values.reshape(values.shape + (1,) * (ndim - values.ndim))


def _contract(trace: Trace, a_0: Array, m_0: Array) -> tuple[Gradients, Array]:
    """Return `sum_b a_0 eps_0` for every weight, and `m_0` unchanged.

    `m_0` travels through the loop on purpose: the update of the trace then depends on the loop's
    end, so XLA overwrites the trace in place. Without a real dependency (an optimization barrier is
    none by then) it copies the trace first.
    """
    sums = Trace(*(jnp.zeros(leaf.shape[1:], leaf.dtype) for leaf in trace))

    def add(b: Array, carry: tuple[Trace, Array]) -> tuple[Trace, Array]:
        sums, kept = carry
        row = a_0[b]
        sums = Trace(*(s + e[b] * _align(row, s.ndim) for s, e in zip(sums, trace, strict=True)))
        return sums, kept.at[b].set(m_0[b])

    sums, kept = lax.fori_loop(0, a_0.shape[0], add, (sums, jnp.zeros_like(m_0)))
    return sums._asdict(), kept


def _through_recurrence(weight_hh: Array, per_gate: list[Array]) -> Array:
    """Return cotangents of the recurrent product, pulled back to the old state."""
    if per_gate[0].shape[0] == 1:
        # one step: copying three slices of the weight would cost more
        return jnp.concatenate(per_gate, -1) @ weight_hh
    return sum(gate @ part for gate, part in zip(per_gate, jnp.split(weight_hh, 3), strict=True))


def _weight_gradients(per_gate: list[Array], values: Array) -> Array:
    """Return one gradient `(3H, I)` from three `(K, B, H)` cotangents; concatenating the small
    results is free.
    """
    return jnp.concatenate([jnp.einsum("kbh,kbi->hi", gate, values) for gate in per_gate])


def _factors(gates: Gates) -> tuple[Array, Array, Array, Array]:
    """Return the derivatives of `h_new` by the arguments of r, z, n, and by m."""
    h, r, z, n, m = gates
    d_n = (1 - z) * (1 - n * n)
    d_m = d_n * r
    return d_m * m * (1 - r), (h - n) * z * (1 - z), d_n, d_m


def _in_blocks(values: Any, blocks: int) -> Any:
    return jax.tree.map(lambda array: array.reshape(blocks, -1, *array.shape[1:]), values)


def _joined(values: Any) -> Any:
    return jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), values)


def chunk(
    params: Params,
    h0: Array,
    trace: Trace | None,
    xs: Array,
    targets: Array,
    *,
    weight: float | None = None,
    last: bool = False,
    feature_major: bool = False,
    max_blocks: int | None = None,
) -> tuple[Gradients, Array, Array, Trace | None, Array]:
    """Run K steps: gradients, loss, last hidden state, new trace and outputs.

    What is parallel over the steps runs in blocks of them, so that only the gates and a few more
    arrays are ever `(K, B, H)`. Less memory is also faster: glibc returns a block above 32 MiB to
    the system after every run, and each page has to be faulted in again (10,000 faults, a fifth of
    the time, at H=256, B=32, K=100).

    Args:
        params: Weights under the names of `init_params`.
        h0: Hidden state before the chunk, `(B, H)`.
        trace: Trace before the chunk; None stands for zero and skips the contraction.
        xs: Inputs `(K, B, I)`.
        targets: Targets `(K, B, O)`.
        weight: Weight of one step's mean-squared error in the loss; `1/K` if None.
        last: Leave the trace alone, because nobody will read it.
        feature_major: Run the recurrence on `(H, B)` states, for large H and small B.
        max_blocks: Largest number of blocks; chosen by size if None.
    """
    steps = xs.shape[0]
    weight = 1 / steps if weight is None else weight
    # Small chunks fit in one block, and the inner loops of several would only cost time
    if max_blocks is None:
        max_blocks = 1 if steps * h0.size < 500_000 else 10
    blocks = max(count for count in range(1, max_blocks + 1) if steps % count == 0)
    inputs = _in_blocks(xs, blocks)
    zeros = {name: jnp.zeros_like(value) for name, value in params.items()}

    def forward(carry: Any, block: Any) -> Any:
        h, loss, readout = carry
        x, target = block
        h, gates = _forward(params, h, x, feature_major)
        h_new = jnp.concatenate([gates.h[1:], h[None]])
        outputs = h_new @ params["weight_out"].T + params["bias_out"]
        error = outputs - target
        d_out = error * (2 * weight / error[0].size)
        readout += jnp.einsum("kbo,kbh->oh", d_out, h_new)
        return (h, loss + 0.5 * jnp.sum(error * d_out), readout), (gates, d_out, outputs)

    def pull_back(_: None, block: Any) -> tuple[None, Array]:
        gates, d_out = block
        c = d_out @ params["weight_out"]
        d_r, d_z, _, d_m = _factors(gates)
        return None, c * gates.z + _through_recurrence(
            params["weight_hh"], [c * d_r, c * d_z, c * d_m]
        )

    def accumulate(sums: Gradients, block: Any) -> tuple[Gradients, None]:
        gates, d_out, a, x = block
        credit = d_out @ params["weight_out"] + a
        g_r, g_z, g_n, g_m = (credit * factor for factor in _factors(gates))
        bias = [g.sum((0, 1)) for g in (g_r, g_z, g_n, g_m)]
        return {
            "weight_ih": sums["weight_ih"] + _weight_gradients([g_r, g_z, g_n], x),
            "weight_hh": sums["weight_hh"] + _weight_gradients([g_r, g_z, g_m], gates.h),
            "bias_ih": sums["bias_ih"] + jnp.concatenate(bias[:3]),
            "bias_hh": sums["bias_hh"] + jnp.concatenate([bias[0], bias[1], bias[3]]),
        }, None

    start = h0, jnp.zeros((), h0.dtype), zeros["weight_out"]
    (h_end, loss, readout), (gates, d_out, outputs) = lax.scan(
        forward, start, (inputs, _in_blocks(targets, blocks))
    )
    _, b = lax.scan(pull_back, None, (gates, d_out))
    a, a_0, products, m_0 = _reverse(_joined(b), _joined(gates.z), not last)
    sums = {name: zeros[name] for name in Trace._fields}
    grads, _ = lax.scan(accumulate, sums, (gates, d_out, _in_blocks(a, blocks), inputs))
    grads |= {"weight_out": readout, "bias_out": d_out.sum((0, 1, 2))}
    if trace is not None:
        # Tiled to the three gates before the product: broadcasting over a gate axis instead is 25
        # times slower.
        tiled = jnp.tile(a_0, (1, 3))
        past, m_0 = _contract(trace, tiled, tiled if last else jnp.tile(m_0, (1, 3)))
        grads |= {name: grads[name] + past[name] for name in past}
    if last:
        return grads, loss, h_end, None, _joined(outputs)
    gates = _joined(gates)
    added = [(products * factor).swapaxes(0, 1) for factor in _factors(gates)]
    return grads, loss, h_end, _new_trace(trace, m_0, added, xs, gates.h), _joined(outputs)


def _new_trace(
    trace: Trace | None, m_0: Array, per_gate: list[Array], xs: Array, h: Array
) -> Trace:
    """Return `M_0 eps_0` plus what the chunk added; batch-major operands double the speed of the
    batched product.
    """
    f_r, f_z, f_n, f_m = per_gate
    f_ih = jnp.concatenate([f_r, f_z, f_n], -1)
    f_hh = jnp.concatenate([f_r, f_z, f_m], -1)
    added = Trace(
        jnp.einsum("bkg,bki->bgi", f_ih, xs.swapaxes(0, 1)),
        jnp.einsum("bkg,bki->bgi", f_hh, h.swapaxes(0, 1)),
        f_ih.sum(1),
        f_hh.sum(1),
    )
    if trace is None:
        return added
    return Trace(*(_align(m_0, e.ndim) * e + new for e, new in zip(trace, added, strict=True)))


def _plus(first: Any, second: Any) -> Any:
    return jax.tree.map(jnp.add, first, second)


@partial(jit, static_argnames=("chunk_size", "feature_major", "max_blocks"))
def sequence_gradients(
    params: Params,
    h0: Array,
    xs: Array,
    targets: Array,
    *,
    chunk_size: int,
    feature_major: bool = False,
    max_blocks: int | None = None,
) -> tuple[Gradients, Array, Array]:
    """Return the D-RTRL gradients of a whole sequence, its loss and its outputs.

    The first chunk has no trace to contract and the last none to update: `chunk_size` steps need no
    trace at all.
    """
    steps = xs.shape[0]
    run = partial(
        chunk, params, weight=1 / steps, feature_major=feature_major, max_blocks=max_blocks
    )
    if steps <= chunk_size:
        grads, loss, _, _, outputs = run(h0, None, xs, targets, last=True)
        return grads, loss, outputs
    middle = (steps - 1) // chunk_size - 1
    end = (middle + 1) * chunk_size
    grads, loss, h, trace, outputs = run(h0, None, xs[:chunk_size], targets[:chunk_size])
    parts = [outputs]
    if middle:

        def body(carry: Any, start: Array) -> tuple[Any, Array]:
            sums, h, trace = carry
            piece = [
                lax.dynamic_slice_in_dim(values, start, chunk_size) for values in (xs, targets)
            ]
            grads, loss, h, trace, outputs = run(h, trace, *piece)
            return (_plus(sums, (grads, loss)), h, trace), outputs

        starts = chunk_size * (1 + jnp.arange(middle))
        ((grads, loss), h, trace), outputs = lax.scan(body, ((grads, loss), h, trace), starts)
        parts.append(outputs.reshape(-1, *outputs.shape[2:]))
    grads_end, loss_end, _, _, outputs = run(h, trace, xs[end:], targets[end:], last=True)
    return _plus(grads, grads_end), loss + loss_end, jnp.concatenate([*parts, outputs])


@partial(jit, one_step=True, donate_argnums=(0, 1, 2))
def online_step(
    params: Params, h: Array, trace: Trace, x: Array, target: Array, rate: float | Array
) -> tuple[Params, Array, Trace, Array, Array]:
    """Run one step with an SGD update: new parameters, hidden state and trace (all donated), loss
    and output.
    """
    grads, loss, h, trace, outputs = chunk(params, h, trace, x[None], target[None])
    return {name: params[name] - rate * grads[name] for name in params}, h, trace, loss, outputs[0]
