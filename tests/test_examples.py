"""Every example runs, and what the learning examples claim holds in the small: online reaches 95% of torch's BPTT."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
OPTIONAL = {"snntorch": "snntorch", "sklearn": "scikit-learn", "norse": "norse", "spikingjelly": "spikingjelly", "ncps": "ncps"}


def skip_without_libraries(path: Path) -> None:
    """Skips an example whose optional library is not installed."""
    words = {line.split()[1].split(".")[0] for line in path.read_text().splitlines() if line.startswith(("import ", "from "))}
    for name in words & set(OPTIONAL):
        pytest.importorskip(name, reason=f"{OPTIONAL[name]} is not installed")


def load(name: str) -> ModuleType:
    path = next(p for p in EXAMPLES if p.stem == name)
    skip_without_libraries(path)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_are_there():
    names = {p.stem for p in EXAMPLES}
    assert names >= {"delayed_copy_gru", "digits_lstm", "digits_snntorch", "endless_stream", "torch_optim_loop", "checkpoint_resume"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path, tmp_path):
    skip_without_libraries(path)
    environment = os.environ | {"MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, str(path), "--small"], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=600, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) >= 5, "it says nothing"
    assert '"""' in path.read_text()[:300] and "--small" in path.read_text()


@pytest.mark.x32
def test_delayed_copy_is_learned_online():
    online, bptt = load("delayed_copy_gru").run(updates=120, hidden=24, steps=12, batch=16, delay=2)
    assert bptt > 0.9, "BPTT itself does not learn the task: nothing is compared"
    assert online >= 0.95 * bptt


@pytest.mark.x32
def test_digits_are_learned_online():
    online, bptt = load("digits_lstm").run(epochs=36, hidden=32, learning_rate=0.01)  # long enough for both to have settled
    assert bptt > 0.9, "BPTT itself does not learn the task: nothing is compared"
    assert online >= 0.95 * bptt
