"""Teach the bridge a torch operation that it does not know: here a custom op of your own, with its
derivative.

python examples/register_an_op.py
"""

import argparse

import jax
import jax.numpy as jnp
import torch
from torch import nn

import etrace_bridge as eb


@torch.library.custom_op("example::soft_clip", mutates_args=())
def soft_clip(x: torch.Tensor, limit: float) -> torch.Tensor:
    """`x` inside the limit, its logarithm outside: what a compiled kernel of yours may compute."""
    inside, outside = x, torch.sign(x) * (limit + torch.log1p((x.abs() - limit).clamp(min=0)))
    return torch.where(x.abs() < limit, inside, outside)


@soft_clip.register_fake
def _(x: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.empty_like(x)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.limit = inputs[1]


def _backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad / (1 + (x.abs() - ctx.limit).clamp(min=0)), None


soft_clip.register_autograd(_backward, setup_context=_save)


def soft_clip_in_jax(x: jax.Array, limit: float) -> jax.Array:
    """The same on JAX arrays. JAX finds the derivative itself."""
    return jnp.where(
        jnp.abs(x) < limit, x, jnp.sign(x) * (limit + jnp.log1p(jnp.maximum(jnp.abs(x) - limit, 0)))
    )


class Cell(nn.Module):
    """A recurrent cell with the op in its recurrence."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.hidden, self.fc = hidden, nn.Linear(inputs + hidden, hidden)

    def forward(self, x, h=None):
        h = x.new_zeros(x.shape[0], self.hidden) if h is None else h
        h = 0.8 * h + torch.ops.example.soft_clip(self.fc(torch.cat([x, h], -1)), 0.5)
        return h, h


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few seconds, for tests")
    hidden, steps = (4, 9) if parser.parse_args().small else (32, 60)

    torch.manual_seed(0)
    model = Cell(3, hidden)
    xs, targets = torch.randn(steps, 4, 3), torch.randn(steps, 4, hidden)
    try:
        eb.check_gradients(model, xs, targets, nn.functional.mse_loss, rule="rtrl")
    except eb.UnsupportedOpError as error:
        print(f"before:\n{error}\n")

    eb.register_op("example::soft_clip", soft_clip_in_jax)
    report = eb.check_gradients(model, xs, targets, nn.functional.mse_loss, rule="rtrl")
    print(f"after:\n{report}")
    assert report.ok and all(row.verdict == "exact" for row in report)


if __name__ == "__main__":
    main()
