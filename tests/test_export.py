"""`OnlineLearner.export`: the learning step as files, read without torch and without this package."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import torch
from torch.nn.functional import cross_entropy, mse_loss

import etrace_bridge as eb
from etrace_bridge.learning.exported import rebuild
from learner_models import make_data, make_net

ROOT = Path(__file__).parent.parent
STEPS = 100


def make_learner(dtype=torch.float32, optimizer=None, **options) -> eb.OnlineLearner:
    return eb.OnlineLearner(
        make_net(dtype, **options), loss=mse_loss, optimizer=optimizer or optax.adam(1e-2)
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A learner in the middle of a stream, and its folder."""
    with eb_mode(32):
        learner, (xs, ys) = make_learner(), make_data(STEPS + 3, dtype=torch.float32)
        for x, y in zip(xs[:3], ys[:3], strict=True):
            learner.step(x, y)
        return learner.export(tmp_path_factory.mktemp("export") / "model"), learner, xs[3:], ys[3:]


def eb_mode(precision: int):
    import brainstate

    return brainstate.environ.context(precision=precision)


def reader() -> str:
    """The reader that the documentation prints."""
    page = (ROOT / "docs" / "howto" / "device.md").read_text()
    return re.search(r"^```python title=\"read.py\"\n(.*?)^```$", page, flags=re.M | re.S).group(1)


BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "brainstate", "etrace_bridge", "safetensors", "optax", "flatbuffers"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
"""


@pytest.mark.x32
def test_a_process_with_jax_and_numpy_alone_learns_bit_for_bit_as_the_learner(exported, tmp_path):
    folder, learner, xs, ys = exported
    (tmp_path / "read.py").write_text(reader())
    np.savez(tmp_path / "data.npz", xs=xs.numpy(), ys=ys.numpy())
    script = (
        BLOCK
        + f"""
import numpy as np
from read import load
state, call = load({str(folder)!r})
data = np.load("data.npz")
losses, outputs = [], []
for x, y in zip(data["xs"], data["ys"]):
    state, loss, output = call("learn", state, x, y)
    losses.append(loss); outputs.append(output)
state, output = call("infer", state, data["xs"][0])
np.savez("found.npz", losses=losses, outputs=outputs, last=output, **{{"state " + n: x for n, x in state.items()}})
assert not {{"torch", "etrace_bridge", "brainstate"}} & set(sys.modules)
"""
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(tmp_path / "found.npz")
    before = {n: p.copy() for n, p in weights(learner).items()}
    infos = [learner.step(x, y) for x, y in zip(xs, ys, strict=True)]
    np.testing.assert_array_equal(found["losses"], [np.float32(i.loss) for i in infos])
    np.testing.assert_array_equal(found["outputs"], np.stack([np.asarray(i.output) for i in infos]))
    for n, (name, weight) in enumerate(weights(learner).items()):
        np.testing.assert_array_equal(found[f"state theta/{n}"], weight)
        assert np.abs(weight - before[name]).max() > 1e-3, f"{name} was not trained"
    expected = learner.predict(xs[:1], carry=True)[0].numpy()
    np.testing.assert_allclose(found["last"], expected, rtol=1e-5, atol=1e-6)
    assert found["losses"][-1] != found["losses"][0]


def weights(learner: eb.OnlineLearner) -> dict[str, np.ndarray]:
    runtime = learner.runtime
    return {
        n: np.asarray(t)
        for n, t in zip(runtime.store.compiled.weight_names, runtime.store.state.theta, strict=True)
    }


@pytest.mark.x32
def test_it_is_read_back_with_names_and_for_several_platforms(exported):
    folder, _, xs, ys = exported
    facts = json.loads((folder / "manifest.json").read_text())
    assert [p["platforms"] for p in facts["programs"]["learn"]] == [["cpu"], ["cuda", "tpu"]]
    assert facts["inputs"] == [{"name": "input 0", "shape": [3, 2], "dtype": "float32"}]
    assert facts["weights"] == [n for n, _ in make_net().named_parameters() if "spare" not in n]
    found = eb.load_exported(folder)
    assert repr(found).startswith("ExportedLearner(d_rtrl, ") and "input 0 (3, 2)" in repr(found)
    first, _ = found.step(xs[0], ys[0])
    for x, y in zip(xs[1:30], ys[1:30], strict=True):
        last, output = found.step(x, y)
    assert np.isfinite(float(first)) and output.shape == (3, 2) and not found.stopped
    assert found.predict(xs[0]).shape == (3, 2)
    with pytest.raises(eb.InputError, match="exported for"):
        found.step(xs[0, :2], ys[0, :2])


@pytest.mark.x32
def test_programs_for_other_devices_are_laid_out_for_them(exported):
    """On a CPU the guard adds up products with zeros, and an order is held; elsewhere it asks every
    array whether it is finite.
    """
    folder = exported[0]
    facts = json.loads((folder / "manifest.json").read_text())
    texts = {}
    for program in facts["programs"]["learn"]:
        made = rebuild("learn", facts, program, (folder / program["file"]).read_bytes())
        texts[program["platforms"][0]] = str(made.mlir_module())
    assert texts["cuda"].count("is_finite") > texts["cpu"].count("is_finite") > 0
    assert "optimization_barrier" in texts["cpu"] and "optimization_barrier" not in texts["cuda"]


@pytest.mark.x32
@pytest.mark.parametrize(
    "name",
    ["learn.cpu.stablehlo", "infer.cuda-tpu.stablehlo", "state.safetensors", "manifest.json"],
)
def test_damaged_files_are_refused(exported, tmp_path, name):
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in exported[0].iterdir():
        content = bytearray(file.read_bytes())
        if file.name == name:
            content[len(content) // 2] ^= 1
        (folder / file.name).write_bytes(content)
    with pytest.raises(eb.InputError, match=re.escape(name)):
        eb.load_exported(folder)
    (folder / name).unlink()
    with pytest.raises(eb.InputError, match=re.escape(name)):
        eb.load_exported(folder)


@pytest.mark.x32
def test_class_labels_a_torch_optimizer_and_writing_twice(tmp_path):
    net = make_net(torch.float32)
    learner = eb.OnlineLearner(
        net, loss=cross_entropy, optimizer=torch.optim.Adam(net.parameters(), 1e-2)
    )
    xs, _ = make_data(4, dtype=torch.float32)
    labels = torch.randint(0, 2, (4, 3))
    learner.step(xs[0], labels[0])
    for _ in range(2):
        folder = learner.export(tmp_path / "model", platforms=["cpu"])
    found = eb.load_exported(folder)
    for x, y in zip(xs[1:], labels[1:], strict=True):
        (value, output), expected = found.step(x, y), learner.step(x, y.numpy())
        assert float(value) == expected.loss
        np.testing.assert_allclose(
            value, cross_entropy(torch.tensor(np.asarray(output)), y), rtol=1e-5
        )
    for wrong in (2, -1):
        with pytest.raises(eb.InputError, match=rf"`target 0` has the value {wrong}, .* 0 to 1"):
            found.step(xs[0], torch.tensor([0, wrong, 1]))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.x32
def test_what_cannot_be_exported_says_why(tmp_path):
    xs, ys = make_data(dtype=torch.float32)
    learner = make_learner()
    with pytest.raises(eb.StateError, match="no step yet"):
        learner.export(tmp_path / "a")
    learner.step(xs[0])
    with pytest.raises(eb.StateError, match="no target"):
        learner.export(tmp_path / "a")
    none = eb.OnlineLearner(make_net(torch.float32), loss=mse_loss)
    with pytest.raises(eb.InputError, match="no optimizer"):
        none.export(tmp_path / "a")
    net = make_net(torch.float32)
    with pytest.raises(eb.NotSupportedError, match="runs in torch"):
        eb.OnlineLearner(net, loss=mse_loss, optimizer=torch.optim.Rprop(net.parameters())).export(
            tmp_path / "a"
        )
    (tmp_path / "b").mkdir()
    learner.step(xs[0], ys[0])
    with pytest.raises(eb.InputError, match="not an exported learner"):
        learner.export(tmp_path / "b")
    with pytest.raises(eb.InputError, match="manifest"):
        eb.load_exported(tmp_path / "b")


def test_files_of_another_precision_are_refused(exported):
    assert jax.config.jax_enable_x64
    with pytest.raises(eb.InputError, match="x64"):
        eb.load_exported(exported[0])


@pytest.mark.x32
@pytest.mark.parametrize("loss", [mse_loss, lambda o, t: ((o - t) ** 2).sum()], ids=["mean", "sum"])
def test_an_open_batch_size_learns_as_a_learner_of_that_size(tmp_path, loss):
    xs, ys = make_data(8, 5, dtype=torch.float32)
    learner = eb.OnlineLearner(make_net(torch.float32), loss=loss, optimizer=optax.sgd(0.05))
    learner.step(xs[0, :2], ys[0, :2])
    folder = learner.export(tmp_path / "model", batch="symbolic")
    learner.reset()
    with pytest.raises(eb.InputError, match="batch="):
        eb.load_exported(folder)
    found = eb.load_exported(folder, batch=5)
    for x, y in zip(xs, ys, strict=True):
        (value, output), expected = found.step(x, y), learner.step(x, y)
        np.testing.assert_allclose(float(value), expected.loss, rtol=1e-5)
        np.testing.assert_allclose(output, np.asarray(expected.output), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        found.predict(xs[0]), learner.predict(xs[:1], carry=True)[0].numpy(), rtol=1e-4, atol=1e-5
    )
    for n, weight in enumerate(weights(learner).values()):
        np.testing.assert_allclose(found.state[f"theta/{n}"], weight, rtol=1e-4, atol=1e-6)
    scope: dict = {}
    exec(compile(reader(), "read.py", "exec"), scope)
    state, call = scope["load"](folder, batch=4)
    assert call("learn", state, xs[0, :4].numpy(), ys[0, :4].numpy())[2].shape == (4, 2)


class Mixed(torch.nn.Module):
    """Batch elements that look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = torch.nn.RNN(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x - x.mean(1, keepdim=True))[0]


@pytest.mark.x32
def test_an_open_batch_size_is_refused_where_elements_depend_on_each_other(tmp_path):
    xs, _ = make_data(dtype=torch.float32)
    learner = eb.OnlineLearner(Mixed(), loss=mse_loss, optimizer=optax.sgd(0.05))
    learner.step(xs[0], torch.zeros(3, 3))
    with pytest.raises(eb.NotSupportedError, match="do not depend on each other"):
        learner.export(tmp_path / "model", batch="symbolic")
    noisy = make_learner(dropout=0.5)
    noisy.step(*(t[0] for t in make_data(dtype=torch.float32)))
    with pytest.raises(eb.NotSupportedError, match="rng_key"):
        noisy.export(tmp_path / "model", batch="symbolic")
    with pytest.raises(eb.InputError, match="'fixed' or 'symbolic'"):
        learner.export(tmp_path / "model", batch="any")
