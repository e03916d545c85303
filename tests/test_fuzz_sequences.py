"""Random whole-sequence models, with code over time around the recurrence: refused, or torch's
outputs, losses and gradients.
"""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import brainstate
import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import etrace_bridge as eb
from fuzz_models import build_source
from fuzz_record import record
from test_user_mode import FLOATS, WHOLE

T, B, WIDTH, OUT = 4, 2, 3, 3
TOKENS = [form for form in WHOLE if "uint8" not in form]
RUNS = max(8, int(os.environ.get("FUZZ_PROGRAMS", "0")) // 10)

# What is done to all steps at once, each step by itself; `{a}` is (T, B, WIDTH), or (B, T, WIDTH)
# for a batch-first layer.
POINTWISE = (
    "torch.tanh(self.pre({a}))", "{a} * self.scale", "F.layer_norm({a}, (3,))", "self.pre({a}).relu() + {a}", "{a} / (1 + {a}.abs())",
    "torch.cat([{a}, {a} ** 2], -1)[..., 1:4]", "torch.softmax({a}, -1)", "{a} - {a}.mean(-1, keepdim=True)", "F.hardsigmoid({a})",
    "torch.einsum('abi,oi->abo', {a}, self.pre.weight)", "{a}.flatten(0, 1).mul(2).view({a}.shape)", "F.softplus({a}, 1.3) - 0.1",
)  # fmt: skip


# What must have been drawn in many programs: layers, layouts, operations, dtypes and sources of inputs,
# JAX's modes.
KINDS = {
    "nn.GRU(", "nn.LSTM(", "nn.RNN(", "num_layers=2", "batch_first=True", "for step in",
    "64-bit mode", "32-bit mode", *(operation.format(a="a") for operation in POINTWISE),
    *(f"floats as {form}" for form in FLOATS), *(f"tokens as {form}" for form in TOKENS),
}  # fmt: skip


@dataclass(frozen=True)
class SequenceProgram:
    """A module over whole sequences: its source, the layout and kind of its inputs, and JAX's mode."""

    source: str
    batch_first: bool
    tokens: bool
    double: bool
    form: str
    seed: int

    def kinds(self) -> set[str]:
        """What there is to draw, and what of it this program has."""
        form = f"{'tokens' if self.tokens else 'floats'} as {self.form}"
        mode = "64-bit mode" if self.double else "32-bit mode"
        return {form, mode, *(kind for kind in KINDS if kind in self.source)}

    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        model = build_source(self.source)
        return model.double() if self.double else model


@st.composite
def sequence_programs(draw: Any) -> SequenceProgram:
    """A recurrent layer of torch, or a loop over a cell, with element-wise code over all steps before
    and after it.
    """
    layer = draw(st.sampled_from(["nn.GRU", "nn.LSTM", "nn.RNN", "loop"]))
    batch_first, tokens = draw(st.booleans()), draw(st.sampled_from([False, False, True]))
    lines = ["a = self.embed(x)" if tokens else "a = x"]
    for _ in range(draw(st.integers(0, 2))):
        lines.append(f"a = {draw(st.sampled_from(POINTWISE)).format(a='a')}")
    given = draw(st.sampled_from(["a", "a", "a * 1.5"]))
    if layer == "loop":
        axis = int(batch_first)
        lines += [
            f"h, made = a.new_zeros(a.shape[{1 - axis}], 3), []",
            f"for step in ({given}).unbind({axis}):",
            "    h = self.cell(step, h)",
            "    made.append(h)",
            f"a = torch.stack(made, {axis})",
        ]
    else:
        lines.append(f"a = self.layer({given})[0]")
    for _ in range(draw(st.integers(0, 2))):
        lines.append(f"a = {draw(st.sampled_from(POINTWISE)).format(a='a')}")
    layers = draw(st.sampled_from([1, 1, 2]))
    made = f"{layer}(3, 3, num_layers={layers}, batch_first={batch_first})"
    made = "nn.Identity()" if layer == "loop" else made
    body = "\n        ".join([*lines, "return self.out(a)"])
    source = (
        "class Model(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.layer = {made}\n"
        "        self.cell = nn.GRUCell(3, 3)\n"
        "        self.pre, self.out, self.embed = nn.Linear(3, 3), nn.Linear(3, 3), "
        "nn.Embedding(4, 3)\n"
        "        self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 1.5]))\n\n"
        "    def forward(self, x):\n"
        f"        {body}\n"
    )
    kinds = TOKENS if tokens else list(FLOATS)
    return SequenceProgram(
        source,
        batch_first,
        tokens,
        draw(st.booleans()),
        draw(st.sampled_from(kinds)),
        draw(st.integers(0, 99)),
    )


def disagreements(
    model: nn.Module, xs: Tensor, given_xs: Any, batch_first: bool, tolerance: float
) -> list[str]:
    """Where the learner's outputs and exact gradients are not torch's, on one sequence."""
    shape = (B, T, OUT) if batch_first else (T, B, OUT)
    targets = torch.randn(shape, dtype=next(model.parameters()).dtype)
    expected = model(xs)
    axis = 1 if batch_first else 0
    torch.stack(
        [F.mse_loss(expected.select(axis, t), targets.select(axis, t)) for t in range(T)]
    ).mean().backward()
    learner = eb.OnlineLearner(model, "rtrl", F.mse_loss, chunk=2)
    result = learner.gradients(given_xs, targets)
    pairs = {"the output": (result.outputs, expected.detach())}
    pairs |= {
        name: (result.grads[name], p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    assert len(pairs) > 4 and max(float(g.abs().max()) for _, g in pairs.values()) > 1e-4
    far = lambda a, b: float((a - b).abs().max()) > tolerance * max(1.0, float(b.abs().max()))
    return [
        name
        for name, (found, wanted) in pairs.items()
        if found.shape != wanted.shape or far(found, wanted)
    ]


@pytest.mark.fuzz
def test_pointwise_code_around_the_recurrence() -> None:
    """Code that treats every step by itself must be accepted, and right, on arrays of any kind and
    in both JAX modes.
    """
    ran: list[SequenceProgram] = []
    drawn: Counter[str] = Counter()

    @hypothesis.settings(max_examples=RUNS)
    @given(sequence_programs())
    def run(program: SequenceProgram) -> None:
        mode = nullcontext() if program.double else brainstate.environ.context(precision=32)
        with mode:
            torch.manual_seed(program.seed + 1)
            model = program.build()
            lead = (B, T) if program.batch_first else (T, B)
            xs = (
                torch.randint(0, 4, lead)
                if program.tokens
                else torch.randn(*lead, WIDTH, dtype=next(model.parameters()).dtype)
            )
            given_xs = (WHOLE if program.tokens else FLOATS)[program.form](xs)
            wrong = disagreements(
                model, xs, given_xs, program.batch_first, 1e-9 if program.double else 1e-5
            )
        assert not wrong, f"{program}\n{wrong}"
        ran.append(program)
        drawn.update(program.kinds())
        record("test_pointwise_code_around_the_recurrence", "programs")

    run()
    assert len({p.double for p in ran}) == 2 and len({p.source for p in ran}) >= 5
    if len(ran) >= 200:  # with `make fuzz`: everything that can be drawn has been
        missing = sorted(KINDS - drawn.keys())
        assert not missing, f"never drawn in {len(ran)} programs: {missing}"


# ---- code that mixes time: refused, or right


class Around(nn.Module):
    """A GRU with some code over time before it."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, OUT)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, padding_mode="replicate")
        self.norm = nn.InstanceNorm1d(WIDTH)
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def before(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(self.before(x))[0])


def _attention(x: Tensor) -> Tensor:
    keys = x.transpose(0, 1)
    return (torch.softmax(keys @ keys.transpose(1, 2), -1) @ keys).transpose(0, 1)


MIXES = {
    "mean over time": lambda self, x: x - x.mean(0, keepdim=True),
    "sum over time": lambda self, x: x + x.sum(0, keepdim=True),
    "instance norm": lambda self, x: self.norm(x.permute(1, 2, 0)).permute(2, 0, 1),
    "batch norm in training": lambda self, x: self.batch_norm(x.flatten(0, 1)).view_as(x),
    "attention": lambda self, x: x + _attention(x),
    "replicate-padded convolution": lambda self, x: self.conv(x.permute(1, 2, 0)).permute(2, 0, 1),
    "token shift": lambda self, x: x + torch.cat([x[:1], x[:-1]]),
    "shift by zeros": lambda self, x: x + torch.cat([torch.zeros_like(x[:1]), x[:-1]]),
    "cumulative sum": lambda self, x: x.cumsum(0),
    "flip": lambda self, x: x.flip(0),
    "roll": lambda self, x: x.roll(1, 0),
    "last step": lambda self, x: x - x[-1:],
    "softmax over time": lambda self, x: torch.softmax(x, 0),
}


@pytest.mark.parametrize("name", MIXES)
def test_code_that_mixes_time_is_refused_or_right(name: str) -> None:
    model = type("Mixed", (Around,), {"before": MIXES[name]})().double()
    xs = torch.randn(T, B, WIDTH).double()
    try:
        wrong = disagreements(model, xs, xs, False, 1e-9)
    except eb.BridgeError:
        return
    assert wrong == []
