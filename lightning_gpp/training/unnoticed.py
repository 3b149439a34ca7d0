"""Runs of the user's step without a trace, on copies of the module and with given results of its network calls."""

from __future__ import annotations

from contextlib import ExitStack, redirect_stdout
from io import StringIO

import torch
from torch import nn
from torch.random import fork_rng

from lightning_gpp.capture.own_streams import unmoved
from lightning_gpp.capture.places import outside_kept
from lightning_gpp.capture.shared_objects import holders
from lightning_gpp.runtime.neutral import Neutral
from lightning_gpp.runtime.random import undisturbed
from lightning_gpp.stages.step import UserStep
from lightning_gpp.training.copies import step_copy
from lightning_gpp.training.host import Job

NO_MINI_BATCH = -1
"""The number under which the host records these runs of the step, which are forgotten."""


def unnoticed(job: Job) -> ExitStack:
    """A context without gradients, output, logs, and communication with others.

    Random streams, and what steps change outside of the module, are as before afterwards.
    """
    stack, device = ExitStack(), job.device
    stack.enter_context(outside_kept(job.module))
    stack.enter_context(unmoved(holders(job.module)[1]))
    stack.enter_context(undisturbed())
    stack.enter_context(fork_rng([] if device.type == "cpu" else [device]))
    stack.enter_context(redirect_stdout(StringIO()))
    stack.enter_context(job.host.unheard())
    # torch.compile does not work under a dispatch mode, and remembers that for functions compiled there
    stack.enter_context(torch.compiler.set_stance("force_eager"))
    stack.enter_context(torch.no_grad())
    stack.enter_context(job.control.mesh.peers(alone=True))
    stack.enter_context(Neutral())  # type: ignore[no-untyped-call]
    return stack


def copy_for(job: Job, step: UserStep) -> nn.Module:
    """A copy of the module on which a step can run with results of its network calls."""
    copied = step_copy(job.module, step.network.recording.changed_by_step())
    vars(copied).update(job.host.stand_ins(copied))
    return copied
