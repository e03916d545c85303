"""What the online gradients are compared with: torch BPTT, JAX BPTT, braintrace, and the yardstick.

Each `make_*(workload)` returns a `Program`; its `run()` takes the workload's torch tensors,
computes once and waits. None means that the program does not exist for this workload.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from benchmarks import yardstick, yardstick_pp_prop
from benchmarks.workloads import Workload, data, torch_model

RATE = 1e-3
DECAY = 0.9  # of pp-prop


@dataclass(frozen=True)
class Program:
    """A program to measure.

    `run` computes once. `memory` returns a peak in bytes and how it was counted. `untrained` names
    the parameters whose gradient the program leaves at exactly zero, where that is in question.
    """

    run: Callable[[], Any]
    memory: Callable[[], tuple[int, str]]
    untrained: Callable[[], list[str]] | None = None


def executables_memory(call: Callable[[], Any], aside: int) -> tuple[int, str]:
    """Return the largest temp + output + argument size among the XLA programs that `call` compiles
    or uses.

    Args:
        call: Compiles on its first call, so call this before anything else has run it.
        aside: Bytes of inputs and outputs that grow with the sequence, left out of the count.
    """
    client = jax.devices()[0].client
    known = client.live_executables()  # held, so that identities stay theirs
    call()
    sizes = [0]
    for program in client.live_executables():
        if all(program is not old for old in known):
            stats = program.get_compiled_memory_stats()
            total = (
                stats.temp_size_in_bytes + stats.output_size_in_bytes + stats.argument_size_in_bytes
            )
            sizes.append(total - stats.alias_size_in_bytes)
    return max(max(sizes) - aside, 0), "XLA memory_analysis"


def sequence_bytes(workload: Workload, outputs: bool) -> int:
    """Return the size of inputs and targets, and of the outputs if a program returns them."""
    xs, targets = data(workload)
    return xs.nbytes + targets.nbytes * (2 if outputs else 1)


# torch


def _torch_outputs(workload: Workload, model: nn.Module, xs: torch.Tensor) -> torch.Tensor:
    """Run a whole sequence as its author would: at once where the layer takes sequences, else in a
    loop.
    """
    if workload.model in ("gru", "lstm"):
        return model(xs)
    outputs, state = [], None
    if workload.model == "rleaky":
        model.reset()
    for x in xs:
        if workload.model == "convlstm":
            output, state = model(x, state)
        else:
            output = model(x)
        outputs.append(output)
    return torch.stack(outputs)


def make_torch_bptt(workload: Workload) -> Program:
    """Return backpropagation through time in torch; for one step, its backward pass and an SGD
    update.
    """
    model, (xs, targets) = torch_model(workload), data(workload)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, RATE)
    hidden = torch.zeros(1, workload.batch, workload.hidden)

    def gradients() -> list[torch.Tensor]:
        optimizer.zero_grad()
        nn.functional.mse_loss(_torch_outputs(workload, model, xs), targets).backward()
        return [parameter.grad for parameter in parameters]

    def step() -> None:
        nonlocal hidden
        optimizer.zero_grad()
        output, hidden = model.gru(xs, hidden)
        nn.functional.mse_loss(model.readout(output), targets).backward()
        hidden = hidden.detach()
        optimizer.step()

    def memory() -> tuple[int, str]:
        storages: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = nn.functional.mse_loss(_torch_outputs(workload, model, xs), targets)
        del loss
        known = {tensor.untyped_storage().data_ptr() for tensor in (xs, targets)}
        saved = sum(size for pointer, size in storages.items() if pointer not in known)
        return saved + sum(
            parameter.nbytes for parameter in parameters
        ), "tensors saved for the backward pass"

    return Program(step if workload.mode == "step" else gradients, memory)


# JAX


TORCH_NAMES = {
    "weight_ih": "gru.weight_ih_l0",
    "weight_hh": "gru.weight_hh_l0",
    "bias_ih": "gru.bias_ih_l0",
    "bias_hh": "gru.bias_hh_l0",
    "weight_out": "readout.weight",
    "bias_out": "readout.bias",
}


def gru_params(workload: Workload) -> yardstick.Params:
    """Return the weights of the workload's torch GRU under the yardstick's names."""
    weights = torch_model(workload).state_dict()
    return {
        name: jnp.array(weights[torch_name].numpy()) for name, torch_name in TORCH_NAMES.items()
    }


def _jax_loss(
    params: yardstick.Params, h0: jax.Array, xs: jax.Array, targets: jax.Array
) -> jax.Array:
    """Return the mean squared error of a whole sequence, written as a JAX user writes a GRU."""

    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        i_r, i_z, i_n = jnp.split(x @ params["weight_ih"].T + params["bias_ih"], 3, -1)
        h_r, h_z, h_n = jnp.split(h @ params["weight_hh"].T + params["bias_hh"], 3, -1)
        r, z = jax.nn.sigmoid(i_r + h_r), jax.nn.sigmoid(i_z + h_z)
        n = jnp.tanh(i_n + r * h_n)
        h = (1 - z) * n + z * h
        return h, h

    _, hidden = jax.lax.scan(step, h0, xs)
    return jnp.mean((hidden @ params["weight_out"].T + params["bias_out"] - targets) ** 2)


def make_jax_bptt(workload: Workload) -> Program | None:
    """Return backpropagation through time by `jax.grad` of a `lax.scan`."""
    if workload.model != "gru" or workload.mode == "step":
        return None
    params, (xs, targets) = gru_params(workload), data(workload)
    h0 = jnp.zeros((workload.batch, workload.hidden))
    gradients = jax.jit(jax.value_and_grad(_jax_loss))

    def run() -> Any:
        return jax.block_until_ready(
            gradients(params, h0, jnp.array(xs.numpy()), jnp.array(targets.numpy()))
        )

    return Program(run, lambda: executables_memory(run, sequence_bytes(workload, outputs=False)))


def make_yardstick(workload: Workload) -> Program | None:
    """Return the hand-written programs of `benchmarks.yardstick` (D-RTRL) and
    `benchmarks.yardstick_pp_prop`.
    """
    if workload.model != "gru" or (workload.rule == "pp_prop" and workload.mode == "step"):
        return None
    params, (xs, targets) = gru_params(workload), data(workload)
    h = jnp.zeros((workload.batch, workload.hidden))

    def gradients() -> dict[str, np.ndarray]:
        arrays = jnp.array(xs.numpy()), jnp.array(targets.numpy())
        if workload.rule == "pp_prop":
            options = {"block": workload.chunk, "credit": workload.credit, "alpha": DECAY}
            grads, _ = yardstick_pp_prop.sequence_gradients(params, h, *arrays, **options)
        else:
            options = {"chunk_size": workload.chunk, "feature_major": workload.feature_major}
            grads, *_ = yardstick.sequence_gradients(params, h, *arrays, **options)
        return {torch_name: np.asarray(grads[name]) for name, torch_name in TORCH_NAMES.items()}

    state = params, h, yardstick.zero_trace(params, workload.batch)
    x, target = xs[0], targets[0]

    def step() -> Any:
        nonlocal state
        *carried, loss, _ = yardstick.online_step(
            *state, x.numpy().copy(), target.numpy().copy(), RATE
        )
        state = tuple(carried)
        return loss.block_until_ready()

    run = step if workload.mode == "step" else gradients
    return Program(run, lambda: executables_memory(run, sequence_bytes(workload, outputs=True)))


# braintrace


def make_braintrace(workload: Workload) -> Program | None:
    """Return braintrace's `D_RTRL` or `pp_prop` on its own per-gate GRU cell, driven as its README
    does.

    Its `D_RTRL` streams the whole trace at every step; where one gradient would take minutes, the
    program is left out.
    """
    traffic = (
        workload.steps * workload.batch * 3 * workload.hidden * (workload.hidden + workload.inputs)
    )
    if workload.model != "gru" or (workload.rule == "d_rtrl" and traffic > 2e9):
        return None
    try:
        import brainstate
        import braintrace
    except ImportError:
        return None

    class Network(brainstate.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = braintrace.nn.GRUCell(workload.inputs, workload.hidden)
            self.out = braintrace.nn.Linear(workload.hidden, workload.outputs)

        def update(self, x: jax.Array) -> jax.Array:
            return self.out(self.rnn(x))

    model, (xs, targets) = Network(), data(workload)
    algorithm, options = {
        "d_rtrl": (braintrace.D_RTRL, {}),
        "pp_prop": (braintrace.pp_prop, {"decay_or_rank": DECAY}),
    }[workload.rule]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says here which weights get no trace
        example = jnp.zeros((workload.batch, workload.inputs))
        learner = braintrace.compile(
            model, algorithm, example, batch_size=workload.batch, **options
        )

    def loss(x: jax.Array, target: jax.Array) -> jax.Array:
        return jnp.mean((learner(x) - target) ** 2)

    @brainstate.transform.jit
    def gradients(xs: jax.Array, targets: jax.Array) -> Any:
        brainstate.nn.reset_all_states(model, workload.batch)
        learner.reset_state(workload.batch)
        return learner.etrace_grad(xs, targets, step_fn=loss, return_value=True)

    weights = model.states(brainstate.ParamState)
    x, target = xs[0], targets[0]

    @brainstate.transform.jit
    def step(x: jax.Array, target: jax.Array) -> jax.Array:
        grads, value = brainstate.transform.grad(
            lambda: loss(x, target), weights, return_value=True
        )()
        for path, weight in weights.items():
            weight.value = jax.tree.map(
                lambda old, grad: old - RATE * grad, weight.value, grads[path]
            )
        return value

    def run() -> Any:
        if workload.mode == "step":
            return step(x.numpy().copy(), target.numpy().copy()).block_until_ready()
        return jax.block_until_ready(gradients(jnp.array(xs.numpy()), jnp.array(targets.numpy())))

    def untrained() -> list[str]:
        grads, _ = run()
        return [
            ".".join(path)
            for path, tree in grads.items()
            if not any(np.any(leaf) for leaf in jax.tree.leaves(tree))
        ]

    memory = lambda: executables_memory(run, sequence_bytes(workload, outputs=False))
    return Program(run, memory, untrained if workload.mode == "gradients" else None)
