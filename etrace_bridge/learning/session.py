"""A model compiled for inputs of one shape, and the way between its States and the learner's flat lists of arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import brainstate
import jax
import numpy as np

from etrace_bridge._errors import InputError, StateError
from etrace_bridge.compiler.diagnostics import show_path
from etrace_bridge.compiler.graph import compile_etrace_graph
from etrace_bridge.engine.plan import ChunkPlan
from etrace_bridge.engine.program import StepProgram
from etrace_bridge.frontend import BridgedModule
from etrace_bridge.learning.inputs import signature

Path = tuple[Any, ...]


class Session:
    """One compiled step.

    Args:
        net: the model; its states are made or changed to fit the inputs.
        args: one time step of each input.

    Attributes:
        program: the step.
        signature: shapes and dtypes of its inputs.
        batch: size of the batch axis.
        weight_names: name of every weight, in the program's order.
        hidden_names: name of every hidden state.
        other_names: name of every other array that a step carries.
        resets: for each of those, whether it belongs to a sequence (and starts anew with it) rather than to the model.
        initial: hidden and other arrays before a sequence.
        compiled: the jitted programs made for this step.
        plans: how sequences are divided into chunks, by their length.
    """

    def __init__(self, net: brainstate.nn.Module, args: Sequence[Any]) -> None:
        self.net = net
        self.signature = signature(args)
        self.batch = args[0].shape[0] if args[0].ndim else None
        self._examples = [np.zeros(a.shape, a.dtype) for a in args]
        self.fit_states()
        graph = compile_etrace_graph(net, *(jax.numpy.asarray(a) for a in args), include_hidden_perturb=False)
        self.program = StepProgram(graph)
        info = graph.module_info
        hidden, weights = set(info.hidden_path_to_invar), info.weight_path_to_invars
        self._weight_paths = list(weights)
        self._other_states = [
            (info.state_path(s), s)
            for s in info.compiled_model_states
            if info.state_path(s) not in weights and info.state_path(s) not in hidden
        ]
        states = info.retrieved_model_states
        self.weight_names = _leaf_names([(p, states[p].value) for p in self._weight_paths])
        self.hidden_names = [show_path(leaf.path) for leaf in self.program.leaves]
        self.other_names = _leaf_names([(p or ("outside",), s.value) for p, s in self._other_states])
        persistent = _persistent_paths(net)
        self.resets = [_resets(p, s, persistent) for p, s in self._other_states for _ in jax.tree.leaves(s.value)]
        self.initial = self._initial()
        for leaf, start in zip(self.program.leaves, self.initial[0], strict=True):
            if leaf.invar.aval.shape != start.shape:
                raise InputError(
                    f"The hidden state `{show_path(leaf.path)}` has shape {leaf.invar.aval.shape} in a step on this input, and {start.shape} "
                    f"for a batch of {self.batch}: the input's first axis is not read as the batch. Give it a batch axis, (batch, …)"
                )
        self.compiled: dict[Any, Any] = {}
        self.plans: dict[int, ChunkPlan] = {}

    @property
    def is_evaluation(self) -> bool:
        """Whether evaluation would run the same step: nothing in it depends on the mode."""
        if not isinstance(self.net, BridgedModule):
            return False
        inputs = [jax.numpy.asarray(a) for a in self._examples]
        self.fit_states()
        now = str(self.net.traced_step(*inputs).jaxpr)
        with evaluation_mode(self.net):
            self.fit_states()
            then = str(self.net.traced_step(*inputs).jaxpr)
        self.fit_states()
        return now == then

    def in_evaluation(self) -> Session:
        """The same step, compiled for evaluation."""
        with evaluation_mode(self.net):
            made = Session(self.net, self._examples)
        self.fit_states()
        return made

    def fit_states(self) -> None:
        """Makes the model's states fit this session's inputs, if they do not."""
        if isinstance(self.net, BridgedModule):
            with contextlib.suppress(StateError):
                if any(h.ndim and h.shape[0] != self.batch for h in self.net.hidden_values()[:1]):
                    self.net.init_state(batch_size=self.batch)
            try:
                self.net.ensure_state(*self._examples)
            except InputError:  # made for inputs of another shape
                self.net.init_state(batch_size=self.batch)
                self.net.ensure_state(*self._examples)
            return
        hidden = [s.value for s in self.net.states(brainstate.HiddenState).values()]
        sizes = {x.shape[0] for x in jax.tree.leaves(hidden) if x.ndim}
        if sizes and self.batch not in sizes:
            brainstate.nn.init_all_states(self.net, batch_size=self.batch)

    def read(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Weights, hidden states and other arrays as the States have them."""
        states = self._states()
        return (
            [x for p in self._weight_paths for x in jax.tree.leaves(states[p].value)],
            [states[leaf.path].value for leaf in self.program.leaves],
            [x for p, s in self._other_states for x in jax.tree.leaves(states.get(p, s).value)],
        )

    def write(self, theta: Sequence[Any], hidden: Sequence[Any], other: Sequence[Any]) -> None:
        """Puts weights, hidden states and other arrays into the States."""
        self.fit_states()
        states = self._states()
        for path, leaf in zip((leaf.path for leaf in self.program.leaves), hidden, strict=True):
            states[path].value = leaf
        targets = [states[p] for p in self._weight_paths] + [states.get(p, s) for p, s in self._other_states]
        at, arrays = 0, [*theta, *other]
        for state in targets:
            tree = jax.tree.structure(state.value)
            state.value = jax.tree.unflatten(tree, arrays[at : at + tree.num_leaves])
            at += tree.num_leaves

    def _states(self) -> dict[Path, Any]:
        return dict(self.net.states())

    def _initial(self) -> tuple[list[Any], list[Any]]:
        current = self.read()
        if isinstance(self.net, BridgedModule):
            self.net.reset_state()
            _, hidden, other = self.read()
            self.write(*current)
        else:
            _, hidden, other = current
        return [np.array(h) for h in hidden], [np.array(o) for o in other]


@contextlib.contextmanager
def evaluation_mode(net: brainstate.nn.Module) -> Iterator[None]:
    """Within this, models are traced as for evaluation: dropout off, running statistics used."""
    modules = list(net.model.modules()) if isinstance(net, BridgedModule) else []
    flags = [m.training for m in modules]
    try:
        for m in modules:
            m.training = False
        with brainstate.environ.context(fit=False):
            yield
    finally:
        for m, flag in zip(modules, flags, strict=True):
            m.training = flag


def _persistent_paths(net: brainstate.nn.Module) -> set[Path] | None:
    """Paths of a torch model's buffers and its random key; None for other models."""
    if not isinstance(net, BridgedModule):
        return None
    names = {name for name, _ in net.model.named_buffers(remove_duplicate=False)}
    names |= {name for name, _ in net.model.named_parameters(remove_duplicate=False)}
    return {tuple(name.split(".")) for name in names} | {("rng_key",)}


def _resets(path: Path | None, state: brainstate.State, persistent: set[Path] | None) -> bool:
    if persistent is not None:
        return path not in persistent
    return isinstance(state, brainstate.ShortTermState)


def _leaf_names(values: Sequence[tuple[Path, Any]]) -> list[str]:
    return [
        show_path(path) + jax.tree_util.keystr(keys) for path, value in values for keys, _ in jax.tree_util.tree_flatten_with_path(value)[0]
    ]
