"""Each rule's gradient before training beside BPTT's, in delayed match to sample (G): `python -m
benchmarks.reproduce.first_gradient [--network GIF]`.

Prints, for each weight, the cosine to BPTT and the norm in units of BPTT's, over one batch of
trials, of the loss for the answer alone, or with `--loss rate` of the pull on the rates alone.
Nothing is written.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from torch import Tensor

import etrace_bridge as eb
from benchmarks.reproduce.match_to_sample import VARIANTS, make_network, match_batch
from benchmarks.reproduce.spiking import answer_loss, rate_loss
from benchmarks.reproduce.tasks import Size
from etrace_bridge.rules import make_rule

LOSSES = {"answer": answer_loss, "rate": rate_loss}
RULES = ("d_rtrl", "d_rtrl:credit=core", "pp_prop", "pp_prop:decay=0.99", "eprop", "immediate")


def gradients(
    model: torch.nn.Module, rule: str, chunk: int | str, batch: tuple, loss: str
) -> dict[str, np.ndarray]:
    """The rule's gradients of one batch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    learner = eb.OnlineLearner(
        eb.wrap(model, sequence=True), make_rule(rule), LOSSES[loss], optimizer, chunk=chunk
    )
    return {n: np.asarray(g) for n, g in learner.gradients(*batch).grads.items()}


def main() -> None:
    """Print a row for each rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--network", choices=VARIANTS, default="LIF + ALIF")
    parser.add_argument("--rules", nargs="*", default=RULES)
    parser.add_argument("--loss", choices=LOSSES, default="answer")
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = make_network(options.network, Size())
    generator = torch.Generator().manual_seed(1)
    batch: tuple[Tensor, tuple[Tensor, Tensor]] = match_batch(
        VARIANTS[options.network], 300, Size(), generator, options.batch
    )
    exact = gradients(model, "bptt", batch[0].shape[0], batch, options.loss)
    print("bptt", *(f"{n} {np.linalg.norm(g):.2g}" for n, g in exact.items()), sep="   ")
    for rule in options.rules:
        found, shown = gradients(model, rule, "auto", batch, options.loss), []
        for name, g in found.items():
            own, norm = np.linalg.norm(g), np.linalg.norm(exact[name])
            shown.append(f"{name} {(g * exact[name]).sum() / own / norm:.3f} {own / norm:.2g}")
        print(rule, *shown, sep="   ", flush=True)


if __name__ == "__main__":
    main()
