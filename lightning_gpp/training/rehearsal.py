"""The rehearsal of an evaluation step whose recording ended before the step did, because of code that depends on data.

    recorded     logits = self.model(x) ; if (logits.argmax() == end).all(): ...
    rehearsed                             ... logits = self.model(longer)    a generation calls the network again

The step runs once on a copy of the module, with made-up results of its network calls. If it calls the network again,
its calls are not known before it runs, so it cannot run behind the micro-batches of one call.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
from torch import Tensor

from lightning_gpp.capture import Capture
from lightning_gpp.capture.recording import Ref
from lightning_gpp.capture.refusal import refusal
from lightning_gpp.errors import CaptureError
from lightning_gpp.graph import TensorSpec
from lightning_gpp.runtime.stage import MicroBatch
from lightning_gpp.stages.code import variable
from lightning_gpp.stages.step import Invocation, UserStep
from lightning_gpp.training.host import Job
from lightning_gpp.training.session import Session
from lightning_gpp.training.unnoticed import NO_MINI_BATCH, copy_for, unnoticed

log = logging.getLogger(__name__)

_REMEDY: Final = "let the step call the network as often for every batch"


def check_calls(job: Job, session: Session, batch: Any, batch_size: int) -> None:
    """Refuse a step that calls the network again after its recording ended. All ranks of a pipeline call this together.

    Args:
        job: the job of the run.
        session: the session of the step.
        batch: the mini-batch, which is used only on the rank that runs the step.
        batch_size: its number of samples.

    Raises:
        CaptureError: the step calls the network again.
    """
    step = session.pipeline.step
    if not isinstance(step, UserStep) or not _depends_on_data(step) or job.control.num_devices == 1:
        return
    calls_again = job.control.runs_step and _calls_again(job, session, step, batch, batch_size)
    if job.control.share_flag(calls_again):
        recording = step.network.recording
        line = recording.truths[-1][1] if recording.complete else recording.stopped.partition(": ")[0]
        raise refusal(line, "how often the step calls the network depends on data", _REMEDY)


def check_positions(session: Session) -> None:
    """Refuse a step that indexes results of the network by positions in the mini-batch (`h[torch.arange(len(h)), y]`).

    In evaluation the step runs once per mini-batch, and its tensors are cut for micro-batches, in which samples have
    other positions.

    Raises:
        CaptureError: it does.
    """
    step = session.pipeline.step
    if not isinstance(step, UserStep):
        return
    for call in step.network.calls:
        if call.scope == -1 and call.target in _BY_POSITION and any(_has_positions(step, ref) for ref in call.refs()):
            raise refusal(
                call.line,
                "the step indexes results of the network by positions of samples in the mini-batch",
                "do it in a module's forward, or behind the step's last call of a module",
            )


_BY_POSITION: Final = {
    *("__getitem__", "__setitem__", "index_select", "index_add", "index_add_", "index_copy", "index_copy_"),
    *("index_put", "index_put_", "index_fill", "index_fill_"),
}


def _has_positions(step: UserStep, ref: Ref) -> bool:
    """True for whole numbers of all samples that the step has made, or has got from the mini-batch."""
    spec = step.spec_of(ref)
    return ref.call < 0 and spec.varies and "int" in spec.dtype


def _depends_on_data(step: UserStep) -> bool:
    recording = step.network.recording
    return not recording.complete or bool(recording.truths)


def _calls_again(job: Job, session: Session, step: UserStep, batch: Any, batch_size: int) -> bool:
    try:
        with unnoticed(job):
            _rehearse(job, session, step, batch, batch_size)
    except CaptureError:
        return True
    except Exception as error:  # user code on made-up values
        log.info("The %s was not rehearsed to its end: %s: %s", session.capture.step, type(error).__name__, error)
    return False


def _rehearse(job: Job, session: Session, step: UserStep, batch: Any, batch_size: int) -> None:
    copied = copy_for(job, step)
    again = step.with_module(copied)
    assert isinstance(session.capture, Capture)
    function, rest = session.capture.called_on(copied)
    around = job.host.around(session.capture.step, NO_MINI_BATCH)
    again.begin(batch, Invocation(function=function, rest=rest, around=around), 0, batch_size)
    values = {variable(ref): _made_up(step.spec_of(ref), batch_size, job.device) for ref in step.network.needed}
    try:
        again.run(MicroBatch(0, 0, batch_size, batch_size), values)
    finally:
        again.end()
        job.host.forget(range(NO_MINI_BATCH, NO_MINI_BATCH + 1))


def _made_up(spec: TensorSpec, num_samples: int, device: torch.device) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    empty = torch.empty(spec.sizes(num_samples), dtype=dtype, device=device)
    return empty.normal_() if dtype.is_floating_point or dtype.is_complex else empty.fill_(1)
