"""What changes around a learner: the torch model's weights and `requires_grad`, what its loss reads,
its optimizer's hooks, state and frozen parameters.
"""

from __future__ import annotations

import copy
import functools
import pickle
import types
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import etrace_bridge as eb
from etrace_bridge.learning.loss_settings import LossSettings
from etrace_bridge.learning.losses import LossTable
from etrace_bridge.learning.optimizers import make_updater
from learner_models import I, O, assert_same, make_data

XS, YS = make_data()


class Partly(nn.Module):
    """A frozen layer, and a parameter that acts but never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(I, 3), nn.Linear(3, O)
        self.fixed = nn.Linear(3, O, bias=False).requires_grad_(False)
        self.held = nn.Parameter(torch.randn(3, O))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.rnn(x)[0]
        return self.out(h) + self.fixed(h) + h @ self.held.detach()


def make_partly() -> Partly:
    torch.manual_seed(5)
    return Partly().double()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_weight_decay_leaves_alone_what_gets_no_gradient(kind) -> None:
    """Parameters without `.grad` in torch do not decay; frozen ones may be among the optimizer's."""
    model = make_partly()
    reference = copy.deepcopy(model)
    options = {"lr": 0.02, "weight_decay": 0.5}
    learner = eb.OnlineLearner(
        model, "rtrl", F.mse_loss, kind(model.parameters(), **options), chunk=6
    )
    optimizer = kind(reference.parameters(), **options)
    for _ in range(2):
        learner.update(XS, YS)
        optimizer.zero_grad()
        F.mse_loss(reference(XS), YS).backward()
        optimizer.step()
    learner.sync_to_torch()
    assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))
    assert torch.equal(model.held, make_partly().held)
    assert not torch.equal(model.out.weight, make_partly().out.weight)
    if kind is torch.optim.AdamW:
        model.held.grad = None
        learner.fill_grad(learner.gradients(XS, YS))
        assert model.held.grad is None and model.out.weight.grad is not None


class TwoHeads(nn.Module):
    """Two outputs, and behind the second one a layer, a state and a parameter of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.RNN(I, 3), nn.Linear(3, O)
        self.inner, self.side, self.head = nn.Linear(3, 2), nn.RNN(2, 2), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.rnn(x)[0]
        return self.out(h), self.head(self.side(self.inner(h))[0])


def of_first(outputs: tuple, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs[0], target)


def of_second(outputs: tuple, target: torch.Tensor) -> torch.Tensor:
    return outputs[1].pow(2).mean()


def train_in_torch(model: nn.Module, optimizer: torch.optim.Optimizer, loss) -> None:
    optimizer.zero_grad()
    loss(model(XS), YS).backward()
    optimizer.step()


def two_heads() -> TwoHeads:
    torch.manual_seed(5)
    return TwoHeads().double()


UNREAD = {of_first: ("inner.", "side.", "head."), of_second: ("out.",)}
DECAYING = [
    functools.partial(torch.optim.AdamW, lr=0.02, weight_decay=0.5),
    functools.partial(torch.optim.SGD, lr=0.02, weight_decay=0.5, momentum=0.9, nesterov=True),
    functools.partial(torch.optim.NAdam, lr=0.02, weight_decay=0.5),
]


@pytest.mark.parametrize(
    ("make", "loss"), [*((make, of_first) for make in DECAYING), (DECAYING[0], of_second)]
)
def test_weight_decay_leaves_alone_what_the_loss_does_not_read(make, loss) -> None:
    model, reference = two_heads(), two_heads()
    optimizer = make(reference.parameters())
    learner = eb.OnlineLearner(model, "rtrl", loss, make(model.parameters()), chunk=6)
    for _ in range(3):
        learner.update(XS, YS)
        train_in_torch(reference, optimizer, loss)
    learner.sync_to_torch()
    assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))
    start = dict(two_heads().named_parameters())
    for name, p in model.named_parameters():
        assert torch.equal(p, start[name]) is name.startswith(UNREAD[loss]), name
        p.grad = None
    learner.fill_grad(learner.gradients(XS, YS))
    for name, p in model.named_parameters():
        assert (p.grad is None) is name.startswith(UNREAD[loss]), name


def test_an_optimizer_that_left_parameters_out_goes_on() -> None:
    """torch keeps no state of parameters that never had a `.grad`."""
    model = two_heads()
    optimizer = DECAYING[0](model.parameters())
    train_in_torch(model, optimizer, of_first)
    reference = copy.deepcopy(model)
    other = DECAYING[0](reference.parameters())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    learner = eb.OnlineLearner(model, "rtrl", of_first, optimizer, chunk=6)
    for _ in range(2):
        learner.update(XS, YS)
        train_in_torch(reference, other, of_first)
    learner.sync_to_torch()
    assert_same(dict(model.named_parameters()), dict(reference.named_parameters()))
    both = lambda outputs, target: of_first(outputs, target) + of_second(outputs, target)
    model = copy.deepcopy(model)
    optimizer = DECAYING[0](model.parameters())
    train_in_torch(model, optimizer, of_first)
    learner = eb.OnlineLearner(model, "rtrl", both, optimizer, chunk=6)
    with pytest.raises(eb.NotSupportedError, match=r"different numbers of times: \[0, 1\]"):
        learner.update(XS, YS)


def test_a_loss_of_an_output_that_no_parameter_makes_is_refused() -> None:
    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(I, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.rnn(x)[0], x * 2

    model = Echo().double()
    learner = eb.OnlineLearner(
        model, "d_rtrl", of_second, torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(eb.InputError, match="No gradient can reach any parameter"):
        learner.update(XS, YS)


@pytest.fixture(scope="module")
def learner() -> eb.OnlineLearner:
    model = make_partly()
    made = eb.OnlineLearner(model, "d_rtrl", F.mse_loss, torch.optim.SGD(model.parameters(), lr=0))
    made.step(XS[0], YS[0])
    made.step(XS[1], YS[1])
    return made


@pytest.mark.parametrize("name", ["out", "fixed"])
def test_switching_requires_grad_is_refused(learner: eb.OnlineLearner, name: str) -> None:
    weight = learner.runtime.net.model.get_submodule(name).weight
    weight.requires_grad_(not weight.requires_grad)
    try:
        for call in (lambda: learner.step(XS[0], YS[0]), lambda: learner.gradients(XS[:1], YS[:1])):
            with pytest.raises(eb.StateError, match=f"`requires_grad` of `{name}.weight`"):
                call()
    finally:
        weight.requires_grad_(not weight.requires_grad)
    learner.step(XS[0], YS[0])


def test_requires_grad_counts_as_it_was_when_the_model_was_wrapped() -> None:
    model = make_partly()
    net = eb.wrap(model)
    model.fixed.weight.requires_grad_(True)
    made = eb.OnlineLearner(net, "d_rtrl", F.mse_loss)
    with pytest.raises(eb.StateError, match="`fixed.weight` was switched"):
        made.gradients(XS, YS)


def test_weights_changed_in_torch_are_noticed(learner: eb.OnlineLearner) -> None:
    model = learner.runtime.net.model
    before = learner.step(XS[0], YS[0]).output
    with torch.no_grad():
        model.out.bias.add_(1.0)
    with pytest.warns(UserWarning, match=r"`out.bias` of the torch model changed") as caught:
        learner.reset()
        after = learner.step(XS[0], YS[0]).output
    assert caught[0].filename == __file__
    learner.step(XS[0], YS[0])  # once is enough
    learner.sync_from_torch()
    learner.reset()
    taken = learner.step(XS[0], YS[0]).output
    assert torch.allclose(taken, after + 1.0) and before.shape == after.shape


def make_learner(model: nn.Module | eb.BridgedModule) -> eb.OnlineLearner:
    torch_model = getattr(model, "model", model)
    optimizer = torch.optim.SGD(torch_model.parameters(), lr=0.1)
    return eb.OnlineLearner(model, "d_rtrl", F.mse_loss, optimizer)


def test_weights_changed_between_wrap_and_learner_are_noticed() -> None:
    net = eb.wrap(make_partly())
    with torch.no_grad():
        net.model.out.bias.add_(1.0)
    with pytest.warns(UserWarning, match=r"`out.bias` of the torch model changed"):
        make_learner(net).step(XS[0], YS[0])
    net.load_state_dict(net.model.state_dict())
    learner = make_learner(net)  # a warning would fail the test
    learner.step(XS[0], YS[0])
    learner.sync_to_torch()
    made = make_learner(net)
    made.step(XS[0], YS[0])
    assert torch.equal(made.net.state_dict()["held"], net.model.held)


def replace_parameter(model: Partly) -> str:
    model.out.bias = nn.Parameter(torch.zeros_like(model.out.bias))
    return "`out.bias` of the torch model was replaced"


def replace_module(model: Partly) -> str:
    model.out = nn.Linear(3, O).double()
    return "`out` of the torch model was replaced"


def remove_bias(model: Partly) -> str:
    model.out.bias = None
    return "`out.bias` of the torch model was replaced"


@pytest.mark.parametrize("replace", [replace_parameter, replace_module, remove_bias])
def test_what_replaces_a_parameter_is_not_ignored(replace) -> None:
    model = make_partly()
    out, bias = model.out, model.out.bias
    learner = make_learner(model)
    learner.step(XS[0], YS[0])
    learner.step(XS[1], YS[1])
    message = replace(model)
    for call in (
        lambda: learner.step(XS[0], YS[0]),
        lambda: learner.update(XS, YS),
        lambda: learner.predict(XS),
    ):
        with pytest.raises(eb.StateError, match=message):
            call()
    out.bias, model.out = bias, out
    learner.step(XS[0], YS[0])


def test_data_given_to_a_parameter_is_noticed() -> None:
    model = make_partly()
    learner = make_learner(model)
    learner.step(XS[0], YS[0])
    learner.step(XS[1], YS[1])
    model.out.bias.data = torch.zeros_like(model.out.bias)
    with pytest.warns(UserWarning, match="`out.bias` of the torch model changed"):
        learner.step(XS[0], YS[0])


def test_a_learner_is_not_copied_by_pickle(learner: eb.OnlineLearner) -> None:
    for call in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(eb.StateError, match="cannot be copied or pickled"):
            call(learner)


def test_what_holds_traced_programs_is_not_pickled(learner: eb.OnlineLearner) -> None:
    net = learner.net
    assert isinstance(net, eb.BridgedModule)
    for thing, advice in ((net, "Pickle the torch model"), (learner.graph, "Compile it again")):
        with pytest.raises(eb.StateError, match=f"cannot be pickled. {advice}"):
            pickle.dumps(thing)
    for copied in (copy.copy(learner.graph), copy.deepcopy(learner.graph)):
        assert copied.report() == learner.graph.report()
    net.init_state(len(XS[0]))
    alias, copied = copy.copy(net), copy.deepcopy(net)
    first = copied(XS[0].numpy())
    np.testing.assert_array_equal(first, net(XS[0].numpy()))  # its states are its own
    np.testing.assert_array_equal(alias(XS[1].numpy()), copied(XS[1].numpy()))
    assert not np.array_equal(first, copied(XS[0].numpy()))


def test_a_reset_takes_a_choice(learner: eb.OnlineLearner) -> None:
    """Numbers between 0 and 1 would be read as a choice."""
    learner.reset(torch.tensor([1.0, 0.0, 1.0]))
    with pytest.raises(eb.InputError, match="of booleans, or of 0 and 1"):
        learner.reset(torch.tensor([0.5, 0.0, 1.0]))


def test_targets_of_another_byte_order(learner: eb.OnlineLearner) -> None:
    expected = learner.gradients(XS, YS).loss
    assert learner.gradients(XS.numpy().astype(">f8"), YS.numpy().astype(">f8")).loss == expected


# -- what a loss reads ----------------------------------------------------------------------------

WEIGHT = 1.0


class Weighted(nn.Module):
    weight: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.calls = 1.0, 0
        self.register_buffer("weight", torch.ones(O, dtype=torch.float64))

    def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1  # harmless: the result is the same
        return self.factor * (self.weight * (y - target) ** 2).mean()


def of_global(y, target):
    return WEIGHT * F.mse_loss(y, target)


def config_scale(config):
    return config.scale


def readings() -> dict:
    """Losses, and what changes them."""
    module, buffered, around = Weighted(), Weighted(), 1.0
    weights = torch.ones(O, dtype=torch.float64)

    def of_cell(y, target):
        return around * F.mse_loss(y, target)

    def set_cell():
        nonlocal around
        around = 2.0

    class Callable:
        def __init__(self) -> None:
            self.scale = 1.0

        def __call__(self, y, target):
            return self.scale * F.mse_loss(y, target)

    class Settled:
        scale = 1.0

        def __init__(self) -> None:
            self.inside, self.unread = types.SimpleNamespace(scales=[1.0]), 0

        @property
        def first(self):
            return self.inside.scales[0]

        def of_method(self, y, target):
            return self.first * self.scale * F.mse_loss(y, target)

    listed, nested, array = [1.0, 2.0], {"a": {"scale": 1.0}}, np.ones(O)
    settled, shaded, config = Settled(), Settled(), Settled()
    called, containing = Callable(), Weighted()
    containing.forward = lambda y, target: containing.scales["y"] * F.mse_loss(y, target)
    containing.scales = {"y": 1.0}
    inner = functools.partial(F.binary_cross_entropy_with_logits, pos_weight=weights)
    return {
        "attribute": (module, lambda: setattr(module, "factor", 2.0)),
        "buffer": (buffered, lambda: buffered.weight.mul_(2.0)),
        "cell": (of_cell, set_cell),
        "global": (of_global, lambda: globals().update(WEIGHT=2.0)),
        "partial": (inner, lambda: weights.mul_(2.0)),
        "object": (called, lambda: setattr(called, "scale", 2.0)),
        "list": (
            lambda y, target: listed[0] * F.mse_loss(y, target),
            lambda: listed.__setitem__(0, 2.0),
        ),
        "nested dicts": (
            lambda y, target: nested["a"]["scale"] * F.mse_loss(y, target),
            lambda: nested["a"].update(scale=2.0),
        ),
        "array": (
            lambda y, target: float(array[0]) * F.mse_loss(y, target),
            lambda: array.__setitem__(0, 2.0),
        ),
        "object of a cell": (
            lambda y, target: config.inside.scales[0] * F.mse_loss(y, target),
            lambda: config.inside.scales.__setitem__(0, 2.0),
        ),
        "method": (settled.of_method, lambda: settled.inside.scales.__setitem__(0, 2.0)),
        "attribute over a class's": (shaded.of_method, lambda: setattr(shaded, "scale", 2.0)),
        "function of a helper": (
            lambda y, target: config_scale(config) * F.mse_loss(y, target),
            lambda: setattr(config, "scale", 2.0),
        ),
        "dict of a module": (containing, lambda: containing.scales.update(y=2.0)),
    }


@pytest.mark.parametrize("kind", readings())
def test_a_loss_that_reads_something_else_now_is_refused(
    learner: eb.OnlineLearner, kind: str
) -> None:
    loss, change = readings()[kind]
    table, compiled, target = LossTable(loss, True), learner.runtime.store.compiled, YS[0]
    known = table.find(compiled, target)
    assert table.settings_hold and table.find(compiled, target) is known
    change()
    try:
        assert not table.settings_hold
        with pytest.raises(eb.StateError, match="is not what it was when the learner compiled it"):
            table.find(compiled, target)
    finally:
        globals().update(WEIGHT=1.0)


def test_what_a_loss_does_not_read_may_change() -> None:
    """Attributes that its code does not name, containers with the same items, and what libraries do."""
    objects = types.SimpleNamespace(scale=[1.0], steps=0)

    def loss(y, target):
        warnings.warn("never", stacklevel=1) if len(objects.scale) > 3 else None
        return objects.scale[0] * F.mse_loss(y, target)

    settings = LossSettings(loss)
    objects.steps += 1
    objects.scale[:] = list(objects.scale)
    assert settings.hold() and settings.differences() == []
    objects.scale.append(2.0)
    assert settings.differences() == ["`objects.scale` has changed"]


def test_a_loss_that_is_another_at_every_call_is_refused(learner: eb.OnlineLearner) -> None:
    module = Weighted()
    module.forward = lambda y, target: growing(module, y, target)

    def growing(module, y, target):
        module.factor += 1.0
        return module.factor * F.mse_loss(y, target)

    with pytest.raises(eb.StateError, match=r"`factor` is .* and was 1.0"):
        LossTable(module, True).find(learner.runtime.store.compiled, YS[0])


# -- optimizers -----------------------------------------------------------------------------------


def clamp(optimizer, args, kwargs) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.data.clamp_(-0.1, 0.1)


def test_an_optimizer_with_hooks_runs_in_torch() -> None:
    """Its own `step` counts too; a scheduler's does not."""
    parameters = {"w": nn.Parameter(torch.ones(2, dtype=torch.float64))}
    make = lambda: torch.optim.SGD(parameters.values(), lr=0.1)
    hooked, replaced, scheduled = make(), make(), make()
    hooked.register_step_post_hook(clamp)
    replaced.step = lambda closure=None: None
    torch.optim.lr_scheduler.StepLR(scheduled, 2)
    assert make_updater(hooked, parameters) is None
    assert make_updater(replaced, parameters) is None
    updater = make_updater(scheduled, parameters)
    assert updater is not None and updater.translated is not None
    updater.numbers({"w": torch.ones(2).numpy()})
    scheduled.load_state_dict(scheduled.state_dict())
    assert updater.translated.signature() != updater.seen
    with pytest.raises(eb.InputError, match=r"another state \(`load_state_dict`\), a hook"):
        updater.translated.numbers()
    hooked = make()
    updater = make_updater(hooked, parameters)
    assert updater is not None and updater.translated is not None
    hooked.register_step_pre_hook(clamp)
    with pytest.raises(eb.InputError, match="a hook or a `step` of its own"):
        updater.translated.numbers()


def test_sparse_adam_is_refused() -> None:
    model = make_partly()
    with pytest.raises(eb.NotSupportedError, match="sparse gradients only"):
        eb.OnlineLearner(
            model, "d_rtrl", F.mse_loss, torch.optim.SparseAdam([model.out.weight], lr=0.1)
        )
