"""What the front-end says when a model cannot be bridged: what was found, where, why, and what to
do.
"""

from __future__ import annotations

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import etrace_bridge as eb
from etrace_bridge.frontend.ops import registry

B, H = 3, 4
HERE = r"test_frontend_errors\.py:\d+, in [\w<>]+: `.*`"


class Base(nn.Module):
    """A cell whose `body` goes wrong in the middle of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(H, H)
        self.inner = Inner(self.body)

    def body(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = torch.zeros_like(x) if h is None else h
        h = torch.tanh(self.fc(x) + h)
        return self.inner(h), h


class Inner(nn.Module):
    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def cell(body: Any) -> nn.Module:
    """A cell that runs `body` in its submodule `inner`."""
    return type("Cell", (Base,), {"body": lambda self, x: body(x)})()


def fails(
    module: nn.Module, error: type[Exception], *parts: str, x: Any = None, **options: Any
) -> str:
    """Run one step and check that it raises with a message that has all the parts; the model must
    be left as it was.
    """
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(error) as caught:
        net = eb.wrap(module, **options)
        net.init_state(B)
        net(torch.randn(B, H) if x is None else x)
    message = str(caught.value)
    for part in parts:
        assert re.search(part, message, re.DOTALL), f"{part!r} is not in: {message}"
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert issubclass(error, eb.BridgeError)
    return message


# ---- ops


@torch.library.custom_op("etrace_bridge_tests::mystery", mutates_args=())
def mystery(x: Tensor) -> Tensor:
    return x.sinh() * 2


@mystery.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_missing_op_tells_how_to_register_it() -> None:
    module = cell(lambda x: mystery(x))
    message = fails(
        module,
        eb.UnsupportedOpError,
        r"`etrace_bridge_tests\.mystery\.default` has no JAX rule",
        r"module `inner`",
        HERE,
        r'@eb\.register_op\("etrace_bridge_tests::mystery"\)',
    )
    example = message[message.index("    import jax") :]
    assert len([line for line in example.splitlines() if line.strip()]) <= 5

    namespace: dict[str, Any] = {}
    code = re.sub("^    ", "", example, flags=re.MULTILINE).replace(
        "jnp.tanh(input)", "2 * jnp.sinh(input)"
    )
    exec(code, namespace)  # the example in the message works as it stands
    net = eb.wrap(module)
    net.init_state(B)
    x = torch.randn(B, H)
    np.testing.assert_allclose(net(x), module(x)[0].detach(), atol=1e-6)


# ---- values that are not known


def test_data_dependent_if() -> None:
    fails(
        cell(lambda x: x if x.sum() > 0 else -x),
        eb.TracingError,
        "Python `if`.*depends on the value",
        "module `inner`",
        HERE,
        r"torch\.where\(condition, a, b\)",
    )


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (lambda x: x * x.sum().item(), "`item` reads the value"),
        (lambda x: x * float(x.detach().sum()), "`float` reads the value"),
        (lambda x: x * int(x.detach().sum()), "`int` reads the value"),
        (lambda x: x + sum(x.tolist()[0]), "`tolist` reads the value"),
        (lambda x: x + torch.tensor(x.detach().numpy()), "`numpy` reads the value"),
        (lambda x: x[: x.argmax()], "reads the value"),
        (lambda x: x if torch.equal(x, x) else -x, "`equal` asks for a Python answer"),
        (lambda x: x if torch.allclose(x, x) else -x, "`allclose` asks for a Python answer"),
    ],
)
def test_reading_a_value(body: Any, what: str) -> None:
    fails(
        cell(body),
        eb.TracingError,
        what,
        "module `inner`",
        HERE,
        "One step is compiled once for all values",
    )


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x[x > 0],
        lambda x: x[x > 0].mean(),
        lambda x: x + x[x > 0].shape[0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.where(x > 0),
        lambda x: torch.unique(x),
    ],
)
def test_data_dependent_shape(body: Any) -> None:
    fails(
        cell(body),
        eb.TracingError,
        "depends on",
        "module `inner`",
        HERE,
        r"torch\.where\(mask|torch\.where\(condition",
    )


# ---- layers that cannot run online


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_bidirectional(kind: type) -> None:
    module = nn.ModuleDict({"rnn": kind(H, H, bidirectional=True)})
    fails(
        module,
        eb.NotSupportedError,
        rf"`rnn` \(nn\.{kind.__name__}\) cannot run online: it is bidirectional",
        "bidirectional=False",
    )


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(H, H)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.full((x.shape[1],), x.shape[0]))
        return self.rnn(packed)[0].data


def test_packed_sequence() -> None:
    fails(Packed(), eb.NotSupportedError, "packed sequence", "mask", sequence=True)


# ---- tensors that would silently not learn


def test_captured_tensor_that_requires_grad() -> None:
    weight = torch.randn(H, requires_grad=True)
    fails(
        cell(lambda x: x * weight),
        eb.TracingError,
        r"tensor of shape \(4,\) that requires grad and is no parameter",
        "module `inner`",
        HERE,
        r"nn\.Parameter\(w\)",
    )


def test_captured_parameter_of_another_module() -> None:
    other = nn.Linear(H, H)
    fails(
        cell(lambda x: other(x)),
        eb.TracingError,
        "requires grad and is no parameter of the wrapped module",
        "wrap the module that owns it",
    )


class Clamps(Base):
    def body(self, x: Tensor) -> Tensor:
        self.fc.weight.data.clamp_(-0.1, 0.1)
        return x


def test_writing_to_a_parameter() -> None:
    fails(
        Clamps(),
        eb.TracingError,
        r"writes to its parameter `fc\.weight` in place",
        "module `inner`",
        HERE,
        "clamp",
    )


def test_backward_hooks() -> None:
    module = cell(lambda x: x)
    module.fc.register_full_backward_hook(lambda *_: None)
    fails(
        module,
        eb.NotSupportedError,
        r"`fc` \(Linear\) has a backward hook",
        r"torch\.autograd\.Function",
    )

    def hooked(x: Tensor) -> Tensor:
        x.register_hook(lambda g: g * 2)
        return x

    fails(
        cell(hooked),
        eb.NotSupportedError,
        "`register_hook` is called on a tensor inside `forward`",
        "module `inner`",
        HERE,
    )


# ---- in-place writes


def refuses(body: Any, error: type[Exception], pattern: str) -> None:
    """Trace a function that torch itself refuses, too."""
    with pytest.raises(error, match=pattern):
        eb.trace_function(body)(jnp.ones((B, H)))
    with pytest.raises(RuntimeError):
        body(torch.ones(B, H))


def test_write_through_an_expanded_view() -> None:
    refuses(
        lambda x: x[:1].expand(B, H).add_(1.0),
        eb.TracingError,
        rf"(?s)one element of memory appears several times.*{HERE}.*\.clone\(\)",
    )


def test_shared_memory_that_cannot_be_followed() -> None:
    memory = torch.zeros(2 * B, H)
    odd, part = memory.as_strided((B, H), (2 * H, 1)), memory.view(torch.int32)

    def body(x: Tensor) -> Tensor:
        odd.add_(x)
        return x + part[0].to(x.dtype)

    with pytest.raises(
        eb.TracingError,
        match=rf"(?s)In-place write that cannot be followed.*in another layout.*{HERE}",
    ):
        eb.trace_function(body)(jnp.ones((B, H), jnp.float32))


def test_inplace_op_that_changes_the_shape() -> None:
    pattern = rf"(?s)shape \(3, 4\) for a tensor of shape \(1, 4\).*{HERE}.*cannot change a shape"
    refuses(lambda x: x[:1].add_(x), eb.TracingError, pattern)


def test_rule_that_refuses_its_arguments_names_the_place() -> None:
    pattern = rf"(?s)matmul\(float\d\d\[3, 4\], float32\[7, 7\]\).*{HERE}"
    refuses(lambda x: x @ torch.ones(7, 7), eb.InputError, pattern)


# ---- dtypes, inputs, states


@pytest.mark.x32
def test_float64_without_x64() -> None:
    fails(
        nn.GRU(H, H).double(),
        eb.NotSupportedError,
        r"`weight_ih_l0` is `torch\.float64`",
        "64-bit types disabled",
        "jax_enable_x64",
    )


def test_forgot_init_state() -> None:
    net = eb.wrap(nn.GRU(H, H))
    with pytest.raises(
        eb.StateError, match=r"do not exist yet\. Call `net\.init_state\(batch_size=\.\.\.\)`"
    ):
        net(torch.randn(B, H))


def test_a_whole_sequence_instead_of_a_step() -> None:
    fails(
        nn.GRU(H, H),
        eb.InputError,
        r"takes one time step of shape \(3, 4\) \(batch size 3\) and got \(7, 3, 4\)",
        "whole sequence",
        x=torch.randn(7, B, H),
    )


def test_wrong_batch_size() -> None:
    fails(
        nn.GRU(H, H),
        eb.InputError,
        r"got \(5, 4\)",
        r"Call `net\.init_state\(batch_size=\.\.\.\)`",
        x=torch.randn(5, H),
    )


def test_wrong_feature_size() -> None:
    pattern = r"`GRU` itself fails on an input of shape \(3, 9\).*Expected 4, got 9"
    fails(nn.GRU(H, H), eb.InputError, pattern, x=torch.randn(B, 9))


def test_an_error_of_the_model_is_called_its_own() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("of my own")

    fails(
        Raises(),
        eb.InputError,
        "`Raises` itself fails",
        "RuntimeError: of my own",
        "the error is the model's own",
    )


def _error_in_a_rule(patch: pytest.MonkeyPatch) -> None:
    broken = registry.OpRule("tanh", lambda *_: 1 / 0)
    plain = registry.lookup
    patch.setattr(
        registry, "lookup", lambda function: broken if function is torch.tanh else plain(function)
    )


def _error_after_the_trace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("etrace_bridge.frontend.step.simplify", lambda *_: 1 / 0)


def _error_while_looking_for_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("etrace_bridge.frontend.discover.find_plan", lambda *_, **__: 1 / 0)


@pytest.mark.parametrize(
    "damage", [_error_in_a_rule, _error_after_the_trace, _error_while_looking_for_states]
)
def test_an_error_of_the_bridge_is_not_blamed_on_the_model(
    damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(monkeypatch)
    model = nn.Sequential(nn.Flatten(), nn.Tanh())
    message = fails(
        model, eb.TracingError, "The bridge failed on `Sequential` with ZeroDivisionError"
    )
    assert "itself fails" not in message and "model's own" not in message


def test_not_a_module() -> None:
    with pytest.raises(
        eb.InputError, match=r"`wrap` takes a `torch\.nn\.Module`, not `function`.*trace_function"
    ):
        eb.wrap(lambda x: x)  # type: ignore[arg-type]


def test_input_that_is_no_array() -> None:
    net = eb.wrap(nn.GRU(H, H))
    net.init_state(B)
    with pytest.raises(eb.InputError, match=r"`input\['a'\]` is a `int`"):
        net({"a": 1})


class NeedsState(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(H, H)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(self.fc(x) + state * 2)
        return state, state


def test_state_that_has_to_be_given() -> None:
    fails(
        NeedsState(),
        eb.StateError,
        r"`NeedsState\.forward` needs a state in `state`",
        r"wrap\(model, state=lambda batch_size:",
        example_input=torch.randn(B, H),
    )


class StartsElsewhere(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(H, H)

    def forward(self, x: Tensor, h: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = torch.ones_like(x) if h is None else h
        h = torch.tanh(self.fc(x) + h)
        return h, h


def test_initial_state_that_is_not_zero() -> None:
    fails(
        StartsElsewhere(),
        eb.StateError,
        r"\(root\)` \(StartsElsewhere\) starts from a state that is not zero",
        "state=lambda",
    )
    module, x = StartsElsewhere(), torch.randn(B, H)
    net = eb.wrap(module, state=lambda batch_size: torch.ones(batch_size, H))
    net.init_state(B)
    np.testing.assert_allclose(net(x), module(x)[0].detach(), atol=1e-6)


def test_state_for_a_module_that_takes_none() -> None:
    fails(
        nn.Linear(H, H),
        eb.InputError,
        r"`Linear\.forward` has no argument for it",
        state=torch.zeros(B, H),
    )


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.history = nn.Linear(H, H), []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(self.fc(x))
        return torch.stack(self.history).mean(0)


def test_state_that_grows() -> None:
    fails(
        Grows(),
        eb.StateError,
        r"Attribute `history` of module `\(root\)` changes its shape or structure",
        "fixed shape",
    )


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.t = nn.Linear(H, H), 0
        self.register_buffer("h", torch.zeros(B, H))

    def forward(self, x: Tensor) -> Tensor:
        self.t += 1
        self.h = self.h + self.fc(x) * (1.0 if self.t % 2 else -1.0)
        return self.h


def test_step_that_depends_on_a_python_counter() -> None:
    fails(Counts(), eb.BridgeError, "`t`")


def test_traced_tensor_that_escapes() -> None:
    kept: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    net = eb.wrap(cell(body))
    net.init_state(B)
    net(torch.randn(B, H))
    with pytest.raises(
        eb.TracingError, match="used after its trace had ended, by `add`.*test_frontend_errors"
    ):
        torch.add(kept[-1], 1)
