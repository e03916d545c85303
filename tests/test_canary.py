"""The canary: every private part of torch, JAX, brainstate and torch2jax is checked, and a broken
one is refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import brainstate
import jax
import pytest
import torch
import torch2jax
from torch import nn

import etrace_bridge as eb
from etrace_bridge import _jax_compat
from etrace_bridge.frontend import canary, functions
from etrace_bridge.frontend.ops import registry


@pytest.fixture(autouse=True)
def _run_again() -> Iterator[None]:
    canary.check_hooks.cache_clear()
    yield
    canary.check_hooks.cache_clear()


def test_every_hook_holds_here() -> None:
    for hook in canary.HOOKS:
        assert hook.holds(), hook.name


@pytest.mark.x32
def test_every_hook_holds_in_the_default_mode() -> None:
    canary.check_hooks()


def in_a_jitted_function(check: Callable) -> None:
    jax.jit(lambda x: (check(), x)[1])(1.0)


def in_inference_mode(check: Callable) -> None:
    with torch.inference_mode():
        check()


def without_gradients(check: Callable) -> None:
    with torch.no_grad():
        check()


def without_jit(check: Callable) -> None:
    with jax.disable_jit():
        check()


def on_the_meta_device(check: Callable) -> None:
    with torch.device("meta"):
        check()


def in_half_precision(check: Callable) -> None:
    torch.set_default_dtype(torch.float16)
    try:
        check()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "where",
    [
        in_a_jitted_function,
        in_inference_mode,
        without_gradients,
        without_jit,
        on_the_meta_device,
        in_half_precision,
    ],
)
def test_it_holds_wherever_the_first_wrap_is(where: Callable) -> None:
    where(canary.check_hooks)


def test_it_runs_once_per_process(monkeypatch: pytest.MonkeyPatch) -> None:
    count = []
    hook = canary.Hook("`counted`", "this test", lambda: bool(count.append(1)) or True)
    monkeypatch.setattr(canary, "HOOKS", (hook,))
    for _ in range(3):
        eb.wrap(nn.GRU(2, 2))
    assert len(count) == 1


def test_a_refusal_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "HOOKS", (canary.Hook("`broken`", "this test", lambda: False),))
    for _ in range(2):
        with pytest.raises(eb.NotSupportedError, match="`broken` does not do what it did"):
            eb.wrap(nn.GRU(2, 2))


def apply_that_no_lookup_sees(patch: pytest.MonkeyPatch) -> None:
    """As torch 2.14 did to the bridge: `apply` no longer comes by what the bridge watches."""
    patch.setattr(functions, "intercepted_functions", contextlib.nullcontext)
    patch.setattr("etrace_bridge.frontend.trace.intercepted_functions", contextlib.nullcontext)


def apply_that_turns_gradients_off_first(patch: pytest.MonkeyPatch) -> None:
    class Torch:
        is_grad_enabled = staticmethod(lambda: False)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    patch.setattr(functions, "torch", Torch())


def module_calls_that_bypass_call(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Any) -> Any:
        for module in self:
            x = module.forward(x)
        return x

    patch.setattr(nn.Sequential, "forward", forward)


def calls_that_the_mode_does_not_see(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("etrace_bridge.frontend.trace.BridgeMode", contextlib.nullcontext)


def aten_that_is_not_reached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch._C, "DisableTorchFunctionSubclass", contextlib.nullcontext)
    patch.setattr(
        "etrace_bridge.frontend.tensor.TracedTensor.__torch_dispatch__",
        torch._C._disabled_torch_dispatch_impl,
    )


def reads_that_are_missing(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(torch._C, "DisableTorchFunction")


def names_that_changed(patch: pytest.MonkeyPatch) -> None:
    # which remembers the names it has seen
    patch.setattr(registry, "lookup", lambda function: None)


def hooks_that_moved(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.Module, "register_full_backward_hook", lambda *_, **__: None)


def passes_that_cannot_be_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch._C, "_current_graph_task_id", lambda: -1)


def versions_that_stand_still(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.Tensor, "_version", 0)


def jaxprs_that_lose_constants(patch: pytest.MonkeyPatch) -> None:
    plain = _jax_compat.partial_eval.dce_jaxpr

    def lossy(jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
        live, used = plain(jaxpr, *args, **kwargs)
        return live.replace(
            constvars=[],
            invars=[*live.constvars, *live.invars],
            debug_info=live.debug_info.with_unknown_names(),
        ), used

    patch.setattr(_jax_compat.partial_eval, "dce_jaxpr", lossy)


def equations_without_context(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(_jax_compat.source_info_util, "user_context")


def states_in_another_form(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        brainstate.transform.StatefulFunction, "get_states", lambda self, *args, **kwargs: ()
    )


def rules_that_are_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch2jax, "HANDLED_FUNCTIONS", {})


BROKEN: dict[Callable, str] = {
    apply_that_no_lookup_sees: "`torch.autograd.Function.apply`",
    apply_that_turns_gradients_off_first: "`torch.autograd.Function.apply`",
    module_calls_that_bypass_call: "`torch.nn.Module.__call__`",
    calls_that_the_mode_does_not_see: "`__torch_function__`",
    aten_that_is_not_reached: "`torch._C.DisableTorchFunctionSubclass`",
    reads_that_are_missing: "`torch._C.DisableTorchFunction`",
    names_that_changed: "the names of torch's functions",
    hooks_that_moved: "`Tensor._backward_hooks`",
    passes_that_cannot_be_told: "`torch._C._current_graph_task_id`",
    versions_that_stand_still: "`Tensor._version`",
    jaxprs_that_lose_constants: "`jax._src.interpreters.partial_eval.dce_jaxpr`",
    equations_without_context: "`jax._src.source_info_util`",
    states_in_another_form: "`brainstate.transform.StatefulFunction`",
    rules_that_are_gone: "`torch2jax.HANDLED_FUNCTIONS`",
}


def test_every_hook_has_a_test_that_breaks_it() -> None:
    assert {hook.name for hook in canary.HOOKS} == {
        hook.name for hook in canary.HOOKS if hook.name.startswith(tuple(BROKEN.values()))
    }
    assert len(set(BROKEN.values())) == len(canary.HOOKS)


@pytest.mark.parametrize("damage", BROKEN, ids=lambda f: f.__name__)
def test_a_broken_hook_is_refused_by_name_and_versions(
    damage: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hook,) = [hook for hook in canary.HOOKS if hook.name.startswith(BROKEN[damage])]
    assert hook.holds()
    with monkeypatch.context() as patch:
        # what one part of torch does, another may need: break and check one
        patch.setattr(canary, "HOOKS", (hook,))
        damage(patch)
        with pytest.raises(eb.NotSupportedError) as caught:
            eb.wrap(nn.GRU(2, 2))
    message = str(caught.value)
    assert message.startswith(hook.name) and hook.needed_for in message
    for library in ("torch", "jax", "brainstate", "torch2jax"):
        assert f"{library} {version(library)}" in message
    assert hook.holds()
