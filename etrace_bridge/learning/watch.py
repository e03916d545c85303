"""The guard's side on the host: reads the alarm at intervals, and says which step went wrong and
where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from etrace_bridge._errors import NonFiniteError
from etrace_bridge.learning.element_loss import Weighted
from etrace_bridge.learning.guard import COUNT, FIRST, STOPPED, alarm_text, new_alarm, watched_names
from etrace_bridge.learning.jitted import JittedPrograms
from etrace_bridge.learning.losses import LossTable
from etrace_bridge.learning.programs import make_step
from etrace_bridge.learning.store import Store
from etrace_bridge.lowering import jit

LOOK_EVERY = 64  # steps after which the alarm is read, unless something else reads it earlier


class Watch:
    """Reads the alarm that the compiled programs raise, see `guard`.

    Args:
        store: the learner's store.
        programs: its programs, to run a step again that went wrong.
        losses: its losses.
        active: whether the learner is guarded at all.

    Attributes:
        recent: inputs and targets of the steps since the last look, to find out what went wrong.
        good: updates that were known to be good at the last look.
    """

    def __init__(
        self, store: Store, programs: JittedPrograms, losses: LossTable, active: bool
    ) -> None:
        self._store, self._programs, self._losses, self.active = store, programs, losses, active
        self.recent: list[tuple] = []
        self.good = 0

    def look(self, losses: Any = None, each: int = 1) -> None:
        """Raise if the guard has held something back; the last good state stays.

        Args:
            losses: the steps' losses of a sequence that has just run.
            each: steps for each of its updates.
        """
        store = self._store
        with store.lock:
            recent, self.recent = self.recent, []
            if not self.active or not store.started:
                return
            alarm = np.asarray(store.state.alarm)
            if not alarm[STOPPED]:
                self.good = int(alarm[COUNT])
                return
            count = int(alarm[COUNT])
            flags = alarm[FIRST:]
            good = count - self.good
            step, last = store.steps + good * each + 1, None
            if losses is not None:
                bad = np.flatnonzero(~np.isfinite(np.asarray(losses)[good * each :]))
                last = None if bad.size else step + each - 1
                step += int(bad[0]) if bad.size else 0
            else:  # a single step's quick verdict: find out what it was
                store.steps -= len(recent) - good
                step = store.steps + 1
                store.updates -= sum(target is not None for _, target in recent[good:])
                if not store.placement.spans_processes:  # a further step would need all processes
                    flags = self._diagnose(*recent[good])
            self.good = count
            silent = store.placement.put(jnp.asarray(new_alarm(count, len(flags))))
            store.state = store.state.replace(alarm=silent)
            names = watched_names(store.compiled.weight_names, store.compiled.hidden_names)
            error = NonFiniteError(
                alarm_text(step, [n for n, bad in zip(names, flags, strict=True) if bad], last)
            )
            error.settled = True
            raise error

    def _diagnose(self, args: list[Any], target: Any) -> list[bool]:
        """Return what is not finite in a step from the current state."""
        store = self._store
        masked = isinstance(target, Weighted)
        loss = (
            None
            if target is None
            else self._losses.find(store.compiled, target.target if masked else target)
        )
        loss = loss.by_element if masked and loss is not None else loss
        function = make_step(self._programs.spec(loss), own_update=False)
        new, loss, _, grads = jit(function, platform=store.placement.platform)(
            store.state, args, target
        )
        grads = grads if grads is not None else [np.zeros(())] * len(new.theta)
        watched = [np.zeros(()) if loss is None else loss, *grads, *new.hidden]
        return [not np.isfinite(np.asarray(x)).all() for x in watched]

    def check_on_host(self, losses: Any, grads: Mapping[str, Any], before: int) -> None:
        """Guard an update that passes through torch, where everything is on the host anyway."""
        if not self.active:
            return
        bad = [not np.isfinite(np.asarray(x)).all() for x in (losses, *grads.values())]
        if any(bad):
            self.raise_bad(
                losses,
                [n for n, b in zip(watched_names(list(grads), ()), bad, strict=True) if b],
                before,
            )

    def check_states(self, losses: Any, bad: Any) -> None:
        """Raise if `bad`, as in `make_gradients`, marks a hidden state, another array or the trace
        after a sequence.
        """
        if bad is not None and np.any(bad):
            compiled = self._store.compiled
            names = [
                *(f"the hidden state `{n}`" for n in compiled.hidden_names),
                *(f"`{n}`" for n in compiled.other_names),
                "the trace",
            ]
            self.raise_bad(
                losses,
                [n for n, b in zip(names, np.asarray(bad), strict=True) if b],
                self._store.steps,
            )

    @staticmethod
    def raise_bad(losses: Any, bad: Sequence[str], before: int) -> NoReturn:
        """Raise for values that were computed after step `before` and not stored."""
        finite = np.isfinite(np.atleast_1d(losses))
        last = before + finite.size if finite.all() else None
        raise NonFiniteError(alarm_text(before + 1 + int(np.argmin(finite)), bad, last))
