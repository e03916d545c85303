"""What is measured: torch models with their data, and the number each row has to reach."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    Attributes:
        name: What `--only` selects.
        model: `"gru"`, `"lstm"` (three layers), `"rleaky"` (snnTorch) or `"convlstm"`.
        hidden: Hidden units; channels for the ConvLSTM.
        inputs: Input features; the side of the square image for the ConvLSTM.
        batch: Batch size.
        steps: Length of the sequence.
        rule: The online rule of our column; braintrace runs the same one.
        credit: How far our rule's credit reaches within a step; braintrace's reaches through the
            core.
        mode: `"gradients"` of the whole sequence, or one `"step"` with an SGD update.
        reach: The largest ratio to torch BPTT that the design asks for, if it names one.
        chunk: Chunk size of the yardstick; ours chooses its own.
    """

    name: str
    model: str
    hidden: int
    inputs: int
    batch: int
    steps: int
    rule: str = "d_rtrl"
    credit: str = "step"
    mode: str = "gradients"
    reach: float | None = None
    chunk: int = 100

    @property
    def outputs(self) -> int:
        """Number of readout units."""
        return 10

    @property
    def feature_major(self) -> bool:
        """Whether the yardstick's recurrence runs on `(H, B)` states, which pays for small batches
        and large states.
        """
        return self.batch <= 16 and self.hidden >= 512

    @property
    def trace_bytes(self) -> int:
        """Size of the trace of a GRU with D-RTRL, in float32."""
        return 4 * self.batch * 3 * self.hidden * (self.inputs + self.hidden + 2)

    @property
    def shape(self) -> str:
        """The sizes, as the table prints them."""
        return f"H={self.hidden} I={self.inputs} B={self.batch} T={self.steps}"


WORKLOADS = (
    Workload("gru-t100", "gru", 256, 64, 32, 100, reach=1.0),
    Workload("gru-t2000", "gru", 256, 64, 32, 2000, reach=1.1),
    Workload("gru-h512", "gru", 512, 128, 32, 500, reach=1.2),
    Workload("gru-h1024", "gru", 1024, 64, 8, 200, reach=0.7, chunk=200),
    Workload("gru-b1", "gru", 256, 64, 1, 1000, reach=0.2, chunk=500),
    Workload("gru-b128", "gru", 128, 32, 128, 200),
    Workload("gru-t10000", "gru", 128, 32, 8, 10_000, chunk=200),
    Workload(
        "pp-prop", "gru", 256, 64, 32, 100, rule="pp_prop", credit="core", reach=0.6, chunk=20
    ),
    Workload("pp-prop-step", "gru", 256, 64, 32, 100, rule="pp_prop", chunk=20),
    Workload("lstm-3", "lstm", 128, 32, 16, 100),
    Workload("rleaky", "rleaky", 128, 32, 16, 100),
    Workload("convlstm", "convlstm", 8, 16, 8, 50),
    Workload("online-step", "gru", 128, 32, 1, 1, mode="step", chunk=1),
    Workload("online-step-b8", "gru", 256, 64, 8, 1, mode="step", chunk=1),
    Workload(
        "online-step-pp", "gru", 512, 64, 8, 1, rule="pp_prop", credit="core", mode="step", chunk=1
    ),
)


class GRUReadout(nn.Module):
    """A GRU and a linear readout of every step."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.gru = nn.GRU(inputs, hidden)
        self.readout = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.gru(x)[0])


class LSTMReadout(nn.Module):
    """Three LSTM layers and a linear readout of every step."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, num_layers=3)
        self.readout = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.lstm(x)[0])


class SpikingReadout(nn.Module):
    """A recurrent layer of snnTorch's leaky neurons between two linear layers; one call is one time
    step.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        import snntorch

        self.encode = nn.Linear(inputs, hidden)
        self.neurons = snntorch.RLeaky(
            beta=0.9,
            linear_features=hidden,
            spike_grad=snntorch.surrogate.fast_sigmoid(),
            init_hidden=True,
            learn_beta=True,
        )
        self.readout = nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.neurons(3 * self.encode(x)))

    def reset(self) -> None:
        """Forget the state, so that the next call starts a sequence."""
        self.neurons.spk, self.neurons.mem = self.neurons.reset_mem()


class ConvLSTM(nn.Module):
    """A convolutional LSTM on square images; one call is one time step, `(output, state)` comes
    back.
    """

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.channels = channels
        self.gates = nn.Conv2d(1 + channels, 4 * channels, 3, padding=1)
        self.readout = nn.Linear(channels, outputs)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if state is None:
            zero = x.new_zeros(x.shape[0], self.channels, *x.shape[2:])
            state = zero, zero
        h, c = state
        i, f, g, o = self.gates(torch.cat([x, h], 1)).chunk(4, 1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return self.readout(h.mean((2, 3))), (h, c)


def torch_model(workload: Workload) -> nn.Module:
    """Return the workload's model, the same weights at every call."""
    torch.manual_seed(0)
    if workload.model == "convlstm":
        return ConvLSTM(workload.hidden, workload.outputs)
    kind = {"gru": GRUReadout, "lstm": LSTMReadout, "rleaky": SpikingReadout}[workload.model]
    return kind(workload.inputs, workload.hidden, workload.outputs)


def data(workload: Workload) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, time first."""
    torch.manual_seed(1)
    features = (
        (1, workload.inputs, workload.inputs)
        if workload.model == "convlstm"
        else (workload.inputs,)
    )
    xs = torch.randn(workload.steps, workload.batch, *features)
    return xs, torch.randn(workload.steps, workload.batch, workload.outputs)
