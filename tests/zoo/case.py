"""What a zoo case is, how torch itself runs it, and how we know that the run was alive."""

from __future__ import annotations

import importlib.util
import inspect
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

STEPS = 8


@dataclass(frozen=True)
class Trajectory:
    """What torch computed: the output and the named state tensors after each step."""

    outputs: list[Any]
    states: list[dict[str, torch.Tensor]]


Runner = Callable[[nn.Module, torch.Tensor], Trajectory]


@dataclass(frozen=True)
class Case:
    """One small torch module, its inputs, and how torch steps it.

    Attributes:
        name: Unique id, `library-what`.
        library: `torch`, `snntorch`, `norse`, `spikingjelly` or `ncps`; imported only inside
            `make`.
        make: Builds the float32 module; called under a fixed seed.
        input_shape: Shape of one step's input, batch first.
        run: How torch runs a `(T, *input_shape)` sequence; the reference for outputs and states.
        scale: Standard deviation of the random inputs.
        shift: Mean of the random inputs.
        vocabulary: If not zero, inputs are integers below it.
        spikes: True if outputs must contain spikes (zeros and non-zeros).
        train: True to leave the module in training mode.
        state: What `wrap(state=...)` needs, a callable `batch_size -> state`.
        float32_only: Why torch itself cannot run this module in float64, or an empty string.
    """

    name: str
    library: str
    make: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    run: Runner
    scale: float = 1.0
    shift: float = 0.0
    vocabulary: int = 0
    spikes: bool = False
    train: bool = False
    state: Callable[[int], Any] | None = None
    float32_only: str = ""

    @property
    def batch_size(self) -> int:
        return self.input_shape[0]

    @property
    def available(self) -> bool:
        """True if the library is installed."""
        return importlib.util.find_spec(self.library) is not None

    @property
    def _seed(self) -> int:
        return zlib.crc32(self.name.encode())

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """A fresh module with the same weights every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed)
            np.random.seed(self._seed)  # some libraries draw their weights from numpy
            module = self.make()
        return module.to(dtype).train(self.train)

    def inputs(self, dtype: torch.dtype = torch.float32, steps: int = STEPS) -> torch.Tensor:
        """The input sequence `(steps, *input_shape)`; float64 inputs are the float32 ones, so
        spikes agree.
        """
        generator = torch.Generator().manual_seed(self._seed + 1)
        shape = (steps, *self.input_shape)
        if self.vocabulary:
            return torch.randint(self.vocabulary, shape, generator=generator)
        return (self.scale * torch.randn(shape, generator=generator) + self.shift).to(dtype)


def boost(module: nn.Module, factor: float) -> nn.Module:
    """Scale all weight matrices of a network, so that its deeper layers spike too."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return module


def tensors(tree: Any, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a nested state or output, by dotted name, in the order of its fields."""
    if tree is None:
        return {}
    if isinstance(tree, torch.Tensor):
        return {name: tree}
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif is_dataclass(tree):
        items = [(f.name, getattr(tree, f.name)) for f in fields(tree)]
    elif hasattr(tree, "_fields"):
        items = list(zip(tree._fields, tree, strict=True))
    else:
        items = list(enumerate(tree))
    found: dict[str, torch.Tensor] = {}
    for key, value in items:
        found.update(tensors(value, f"{name}.{key}" if name else str(key)))
    return found


# How torch runs a module.


def carried(initial: Callable[[int], Any] | None = None, *names: str) -> Runner:
    """`out, state = module(x, state)`, starting from None or `initial(batch_size)`."""

    def run(module: nn.Module, xs: torch.Tensor) -> Trajectory:
        state = None if initial is None else _cast(initial(xs.shape[1]), module)
        outputs, states = [], []
        for x in xs:
            out, state = module(x, state)
            outputs.append(out)
            states.append(name_states(module, state, names))
        return Trajectory(outputs, states)

    return run


def returned(initial: Callable[[int], Any] | None = None, *names: str) -> Runner:
    """`state = module(x, state)`; the output is the state's first tensor."""

    def run(module: nn.Module, xs: torch.Tensor) -> Trajectory:
        state = None if initial is None else _cast(initial(xs.shape[1]), module)
        outputs, states = [], []
        for x in xs:
            state = module(x, state)
            states.append(name_states(module, state, names))
            outputs.append(next(iter(states[-1].values())))
        return Trajectory(outputs, states)

    return run


def name_states(
    module: nn.Module, state: Any, names: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Name a state as the bridge promises: by field or key, else by the argument of `forward` and
    the position.
    """
    found = tensors(state)
    if names:
        return dict(zip(names, found.values(), strict=True))
    argument = list(inspect.signature(module.forward).parameters)[1]
    if list(found) == [""]:
        return {argument: found[""]}
    if all(part.isdigit() for name in found for part in name.split(".")):
        return {f"{argument}.{name}": value for name, value in found.items()}
    return found


def spread(*names: str) -> Runner:
    """`out, *states = module(x, *states)`, as snnTorch's explicit neurons do."""

    def run(module: nn.Module, xs: torch.Tensor) -> Trajectory:
        state: tuple[Any, ...] = ()
        outputs, states = [], []
        for x in xs:
            out, *state = module(x, *state)
            outputs.append(out)
            states.append(dict(zip(names, state, strict=True)))
        return Trajectory(outputs, states)

    return run


def attributes(*paths: str) -> Runner:
    """`out = module(x)`, the state read from attributes after each step."""

    def run(module: nn.Module, xs: torch.Tensor) -> Trajectory:
        outputs, states = [], []
        for x in xs:
            outputs.append(module(x))
            # A module may write in place later: keep a copy that still carries the gradient.
            states.append(
                {path.replace("/", "."): _attribute(module, path).clone() for path in paths}
            )
        return Trajectory(outputs, states)

    return run


def sequence(
    parts: str = "", *, batch_first: bool = False, read: Callable[[str, Any], Any] | None = None
) -> Runner:
    """The module takes the whole sequence; states are what its recurrent parts return last.

    Args:
        parts: Names of the recurrent submodules, separated by commas; empty for the module itself.
        batch_first: Whether the module takes `(B, T, ...)`.
        read: Turns a part's name and its result into named states; the default is for torch's RNNs.
    """
    read = read or rnn_states

    def run(module: nn.Module, xs: torch.Tensor) -> Trajectory:
        outputs, states = [], []
        for length in range(1, len(xs) + 1):
            found: dict[str, torch.Tensor] = {}
            handles = [_capture(module, part, found, read) for part in parts.split(",")]
            result = module(xs[:length].transpose(0, 1) if batch_first else xs[:length])
            for handle in handles:
                handle.remove()
            whole = result[0] if isinstance(result, tuple) else result
            outputs.append(whole.select(1 if batch_first else 0, -1))
            states.append(found)
        return Trajectory(outputs, states)

    return run


def rnn_states(name: str, result: Any) -> dict[str, torch.Tensor]:
    """The final states of an `nn.RNN/GRU/LSTM`, one per layer, under the bridge's names."""
    final = result[1] if isinstance(result[1], tuple) else (result[1],)
    prefix = f"{name}." if name else ""
    return {
        f"{prefix}{letter}_l{layer}": value[layer]
        for layer in range(final[0].shape[0])
        for letter, value in zip("hc", final, strict=False)
    }


def last_state(name: str, result: Any) -> dict[str, torch.Tensor]:
    """The state of a layer that returns `(outputs, state)`."""
    return tensors(result[1], name)


def _capture(
    module: nn.Module, part: str, found: dict[str, torch.Tensor], read: Callable[[str, Any], Any]
) -> Any:
    def hook(_module: nn.Module, _inputs: Any, result: Any) -> None:
        found.update(read(part, result))

    return module.get_submodule(part).register_forward_hook(hook)


def _attribute(module: nn.Module, path: str) -> torch.Tensor:
    owner, _, leaf = path.rpartition(".")
    value: Any = module.get_submodule(owner)
    for key in leaf.split("/"):  # `hs/0` is item 0 of the attribute `hs`
        if isinstance(value, dict):
            value = value[key]
        else:
            value = value[int(key)] if key.isdigit() else getattr(value, key)
    return value


def _cast(state: Any, module: nn.Module) -> Any:
    """The initial state in the module's dtype."""
    dtype = next((p.dtype for p in module.parameters()), torch.float32)

    def cast(tree: Any) -> Any:
        if isinstance(tree, torch.Tensor):
            return tree.to(dtype) if tree.is_floating_point() else tree
        if is_dataclass(tree):
            return type(tree)(**{f.name: cast(getattr(tree, f.name)) for f in fields(tree)})
        if hasattr(tree, "_fields"):
            return type(tree)(*map(cast, tree))
        return type(tree)(map(cast, tree))

    return cast(state)


# The loss of the gradient comparison, and the check that the case is alive.


def loss_weights(case: Case, outputs: list[Any]) -> list[list[np.ndarray]]:
    """Fixed random weights, one array an output tensor and step; the loss is `Σ (w·y + y²/4) /
    numel`.
    """
    rng = np.random.default_rng(case._seed + 2)
    return [[rng.standard_normal(tuple(y.shape)) for y in tensors(out).values()] for out in outputs]


def torch_loss(outputs: list[Any], weights: list[list[np.ndarray]]) -> torch.Tensor:
    """The loss over all steps in torch."""
    total: Any = 0.0
    for out, ws in zip(outputs, weights, strict=True):
        for y, w in zip(tensors(out).values(), ws, strict=True):
            total = total + ((torch.as_tensor(w).to(y.dtype) + y / 4) * y).mean()
    return total


@dataclass(frozen=True)
class Reference:
    """Torch's own result on a case: trajectory, loss weights, gradients by parameter name and of
    the input.
    """

    trajectory: Trajectory
    weights: list[list[np.ndarray]]
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]
    input_grad: torch.Tensor | None
    past_to_last_output: torch.Tensor | None


def reference(case: Case, dtype: torch.dtype = torch.float32) -> Reference:
    """Run a case in torch and differentiate its loss by torch's autograd."""
    module, xs = case.build(dtype), case.inputs(dtype)
    if xs.is_floating_point():
        xs.requires_grad_(True)
    trajectory = case.run(module, xs)
    weights = loss_weights(case, trajectory.outputs)
    loss = torch_loss(trajectory.outputs, weights)
    last = torch_loss(trajectory.outputs[-1:], weights[-1:])
    memory = torch.autograd.grad(last, xs, retain_graph=True)[0][:-1] if xs.requires_grad else None
    loss.backward()
    grads = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    return Reference(trajectory, weights, loss.detach(), grads, xs.grad, memory)


def check_live(case: Case, ref: Reference) -> None:
    """Raise if a comparison on this case could pass on a silent network."""
    outputs = [
        torch.cat([y.detach().flatten() for y in tensors(out).values()])
        for out in ref.trajectory.outputs
    ]
    stacked = torch.stack(outputs)
    if not torch.isfinite(stacked).all():
        raise ValueError(f"`{case.name}`: outputs are not finite")
    if stacked.std(dim=0).max() < 1e-3:
        raise ValueError(f"`{case.name}`: outputs do not change over time")
    if case.spikes:
        rate = (stacked != 0).float().mean().item()
        if not 0.02 <= rate <= 0.98:
            raise ValueError(f"`{case.name}`: firing rate {rate:.3f}, not alive")
    if not ref.trajectory.states[-1] or all(
        (s == 0).all() for s in ref.trajectory.states[-1].values()
    ):
        raise ValueError(f"`{case.name}`: no state, or all of it zero")
    for name, grad in ref.grads.items():
        size = grad.abs().max().item()
        if not 1e-4 < size < 1e4:
            raise ValueError(f"`{case.name}`: largest gradient of `{name}` is {size:.1e}")
    for what, grad in (
        ("input", ref.input_grad),
        ("earlier inputs to the last output", ref.past_to_last_output),
    ):
        if grad is not None and grad.abs().max() < 1e-4:
            raise ValueError(f"`{case.name}`: no gradient, {what}")
