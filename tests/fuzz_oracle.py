"""What a random program must satisfy, measured with one traced function per program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import torch

import etrace_bridge as eb
from etrace_bridge.compiler.diagnostics import show_path
from etrace_bridge.lowering import jit
from etrace_bridge.rules import DRTRL, RTRL, Carry, Chunk, Rule
from etrace_bridge.schedule.chunk import run_chunk
from etrace_bridge.schedule.chunk_plan import divide
from etrace_bridge.schedule.sequence import run_sequence
from etrace_bridge.step.program import StepProgram, make_program
from fuzz_models import STEPS, Program
from oracle_compiler import Unrolled
from run_in_numpy import run_in_numpy

EXACT = ("rtrl", "d_rtrl, chunk")  # the latter over one chunk: plain reverse mode


def runs_of(seed: int) -> dict[str, tuple[Rule, int]]:
    """Three rules for one program, each over the whole sequence in chunks of K steps; the seed
    varies rules and K.
    """
    third = (
        ("d_rtrl, core", DRTRL(credit="core", upstream="step"), 1),
        ("d_rtrl, core", DRTRL(credit="core", upstream="step"), 2),
        ("d_rtrl, step, whole", DRTRL(upstream="step"), STEPS),
        ("d_rtrl, chunk", DRTRL(credit="chunk"), STEPS),
    )[seed % 4]
    return {
        "rtrl": (RTRL(), 1 + seed // 4 % 3),
        "d_rtrl, step": (DRTRL(upstream="step"), 1 + seed // 16 % 3),
        third[0]: third[1:],
    }


@dataclass(frozen=True)
class Measured:
    """One program, run by torch, by the rules and by brute force.

    Attributes:
        graph: the compiled step.
        torch_outputs: (T, …) of each output tensor.
        outputs: the same by the first rule.
        torch_grads: BPTT, by parameter name; None where torch finds no path.
        grads: by run, then by parameter name.
        brute: D-RTRL by its definition, by credit, then by parameter name; empty if no run needs it.
    """

    graph: eb.ETraceGraph
    torch_outputs: list[np.ndarray]
    outputs: list[np.ndarray]
    torch_grads: dict[str, np.ndarray | None]
    grads: dict[str, dict[str, np.ndarray]]
    brute: dict[str, dict[str, np.ndarray]]


def torch_loss(outputs: list[torch.Tensor]) -> torch.Tensor:
    """The loss of `Unrolled`, on torch tensors."""
    total = torch.zeros((), dtype=torch.float64)
    for value in outputs:
        ramp = torch.linspace(0.5, 1.5, value.numel(), dtype=value.dtype).reshape(value.shape)
        total = total + (ramp * value + 0.5 * (value - 0.3) ** 2).sum()
    return total


def jax_loss(output: Any, _: Any) -> Any:
    """The loss of `Unrolled`, on a model's output."""
    total = jnp.zeros(())
    for value in jax.tree.leaves(output):
        ramp = jnp.linspace(0.5, 1.5, value.size, dtype=value.dtype).reshape(value.shape)
        total = total + (ramp * value + 0.5 * (value - 0.3) ** 2).sum()
    return total


def run_by_hand(program: Program) -> tuple[list[np.ndarray], dict[str, np.ndarray | None]]:
    """The torch module stepped over the sequence and differentiated by torch: outputs and
    gradients.
    """
    model, state, steps = program.build(), None, []
    for x in program.data():
        if program.style == "argument":
            output, state = model(x, state)
        else:
            output = model(x)
        steps.append(list(output) if isinstance(output, tuple) else [output])
    named = dict(model.named_parameters())
    total = sum(torch_loss(outputs) for outputs in steps)
    found = [None] * len(named)
    if total.requires_grad:
        found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    outputs = [torch.stack(column).detach().numpy() for column in zip(*steps, strict=True)]
    return outputs, {
        name: None if g is None else g.numpy() for name, g in zip(named, found, strict=True)
    }


def one_run_of(program: Program) -> dict[str, tuple[Rule, int]]:
    """One of the three rules, since tracing a rule is most of what a program costs. Programs
    choose by their text: the seeds that hypothesis draws are mostly small.
    """
    drawn = crc32(repr(program).encode())
    runs = list(runs_of(drawn // 3 % 64).items())
    return dict([runs[drawn % 3]])


def measure(
    program: Program,
    runs: dict[str, tuple[Rule, int]] | None = None,
    compiled: bool | None = None,
) -> Measured:
    """Run one program in every way.

    Args:
        program: what to run.
        runs: the rules; None: the three of its seed.
        compiled: compile it as a user's program is, so that what XLA gets wrong is found too; else
            NumPy runs it, which is much cheaper. None: one program in three is compiled.
    """
    runs = runs_of(program.seed) if runs is None else runs
    compiled = len(program.source) % 3 == 0 if compiled is None else compiled
    torch_outputs, torch_grads = run_by_hand(program)
    model, xs = program.build(), program.data()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    net = eb.wrap(model, example_input=xs[0])
    net.init_state(batch_size=program.batch)
    inputs = jnp.asarray(xs.numpy())
    graph = eb.compile_etrace_graph(net, inputs[0], include_hidden_perturb=False)
    after = model.state_dict()
    assert list(before) == list(after) and all(
        torch.equal(before[name], after[name]) for name in before
    )
    step = make_program(graph)
    info = graph.module_info
    states = info.retrieved_model_states
    names = [show_path(info.invar_to_weight_path[v]) for v in step.weight_vars]
    theta = [states[info.invar_to_weight_path[v]].value for v in step.weight_vars]
    hidden = [states[leaf.path].value for leaf in step.leaves]
    other = [leaf for s in info.compiled_model_states if info.state_path(s) not in info.weight_path_to_invars
             and info.state_path(s) not in info.hidden_path_to_invar for leaf in jax.tree.leaves(s.value)]  # fmt: skip
    unrolled = Unrolled(graph, [(x,) for x in inputs])

    def all_rules(theta, hidden, other, xs):
        grads, outputs = {}, None
        for name, (rule, K) in runs.items():
            grads[name], outputs = _run_rule(step, rule, K, theta, hidden, other, xs)
        return grads, jax.tree.leaves(outputs)

    run = jit if compiled else run_in_numpy
    grads, outputs = jax.tree.map(np.array, run(all_rules)(theta, hidden, other, inputs))
    brute = {}
    if not set(runs) <= set(EXACT):
        credits = ("step", "core") if any("core" in name for name in runs) else ("step",)
        brute = run_in_numpy(lambda: unrolled.d_rtrl(credits))()
    named = {run: dict(zip(names, values, strict=True)) for run, values in grads.items()}
    brute = {credit: dict(zip(names, values, strict=True)) for credit, values in brute.items()}
    return Measured(graph, torch_outputs, outputs, torch_grads, named, brute)


def _run_rule(step: StepProgram, rule: Rule, K: int, theta, hidden, other, xs):
    def chunk(carry, data, fresh, final):
        args, targets, weights = data
        found = run_chunk(
            rule, step, theta, Carry(*carry), Chunk(args, targets, weights, jax_loss), fresh, final
        )
        return (
            found.grads,
            found.losses,
            found.outputs,
            (found.carry.hidden, found.carry.other, found.carry.trace),
        )

    start = (hidden, other, rule.init(step))
    data = ([xs], jnp.zeros(STEPS), jnp.ones(STEPS))
    grads, _, outputs, _ = run_sequence(chunk, start, data, divide(STEPS, K), True, True)
    return grads, outputs


def find_faults(m: Measured) -> list[str]:
    """Everything that is wrong with a program, one sentence each."""
    faults = []
    scale = max([1.0, *(float(np.abs(g).max()) for g in m.torch_grads.values() if g is not None)])

    def compare(found: Any, wanted: Any, tolerance: float, what: str) -> None:
        found, wanted = np.asarray(found), np.asarray(wanted)
        if found.shape != wanted.shape:
            faults.append(f"{what}: shape {found.shape} instead of {wanted.shape}")
            return
        # Gradients that cancel to rounding errors are compared on the scale of the program's
        # largest gradient.
        allowed = tolerance * max(float(np.abs(wanted).max(initial=0)), 1e-3 * scale)
        worst = float(np.abs(found - wanted).max(initial=0))
        if not worst <= allowed:
            faults.append(f"{what}: off by {worst:.2e} where {allowed:.1e} is allowed")

    for n, (found, wanted) in enumerate(zip(m.outputs, m.torch_outputs, strict=True)):
        compare(found, wanted, 1e-9, f"output {n} against torch")
    if faults:
        return faults
    certificates = {show_path(path): c for path, c in m.graph.certificate().items()}
    for name, wanted in m.torch_grads.items():
        if name not in certificates:
            if wanted is not None and np.abs(wanted).max() > 0:
                faults.append(f"{name} has a gradient in torch, but the step does not use it")
            continue
        one = next(iter(m.grads.values()))[name]
        bptt = np.zeros_like(one) if wanted is None else wanted
        for run, found in m.grads.items():
            exact = run in EXACT
            reference = bptt if exact else m.brute["core" if "core" in run else "step"][name]
            against = "torch BPTT" if exact else "brute force"
            compare(found[name], reference, 1e-8, f"{run}: gradient of {name} against {against}")
        if certificates[name].exact and m.brute:
            compare(
                m.brute["step"][name],
                bptt,
                1e-8,
                f"certified exact: gradient of {name} by D-RTRL against torch BPTT",
            )
        if certificates[name].kind == "unused" and np.abs(bptt).max(initial=0) > 0:
            faults.append(f"{name} is certified unused and has a gradient in torch")
    return faults
