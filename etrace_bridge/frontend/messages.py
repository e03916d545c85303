"""The errors of the front-end. Each names the cause, says why it cannot work, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from etrace_bridge._errors import (
    BridgeError,
    InputError,
    NotSupportedError,
    StateError,
    TracingError,
    UnsupportedOpError,
)


def unsupported_op(op: str, place: str) -> UnsupportedOpError:
    """A torch op without a rule."""
    name = op.removesuffix(".default")
    key = (
        name.replace("aten.", "aten::") if name.startswith("aten.") else name.replace(".", "::", 1)
    )
    return UnsupportedOpError(
        f"The torch op `{op}` has no JAX rule, in {place}. The bridge runs a model's own forward code on JAX values, "
        f"so each op needs one. Register a rule before `wrap` (JAX arrays in, JAX arrays out, torch's arguments):\n\n"
        f"    import jax.numpy as jnp, etrace_bridge as eb\n\n"
        f'    @eb.register_op("{key}")\n'
        f"    def rule(input, *args, **kwargs):\n"
        f"        return jnp.tanh(input)  # what the op computes\n"
    )


def needs_keyword(model: str, name: str) -> InputError:
    """Return the error for an input without a keyword argument that `forward` needs."""
    return InputError(
        f"`{model}.forward` needs `{name}` as a keyword. Call `net(x, {name}=...)`; where an input "
        "is one value (a learner's methods, `check_gradients`, `example_input`), pass a dict by "
        f"argument names: `{{'x': ..., '{name}': ...}}`."
    )


def other_form(given: str, known: str) -> InputError:
    """An input with other arguments or keys than those the states were made for."""
    return InputError(
        f"The model was wrapped for the inputs {known}; this call gives {given}. An input keeps its "
        "arguments and keys from step to step. For other ones, `wrap` the model again."
    )


def complex_op(primitive: str, place: str) -> UnsupportedOpError:
    """An operation on complex values that has no form in real ones."""
    return UnsupportedOpError(
        f"The operation `{primitive}` is applied to a complex value, in {place}. The bridge "
        "computes with real and imaginary parts, and has no rule for this operation in those "
        "terms. Write it with real tensors there (`z.real`, `z.imag`, `torch.view_as_real(z)`), "
        "and join them with `torch.complex`."
    )


def needs_value(name: str, place: str) -> TracingError:
    """Code that needs the number inside a traced tensor."""
    if name in ("__bool__", "is_nonzero"):
        what = "A Python `if`, `while`, `and`, `or`, `not` or `assert` depends on the value of a tensor"
        todo = "Write both branches as tensors and choose with `torch.where(condition, a, b)`, or move the check out of `forward`."
    elif name in (
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "_unique2",
        "bincount",
        "where",
        "getitem",
    ):
        what = f"`{name}` gives a tensor whose shape depends on values"
        todo = "Use a mask of fixed shape: `torch.where(mask, a, b)` or `x * mask` in place of `x[mask]`."
    elif name in ("__contains__", "equal", "allclose"):
        what = f"`{name}` asks for a Python answer about the values of a tensor"
        todo = "Compare with tensor operations (`(x == y).all()`) and choose with `torch.where`."
    else:
        what = f"`{name.strip('_')}` reads the value of a tensor as a Python number or array"
        todo = "Keep the value in a tensor (`x` in place of `x.item()`), or compute the number before the model is wrapped."
    return TracingError(
        f"{what}, in {place}. One step is compiled once for all values, so no value is known while "
        f"the code runs. {todo}"
    )


def masked_selection(name: str, made: str, place: str) -> TracingError:
    """A use of `x[mask]` other than writing it back under the same mask."""
    return TracingError(
        f"`x[mask]` gives a tensor whose size depends on values, in {made}, and `{name}` uses it, "
        f"in {place}. A step has fixed shapes; only `x[mask] = f(x[mask])`, element by element, is "
        "understood. Use `torch.where(mask, f(x), x)`, or `x * mask` for sums."
    )


def captured_tensor(tensor: torch.Tensor, place: str) -> TracingError:
    """A tensor that requires grad and belongs to no module."""
    return TracingError(
        f"`forward` uses a tensor of shape {tuple(tensor.shape)} that requires grad and is no "
        f"parameter of the wrapped module, in {place}. The bridge would treat it as a constant and "
        "it would silently stop learning. Register it (`self.w = nn.Parameter(w)`), wrap the "
        "module that owns it, or pass `w.detach()` if it should stay constant."
    )


def parameter_write(name: str, place: str) -> TracingError:
    """An in-place write to a parameter inside forward."""
    return TracingError(
        f"`forward` writes to its parameter `{name}` in place, in {place}. Inside a step "
        "parameters are inputs, and only the optimizer changes them. Compute the changed weight "
        f"as a new tensor (`w = self.{name}.clamp(0, 1)`), or do this after the update."
    )


def unfollowed_view(what: str, place: str) -> TracingError:
    """A write through a view whose memory cannot be followed."""
    return TracingError(
        f"In-place write that cannot be followed: {what}, in {place}. The bridge follows slices, "
        "transposes and reshapes of one tensor. Work on a copy (`.clone()`), or write `x = "
        "torch.cat(...)` / `torch.where(...)` in place of the in-place write."
    )


def inplace_shape(old: tuple, new: tuple, place: str) -> TracingError:
    """An in-place result that does not fit its target."""
    return TracingError(
        f"An in-place operation gives shape {new} for a tensor of shape {old}, in {place}. An "
        "in-place write cannot change a shape; use the operation without the trailing underscore."
    )


def escaped_tensor(name: str) -> TracingError:
    """A traced tensor used after its trace."""
    return TracingError(
        f"A traced tensor was used after its trace had ended, by `{name}`, at {_line()}. `forward` "
        "stored it outside the module (a global list, a closure, another object). Keep tensors in "
        "the module or return them."
    )


def rule_failed(name: str, values: tuple, error: Exception, place: str) -> InputError:
    """A rule refused its arguments, most often a wrong shape."""
    shapes = ", ".join(_describe(v) for v in values)
    return InputError(
        f"`{name}({shapes})` failed in {place}: {error}\n"
        "If the shapes are not what the model expects, check the input: `net(x)` takes ONE time "
        "step, `(batch, ...)`, without a time axis."
    )


def _describe(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{np.dtype(value.dtype).name}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_describe(v) for v in value) + "]"
    return repr(value)


def _line() -> str:
    from etrace_bridge.frontend import locate

    return locate.user_line()


def not_online(layer: str, path: str, why: str, todo: str) -> NotSupportedError:
    """A layer that can never run one step at a time."""
    return NotSupportedError(f"`{path or '(root)'}` ({layer}) cannot run online: {why} {todo}")


class NotChained(StateError):
    """A sequence model gives something else step by step."""


class BatchInOrder(StateError):
    """A step loops over the samples of a batch."""


class MissingArgument(InputError):
    """`forward` fails without an argument that may be a state or an input."""


class UnclearState(StateError):
    """State arguments that can be understood in several ways."""


class UnseenState(StateError):
    """Something that the bridge cannot see changes from step to step."""


def not_chained(model: str, states: list[str]) -> NotChained:
    """A sequence model whose state the bridge cannot see."""
    known = ", ".join(f"`{name}`" for name in states) or "none"
    return NotChained(
        f"`{model}.forward` takes sequences, and running it step by step does not give what it "
        "gives for a whole sequence. Its output depends on earlier (or later) steps through "
        f"something other than the states that were found ({known}): most often a loop over time "
        "in `forward` whose state is a local variable. Write one time step as `forward(x, state) "
        "-> (output, state)`, keep the state in `self.h`, or put the recurrence in a cell module "
        "with an adapter. If `forward` takes one time step, pass `wrap(model, sequence=False)`."
    )


def drawn_once(model: str) -> NotChained:
    """Random numbers that all steps of a sequence share."""
    return NotChained(
        f"`{model}.forward` draws random numbers once for a whole sequence, such as a dropout mask "
        "that all steps share, and a step would draw them anew. Draw them for each step "
        "(`nn.Dropout` on the whole sequence), or call `model.eval()` before `wrap`."
    )


class NeedsState(StateError):
    """`forward` requires a state of which nothing tells how it starts."""


def needs_state(
    model: str, names: Sequence[str], error: Exception, known: bool, zeros: str | None
) -> BridgeError:
    """A required argument: a state, or one that may be a state or an input; `zeros` is code that
    makes one that `forward` takes and gives back.
    """
    listed, cause = ", ".join(names), f"{type(error).__name__}: {error}"
    if known:
        shape = (
            "The bridge cannot know its shape, and a start of zeros that `forward` takes was not "
            "found. Pass `wrap(model, state=lambda batch_size: torch.zeros(batch_size, hidden))`, "
            "with the structure that `forward` expects."
            if zeros is None
            else f"Zeros of this shape fit: `wrap(model, state=lambda batch_size: {zeros})`. Pass "
            "them if that is how yours starts, or give the model a method "
            "`init_state(batch_size)` that makes the state."
        )
        return NeedsState(
            f"`{model}.forward` needs a state in `{listed}` and fails without one ({cause}). {shape}"
        )
    return MissingArgument(
        f"`{model}.forward` fails without `{listed}` ({cause}). If that is an input, call the "
        "model with all its inputs, or show them first: `wrap(model, example_input=(x, ...))`. If "
        "it is a state, pass `wrap(model, state=lambda batch_size: torch.zeros(batch_size, "
        "hidden))`."
    )


def unclear_state(model: str, readings: Sequence[str]) -> UnclearState:
    """A `forward` whose state arguments can be understood in several ways, with different results."""
    listed = "; ".join(dict.fromkeys(readings))
    name = readings[0].split("`")[1]
    return UnclearState(
        f"`{model}.forward` can be called from step to step in more than one way, with different "
        f"results: {listed}; or with no state at all. Say which argument is the state: "
        f"`wrap(model, state={{'{name}': lambda batch_size: torch.zeros(batch_size, hidden)}})`, "
        "and `state={}` if none is. Inside `forward`, assign the new state to the argument "
        f"itself (`{name} = ...; return output, {name}`): then nothing needs to be said."
    )


def reads_batch_in_order(model: str) -> BatchInOrder:
    """A step that loops over the batch."""
    return BatchInOrder(
        f"`{model}.forward`, called with one time step `(batch, ...)`, reads the samples of the "
        "batch one after the other: it takes the first axis for time (a loop over `x`; `nn.GRU` "
        "and its relatives read a 2-D input as one sequence without batch). For one step of a "
        "batch give the layer a time axis (`self.gru(x.unsqueeze(0), h)`), or wrap a model that "
        "takes whole sequences `(time, batch, ...)`."
    )


def time_on_a_later_axis(model: str, axis: int) -> NotSupportedError:
    """A model that loops over the third axis of its input, or a later one."""
    shape = f"(batch, {'channels' if axis == 2 else '...'}, time{', ...' if axis == 2 else ''})"
    return NotSupportedError(
        f"`{model}.forward` loops over axis {axis} of its input: it takes sequences as {shape}. "
        "The bridge takes time on the first or second axis. Wrap a module that brings it there: "
        "its `forward(self, x)`, with `x` as (batch, time, ...), returns "
        f"`self.model(x.movedim(1, {axis}))`; move the output's time axis to the second too."
    )


def other_layout(model: str, batch_first: bool) -> InputError:
    """A model whose layout was not known when its sequence was cut into steps."""
    layout = "(batch, time, ...)" if batch_first else "(time, batch, ...)"
    return InputError(
        f"`{model}.forward` takes sequences as {layout}, which could not be seen before the first "
        f"input. Say so: `wrap(model, batch_first={batch_first})`, or show one time step: "
        "`wrap(model, example_input=x)`."
    )


def autocast(place: str) -> NotSupportedError:
    """Autocast inside a traced model."""
    return NotSupportedError(
        f"`torch.autocast` is on, in {place}. The bridge computes in the dtypes of the model's own "
        "tensors and would silently give other numbers than torch. Leave autocast out, or convert "
        "the model (`model.bfloat16()`)."
    )


def python_state(names: list[str]) -> TracingError:
    """A step that depends on a Python value that changes."""
    return TracingError(
        "The step depends on a Python value that changes from step to step "
        f"({', '.join(f'`{n}`' for n in names)}), such as a counter in `if self.t % 2`. One step "
        "is compiled once, so its value would be frozen. Keep it in a tensor buffer and choose "
        "with `torch.where`, or pass it as an input."
    )


def unseen_state(states: list[str]) -> UnseenState:
    """A step whose result depends on something that is in no tensor or attribute."""
    known = ", ".join(f"`{name}`" for name in states) or "none"
    return UnseenState(
        f"A second step from the same input and the same states ({known}) gives something else "
        "than the model itself gave. Something that the bridge cannot see changes from step to "
        "step: a closure, a global, an object kept in an attribute, an iterator, Python's or "
        "NumPy's random numbers. One step is compiled once, so it would be frozen. Keep it in a "
        "tensor attribute or buffer of the module, or pass it as an input."
    )


def stateless_step(model: str, reason: Exception) -> str:
    """A model without a state that mixes the steps of a whole sequence, as a warning."""
    return (
        f"`{model}.forward` runs on one time step `(batch, ...)` and keeps no state, so each step "
        "stands alone. It also takes whole sequences, and mixes their steps in a way that cannot "
        f"be run step by step: {reason} If it is meant to take sequences, that is the reason why "
        "it cannot be wrapped; if single steps, say so with `wrap(model, sequence=False)`."
    )


def start_parameters(names: Sequence[str]) -> str:
    """Parameters that only make the initial state, as a warning."""
    listed = ", ".join(f"`{name}`" for name in names)
    return (
        f"{listed}: used only to make the initial state. The state starts from the value of now, "
        "as a constant, so this gets no gradient and is not trained. Freeze it "
        "(`requires_grad_(False)`) to say that this is meant."
    )


def left_over(model: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """State that an earlier run left in attributes, as a warning."""
    listed = ", ".join(
        f"`{name}` (shape {tuple(t.shape)}, norm {float(torch.linalg.vector_norm(t)):.3g})"
        for name, t in tensors.items()
    )
    first = next(iter(tensors))
    return (
        f"`{model}` holds state that an earlier run seems to have left: {listed}. Every sequence "
        "will start from it, not from what the model starts from when it is new. Reset the model "
        f"before `wrap`: by its own reset function, or set `{first}` to None or zeros, as its "
        "`__init__` does. If this start is meant, silence the warning: "
        '`warnings.filterwarnings("ignore", message=".*seems to have left")`.'
    )


def backward_hook(layer: str, path: str) -> NotSupportedError:
    """A module with hooks on its backward pass."""
    return NotSupportedError(
        f"Module `{path or '(root)'}` ({layer}) has a backward hook. JAX differentiates the traced "
        "step, and the hook would silently not run. Remove the hook (`handle.remove()`), or write "
        "it as a `torch.autograd.Function`, whose `backward` is kept. Hooks on parameters "
        "(`parameter.register_hook`) are fine: they are applied to the final gradient."
    )


def scripted(layer: str, path: str) -> NotSupportedError:
    """A scripted module whose Python code is needed."""
    return NotSupportedError(
        f"Module `{path or '(root)'}` is a `{layer}` compiled by TorchScript. The bridge traces "
        "Python code; a scripted module shows neither its state nor, once it is optimised, its "
        "gradient. Wrap the model with the module that was given to `torch.jit.script` or "
        "`torch.jit.trace`; the weights are the same."
    )


def no_backward(function: str, place: str) -> NotSupportedError:
    """An `autograd.Function` that declares no gradient."""
    return NotSupportedError(
        f"`{function}` defines neither `backward` nor `vjp`, and is applied to a tensor that needs "
        f"a gradient, in {place}. Define one of them, or apply it under `torch.no_grad()` if no "
        "gradient should pass."
    )


def context_attribute(name: str, place: str) -> NotSupportedError:
    """Something that torch's `ctx` has and the bridge's has not."""
    return NotSupportedError(
        f"An `autograd.Function` uses `ctx.{name}`, in {place}, which the bridge does not have: "
        "JAX differentiates the traced step, and there is no torch graph to ask about. Save what "
        "`backward` needs with `ctx.save_for_backward` or as an attribute of `ctx`."
    )


def inside_a_transform(place: str) -> NotSupportedError:
    """A tensor of `torch.vmap` or a transform of `torch.func`."""
    return NotSupportedError(
        f"`forward` uses `torch.vmap`, or `torch.func.grad` or another transform of `torch.func`, "
        f"in {place}. The bridge traces torch calls on tensors that these transforms cannot wrap. "
        "Write the extra axis into the operations (`torch.einsum`, `torch.matmul`, broadcasting), "
        "and a derivative as its formula. `torch.func.functional_call` is fine."
    )


def tensor_hook(place: str) -> NotSupportedError:
    """A hook on an intermediate tensor."""
    return NotSupportedError(
        f"`register_hook` is called on a tensor inside `forward`, in {place}. JAX differentiates "
        "the traced step, and the hook would silently not run. Write it as a "
        "`torch.autograd.Function`, whose `backward` is kept."
    )


def computed_initial_state(path: str, argument: str) -> StateError:
    """An initial state that depends on the input."""
    return StateError(
        f"The initial state `{argument}` of `{path}` is computed from the input. The bridge "
        "carries that state from step to step, so it would be computed once, from the example "
        "input. Pass the state as an argument of the model's `forward(x, state)`, or start from "
        "zeros."
    )


def wrong_input(found: list[tuple], expected: list[tuple], batch_size: int | None) -> InputError:
    """An input whose shape does not fit the states."""
    hint = ""
    if len(found) == len(expected) and any(
        len(f) == len(e) + 1 for f, e in zip(found, expected, strict=True)
    ):
        hint = " It looks like a whole sequence: loop over time, or use `OnlineLearner.gradients` or `brainstate.transform.for_loop`."
    elif len(found) == len(expected) and any(
        f[1:] == e[1:] for f, e in zip(found, expected, strict=True)
    ):
        hint = " Call `net.init_state(batch_size=...)` with the batch size of the input first."
    return InputError(
        f"`net(x)` takes one time step of shape {_shapes(expected)} (batch size {batch_size}) and "
        f"got {_shapes(found)}.{hint}"
    )


def _shapes(shapes: list[tuple]) -> str:
    return ", ".join(str(s) for s in shapes)


def model_fails(model: str, shapes: list[tuple], error: Exception) -> InputError:
    """The torch model itself raises on an input."""
    return InputError(
        f"The torch model `{model}` itself fails on an input of shape {_shapes(shapes)} with "
        f"{type(error).__name__}: {error}\n"
        "`net(x)` takes one time step, `(batch, ...)`, without a time axis, in the model's dtype. "
        "If that is what it got, the error is the model's own."
    )


def bridge_failed(model: str, error: Exception) -> TracingError:
    """Something other than the torch model raised."""
    return TracingError(
        f"The bridge failed on `{model}` with {type(error).__name__}: {error}\n"
        "This is not an error of the torch model but one of the bridge, or of a version that it "
        "was not tested with (see Install in the README). Please report it with the traceback."
    )


def wrong_names(missing: list[str], unexpected: list[str]) -> InputError:
    """A state dict that does not fit the model."""
    parts = ["The state dict does not fit the model."]
    if missing:
        parts.append(f"Missing names: {', '.join(missing)}.")
    if unexpected:
        parts.append(f"Unexpected names: {', '.join(unexpected)}.")
    return InputError(" ".join([*parts, "Pass `strict=False` to take what fits."]))


def wrong_kind(name: str, found: torch.dtype, expected: torch.dtype) -> InputError:
    """A real tensor for a complex one, or the other way round."""
    return InputError(
        f"The state dict has `{name}` as `{found}`; the model's is `{expected}`. Convert it first: "
        f"`tensor.to({expected})`."
    )


def wrong_shape(name: str, found: tuple, expected: tuple) -> InputError:
    """A tensor of a state dict with another shape."""
    return InputError(
        f"The state dict has `{name}` of shape {found}; the model's is {expected}. Load a state "
        "dict of the same architecture."
    )
