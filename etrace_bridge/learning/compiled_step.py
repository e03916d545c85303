"""A model's step compiled for inputs of one shape; converts between States, names and lists."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import brainstate
import brainunit
import jax
import numpy as np

from etrace_bridge._errors import BridgeError, InputError, StateError
from etrace_bridge.compiler.diagnostics import Path, show_path
from etrace_bridge.compiler.extraction import extract_module_info
from etrace_bridge.compiler.module_info import ModuleInfo
from etrace_bridge.compiler.positions import weights_behind
from etrace_bridge.frontend import BridgedModule, InputRange, Settings
from etrace_bridge.learning.inputs import show_signature, signature
from etrace_bridge.learning.modes import evaluation_mode, in_modes, modes_of
from etrace_bridge.learning.module_states import (
    array_of,
    has_equal_rows,
    is_key,
    persistent_paths,
    resets,
    set_array,
    state_names,
)
from etrace_bridge.learning.placement import private_copy
from etrace_bridge.learning.step_graph import fit_bridged_states, make_graph
from etrace_bridge.lowering import announcing, tuning_for
from etrace_bridge.step.batch_rows import is_same_for_any_batch
from etrace_bridge.step.program import make_program


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
        self._training = modes_of(net)
        self.batch = args[0].shape[0] if args[0].ndim else None
        self._examples = [np.zeros(a.shape, a.dtype) for a in (args[:-1] if freezes else args)]
        self._keep = [np.ones(a.shape, a.dtype) for a in (args[-1:] if freezes else ())]
        graph, self.batch = make_graph(net, self._examples, self._keep, self.batch)
        self.program = make_program(graph, platform)
        self._read_states(graph.module_info)
        self.initial = self._initial()
        self._check_batch_axes()
        self.ranges: list[InputRange] = []
        if isinstance(net, BridgedModule):
            self._traced = net.traced_step(*self._examples)
            self._settings = Settings(net.model)
            self.ranges = self._traced.ranges
        self.programs: dict[Hashable, Callable[..., Any]] = {}
        self._unreached: dict[frozenset[int] | None, frozenset[str]] = {}
        self._mode = contextlib.nullcontext

    def _read_states(self, info: ModuleInfo) -> None:
        """Sort the model's States into weights, hidden states and others, and name their arrays."""
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
        persistent = persistent_paths(self.net)
        self.resets = [
            resets(p, s, persistent)
            for p, s in self._other_states
            for _ in jax.tree.leaves(s.value)
        ]

    def _check_batch_axes(self) -> None:
        """Raise if a step on these inputs gives a hidden state another shape."""
        for leaf, start in zip(self.program.leaves, self.initial[0], strict=True):
            if leaf.invar.aval.shape != start.shape:
                raise InputError(
                    f"The hidden state `{show_path(leaf.path)}` has shape {leaf.invar.aval.shape} "
                    f"in a step on this input, and {start.shape} for a batch of {self.batch}: the "
                    "input's first axis is not read as the batch. Give it a batch axis, (batch, …)."
                )

    # -- names and lists --------------------------------------------------------------------------

    def by_weight_name(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Return arrays that are one per weight, by the weights' names."""
        return dict(zip(self.weight_names, arrays, strict=True))

    def gradient_trees(self, grads: Mapping[str, Any]) -> dict[str, Any]:
        """Return gradients by weight name as values of the module's States.

        The names are those of the report, the units the inverse of the weights' units.
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
        """Return hidden states and other arrays, by name."""
        return dict(zip([*self.hidden_names, *self.other_names], [*hidden, *other], strict=True))

    def join_other(self, of_sequence: Sequence[Any], of_model: Sequence[Any]) -> list[Any]:
        """Join the arrays of `of_sequence` that belong to a sequence and the others of `of_model`.

        What belongs to the model (running statistics, random keys) outlives a sequence.
        """
        return [s if r else m for s, m, r in zip(of_sequence, of_model, self.resets, strict=True)]

    # -- what it is -------------------------------------------------------------------------------

    def unreached_by(self, loss: Any) -> frozenset[str]:
        """Names of the parameters that a loss's gradient cannot reach, whatever the data.

        torch gives them no `.grad`, and its optimizers leave them alone, weight decay and all.
        """
        reads = loss.reads
        if reads not in self._unreached:
            info = self.program.graph.module_info
            behind = weights_behind(info, range(info.num_var_out) if reads is None else reads)
            self._unreached[reads] = self.parameter_names - set(map(show_path, behind))
        return self._unreached[reads]

    @property
    def parameter_names(self) -> frozenset[str]:
        """Names of the parameters, as in the report."""
        return frozenset(map(show_path, self._weight_paths))

    @cached_property
    def serves_any_batch(self) -> bool:
        """Whether a batch element gets the same results in a batch of any size.

        Known for torch models, which are traced for one element more. False if a step changes the
        model itself, such as running means or a random key.
        """
        pairs = zip(self.resets, self.program.other_vars, strict=True)
        if (
            not isinstance(self.net, BridgedModule)
            or self._freezes
            or any(not resets and after is not before for resets, (before, after) in pairs)
            or not all(has_equal_rows(x, self.batch) for x in jax.tree.leaves(self.initial))
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
        """Whether evaluation would run the same step, because nothing in it depends on the mode."""
        if not isinstance(self.net, BridgedModule):
            return False
        inputs = [jax.numpy.asarray(a) for a in self._examples]
        # The step's own modes: `model.eval()` may have been called since it was compiled.
        with in_modes(self.net, self._training):
            self.fit_states()
            now = str(self.net.traced_step(*inputs).jaxpr)
        with evaluation_mode(self.net):
            self.fit_states()
            then = str(self.net.traced_step(*inputs).jaxpr)
        self.fit_states()
        return now == then

    @property
    def settings_hold(self) -> bool:
        """Return whether the torch model's settings are those that this step was traced with."""
        return not isinstance(self.net, BridgedModule) or self._settings.hold()

    def check_settings(self, evaluates: bool = False) -> None:
        """Raise if the torch model's settings have changed since the step was traced.

        Args:
            evaluates: modes of the modules do not count: the step runs in its own.
        """
        if self.settings_hold:
            return
        with in_modes(self.net, self._training if evaluates else modes_of(self.net)):
            changes = self._settings.differences()
            if not changes:
                return
            self.fit_states()
            again = self.net.traced_step(*self._examples)
            now = Settings(self.net.model)
        if str(again.jaxpr) != str(self._traced.jaxpr):
            raise StateError(
                f"The model has changed since the learner compiled its step: {'; '.join(changes)}; "
                "its step is now a different one. Undo the change, or call "
                "`learner.sync_to_torch()` and make a new learner, which continues with these "
                "weights."
            )
        self._settings = now

    def tuned_for(self, platform: str) -> CompiledStep:
        """Return the same step, laid out for another kind of device."""
        made = copy.copy(self)
        made.platform, made.programs = platform, {}
        made.program = replace(self.program, tuning=tuning_for(platform))
        return made

    def in_evaluation(self) -> CompiledStep:
        """Compile the same step for evaluation."""
        with evaluation_mode(self.net):
            made = CompiledStep(
                self.net, [*self._examples, *self._keep], self.platform, self._freezes
            )
        made._mode = evaluation_mode
        self.fit_states()
        return made

    # -- the model's States -----------------------------------------------------------------------

    def fit_states(self) -> None:
        """Make the model's states fit this step's inputs, if they do not."""
        if isinstance(self.net, BridgedModule):
            fit_bridged_states(self.net, self._examples, self.batch)
            return
        states, (hidden, other) = self._states(), self.initial
        for leaf, start in zip(self.program.leaves, hidden, strict=True):
            if array_of(states[leaf.path]).shape != start.shape:
                set_array(states[leaf.path], jax.numpy.asarray(start))
        starts = iter(other)
        for state in self._other(states):
            leaves, tree = jax.tree.flatten(state.value)
            fresh = [next(starts) for _ in leaves]
            if [np.shape(x) for x in leaves] != [x.shape for x in fresh]:
                state.value = tree.unflatten(map(jax.numpy.asarray, fresh))

    def read(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Return weights, hidden states and other arrays from the States."""
        states = self._states()
        return (
            [x for p in self._weight_paths for x in jax.tree.leaves(states[p].value)],
            [array_of(states[leaf.path]) for leaf in self.program.leaves],
            [x for state in self._other(states) for x in jax.tree.leaves(state.value)],
        )

    def write(self, theta: Sequence[Any], hidden: Sequence[Any], other: Sequence[Any]) -> None:
        """Put weights, hidden states and other arrays into the States."""
        self.fit_states()
        states = self._states()
        for path, leaf in zip((leaf.path for leaf in self.program.leaves), hidden, strict=True):
            set_array(states[path], leaf)
        targets = [*(states[p] for p in self._weight_paths), *self._other(states)]
        at, arrays = 0, [*theta, *other]
        for state in targets:
            tree = jax.tree.structure(state.value)
            state.value = jax.tree.unflatten(tree, arrays[at : at + tree.num_leaves])
            at += tree.num_leaves

    def _states(self) -> dict[Path, Any]:
        return dict(self.net.states().items())

    def _other(self, states: Mapping[Path, Any]) -> list[Any]:
        """Return the model's other States.

        A State without a path is the object that the step was traced with.
        """
        return [s if p is None else states.get(p, s) for p, s in self._other_states]

    def _initial(self) -> tuple[list[Any], list[Any]]:
        current = self.read()
        if isinstance(self.net, BridgedModule):
            self.net.reset_state()
            _, hidden, other = self.read()
            self.write(*current)
        else:
            _, hidden, other = current
        return [np.array(h) for h in hidden], [
            private_copy(o) if is_key(o) else np.array(o) for o in other
        ]


def compile_or_explain(
    net: brainstate.nn.Module, args: Sequence[Any], platform: str | None, freezes: bool
) -> CompiledStep:
    """Compile a model's step; explain in the error what a learner's methods take."""
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
