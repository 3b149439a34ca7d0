"""Captures the step that an engine is set up for, unless it runs as it is; tells which steps run as a whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from lightning_gpp._compat.torch import uncompiled
from lightning_gpp.capture.batch import samples_in
from lightning_gpp.capture.calls import StepCalls
from lightning_gpp.errors import CaptureError, ShapeError
from lightning_gpp.stages.undivided import Captured, Undivided, undivided
from lightning_gpp.training.host import Job
from lightning_gpp.training.option_values import SYNCHRONOUS
from lightning_gpp.training.planner import TRAINING
from lightning_gpp.training.sessions import capture_of, uncaptured
from lightning_gpp.training.updates.optimizers import is_first_order
from lightning_gpp.training.whole.whole_step import can_run_whole, capture_whole

VALIDATION: Final = "validation_step"
STEPS: Final = TRAINING, VALIDATION, "test_step", "predict_step"


class UncapturedError(Exception):
    """Carries the error of a capture, which all ranks raise alike."""

    def __init__(self, error: CaptureError | ShapeError) -> None:
        super().__init__(str(error))
        self.error = error


def captured_in(job: Job, step: str, example: Any, calls: StepCalls | None) -> tuple[Captured, StepCalls | None]:
    """The captured step, and what was found in one that runs as a whole; None where its calls are not pipelined.

    Raises:
        UncapturedError: the step cannot be captured, and some of it has to run on another device.
    """
    try:
        if _as_it_is(job, step):
            return _uncut(job, step, example), None
        if job.whole:
            return _captured_whole(job, step, example, calls)
        return capture_of(job, step, example, job.known), None
    except (CaptureError, ShapeError) as error:
        raise UncapturedError(error) from error


def as_captured(job: Job, step: str, captured: Captured, optimizers: Sequence[Optimizer]) -> Job:
    """The job, on one process for a training step that runs as it is, if it is not cut, or its optimizers repeat it."""
    uncut = isinstance(captured, Undivided) or not all(map(is_first_order, optimizers))
    alone = uncut and step == TRAINING and job.control.num_processes == 1
    return replace(job, whole=True) if alone and can_run_whole(job) else job


def steps_as_whole(job: Job, step: str) -> frozenset[str]:
    """The names of the steps that run as a whole; the engine is set up for `step`."""
    alone = {each for each in STEPS if _as_it_is(job, each)}
    return frozenset(alone | ({step} if job.whole else set()) | ({VALIDATION} if job.evaluates_whole else set()))


def _as_it_is(job: Job, step: str) -> bool:
    """True if a step need not be captured: on one process it runs as the user wrote it."""
    return step != TRAINING and _evaluates_as_it_is(job)


def _evaluates_as_it_is(job: Job) -> bool:
    """True if one process needs no stages for evaluation, and no option asks for them."""
    options = job.options
    cuts = options.num_micro_batches, options.micro_batch_size, options.stages, options.plan, options.delayed_devices
    left_open = options.step == "auto" and options.weights == SYNCHRONOUS and all(each is None for each in cuts)
    return job.control.num_processes == 1 and left_open


def _uncut(job: Job, step: str, example: Any) -> Undivided:
    return undivided(job.module, step, samples_in(example), "One process needs no stages.", alone=True)


def _captured_whole(job: Job, step: str, example: Any, calls: StepCalls | None) -> tuple[Captured, StepCalls | None]:
    try:
        return capture_whole(job, example, calls, step)
    except (CaptureError, ShapeError) as error:
        return uncaptured(job, step, example, error), None


def compiled_steps(module: nn.Module, steps: Sequence[str]) -> Iterator[str]:
    """Refusals of steps that are compiled together with the network that is to be cut."""
    for step in steps:
        function = getattr(module, step, None)
        if uncompiled(function) is not function:
            yield (
                f"{type(module).__name__}.{step} is compiled (torch.compile) with the network inside, which is to be "
                "cut into stages. Compile modules that it calls and that stages call undivided, for example "
                "self.encoder.compile()."
            )
