"""Every zoo module, bridged: outputs, states and gradients of eight steps against torch's own."""

from __future__ import annotations

from functools import cache
from typing import Any

import brainstate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from brainstate.transform import StatefulFunction

import etrace_bridge as eb
from quick_jit import quick_jit
from share import in_turn
from test_zoo_rules import TRAINED
from torch_zoo import CASES, STEPS, Case, Reference, check_live, find, reference, tensors
from zoo.online import after_hooks

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
DTYPES = {"float32": torch.float32, "float64": torch.float64}

# Warnings of the libraries themselves while they build or run their own modules.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Inhibition is an unstable feature:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:LSTM with projections is not supported with oneDNN:UserWarning"
    ),
]


@cache
def torch_result(name: str, dtype: str) -> Reference:
    """Torch's run of a case, shared by the tests."""
    return reference(find(name), DTYPES[dtype])


# 0.04 v^2 + 5 v + 140 cancels numbers of some hundred at each step, so torch's float32 gradient is
# itself off by 1.3e-5.
CANCELS = ("norse-izhikevich_recurrent_cell",)


# exp((v - theta) / delta) with a small delta enlarges what the rounding of v differs by.
ENLARGES = ("norse-lif_adex_cell",)

# Every module in float32. In float64 test_zoo_rules.py compares the gradients of half of the
# trained ones with torch's, so here it is one in three, and all that are not trained.
_double = [case.name for case in CASES if not case.float32_only]
_double = in_turn(_double, 3, lambda name: name not in TRAINED or name in ENLARGES)
RUNS = [(case.name, "float32") for case in CASES] + [(name, "float64") for name in _double]


def rounding(name: str) -> float:
    """Twice the error of torch's own float32 gradients, by its float64 ones: two programs that
    round differently.
    """
    single, double = torch_result(name, "float32").grads, torch_result(name, "float64").grads
    worst = max(
        float((single[key].double() - g).abs().max() / g.abs().max()) for key, g in double.items()
    )
    assert 1e-6 < worst < 3e-5  # no spike differs between the two
    return 2 * worst


def bridged_result(
    case: Case, module: torch.nn.Module, ref: Reference, xs: torch.Tensor
) -> dict[str, Any]:
    """Scan the bridged step over the sequence and differentiate the loss with `jax.grad`."""
    net = eb.wrap(module, case.state, example_input=xs[0])
    net.init_state(batch_size=case.batch_size)
    xs_jax = jnp.asarray(xs.numpy())
    step = StatefulFunction(net, return_only_write=False)
    states = step.get_states(xs_jax[0])
    paths = {id(state): ".".join(map(str, path)) for path, state in net.states().items()}
    trained = [i for i, state in enumerate(states) if isinstance(state, brainstate.ParamState)]
    hidden = {
        paths[id(s)]: i for i, s in enumerate(states) if isinstance(s, brainstate.HiddenState)
    }
    weights = [jnp.asarray(np.stack(column)) for column in zip(*ref.weights, strict=True)]

    def loss(parameters: list[Any], xs: Any) -> tuple[Any, Any]:
        start = [state.value for state in states]
        for i, value in zip(trained, parameters, strict=True):
            start[i] = value

        def body(values: list[Any], x: Any) -> tuple[list[Any], Any]:
            new, out = step.jaxpr_call(values, x)
            return list(new), (jax.tree.leaves(out), {name: new[i] for name, i in hidden.items()})

        _, (outputs, trajectory) = jax.lax.scan(body, start, xs)
        total = sum(
            ((w.astype(y.dtype) + y / 4) * y).reshape(STEPS, -1).mean(axis=1).sum()
            for w, y in zip(weights, outputs, strict=True)
        )
        return total, (outputs, trajectory)

    values = [states[i].value for i in trained]
    argnums = (0, 1) if xs.is_floating_point() else (0,)
    run = quick_jit(jax.value_and_grad(loss, argnums, has_aux=True))
    (total, (outputs, trajectory)), grads = run(values, xs_jax)
    by_name = dict(zip((paths[id(states[i])] for i in trained), grads[0], strict=True))
    return {
        "net": net,
        "loss": total,
        "outputs": outputs,
        "states": trajectory,
        "grads": by_name,
        "input_grad": grads[1] if len(grads) > 1 else None,
    }


def assert_close(
    found: Any, wanted: torch.Tensor, tolerance: float, what: str, floor: float = 1.0
) -> None:
    """Equal shape and dtype, and values up to `tolerance` of the array's largest value (at least
    `floor`).
    """
    found, expected = np.asarray(found), wanted.detach().numpy()
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, torch has {expected.shape}"
    assert found.dtype == expected.dtype, f"{what}: dtype {found.dtype}, torch has {expected.dtype}"
    scale = max(floor, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * scale, err_msg=what)


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=[f"{name}-{dtype}" for name, dtype in RUNS])
def test_bridge_equals_torch(name: str, dtype: str) -> None:
    case = find(name)
    if not case.available:
        pytest.skip(f"{case.library} is not installed")
    ref, tolerance = torch_result(name, dtype), TOLERANCE[DTYPES[dtype]]
    check_live(case, ref)
    module, xs = case.build(DTYPES[dtype]), case.inputs(DTYPES[dtype])
    found = bridged_result(case, module, ref, xs)

    wanted = [
        torch.stack(column)
        for column in zip(*(tensors(o).values() for o in ref.trajectory.outputs), strict=True)
    ]
    assert len(found["outputs"]) == len(wanted)
    for i, (output, expected) in enumerate(zip(found["outputs"], wanted, strict=True)):
        assert_close(output, expected, tolerance, f"output {i}")

    assert set(found["states"]) == set(ref.trajectory.states[0])
    for key, states in found["states"].items():
        assert_close(
            states,
            torch.stack([step[key] for step in ref.trajectory.states]),
            tolerance,
            f"state {key}",
        )

    assert_close(found["loss"], ref.loss, tolerance, "loss")
    assert list(found["net"].parameter_names) == [
        n for n, p in module.named_parameters() if p.requires_grad
    ]
    assert set(found["grads"]) == set(ref.grads)
    # Gradients are small, so each is measured by its own largest value, however small (`check_live`
    # asks for one above 1e-4).
    # The worst of all is off by 8e-6 of its own size in float32. Outputs and states are of order
    # one: a spike or a voltage
    # near zero has no size of its own.
    if name in CANCELS and dtype == "float32":
        tolerance = rounding(name)
    if name in ENLARGES and dtype == "float64":
        tolerance = 1e-9
    for key, grad in found["grads"].items():
        assert_close(
            after_hooks(module, key, grad),
            ref.grads[key],
            tolerance,
            f"gradient of {key}",
            floor=0.0,
        )
    if ref.input_grad is not None:
        assert_close(
            found["input_grad"], ref.input_grad, tolerance, "gradient of the input", floor=0.0
        )

    # Wrapping and tracing left nothing behind in the module: it still runs as a fresh one does.
    for output, expected in zip(case.run(module, xs).outputs, ref.trajectory.outputs, strict=True):
        torch.testing.assert_close(output, expected, rtol=0, atol=0)


def test_zoo_is_large_and_covers_the_libraries() -> None:
    count: dict[str, int] = {}
    for case in CASES:
        count[case.library] = count.get(case.library, 0) + 1
    assert len({case.name for case in CASES}) == len(CASES) >= 90
    assert set(count) == {"torch", "snntorch", "norse", "spikingjelly", "ncps"}
    assert min(count.values()) >= 10
