"""Positions: which position of which hidden state each element of a value feeds.

Every hidden state numbers its positions 0, 1, 2, …; a packed state (`(B, 2H)` holding `h` and `c`)
numbers each of its blocks from 0. Two passes over the step (`aligner`) follow the numbers as
integer arrays. Where they do not agree, an operand is a *cut*, held constant in the core.
"""

from __future__ import annotations

from collections.abc import Iterable

from etrace_bridge._jax_compat import Literal, Var
from etrace_bridge.compiler.aligner import Aligner, Alignment
from etrace_bridge.compiler.diagnostics import Path
from etrace_bridge.compiler.feeds import MANY, feeds_by_group
from etrace_bridge.compiler.hidden_leaves import HiddenLeaf, find_hidden_leaves
from etrace_bridge.compiler.jaxpr import variables
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.primitives import is_float, passes_derivative
from etrace_bridge.compiler.weight_views import Contact, WeightUse, find_weight_use


def find_alignment(minfo: ModuleInfo) -> tuple[WeightUse, Alignment, set[Var]]:
    """Find weights, positions and the states that matter.

    Returns the weight use, the alignment, and the variables of the states that matter: what groups
    and relations are made from.
    """
    use = find_weight_use(minfo)
    leaves = find_hidden_leaves(minfo)
    matter = states_that_matter(minfo)
    targets = frozenset(leaf.index for leaf in leaves if leaf.invar in matter)
    return use, align(minfo, use, leaves, targets), matter


def align(
    minfo: ModuleInfo, use: WeightUse, leaves: tuple[HiddenLeaf, ...], targets: frozenset[int]
) -> Alignment:
    """Run the two passes until no new cut is found.

    Args:
        minfo: the step.
        use: its contacts.
        leaves: its hidden states.
        targets: the hidden states whose future matters; nothing needs to be traced for the others.
    """
    return Aligner(minfo, use, leaves, targets).run().result()


def feeds_many(contact: Contact, alignment: Alignment) -> bool:
    """Return whether an element of a contact's output feeds several positions of a state.

    None of its pieces has a trace then.
    """
    feeds = [
        feeds_by_group(alignment.feeds.get(p.var, {}), alignment.joined) for p in contact.parts
    ]
    return any(
        len(arrays) > 1 or arrays[0] is MANY for by_group in feeds for arrays in by_group.values()
    )


def states_that_matter(minfo: ModuleInfo) -> set[Var]:
    """Return the states whose value can change a later loss through derivatives.

    They are given as variables before the step.
    """
    return _reach_back(minfo, range(minfo.num_var_out))[1]


def weights_behind(minfo: ModuleInfo, outputs: Iterable[int]) -> set[Path]:
    """Return the weights by which some of the outputs, now or later, can be differentiated.

    Args:
        minfo: the step.
        outputs: positions in the list of the step's outputs.
    """
    reach, _ = _reach_back(minfo, outputs)
    return {path for path, ins in minfo.weight_path_to_invars.items() if reach.intersection(ins)}


def _reach_back(minfo: ModuleInfo, outputs: Iterable[int]) -> tuple[set[Var], set[Var]]:
    """Return the variables by which outputs of this step or a later one can be differentiated, and
    which of them are states before the step.
    """
    jaxpr = minfo.jaxpr
    pairs = [
        (i, o)
        for ins, outs in zip(minfo.state_tree_invars, minfo.state_tree_outvars, strict=True)
        for i, o in zip(ins, outs, strict=True)
        if i not in minfo.invar_to_weight_path
    ]
    wanted = set(variables([jaxpr.outvars[n] for n in outputs]))
    matter: set[Var] = set()
    while True:
        reach = {v for v in wanted if is_float(v)}
        for eqn in reversed(jaxpr.eqns):
            if passes_derivative(eqn) and any(v in reach for v in eqn.outvars):
                reach.update(v for v in variables(eqn.invars) if is_float(v))
        found = {i for i, _ in pairs if i in reach}
        if found == matter:
            return reach, matter
        matter = found
        wanted |= {o for i, o in pairs if i in matter and not isinstance(o, Literal)}
