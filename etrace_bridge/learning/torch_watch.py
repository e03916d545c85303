"""Notices what happens to a learner's torch model behind the learner's back."""

from __future__ import annotations

import inspect
import warnings

import brainstate

from etrace_bridge._errors import StateError
from etrace_bridge.frontend import BridgedModule


class TorchWatch:
    """The parameters of a torch model as a learner knows them: which are trained, and their versions.

    A learner has copies of the weights, so a change in torch does not reach it.

    Args:
        net: the learner's module.
    """

    def __init__(self, net: brainstate.nn.Module) -> None:
        is_torch = isinstance(net, BridgedModule)
        named = net.model.named_parameters() if is_torch else ()
        trained = set(net.parameter_names) if is_torch else set()
        # Tensors made in inference mode have no version.
        self._parameters = [(n, p, n in trained) for n, p in named if not p.is_inference()]
        self.note()

    def note(self) -> None:
        """Take the present values as known: the learner wrote or read them."""
        self._versions = [p._version for _, p, _ in self._parameters]

    def holds(self) -> bool:
        """Whether nothing has changed."""
        for (_, p, trained), version in zip(self._parameters, self._versions, strict=True):
            if p._version != version or p.requires_grad is not trained:
                return False
        return True

    def check(self, learns: bool) -> None:
        """Warn of changed values; raise if other parameters are to be trained and the call `learns`."""
        if self.holds():
            return
        switched = [n for n, p, trained in self._parameters if p.requires_grad is not trained]
        if learns and switched:
            raise StateError(
                f"`requires_grad` of {_list(switched)} was switched after the model was wrapped, "
                "which decides what is trained. Switch it back, or wrap the model again and make a "
                "new learner; call `learner.sync_to_torch()` before, and the new one goes on with "
                "these weights."
            )
        pairs = zip(self._parameters, self._versions, strict=True)
        changed = [n for (n, p, _), version in pairs if p._version != version]
        if not changed:
            return
        self.note()
        warnings.warn(
            f"{_list(changed)} of the torch model changed after this learner took its weights; the "
            "learner goes on with its own. Call `learner.sync_from_torch()` to take over the "
            "model's.",
            stacklevel=_outside(),
        )


def _outside() -> int:
    """How many calls up from the caller this package's own code ends."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("etrace_bridge"):
        frame, level = frame.f_back, level + 1
    return level


def _list(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
