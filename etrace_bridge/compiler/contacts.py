"""Contacts: equations where a weight view meets data, `y = op(x, v)`, and their linear form.

Every contact that gets a trace is an einsum over named axes ("letters"),

    y[out] = sum over `view - out` of  phi(x)[feature] * v[view],

where `phi` is the identity for products, the im2col patches of a convolution, the one-hot code of
an embedding, and absent for an element-wise contact (`y` is then the view spread to full shape).
Reshapes bring the arrays to one axis per letter. The trace of a contact has the axes of `out` and of
`view - out`.

`register_contact` adds a primitive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from etrace_bridge._jax_compat import JaxprEqn, bind_equation
from etrace_bridge.compiler.primitives import is_float

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class ContactForm:
    """The linear form of one contact.

    Attributes:
        view_index: which operand of the equation is the weight view.
        x_index: which operand is the data; None for an element-wise contact.
        sizes: size of each letter.
        out: letters of the output.
        view: letters of the weight view.
        feature: letters of `phi(x)`; empty for an element-wise contact.
        phi: data -> features; reshaped, it has one axis per letter of `feature`.
    """

    view_index: int
    x_index: int | None
    sizes: dict[str, int]
    out: str
    view: str
    feature: str = ""
    phi: Callable[[Any], Any] | None = None

    @property
    def contracted(self) -> str:
        """Letters of the view that the output does not have."""
        return "".join(c for c in self.view if c not in self.out)

    @property
    def row(self) -> str:
        """The output letter that counts batch elements where a step keeps them apart: the first
        one longer than one.
        """
        return next((c for c in self.out if self.sizes[c] > 1), self.out[:1])

    @property
    def trace_out(self) -> str:
        """The output's letters in the trace's order: those that the features share come first."""
        shared = [c for c in self.out if c in self.feature]
        return "".join(shared + [c for c in self.out if c not in self.feature])

    @property
    def trace(self) -> str:
        """Letters of the trace."""
        return self.trace_out + self.contracted

    def shape(self, letters: str) -> tuple[int, ...]:
        """Return the sizes of these letters."""
        return tuple(self.sizes[c] for c in letters)

    def features(self, x: jax.Array) -> jax.Array:
        """Return `phi(x)` of one step, with one axis per letter of `feature`."""
        if self.phi is None:
            raise TypeError("an element-wise contact has no features")
        return self.phi(x).reshape(self.shape(self.feature))

    @property
    def trace_size(self) -> int:
        """Number of elements of the trace, for one hidden state."""
        return math.prod(self.shape(self.trace))


ContactRule = Callable[[JaxprEqn, int], "ContactForm | None"]
_RULES: dict[str, ContactRule] = {}


def register_contact(primitive: str, rule: ContactRule) -> None:
    """Teach the compiler how a primitive joins a weight view with data.

    Args:
        primitive: the primitive's name, e.g. `"dot_general"`.
        rule: `(equation, index of the weight operand) -> ContactForm`, or None where this case is
            not linear in the weight.

    Example:
        A primitive `scale_rows(x, w)` with `y[b, h] = x[b, h] * w[h]`:

        >>> def rule(eqn, weight):
        ...     b, h = eqn.outvars[0].aval.shape
        ...     return ContactForm(weight, 1 - weight, {"b": b, "h": h}, out="bh", view="h", feature="bh",
        ...                        phi=lambda x: x)
        >>> register_contact("scale_rows", rule)
    """
    _RULES[primitive] = rule


def contact_form(eqn: JaxprEqn, weight_index: int) -> ContactForm | None:
    """Return the linear form of an equation whose operand `weight_index` is a weight view.

    None if it has none.
    """
    rule = _RULES.get(eqn.primitive.name)
    return rule(eqn, weight_index) if rule is not None else None


def has_contact_rule(eqn: JaxprEqn) -> bool:
    """Return whether there is a contact rule for the primitive."""
    return eqn.primitive.name in _RULES


def _copy(eqn: JaxprEqn, weight: int) -> ContactForm:
    shape = eqn.outvars[0].aval.shape
    letters = _LETTERS[: len(shape)]
    return ContactForm(0, None, dict(zip(letters, shape, strict=True)), out=letters, view=letters)


def _broadcast(eqn: JaxprEqn, weight: int) -> ContactForm:
    shape = eqn.outvars[0].aval.shape
    letters = _LETTERS[: len(shape)]
    inner = eqn.invars[0].aval.shape
    dims = eqn.params["broadcast_dimensions"]
    kept = "".join(letters[d] for d, n in zip(dims, inner, strict=True) if n == shape[d])
    return ContactForm(0, None, dict(zip(letters, shape, strict=True)), out=letters, view=kept)


def _dot_general(eqn: JaxprEqn, weight: int) -> ContactForm:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    names = iter(_LETTERS)
    shapes = [v.aval.shape for v in eqn.invars]
    axes: list[list[str]] = [[""] * len(s) for s in shapes]
    batch = []
    for i, j in zip(lhs_batch, rhs_batch, strict=True):
        axes[0][i] = axes[1][j] = next(names)
        batch.append(axes[0][i])
    for i, j in zip(lhs_contract, rhs_contract, strict=True):
        axes[0][i] = axes[1][j] = next(names)
    free = []
    for side in (0, 1):
        for d, letter in enumerate(axes[side]):
            if not letter:
                axes[side][d] = next(names)
                free.append(axes[side][d])
    sizes = {c: n for side in (0, 1) for c, n in zip(axes[side], shapes[side], strict=True)}
    x = 1 - weight
    return ContactForm(
        weight,
        x,
        sizes,
        out="".join(batch + free),
        view="".join(axes[weight]),
        feature="".join(axes[x]),
        phi=_same,
    )


def _same(x: Any) -> Any:
    return x


def _conv(eqn: JaxprEqn, weight: int) -> ContactForm | None:
    p = eqn.params
    if weight != 1 or p["batch_group_count"] != 1:
        return None
    dn, groups = p["dimension_numbers"], p["feature_group_count"]
    x_shape, w_shape, y_shape = (v.aval.shape for v in (*eqn.invars, eqn.outvars[0]))
    rank = len(x_shape) - 2
    group = "g" if groups > 1 else ""
    sizes = {"b": x_shape[dn.lhs_spec[0]], "g": groups, "o": w_shape[dn.rhs_spec[0]] // groups}
    sizes["c"] = w_shape[dn.rhs_spec[1]]
    spatial = "uvw"[:rank]
    kernel = "xyz"[:rank]
    sizes.update({s: y_shape[d] for s, d in zip(spatial, dn.out_spec[2:], strict=True)})
    sizes.update({k: w_shape[d] for k, d in zip(kernel, dn.rhs_spec[2:], strict=True)})
    window = tuple(w_shape[d] for d in dn.rhs_spec[2:])

    def letters_of(spec: Sequence[int], first: str, second: str, rest: str) -> str:
        by_dim = dict(zip(spec, (first, second, *rest), strict=True))
        return "".join(by_dim[d] for d in range(len(spec)))

    out = letters_of(dn.out_spec, "b", group + "o", spatial)
    view = letters_of(dn.rhs_spec, group + "o", "c", kernel)
    feature = letters_of(dn.out_spec, "b", group + "c" + kernel, spatial)

    dilation, inner, strides = p["rhs_dilation"], p["lhs_dilation"], p["window_strides"]
    whole = "b" + group + "c" + kernel + spatial
    order = [whole.index(c) for c in feature]

    def patches(x: Any) -> Any:
        # Slices of the padded data, one per element of the kernel: JAX's own patches are a
        # convolution again, slow in a loop.
        x = jnp.transpose(x, dn.lhs_spec)
        edges = [
            (0, 0, 0),
            (0, 0, 0),
            *((low, high, d - 1) for (low, high), d in zip(p["padding"], inner, strict=True)),
        ]
        x = lax.pad(x, jnp.zeros((), x.dtype), edges)
        sides = [sizes[s] for s in spatial]

        def part(at: Sequence[int]) -> Any:
            starts = [k * d for k, d in zip(at, dilation, strict=True)]
            ends = [
                s + (n - 1) * step + 1 for s, n, step in zip(starts, sides, strides, strict=True)
            ]
            return lax.slice(x, (0, 0, *starts), (*x.shape[:2], *ends), (1, 1, *strides))

        taken = jnp.stack([part(at) for at in np.ndindex(*window)], axis=2)
        return jnp.transpose(taken.reshape([sizes[c] for c in whole]), order)

    return ContactForm(1, 0, sizes, out=out, view=view, feature=feature, phi=patches)


def _gather(eqn: JaxprEqn, weight: int) -> ContactForm | None:
    """Read rows of a table at integer data."""
    p = eqn.params
    dn = p["dimension_numbers"]
    table, indices = (v.aval.shape for v in eqn.invars)
    one_axis = len(dn.start_index_map) == 1 and tuple(dn.collapsed_slice_dims) == tuple(
        dn.start_index_map
    )
    if weight != 0 or not one_axis or dn.operand_batching_dims:
        return None
    axis = dn.start_index_map[0]
    if any(
        s != n for d, (s, n) in enumerate(zip(p["slice_sizes"], table, strict=True)) if d != axis
    ):
        return None
    view = _LETTERS[: len(table)]
    kept = [c for d, c in enumerate(view) if d != axis]
    batch = _LETTERS[len(table) : len(table) + len(indices) - 1]
    rank = len(eqn.outvars[0].aval.shape)
    offsets = set(dn.offset_dims)
    windows, batches = iter(kept), iter(batch)
    out = "".join(next(windows) if d in offsets else next(batches) for d in range(rank))
    sizes = dict(zip(view, table, strict=True)) | dict(zip(batch, indices[:-1], strict=True))
    rows, clip = table[axis], p["mode"] == lax.GatherScatterMode.CLIP
    dtype = eqn.outvars[0].aval.dtype

    def one_hot(index: Any) -> Any:
        index = index[..., 0]
        return jax.nn.one_hot(jnp.clip(index, 0, rows - 1) if clip else index, rows, dtype=dtype)

    return ContactForm(0, 1, sizes, out=out, view=view, feature=batch + view[axis], phi=one_hot)


def _dynamic_slice(eqn: JaxprEqn, weight: int) -> ContactForm | None:
    """Read one row of a table at one integer."""
    table = eqn.invars[0].aval.shape
    picked = [
        d for d, (s, n) in enumerate(zip(eqn.params["slice_sizes"], table, strict=True)) if s != n
    ]
    if weight != 0 or len(picked) != 1 or eqn.params["slice_sizes"][picked[0]] != 1:
        return None
    axis = picked[0]
    view = _LETTERS[: len(table)]
    dtype = eqn.outvars[0].aval.dtype

    def one_hot(index: Any) -> Any:
        return jax.nn.one_hot(jnp.clip(index, 0, table[axis] - 1), table[axis], dtype=dtype)

    out = "".join(c for d, c in enumerate(view) if d != axis)
    return ContactForm(
        0,
        1 + axis,
        dict(zip(view, table, strict=True)),
        out=out,
        view=view,
        feature=view[axis],
        phi=one_hot,
    )


def _custom_lookup(eqn: JaxprEqn, weight: int) -> ContactForm | None:
    """Read a table by a call with its own derivative (brainstate's `Embedding`).

    That derivative is the feature.
    """
    body = eqn.params["call_jaxpr"].jaxpr
    floats = [e for e in body.eqns if any(is_float(v) for v in e.outvars)]
    if len(floats) != 1 or floats[0].primitive.name != "gather" or len(eqn.invars) != 2:
        return None
    if (
        floats[0].invars[0] is not body.invars[weight]
        or body.outvars[0] is not floats[0].outvars[0]
    ):
        return None
    form = _gather(floats[0], 0)
    if form is None:
        return None
    batch, row = form.feature[:-1], form.feature[-1]
    table = eqn.invars[weight].aval
    first = tuple(slice(None) if c == row else 0 for c in form.view)

    def features(x: Any) -> Any:
        # A cotangent of one at one batch element gives that element's feature, in every column
        def lookup(view: Any) -> Any:
            return bind_equation(eqn, [view, x] if weight == 0 else [x, view])[0]

        count = math.prod(form.shape(batch))
        ones = jnp.eye(count, dtype=table.dtype).reshape(
            count, *(form.sizes[c] if c in batch else 1 for c in form.out)
        )
        _, pull = jax.vjp(lookup, jnp.zeros(table.shape, table.dtype))
        pulled = jax.vmap(
            lambda one: pull(jnp.broadcast_to(one, eqn.outvars[0].aval.shape))[0][first]
        )(ones)
        return pulled.reshape(*form.shape(batch), form.sizes[row])

    return replace(form, view_index=weight, x_index=1 - weight, phi=features)


register_contact("copy", _copy)
register_contact("broadcast_in_dim", _broadcast)
register_contact("dot_general", _dot_general)
register_contact("conv_general_dilated", _conv)
register_contact("gather", _gather)
register_contact("dynamic_slice", _dynamic_slice)
register_contact("custom_vjp_call", _custom_lookup)
