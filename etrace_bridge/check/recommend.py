"""`recommend`: the most faithful rule whose program fits into a memory budget."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from etrace_bridge._bytes import parse_bytes
from etrace_bridge._errors import InputError
from etrace_bridge._tables import html_table, text_table
from etrace_bridge.check.module_reference import preserved_states
from etrace_bridge.check.output_files import write_json
from etrace_bridge.check.precision import float_dtype, in_precision
from etrace_bridge.check.text import number, size
from etrace_bridge.frontend import BridgedModule, map_input, to_jax, wrap
from etrace_bridge.learning.compiled_step import CompiledStep
from etrace_bridge.learning.footprint import (
    GradientProgram,
    compile_gradients,
    rule_bytes,
    tree_bytes,
)
from etrace_bridge.learning.inputs import as_array, as_inputs
from etrace_bridge.lowering import announcing
from etrace_bridge.rules import BPTT, Rule, make_rule, rule_names, rule_text
from etrace_bridge.schedule.chunk_plan import choose_chunk, kept_bytes

_TRIES = 4  # programs compiled in search of a chunk that fits
_HEADER = ("rule", "cosine to BPTT", "memory", "chunk", "fits")
_REFERENCE_LIMIT = 4 * 10**9  # bytes that the reference, BPTT over the whole sequence, may take


@dataclass(frozen=True)
class Candidate:
    """One rule that was tried.

    Attributes:
        rule: its name, with options that are not the default, as `rule=` accepts it.
        memory: bytes of its compiled program, inputs aside; for a rule that was not compiled, of
            its trace alone.
        chunk: steps in a chunk.
        fits: whether that is within the budget.
        cosine: cosine of its gradient to BPTT's on a random sequence; None if it was not run.
        compiled: whether `memory` was counted for a compiled program.
    """

    rule: str
    memory: int
    chunk: int
    fits: bool
    cosine: float | None
    compiled: bool


@dataclass(frozen=True)
class Recommendation:
    """The recommended rule, and its alternatives.

    Attributes:
        rule: the recommended rule, as `rule=` accepts it; None if none fits.
        chunk: its chunk, for `OnlineLearner(..., chunk=...)`.
        memory: bytes of its compiled program.
        budget: bytes allowed.
        steps: length of the sequence that the programs were compiled for.
        candidates: every rule that was looked at, most faithful first.
    """

    rule: str | None
    chunk: int | None
    memory: int | None
    budget: int
    steps: int
    candidates: tuple[Candidate, ...]

    @property
    def ok(self) -> bool:
        """Whether some rule fits."""
        return self.rule is not None

    def __str__(self) -> str:
        return "\n".join([self._headline(), "", *text_table(_HEADER, self._rows())])

    def _headline(self) -> str:
        if self.rule is None:
            return (
                f"No rule fits into {size(self.budget)}. Raise the budget, or use a smaller batch."
            )
        return (
            f'Use rule="{self.rule}", chunk={self.chunk}: {size(self.memory)} of {size(self.budget)} for a sequence of {self.steps} '
            "steps, inputs aside."
        )

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for c in self.candidates:
            memory = size(c.memory) if c.compiled else f"at least {size(c.memory)}"
            cosine = "-" if c.cosine is None else number(c.cosine, 5)
            rows.append((c.rule, cosine, memory, str(c.chunk), "yes" if c.fits else "no"))
        return rows

    def _repr_html_(self) -> str:
        return html_table(self._headline(), _HEADER, self._rows())

    def __repr__(self) -> str:
        return str(self)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        own = {key: getattr(self, key) for key in ("rule", "chunk", "memory", "budget", "steps")}
        return {**own, "candidates": [vars(c) for c in self.candidates]}

    def to_json(self, path: Any = None) -> str:
        """Return the recommendation as JSON, and write it to `path` if one is given."""
        return write_json(self.to_dict(), path)


@announcing("comparing rules …")
def recommend(
    model: nn.Module | brainstate.nn.Module,
    x: Any,
    budget: int | float | str = "500MB",
    *,
    rules: Sequence[str | Rule] | None = None,
    steps: int = 50,
    state: Any = None,
    sequence: bool | None = None,
    batch_first: bool | None = None,
) -> Recommendation:
    """Pick the most faithful online rule for a model whose memory stays within a budget.

    Each rule's program for a sequence, with its trace, is compiled, so its bytes are known and not
    estimated. Rules that fit are run once on random inputs. The one whose gradient is closest in
    direction to BPTT's wins; of equally close ones, the one that needs less memory. A rule with a
    free size, such as the rank of `low_rank`, is tried from the largest size down until it fits, if
    it is given by its bare name.

    Args:
        model: the torch model or a brainstate module; it is left as it was.
        x: one time step of input, `(batch, …)`, or a tuple or dict of inputs.
        budget: bytes, or text such as `"500MB"`.
        rules: the rules to look at; by default every registered rule but those that truncate, `bptt` and
            `fptt`.
        steps: length of the sequences to learn from.
        state: as for `wrap`.
        sequence: as for `wrap`.
        batch_first: as for `wrap`.
    """
    if isinstance(model, BridgedModule) or not isinstance(model, (nn.Module, brainstate.nn.Module)):
        raise InputError(
            f"`recommend` takes a torch or brainstate module, not a `{type(model).__name__}`."
        )
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 2:
        raise InputError(f"`steps` is {steps!r}; it must be a number of time steps, at least 2.")
    limit = parse_bytes(budget)
    names = rules if rules is not None else [n for n in rule_names() if not make_rule(n).truncates]
    chosen = [list(make_rule(r).variants()) if r in rule_names() else [make_rule(r)] for r in names]
    if not isinstance(model, nn.Module):
        with preserved_states(model):
            trial = _Trial(model, [jnp.asarray(as_array(a)) for a in as_inputs(x)], steps)
            candidates = _candidates(trial, chosen, limit)
        return _recommendation(candidates, limit, steps)
    precision = float_dtype(model)
    with in_precision(model, precision) if precision == torch.float64 else contextlib.nullcontext():
        example = map_input(lambda a: _in_model_dtype(a, precision), x)
        net = wrap(model, state, example_input=example, sequence=sequence, batch_first=batch_first)
        inputs = [to_jax(a) for a in net.read_inputs(example)]
        candidates = _candidates(_Trial(net, inputs, steps), chosen, limit)
    return _recommendation(candidates, limit, steps)


def _candidates(trial: _Trial, chosen: Sequence[list[Rule]], limit: int) -> list[Candidate]:
    reference = trial.reference()
    return [_largest_fitting(trial, variants, limit, reference) for variants in chosen]


def _recommendation(candidates: Sequence[Candidate], limit: int, steps: int) -> Recommendation:
    order = sorted(
        candidates,
        key=lambda c: (
            not c.fits,
            -round(c.cosine, 6) if c.cosine is not None else math.inf,
            c.memory,
        ),
    )
    best = order[0] if order and order[0].fits else None
    return Recommendation(
        best and best.rule, best and best.chunk, best and best.memory, limit, steps, tuple(order)
    )  # fmt: skip


def _in_model_dtype(x: Any, precision: torch.dtype) -> torch.Tensor:
    tensor = x.detach() if isinstance(x, torch.Tensor) else torch.tensor(np.asarray(x))
    return tensor.to(precision) if tensor.is_floating_point() else tensor


class _Trial:
    """A random sequence for a model, and its step compiled."""

    def __init__(self, net: brainstate.nn.Module, inputs: Sequence[Any], steps: int) -> None:
        self.steps = steps
        self.compiled = CompiledStep(net, inputs)
        rng = np.random.default_rng(0)
        self.args = [jnp.asarray(_vary(np.asarray(x), steps, rng)) for x in inputs]
        self.targets = [
            jnp.asarray(rng.standard_normal((steps, *v.aval.shape)).astype(v.aval.dtype))
            for v in self.compiled.program.out_vars
            if jnp.issubdtype(v.aval.dtype, jnp.floating)
        ]

    def compile(self, rule: Rule, chunk: int) -> GradientProgram:
        """Compile the program of the sequence's gradients."""
        return compile_gradients(self.compiled, rule, squared_error, self.args, self.targets, chunk)

    def run(self, program: GradientProgram) -> np.ndarray:
        """Return all gradients as one vector."""
        grads = program.call(
            self.compiled.read()[0], self.compiled.initial, self.args, self.targets
        )[0]
        return np.concatenate([np.asarray(g, np.float64).reshape(-1) for g in grads])

    def reference(self) -> np.ndarray | None:
        """Return BPTT's gradient; None if its activations need too much memory."""
        program = self.compile(BPTT(), self.steps)
        return self.run(program) if program.memory <= _REFERENCE_LIMIT else None


def squared_error(output: Any, targets: Any) -> Any:
    """Return the squared error of all floating outputs, each against its own target."""
    floats = [o for o in jax.tree.leaves(output) if jnp.issubdtype(o.dtype, jnp.floating)]
    return sum(jnp.mean((o - t) ** 2) for o, t in zip(floats, targets, strict=True))


def _vary(x: np.ndarray, steps: int, rng: np.random.Generator) -> np.ndarray:
    """Make a sequence of different steps from an example."""
    if x.dtype.kind != "f":
        return np.stack([np.roll(x, k, 0) if x.ndim else x for k in range(steps)])
    noise = rng.standard_normal((steps, *x.shape))
    spread = float(x.std()) or 1.0
    return (x + 0.5 * spread * noise).astype(x.dtype)


def _largest_fitting(
    trial: _Trial, variants: Sequence[Rule], limit: int, reference: np.ndarray | None
) -> Candidate:
    """Return the first variant of a rule that fits, or the last one."""
    for variant in variants:
        candidate = _look_at(trial, variant, limit, reference)
        if candidate.fits:
            break
    return candidate


def _look_at(trial: _Trial, rule: Rule, limit: int, reference: np.ndarray | None) -> Candidate:
    name, steps, compiled = rule_text(rule), trial.steps, trial.compiled
    alone = rule_bytes(compiled, rule) + tree_bytes(compiled.read()[0])
    chunk = steps
    # At least two chunks: a stream needs the trace, which a single chunk does without
    if not rule.truncates:
        chunk = min(choose_chunk(compiled.program, rule, steps, "auto", None), math.ceil(steps / 2))
    if alone > limit:
        return Candidate(name, alone, chunk, False, None, False)
    program = trial.compile(rule, chunk)
    for _ in range(_TRIES):
        if program.memory <= limit or chunk == 1:
            break
        spare = program.memory - limit
        chunk = max(
            1,
            min(chunk // 2, chunk - math.ceil(spare / max(kept_bytes(compiled.program, True), 1))),
        )
        program = trial.compile(rule, chunk)
    fits = program.memory <= limit
    cosine = _cosine(trial.run(program), reference) if fits and reference is not None else None
    return Candidate(name, program.memory, chunk, fits, cosine, True)


def _cosine(a: np.ndarray, b: np.ndarray) -> float | None:
    scale = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / scale if scale and math.isfinite(scale) else None
