"""A model's step compiled for inputs of one shape, and the way between its States, names and flat
lists of arrays.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import brainstate
import brainunit
import jax
import numpy as np
import torch

from etrace_bridge._errors import BridgeError, InputError, StateError
from etrace_bridge.compiler.diagnostics import show_path
from etrace_bridge.compiler.extraction import extract_module_info
from etrace_bridge.compiler.graph import ETraceGraph, compile_etrace_graph
from etrace_bridge.frontend import BridgedModule, InputRange, Settings
from etrace_bridge.learning.frozen import FrozenStep
from etrace_bridge.learning.inputs import show_signature, signature
from etrace_bridge.learning.placement import private_copy
from etrace_bridge.lowering import announcing, tuning_for
from etrace_bridge.step.batch_rows import is_same_for_any_batch
from etrace_bridge.step.program import make_program

Path = tuple[Any, ...]


class CompiledStep:
    """One time step of a model, compiled for inputs of one shape.

    Args:
        net: the model; its states are made or changed to fit the inputs.
        args: one time step of each input.
        platform: the kind of device that its programs run on; None: JAX's default.
        freezes: the last argument says which batch elements move, see `FrozenStep`.

    Attributes:
        program: the step.
        signature: shapes and dtypes of its inputs.
        batch: size of the batch axis; None if inputs and states have none.
        weight_names: name of every weight, in the program's order.
        hidden_names: name of every hidden state.
        other_names: name of every other array that a step carries.
        resets: for each of those, whether it belongs to a sequence (and starts anew with it) rather
            than to the model.
        initial: hidden and other arrays before a sequence.
        programs: the jitted programs made for this step.
        ranges: what the step demands of inputs that it uses as indices; known for torch models.
    """

    @announcing()
    def __init__(
        self,
        net: brainstate.nn.Module,
        args: Sequence[Any],
        platform: str | None = None,
        freezes: bool = False,
    ) -> None:
        self.net, self.platform, self._freezes = net, platform, freezes
        self.signature = signature(args)
        self._training = _modes_of(net)
        self.batch = args[0].shape[0] if args[0].ndim else None
        self._examples = [np.zeros(a.shape, a.dtype) for a in (args[:-1] if freezes else args)]
        self._keep = [np.ones(a.shape, a.dtype) for a in (args[-1:] if freezes else ())]
        if isinstance(net, BridgedModule):
            self._fit_bridged()
            graph = self._graph()
        else:
            graph = self._graph_of_plain()
        self.program = make_program(graph, platform)
        info = graph.module_info
        hidden, weights = set(info.hidden_path_to_invar), info.weight_path_to_invars
        self._weight_paths = list(weights)
        self._other_states = [
            (info.state_path(s), s)
            for s in info.compiled_model_states
            if info.state_path(s) not in weights and info.state_path(s) not in hidden
        ]
        states = info.retrieved_model_states
        self.weight_names = state_names([(p, states[p].value) for p in self._weight_paths])
        self.hidden_names = [show_path(leaf.path) for leaf in self.program.leaves]
        self.other_names = state_names(
            [(p or ("outside",), s.value) for p, s in self._other_states]
        )
        persistent = _persistent_paths(net)
        self.resets = [
            _resets(p, s, persistent)
            for p, s in self._other_states
            for _ in jax.tree.leaves(s.value)
        ]
        self.initial = self._initial()
        for leaf, start in zip(self.program.leaves, self.initial[0], strict=True):
            if leaf.invar.aval.shape != start.shape:
                raise InputError(
                    f"The hidden state `{show_path(leaf.path)}` has shape {leaf.invar.aval.shape} "
                    f"in a step on this input, and {start.shape} for a batch of {self.batch}: the "
                    "input's first axis is not read as the batch. Give it a batch axis, (batch, …)"
                )
        self.ranges: list[InputRange] = []
        if isinstance(net, BridgedModule):
            self._traced = net.traced_step(*self._examples)
            self._settings = Settings(net.model)
            self.ranges = self._traced.ranges
        self.programs: dict[Any, Callable] = {}
        self._mode = contextlib.nullcontext

    # -- names and lists --------------------------------------------------------------------------

    def by_weight_name(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Arrays that are one per weight, by the weights' names."""
        return dict(zip(self.weight_names, arrays, strict=True))

    def gradient_trees(self, grads: Mapping[str, Any]) -> dict[str, Any]:
        """Gradients by weight name as values of the module's States: by the report's names, in the
        inverse of a weight's unit.
        """
        states, found, arrays = self._states(), {}, iter(grads[name] for name in self.weight_names)

        def one(value: Any) -> Any:
            array = jax.numpy.asarray(next(arrays))
            return array / value.unit if isinstance(value, brainunit.Quantity) else array

        for path in self._weight_paths:
            is_leaf = lambda x: isinstance(x, brainunit.Quantity)
            found[show_path(path)] = jax.tree.map(one, states[path].value, is_leaf=is_leaf)
        return found

    def by_state_name(self, hidden: Sequence[Any], other: Sequence[Any]) -> dict[str, Any]:
        """Hidden states and other arrays, by name."""
        return dict(zip([*self.hidden_names, *self.other_names], [*hidden, *other], strict=True))

    def join_other(self, of_sequence: Sequence[Any], of_model: Sequence[Any]) -> list[Any]:
        """Other arrays, taken from one list where they belong to a sequence and from another where
        they belong to the model.

        What belongs to the model (running statistics, random keys) outlives a sequence.
        """
        return [s if r else m for s, m, r in zip(of_sequence, of_model, self.resets, strict=True)]

    # -- what it is -------------------------------------------------------------------------------

    @cached_property
    def is_trainable(self) -> bool:
        """Whether a gradient can reach any parameter."""
        return len(self.unreached) < len(self.program.graph.certificate())

    @cached_property
    def unreached(self) -> frozenset[str]:
        """Names of the parameters that no gradient can reach: torch gives them no `.grad`, and its
        optimizers leave them alone, weight decay and all.
        """
        certificates = self.program.graph.certificate().items()
        return frozenset(show_path(path) for path, c in certificates if c.kind == "unused")

    @cached_property
    def serves_any_batch(self) -> bool:
        """Whether what it makes of a batch element is the same in a batch of any size.

        Known for torch models; the model is traced for one element more. False if a step leaves
        something in the model, such as running means or a random key.
        """
        pairs = zip(self.resets, self.program.other_vars, strict=True)
        if (
            not isinstance(self.net, BridgedModule)
            or self._freezes
            or any(not resets and after is not before for resets, (before, after) in pairs)
            or not all(_has_equal_rows(x, self.batch) for x in jax.tree.leaves(self.initial))
        ):
            return False
        with self._mode(self.net):
            self.fit_states()
            own = extract_module_info(self.net, *map(jax.numpy.asarray, self._examples))
            more = [np.zeros((x.shape[0] + 1, *x.shape[1:]), x.dtype) for x in self._examples]
            self.net.init_state(batch_size=len(more[0]))
            self.net.ensure_state(*more)
            larger = extract_module_info(self.net, *map(jax.numpy.asarray, more))
        self.fit_states()
        return is_same_for_any_batch(own, larger)

    @property
    def is_evaluation(self) -> bool:
        """Whether evaluation would run the same step: nothing in it depends on the mode."""
        if not isinstance(self.net, BridgedModule):
            return False
        inputs = [jax.numpy.asarray(a) for a in self._examples]
        # The step's own modes: `model.eval()` may have been called since it was compiled.
        with _in_modes(self.net, self._training):
            self.fit_states()
            now = str(self.net.traced_step(*inputs).jaxpr)
        with evaluation_mode(self.net):
            self.fit_states()
            then = str(self.net.traced_step(*inputs).jaxpr)
        self.fit_states()
        return now == then

    @property
    def settings_hold(self) -> bool:
        """Whether the torch model's settings are those that this step was traced with."""
        return not isinstance(self.net, BridgedModule) or self._settings.hold()

    def check_settings(self, evaluates: bool = False) -> None:
        """Raises if the torch model's settings have changed such that its step is another.

        Args:
            evaluates: modes of the modules do not count: the step runs in its own.
        """
        if self.settings_hold:
            return
        with _in_modes(self.net, self._training if evaluates else _modes_of(self.net)):
            changes = self._settings.differences()
            if not changes:
                return
            self.fit_states()
            again = self.net.traced_step(*self._examples)
            now = Settings(self.net.model)
        if str(again.jaxpr) != str(self._traced.jaxpr):
            raise StateError(
                f"The model has changed since the learner compiled its step: {'; '.join(changes)}; "
                "with that the step is another. Set it back, or make a new learner; call "
                "`learner.sync_to_torch()` before, and the new one goes on with these weights."
            )
        self._settings = now

    def tuned_for(self, platform: str) -> CompiledStep:
        """The same step, laid out for another kind of device."""
        made = copy.copy(self)
        made.platform, made.programs = platform, {}
        made.program = replace(self.program, tuning=tuning_for(platform))
        return made

    def in_evaluation(self) -> CompiledStep:
        """The same step, compiled for evaluation."""
        with evaluation_mode(self.net):
            made = CompiledStep(
                self.net, [*self._examples, *self._keep], self.platform, self._freezes
            )
        made._mode = evaluation_mode
        self.fit_states()
        return made

    # -- the model's States -----------------------------------------------------------------------

    def fit_states(self) -> None:
        """Makes the model's states fit this step's inputs, if they do not."""
        if isinstance(self.net, BridgedModule):
            self._fit_bridged()
            return
        states = self._states()
        hidden, other = self.initial
        for leaf, start in zip(self.program.leaves, hidden, strict=True):
            if _array_of(states[leaf.path]).shape != start.shape:
                _set_array(states[leaf.path], jax.numpy.asarray(start))
        starts = iter(other)
        for path, state in self._other_states:
            state = states.get(path, state)
            leaves, tree = jax.tree.flatten(state.value)
            fresh = [next(starts) for _ in leaves]
            if [np.shape(x) for x in leaves] != [x.shape for x in fresh]:
                state.value = tree.unflatten(map(jax.numpy.asarray, fresh))

    def _fit_bridged(self) -> None:
        net: Any = self.net
        with contextlib.suppress(StateError):
            if any(h.ndim and h.shape[0] != self.batch for h in net.hidden_values()[:1]):
                net.init_state(batch_size=self.batch)
        try:
            net.ensure_state(*self._examples)
        except InputError:  # made for inputs of another shape
            net.init_state(batch_size=self.batch)
            net.ensure_state(*self._examples)

    def _graph(self) -> ETraceGraph:
        net, persistent = self.net, _persistent_paths(self.net)
        if self._freezes:
            net = FrozenStep(net, self.batch, lambda path, state: _belongs(path, state, persistent))
        return compile_etrace_graph(
            net,
            *map(jax.numpy.asarray, [*self._examples, *self._keep]),
            include_hidden_perturb=False,
        )

    def _graph_of_plain(self) -> ETraceGraph:
        """The graph of a brainstate module: its states as they are if a step runs on them,
        otherwise made for this batch.

        A state keeps its rank: whether a state without a batch axis should get one is for the user
        to say.
        """
        x, before = self._examples[0], _hidden_values(self.net)
        # features of one element, not a batch of numbers
        if x.ndim == 1 and jax.numpy.issubdtype(x.dtype, jax.numpy.inexact):
            self.batch = None
        failure: Exception | None = None
        if before:
            try:
                graph = self._graph()
            except Exception as error:
                # a batch that does not fit fails somewhere in the model's own code
                failure = error
            else:
                if any(v.shape[:1] != x.shape[:1] for v in jax.tree.leaves(before)):
                    self.batch = None
                return graph
            self._write_hidden(before)
        brainstate.nn.init_all_states(
            self.net, **({} if self.batch is None else {"batch_size": self.batch})
        )
        after = _hidden_values(self.net)
        if any(
            jax.tree.map(np.ndim, after[path]) != jax.tree.map(np.ndim, value)
            for path, value in before.items()
        ):
            self._write_hidden(before)
            shapes = ", ".join(str(np.shape(v)) for v in jax.tree.leaves(list(before.values())))
            raise InputError(
                f"The hidden states have shapes {shapes}, and a step on inputs "
                f"{[x.shape for x in self._examples]} does not run on them ({failure}). Make "
                "states for this batch with `brainstate.nn.init_all_states(net, "
                f"batch_size={self.batch})`, or change the input."
            ) from failure
        return self._graph()

    def _write_hidden(self, values: dict[Path, Any]) -> None:
        for path, state in self.net.states(brainstate.HiddenState).items():
            if path in values:
                state.value = values[path]

    def read(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Weights, hidden states and other arrays as the States have them."""
        states = self._states()
        return (
            [x for p in self._weight_paths for x in jax.tree.leaves(states[p].value)],
            [_array_of(states[leaf.path]) for leaf in self.program.leaves],
            [x for p, s in self._other_states for x in jax.tree.leaves(states.get(p, s).value)],
        )

    def write(self, theta: Sequence[Any], hidden: Sequence[Any], other: Sequence[Any]) -> None:
        """Puts weights, hidden states and other arrays into the States."""
        self.fit_states()
        states = self._states()
        for path, leaf in zip((leaf.path for leaf in self.program.leaves), hidden, strict=True):
            _set_array(states[path], leaf)
        targets = [states[p] for p in self._weight_paths] + [
            states.get(p, s) for p, s in self._other_states
        ]
        at, arrays = 0, [*theta, *other]
        for state in targets:
            tree = jax.tree.structure(state.value)
            state.value = jax.tree.unflatten(tree, arrays[at : at + tree.num_leaves])
            at += tree.num_leaves

    def _states(self) -> dict[Path, Any]:
        return dict(self.net.states().items())

    def _initial(self) -> tuple[list[Any], list[Any]]:
        current = self.read()
        if isinstance(self.net, BridgedModule):
            self.net.reset_state()
            _, hidden, other = self.read()
            self.write(*current)
        else:
            _, hidden, other = current
        return [np.array(h) for h in hidden], [
            private_copy(o) if _is_key(o) else np.array(o) for o in other
        ]


def compile_or_explain(
    net: brainstate.nn.Module, args: Sequence[Any], platform: str | None, freezes: bool
) -> CompiledStep:
    """A model's step for inputs like these; an error says what a learner's methods take."""
    try:
        return CompiledStep(net, args, platform, freezes)
    except Exception as error:
        hint = (
            f"This was for one time step of {show_signature(signature(args))}. `step` takes one "
            "time step, (batch, …); a sequence, (T, batch, …), goes to `gradients`, `update` or "
            "`predict`."
        )
        if isinstance(error, BridgeError):
            error.add_note(hint)
            raise
        raise InputError(f"The model cannot run on this input: {error}. {hint}") from error


@contextlib.contextmanager
def evaluation_mode(net: brainstate.nn.Module) -> Iterator[None]:
    """Within this, models are traced as for evaluation: dropout off, running statistics used."""
    modes = dict.fromkeys(_modes_of(net), False)
    with _in_modes(net, modes), brainstate.environ.context(fit=False):
        yield


def _modes_of(net: brainstate.nn.Module) -> dict[torch.nn.Module, bool]:
    """Which modules of a torch model are in training mode."""
    modules = net.model.modules() if isinstance(net, BridgedModule) else ()
    return {m: m.training for m in modules}


@contextlib.contextmanager
def _in_modes(net: brainstate.nn.Module, modes: dict[torch.nn.Module, bool]) -> Iterator[None]:
    """Within this, a model's modules have these modes."""
    before = _modes_of(net)
    try:
        for m, training in modes.items():
            m.training = training
        yield
    finally:
        for m, training in before.items():
            m.training = training


def _has_equal_rows(x: Any, batch: int | None) -> bool:
    """Whether an array that has the batch first is the same for every element."""
    if _is_key(x) or np.shape(x)[:1] != (batch,):
        return True
    return bool((np.asarray(x) == np.asarray(x)[:1]).all())


def _array_of(state: brainstate.State) -> Any:
    """The array of a hidden state; that of a quantity is without its unit."""
    return jax.tree.leaves(state.value)[0]


def _set_array(state: brainstate.State, array: Any) -> None:
    """Puts an array into a hidden state, with the unit that it has."""
    state.value = jax.tree.unflatten(jax.tree.structure(state.value), [array])


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def _hidden_values(net: brainstate.nn.Module) -> dict[Path, Any]:
    return {path: state.value for path, state in net.states(brainstate.HiddenState).items()}


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


def _belongs(path: Path | None, state: brainstate.State, persistent: set[Path] | None) -> bool:
    """Whether a State belongs to a sequence: a hidden state, or another one that starts anew with
    it.
    """
    if isinstance(state, brainstate.ParamState):
        return False
    return isinstance(state, brainstate.HiddenState) or _resets(path, state, persistent)


def state_names(values: Sequence[tuple[Path, Any]]) -> list[str]:
    """A name for every array in the values of States."""
    found = []
    for path, value in values:
        keys = [k for k, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
        hidden = len(keys) == 1 and isinstance(
            keys[0][-1] if keys[0] else None, jax.tree_util.FlattenedIndexKey
        )  # a quantity's number
        found += [show_path(path) + ("" if hidden else jax.tree_util.keystr(k)) for k in keys]
    return found
