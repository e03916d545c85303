"""Small torch models and data shared by the learner's tests."""

from __future__ import annotations

import torch
from torch import nn

T, B, I, O = 6, 3, 2, 2  # noqa: E741


class Net(nn.Module):
    """An RNN with a readout, and a layer that nothing uses."""

    def __init__(self, hidden: int = 3, batch_first: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.rnn = nn.RNN(I, hidden, batch_first=batch_first)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(hidden, O)
        self.spare = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(self.rnn(x)[0]))


def make_net(dtype: torch.dtype = torch.float64, **options) -> Net:
    """The same weights every time."""
    torch.manual_seed(3)
    return Net(**options).to(dtype)


def make_data(steps: int = T, batch: int = B, seed: int = 0, dtype: torch.dtype = torch.float64):
    """Inputs and targets of a sequence, time-major."""
    made = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, dtype=dtype, generator=made)
    return draw(steps, batch, I), draw(steps, batch, O)


def torch_loss(
    model: nn.Module, xs: torch.Tensor, targets: torch.Tensor, loss=nn.functional.mse_loss
) -> torch.Tensor:
    """The mean over steps of the loss, time-major."""
    return torch.stack([loss(y, t) for y, t in zip(model(xs), targets, strict=True)]).mean()


def torch_gradients(
    model: nn.Module, xs: torch.Tensor, targets: torch.Tensor, **options
) -> dict[str, torch.Tensor]:
    """torch's own BPTT; zero for what is not used."""
    model.zero_grad()
    torch_loss(model, xs, targets, **options).backward()
    return {
        n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for n, p in model.named_parameters()
    }


def assert_same(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-9
) -> None:
    """Equal relative to the largest element of each; most must not be zero."""
    assert list(found) == list(expected)
    found, expected = ({n: t.detach() for n, t in each.items()} for each in (found, expected))
    live = [name for name, e in expected.items() if e.abs().max() > 1e-6]
    assert len(live) >= len(expected) - 2, "hardly any gradient: nothing is compared"
    for name, e in expected.items():
        worst = float((found[name] - e).abs().max())
        assert worst <= tolerance * max(float(e.abs().max()), 1e-3), (name, worst)
