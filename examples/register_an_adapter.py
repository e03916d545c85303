"""Teach the bridge where a module of your own library keeps its state, when running it does not
tell.

Most modules need no adapter. This one follows a convention of its own: its state is called `p` and
comes back before the output. The adapter says which argument is state, where the new state is in
what `forward` returns, how it starts, and what to call it.

    python examples/register_an_adapter.py
"""

import argparse

import torch
from torch import nn

import etrace_bridge as eb


class Resonator(nn.Module):
    """Damped oscillators; `p` packs their positions and velocities as `(batch, 2, size)`."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.drive = nn.Linear(inputs, size)
        self.frequency = nn.Parameter(torch.linspace(0.1, 1.0, size))
        self.size = size

    def forward(
        self, x: torch.Tensor, p: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        position, velocity = (x.new_zeros(x.shape[0], 2, self.size) if p is None else p).unbind(1)
        velocity = 0.95 * velocity - self.frequency * position + self.drive(x)
        position = position + 0.5 * velocity
        return torch.stack([position, velocity], 1), position


class ResonatorAdapter(eb.Adapter):
    """`p, out = resonator(x, p)`; `p` starts at zero and is the state `motion`."""

    library = "my library"
    layers = (Resonator,)

    def arguments(self, module):
        return ("p",)

    def split(self, module, returned):
        p, out = returned
        return out, (p,)

    def initial(self, module, inputs):
        return (inputs[0].new_zeros(inputs[0].shape[0], 2, module.size),)

    def state_path(self, module, path):
        return ("motion",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a few seconds, for tests")
    size, steps = (4, 9) if parser.parse_args().small else (32, 60)

    eb.register_adapter(ResonatorAdapter())
    print("known now:", eb.supported_layers()["my library"], "\n")
    torch.manual_seed(0)
    model = Resonator(3, size)
    net = eb.wrap(model)
    net.init_state(batch_size=4)
    graph = eb.compile_etrace_graph(net, eb.to_jax(torch.randn(4, 3)))
    print(graph.report(), "\n")
    assert ("motion",) in graph.hid_path_to_group
    report = eb.check_gradients(
        model,
        torch.randn(steps, 4, 3),
        torch.randn(steps, 4, size),
        nn.functional.mse_loss,
        rule="d_rtrl",
    )
    print(report)
    assert report.ok and all(row.verdict == "exact" for row in report)


if __name__ == "__main__":
    main()
