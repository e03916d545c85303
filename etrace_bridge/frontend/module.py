"""A torch model as a brainstate module that runs one time step per call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import brainstate
import jax
import torch
from torch import nn

from etrace_bridge._errors import BridgeError, InputError, StateError
from etrace_bridge._jax_compat import is_concrete
from etrace_bridge._tables import html_table
from etrace_bridge.frontend import locate, messages
from etrace_bridge.frontend.borders import to_real_jax, to_torch
from etrace_bridge.frontend.core import Core, Session, WrapOptions
from etrace_bridge.frontend.held import (
    KEY_PATH,
    adopt_plan,
    insert_tensors,
    load_torch_state_dict,
    tensor_values,
    torch_state_dict,
)
from etrace_bridge.frontend.inputs import InputForm, missing_keywords, read_call, read_input
from etrace_bridge.frontend.left_over import find_left_over
from etrace_bridge.frontend.names import Path, to_name, to_path, versions_of
from etrace_bridge.frontend.steady import SteadyStep
from etrace_bridge.frontend.step import TracedStep, pack_output
from etrace_bridge.frontend.tree import copied, lookup


class BridgedModule(brainstate.nn.Module):
    """A torch model as a brainstate module: calling it runs one time step.

    Made by `wrap`. Its `ParamState`s are the torch parameters, under their torch names split at the
    dots; its `HiddenState`s are the recurrent tensors, under their module's path and their own
    name.

    Attributes:
        model: The torch model, never changed by this module (a learner's `sync_to_torch` copies
            weights back on request). Copies of this module share it.
        parameter_names: Names of the trained parameters, in `named_parameters()` order.
        batch_first: The model consumes sequences as `(batch, time, ...)`.
    """

    def __init__(self, model: nn.Module, options: WrapOptions) -> None:
        super().__init__()
        self._core = Core(model, options)
        self._session: Session | None = None
        self._pending: int | None | _NotInitialised = _NOT_INITIALISED
        self._made: tuple[Path, ...] = ()
        self._tree: dict[str, Any] = {}
        insert_tensors(self._core, self._tree)

    # ---- names

    @property
    def model(self) -> nn.Module:
        """The torch model."""
        return self._core.model

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Names of the trained parameters, in `named_parameters()` order; a tied parameter has its
        first name.
        """
        return tuple(named.name for named in self._core.tensors if named.trained)

    @property
    def tied_names(self) -> dict[str, tuple[str, ...]]:
        """All names of each parameter that has more than one, by its first name."""
        return {
            named.name: named.names
            for named in self._core.tensors
            if named.parameter and len(named.names) > 1
        }

    @property
    def batch_first(self) -> bool:
        """Whether sequences for this model are `(batch, time, ...)` rather than `(time, batch,
        ...)`.
        """
        if self._session is not None:
            return self._session.plan.layout == "batch_first"
        return self._core.tell_batch_first()

    @property
    def reduction(self) -> str | None:
        """How the model's `forward` reduces its output over time: `"last"`, `"sum"`, `"mean"`, or
        None if it gives every step.

        `net(x)` gives each step's own output: what `forward` would return if the sequence ended
        here (`"last"`), or what it adds up (`"sum"`, `"mean"`). The loss of such a model belongs to
        the last step, or to the sum or mean of all outputs.
        """
        plan = self._ready().plan
        if plan.layout is None or all(axis is not None for axis in plan.output_time_axes):
            return None
        kinds = (
            {"last"}
            if plan.loop is None
            else {kind for kind in plan.loop.reductions if kind is not None}
        )
        return kinds.pop() if len(kinds) == 1 else "last"

    @property
    def takes_sequences(self) -> bool:
        """Whether the model's own `forward` consumes sequences rather than one time step."""
        return self._ready().plan.layout is not None

    @property
    def hidden_paths(self) -> tuple[Path, ...]:
        """Paths of the hidden states, in the order of the step."""
        return tuple(leaf.path for leaf in self._ready().plan.leaves if leaf.hidden)

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of an input's tensors, in order, such as `x` and `batch['gate']`; empty if all of
        them are positional.
        """
        return self._core.form.names

    def hidden_tensors(self, values: Sequence[Any]) -> dict[str, torch.Tensor]:
        """Return the states of a step by name as torch tensors, complex where the model's are, from
        values in the step's order.
        """
        leaves = self._ready().plan.leaves
        return {
            to_name(leaf.path): to_torch(v, leaf.initial)
            for leaf, v in zip(leaves, values, strict=True)
        }

    @property
    def start_parameters(self) -> tuple[str, ...]:
        """Parameters that only make the initial state: they get no gradient, because that state is
        a constant here.
        """
        return self._ready().plan.start_parameters

    def __repr__(self) -> str:
        kind, trained = type(self.model).__name__, len(self.parameter_names)
        if self._session is None:
            return f"BridgedModule({kind}: {trained} trained parameters; no states yet)"
        shapes = (
            f"{to_name(leaf.path)} {tuple(leaf.initial.shape)}"
            for leaf in self._session.plan.leaves
            if leaf.hidden
        )
        return f"BridgedModule({kind}: {trained} trained parameters; states: {', '.join(shapes) or 'none'})"

    def _repr_html_(self) -> str:
        sizes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        rows = [("parameter", name, str(sizes[name])) for name in self.parameter_names]
        leaves = [] if self._session is None else self._session.plan.leaves
        rows += [
            (
                "state" if leaf.hidden else "carried",
                to_name(leaf.path),
                str(tuple(leaf.initial.shape)),
            )
            for leaf in leaves
        ]
        title = f"BridgedModule of {type(self.model).__name__}"
        notes = [] if leaves else ["no states yet: `init_state(batch_size=...)` makes them"]
        return html_table(title, ("kind", "name", "shape"), rows, notes)

    # ---- states

    def init_state(self, batch_size: int | None = None, **_: Any) -> None:
        """Make the hidden states, or reset them.

        Args:
            batch_size: Size of the batch axis; None for inputs without one.

        If the shape of a state depends on the input and `wrap` was not given an `example_input`,
        the states are made at the first call.
        """
        inputs, guessed = self._core.inputs_for(batch_size)
        if self._session is not None and self._session.batch_size == batch_size:
            # What the states were made for; if `guessed`, another shape may follow
            inputs, self._core.form = self._session.inputs, self._session.form
        if inputs is None:
            self._session, self._pending = None, batch_size
            return
        try:
            self._start(inputs, batch_size, guessed)
        except (InputError, RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            if not guessed:
                raise
            # The guess was wrong: the first input will tell
            self._session, self._pending = None, batch_size

    def reset_state(self, batch_size: int | None = None, **_: Any) -> None:
        """Put the hidden states back to their initial values."""
        self.init_state(
            self._session.batch_size
            if batch_size is None and self._session is not None
            else batch_size
        )

    def _start(self, inputs: tuple, batch_size: int | None, guessed: bool) -> None:
        """Make the states for inputs of this shape, or reset existing ones."""
        old = self._session
        same = (
            old is not None
            and old.batch_size == batch_size
            and _same_shapes(old.inputs, inputs)
            and old.settings.hold()
            and old.form == self._core.form
        )
        session = (
            old if same and old is not None else self._plan_states(inputs, batch_size, guessed)
        )
        session.guessed = guessed
        for leaf in session.plan.leaves:
            # Statistics in buffers outlive a sequence
            if leaf.hidden or leaf.path not in self._core.tensor_paths:
                lookup(self._tree, leaf.path).value = to_real_jax(leaf.initial)

    def _start_from(self, values: tuple, batch_size: int | None) -> Session:
        """Make the states for a user's input; if the torch model does not accept the input, say so."""
        examples = self._core.example_like(values)
        try:
            self._start(examples, batch_size, guessed=False)
        except BridgeError:
            raise
        except Exception as error:
            if not locate.raised_inside(self.model, error):
                raise messages.bridge_failed(type(self.model).__name__, error) from error
            raise messages.model_fails(
                type(self.model).__name__, [tuple(x.shape) for x in examples], error
            ) from error
        return self._ready()

    def _plan_states(self, inputs: tuple, batch_size: int | None, guessed: bool) -> Session:
        """Find the plan of a step and fit the tree of states to it; states that fit keep their
        values.
        """
        core = self._core
        # The states belong to the module, also if they are made during a trace
        with jax.ensure_compile_time_eval():
            plan = core.find_plan(inputs, batch_size)
            session = Session(batch_size, plan, inputs, guessed, core.settings(plan), core.form)
            if not guessed:
                core.check_layout(session.plan)
            core.drop_unread_states(session)
            adopt_plan(core, self._tree, session.plan, self._made)
        if session.plan.start_parameters:
            warnings.warn(messages.start_parameters(session.plan.start_parameters), stacklevel=4)
        if left := find_left_over(session.plan):
            warnings.warn(messages.left_over(type(self.model).__name__, left), stacklevel=4)
        self._session, self._pending = session, _NOT_INITIALISED
        self._made = tuple(leaf.path for leaf in session.plan.leaves)
        return session

    def _ready(self) -> Session:
        if self._session is None:
            raise StateError(
                "The hidden states of this module do not exist yet. Call "
                "`net.init_state(batch_size=...)` before the first step"
                + (
                    ", and run `net(x)` once, since their shape depends on the input."
                    if self._pending is not _NOT_INITIALISED
                    else "."
                )
            )
        return self._session

    # ---- a step

    def read_inputs(self, x: Any, sequence: bool = False) -> tuple:
        """Return the tensors of an input that is one value as a flat list.

        The order is that of positional arguments, then keyword arguments, a dict's in the order of
        its sorted keys.

        Args:
            x: A tensor or array; a tuple of arguments; a dict by argument names, or one that is
                the only argument. The model's inputs keep this form from now on.
            sequence: The tensors have a time and a batch axis.
        """
        tensors = self.expect(*read_input(self.model.forward, x))
        if sequence and self._session is None and self._core.step_of_sequences is None:
            self._core.learn_sequences(tensors)
        return tensors

    def _read(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
        """Return the tensors of a call as a flat list of JAX arrays."""
        tensors = self.expect(*read_call(self.model.forward, args, kwargs))
        return tuple(self._core.as_input(x) for x in tensors)

    def expect(self, tensors: tuple, form: InputForm) -> tuple:
        """Take over the form of an input, or raise if the states were made for another form.

        The tensors of any form may also be passed as positional arguments, in order.
        """
        core = self._core
        if form.is_plain and core.form.takes(tensors):
            form = core.form
        if not core.form_is_fixed:
            for name in missing_keywords(self.model.forward, form):
                raise messages.needs_keyword(type(self.model).__name__, name)
            core.form = form
        elif form != core.form:
            raise messages.other_form(str(form), str(core.form))
        return tensors

    def update(self, *inputs: Any, **keywords: Any) -> Any:
        """Run one time step.

        Args:
            *inputs: One time step of each input, `(batch, ...)`, as torch tensors, NumPy or JAX
                arrays, or as dicts, tuples and lists of them, as the model's `forward` takes them.
            **keywords: Inputs that `forward` takes by keyword.

        Returns:
            The model's output for this step, as JAX arrays in the structure torch returns, state
            and time axis taken away. Anything but tensors is None: a step is traced once, so a
            number would be that of the first step.
        """
        values = self._read(inputs, keywords)
        session = self._session_for(values)
        step = self._core.traced_step(session, values)
        states = [lookup(self._tree, leaf.path) for leaf in session.plan.leaves]
        key = lookup(self._tree, KEY_PATH) if step.uses_key else None
        outputs, new_states, new_key = step(
            tensor_values(self._core, self._tree, step),
            [s.value for s in states],
            None if key is None else key.value,
            values,
        )
        for state, value in zip(states, new_states, strict=True):
            state.value = value
        if key is not None:
            key.value = new_key
        return pack_output(step, outputs)

    def traced_step(self, *inputs: Any) -> TracedStep:
        """Return the step as a closed jaxpr for inputs of this shape, traced at most once per shape
        and mode.
        """
        return self._core.traced_step(self._ready(), inputs)

    def functional_step(self, *inputs: Any) -> tuple[tuple[str, ...], Callable]:
        """Return the step as a pure function, for code that handles values itself.

        Args:
            *inputs: One time step of each input tensor, for shapes and dtypes.

        Returns:
            The state names, and `step(parameters, states, *inputs) -> (output arrays, new states)`,
            where `parameters` is `{torch name: array}` (missing ones are taken from this module)
            and `states` a list in the order of the names. Complex parameters and states are real
            arrays with a last axis of real and imaginary part.
        """
        step, session = self.traced_step(*inputs), self._ready()

        def run(
            parameters: Mapping[str, Any], states: Sequence[Any], *xs: Any
        ) -> tuple[list[Any], list[Any]]:
            key = lookup(self._tree, KEY_PATH).value if step.uses_key else None
            return step(tensor_values(self._core, self._tree, step, parameters), states, key, xs)[
                :2
            ]

        return tuple(".".join(leaf.path) for leaf in session.plan.leaves), run

    def steady_step(self, *inputs: Any, **keywords: Any) -> SteadyStep:
        """Return the compiled step with its values in plain lists: the fast way to run a stream
        without learning.

        `brainstate.transform.jit(net)` reads and writes every state at each call, which takes
        longer than a small model's step. This starts from the module's current weights and states;
        `write_back()` puts the states into the module. The arguments are one time step of each
        input, as for a call, for shapes and dtypes; the result takes their tensors in order.
        """
        values = self._read(inputs, keywords)
        session = self._session_for(values)
        step = self._core.traced_step(session, values)

        def write(states: Sequence[Any], keys: Sequence[Any]) -> None:
            for leaf, value in zip(session.plan.leaves, states, strict=True):
                lookup(self._tree, leaf.path).value = value
            if keys:
                lookup(self._tree, KEY_PATH).value = keys[0]

        key = lookup(self._tree, KEY_PATH).value if step.uses_key else None
        return SteadyStep(
            step, tensor_values(self._core, self._tree, step), self.hidden_values(), key, write
        )

    def parameter_values(self) -> dict[str, jax.Array]:
        """Return the trained parameters by torch name."""
        return {name: lookup(self._tree, to_path(name)).value for name in self.parameter_names}

    def hidden_values(self) -> list[jax.Array]:
        """Return the values of all states of the step, in its order."""
        return [lookup(self._tree, leaf.path).value for leaf in self._ready().plan.leaves]

    def _session_for(self, values: tuple) -> Session:
        """Return the session, making it now if the states wait for an input; check that the input
        fits.
        """
        if self._session is None and not isinstance(self._pending, _NotInitialised):
            self._start_from(values, self._pending)
        session = self._ready()
        # `model.train()`, `.eval()` or another number since: the step may be another
        if not session.settings.hold():
            session = self._plan_states(session.inputs, session.batch_size, session.guessed)
        known = len(values) == len(session.inputs) and session.form == self._core.form
        if known and all(
            v.shape == tuple(x.shape) for v, x in zip(values, session.inputs, strict=True)
        ):
            if session.plan.loop is not None and _other_dtypes(session.inputs, values):
                examples = self._core.example_like(values)
                session = self._plan_states(examples, session.batch_size, guessed=False)
            self._core.check_layout(session.plan)
            self._core.form_is_fixed = True
            return session
        fits = session.batch_size is None or all(
            v.ndim > 0 and v.shape[0] == session.batch_size for v in values
        )
        if session.guessed and fits and all(is_concrete(v) for v in values):
            session = self._start_from(values, session.batch_size)
            self._core.form_is_fixed = True
            return session
        raise messages.wrong_input(
            [tuple(v.shape) for v in values],
            [tuple(x.shape) for x in session.inputs],
            session.batch_size,
        )

    def ensure_state(self, *inputs: Any, **keywords: Any) -> None:
        """Make the hidden states for inputs of this shape, unless they exist already.

        Args:
            *inputs: One time step of each input, `(batch, ...)`, as for a call.
            **keywords: Inputs by keyword.
        """
        values = self._read(inputs, keywords)
        if self._session is None and self._pending is _NOT_INITIALISED:
            self.init_state(batch_size=values[0].shape[0])
        self._session_for(values)

    @contextlib.contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore the module's States and their values if this context raises."""
        values = [(state, state.value) for state in self.states().values()]
        before = self._session, self._pending, self._made, copied(self._tree)
        try:
            yield
        except BaseException:
            self._session, self._pending, self._made, self._tree = before
            for state, value in values:
                state.value = value
            raise

    # ---- torch state dicts

    @property
    def versions_read(self) -> dict[str, int]:
        """torch's count of writes into each parameter and buffer when this module last read their
        values.
        """
        return self._core.versions_read

    def note_versions(self) -> None:
        """Record the current versions of the torch model's tensors as known, because this module
        wrote them.
        """
        self._core.versions_read = versions_of(self._core.tensors)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the current parameters and buffers as copies, under all their torch names, as the
        torch model's `state_dict` does.
        """
        return torch_state_dict(self._core, self._tree)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Take parameters and buffers from a torch state dict; `model` itself is not changed.

        Args:
            state_dict: `{torch name: tensor}`.
            strict: Raise if names are missing or unexpected.
        """
        load_torch_state_dict(self._core, self._tree, state_dict, strict)

    # ---- copies

    def __copy__(self) -> BridgedModule:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "A wrapped module holds traced programs, so it cannot be pickled. Pickle the torch model "
            "(`net.model`) and wrap it again; `torch.save(net.state_dict(), path)` stores the "
            "weights that this module holds."
        )


class _NotInitialised:
    """Marks a module whose `init_state` was not called."""


_NOT_INITIALISED = _NotInitialised()


# ---- brainstate's graph


def _same_shapes(a: tuple, b: tuple) -> bool:
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype for x, y in zip(a, b, strict=True)
    )


def _other_dtypes(examples: tuple, values: tuple) -> bool:
    """Return whether inputs have other dtypes than those for which the step of a loop was found."""
    return any(
        str(x.dtype).removeprefix("torch.") != str(v.dtype)
        for x, v in zip(examples, values, strict=True)
    )


def _flatten(net: BridgedModule) -> tuple[list[tuple[str, Any]], tuple]:
    return sorted(net._tree.items()), (type(net), net._core, net._session, net._pending, net._made)


def _set_key(net: BridgedModule, key: Any, value: Any) -> None:
    old = net._tree.get(key)
    if isinstance(old, brainstate.State) and isinstance(value, brainstate.TreefyState):
        old.update_from_ref(value)
    else:
        net._tree[key] = value


def _create_empty(metadata: tuple) -> BridgedModule:
    kind, core, session, pending, made = metadata
    net = object.__new__(kind)
    brainstate.nn.Module.__init__(net)
    net._core, net._session, net._pending, net._made, net._tree = core, session, pending, made, {}
    return net


brainstate.graph.register_graph_node_type(
    BridgedModule,
    flatten=_flatten,
    set_key=_set_key,
    pop_key=lambda net, key: net._tree.pop(str(key)),
    create_empty=_create_empty,
    clear=lambda net: net._tree.clear(),
)
