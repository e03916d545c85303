"""`OnlineLearner`: train a torch model online and carry it home."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import brainstate
import jax
import torch

from etrace_bridge._errors import InputError
from etrace_bridge.compiler.graph import ETraceGraph
from etrace_bridge.frontend import wrap
from etrace_bridge.learning.checkpoint import read_checkpoint, restore_learner, rule_of, save_learner
from etrace_bridge.learning.fit import Callback, EarlyStopping, FitOptions, History, run_fit, split_batch
from etrace_bridge.learning.inputs import as_inputs
from etrace_bridge.learning.placement import Placement
from etrace_bridge.learning.results import GradientResult, SequenceResult, StepInfo, sequence_to_torch
from etrace_bridge.learning.runtime import Options, Runtime
from etrace_bridge.learning.torch_update import run_hooks
from etrace_bridge.rules import Rule, make_rule


class OnlineLearner:
    """Trains a recurrent model online.

    Args:
        model: a torch module, a `BridgedModule`, or any brainstate module.
        rule: a rule's name or object, see `etrace_bridge.rules`.
        loss: torch or JAX callable `(output_t, target_t) -> scalar`.
        optimizer: an optax transformation or a `torch.optim` instance; None for learners that only give gradients. SGD, Adam, AdamW,
            RMSprop and Adagrad run inside the compiled step, with their parameter groups, and follow torch's schedulers; any other
            torch optimizer runs in torch, through `.grad`.
        chunk: steps in a chunk, or `"auto"`.
        reduction: `"mean"` or `"sum"` over the steps of a sequence.
        budget: bytes that a chunk's buffers may take; None for no more than the trace itself.
        clip_norm: most that the norm of all gradients may be, as `torch.nn.utils.clip_grad_norm_`.
        clip_value: most that the size of a gradient's element may be.
        accumulate: gradients averaged for one update.
        schedule: factor of the learning rate by number of updates: an optax schedule.
        guard: stop with `NonFiniteError` when a loss, weight or hidden state becomes NaN or infinite, and keep the last finite state.
        check_inputs: raise when inputs or targets have NaN or infinity.
        device: `"cpu"`, `"gpu"`, `"tpu"` or a `jax.Device`.
        mesh: a `jax.sharding.Mesh`, over which the batch is divided.
        seed: seed of a torch model's random ops.
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
        budget: int | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        schedule: Callable[[Any], Any] | None = None,
        guard: bool = True,
        check_inputs: bool = False,
        device: Any = None,
        mesh: Any = None,
        seed: int = 0,
    ) -> None:
        net = wrap(model, seed=seed) if isinstance(model, torch.nn.Module) else model
        if not isinstance(net, brainstate.nn.Module):
            raise InputError(f"`model` is a {type(model).__name__}; it must be a torch or a brainstate module.")
        options = Options(chunk, reduction, budget, clip_norm, clip_value, accumulate, schedule, guard, check_inputs)
        self.rule = make_rule(rule)
        self.history: History | None = None
        self._runtime = Runtime(net, self.rule, loss, optimizer, options, Placement(device, mesh))

    # -- what it holds -----------------------------------------------------------------------------------------

    @property
    def net(self) -> brainstate.nn.Module:
        """The brainstate module, with copies of the learner's weights and states in it; changes made there are taken over."""
        self._runtime.lend()
        return self._runtime.net

    @property
    def graph(self) -> ETraceGraph:
        """The compiled graph; there is one after the first input."""
        return self._runtime.session.program.graph

    @property
    def steps(self) -> int:
        """Time steps seen."""
        return self._runtime.steps

    @property
    def updates(self) -> int:
        """Updates asked for."""
        return self._runtime.updates

    # -- learning ----------------------------------------------------------------------------------------------

    def step(self, x: Any, target: Any = None) -> StepInfo:
        """One time step: forward, trace, gradient, update.

        Args:
            x: the input, `(batch, …)`, or a tuple of inputs.
            target: the target; None advances states and trace only.
        """
        runtime = self._runtime
        loss, output = runtime.step(x if type(x) is tuple else as_inputs(x), target)
        return StepInfo(loss, output, runtime.look)

    def gradients(self, xs: Any, targets: Any, mask: Any = None, carry: bool = False) -> GradientResult:
        """Gradients of a whole sequence, without an update.

        Args:
            xs: inputs `(T, batch, …)`, or `(batch, T, …)` for a `batch_first` module; a tuple for several inputs.
            targets: targets, time where the inputs have it.
            mask: (T,) weights of the steps' losses.
            carry: start from the current states and trace and keep those after the sequence; otherwise the sequence
                starts from initial states, and the learner's own stay as they are. Running statistics and the random key move on
                either way, as in torch.
        """
        grads, *rest = self._runtime.gradients(as_inputs(xs), targets, mask, carry)
        return GradientResult(grads, self._after_hooks, *rest, self._runtime.batch_first)

    def update(self, xs: Any, targets: Any, mask: Any = None, carry: bool = False, every: str = "sequence") -> SequenceResult:
        """Gradients of a sequence, and updates.

        Args:
            xs: inputs, as for `gradients`.
            targets: targets, as for `gradients`.
            mask: (T,) weights of the steps' losses.
            carry: as for `gradients`.
            every: one update a `"sequence"`, a `"chunk"` (from the loss over its steps) or a `"step"`.
        """
        return SequenceResult(*self._runtime.update(as_inputs(xs), targets, mask, carry, every), self._runtime.batch_first)

    def predict(self, xs: Any, carry: bool = False) -> Any:
        """Outputs of a sequence as torch tensors, in evaluation mode; the learner stays as it is.

        Args:
            xs: inputs, as for `gradients`.
            carry: start from the current states instead of initial ones.
        """
        outputs = self._runtime.predict(as_inputs(xs), carry)
        return jax.tree.map(lambda x: sequence_to_torch(x, self._runtime.batch_first), outputs)

    def evaluate(self, batches: Iterable[Any]) -> float:
        """The mean loss over batches `(xs, targets[, mask])`, in evaluation mode; the learner stays as it is."""
        losses = []
        for batch in batches:
            xs, targets, mask = split_batch(batch)
            found, weights = self._runtime.evaluate(as_inputs(xs), targets, mask)
            losses.append(SequenceResult(found, None, weights, False).loss)
        if not losses:
            raise InputError("There was no batch to evaluate.")
        return sum(losses) / len(losses)

    def fit(
        self,
        batches: Any,
        epochs: int = 1,
        *,
        validation: Any = None,
        callbacks: Sequence[Callback] = (),
        early_stopping: EarlyStopping | int | None = None,
        scheduler: Any = None,
        every: str = "sequence",
        carry: bool = False,
        max_batches: int | None = None,
        progress: bool | None = None,
    ) -> History:
        """Trains on batches of sequences.

        `history` is filled as it goes. A loader's error and Ctrl-C leave the learner as it was after the last whole batch.

        Args:
            batches: any iterable of `(xs, targets)`, `(xs, targets, mask)` or dicts with these keys, a torch DataLoader for one; or a
                function that makes such an iterable for every epoch.
            epochs: how often to go through them.
            validation: batches whose mean loss is the epoch's `validation_loss`; or a function of the learner that gives a number
                or a dict of numbers.
            callbacks: functions of the learner and the epoch's record, called after every epoch; `True` ends the training.
            early_stopping: when to end; a number is the patience.
            scheduler: a torch learning-rate scheduler, stepped after every epoch.
            every: one update a `"sequence"`, a `"chunk"` or a `"step"`.
            carry: batches continue one another: states and trace go on from batch to batch.
            max_batches: most batches in an epoch, for streams.
            progress: show a progress bar; by default where the error output is a terminal.
        """
        options = FitOptions(validation, tuple(callbacks), early_stopping, scheduler, every, carry, max_batches, progress)
        return run_fit(self, batches, epochs, options)

    def reset(self, mask: Any = None) -> None:
        """Sets hidden states and traces back to their initial values; `mask` (batch,) picks elements.

        Running statistics and the random key are the model's and stay. After a full reset the batch size may change.
        """
        self._runtime.reset(mask)

    # -- home again --------------------------------------------------------------------------------------------

    def fill_grad(self, result: GradientResult | Mapping[str, torch.Tensor]) -> None:
        """Puts gradients into `.grad` of the torch model's parameters, for a torch optimizer.

        Parameters that the step does not use keep their `.grad`, as after torch's `backward`.
        """
        grads = result
        if isinstance(result, GradientResult):
            used = set(self._runtime.session.weight_names)
            grads = {name: grad for name, grad in result.grads.items() if name in used}
        named = dict(self._torch_model().named_parameters(remove_duplicate=False))
        unknown = sorted(set(grads) - set(named))
        if unknown:
            raise InputError(f"The model has no parameters named {', '.join(unknown)}.")
        for name, grad in grads.items():
            named[name].grad = grad.detach().to(named[name]).clone()

    def sync_to_torch(self) -> None:
        """Writes weights and buffers into the torch model, in place, and a translated optimizer's state into that optimizer."""
        model, runtime = self._torch_model(), self._runtime
        current = self.net.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
        with torch.no_grad():
            for own in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
                for name, tensor in own:
                    if name in current and tensor.shape == current[name].shape:
                        tensor.copy_(current[name])
        if runtime.started and runtime.updater is not None and runtime.updater.translated is not None:
            runtime.updater.translated.export(runtime.values.opt)

    def sync_from_torch(self) -> None:
        """Takes weights and buffers from the torch model, e.g. after `optimizer.step()` in torch."""
        model = self._torch_model()
        self.net.load_state_dict(model.state_dict())  # pyright: ignore[reportAttributeAccessIssue]

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save(self, path: str | PathLike) -> Path:
        """Writes weights, states, traces, optimizer state, random keys and counts; atomically, without pickle.

        Args:
            path: the weights' file; `.safetensors` is added if it is missing. Plain torch can load it:
                `model.load_state_dict(safetensors.torch.load_file(path))`. The rest goes into a file beside it.

        Returns:
            The weights' file.
        """
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
        """A learner that goes on, bit for bit, where the saved one was.

        Args:
            path: as for `save`.
            model: a model of the same structure; its own weights do not matter.
            rule: the rule; by default the checkpoint's.
            loss: the loss.
            optimizer: an optimizer like the saved one; its state and parameter groups are taken from the checkpoint.
            chunk: steps in a chunk; by default the checkpoint's.
            reduction: by default the checkpoint's.
            **options: further arguments of `OnlineLearner`.
        """
        weights, arrays, facts = read_checkpoint(path)
        learner = cls(
            model, rule_of(facts, rule), loss, optimizer, facts["chunk"] if chunk is None else chunk,
            reduction=facts["reduction"] if reduction is None else reduction, **options,
        )  # fmt: skip
        restore_learner(learner, weights, arrays, facts)
        learner.history = None if facts["history"] is None else History(**facts["history"])
        return learner

    def _after_hooks(self, grads: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return run_hooks(grads, self._runtime.parameters)

    def _torch_model(self) -> torch.nn.Module:
        model = getattr(self._runtime.net, "model", None)
        if model is None:
            raise InputError("This learner was made from a brainstate module, so there is no torch model to write to.")
        return model
