"""The command line: what it prints, what it writes, and its exit status."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys

import pytest

import etrace_bridge as eb
from etrace_bridge.cli import arguments
from etrace_bridge.cli import commands as cli
from etrace_bridge.cli.model import LOSSES
from etrace_bridge.cli.train_settings import OPTIMIZERS
from etrace_bridge.rules import rule_names

MODELS = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(self.gru(x)[0])


def make_model():
    return Net()


def make_words():
    return nn.Sequential(nn.Embedding(5, 3), Net())


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(7, 4)

    def forward(self, x, state):
        new = torch.tanh(self.fc(torch.cat([x, state], -1)))
        return new, new


def make_state(batch_size):
    return torch.zeros(batch_size, 4)


def broken():
    raise ValueError("no such dataset")


def lstm():
    return nn.LSTM(3, 4, bidirectional=True)


made = Net()
number = 3


def my_loss(output, target):
    return (output ** 2).sum()


def silent_loss(output, target):
    return (target ** 2).sum()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(MODELS)
    (tmp_path / "models.py.needs.py").write_text("import no_such_library")
    return str(path)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(list(arguments))
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def test_check_as_printed_in_the_documentation(tmp_path, file):
    command = [
        sys.executable, "-m", "etrace_bridge", "check", "models.py:make_model", "--input", "2,3", "--steps", "9",
        "--rule", "d_rtrl", "--html", "out.html",
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert (
        "d_rtrl against torch BPTT: as certified" in done.stdout
        and "gru.weight_hh_l0" in done.stdout
    )
    assert "gru.weight_hh_l0" in (tmp_path / "out.html").read_text()


def test_check_as_json(capsys, file):
    status, out, _ = run(
        capsys,
        "check",
        f"{file}:made",
        "--input",
        "2,3",
        "--steps",
        "6",
        "--rule",
        "rtrl",
        "--json",
    )
    content = json.loads(out)
    assert status == 0 and content["ok"] and content["rule"] == "rtrl" and content["steps"] == 6


def test_check_of_several_rules_with_budget(capsys, file):
    status, out, _ = run(
        capsys,
        "check",
        f"{file}:make_model",
        "--input",
        "2,3",
        "--steps",
        "6",
        "--rule",
        "rtrl,d_rtrl",
        "--budget",
        "1GB",
    )
    assert status == 0 and "2 rules on 6 steps" in out and "Under 1GB: rtrl" in out


def test_check_of_tokens_and_classes(capsys, file):
    arguments = ("--input", "2", "--steps", "6", "--rule", "rtrl", "--loss", "cross_entropy")
    status, out, err = run(capsys, "check", f"{file}:make_words", *arguments)
    assert status == 0, out + err
    assert "0.weight" in out


def test_check_of_a_cell_with_a_state(capsys, file):
    arguments = ("--input", "2,3", "--steps", "6", "--rule", "rtrl")
    status, out, _ = run(
        capsys, "check", f"{file}:Cell", *arguments, "--state", f"{file}:make_state"
    )
    assert status == 0 and "fc.weight" in out
    status, _, err = run(capsys, "check", f"{file}:Cell", *arguments)
    assert status == 2 and "needs a state" in err and "Traceback" not in err


def test_check_of_a_model_that_runs_in_float32_only(capsys, tmp_path):
    """snnTorch makes float32 spikes, so the check falls back to float32 by itself."""
    pytest.importorskip("snntorch")
    code = (
        "import snntorch\n"
        "from torch import nn\n\n"
        "model = nn.Sequential(\n"
        "    nn.Linear(3, 8), snntorch.Leaky(beta=0.9, init_hidden=True),"
    )
    (tmp_path / "spiking.py").write_text(
        f"{code}\n    nn.Linear(8, 2), snntorch.Leaky(beta=0.9, init_hidden=True)\n)\n"
    )
    arguments = ("--input", "4,3", "--steps", "12", "--rule", "rtrl")
    status, out, err = run(capsys, "check", f"{tmp_path}/spiking.py:model", *arguments)
    assert status == 0, out + err
    assert "float32" in out and "cannot run in float64" in out


def test_check_that_shows_nothing_is_not_ok(capsys, file):
    arguments = ("--input", "2,3", "--steps", "6", "--rule", "rtrl")
    status, out, _ = run(capsys, "check", f"{file}:make_model", *arguments, "--chunk", "6")
    assert status == 1 and "The trace is never used" in out
    status, _, err = run(
        capsys, "check", f"{file}:make_model", *arguments, "--loss", f"{file}:silent_loss", "--json"
    )
    assert status == 2 and "has no derivative by the model's output" in err


def test_own_loss_and_picture(capsys, file, tmp_path):
    arguments = ("--input", "2,3", "--steps", "6", "--rule", "rtrl", "--loss", f"{file}:my_loss")
    status, _, _ = run(
        capsys, "check", f"{file}:make_model", *arguments, "--plot", str(tmp_path / "p.svg")
    )
    assert status == 0 and (tmp_path / "p.svg").read_text().lstrip().startswith("<?xml")


def test_explain(capsys, file):
    status, out, _ = run(capsys, "explain", f"{file}:make_model", "--input", "2,3")
    assert status == 0 and "gru.weight_hh_l0" in out and "hidden group" in out
    status, out, _ = run(capsys, "explain", f"{file}:make_model", "--input", "2,3", "--json")
    content = json.loads(out)
    assert status == 0 and content["hidden_groups"] == [{"index": 0, "states": ["gru.h_l0"]}]
    assert {p["name"]: p["exact"] for p in content["parameters"]}["out.weight"] is True


def test_recommend(capsys, file):
    arguments = ("--input", "2,3", "--steps", "6", "--rule", "d_rtrl,pp_prop")
    status, out, _ = run(capsys, "recommend", f"{file}:make_model", *arguments)
    assert status == 0 and out.startswith("Use rule=")
    status, out, _ = run(
        capsys, "recommend", f"{file}:make_model", *arguments, "--budget", "10", "--json"
    )
    assert status == 1 and json.loads(out)["rule"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("check", "{}:nothing", "--input", "2,3"),
            "has no `nothing`. It defines: Cell, Net, broken",
        ),
        (("check", "{}", "--input", "2,3"), "not of the form"),
        (("check", "missing.py:make", "--input", "2,3"), "There is no file `missing.py`"),
        (("check", "{}:broken", "--input", "2,3"), "failed: ValueError: no such dataset"),
        (("check", "{}:number", "--input", "2,3"), "is a int; it must be a torch module"),
        (("check", "{}:make_state", "--input", "2,3"), "It is called without arguments"),
        (("check", "{}:make_model", "--input", "two"), "is not a shape"),
        (("check", "{}:make_model", "--input", "2,3", "--steps", "0"), "--steps is 0"),
        (("check", "{}:make_model", "--input", "2,3", "--chunk", "some"), "--chunk is 'some'"),
        (
            ("check", "{}:make_model", "--input", "2,3", "--rule", "backprop"),
            "There is no rule 'backprop'",
        ),
        (
            ("check", "{}:make_model", "--input", "2,3", "--loss", "hinge"),
            "There is no loss `hinge`",
        ),
        (("check", "{}:make_model", "--input", "2,7"), "error:"),
        (
            ("explain", "{}.needs.py:make", "--input", "2,3"),
            "imports `no_such_library`, which is not installed",
        ),
        (("explain", "{}:lstm", "--input", "2,3"), "idirectional"),
        (
            ("recommend", "{}:make_model", "--input", "2,3", "--budget", "lots"),
            "`budget` is 'lots'",
        ),
    ],
)
def test_bad_use_is_explained_without_a_traceback(capsys, file, arguments, message):
    status, _, err = run(capsys, *(a.format(file) for a in arguments))
    assert status == 2 and message in err and "Traceback" not in err


def test_debug_shows_the_traceback(file):
    with pytest.raises(Exception, match="has no `nothing`"):
        cli.main(["check", f"{file}:nothing", "--input", "2,3", "--debug"])


def test_errors_as_json(capsys, file):
    status, out, err = run(capsys, "explain", f"{file}:nothing", "--input", "2,3", "--json")
    assert (
        status == 2 and "has no `nothing`" in json.loads(out)["error"] and "has no `nothing`" in err
    )


def test_help_lists_the_commands(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0 and all(
        name in out
        for name in (
            "demo",
            "check",
            "explain",
            "recommend",
            "train",
            "evaluate",
            "predict",
            "bench",
            "completion",
        )
    )
    assert run(capsys)[0] == 2 and run(capsys, "dance")[0] == 2 and run(capsys, "check")[0] == 2


LIGHT = """
import sys
from etrace_bridge.cli import main
for arguments in (["--help"], ["--version"], ["train", "--help"], ["check", "--help"]):
    assert main(arguments) == 0
print("heavy:", sorted({"jax", "torch", "brainstate", "optax", "numpy"} & set(sys.modules)))
"""


def test_help_and_version_import_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("heavy: []\n")
    version = eb.__version__
    assert f"etrace-bridge {version}\n" in done.stdout and "__version__" in dir(eb)
    assert version == importlib.metadata.version("etrace-bridge")


def test_names_in_the_help_are_those_that_exist():
    assert tuple(sorted(arguments.RULE_NAMES)) == tuple(sorted(rule_names()))
    assert tuple(LOSSES) == arguments.LOSS_NAMES and tuple(OPTIMIZERS) == arguments.OPTIMIZER_NAMES


X64 = """
import etrace_bridge as eb, jax
assert "brainstate" not in __import__("sys").modules
jax.config.update("jax_enable_x64", True)
import {module}
assert jax.config.jax_enable_x64
print(eb.OnlineLearner.__name__, "wrap" in dir(eb), len(eb.__all__) > 40)
try:
    eb.nothing
except AttributeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "module", ["etrace_bridge.rules", "etrace_bridge.adapters.torch_rnn", "etrace_bridge.plot"]
)
def test_public_names_come_when_they_are_used_and_64_bit_mode_stays(module):
    done = subprocess.run(
        [sys.executable, "-c", X64.format(module=module)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout
        == "OnlineLearner True True\nmodule 'etrace_bridge' has no attribute 'nothing'\n"
    )


def test_commands_can_be_added(capsys, monkeypatch):
    def add_hello(commands):
        parser = commands.add_parser("hello")
        parser.set_defaults(run=lambda args: print("hello") or 0)

    monkeypatch.setattr(cli, "COMMANDS", [*cli.COMMANDS, add_hello])
    assert run(capsys, "hello")[:2] == (0, "hello\n")
