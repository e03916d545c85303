"""Copies: a value that feeds several positions of a state is computed once for each of them.

In `h' = 0.9 h + u + roll(u)` with `u = W x`, an element of `u` feeds two positions, and one trace
cannot hold both. The step with two products, `h' = 0.9 h + u1 + roll(u2)`, is the same function,
and every element feeds one position: two contacts with one view, each with its own trace. Equal
products are computed once when the program is compiled.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from etrace_bridge._jax_compat import ClosedJaxpr, Literal, Var
from etrace_bridge.compiler.aligner import Aligner
from etrace_bridge.compiler.feeds import MANY, Feeds, feeds_by_group, merge_feeds
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.positions import feeds_many, find_alignment

# Of one equation; where more are needed the contact has no trace, and the report says so
MAX_COPIES = 16


@dataclass
class _Copy:
    """One copy of an equation."""

    index: int
    operands: list[Any]
    outvars: list[Var]


def copy_for_each_position(minfo: ModuleInfo) -> ModuleInfo:
    """Copy contacts, and what leads from them to the states, until a value feeds one position."""
    use, alignment, _ = find_alignment(minfo)
    many = {c.eqn_index for c in use.contacts if c.form is not None and feeds_many(c, alignment)}
    if not many:
        return minfo
    aligner = Aligner(minfo, use, alignment.leaves, alignment.targets).run()
    copies = _Copier(aligner, alignment.joined, many).run(minfo)
    if copies is None:
        return minfo
    eqns = [aligner.eqns[c.index].replace(invars=c.operands, outvars=c.outvars) for c in copies]
    return dataclasses.replace(
        minfo, closed_jaxpr=ClosedJaxpr(minfo.jaxpr.replace(eqns=eqns), minfo.closed_jaxpr.consts)
    )


class _Copier:
    """Goes once backwards over the step: all readers of an equation are known when it is copied."""

    def __init__(self, aligner: Aligner, group_of: tuple[int, ...], contacts: set[int]) -> None:
        self.aligner, self.group_of = aligner, group_of
        self.divisible = _downstream(aligner, contacts)
        self.readers: dict[Var, list[tuple[_Copy, int] | None]] = {}  # None: an output of the step

    def run(self, minfo: ModuleInfo) -> list[_Copy] | None:
        """Return the equations of the new step, in order; None where one needs too many copies."""
        for v in variables(minfo.jaxpr.outvars):
            self.readers.setdefault(v, []).append(None)
        backwards: list[_Copy] = []
        for i in range(len(self.aligner.eqns) - 1, -1, -1):
            copies = self._divide(i)
            if len(copies) > MAX_COPIES:
                return None
            for copy in reversed(copies):
                for k, operand in enumerate(copy.operands):
                    if not isinstance(operand, Literal):
                        self.readers.setdefault(operand, []).append((copy, k))
            backwards += reversed(copies)
        return backwards[::-1]

    def _divide(self, i: int) -> list[_Copy]:
        """Return the copies of an equation.

        The first one has the old outputs, and whatever reads them without feeding a position.
        """
        eqn = self.aligner.eqns[i]
        copies = [_Copy(i, list(eqn.invars), list(eqn.outvars))]
        if i not in self.divisible:
            return copies
        for n, out in enumerate(eqn.outvars):
            of_copy: list[Feeds | None] = [None] * len(copies)  # what the readers so far feed
            for reader in self.readers.get(out, ()):
                fed = self._fed(out, reader)
                home = next(
                    (c for c, known in enumerate(of_copy) if self._may_join(known, fed)),
                    len(copies),
                )
                if home == len(copies):
                    copies.append(_Copy(i, list(eqn.invars), [Var(v.aval) for v in eqn.outvars]))
                    of_copy.append(None)
                of_copy[home] = merge_feeds(of_copy[home] or {}, fed)
                if reader is not None:
                    reader[0].operands[reader[1]] = copies[home].outvars[n]
            for copy, known in zip(copies, of_copy, strict=True):
                self.aligner.feeds[copy.outvars[n]] = known or {}
        return copies

    def _fed(self, out: Var, reader: tuple[_Copy, int] | None) -> Feeds:
        if reader is None:
            return self.aligner.state_positions(out)
        copy, k = reader
        return (
            {}
            if (copy.index, k) in self.aligner.cuts
            else self.aligner.edge_feeds(copy.index, k, copy.outvars)
        )

    def _may_join(self, known: Feeds | None, fed: Feeds) -> bool:
        """Return whether a reader fits in a copy.

        A copy without readers takes any; what is spread needs a copy to itself.
        """
        if known is None:
            return True
        by_group = feeds_by_group(merge_feeds(known, fed), self.group_of)
        return all(len(arrays) == 1 and arrays[0] is not MANY for arrays in by_group.values())


def _downstream(aligner: Aligner, contacts: set[int]) -> set[int]:
    """Return the equations from these contacts on, as far as positions can be followed."""
    found, reached = set(), set()
    for i, eqn in enumerate(aligner.eqns):
        if i in contacts or (
            aligner.aligned_kind(i) != "mixed" and any(v in reached for v in variables(eqn.invars))
        ):
            found.add(i)
            reached.update(v for v in eqn.outvars if v in aligner.feeds)
    return found
