"""Recording: runs the user's step once on fake tensors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_gpp._compat.lightning_module import set_trainer, trainer_of
from lightning_gpp._compat.torch import (
    FakeTensorMode,
    autograd_function_calls,
    checkpoint_regions,
    fake_mode,
    pytree,
    version,
)
from lightning_gpp.capture.attributes import originals
from lightning_gpp.capture.batch import BatchDims, resized
from lightning_gpp.capture.isolate import isolated_copy
from lightning_gpp.capture.items import are_plain, watched
from lightning_gpp.capture.kept import groups_of_optimizers, metrics_of, unchanged
from lightning_gpp.capture.meter import Meter
from lightning_gpp.capture.reads import (
    AttributeReads,
    Switches,
    buffers_in,
    observe,
    refuse_made_buffers,
    refuse_made_parameters,
)
from lightning_gpp.capture.recorder import Recorder
from lightning_gpp.capture.recording import Event, Recording
from lightning_gpp.capture.refusal import Changes, refusal, remedy_for
from lightning_gpp.capture.uncut import keep_uncut
from lightning_gpp.errors import CaptureError
from lightning_gpp.runtime.named_tensors import paths_around, tensors_of
from lightning_gpp.runtime.random import seed_streams, undisturbed
from lightning_gpp.user_code import line_of, user_line
from lightning_gpp.wording import named

StepFunction = Callable[[nn.Module, Any], Any]
"""A function from a module and a batch to what a step returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTime:
    """Values that a step may read from Python; a capture must not depend on them, nor on random numbers."""

    batch_idx: int = 0
    dataloader_idx: int = 0
    current_epoch: int = 0
    global_step: int = 0


class _Swallow:
    """Replaces loggers while the step is recorded: returns itself for every call and attribute."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


class _ObservedTrainer:
    """The trainer that the step sees during a recording: it has the given run-time values, and notes reads of them."""

    def __init__(self, trainer: Any, run_time: RunTime, recorder: Recorder) -> None:
        self._trainer, self._run_time, self._recorder = trainer, run_time, recorder

    def __getattr__(self, name: str) -> Any:
        if name in ("current_epoch", "global_step"):
            self._recorder.recording.note(Event.READS_RUN_TIME, name, self._recorder.scope, user_line())
            return getattr(self._run_time, name)
        if name in ("logger", "loggers", "progress_bar_callback"):
            return _Swallow()
        return getattr(self._trainer, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of a recording: a step of a module on a mini-batch, or a function of both.

    Args:
        module: a LightningModule.
        batch: one example batch.
        step: the name of the method.
        context: entered around the step, for example autocast.
        device: the device that the step believes it runs on.
        dims: the dimension of parts of the batch that counts samples, see `batch_dims` in the options.
        function: called with the module and the batch instead of the step.
    """

    module: nn.Module
    batch: Any
    step: str = "training_step"
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    device: torch.device = torch.device("cpu")
    dims: BatchDims = field(default_factory=dict)
    function: StepFunction | None = None

    def called_on(self, replica: nn.Module, run_time: RunTime) -> Callable[[Any], Any]:
        """The step of a copy of the module, as a function of the batch alone."""
        if self.function is not None:
            return functools.partial(self.function, replica)
        method = getattr(replica, self.step)
        arguments = step_arguments(method, run_time.batch_idx, run_time.dataloader_idx)
        return lambda batch: method(batch, *arguments)


def record(
    subject: Subject,
    changes: Changes,
    *,
    num_samples: int,
    run_time: RunTime,
    uniform: Collection[int] = (),
    prepare: Callable[[nn.Module, Recorder], None] = lambda replica, recorder: None,
) -> tuple[Recording, Recorder]:
    """Record a step, with its batch resized to a number of samples.

    Args:
        subject: the step.
        changes: what is recorded in another way.
        num_samples: samples of the batch.
        run_time: what the step reads from Python.
        uniform: numbers of the leaves of the batch whose values the recording knows, because all elements are the same.
        prepare: called with the copy that is recorded, before it runs.

    Raises:
        CaptureError: the network part of the step cannot be recorded.
    """
    module, trains, mode = subject.module, subject.step == "training_step", fake_mode()
    _refuse_scripted(module)
    with _quiet():
        replica = isolated_copy(module, mode, subject.device)
    if not trains:
        replica.eval()
    with torch.set_grad_enabled(trains), subject.context():
        recorder = Recorder(num_samples, changes, number=2 if run_time.global_step else 1)
        recorder.watch(replica)
        keep_uncut(replica, module, changes.uncut, recorder)
        reads = AttributeReads(recorder, changes.uncut)
        observe(replica, reads)
        _observe(replica, trainer_of(module), run_time, recorder)
        for place, metric in metrics_of(replica).items():
            _silence(metric, place, recorder, mode)
        recorder.runs_rest = subject.function is None
        prepare(replica, recorder)
        fake, recorder.examples = _fake_batch(subject, num_samples, mode, recorder.refuse_read_items, uniform)
        with _recording(recorder, mode), unchanged(groups_of_optimizers(module)):
            seed_streams(run_time.global_step)
            for number, leaf in enumerate(pytree.tree_leaves(fake)):
                if isinstance(leaf, torch.Tensor):
                    recorder.batch_tensor(leaf, number if type(leaf) is torch.Tensor else None)
            buffers, versions, switches = buffers_in(replica), _versions(fake), Switches(replica, recorder)
            attributes = {path: dict(vars(part)) for path, part in replica.named_modules()}
            parameters = dict(replica.named_parameters(remove_duplicate=False))
            _run(replica, subject.called_on(replica, run_time), fake, recorder, reads)
            refuse_made_parameters(replica, parameters, subject.step)
            refuse_made_buffers(replica, buffers, recorder, changes.uncut)
            recorder.recording.touched |= _changed(replica, attributes)
    recording = recorder.recording
    recording.changes_batch = _versions(fake) != versions
    if not recorder.reads_between_calls:
        switches.refuse(subject.step)
    parts = dict(module.named_modules())
    recording.attributes = {scope: originals(parts, read) for scope, read in recording.attributes.items()}
    return recording, recorder


def _refuse_scripted(module: nn.Module) -> None:
    """Refuse modules of TorchScript, which take no hooks, and whose parameters can be no other tensors."""
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise refusal(
                f"the call of {named(path)}",
                "this is a torch.jit.ScriptModule, whose calls nothing can see",
                "use the nn.Module itself instead of its scripted or traced form",
            )


def _changed(replica: nn.Module, before: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Paths of the parts that have other attributes than before."""
    return {
        path
        for path, part in replica.named_modules()
        if any(before.get(path, {}).get(name, before) is not value for name, value in vars(part).items())
    }


def _versions(batch: Any) -> list[int]:
    return [version(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, torch.Tensor)]


def _run(
    replica: nn.Module, called: Callable[[Any], Any], batch: Any, recorder: Recorder, reads: AttributeReads
) -> None:
    recording = recorder.recording
    try:
        with recorder:
            result = called(batch)
        reads.compare(replica)
        reads.refuse(on_all_ranks=recorder.reads_between_calls)
        recorder.use(result)
        recorder.use_kept([replica, *map(replica.get_submodule, recorder.opened)])
        recording.result = recorder.refs(result)
        recording.returned = result
    except CaptureError as error:
        error.modules = error.modules or recorder.recording.called(recorder.scope)
        raise
    except Exception as error:
        recording.complete, recording.stopped = False, f"{line_of(error)}: {type(error).__name__}: {error}"
        refuted = recorder.refutable() if recorder.scope == -1 else None
        if recorder.scope != -1 or refuted is not None or not _ends_here(replica, recorder):
            modules = recording.called(recorder.scope)
            reason = f"{type(error).__name__}: {error}"
            refused = refusal(line_of(error), reason, remedy_for(error), modules)
            refused.refuted = refuted
            raise refused from error


def step_arguments(function: Callable[..., Any], batch_idx: int, dataloader_idx: int = 0) -> list[int]:
    """Arguments of a step after the batch, as Lightning gives them: `batch_idx`, `dataloader_idx`."""
    parameters = list(inspect.signature(function).parameters.values())[:3]
    known, arguments = {"batch_idx": batch_idx, "dataloader_idx": dataloader_idx}, list[int]()
    for place, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return [*arguments, batch_idx] if place < 2 else arguments
        if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return arguments
        if place and parameter.name not in known and parameter.default is not parameter.empty:
            return arguments
        arguments += [known.get(parameter.name, batch_idx if place == 1 else 0)] if place else []
    return arguments


def _ends_here(replica: nn.Module, recorder: Recorder) -> bool:
    """End the network where the recording ended, if it has most of the trained parameters.

    The step then calls the remaining modules itself, if it runs as a step (`runs_rest`).
    """
    called = {call.path for call in recorder.recording.modules}
    states = {name for call in recorder.recording.calls for name in call.states()}
    around = {name: {"", *paths_around(name)} for name in tensors_of(replica)}
    left = {n: t for n, t in tensors_of(replica).items() if n not in states and not around[n] & called}
    recorder.recording.left = sorted(left)
    trained = [parameter for parameter in replica.parameters() if parameter.requires_grad]
    late = sum(tensor.numel() for tensor in left.values() if tensor.requires_grad)
    if not recorder.runs_rest:
        return bool(called) and not late
    return bool(called) and 2 * late < sum(parameter.numel() for parameter in trained)


def _observe(replica: nn.Module, trainer: Any, run_time: RunTime, recorder: Recorder) -> None:
    """Attach the observed trainer, and let logging note the values that the step uses."""

    def log(*args: Any, **kwargs: Any) -> None:
        recorder.recording.note(Event.LOGS, None, recorder.scope, user_line())
        if recorder.scope == -1:
            recorder.use((args, kwargs))

    if hasattr(replica, "log_dict"):
        set_trainer(replica, _ObservedTrainer(trainer, run_time, recorder))
        vars(replica).update(log=log, log_dict=log, print=_Swallow())


def _silence(metric: Any, place: str, recorder: Recorder, mode: FakeTensorMode) -> None:
    """Let a metric keep its state and return fake scalars: it reads values, which a recording does not have.

    The values that the step passes to it are noted.
    """
    recording = recorder.recording

    def answer() -> Any:
        with mode:
            names = list(metric) if isinstance(metric, nn.ModuleDict) else None
            return torch.zeros(()) if names is None else {name: torch.zeros(()) for name in names}

    def noted(*args: Any, **kwargs: Any) -> Any:
        if recorder.scope == -1:
            recording.note(Event.UPDATES_METRIC, place)
            recorder.use((args, kwargs))
        return answer()

    for name, method in {"forward": noted, "update": noted, "compute": answer}.items():
        object.__setattr__(metric, name, method)


def _fake_batch(
    subject: Subject,
    num_samples: int,
    mode: FakeTensorMode,
    on_read: Callable[[], None],
    uniform: Collection[int],
) -> tuple[Any, dict[int, torch.Tensor]]:
    """The batch as fake tensors of `num_samples` samples, and the values of each, by its id.

    `on_read` is called when an item of a sample is read that is no tensor. `uniform`: numbers of leaves that are real.
    """
    numbers = itertools.count()
    values: dict[int, torch.Tensor] = {}

    def listed(items: Any) -> Any:
        return watched(items, on_read) if are_plain(items) else items

    def fake(leaf: Any) -> Any:
        number = next(numbers)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        with nullcontext() if number in uniform else mode, torch.enable_grad():
            made = torch.empty(leaf.shape, dtype=leaf.dtype, device=subject.device, requires_grad=leaf.requires_grad)
            made = made.clone() if leaf.requires_grad else made  # which modules may change in place, unlike a leaf
        if number in uniform:
            made.copy_(leaf)
        values[id(made)] = leaf
        return made

    batch = resized(subject.batch, num_samples, subject.dims, listed)
    if len(pytree.tree_leaves(batch)) != len(pytree.tree_leaves(subject.batch)):
        uniform = ()  # with another number of samples in lists, leaves have other numbers
    return pytree.tree_map(fake, batch), values


@contextmanager
def _recording(recorder: Recorder, mode: FakeTensorMode) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(undisturbed())
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(mode)
        stack.enter_context(recorder.values)
        meter = stack.enter_context(Meter(recorder))
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(meter.saved, lambda packed: packed[0]))
        stack.enter_context(autograd_function_calls(recorder.apply))
        stack.enter_context(checkpoint_regions(recorder.enter_region, recorder.leave_region))
        yield
    mode.allow_non_fake_inputs = False  # training fails with a tensor that user code has kept outside of the module


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what the step prints, because it runs several times, and torch's report of a failing call."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True  # another level would clear the caches of all loggers
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.disabled = before
