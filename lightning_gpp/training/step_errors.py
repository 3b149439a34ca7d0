"""Tells an error of the user's step, which fails on one device, too, from one that comes of stages."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from lightning_gpp.capture.record import step_arguments, step_input
from lightning_gpp.capture.recording import Recording
from lightning_gpp.errors import GPPError, IndivisibleError, StepError
from lightning_gpp.measure.memory import free_bytes
from lightning_gpp.runtime.random import undisturbed
from lightning_gpp.training.copies import silent_copy
from lightning_gpp.training.host import Job
from lightning_gpp.training.options import Context
from lightning_gpp.training.parameters import bytes_of
from lightning_gpp.user_code import UNKNOWN, line_of
from lightning_gpp.wording import described

_HOOKS: Final = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")
_LIGHTNING: Final = ("lightning", "pytorch_lightning")


def check_step(job: Job, step: str, batch: Any, refused: GPPError) -> None:
    """Run a step that was refused as the user wrote it, undivided on one device. All ranks call this together.

    Args:
        job: the job.
        step: the step's name.
        batch: a mini-batch; used only on global rank 0.
        refused: the refusal, on all ranks the same.

    Raises:
        StepError: on all ranks: the step fails in the same line, with the same error.
    """
    if job.control.num_processes == 1 or _waits_for_hooks(job.module) or not _may_be_plain(refused):
        return
    error = _failure(job, step, batch) if job.control.first else None
    if told := job.control.broadcast("" if error is None else _same(step, error, str(refused))):
        raise StepError(told) from error


def check_alone(
    module: nn.Module, step: str, batch: Any, refused: GPPError, context: Context, device: torch.device
) -> None:
    """`check_step` for a process without a job.

    Raises:
        StepError: the step fails in the same line, with the same error.
    """
    error = _failure_of(module, step, batch, context, device) if _may_be_plain(refused) else None
    if error is not None and (told := _same(step, error, str(refused))):
        raise StepError(told) from error


def check_end(
    module: nn.Module, step: str, batch: Any, recording: Recording, context: Context, device: torch.device
) -> None:
    """Refuse a step that fails behind its network, by an error that it has on one device, too.

    Raises:
        StepError: its recording ended early, and it fails in the same line, with the same error; or the module is on
            the meta device, and could be built to see that.
    """
    if not recording.stopped_here or _waits_for_hooks(module):
        return
    if _is_meta(module) and bytes_of(module) <= free_bytes(device):
        raise StepError(recording.stopped)
    error = _failure_of(module, step, batch, context, device)
    if error is not None and (told := _same(step, error, recording.stopped)):
        raise StepError(told) from error


def _same(step: str, error: Exception, refused: str) -> str:
    """The message for an error for which the step was refused; empty if that was another one."""
    line = line_of(error)
    if type(error).__name__ not in refused or line not in refused:
        return ""
    place = "" if line == UNKNOWN else f" ({line})"
    return f"{step} fails on one device, too, for the undivided mini-batch: {described(error)}{place}."


def _may_be_plain(refused: GPPError) -> bool:
    """True unless torch or this library raised the error, for something that only capture meets."""
    cause = refused.__cause__
    own = cause is None or isinstance(cause, GPPError) or type(cause).__module__.startswith("torch")
    return isinstance(refused, IndivisibleError) or not own


def _waits_for_hooks(module: nn.Module) -> bool:
    """True if hooks of the user that run after set-up may make what the step needs."""
    hooks = (getattr(type(module), hook, None) for hook in _HOOKS)
    return any(hook is not None and hook.__module__.split(".")[0] not in _LIGHTNING for hook in hooks)


def _is_meta(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def _failure(job: Job, step: str, batch: Any) -> Exception | None:
    return _failure_of(job.module, step, job.in_device(batch), job.host.context(step), job.device)


def _failure_of(module: nn.Module, step: str, batch: Any, context: Context, device: torch.device) -> Exception | None:
    """The error of the step on a device of this process; None if there is none, or it cannot run here."""
    if _is_meta(module) or bytes_of(module) > free_bytes(device):
        return None
    try:
        with undisturbed(), torch.no_grad(), context():
            method = getattr(silent_copy(module, device), step)
            method(step_input(method, batch), *step_arguments(method, 0))
    except Exception as error:
        return error
    return None
