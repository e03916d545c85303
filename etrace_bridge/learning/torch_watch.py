"""Notice changes of a learner's torch model that the learner did not make."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import brainstate
import torch

from etrace_bridge._errors import StateError
from etrace_bridge.frontend import BridgedModule


class TorchWatch:
    """The parameters of a torch model as a learner knows them: which tensors, which of them are
    trained, and their versions.

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
        self._places = _places(net.model) if is_torch else []
        self.note()
        if is_torch:
            read = net.versions_read
            self._values = [
                (read.get(n, version), pointer)
                for (n, _, _), (version, pointer) in zip(
                    self._parameters, self._values, strict=True
                )
            ]

    def note(self) -> None:
        """Accept the current values as known: the learner wrote or read them."""
        self._values = [(p._version, p.data_ptr()) for _, p, _ in self._parameters]

    def holds(self) -> bool:
        """Return whether nothing has changed."""
        for (_, p, trained), (version, pointer) in zip(self._parameters, self._values, strict=True):
            if p._version != version or p.data_ptr() != pointer or p.requires_grad is not trained:
                return False
        for table, key, held, _ in self._places:  # noqa: SIM110 - runs at every step
            if table.get(key) is not held:
                return False
        return True

    def check(self, learns: bool) -> None:
        """Warn of changed values; raise if tensors were replaced or if, for a call that `learns`,
        others are trained.
        """
        if self.holds():
            return
        self._check_parameters(learns)
        pairs = zip(self._parameters, self._values, strict=True)
        changed = [n for (n, p, _), held in pairs if (p._version, p.data_ptr()) != held]
        if not changed:
            return
        self.note()
        warnings.warn(
            f"{_list(changed)} of the torch model changed after this learner's weights were taken "
            "from it; the learner goes on with its own. Call `learner.sync_from_torch()` to take "
            "over the model's.",
            stacklevel=_outside(),
        )

    def _check_parameters(self, learns: bool) -> None:
        advice = (
            "wrap the model again and make a new learner; call `learner.sync_to_torch()` before, "
            "and the new one goes on with these weights."
        )
        replaced = [name for table, key, held, name in self._places if table.get(key) is not held]
        if replaced:
            raise StateError(
                f"{_list(replaced)} of the torch model was replaced by another object after the "
                "model was wrapped, and the learner's step is that of the old one. To change "
                "values, write into the parameter: `with torch.no_grad(): parameter.copy_(values)`. "
                f"Otherwise put the old one back, or {advice}"
            )
        switched = [n for n, p, trained in self._parameters if p.requires_grad is not trained]
        if learns and switched:
            raise StateError(
                f"`requires_grad` of {_list(switched)} was switched after the model was wrapped, "
                f"which decides what is trained. Switch it back, or {advice}"
            )


def _places(model: torch.nn.Module) -> list[tuple[dict[str, Any], str, Any, str]]:
    """Yield where a model's modules and parameters are stored: table, key, value, full name."""
    return [
        (table, key, held, f"{path}.{key}" if path else key)
        for path, module in model.named_modules()
        for table in (module._modules, module._parameters)
        for key, held in table.items()
        if held is not None
    ]


def _outside() -> int:
    """Return how many calls up from the caller this package's own code ends."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("etrace_bridge"):
        frame, level = frame.f_back, level + 1
    return level


def _list(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
