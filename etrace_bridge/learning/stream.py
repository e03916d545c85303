"""`StreamLearner`: one example at a time, by the convention of libraries for data streams."""

from __future__ import annotations

from typing import Any

import jax
import torch

from etrace_bridge.frontend import map_input
from etrace_bridge.learning.learner import OnlineLearner


class StreamLearner:
    """Learns from a stream of single examples: `predict_one(x)`, then `learn_one(x, y)`.

    Both take the same example: `predict_one` leaves states and traces as they are, and `learn_one`
    advances them by one time step.

    Args:
        model: a torch or brainstate module.
        **options: further arguments of `OnlineLearner`: `rule`, `loss`, `optimizer`, …

    Attributes:
        learner: the learner, with batch size 1.
    """

    def __init__(self, model: Any, **options: Any) -> None:
        self.learner = OnlineLearner(model, **options)

    def __repr__(self) -> str:
        return f"StreamLearner({self.learner!r})"

    def _repr_html_(self) -> str:
        return self.learner._repr_html_()

    def predict_one(self, x: Any) -> Any:
        """Return the output for the next example, in evaluation mode, without the batch axis."""
        outputs = self.learner.predict(
            map_input(lambda a: _as_tensor(a)[None, None], x), carry=True
        )
        return jax.tree.map(lambda y: y[0, 0], outputs)  # one step of one sequence

    def learn_one(self, x: Any, y: Any) -> StreamLearner:
        """Run one time step with update; return the learner itself."""
        self.learner.step(map_input(lambda a: _as_tensor(a)[None], x), _as_tensor(y)[None])
        return self

    def reset(self) -> None:
        """Start a new sequence."""
        self.learner.reset()


def _as_tensor(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.as_tensor(x)
