"""Damaged and forged checkpoints: every one is refused by name, and model, optimizer and gradients
stay as they were.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import optax
import pytest
import safetensors
import safetensors.torch
import torch
from torch.nn.functional import mse_loss

import etrace_bridge as eb
from learner_models import make_data, make_net

FLIPS = 400


class Case:
    """A small checkpoint, and what is needed to load it; the same model and optimizer are used for
    every attempt.
    """

    def __init__(self, folder: Path, make_optimizer: Callable, train: Callable, **options) -> None:
        self.options = options | {"loss": mse_loss}
        model = make_net(dropout=0.3)
        self.learner = eb.OnlineLearner(
            model, optimizer=make_optimizer(model), seed=5, **self.options
        )
        train(self.learner)
        self.path = self.learner.save(folder / "run")
        (self.state,) = folder.glob("*.state.safetensors")
        self.model = make_net(dropout=0.3)
        self.optimizer = make_optimizer(self.model)
        self.net = eb.wrap(self.model)
        self.net.init_state(batch_size=2)  # states that a refused checkpoint must not touch

    def load(self, path: Path) -> eb.OnlineLearner:
        return eb.OnlineLearner.load(path, self.net, optimizer=self.optimizer, **self.options)

    def snapshot(self) -> list[np.ndarray | str]:
        tensors = [*self.net.state_dict().values(), *self.model.state_dict().values()]
        arrays = [t.numpy().copy() for t in tensors] + [
            np.array(h) for h in self.net.hidden_values()
        ]
        if isinstance(self.optimizer, torch.optim.Optimizer):
            arrays.append(str(self.optimizer.state_dict()))
        return [*arrays, str([p.grad for p in self.model.parameters()])]

    def assert_refused(self, path: Path, what: str) -> None:
        before = self.snapshot()
        try:
            self.load(path)
        except eb.BridgeError as error:
            assert str(error), what
        else:
            pytest.fail(f"loaded without a word: {what}")
        for a, b in zip(self.snapshot(), before, strict=True):
            assert np.array_equal(a, b), f"changed by a refused checkpoint: {what}"


def step(learner: eb.OnlineLearner) -> None:
    for x, y in zip(*make_data(), strict=True):
        learner.step(x, y)


def fit(learner: eb.OnlineLearner) -> None:
    held_out = [make_data(seed=9)]
    learner.fit(
        [make_data(seed=n) for n in range(3)],
        epochs=2,
        validation=held_out,
        early_stopping=5,
        metrics={"mean": lambda o, t: o.mean()},
    )
    learner.update(*make_data(seed=3))  # the first of two gradients for an update


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> Case:
    rule = eb.rules.DRTRL(credit="step", trace_dtype="bfloat16")
    return Case(
        tmp_path_factory.mktemp("stream"), lambda model: optax.adam(0.02), step, rule=rule, chunk=2
    )


@pytest.fixture(scope="module")
def fitted(tmp_path_factory) -> Case:
    """In a call of `fit`, with an optimizer that runs in torch."""
    return Case(
        tmp_path_factory.mktemp("fit"),
        lambda model: torch.optim.NAdam(model.parameters(), lr=0.05),
        fit,
        rule="bptt",
        accumulate=2,
    )


@pytest.fixture(params=["stream", "fitted"])
def case(request) -> Case:
    return request.getfixturevalue(request.param)


# -- damage ---------------------------------------------------------------------------------------


def damaged(content: bytes, dice: random.Random) -> tuple[bytes, str]:
    """The content of a file after some accident."""
    kind = dice.choice(["bit", "bit", "bit", "cut", "more", "zeros", "swap"])
    n = dice.randrange(len(content))
    changed = bytearray(content)
    if kind == "bit":
        n = dice.choice(
            [n, dice.randrange(8), 8 + dice.randrange(int.from_bytes(content[:8], "little"))]
        )
        changed[n] ^= 1 << dice.randrange(8)
    elif kind == "cut":
        del changed[n:]
    elif kind == "more":
        changed += dice.randbytes(1 + n % 50)
    elif kind == "zeros":
        changed[n : n + 64] = bytes(len(changed[n : n + 64]))
    else:
        m = dice.randrange(len(content))
        changed[n], changed[m] = changed[m], changed[n]
    return bytes(changed), f"{kind} at {n}"


def test_accidents_in_a_file_are_noticed(case, tmp_path):
    dice = random.Random(0)
    shutil.copytree(case.path.parent, tmp_path, dirs_exist_ok=True)
    tried = 0
    for name in (case.path.name, case.state.name):
        content = (tmp_path / name).read_bytes()
        for _ in range(FLIPS // 2):
            changed, what = damaged(content, dice)
            if changed != content:
                (tmp_path / name).write_bytes(changed)
                case.assert_refused(tmp_path / case.path.name, f"{name}: {what}")
                tried += 1
        (tmp_path / name).write_bytes(content)
    assert tried > FLIPS * 0.9


def test_files_of_another_run_and_missing_files(stream, fitted, tmp_path):
    shutil.copytree(stream.path.parent, tmp_path, dirs_exist_ok=True)
    path, state = tmp_path / stream.path.name, tmp_path / stream.state.name
    # the same learner, saved once more: only its identity differs
    other = stream.learner.save(tmp_path / "other")
    (others_state,) = tmp_path.glob("other.*.state.safetensors")
    mine = state.read_bytes()
    step(stream.learner)
    stream.learner.save(tmp_path / "later")
    (later_state,) = tmp_path.glob("later.*.state.safetensors")
    for wrong in (
        later_state.read_bytes(),
        fitted.state.read_bytes(),
        fitted.path.read_bytes(),
        path.read_bytes(),
        b"",
    ):
        state.write_bytes(wrong)
        stream.assert_refused(path, "the state file of another run")
    state.write_bytes(mine)
    others_state.unlink()
    stream.assert_refused(other, "no state file")
    with pytest.raises(eb.CheckpointError, match="beside it, which is missing"):
        stream.load(other)


def test_a_checkpoint_without_checksums_is_refused_with_a_way_out(stream, tmp_path):
    weights = safetensors.torch.load_file(stream.path)
    name = tmp_path / "old.safetensors"
    safetensors.torch.save_file(
        weights, name, {"etrace_bridge": json.dumps({"state": "old.12345678.state.safetensors"})}
    )
    with pytest.raises(
        eb.CheckpointError, match=r"format 1, which has no checksums.*load_state_dict"
    ):
        stream.load(name)


# -- forgery: files whose checksums are right -----------------------------------------------------


def forge(tensors: dict[str, torch.Tensor], about: dict) -> bytes:
    """A file of the format, its checksum computed here."""
    content = safetensors.torch.save(
        {name: t.clone() for name, t in tensors.items()},
        {"etrace_bridge": json.dumps(about), "sha256": "0" * 64},
    )
    return content.replace(
        b'"sha256":"' + b"0" * 64, b'"sha256":"' + hashlib.sha256(content).hexdigest().encode()
    )


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict]:
    with safetensors.safe_open(path, "pt") as file:
        return safetensors.torch.load_file(path), json.loads(file.metadata()["etrace_bridge"])


class Forger:
    """Writes changed copies of a checkpoint whose checksums fit."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.weights, self.first = read(case.path)
        self.arrays, self.rest = read(case.state)

    def write(self, weights=None, arrays=None, first=None, rest=None) -> Path:
        state = forge(
            self.arrays if arrays is None else arrays, self.rest if rest is None else rest
        )
        first = (self.first if first is None else first) | {
            "state_sha256": hashlib.sha256(state).hexdigest()
        }
        (self.folder / self.case.state.name).write_bytes(state)
        path = self.folder / self.case.path.name
        path.write_bytes(forge(self.weights if weights is None else weights, first))
        return path

    def with_facts(self, change: Callable[[dict], object]) -> Path:
        rest = copy.deepcopy(self.rest)
        change(rest["facts"])
        return self.write(rest=rest)


def test_a_forgery_that_changes_nothing_is_loaded(case, tmp_path):
    forger = Forger(case, tmp_path)
    loaded = case.load(forger.write())  # or the tests below would show nothing
    assert loaded.steps == forger.rest["facts"]["steps"] > 0
    case.net.init_state(batch_size=2)


def test_nan_and_infinity_are_noticed_in_every_array(case, tmp_path):
    forger, tried = Forger(case, tmp_path), set()
    for part, tensors in (("weights", forger.weights), ("arrays", forger.arrays)):
        for n, (name, tensor) in enumerate(tensors.items()):
            if tensor.is_floating_point():
                bad = tensor.clone()
                bad.view(-1)[n % bad.numel()] = (torch.nan, torch.inf, -torch.inf)[n % 3]
                case.assert_refused(
                    forger.write(**{part: tensors | {name: bad}}),
                    f"{bad.view(-1)[n % bad.numel()]} in {name}",
                )
                tried.add(name.split()[0] if part == "arrays" else part)
    expected = (
        {"parameter", "hidden", "trace", "optimizer"}
        if any(n.startswith("trace") for n in forger.arrays)
        else {"torch", "fit"}
    )
    assert tried >= expected | {"weights"}


def test_arrays_that_are_missing_added_or_of_another_kind_are_noticed(case, tmp_path):
    forger = Forger(case, tmp_path)
    for part, tensors in (("weights", forger.weights), ("arrays", forger.arrays)):
        for name, tensor in tensors.items():
            others = {n: t for n, t in tensors.items() if n != name}
            wrong = [
                others,
                tensors | {f"{name}x": tensor},
                others | {f"{name}x": tensor},
                tensors | {name: tensor[None].contiguous()},
            ]
            wrong.append(
                tensors
                | {
                    name: tensor.to(
                        torch.float16 if tensor.dtype != torch.float16 else torch.float32
                    )
                }
            )
            for changed in wrong:
                case.assert_refused(forger.write(**{part: changed}), f"another {name}")
    extra = forger.first | {"arrays": None}
    case.assert_refused(forger.write(first=extra), "no list of arrays")
    case.assert_refused(
        forger.write(first=forger.first | {"state": "../" + case.state.name}),
        "a state file elsewhere",
    )
    case.assert_refused(forger.write(first=forger.first | {"format": 3}), "a later format")


WRONG = {
    "rule": [
        None,
        "d_rtrl",
        {},
        {"name": "bptt"},
        {"name": "none", "options": {}},
        {"name": "bptt", "options": {"x": 1}},
        {"name": 3, "options": {}},
    ],
    "steps": [None, -1, 1.5, True, "6", [6], 0],
    "updates": [None, -1, 0.5, False, "6", 10**9],
    "chunk": [None, 0, -2, 1.5, "some", True, []],
    "reduction": [None, "median", 1, ""],
    "inputs": [
        "x",
        [],
        [[]],
        [[[3, 2]]],
        [[[3, -2], "float64"]],
        [[[3, 2], "float63"]],
        [[["3", 2], "float64"]],
        3,
        [[3, "float64"]],
    ],
    "in_stream": [None, 1, "yes"],
    "history": [
        1,
        {},
        {"epochs": []},
        {"epochs": [1], "batch_losses": [], "stopped": ""},
        {"epochs": [], "batch_losses": ["x"], "stopped": ""},
    ],
    "fit": [1, {}, {"epoch": 1}, []],
    "optimizer": [1, ["Adam"]],
    "groups": [
        1,
        {"lr": 1},
        [1],
        [{"lr": {}}],
        [{"lr": float("nan")}],
        [{"betas": [0.9, float("inf")]}],
    ],
    "torch_optimizer": [
        1,
        {},
        {"waiting": -1, "state": {}},
        {"waiting": 0, "state": []},
        {"waiting": 0, "state": {"w": 1}},
    ],
    "versions": [None, 1, {"torch": 2}],
}


def test_wrong_facts_are_noticed(case, tmp_path):
    forger = Forger(case, tmp_path)
    assert set(WRONG) == set(forger.rest["facts"])
    for name, values in WRONG.items():
        for value in values:
            case.assert_refused(
                forger.with_facts(lambda facts, n=name, v=value: facts.update({n: v})),
                f"{name} = {value}",
            )
        case.assert_refused(forger.with_facts(lambda facts, n=name: facts.pop(n)), f"no {name}")
        case.assert_refused(
            forger.with_facts(lambda facts, n=name: facts.update({f"{n}s": 1})), f"{name}s"
        )


def in_fit(name: str, value: object) -> Callable[[dict], object]:
    return lambda facts: facts["fit"].update({name: value})


def in_group(name: str, value: object) -> Callable[[dict], object]:
    return lambda facts: facts["groups"][0].update({name: value})


INNER = {
    "another epoch": in_fit("epoch", 1),
    "a batch below zero": in_fit("batch", -1),
    "no such stage": in_fit("stage", "pause"),
    "half a best epoch": in_fit("best", {"value": 1.0}),
    "no best epoch, but its weights": in_fit("best", None),
    "sums without weights": in_fit("sums", {"mean": [1.0]}),
    "a scheduler that is no list": in_fit("scheduler", {"last_epoch": 1}),
    "a negative learning rate": in_group("lr", -0.1),
    "a learning rate of text": in_group("lr", "0.1"),
    "one beta": in_group("betas", [0.9]),
    "a flag that is a number": in_group("maximize", 1),
    "a group without lr": lambda facts: facts["groups"][0].pop("lr"),
    "two groups": lambda facts: facts["groups"].append(facts["groups"][0]),
    "another optimizer": lambda facts: facts.update(optimizer="Adam"),
    "state of no parameter": lambda facts: facts["torch_optimizer"]["state"].update(
        {"rnn.none": {"step": 1}}
    ),
    "more gradients than an update takes": lambda facts: facts["torch_optimizer"].update(waiting=2),
    "gradients that nobody waits for": lambda facts: facts["torch_optimizer"].update(waiting=0),
    "a loss of text": lambda facts: facts["history"]["epochs"][0].update(loss="small"),
    "an epoch without its number": lambda facts: facts["history"]["epochs"][0].pop("epoch"),
    "inputs of another size": lambda facts: facts.update(inputs=[[[3, 7], "float64"]]),
    "another batch": lambda facts: facts.update(inputs=[[[4, 2], "float64"]]),
    "two inputs": lambda facts: facts.update(inputs=facts["inputs"] * 2),
    "inputs of another type": lambda facts: facts.update(inputs=[[[3, 2], "float32"]]),
    "no input seen": lambda facts: facts.update(inputs=None),
}


@pytest.mark.parametrize("what", INNER)
def test_wrong_details_are_noticed(fitted, tmp_path, what):
    fitted.assert_refused(Forger(fitted, tmp_path).with_facts(INNER[what]), what)


def test_nan_that_was_saved_on_purpose_needs_a_learner_without_guard(tmp_path):
    options = {"rule": "bptt", "loss": mse_loss, "optimizer": optax.sgd(0.1)}
    learner = eb.OnlineLearner(make_net(), guard=False, **options)
    learner.update(*make_data())
    learner.net.load_state_dict(
        {
            n: t * torch.nan if n == "rnn.bias_hh_l0" else t
            for n, t in learner.net.state_dict().items()
        }
    )
    path = learner.save(tmp_path / "run")
    with pytest.raises(eb.StateError, match=r"NaN in parameter rnn.bias_hh_l0.*guard=False"):
        eb.OnlineLearner.load(path, make_net(), **options)
    again = eb.OnlineLearner.load(path, make_net(), guard=False, **options)
    assert again.net.state_dict()["rnn.bias_hh_l0"].isnan().all()
    guarded = eb.OnlineLearner(make_net(), **options)
    guarded.update(*make_data())
    good = guarded.save(tmp_path / "run").read_bytes()
    guarded.net.load_state_dict(again.net.state_dict())
    with pytest.raises(eb.NonFiniteError, match="not saved"):
        guarded.save(tmp_path / "run")
    assert path.read_bytes() == good
