"""Every example runs, and what the learning examples claim holds in the small: online reaches 95%
of torch's BPTT.
"""

from __future__ import annotations

import importlib.util
import runpy
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))
OPTIONAL = {
    "snntorch": "snntorch",
    "sklearn": "scikit-learn",
    "norse": "norse",
    "spikingjelly": "spikingjelly",
    "ncps": "ncps",
    "lightning": "lightning",
    "braintrace": "braintrace",
    "brainpy": "brainpy",
}


def skip_without_libraries(path: Path) -> None:
    """Skips an example whose optional library is not installed."""
    words = {
        line.split()[1].split(".")[0]
        for line in path.read_text().splitlines()
        if line.startswith(("import ", "from "))
    }
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
    assert names >= {
        "delayed_copy_gru",
        "digits_lstm",
        "digits_snntorch",
        "endless_stream",
        "torch_optim_loop",
        "checkpoint_resume",
        "t_maze",
        "lightning_online",
    }


# Examples that change the process that runs them, so they get one of their own.
ALONE = {"braintrace_integrator", "braintrace_spiking_units", "checkpoint_resume", "lightning_online", "register_an_adapter", "register_an_op"}  # fmt: skip


@pytest.mark.x32  # as a user's process
@pytest.mark.implicit_promotion("as in a user's process")
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(path, tmp_path, monkeypatch, capsys):
    """As a script with `--small`; most in this process, since importing everything anew takes
    longer than they do.
    """
    skip_without_libraries(path)
    if path.stem in ALONE:
        words = [sys.executable, str(path), "--small"]
        done = subprocess.run(
            words, capture_output=True, text=True, cwd=tmp_path, timeout=600, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        said = done.stdout
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(path), "--small"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the libraries, as in a process of a user's
            runpy.run_path(str(path), run_name="__main__")
        said = capsys.readouterr().out
    assert len(said.split()) >= 5, "it says nothing"
    assert '"""' in path.read_text()[:300] and "--small" in path.read_text()


@pytest.mark.x32
def test_delayed_copy_is_learned_online():
    online, bptt = load("delayed_copy_gru").run(updates=120, hidden=24, steps=12, batch=16, delay=2)
    assert bptt > 0.9, "BPTT itself does not learn the task: nothing is compared"
    assert online >= 0.95 * bptt


@pytest.mark.x32
def test_digits_are_learned_online():
    # long enough for both to have settled
    online, bptt = load("digits_lstm").run(epochs=36, hidden=32, learning_rate=0.01)
    assert bptt > 0.9, "BPTT itself does not learn the task: nothing is compared"
    assert online >= 0.95 * bptt


@pytest.mark.x32
def test_the_t_maze_is_learned_online_and_not_by_truncated_bptt():
    run = load("t_maze").run
    online, truncated = (
        run(4, rule, seed=0, steps=2400, batch=16, hidden=16, every=400)
        for rule in ("d_rtrl", "bptt")
    )
    assert online[-1] > 0.85
    assert truncated[-1] < 0.65, "one step of credit is enough: the task needs no memory"


@pytest.mark.x32
@pytest.mark.parametrize("every_step", [False, True], ids=["automatic", "manual"])
def test_lightning_trains_it_with_either_optimisation(every_step):
    task = load("lightning_online").run(every_step, epochs=6, count=64)
    assert task.losses[-1] < 0.6 * task.losses[0]
    assert all(p.grad is not None for p in task.online.model.parameters())
    copy = type(task)(every_step=every_step)
    copy.load_state_dict(task.state_dict())
