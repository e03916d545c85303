"""`OnlineLearner`: train a model online."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

import brainstate
import jax
import torch

from etrace_bridge._bytes import parse_bytes
from etrace_bridge._errors import InputError, StateError
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.frontend import BridgedModule
from etrace_bridge.learning.autosave import Checkpoints
from etrace_bridge.learning.bridging import as_brainstate
from etrace_bridge.learning.checkpoint import save_learner
from etrace_bridge.learning.checkpoint_restore import read_learner, restore_learner, rule_of
from etrace_bridge.learning.early_stopping import EarlyStopping
from etrace_bridge.learning.export import PLATFORMS, export_learner
from etrace_bridge.learning.fit import Callback, FitOptions, run_fit
from etrace_bridge.learning.history import History
from etrace_bridge.learning.inputs import read_inputs
from etrace_bridge.learning.masks import pack_like, unpack_sequences
from etrace_bridge.learning.metrics import Metrics, evaluate_with
from etrace_bridge.learning.options import Options
from etrace_bridge.learning.place_in_fit import PlaceInFit
from etrace_bridge.learning.placement import Placement
from etrace_bridge.learning.results import (
    GradientResult,
    SequenceResult,
    StepInfo,
    sequence_to_torch,
)
from etrace_bridge.learning.runtime import Runtime
from etrace_bridge.learning.torch_update import run_hooks
from etrace_bridge.lowering import keep_programs
from etrace_bridge.rules import Rule, make_rule


class OnlineLearner:
    """Trains a recurrent model online.

    Args:
        model: a torch module, a `BridgedModule`, or any brainstate module.
        rule: a rule's name or object, see `etrace_bridge.rules`.
        loss: torch or JAX callable `(output_t, target_t) -> scalar`.
        optimizer: an optax transformation or a `torch.optim` instance; None for learners that only
            compute gradients. SGD, Adam, AdamW, RMSprop and Adagrad run inside the compiled step, with
            their parameter groups, and follow torch's schedulers; any other torch optimizer runs in
            torch, through `.grad`.
        chunk: steps in a chunk, or `"auto"`.
        reduction: `"mean"` or `"sum"` over the steps of a sequence.
        budget: bytes that a chunk's buffers may take, or text such as `"500MB"`; None for as many
            as the trace takes.
        clip_norm: the largest norm of all gradients, as in `torch.nn.utils.clip_grad_norm_`.
        clip_value: the largest absolute value of a gradient's element.
        accumulate: number of gradients that are averaged for one update.
        schedule: an optax schedule that gives a factor of the learning rate by number of updates.
        guard: stop with `NonFiniteError` when a loss, weight or hidden state becomes NaN or
            infinite, and return to the last finite state.
        check_inputs: raise when inputs or targets have NaN or infinity.
        track_norm: store the norm of the last gradients in `gradient_norm`, and its mean in the
            records of `fit`.
        device: `"cpu"`, `"gpu"`, `"tpu"` or a `jax.Device`.
        mesh: a `jax.sharding.Mesh`, over which the batch is divided. If it spans processes
            (`distributed_mesh()`), each process passes its own part of the batch.
        partition: an axis of `mesh` that divides hidden units instead of the batch: traces, states
            and the weights that feed them.
        seed: seed of a torch model's random ops (default 0).
        loss_at: where the loss is if each sequence has one target, `(batch, …)`. `"last"`: at the
            last step, or the last that `mask` allows. `"every"`: at every step. `"model"`: on the
            output as the model's own `forward` reduces it over time (`net.reduction`). None: every
            step has its own target.
        freeze: where a mask of single sequences is zero, their states and traces do not change, as
            if the step had not happened; for rules whose trace advances with the states only.
        any_length: run sequences of any length through the program of one chunk, instead of
            compiling a program for each length; in `predict` and `evaluate`, and for sequences that
            begin anew (`carry=False`) in `gradients`, `update` and `fit`.
        seq_loss: a loss of all outputs in place of `loss`: `(outputs, target) -> scalar`, outputs
            `(T, batch, …)` as the model lays out sequences; for `gradients`, `update`, `evaluate`
            and `fit`.
        cache_dir: a folder in which compiled programs are stored for later processes; it is used
            for every JAX program of this process.

    Attributes:
        rule: the learning rule.
        history: what the last call of `fit` recorded; None before the first.
        place_in_fit: the position of the last call of `fit` in its batches.
        runtime: runs the programs and holds the state; not a stable interface.
    """

    def __init__(
        self,
        model: torch.nn.Module | brainstate.nn.Module,
        rule: str | Rule = "d_rtrl",
        loss: Callable[..., Any] | None = None,
        optimizer: Any = None,
        chunk: int | str = "auto",
        *,
        reduction: str = "mean",
        budget: int | float | str | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        schedule: Callable[[Any], Any] | None = None,
        guard: bool = True,
        check_inputs: bool = False,
        track_norm: bool = False,
        device: Any = None,
        mesh: Any = None,
        partition: str | None = None,
        seed: int | None = None,
        loss_at: str | None = None,
        freeze: bool = False,
        any_length: bool = False,
        seq_loss: Callable[..., Any] | None = None,
        cache_dir: str | PathLike | None = None,
    ) -> None:
        if loss is not None and seq_loss is not None:
            raise InputError(
                "`loss` and `seq_loss` were both given; a learner has one loss, either of each step "
                "or of the whole sequence. Leave one of them out."
            )
        if cache_dir is not None:
            keep_programs(cache_dir)
        net = as_brainstate(model, seed, "model")
        options = Options(
            chunk,
            reduction,
            None if budget is None else parse_bytes(budget),
            clip_norm,
            clip_value,
            accumulate,
            schedule,
            guard,
            check_inputs,
            track_norm,
            loss_at,
            freeze,
            any_length,
        )
        self.rule = make_rule(rule)
        self.history: History | None = None
        self.place_in_fit: PlaceInFit | None = None
        self.runtime = Runtime(
            net, self.rule, loss, optimizer, options, Placement(device, mesh, partition), seq_loss
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(
            "A learner holds compiled programs, so it cannot be copied or pickled. Use `save` and "
            "`OnlineLearner.load`."
        )

    def __repr__(self) -> str:
        store = self.runtime.store
        rule, optimizer = self.rule.name or type(self.rule).__name__, self.runtime.optimizer
        model = getattr(store.net, "model", store.net)
        updates = "no optimizer" if optimizer is None else f"{store.updates:,} updates"
        return f"OnlineLearner({type(model).__name__} by {rule}: {store.steps:,} steps, {updates})"

    def _repr_html_(self) -> str:
        graph = self.graph._repr_html_() if self.runtime.store.started else ""
        return f"<div><code>{escape(repr(self))}</code>{graph}</div>"

    # -- state ----------------------------------------------------------------------------

    @property
    def net(self) -> brainstate.nn.Module:
        """The brainstate module, with copies of the learner's weights and states in it.

        The learner takes over changes made there.
        """
        self.runtime.store.lend()
        return self.runtime.net

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph; available after the first input."""
        return self.runtime.store.compiled.program.graph

    @property
    def steps(self) -> int:
        """Number of time steps seen."""
        return self.runtime.store.steps

    @property
    def updates(self) -> int:
        """Number of updates requested."""
        return self.runtime.store.updates

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the last gradients, before clipping; None without `track_norm=True`."""
        return self.runtime.gradient_norm

    # -- learning ---------------------------------------------------------------------------------

    def step(self, x: Any, target: Any = None, mask: Any = None) -> StepInfo:
        """Run one time step: forward, trace, gradient, update.

        Args:
            x: the input, `(batch, …)`; a tuple of inputs; or a dict of inputs, by the names of
                `forward`'s arguments or as its only argument.
            target: the target; with None the step only advances states and trace.
            mask: (batch,) weights of the batch elements' losses.
        """
        runtime = self.runtime
        loss, output, discarded = runtime.steps.run(read_inputs(runtime.net, x), target, mask)
        return StepInfo(loss, output, runtime.watch.look, discarded, self._is_plain)

    def gradients(
        self, xs: Any, targets: Any, mask: Any = None, carry: bool = False
    ) -> GradientResult:
        """Compute gradients of a whole sequence, without an update.

        Args:
            xs: inputs `(T, batch, …)`, or `(batch, T, …)` for a `batch_first` module; a tuple or
                dict for several inputs, as for `step`.
            targets: targets, time where the inputs have it; with `loss_at`, one for each sequence,
                `(batch, …)`.
            mask: weights of the steps' losses, `(T,)`; or of each step of each sequence, `(T,
                batch)`, laid out as the inputs; the mean is then over all that counts. torch's
                packed sequences have their own mask.
            carry: start from the current states and trace, and continue with those after the
                sequence; otherwise the sequence starts from initial states, and the learner's
                states do not change. Running statistics and the random key advance either way, as
                in torch.
        """
        xs, targets, mask = self._unpacked(xs, targets, mask)
        grads, *rest, discarded, unreached = self.runtime.sequences.gradients(
            xs, targets, mask, carry
        )
        return GradientResult(
            grads, self._after_hooks, discarded, unreached, *rest, self.runtime.batch_first,
            self._is_plain,
        )  # fmt: skip

    def update(
        self, xs: Any, targets: Any, mask: Any = None, carry: bool = False, every: str = "sequence"
    ) -> SequenceResult:
        """Compute gradients of a sequence and update the weights.

        Args:
            xs: inputs, as for `gradients`.
            targets: targets, as for `gradients`.
            mask: weights of the steps' losses, as for `gradients`.
            carry: as for `gradients`.
            every: one update per `"sequence"`, per `"chunk"` (from the loss over its steps) or per
                `"step"`.
        """
        xs, targets, mask = self._unpacked(xs, targets, mask)
        found = self.runtime.sequences.update(xs, targets, mask, carry, every)
        if self._is_plain:
            self.runtime.store.lend()  # so that the user's module has the new weights
        return SequenceResult(*found, self.runtime.batch_first, self._is_plain)

    def predict(self, xs: Any, carry: bool = False) -> Any:
        """Return outputs of a sequence in evaluation mode.

        They are torch tensors, packed if the inputs are, or JAX arrays for a brainstate module. The
        learner's state does not change.

        Args:
            xs: inputs, as for `gradients`.
            carry: start from the current states instead of initial ones.
        """
        xs = read_inputs(self.runtime.net, xs, sequence=True)
        batch_first = self.runtime.batch_first
        padded, _, _ = self._unpacked(xs, None, None)
        outputs = self.runtime.sequences.predict(padded, carry)
        if self._is_plain:
            return jax.tree.map(jax.numpy.asarray, outputs)
        return jax.tree.map(
            lambda x: pack_like(sequence_to_torch(x, batch_first), xs, batch_first), outputs
        )

    def evaluate(self, batches: Iterable[Any]) -> float:
        """Return the mean loss over batches `(xs, targets[, mask])` in evaluation mode.

        The learner's state does not change.
        """
        _check_batches(batches)
        return evaluate_with(self, batches, {})["loss"]

    def fit(
        self,
        batches: Any,
        epochs: int = 1,
        *,
        validation: Any = None,
        metrics: Metrics = None,
        callbacks: Sequence[Callback] = (),
        early_stopping: EarlyStopping | int | None = None,
        scheduler: Any = None,
        every: str = "sequence",
        carry: bool = False,
        max_batches: int | None = None,
        checkpoint: Checkpoints | str | PathLike | None = None,
        resume: bool = False,
        progress: bool | None = None,
    ) -> History:
        """Train on batches of sequences.

        `history` is filled while training runs. After a loader's error or Ctrl-C the learner is in
        the state after the last complete batch.

        Args:
            batches: any iterable of `(xs, targets)`, `(xs, targets, mask)` or dicts with these
                keys, such as a torch DataLoader; or a function that returns such an iterable for
                every epoch.
            epochs: how often to go through the batches.
            validation: batches whose mean loss is the epoch's `validation_loss`; or a function of
                the learner that gives a number or a dict of numbers.
            metrics: further numbers of training and validation: `"accuracy"`, functions `(output,
                target) -> number`, a list of these, or a dict by name. They receive all steps that
                count as one batch, `(steps * batch, …)`.
            callbacks: functions of the learner and the epoch's record, called after every epoch;
                `True` ends the training. One with a method `before_batch(learner, xs, targets,
                mask, carry)`, such as `FidelityMeter`, is called before every update too.
            early_stopping: when to end; a number means the patience.
            scheduler: a torch learning-rate scheduler, stepped after every epoch.
            every: one update per `"sequence"`, `"chunk"` or `"step"`.
            carry: batches continue one another: states and trace carry over from batch to batch.
            max_batches: the largest number of batches in an epoch, for streams.
            checkpoint: where to save, every ten minutes, at the end, at Ctrl-C and at SIGTERM;
                `Checkpoints` sets how often.
            resume: continue the call of `fit` that the loaded checkpoint was saved in, up to the
                same number of `epochs`; without one, start with the first epoch. Random generators
                are restored, and batches that were done are read and skipped; an iterator is read
                from its current position.
            progress: show a live line, or plain lines where the error output is not a terminal; by
                default only on a terminal or in a notebook.
        """
        self.runtime.sequences.require_optimizer()
        _check_batches(batches)
        options = FitOptions(
            validation,
            metrics,
            tuple(callbacks),
            early_stopping,
            scheduler,
            every,
            carry,
            max_batches,
            checkpoint,
            resume,
            progress,
        )
        return run_fit(self, batches, epochs, options)

    def reset(self, mask: Any = None) -> None:
        """Reset hidden states and traces to their initial values.

        `mask` (batch,) selects the batch elements to reset. Running statistics and the random key
        belong to the model and do not change. After a full reset the batch size may change.
        """
        self.runtime.reset(mask)

    # -- torch -------------------------------------------------------------------------------

    def fill_grad(self, result: GradientResult | Mapping[str, torch.Tensor]) -> None:
        """Put gradients into `.grad` of the torch model's parameters, for a torch optimizer.

        Parameters that the loss's gradient cannot reach keep their `.grad`, as after torch's `backward`.
        """
        if not isinstance(result, (GradientResult, Mapping)):
            raise InputError(
                "`fill_grad` takes what `gradients` returned, or gradients by name, not a "
                f"`{type(result).__name__}`."
            )
        if isinstance(result, GradientResult):
            used = set(self.runtime.store.compiled.weight_names) - result.unreached
            grads = {name: grad for name, grad in result.grads.items() if name in used}
        else:
            grads = dict(result)
        named = dict(self._torch_model().named_parameters(remove_duplicate=False))
        unknown = sorted(str(name) for name in set(grads) - set(named))
        if unknown:
            raise InputError(
                f"The model has no parameters named {', '.join(unknown)}, so their gradients cannot be "
                "put anywhere. Pass gradients by the names of `model.named_parameters()`."
            )
        for name, grad in grads.items():
            _check_gradient(name, grad, named[name])
        for name, grad in grads.items():
            named[name].grad = grad.detach().to(named[name]).clone()

    def sync_to_torch(self) -> None:
        """Write weights and buffers into the torch model in place.

        A translated optimizer's state is written into that optimizer too.
        """
        model, store = self._torch_model(), self.runtime.store
        current = self.net.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            for own in (
                model.named_parameters(remove_duplicate=False),
                model.named_buffers(remove_duplicate=False),
            ):
                for name, tensor in own:
                    if name in current and tensor.shape == current[name].shape:
                        tensor.copy_(current[name])
        self.net.note_versions()  # pyright: ignore[reportAttributeAccessIssue]
        self.runtime.torch_watch.note()
        if store.started and store.updater is not None and store.updater.translated is not None:
            store.updater.translated.export(store.placement.whole(store.state.opt))

    def sync_from_torch(self) -> None:
        """Read weights and buffers from the torch model, e.g. after `optimizer.step()` in torch."""
        model = self._torch_model()
        self.net.load_state_dict(model.state_dict())  # pyright: ignore[reportAttributeAccessIssue]
        self.runtime.torch_watch.note()

    # -- checkpoints ------------------------------------------------------------------------------

    def save(self, path: str | PathLike) -> Path:
        """Write weights, states, traces, optimizer state, random keys and counts.

        The checkpoint replaces an older one atomically, and contains no pickle.

        Args:
            path: the weights file; `.safetensors` is added if it is missing. Plain torch can load
                it: `model.load_state_dict(safetensors.torch.load_file(path))`. A second file beside
                it has everything else. If the learner's mesh spans processes, the checkpoint is a
                folder, and every process must call this.

        Returns:
            The weights file, or the folder.
        """
        _check_path(path)
        with self.runtime.store.lock:
            return save_learner(self, path)

    @classmethod
    def load(
        cls,
        path: str | PathLike,
        model: torch.nn.Module | brainstate.nn.Module,
        rule: str | Rule | None = None,
        loss: Callable[..., Any] | None = None,
        optimizer: Any = None,
        chunk: int | str | None = None,
        *,
        reduction: str | None = None,
        **options: Any,
    ) -> OnlineLearner:
        """Make a learner that continues a saved one, bit for bit.

        Args:
            path: as for `save`.
            model: a model of the same structure; its weights are replaced.
            rule: the rule; by default the checkpoint's.
            loss: the loss.
            optimizer: an optimizer like the saved one; its state and parameter groups are taken
                from the checkpoint.
            chunk: steps in a chunk; by default the checkpoint's.
            reduction: by default the checkpoint's.
            **options: further arguments of `OnlineLearner`.
        """
        _check_path(path)
        weights, arrays, facts = read_learner(path)
        learner = cls(
            model, rule_of(facts, rule), loss, optimizer, facts["chunk"] if chunk is None else chunk,
            reduction=facts["reduction"] if reduction is None else reduction, **options,
        )  # fmt: skip
        restore_learner(learner, path, weights, arrays, facts)
        learner.history = None if facts["history"] is None else History(**facts["history"])
        return learner

    def export(
        self, path: str | PathLike, platforms: Sequence[str] = PLATFORMS, batch: str = "fixed"
    ) -> Path:
        """Write the learning step and the inference step as files.

        They run without torch and without this package. The steps are StableHLO programs; weights,
        states, traces and optimizer state are in a safetensors file beside them, and
        `manifest.json` has names, shapes and checksums. Call `step(x, target)` first: the files are
        for inputs of that shape, and continue from the learner's state.
        `etrace_bridge.load_exported` reads them; so does any process with JAX and NumPy.

        Args:
            path: a folder.
            platforms: the platforms to write programs for, of `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`;
                those that the step cannot be lowered for are skipped.
            batch: `"fixed"`: the batch size of the last step, with the learner's states and traces.
                `"symbolic"`: any batch size, chosen in `load_exported`, from initial states; for
                models whose batch elements do not depend on each other.

        Returns:
            The folder.
        """
        return export_learner(self, path, platforms, batch)

    def _unpacked(self, xs: Any, targets: Any, mask: Any) -> tuple[tuple, Any, Any]:
        """Return a sequence's input tensors as a tuple, its targets and its mask, nothing packed."""
        inputs = read_inputs(self.runtime.net, xs, sequence=True)
        return unpack_sequences(inputs, targets, mask, self.runtime.batch_first)

    @property
    def _is_plain(self) -> bool:
        """Whether the model is a brainstate module rather than torch's."""
        return not isinstance(self.runtime.net, BridgedModule)

    def _after_hooks(self, grads: Mapping[str, Any]) -> dict[str, Any]:
        if self._is_plain:
            return self.runtime.store.compiled.gradient_trees(grads)
        return run_hooks(grads, self.runtime.parameters)

    def _torch_model(self) -> torch.nn.Module:
        model = getattr(self.runtime.net, "model", None)
        if model is None:
            raise InputError(
                "This learner was made from a brainstate module, so it has no torch model. Its "
                "weights are in the states of `learner.net`."
            )
        return model


def _check_batches(batches: Any) -> None:
    if not (
        callable(batches) or hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    ) or isinstance(batches, (str, torch.Tensor)):
        raise InputError(
            f"`batches` is a {type(batches).__name__}; it must be an iterable of `(xs, targets)`, "
            "such as a DataLoader."
        )


def _check_path(path: Any) -> None:
    if not isinstance(path, (str, PathLike)):
        raise InputError(
            f"`path` is a {type(path).__name__}; it must be a file name, as text or a path."
        )


def _check_gradient(name: str, grad: Any, parameter: torch.Tensor) -> None:
    if not isinstance(grad, torch.Tensor) or grad.layout is not torch.strided or grad.is_meta:
        kind = f"{grad.layout} tensor" if isinstance(grad, torch.Tensor) else type(grad).__name__
        raise InputError(
            f"The gradient of `{name}` is a {kind}; it must be a dense tensor with values."
        )
    if grad.shape != parameter.shape or grad.is_complex() != parameter.is_complex():
        raise InputError(
            f"The gradient of `{name}` is {grad.dtype}{tuple(grad.shape)}, but the parameter is "
            f"{parameter.dtype}{tuple(parameter.shape)}. Both must have one shape, and be real or complex."
        )
