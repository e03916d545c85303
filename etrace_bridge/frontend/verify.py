"""`verify`: compare a torch module with its bridged form, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from etrace_bridge._errors import InputError
from etrace_bridge.frontend.borders import to_jax, to_torch
from etrace_bridge.frontend.hooks import apply_parameter_hooks
from etrace_bridge.frontend.inputs import map_input, read_input
from etrace_bridge.frontend.module import BridgedModule
from etrace_bridge.frontend.outer import unwrapped
from etrace_bridge.frontend.reference import TorchRun, run_torch
from etrace_bridge.frontend.snapshot import restored
from etrace_bridge.frontend.state_values import flatten_state
from etrace_bridge.frontend.wrapping import wrap
from etrace_bridge.lowering import jit

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 1e-1, torch.float16: 1e-2}


@dataclass
class VerifyReport:
    """The largest differences between a torch module and its bridged form, each relative to the
    torch values' scale.

    Attributes:
        outputs: Largest difference of outputs over all steps.
        states: Largest difference by state name; empty where torch does not show its states.
        gradients: Largest difference by parameter name, and `input` for floating inputs.
        steps: How many time steps were run.
        tolerance: What counts as equal.
        dead: Parameters whose gradient is zero in torch, so that the comparison says nothing.
        notes: What else one should know.
    """

    outputs: float
    states: dict[str, float]
    gradients: dict[str, float]
    steps: int
    tolerance: float
    dead: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every difference is within the tolerance."""
        return all(
            d <= self.tolerance
            for d in (self.outputs, *self.states.values(), *self.gradients.values())
        )

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = [("outputs", "", self.outputs)]
        rows += [("state", name, value) for name, value in self.states.items()]
        rows += [("gradient", name, value) for name, value in self.gradients.items()]
        width = max(len(name) for _, name, _ in rows)
        lines = [
            f"torch and bridge over {self.steps} steps: {'equal' if self.ok else 'NOT EQUAL'} "
            f"(tolerance {self.tolerance:.0e})"
        ]
        for kind, name, value in rows:
            mark = "" if value <= self.tolerance else "  <-- differs"
            dead = "  (zero in torch)" if kind == "gradient" and name in self.dead else ""
            lines.append(f"  {kind:<9}{name:<{width}}  {value:.1e}{dead}{mark}")
        return "\n".join([*lines, *[f"  note: {note}" for note in self.notes]])

    __repr__ = __str__


def verify(
    module: nn.Module,
    example_input: Any,
    *,
    steps: int = 4,
    state: Any = None,
    tolerance: float | None = None,
    **options: Any,
) -> VerifyReport:
    """Run a torch module and its bridged form side by side for a few steps, and compare outputs,
    states and gradients.

    Args:
        module: The torch module; it is left as it was.
        example_input: One time step of input, `(batch, ...)`, a tuple for several inputs, or a
            dict, as for `wrap`. Later steps are variations of it.
        steps: How many time steps to run.
        state: As for `wrap`.
        tolerance: Largest difference, relative to the scale of the values, that counts as equal; by
            default 1e-4 in float32 and 1e-9 in float64.
        **options: Further arguments of `wrap`.

    Returns:
        A report that prints as a table; `.ok` tells whether everything agrees.
    """
    if not isinstance(module, nn.Module):
        hint = ": `net.model`" if isinstance(module, BridgedModule) else ""
        raise InputError(
            f"`verify` bridges a `torch.nn.Module` itself; it does not take a "
            f"`{type(module).__name__}`. Pass the torch module{hint}."
        )
    module = unwrapped(module)
    example_input = map_input(
        lambda x: x.detach() if isinstance(x, torch.Tensor) else torch.tensor(np.asarray(x)),
        example_input,
    )
    examples, form = read_input(module.forward, example_input)
    sequences = [_vary(x, steps) for x in examples]
    notes: list[str] = []
    with restored(module):
        net = _bridge(module, example_input, state, options)
        if net.traced_step(*[to_jax(x) for x in examples]).uses_key:
            notes.append("the step is random, so both sides were compared in eval mode")
            module.eval()
            net = _bridge(module, example_input, state, options)
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in sequences]
        layout = [x.transpose(0, 1) if net.batch_first else x for x in inputs]
        run = run_torch(
            module,
            tuple(layout),
            state,
            form=form,
            sequence=options.get("sequence"),
            batch_first=options.get("batch_first"),
        )
        weights = _weights(run)
        names, found = _torch_gradients(module, net, run, weights, inputs)
        outputs, states, gradients = _bridge_results(net, sequences, weights)
    tolerance = tolerance or _TOLERANCE.get(run_dtype(run), 1e-4)
    return _report(
        net,
        run,
        outputs,
        states,
        gradients,
        dict(zip(names, found, strict=True)),
        steps,
        tolerance,
        notes,
    )


def _bridge(module: nn.Module, example: Any, state: Any, options: dict) -> BridgedModule:
    net = wrap(module, state, example_input=example, **options)
    first = net.read_inputs(example)[0]
    net.init_state(batch_size=first.shape[0] if first.dim() else None)
    return net


def _vary(x: torch.Tensor, steps: int) -> torch.Tensor:
    """Make a sequence of different steps from one."""
    if not x.is_floating_point():
        return torch.stack([x.roll(k, 0) if x.dim() else x for k in range(steps)])
    noise = torch.randn(steps, *x.shape, generator=torch.Generator().manual_seed(0)).to(x.dtype)
    noise[0] = 0
    return x + 0.5 * noise * (x.std() if x.numel() > 1 and x.std() > 0 else 1.0)


def _weights(run: TorchRun) -> list[list[np.ndarray]]:
    """Return fixed random weights: the loss is the weighted sum of all outputs."""
    rng = np.random.default_rng(0)
    return [
        [rng.standard_normal(tuple(t.shape)) for _, t in flatten_state(output)[0]]
        for output in run.outputs
    ]


def _torch_gradients(
    module: nn.Module, net: BridgedModule, run: TorchRun, weights: list, inputs: list
) -> tuple[list[str], list]:
    loss: Any = sum(
        (torch.tensor(w).to(t.dtype) * t).sum()
        for output, ws in zip(run.outputs, weights, strict=True)
        for (_, t), w in zip(flatten_state(output)[0], ws, strict=True)
    )
    loss = loss.real if isinstance(loss, torch.Tensor) and loss.is_complex() else loss
    parameters = dict(module.named_parameters())
    wanted = {name: parameters[name] for name in net.parameter_names}
    wanted.update(
        {f"input {i}" if i else "input": x for i, x in enumerate(inputs) if x.requires_grad}
    )
    if not wanted or not loss.requires_grad:
        return [], []
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    return list(wanted), [
        torch.zeros_like(p) if g is None else g for p, g in zip(wanted.values(), grads, strict=True)
    ]


def _bridge_results(
    net: BridgedModule, sequences: list[torch.Tensor], weights: list
) -> tuple[list, list, dict[str, Any]]:
    """Run the bridged step over the sequence with JAX's reverse mode; return outputs and states by
    step, gradients by name.
    """
    xs = [to_jax(x) for x in sequences]
    _, step = net.functional_step(*[x[0] for x in xs])
    values, states = net.parameter_values(), net.hidden_values()

    def loss(parameters: dict, floats: dict) -> tuple[Any, Any]:
        current, total, outputs, trajectory = states, 0.0, [], []
        inputs = [floats.get(i, x) for i, x in enumerate(xs)]
        for t, ws in enumerate(weights):
            output, current = step(parameters, current, *[x[t] for x in inputs])
            total = total + sum(
                jnp.sum(jnp.asarray(w, o.dtype) * o) for o, w in zip(output, ws, strict=True)
            )
            outputs.append(output)
            trajectory.append(current)
        return total.real if jnp.iscomplexobj(total) else total, (outputs, trajectory)

    floats = {i: x for i, x in enumerate(xs) if jnp.issubdtype(x.dtype, jnp.inexact)}
    (_, (outputs, trajectory)), (by_name, by_input) = jit(
        jax.value_and_grad(loss, (0, 1), has_aux=True)
    )(values, floats)
    parameters = dict(net.model.named_parameters())
    by_name = {name: to_torch(g, parameters[name]) for name, g in by_name.items()}
    # JAX's gradient by a complex value is the conjugate of torch's.
    gradients = {
        **by_name,
        **{f"input {i}" if i else "input": to_torch(jnp.conj(g)) for i, g in by_input.items()},
    }
    return outputs, [net.hidden_tensors(s) for s in trajectory], gradients


def _report(
    net: BridgedModule,
    run: TorchRun,
    outputs: list,
    states: list,
    gradients: dict,
    torch_gradients: dict,
    steps: int,
    tolerance: float,
    notes: list[str],
) -> VerifyReport:
    output = max(
        (
            _difference(o, t)
            for found, ref in zip(outputs, run.outputs, strict=True)
            for o, (_, t) in zip(found, flatten_state(ref)[0], strict=True)
        ),
        default=0.0,
    )
    by_state = {
        name: max(
            _difference(found[name], ref[name])
            for found, ref in zip(states, run.states, strict=True)
        )
        for name in (run.states[0] if run.states else ())
        if name in states[0]
    }
    hooked = apply_parameter_hooks(net.model, gradients)
    by_gradient = {
        name: _difference(hooked[name], value) for name, value in torch_gradients.items()
    }
    dead = tuple(
        name for name, value in torch_gradients.items() if value.numel() and value.abs().max() == 0
    )
    if not run.states:
        notes.append(
            "torch ran the whole sequence at once, so states were compared through the outputs only"
        )
    return VerifyReport(output, by_state, by_gradient, steps, tolerance, dead, notes)


def _difference(found: Any, wanted: torch.Tensor) -> float:
    a, b = np.asarray(found), wanted.detach().numpy()
    if a.shape != b.shape or np.isnan(a).any() != np.isnan(b).any():
        return float("inf")
    scale = max(1.0, float(np.abs(b).max(initial=0.0)))
    return float(np.abs(np.nan_to_num(a) - np.nan_to_num(b)).max(initial=0.0)) / scale


def run_dtype(run: TorchRun) -> torch.dtype:
    """Return the floating dtype of a run's outputs."""
    return next(
        (t.dtype for _, t in flatten_state(run.outputs[0])[0] if t.is_floating_point()),
        torch.float32,
    )
