"""The slope of the loss along a direction, carried forward, is torch BPTT's gradient times that
direction.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from etrace_bridge.step.slope import carried_states, push, run_slope, zero_tangent
from torch_zoo import check_live, find
from zoo.online import OnlineCase, step_loss

# All modules of the zoo are measured by `python benchmarks/fidelity.py`; these are of every kind.
MODULES = (
    "torch-gru_3_layers_no_bias",
    "torch-net-BatchNormCell-train",
    "snntorch-rleaky_one_to_one",
    "norse-lif_recurrent_cell_autapses",
    "spikingjelly-parametric_lif",
)
FLOAT32_INSIDE = 1e-7  # snnTorch's spikes are float32, whatever the module is


def test_push_is_forward_mode_where_only_reverse_mode_is_defined():
    @jax.custom_vjp
    def spike(v):
        return (v > 0).astype(v.dtype)

    spike.defvjp(lambda v: (spike(v), v), lambda v, cotangent: (cotangent / (1 + jnp.abs(v)) ** 2,))
    v, along = jnp.array([-1.0, 0.5, 3.0]), jnp.array([1.0, -2.0, 0.5])
    value, tangent, aux = push(lambda v: (spike(jnp.sin(v)), "kept"), [v], [along])
    np.testing.assert_array_equal(value, [0.0, 1.0, 1.0])
    np.testing.assert_allclose(
        tangent, along * np.cos(v) / (1 + np.abs(np.sin(v))) ** 2, rtol=1e-14
    )
    assert aux == "kept"


@pytest.mark.parametrize("name", MODULES)
def test_slope_is_the_gradient_of_bptt_times_the_direction(name):
    online = OnlineCase(find(name))
    check_live(online.case, online.ref)
    rng = np.random.default_rng(0)
    along = {n: rng.standard_normal(g.shape) for n, g in online.ref.grads.items()}
    wanted = [float((along[n] * g.numpy()).sum()) for n, g in online.ref.grads.items()]
    size = np.sqrt(
        sum((along[n] ** 2).sum() * (g.numpy() ** 2).sum() for n, g in online.ref.grads.items())
    )
    assert size > 1e-3 and abs(sum(wanted)) > 1e-3 * size  # something to compare
    tolerance = FLOAT32_INSIDE if name.startswith("snntorch") else 1e-12
    assert abs(online.slopes(along).sum() - sum(wanted)) <= tolerance * size


def test_the_tangent_goes_on_from_chunk_to_chunk():
    """Eight steps at once and four times two; a step without a loss moves the tangent too."""
    online = OnlineCase(find("torch-gru_cell"))
    program = online.compiled.program
    theta, hidden, other = online.compiled.read()
    targets = [np.stack(column) for column in zip(*online.ref.weights, strict=True)]
    along = [jnp.asarray(online.ref.grads[n].numpy()) for n in online.compiled.weight_names]
    weights = jnp.linspace(0.5, 1.5, len(online.xs))

    def run(loss, states, tangent, xs, targets, weights):
        return run_slope(program, theta, along, states, tangent, ([xs], targets, weights), loss)

    whole = run(
        step_loss, (hidden, other), zero_tangent(program), online.xs.numpy(), targets, weights
    )
    states, tangent, slopes = (hidden, other), zero_tangent(program), []
    for at in range(0, len(online.xs), 2):
        some = slice(at, at + 2)
        part = run(
            step_loss,
            states,
            tangent,
            online.xs[some].numpy(),
            [t[some] for t in targets],
            weights[some],
        )
        states, tangent = (part.hidden, part.other), part.tangent
        slopes.append(part.slopes)
    np.testing.assert_allclose(jnp.concatenate(slopes), whole.slopes, rtol=1e-12)
    np.testing.assert_allclose(tangent[0], whole.tangent[0], rtol=1e-12)
    assert float(jnp.abs(whole.tangent[0]).max()) > 1e-6
    silent = run(None, (hidden, other), zero_tangent(program), online.xs.numpy(), targets, weights)
    assert silent.slopes is None and silent.losses is None
    np.testing.assert_allclose(silent.tangent[0], whole.tangent[0], rtol=1e-12)


def test_running_statistics_are_carried_and_counters_are_not():
    online = OnlineCase(find("torch-net-BatchNormCell-train"))
    program = online.compiled.program
    carried = [program.state_vars[n].aval.dtype for n in carried_states(program)]
    assert len(carried) > 1 and all(jnp.issubdtype(d, jnp.floating) for d in carried)
    assert len(carried) < len(program.state_vars)
