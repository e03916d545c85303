"""The adapters of snnTorch, Norse, SpikingJelly and ncps: names, first states, and what they
refuse.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

import etrace_bridge as eb
from etrace_bridge.frontend.adapter import find_adapter
from etrace_bridge.frontend.state_arguments import call_with_state
from torch_zoo import CASES, Case, tensors

LIBRARIES = ("snntorch", "norse", "spikingjelly", "ncps")

pytestmark = pytest.mark.filterwarnings("ignore:Inhibition is an unstable feature:UserWarning")


@pytest.mark.parametrize("library", LIBRARIES)
def test_first_state_starts_like_torch(library: str) -> None:
    """From the adapter's state, torch's first step is the one from no state; shapes and dtypes do
    not change in it.
    """
    pytest.importorskip(library)
    checked = 0
    for case in (case for case in CASES if case.library == library):
        module = case.build()
        adapter = find_adapter(module)
        if adapter is not None and adapter.arguments(module):
            _check_first_state(case, module, adapter)
            checked += 1
    assert checked >= 5


def _check_first_state(case: Case, module: nn.Module, adapter: eb.Adapter) -> None:
    x = case.inputs()[0]
    axis = {"time_major": 0, "batch_first": 1}.get(adapter.sequence(module) or "")
    first = x if axis is None else x.unsqueeze(axis)
    start = adapter.initial(module, (first,))
    returned = call_with_state(
        module, adapter.arguments(module), (first,), {}, start, module.forward
    )
    output, states = adapter.split(module, returned)
    expected = case.run(case.build(), case.inputs()[:1])
    if axis is not None and getattr(module, "return_sequences", True):
        output = output.select(axis, 0)
    torch.testing.assert_close(output, expected.outputs[0], rtol=0, atol=0, msg=case.name)
    before, after = tensors(start), tensors(states)
    assert {k: (v.shape, v.dtype) for k, v in before.items()} == {
        k: (v.shape, v.dtype) for k, v in after.items()
    }, case.name


@pytest.mark.parametrize(
    ("library", "layers"),
    [
        ("snntorch", "Leaky Lapicque Synaptic Alpha RLeaky RSynaptic SLSTM SConv2dLSTM"),
        (
            "norse",
            "LIF LIFCell LIFRecurrent LIFRecurrentCell LI LSNN LIFAdEx Izhikevich LIFRefracCell "
            "SequentialState",
        ),
        (
            "spikingjelly",
            "IFNode LIFNode ParametricLIFNode QIFNode EIFNode IzhikevichNode KLIFNode SpikingGRU",
        ),
        ("ncps", "CfC LTC CfCCell WiredCfCCell LTCCell"),
    ],
)
def test_supported_layers_lists_the_library(library: str, layers: str) -> None:
    pytest.importorskip(library)
    assert set(layers.split()) <= set(eb.supported_layers()[library])


def test_layers_that_are_refused_are_listed_as_such() -> None:
    snntorch = pytest.importorskip("snntorch")
    listed = eb.supported_layers()["snntorch"]
    assert (
        "StateLeaky (refused: computes a whole sequence at once)" in listed
        and "StateLeaky" not in listed
    )
    with pytest.raises(eb.NotSupportedError, match="computes a whole sequence at once"):
        eb.wrap(snntorch.StateLeaky(beta=0.9, channels=3))
    assert "GRU" in eb.supported_layers()["torch"]
    assert {"GRU (not bidirectional)", "GRUCell"} <= set(eb.supported_layers(limits=True)["torch"])


def test_slstm_that_forgets_its_state_is_refused() -> None:
    snntorch = pytest.importorskip("snntorch")
    model = nn.Sequential(snntorch.SLSTM(3, 4, init_hidden=True))
    with pytest.raises(
        eb.NotSupportedError, match=r"`0` is a snntorch.SLSTM\(3, 4\).*to zero at every step"
    ):
        eb.wrap(model)


def test_parallel_neuron_is_refused() -> None:
    snntorch = pytest.importorskip("snntorch")
    model = nn.Sequential(nn.Linear(3, 4), snntorch.StateLeaky(beta=0.9, channels=4))
    with pytest.raises(
        eb.NotSupportedError, match=r"`1` is a snntorch.StateLeaky, .*whole sequence at once"
    ):
        eb.wrap(model)


def test_bidirectional_spiking_rnn_is_refused() -> None:
    rnn = pytest.importorskip("spikingjelly.activation_based.rnn")
    with pytest.raises(eb.NotSupportedError, match=r"`SpikingGRU` is a bidirectional SpikingGRU"):
        eb.wrap(rnn.SpikingGRU(3, 4, 1, bidirectional=True))
