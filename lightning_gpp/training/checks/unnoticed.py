"""Runs of the user's step without a trace, on copies of the module and with given results of its network calls."""

from __future__ import annotations

from contextlib import ExitStack, redirect_stdout
from io import StringIO

import torch
from torch.random import fork_rng

from lightning_gpp.runtime.neutral import Neutral
from lightning_gpp.runtime.random import undisturbed
from lightning_gpp.training.host import Job


def unnoticed(job: Job) -> ExitStack:
    """A context without gradients, output, logs, and communication with others; random streams are kept."""
    stack, device = ExitStack(), job.device
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
