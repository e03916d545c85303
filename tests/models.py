"""The zoo of plain brainstate models that the compiler's tests share.

Each entry is one step of a model: parameters, hidden states and a function of them. `build(name)`
gives the module with initialised states and its example arguments, always with the same random
values. Batch 2, input 3, hidden 4 unless a model needs other sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from brainstate import HiddenGroupState, HiddenState, ParamState, ShortTermState
from jax import lax

from etrace_bridge.compiler.graph import ETraceGraph, compile_etrace_graph
from strict import promotion

B, I, H = 2, 3, 4  # noqa: E741  (the letters of the equations)


class Plain(brainstate.nn.Module):
    """A module whose step is a function `(parameters, states, x) -> (new states, output)`."""

    def __init__(self, params: dict, states: dict, step: Callable) -> None:
        super().__init__()
        self.step, self.names = promotion(implicit=True)(step), (tuple(params), tuple(states))
        for name, value in (params | states).items():
            setattr(self, name, value)

    def update(self, x):
        params, states = ({n: getattr(self, n).value for n in names} for names in self.names)
        new, out = self.step(params, states, x)
        for name, value in new.items():
            getattr(self, name).value = value
        return out


@dataclass(frozen=True)
class Entry:
    """How to build one model of the zoo."""

    name: str
    make: Callable[[np.random.Generator], tuple[brainstate.nn.Module, tuple[Any, ...]]]
    is_plain: bool = False  # made by `plain` below


ZOO: dict[str, Entry] = {}


def build(name: str) -> tuple[brainstate.nn.Module, tuple[Any, ...]]:
    """A fresh model of the zoo and its example arguments."""
    brainstate.random.seed(0)
    return ZOO[name].make(np.random.default_rng(0))


@cache
def graph_of(name: str) -> ETraceGraph:
    """The compiled graph of a model of the zoo, made once."""
    model, args = build(name)
    return compile_etrace_graph(model, *args)


def refill(model: brainstate.nn.Module, rng: np.random.Generator) -> None:
    """Gives parameters and hidden states random values: zeros would hide errors behind zero
    derivatives.
    """
    for kind in (ParamState, HiddenState):
        for state in model.states(kind).values():
            state.value = jax.tree.map(lambda v: v + _normal(rng, v.shape), state.value)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], scale: float = 0.5) -> jax.Array:
    return jnp.asarray(scale * rng.standard_normal(shape))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple)


def plain(states: dict, x: Any = (B, I), **params: Any) -> Callable:
    """Adds the decorated step function to the zoo.

    Args:
        states: by name, a shape (a HiddenState), or a function `generator -> State`.
        x: the input's shape, or a function `generator -> array`.
        **params: by name, a shape or a tree of shapes.
    """

    def add(step: Callable) -> Callable:
        def make(rng: np.random.Generator):
            ps = {
                n: ParamState(jax.tree.map(partial(_normal, rng), shapes, is_leaf=_is_shape))
                for n, shapes in params.items()
            }
            ss = {
                n: HiddenState(_normal(rng, s)) if _is_shape(s) else s(rng)
                for n, s in states.items()
            }
            return Plain(ps, ss, step), (x(rng) if callable(x) else _normal(rng, x),)

        ZOO[step.__name__] = Entry(step.__name__, make, is_plain=True)
        return step

    return add


def module(make: Callable) -> Callable:
    """Adds a ready module to the zoo: the decorated function gives it and its arguments."""

    def build_and_fill(rng: np.random.Generator):
        model, args = make(rng)
        refill(model, rng)
        return model, args

    ZOO[make.__name__] = Entry(make.__name__, build_and_fill)
    return make


# Surrogate gradients
# ------------------------------------------------------------------------------------------------


@jax.custom_jvp
def spike_jvp(v):
    """A step with a smooth derivative, as custom_jvp."""
    return (v > 0).astype(v.dtype)


spike_jvp.defjvp(
    lambda primals, tangents: (spike_jvp(*primals), tangents[0] / (1 + primals[0] ** 2))
)


@jax.custom_vjp
def spike_vjp(v):
    """The same as custom_vjp, which has no forward mode."""
    return (v > 0).astype(v.dtype)


spike_vjp.defvjp(lambda v: (spike_vjp(v), v), lambda v, g: (g / (1 + v**2),))


# Weight views
# -------------------------------------------------------------------------------------------------------


@plain({"h": (B, H)}, w=(I, H), u=(H, H), b=(H,))
def rnn(p, s, x):
    h = jnp.tanh(x @ p["w"] + s["h"] @ p["u"] + p["b"])
    return {"h": h}, h


@plain({"h": (B, H)}, w=(H, I))
def transposed(p, s, x):
    h = 0.5 * s["h"] + x @ p["w"].T
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, 2 * H))
def sliced(p, s, x):
    gate = jax.nn.sigmoid(x @ p["w"][:, :H])
    h = gate * s["h"] + x @ p["w"][:, H:]
    return {"h": h}, h


@plain({"h": (B, H)}, w_ih=(3 * H, I), w_hh=(3 * H, H), b_ih=(3 * H,), b_hh=(3 * H,))
def torch_gru(p, s, x):
    i = x @ p["w_ih"].T + p["b_ih"]
    g = s["h"] @ p["w_hh"].T + p["b_hh"]
    (i_r, i_z, i_n), (h_r, h_z, h_n) = jnp.split(i, 3, axis=1), jnp.split(g, 3, axis=1)
    r, z = jax.nn.sigmoid(i_r + h_r), jax.nn.sigmoid(i_z + h_z)
    n = jnp.tanh(i_n + r * h_n)
    h = n + z * (s["h"] - n)
    return {"h": h}, h


@plain({"h": (B, H), "c": (B, H)}, w_ih=(4 * H, I), w_hh=(4 * H, H), b=(4 * H,))
def torch_lstm(p, s, x):
    gates = x @ p["w_ih"].T + s["h"] @ p["w_hh"].T + p["b"]
    i, f, g, o = jnp.split(gates, 4, axis=1)
    c = jax.nn.sigmoid(f) * s["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return {"h": h, "c": c}, h


@plain({"h": (B, H)}, w1=(I, 1), w2=(I, H - 1))
def concatenated(p, s, x):
    h = 0.5 * s["h"] + x @ jnp.concatenate([p["w1"], p["w2"]], axis=1)
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H))
def masked(p, s, x):
    mask = jnp.asarray(np.arange(I * H).reshape(I, H) % 2, p["w"].dtype)
    h = 0.5 * s["h"] + x @ (p["w"] * mask)
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H))
def tied_twice(p, s, x):
    h = 0.5 * s["h"] + jnp.tanh(x @ p["w"]) + jnp.tanh(x) @ p["w"]
    return {"h": h}, h


@plain({"h1": (B, H), "h2": (B, H)}, x=(B, H), w=(H, H))
def tied_layers(p, s, x):
    h1 = 0.5 * s["h1"] + x @ p["w"]
    h2 = 0.5 * s["h2"] + jnp.tanh(h1) @ p["w"]
    return {"h1": h1, "h2": h2}, h2


@plain({"h": (B, H)}, w1=(I, H), w2=(I, H))
def summed(p, s, x):
    h = 0.5 * s["h"] + x @ (p["w1"] + p["w2"])
    return {"h": h}, h


@plain({"h": (B, H)}, a=(I, 2), b=(2, H))
def low_rank(p, s, x):
    h = 0.5 * s["h"] + x @ (p["a"] @ p["b"])
    return {"h": h}, h


@plain({"h": (B, H)}, v=(I, H), g=(H,))
def normalised(p, s, x):
    h = 0.5 * s["h"] + x @ (p["g"] * p["v"] / jnp.sqrt((p["v"] ** 2).sum(0)))
    return {"h": h}, h


@plain({"h": (B, H)}, p={"bias": (H,), "kernel": (I, H)})
def pytree(p, s, x):
    h = 0.5 * s["h"] + x @ p["p"]["kernel"] + p["p"]["bias"]
    return {"h": h}, h


# Contacts
# -----------------------------------------------------------------------------------------------------------


@plain({"h": (H,)}, x=(I,), w=(H, I))
def matvec(p, s, x):
    h = 0.5 * s["h"] + p["w"] @ x
    return {"h": h}, h


@plain({"h": (H,)}, x=(I,), w=(I, H))
def vecmat(p, s, x):
    h = jnp.tanh(0.5 * s["h"] + x @ p["w"])
    return {"h": h}, h


@plain({"h": (B, 4, 2)}, w=(I, 4, 2))
def einsum_axes(p, s, x):
    h = 0.5 * s["h"] + jnp.einsum("bi,ijk->bjk", x, p["w"])
    return {"h": h}, h


@plain({"h": (B, 2, H)}, x=(B, 2, I), w=(2, H, I))
def grouped_product(p, s, x):
    h = 0.5 * s["h"] + jnp.einsum("bgi,goi->bgo", x, p["w"])
    return {"h": h}, h


@plain({"h": (H, B)}, x=(I, B), w=(H, I))
def feature_major(p, s, x):
    h = jnp.tanh(0.5 * s["h"] + p["w"] @ x)
    return {"h": h}, h


def _conv(x, w, padding="SAME", **options):
    rank = x.ndim - 2
    spatial = "XY"[:rank]
    dims = lax.conv_dimension_numbers(
        x.shape, w.shape, (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
    )
    options = {"window_strides": (1,) * rank} | options
    return lax.conv_general_dilated(x, w, padding=padding, dimension_numbers=dims, **options)


@plain({"h": (B, 5, H)}, x=(B, 5, I), w=(3, I, H), b=(H,))
def conv1d(p, s, x):
    h = 0.5 * s["h"] + _conv(x, p["w"]) + p["b"]
    return {"h": h}, h


@plain({"h": (B, 3, 4, H)}, x=(B, 3, 4, I), w=(2, 3, I, H))
def conv2d(p, s, x):
    h = jnp.tanh(0.5 * s["h"] + _conv(x, p["w"]))
    return {"h": h}, h


@plain({"h": (B, 5, 4)}, x=(B, 5, 4), w=(3, 2, 4))
def conv_grouped(p, s, x):
    h = 0.5 * s["h"] + _conv(x, p["w"], feature_group_count=2)
    return {"h": h}, h


@plain({"h": (B, 3, H)}, x=(B, 6, I), w=(3, I, H))
def conv_strided(p, s, x):
    h = 0.5 * s["h"] + _conv(x, p["w"], window_strides=(2,))
    return {"h": h}, h


@plain({"h": (B, 6, H)}, x=(B, 6, I), w=(3, I, H))
def conv_dilated(p, s, x):
    h = 0.5 * s["h"] + _conv(x, p["w"], rhs_dilation=(2,))
    return {"h": h}, h


@plain({"h": (B, 5, H)}, x=(B, 5, I), w=(3, I, H), u=(3, H, H))
def conv_recurrent(p, s, x):
    h = jnp.tanh(_conv(x, p["w"]) + _conv(s["h"], p["u"]))
    return {"h": h}, h


@plain({"h": (B, H)}, x=lambda rng: jnp.asarray(rng.integers(0, 5, B)), w=(5, H))
def embedding(p, s, x):
    h = jnp.tanh(0.5 * s["h"] + p["w"][x])
    return {"h": h}, h


@plain({"h": (H,)}, x=lambda rng: jnp.asarray(3), w=(5, H))
def embedding_one(p, s, x):
    h = 0.5 * s["h"] + p["w"][x]
    return {"h": h}, h


@plain({"h": (B, H)}, x=(B, H), a=())
def decay_scalar(p, s, x):
    h = jax.nn.sigmoid(p["a"]) * s["h"] + x
    return {"h": h}, h


@plain({"h": (B, H)}, x=(B, H), a=(H,), gain=(H,), b=(H,))
def decay_vector(p, s, x):
    a = jnp.exp(-jnp.exp(p["a"]))
    h = a * s["h"] + (1 - a) * p["gain"] * x + p["b"]
    return {"h": h}, jnp.tanh(h)


@plain({"v": (B, H)}, x=(B, H), threshold=(), b=(H,))
def threshold(p, s, x):
    v = 0.9 * s["v"] + x + p["b"]
    z = spike_jvp(v - p["threshold"])
    return {"v": v - z * p["threshold"]}, z


@plain({"h": (B, H)}, w=(I, H), gate=(I, 1))
def scalar_gate(p, s, x):
    g = jax.nn.sigmoid(x @ p["gate"])
    h = g * s["h"] + (1 - g) * jnp.tanh(x @ p["w"])
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H), gate=(I, 1))
def scalar_gate_shown(p, s, x):
    g = jax.nn.sigmoid(x @ p["gate"])
    h = g * s["h"] + x @ p["w"]
    return {"h": h}, (h, g)


@plain({"h": (B, H), "g": (B, 1)}, w=(I, H), gate=(I, 1))
def scalar_gate_kept(p, s, x):
    g = x @ p["gate"]
    h = jax.nn.sigmoid(g) * s["h"] + x @ p["w"]
    return {"h": h, "g": 0.5 * s["g"] + g}, (h, s["g"])


@plain({"h": (B, 5, H)}, x=(B, 5, I), w=(3, I, H), gate=(3, I, 1))
def conv_gate(p, s, x):
    h = jax.nn.sigmoid(_conv(x, p["gate"])) * s["h"] + _conv(x, p["w"])
    return {"h": h}, h


@plain({"h": (B, H)}, x=lambda rng: jnp.asarray(rng.integers(0, 5, B)), w=(5, H), gate=(5, 1))
def embedding_gate(p, s, x):
    h = jax.nn.sigmoid(p["gate"][x]) * s["h"] + p["w"][x]
    return {"h": h}, h


@plain({"m": (B, 3, H)}, wk=(I, 3), wv=(I, H))
def fast_weights(p, s, x):
    k, v = jax.nn.sigmoid(x @ p["wk"])[:, :, None], jnp.tanh(x @ p["wv"])[:, None, :]
    m = (1 - k) * s["m"] + k * v
    return {"m": m}, m.sum(1)


@plain({"h": (B, H)}, w=(I, 2), b=(2,))
def partial_update(p, s, x):
    h = (0.9 * s["h"]).at[:, :2].add(x @ p["w"] + p["b"])
    return {"h": h}, jnp.tanh(h)


@plain({"h": (B, H)}, w=(I, 2 * H))
def split_after_softplus(p, s, x):
    rate, drive = jnp.split(jax.nn.softplus(x @ p["w"]), 2, axis=1)  # softplus is a custom_jvp call
    h = jnp.exp(-rate) * s["h"] + drive
    return {"h": h}, jnp.tanh(h)


@plain({"h": (B, H)}, w=(I, 3 * H), u=(H, 3 * H))
def interleaved_gates(p, s, x):
    y, g = (x @ p["w"]).reshape(B, H, 3), (s["h"] @ p["u"]).reshape(B, H, 3)
    r, z = jax.nn.sigmoid(y[..., 0] + g[..., 0]), jax.nn.sigmoid(y[..., 1] + g[..., 1])
    n = jnp.tanh(y[..., 2] + r * g[..., 2])
    h = n + z * (s["h"] - n)
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H), h0=(H,))
def learned_reset(p, s, x):
    h = jnp.where(x[:, :1] > 0, p["h0"], 0.5 * s["h"] + x @ p["w"])
    return {"h": h}, h


@plain({"h": (B, H)}, x=(B, H), w=(H, H), u=(H,))
def unknown_contact(p, s, x):
    h = (
        0.5 * s["h"]
        + jnp.linalg.solve(p["w"] + 3 * jnp.eye(H), x.T).T
        + lax.cumsum(p["u"] * x, axis=1)
    )
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H))
def feeds_two_ways(p, s, x):
    y = x @ p["w"]
    h = 0.5 * s["h"] + y + jnp.flip(y, 1)
    return {"h": h}, h


@plain({"h": (B, H), "c": (B, H)}, w=(I, H), b=(H,))
def feeds_two_states_of_a_group(p, s, x):
    u = jnp.tanh(x @ p["w"] + p["b"])
    return {"c": 0.9 * s["c"] + u, "h": 0.5 * s["h"] * s["c"] + jnp.roll(u, 1, 1)}, s["h"]


@plain({"h": (B, 2 * H)}, w=(I, H), b=(H,))
def feeds_both_signs(p, s, x):
    u = jax.nn.softplus(x @ p["w"]) * p["b"]
    h = 0.5 * s["h"] + jnp.concatenate([jnp.tanh(u), jax.nn.sigmoid(-u)], 1)
    return {"h": h}, (h, u)


@plain({"h": (B, H), "k": (B, 2 * H)}, gate=(I, 1))
def spread_twice(p, s, x):
    g = x @ p["gate"]
    return {"h": jax.nn.sigmoid(g) * s["h"] + 1, "k": g * s["k"] + 2}, (s["h"], s["k"], g)


@plain({"h": (B, 17)}, w=(I, 17))
def feeds_too_many_ways(p, s, x):
    y = x @ p["w"]
    h = 0.5 * s["h"] + sum(jnp.roll(y, k, 1) / (k + 1) for k in range(17))
    return {"h": h}, h


# Hidden groups
# ------------------------------------------------------------------------------------------------------


@plain({"v": (B, H), "i": (B, H), "a": (B, H)}, w=(I, H))
def alif(p, s, x):
    i = 0.6 * s["i"] + x @ p["w"]
    v = 0.9 * s["v"] + i - 0.3 * s["a"]
    z = spike_vjp(v - 0.2)
    return {"v": v - z, "i": i, "a": 0.8 * s["a"] + z}, z


@plain(dict.fromkeys("abcde", (B, H)), w=(I, H), tau=(H,))
def five_states(p, s, x):
    a = p["tau"] * s["a"] + x @ p["w"]
    b = jnp.tanh(s["b"] + a)
    c = s["c"] * jnp.cos(s["b"]) + s["d"]
    d = jnp.sin(s["a"]) + 0.3 * s["d"]
    e = 0.5 * s["e"] + b * c
    return {"a": a, "b": b, "c": c, "d": d, "e": e}, e


@plain({"h": lambda rng: HiddenGroupState(_normal(rng, (B, H, 3)))}, w=(I, H))
def group_state(p, s, x):
    v, i, a = (s["h"][..., n] for n in range(3))
    i = 0.6 * i + x @ p["w"]
    v = 0.9 * v + i - a**2
    return {"h": jnp.stack([v, i, 0.8 * a + v], axis=-1)}, jnp.tanh(v)


@plain({"h": (B, H), "k": (B, 6)}, w=(I, H), u=(I, 6), mix=(H, 6))
def two_shapes(p, s, x):
    h = 0.5 * s["h"] + x @ p["w"]
    k = jnp.tanh(0.5 * s["k"] + x @ p["u"] + h @ p["mix"])
    return {"h": h, "k": k}, k


@plain({"h": (B, H), "c": (B, H), "n": (B, H)}, w=(I, H))
def three_in_one(p, s, x):
    y = x @ p["w"]
    h = jnp.where(s["h"] > s["c"], s["n"] * y, s["h"])
    return {"h": h, "c": s["c"] + h, "n": 0.9 * s["n"]}, h + s["n"]


@plain({"h1": (B, H), "h2": (B, H)}, w1=(I, H), u1=(H, H), w2=(H, H), u2=(H, H))
def stacked(p, s, x):
    h1 = jnp.tanh(x @ p["w1"] + s["h1"] @ p["u1"])
    h2 = jnp.tanh(h1 @ p["w2"] + s["h2"] @ p["u2"])
    return {"h1": h1, "h2": h2}, h2


@plain({"h1": (B, H), "h2": (B, H)}, w1=(I, H), w2=(I, H))
def skip_joined(p, s, x):
    h1 = 0.5 * s["h1"] + x @ p["w1"]
    h2 = jnp.tanh(0.5 * s["h2"] + x @ p["w2"] + h1)
    return {"h1": h1, "h2": h2}, h2


@plain({"h": (1, B, H), "c": (B, H)}, w=(I, H))
def joined_across_an_axis(p, s, x):
    c = 0.5 * s["c"] + (x @ p["w"]) * s["h"][0]
    h = jnp.tanh(c + s["h"][0])
    return {"h": h[None], "c": c}, h


@plain({"h": (B, H), "g": (B, 1)}, w=(I, 1), v=(I, H))
def narrow_state(p, s, x):
    g = 0.5 * s["g"] + x @ p["w"]
    h = jax.nn.sigmoid(g) * s["h"] + x @ p["v"]
    return {"h": h, "g": g}, h


@plain({"h": (B, H), "theta": (H,)}, w=(I, H), a=(H,))
def shared_threshold(p, s, x):
    h = 0.9 * s["h"] + x @ p["w"] - s["theta"]
    return {"h": h, "theta": 0.9 * s["theta"] + p["a"] * h.mean(0)}, spike_vjp(h)


@plain({"h": (), "k": (B, H)}, w=(I, H), a=())
def scalar_states(p, s, x):
    k = 0.5 * s["k"] + x @ p["w"] + s["h"]
    return {"h": jnp.zeros(()), "k": k}, p["a"] * k


@plain({"h": (B, H), "idle": (B, H)}, w=(I, H), spare=(H,))
def unused_state(p, s, x):
    h = 0.5 * s["h"] + x @ p["w"]
    return {"h": h}, h + 0 * lax.stop_gradient(p["spare"])


@plain({"h": (B, H), "last": (B, H), "count": (B, H)}, w=(I, H))
def only_written(p, s, x):
    h = 0.5 * s["h"] + x @ p["w"]
    return {"h": h, "last": jnp.tanh(h), "count": s["count"] + h}, h


@plain({"h1": (B, H), "h2": (B, H)}, w=(I, H))
def two_groups_one_weight(p, s, x):
    y = x @ p["w"]
    h1, h2 = 0.5 * s["h1"] + y, 0.9 * s["h2"] * jax.nn.sigmoid(y)
    return {"h1": h1, "h2": h2}, h1 * h2


@plain({"h": (H,), "c": (H,)}, x=(I,), w=(I + H, 4 * H))
def lstm_unbatched(p, s, x):
    i, f, g, o = jnp.split(jnp.concatenate([x, s["h"]]) @ p["w"], 4)
    c = jax.nn.sigmoid(f) * s["c"] + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return {"h": h, "c": c}, h


@plain({"h": (B, H)}, w=(H, I), u=(H,))
def vmapped(p, s, x):
    def one(h, x):
        new = jnp.tanh(p["w"] @ x + p["u"] * h)
        return new, new

    h, out = jax.vmap(one)(s["h"], x)
    return {"h": h}, out


# Cuts
# ---------------------------------------------------------------------------------------------------------------


@plain({"h": (B, H)}, w=(I, H), g=(H,), b=(H,))
def layer_norm(p, s, x):
    y = 0.5 * s["h"] + x @ p["w"]
    centred = y - y.mean(-1, keepdims=True)
    h = jnp.tanh(centred * lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["g"] + p["b"])
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H))
def softmax(p, s, x):
    h = 0.5 * s["h"] + jax.nn.softmax(s["h"]) + x @ p["w"]
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H))
def rolled(p, s, x):
    h = jnp.tanh(0.5 * s["h"] + 0.3 * jnp.roll(s["h"], 1, axis=-1) + x @ p["w"])
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, 1))
def delay_line(p, s, x):
    h = jnp.concatenate([x @ p["w"], s["h"][:, :-1]], axis=1)
    return {"h": h}, h


@plain({"h": (B, 6)}, w=(I, 6))
def max_pool(p, s, x):
    pooled = lax.reduce_window(s["h"], -jnp.inf, lax.max, (1, 3), (1, 1), "SAME")
    h = 0.5 * s["h"] + 0.2 * pooled + x @ p["w"]
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H))
def sorted_state(p, s, x):
    h = 0.5 * s["h"] + 0.2 * jnp.sort(s["h"], axis=-1) + x @ p["w"]
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H), u=(H,))
def mean_field(p, s, x):
    h = jnp.tanh(0.5 * s["h"] + p["u"] * s["h"].mean(-1, keepdims=True) + x @ p["w"])
    return {"h": h}, h


@plain({"h": (B, H)}, w_in=(I, 5), b_in=(5,), w=(5, H), w_out=(H, 2), b_out=(2,))
def encoder_readout(p, s, x):
    h = 0.5 * s["h"] + jnp.tanh(x @ p["w_in"] + p["b_in"]) @ p["w"]
    return {"h": h}, jnp.tanh(h) @ p["w_out"] + p["b_out"]


@plain({"h": (B, H)}, w=(I, H), w_out=(H, 2))
def reads_old_state(p, s, x):
    h = jnp.tanh(0.5 * s["h"] + x @ p["w"])
    return {"h": h}, s["h"] @ p["w_out"] + h[:, :2]


@plain({"h": (B, H), "slow": lambda rng: ShortTermState(_normal(rng, (B, H)))}, w=(I, H))
def carried_elsewhere(p, s, x):
    h = 0.5 * s["h"] + x @ p["w"]
    slow = 0.9 * s["slow"] + 0.1 * h
    return {"h": h, "slow": slow}, h * slow


# Aliases and packed states
# ------------------------------------------------------------------------------------------


@plain({"hc": (B, 2 * H)}, w=(I, 2 * H))
def packed_concat(p, s, x):
    h, c = jnp.split(s["hc"], 2, axis=-1)
    f, g = jnp.split(x @ p["w"], 2, axis=-1)
    c = jax.nn.sigmoid(f) * c + g
    h = jnp.tanh(c + h)
    return {"hc": jnp.concatenate([h, c], axis=-1)}, h


@plain({"hc": (B, H, 2)}, w=(I, H))
def packed_stack(p, s, x):
    h, c = s["hc"][..., 0], s["hc"][..., 1]
    c = 0.5 * c + x @ p["w"]
    h = jnp.tanh(c + h)
    return {"hc": jnp.stack([h, c], axis=-1)}, h


@plain({"h": (1, B, H)}, w=(I, H), w_out=(H, 2))
def leading_axis(p, s, x):
    h = jnp.tanh(0.5 * s["h"][0] + x @ p["w"])
    return {"h": h.reshape(1, B, H)}, h @ p["w_out"]


@plain({"h": (H, B)}, w=(I, H), w_out=(H, 2))
def transposed_alias(p, s, x):
    h = jnp.tanh(0.5 * s["h"].T + x @ p["w"])
    return {"h": h.T}, h @ p["w_out"]


@plain({"h": (B, 2 * H)}, w=(I, 2 * H), w_out=(H, 2))
def sliced_alias(p, s, x):
    h = jnp.tanh(0.5 * s["h"] + x @ p["w"])
    return {"h": h}, h[:, :H] @ p["w_out"]


# Control flow
# -------------------------------------------------------------------------------------------------------


@plain({"h": (B, H)}, w=(I, H), u=(H, H))
def jitted(p, s, x):
    @jax.jit
    def cell(h, x, p):
        return jnp.tanh(x @ p["w"] + jax.jit(lambda a: a @ p["u"])(h))

    h = cell(s["h"], x, p)
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H), w2=(I, H))
def cond(p, s, x):
    y = lax.cond(x.sum() > 0, lambda: jnp.tanh(x @ p["w"]), lambda: x @ p["w2"])
    h = 0.5 * s["h"] + y
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H), b=(H,))
def switch(p, s, x):
    h = lax.switch(
        jnp.int32(jnp.abs(x[0, 0]) * 10) % 3,
        [lambda h: 0.5 * h + x @ p["w"], lambda h: h + p["b"], lambda h: jnp.tanh(h * p["b"])],
        s["h"],
    )
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H), b=(H,))
def short_scan(p, s, x):
    y = x @ p["w"]

    def relax(h, k):
        return jnp.tanh(0.5 * h + y * k + p["b"]), h

    h, seen = lax.scan(relax, s["h"], jnp.arange(1.0, 4.0))
    return {"h": h}, h + seen.sum(0)


@plain({"h": (B, H)}, w=(I, H))
def long_scan(p, s, x):
    total, _ = lax.scan(lambda c, k: (jnp.tanh(c + k * x.sum()), None), 0.0, jnp.arange(40.0))
    h = 0.5 * s["h"] + total * (x @ p["w"])
    return {"h": h}, h


@plain({"h": (B, H)}, w=(I, H))
def while_loop(p, s, x):
    scale = lax.while_loop(lambda c: c < 3.0, lambda c: c * 1.5, jnp.abs(x).sum() + 0.1)
    h = 0.5 * s["h"] + (x @ p["w"]) / scale
    return {"h": h}, h


@plain({"v": (B, H)}, w=(I, H), u=(H, H))
def spiking_jvp(p, s, x):
    v = 0.9 * s["v"] + x @ p["w"] + spike_jvp(s["v"]) @ p["u"]
    return {"v": v - spike_jvp(v)}, spike_jvp(v)


@plain({"v": (B, H)}, w=(I, H))
def spiking_vjp(p, s, x):
    v = 0.9 * s["v"] * (1 - spike_vjp(s["v"])) + x @ p["w"]
    return {"v": v}, spike_vjp(v)


# Modules of brainstate and brainpy
# ----------------------------------------------------------------------------------


# `refill` draws the values; brainstate's own draws cost seconds
ZEROS = {"w_init": jnp.zeros, "b_init": jnp.zeros}


def _cell(cls: type) -> Callable:
    def make(rng: np.random.Generator):
        model = cls(I, H, **ZEROS)
        brainstate.nn.init_all_states(model, batch_size=B)
        return model, (_normal(rng, (B, I)),)

    make.__name__ = cls.__name__
    return module(make)


for _cls in (
    brainstate.nn.ValinaRNNCell,
    brainstate.nn.GRUCell,
    brainstate.nn.MGUCell,
    brainstate.nn.LSTMCell,
):
    _cell(_cls)


class Chain(brainstate.nn.Module):
    """Modules one after the other."""

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        self.order = tuple(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def update(self, x):
        for name in self.order:
            x = getattr(self, name)(x)
        return x


@module
def linear_gru_linear(rng):
    nn = brainstate.nn
    model = Chain(
        encode=nn.Linear(I, 5, **ZEROS),
        cell=nn.GRUCell(5, H, **ZEROS),
        readout=nn.Linear(H, 2, **ZEROS),
    )
    nn.init_all_states(model, batch_size=B)
    return model, (_normal(rng, (B, I)),)


class Vmapped(brainstate.nn.Module):
    """A cell for one example, mapped over the batch with its states by brainstate's own `vmap`."""

    def __init__(self, cell: brainstate.nn.Module) -> None:
        super().__init__()
        self.cell = cell
        self.cell.h = HiddenState(jnp.zeros((B, H)))

    def update(self, x):
        hidden = self.cell.states(HiddenState)
        return brainstate.transform.vmap(self.cell, in_states=hidden, out_states=hidden)(x)


@module
def vmapped_module(rng):
    return Vmapped(brainstate.nn.MGUCell(I, H, **ZEROS)), (_normal(rng, (B, I)),)


class Leaky(brainstate.nn.Module):
    """A leaky integrator of its input."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.h = HiddenState(jnp.zeros(shape))

    def update(self, x):
        self.h.value = jnp.tanh(0.5 * self.h.value + x)
        return self.h.value


@module
def conv_module(rng):
    model = Chain(conv=brainstate.nn.Conv1d((5, I), H, 3, w_init=jnp.zeros), leaky=Leaky((B, 5, H)))
    return model, (_normal(rng, (B, 5, I)),)


@module
def embedding_module(rng):
    model = Chain(
        table=brainstate.nn.Embedding(5, H, embedding_init=jnp.zeros, padding_idx=1),
        leaky=Leaky((B, H)),
    )
    return model, (jnp.asarray([1, 3]),)


def _neuron(name: str) -> Callable:
    def make(rng: np.random.Generator):
        # comes with braintrace, which not every environment of tests/matrix.py has
        pytest.importorskip("brainpy.state")
        import brainpy.state
        import saiunit as u

        class Net(brainstate.nn.Module):
            """A spiking neuron behind a linear layer; its states carry physical units."""

            def __init__(self) -> None:
                super().__init__()
                self.linear = brainstate.nn.Linear(I, H, **ZEROS)
                self.neuron = getattr(brainpy.state, name)(
                    H, V_th=0.5 * u.mV, V_rest=0 * u.mV, V_reset=0 * u.mV
                )

            def update(self, x):
                with brainstate.environ.context(dt=0.5 * u.ms):
                    return self.neuron(self.linear(x) * u.mA)

        model = Net()
        brainstate.nn.init_all_states(model, batch_size=B)
        return model, (_normal(rng, (B, I)),)

    make.__name__ = name
    return module(make)


_neuron("LIF")
_neuron("ALIF")
