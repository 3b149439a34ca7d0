"""`capture_step`: makes an operator graph, with the calls behind it, from a LightningModule and one example batch."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp._compat.lightning_module import trainer_of
from lightning_gpp.capture.batch import GUESSED, BatchDims, batch_size_of, cut_note, loose_rows
from lightning_gpp.capture.known_values import is_present, uniform_values
from lightning_gpp.capture.merge import input_specs, merge, only_scales
from lightning_gpp.capture.network import Network, extract
from lightning_gpp.capture.operators import graph_of, mark_mixing
from lightning_gpp.capture.reads import decisive
from lightning_gpp.capture.record import RunTime, StepFunction, Subject, record, step_arguments
from lightning_gpp.capture.refusal import Changes, attempted
from lightning_gpp.errors import CaptureError, StepError
from lightning_gpp.graph import OperatorGraph, TensorSpec
from lightning_gpp.wording import counted, named, sentence, some, with_article

SIZES = (4, 6)
"""Numbers of samples of the recordings; even, because some losses pair samples."""

_LOOPS = {"validation_step": "val", "test_step": "test", "predict_step": "predict"}
"""The loops with several data loaders, as the trainer calls them."""
OTHER_RUN_TIME = RunTime(batch_idx=1_000_003, current_epoch=1_000_033, global_step=1_000_037)


@dataclass(slots=True)
class Capture:
    """The computation of the user's step in its modules, for any number of samples.

    `uncut`: reasons why modules are called whole and never cut, by path. `opened`: reasons why the forwards of
    modules run as parts of the step, by path. `cut`: says how the batch is cut into micro-batches; empty if it is
    one. `decided`: the values of uniform tensors of the batch by which forwards have decided, by number; batches
    with others there need another capture, see `uniform_values`. `dims`: what the user said about the dimensions
    that count samples. `function`: what was captured, if it is not the step. `loose`: whether tensors of the batch
    have rows of which nobody says whose they are, see `loose_rows`.
    """

    graph: OperatorGraph
    network: Network
    specs: list[list[TensorSpec]]
    inputs: list[TensorSpec]
    step: str
    batch_size: int
    uncut: Mapping[str, str] = field(default_factory=dict)
    opened: Mapping[str, str] = field(default_factory=dict)
    cut: str = ""
    decided: Mapping[int, int] = field(default_factory=dict)
    dims: BatchDims = field(default_factory=dict)
    function: StepFunction | None = None
    loose: bool = False

    def called_on(self, module: nn.Module, batch_idx: int = 0) -> tuple[Callable[..., Any], list[int]]:
        """The captured step, as a function of the samples for this module, and its arguments after these."""
        if self.function is not None:
            return partial(self.function, module), []
        step = getattr(module, self.step)
        return step, step_arguments(step, batch_idx)

    @property
    def notes(self) -> list[str]:
        """Remarks for people: how mini-batches are cut, and modules that are never cut."""
        return list(self._notes())

    def _notes(self) -> Iterator[str]:
        if self.function is None and self.cut:
            yield f"The mini-batch has {counted(self.batch_size, 'sample')}. {self.cut}"
        for path, reason in self.uncut.items():
            yield f"Module {path!r} is called whole and never cut. {sentence(reason)}"
        for path, reason in self.opened.items():
            yield f"The forward of {named(path)} runs as a part of the step. {sentence(reason)}"
        recording = self.network.recording
        if recording.left:
            rest = f"The rest runs on its device, with {some(recording.left, most=5)}. {sentence(recording.stopped)}"
            yield f"The step cannot be recorded to its end. {rest}"

    @property
    def fingerprint(self) -> str:
        """Equal for equal modules with equal operators, whatever the batch size."""
        parts = [f"{operator.target}|{operator.module}|{operator.parameters}" for operator in self.graph]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def capture_step(
    module: nn.Module,
    batch: Any,
    *,
    step: str = "training_step",
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    device: torch.device | str = "cpu",
    function: StepFunction | None = None,
    dims: BatchDims | None = None,
    uncut: Mapping[str, str] = {},
    general: bool = False,
) -> Capture:
    """Capture the computation of `module.<step>(batch, batch_idx)`.

    A module that cannot be recorded becomes one operator, which calls it: the smallest one that solves the problem. The
    forward of a module with all parameters cannot: it counts as a part of the step instead, and the modules that it
    calls are recorded.

    The model takes no memory and computes nothing: only shapes and dtypes of parameters and batch matter, so both may
    be on the meta device. The module and the random number generators do not change.

    Args:
        module: a LightningModule (or any module with a method named `step`).
        batch: one example batch.
        context: entered around the step, for example autocast.
        device: the device that the step believes it runs on.
        function: called with the module and the batch instead of the step.
        dims: the dimension of parts of the batch that counts samples, see `batch_dims` in the options.
        uncut: paths of modules that become one operator anyway, with the reasons.
        general: whether the capture is for all values of the batch; otherwise see `Capture.decided`.

    Raises:
        CaptureError: something cannot be captured; names the line, the reason and the ways out.
    """
    if function is None and not callable(getattr(module, step, None)):
        raise CaptureError(f"{type(module).__name__} has no method {step!r}; a LightningModule must define it.")
    subject = Subject(
        module=module,
        batch=batch,
        step=step,
        context=context,
        device=torch.device(device),
        dims=dims or GUESSED,
        function=function,
    )

    def captured(known: Mapping[int, int]) -> Capture:
        return attempted(module, partial(_capture, subject, known), opens=function is None, uncut=uncut)

    uniform = {} if general or function is not None or not is_present(subject.device) else uniform_values(batch)
    return _captured_for(uniform, captured)


def _captured_for(uniform: Mapping[int, int], captured: Callable[[Mapping[int, int]], Capture]) -> Capture:
    """The capture for mini-batches with these values, if the network reads them and other values need no other cuts.

    `captured`: captures with values that the recordings know.
    """
    special = None
    with suppress(CaptureError):
        special = captured(uniform) if uniform else None
    if special is not None and not special.decided:
        return special
    general = captured({})
    if special is None or special.uncut.keys() != general.uncut.keys():
        return general
    return special if special.opened.keys() == general.opened.keys() else general


def _capture(subject: Subject, uniform: Mapping[int, int], changes: Changes) -> Capture:
    module, batch, step = subject.module, subject.batch, subject.step
    total = batch_size_of(batch, subject.dims)

    def run(num_samples: int, run_time: RunTime) -> Network:
        recording, recorder = record(subject, changes, num_samples=num_samples, run_time=run_time, uniform=uniform)
        if step == "training_step" and subject.function is None and recording.complete:
            trains = any(parameter.requires_grad for parameter in module.parameters())
            check = trained_loss if trains else loss_of  # a callback may unfreeze a module that is frozen as a whole
            check(recording.returned, num_samples)
        recording.returned = None
        return extract(recording, recorder)

    def compared() -> tuple[Network, Network, Network, list[list[TensorSpec]]]:
        """Recordings for two numbers of samples, and the network that they have in common.

        The second one also has other run-time values. If more than multiples of the number of samples differs, these
        are recorded apart.
        """
        now, later = RunTime(), _other_run_time(module, step)
        base, other = run(SIZES[0], now), run(SIZES[1], later)
        with suppress(CaptureError):
            network, specs = merge(base, base, other)
            if only_scales(network, [*specs, input_specs(base, other)]):
                return base, other, network, specs
        other_run, other = run(SIZES[0], later), run(SIZES[1], now)
        return base, other, *merge(base, other_run, other)

    try:
        base, other_size, network, specs = compared()
    except CaptureError:
        if changes.compared:
            raise
        base, other_size, network, specs = compared()  # the first ones may have filled caches outside of the module
    finally:
        changes.compared = True
    base.recording.decisive = decisive(base)
    inputs = input_specs(base, other_size)
    specs = mark_mixing(network, specs, inputs)
    graph = graph_of(module, network, specs, inputs)
    return Capture(
        graph,
        network,
        specs,
        inputs,
        step=step,
        batch_size=total,
        uncut=changes.uncut,
        opened=changes.opened,
        cut=cut_note(batch, subject.dims),
        decided={leaf: uniform[leaf] for leaf in base.recording.decided_by() | other_size.recording.decided_by()},
        dims=subject.dims,
        function=subject.function,
        loose=bool(loose_rows(batch, subject.dims)),
    )


def _other_run_time(module: nn.Module, step: str) -> RunTime:
    """Other values of what steps read from Python; the data loader is another one if there are several."""
    loop = _LOOPS.get(step, "")
    several = len(getattr(trainer_of(module), f"num_{loop}_batches", ())) > 1 if loop else False
    return replace(OTHER_RUN_TIME, dataloader_idx=int(several))


# --- the result of a training step: a loss, or a dict with one


def loss_of(output: Any, num_samples: int | None = None) -> Tensor:
    """The loss in the result of a training step; `num_samples` of the step's mini-batch are for messages.

    Raises:
        CaptureError: the step returned None, which only a step that runs as a whole may.
        StepError: there is no loss, or it is not a scalar.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if output is None:
        raise CaptureError(
            "training_step returned None instead of a loss. On micro-batches it may do so in training with one "
            "pipeline that flushes, without accumulation and 16-mixed, but not in set-up. Return "
            "0 * loss. (With strategy.on_nonfinite=skip None skips the mini-batch.)"
        )
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StepError(
            "training_step must return the loss as a scalar tensor, or a dict with it under 'loss'; it returned "
            f"{_described(output, loss, num_samples)}."
        )
    return loss


def trained_loss(output: Any, num_samples: int | None = None) -> Tensor:
    """The loss in the result of a training step, which a backward can start from; see `loss_of`.

    Raises:
        CaptureError, StepError: see `loss_of`; or the loss has no gradient.
    """
    loss = loss_of(output, num_samples)
    if not loss.requires_grad:
        raise StepError(
            "training_step returned a loss without a gradient: it was detached (.detach(), .item(), "
            "torch.no_grad()), or depends on no parameter that is trained. Return the loss as it was computed."
        )
    return loss


def _described(output: Any, loss: Any, num_samples: int | None) -> str:
    if isinstance(loss, Tensor):
        samples = "" if num_samples is None else f" for {num_samples} samples"
        return f"a tensor of shape {tuple(loss.shape)}{samples}"
    if isinstance(output, Mapping) and loss is None:
        return f"a dict with the keys {list(output)}"
    return with_article(type(loss).__name__)
