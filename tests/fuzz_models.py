"""Random recurrent torch modules: hypothesis draws the source code of a class, so a failure prints
as code to run.

A program is a stack of layers. Each layer has one or two states and a pool of values of the states'
shape: the states themselves, products of the input and of the states with weights (fused, sliced,
shared, masked, low-rank, normalised), and what random element-wise, mixing, in-place and surrogate
operations make of them. The new states and the output are drawn from the pool.
"""

from __future__ import annotations

import itertools
import linecache
import re
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

STEPS = 4
# Sizes that divide a vector register and sizes that do not: what XLA makes of a loop depends on
# them.
BATCHES, WIDTHS = (2, 2, 3, 4), (3, 3, 4, 5)

_HEADER = """\
class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx, v, slope):
        ctx.save_for_backward(v)
        ctx.slope = slope
        return (v > 0).to(v.dtype)

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        return grad / (1 + ctx.slope * v.abs()) ** 2, None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
"""

# No operation has an infinite slope: where `sqrt(|x|)` meets a masked 0, torch's backward pass
# drops the 0 * inf that a trace, which runs forward, must carry as NaN.
UNARY = (
    "torch.tanh({a})", "torch.sigmoid({a})", "torch.relu({a})", "F.softplus({a})", "torch.sin({a})", "-{a}",
    "torch.exp(-{a}.abs())", "{a} ** 2", "F.leaky_relu({a}, 0.2)", "{a}.clamp(-0.5, 0.5)", "1 - {a}", "({a}.abs() + 0.01).sqrt() + {a}",
    "F.gelu({a})", "torch.where({a} > 0.1, {a}, 0.3 * {a})", "{a}.detach()", "F.hardtanh({a})", "{a} / (1 + {a} * {a})",
    "F.elu({a})", "F.silu({a})", "torch.atan({a})", "torch.log1p({a} * {a})",
    "torch.sigmoid({a}) + (({a} > 0).to({a}.dtype) - torch.sigmoid({a})).detach()",
)  # fmt: skip
BINARY = (
    "{a} + {b}", "{a} * {b}", "{a} - {b}", "torch.maximum({a}, {b})", "torch.where({a} > {b}, {a}, {b} * 0.5)",
    "{a} / (1 + {b}.abs())", "torch.lerp({a}, {b}, 0.3)", "torch.sigmoid({a}) * torch.tanh({b})", "torch.addcmul({a}, {a}, {b})",
    "torch.min({a}, {b})", "torch.where({a}.detach() > 0, {b}, {a})",
    "torch.sigmoid({a}.mean(-1, keepdim=True)) * {b}", "{a} + {b}.sum(-1, keepdim=True) / 3", "torch.logaddexp({a}, {b})",
)  # fmt: skip
# Operations that mix the positions of one value; `-1` is an axis of every layer's shape.
MIXING = (
    "{a} - {a}.mean(-1, keepdim=True)", "torch.softmax({a}, -1)", "{a}.roll(1, -1)", "{a}.flip(-1)", "{a}.cumsum(-1)",
    "F.layer_norm({a}, {a}.shape[-1:])", "{a} * {a}.sum(-1, keepdim=True)", "{a} / (1 + {a}.norm(dim=-1, keepdim=True))",
    "{a} + {a}.amax(-1, keepdim=True)", "torch.cat([{a}[..., 1:], {a}[..., :1]], -1)", "{a}[..., [2, 0, 1] + list(range(3, {a}.shape[-1]))]",
    "{a}.transpose(0, -1).contiguous().transpose(0, -1)", "{a}.reshape(-1).reshape({a}.shape)", "torch.stack([{a}, {a}]).sum(0)",
    "{a} * {a}.var(-1, keepdim=True)", "{a} - torch.logsumexp({a}, -1, keepdim=True)", "{a} * {a}.prod(-1, keepdim=True)",
    "{a} - {a}.amin(-1, keepdim=True)", "F.normalize({a} + 2.0, dim=-1)",
)  # fmt: skip
IN_PLACE = (
    "{v}.add_({b})", "{v}.mul_({b})", "{v}[..., 0] = {b}[..., 1]", "{v}[..., 1:] *= 0.5", "{v} += {b}", "{v}[:, :1].add_({b}[:, :1])",
    "{v}.masked_fill_({b} > 0.5, 0.25)", "{v}.clamp_(-1, 1)", "{v}.copy_({b} + {v})", "{v}.sigmoid_()",
    "{v}.div_(1 + {b}.abs())", "{v}.lerp_({b}, 0.3)", "{v}[..., ::2] = {b}[..., : ({b}.shape[-1] + 1) // 2]", "{v}.sub_({b}.mean(-1, keepdim=True))",
)  # fmt: skip
NEW_STATE = (
    "0.8 * {h} + 0.2 * {v}", "torch.tanh({v})", "torch.sigmoid({d}) * {h} + torch.tanh({v})", "{z} * {h} + (1 - {z}) * torch.tanh({v})",
    "{h} + 0.3 * (torch.tanh({v}) - {h})", "torch.tanh({v} + {d} * {h})", "{s} * {h} + (1 - {s}) * torch.sin({v})",
    "(0.9 * {h} + torch.tanh({v})) * (1 - Spike.apply({v} - 0.3, 2.0))", "0.7 * {h} + torch.tanh({v}) - 0.5 * Spike.apply({h} - 0.4, 5.0).detach()",
)  # fmt: skip


@dataclass(frozen=True)
class Program:
    """The source of a module `Model`, and what it takes.

    Attributes:
        source: Python source, given `torch`, `nn` and `F`.
        style: where the state is: in `"attribute"`s, in `"buffer"`s, or an `"argument"`.
        inputs: `"dense"` (B, width), `"tokens"` (B,) or `"image"` (B, 2, width).
        seed: of weights and data.
        batch: batch size.
        width: units of every layer.
    """

    source: str
    style: str
    inputs: str
    seed: int
    batch: int = 2
    width: int = 3

    def build(self) -> nn.Module:
        """A fresh module, the same weights every time, in float64."""
        model = build_source(self.source).double()
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(0.7 * torch.randn(p.shape, generator=generator))
        return model

    def data(self) -> torch.Tensor:
        """Inputs, time on the first axis."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        if self.inputs == "tokens":
            return torch.randint(0, 4, (STEPS, self.batch), generator=generator)
        shape = (self.width,) if self.inputs == "dense" else (2, self.width)
        return torch.randn(STEPS, self.batch, *shape, generator=generator).double()

    def __repr__(self) -> str:
        sizes = f"batch={self.batch}, width={self.width}"
        return f"Program(style={self.style!r}, inputs={self.inputs!r}, seed={self.seed}, {sizes}):\n{self.source}"


def build_source(source: str) -> nn.Module:
    """The module `Model` of some source, whose lines show in tracebacks and in errors that name a
    line.
    """
    name = f"<program {hash(source)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": nn.functional}
    exec(compile(source, name, "exec"), scope)
    return scope["Model"]()


class _Writer:
    """The lines of a program as they are drawn."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.init: list[str] = []
        self.body: list[str] = []
        self.weights: list[tuple[str, tuple[int, ...]]] = []
        self._count = itertools.count()
        self.batch, self.width = self.pick(BATCHES), self.pick(WIDTHS)

    def pick(self, options: Any) -> Any:
        """One of several options."""
        return self.draw(st.sampled_from(list(options)))

    def chance(self, one_in: int) -> bool:
        """True now and then; False is what shrinking prefers."""
        return self.draw(st.integers(0, one_in - 1)) == one_in - 1

    def parameter(self, shape: tuple[int, ...], share: bool = True) -> str:
        """A parameter of this shape: a new one, or one that is there already."""
        known = [name for name, other in self.weights if other == shape]
        if share and known and self.chance(4):
            return self.pick(known)
        name = f"w{next(self._count)}"
        self.init.append(f"self.{name} = nn.Parameter(torch.zeros({shape}))")
        self.weights.append((f"self.{name}", shape))
        return f"self.{name}"

    def value(self, expression: str) -> str:
        """Names an expression."""
        name = f"v{next(self._count)}"
        self.body.append(f"{name} = {expression}")
        return name


def _matrix(w: _Writer, rows: int, columns: int) -> str:
    """An expression for a (rows, columns) matrix made of parameters."""
    kind = w.pick(
        ("plain", "plain", "plain", "sliced", "transposed", "sum", "masked", "low_rank", "normed")
    )
    if kind == "sliced":
        return f"{w.parameter((rows + 1, columns + 1))}[1:, :{columns}]"
    if kind == "transposed":
        return f"{w.parameter((columns, rows))}.t()"
    if kind == "sum":
        return f"({w.parameter((rows, columns))} + {w.parameter((rows, columns), share=False)})"
    if kind == "masked":
        name = f"m{next(w._count)}"
        w.init.append(
            f'self.register_buffer("{name}", (torch.arange({rows * columns}).reshape({rows}, {columns}) % 3 > 0).float())'
        )
        return f"({w.parameter((rows, columns))} * self.{name})"
    if kind == "low_rank":
        return f"({w.parameter((rows, 2))} @ {w.parameter((2, columns))})"
    if kind == "normed":
        v = w.parameter((rows, columns))
        return f"({w.parameter((rows, 1))} * {v} / {v}.norm(dim=1, keepdim=True))"
    return w.parameter((rows, columns))


def _dense(w: _Writer, source: str, fused: bool) -> list[str]:
    """Products of `source` with weights, each of its shape (B, width)."""
    width = out = w.width
    if fused:
        n = w.pick((2, 3))
        bias = f", {w.parameter((n * out,))}" if w.chance(2) else ""
        names = [f"v{next(w._count)}" for _ in range(n)]
        product = f"F.linear({source}, {_matrix(w, n * out, width)}{bias})"
        cut = w.pick((f".chunk({n}, -1)", f".split({out}, 1)", f".view(-1, {n}, {out}).unbind(1)"))
        w.body.append(f"{', '.join(names)} = {product}{cut}")
        return names
    form = w.pick(("linear", "linear", "matmul", "einsum", "cat"))
    if form == "matmul":
        return [w.value(f"{source} @ {_matrix(w, width, out)}")]
    if form == "einsum":
        return [w.value(f'torch.einsum("bi,oi->bo", {source}, {_matrix(w, out, width)})')]
    if form == "cat":
        return [
            w.value(
                f"F.linear(torch.cat([{source}, {source} * 0.5], -1), {_matrix(w, out, 2 * width)})"
            )
        ]
    bias = f", {w.parameter((out,))}" if w.chance(2) else ""
    return [w.value(f"F.linear({source}, {_matrix(w, out, width)}{bias})")]


def _candidate(w: _Writer, source: str, state: str) -> str:
    """What a GRU makes of an input and a state."""
    given, kept = ([f"v{next(w._count)}" for _ in range(3)] for _ in range(2))
    for gates, of in ((given, source), (kept, state)):
        w.body.append(
            f"{', '.join(gates)} = F.linear({of}, {w.parameter((3 * w.width, w.width))}).chunk(3, "
            "-1)"
        )
    (r, z, n), (hr, hz, hn) = given, kept
    new = w.value(f"torch.tanh({n} + torch.sigmoid({r} + {hr}) * {hn})")
    return w.value(f"({state} - {new}) * torch.sigmoid({z} + {hz}) + {new}")


def _convolution(w: _Writer, source: str, fused: bool) -> list[str]:
    """Convolutions of `source` (B, 2, width), each of the same shape."""
    if fused:
        names = [f"v{next(w._count)}" for _ in range(2)]
        w.body.append(
            f"{', '.join(names)} = F.conv1d({source}, {w.parameter((4, 2, 3))}, "
            f"{w.parameter((4,))}, padding=1).chunk(2, 1)"
        )
        return names
    return [w.value(f"F.conv1d({source}, {w.parameter((2, 2, 3))}, padding=1)")]


def _operations(w: _Writer, pool: list[str], fresh: list[str], protected: list[str]) -> None:
    """Random operations on the pool; values in `protected` are never written in place."""
    for _ in range(w.draw(st.integers(0, 4))):
        kind = w.pick(("unary", "binary", "binary", "parameter", "mixing", "in_place", "spike"))
        a, b = w.pick(pool), w.pick(pool)
        if kind == "unary":
            new = w.value(w.pick(UNARY).format(a=a))
        elif kind == "binary":
            new = w.value(w.pick(BINARY).format(a=a, b=b))
        elif kind == "parameter":
            shape = w.pick(((), (w.width,), (1, w.width)))
            p = w.parameter(shape)
            new = w.value(
                w.pick(
                    (
                        f"{a} * {p}",
                        f"{a} + {p}",
                        f"{a} * torch.sigmoid({p})",
                        f"torch.tanh({a} - {p})",
                    )
                )
            )
        elif kind == "mixing":
            new = w.value(w.pick(MIXING).format(a=a))
        elif kind == "spike":
            new = w.value(f"Spike.apply({a} - 0.2, 3.0)")
        else:
            new = w.value(f"{a} * 1.0" if w.chance(2) else f"{a}.clone()")
            w.body.append(w.pick(IN_PLACE).format(v=new, b=b))
        pool.append(new)
        fresh.append(new)


def _layer(
    w: _Writer, n: int, source: str, shape: tuple[int, ...]
) -> tuple[str, list[tuple[str, str, str]]]:
    """One layer: its output, and (state, initial shape, new value) of its states."""
    conv = len(shape) == 2
    form = "plain" if conv else w.pick(("plain", "plain", "two", "packed", "pair"))
    size = ", ".join(map(str, shape))
    if form == "packed":
        w.body.append(f"a{n}, b{n} = h{n}.chunk(2, -1)")
        names, states = [f"a{n}", f"b{n}"], [(f"h{n}", str(2 * w.width))]
    elif form == "pair":
        w.body.append(f"a{n}, b{n} = h{n}[..., 0], h{n}[..., 1]")
        names, states = [f"a{n}", f"b{n}"], [(f"h{n}", f"{size}, 2")]
    elif form == "two":
        names, states = [f"h{n}", f"c{n}"], [(f"h{n}", size), (f"c{n}", size)]
    else:
        names, states = [f"h{n}"], [(f"h{n}", size)]
    pool = list(names)
    fused = w.chance(3)
    pool += _convolution(w, source, fused) if conv else _dense(w, source, fused)
    if w.chance(2):
        recurrent = w.pick(pool)
        pool += (
            _convolution(w, recurrent, w.chance(3)) if conv else _dense(w, recurrent, w.chance(3))
        )
    if not conv and w.chance(4):
        pool.append(_candidate(w, source, names[0]))
    fresh = [v for v in pool if v not in names]
    _operations(w, pool, fresh, names)
    new = []
    for name in names:
        form_of_state = w.pick(NEW_STATE)
        gate = w.value(f"torch.sigmoid({w.pick(fresh)})") if "{z}" in form_of_state else ""
        decay = w.parameter(w.pick(((w.width,), ()))) if "{d}" in form_of_state else ""
        scalar = f"torch.sigmoid({w.parameter(())})" if "{s}" in form_of_state else ""
        made = w.value(form_of_state.format(v=_joined(w, fresh), h=name, z=gate, d=decay, s=scalar))
        new.append(made)
        fresh.append(made)
    if form == "packed":
        stored = [(f"h{n}", states[0][1], w.value(f"torch.cat([{new[0]}, {new[1]}], -1)"))]
    elif form == "pair":
        stored = [(f"h{n}", states[0][1], w.value(f"torch.stack([{new[0]}, {new[1]}], -1)"))]
    else:
        stored = [(name, init, made) for (name, init), made in zip(states, new, strict=True)]
    out = new[0] if not w.chance(4) else w.pick([*new, *pool])
    return out, stored


def _joined(w: _Writer, fresh: list[str]) -> str:
    """A value of the pool, joined with others that nothing has used yet, so that most of a program
    matters.
    """
    used = " ".join(line.partition("=")[2] or line for line in w.body)
    idle = [v for v in fresh if not re.search(rf"\b{v}\b", used)]
    chosen = (
        list(dict.fromkeys([*idle[-3:], w.pick(fresh)])) if not w.chance(4) else [w.pick(fresh)]
    )
    return "(" + w.pick((" + ", " + ", " * ", " - ")).join(chosen) + ")"


INPUTS, STYLES = ("dense", "tokens", "image"), ("attribute", "argument", "buffer")


@st.composite
def programs(draw: Any, inputs: str | None = None, style: str | None = None) -> Program:
    """A random recurrent torch module; its kind of input and the style of its state are drawn
    unless they are given.
    """
    w = _Writer(draw)
    inputs = inputs or w.pick(("dense", "dense", "dense", "tokens", "image"))
    if inputs == "tokens":
        source = w.value(f"F.embedding(x, {w.parameter((4, w.width))})")
    elif inputs == "image" and w.chance(2):
        source = w.value(f"F.conv1d(x, {w.parameter((1, 2, 3))}, padding=1).flatten(1)")
    else:
        source = "x"
    shape = (2, w.width) if inputs == "image" and source == "x" else (w.width,)
    states: list[tuple[str, str, str]] = []
    outputs = []
    for n in range(draw(st.integers(1, 2)) + w.chance(6)):
        source, stored = _layer(w, n, source, shape)
        states += stored
        outputs.append(source)
    readout = f"F.linear({source}, {w.parameter((2, w.width))})" if w.chance(2) else source
    result = f"{readout}, {outputs[0]}" if w.chance(3) else readout
    style = style or w.pick(STYLES)
    return Program(
        _HEADER + _assemble(w, states, result, style),
        style,
        inputs,
        draw(st.integers(0, 63)),
        w.batch,
        w.width,
    )


def _assemble(w: _Writer, states: list[tuple[str, str, str]], result: str, style: str) -> str:
    names = [name for name, _, _ in states]
    init, start, end = list(w.init), [], []
    if style == "argument":
        zeros = ", ".join(
            f"torch.zeros({w.batch}, {shape}, dtype=self.{w.weights[0][0][5:]}.dtype)"
            for _, shape, _ in states
        )
        start = [
            f"if state is None:\n            state = ({zeros},)",
            f"({', '.join(names)},) = state",
        ]
        packed = f"({result})" if "," in result else result
        # Assigned to its argument: an output that is built like the state could be taken for it,
        # and `wrap` would ask.
        end = [f"state = ({', '.join(new for _, _, new in states)},)", f"return {packed}, state"]
        signature = "def forward(self, x, state=None):"
    else:
        for name, shape, new in states:
            if style == "buffer":
                # Different everywhere: a normalised row of equal numbers would be rounding errors
                # over nearly nothing.
                values = f"torch.linspace(-0.5, 0.6, {w.batch} * torch.ones({shape}).numel()).reshape({w.batch}, {shape})"
                init.append(f'self.register_buffer("{name}", {values})')
                start.append(f"{name} = self.{name}")
            else:
                init.append(f"self.{name} = None")
                start.append(
                    f"{name} = torch.zeros({w.batch}, {shape}, dtype={w.weights[0][0]}.dtype) if "
                    f"self.{name} is None else self.{name}"
                )
            end.append(f"self.{name} = {new}")
        end.append(f"return {result}")
        signature = "def forward(self, x):"
    lines = [f"        {line}" for line in init] + ["", f"    {signature}"]
    lines += [f"        {line}" for line in (*start, *w.body, *end)]
    return "\n".join(lines) + "\n"
