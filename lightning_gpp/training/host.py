"""The host of an engine, that is the program around it, and the job that it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from lightning_gpp.capture.batch import GUESSED, UNCOUNTED, BatchDims
from lightning_gpp.checkpoints.stored import StoredValues
from lightning_gpp.plan import Plan
from lightning_gpp.runtime.bubbles import Bubbles
from lightning_gpp.stages.division import SAMPLES, Division
from lightning_gpp.stages.rows import owners_of
from lightning_gpp.training.control import Control, Mirror
from lightning_gpp.training.divided.tensor_parallel import TensorParallel
from lightning_gpp.training.options import Context, Options
from lightning_gpp.wording import spoken

log = logging.getLogger(__name__)

_PER_DEVICE: Final = 2
"""Micro-batches for each device of a pipeline, if they are not of equal numbers of samples and nobody says how many."""

TRAINING = "training_step"
"""The name of the training step."""


class Host:
    """Host for plain loops, and base class for frameworks that take part in every step.

    Args:
        context: makes the context in which modules compute, for example autocast.
        precision: the type that the context computes in; None for the type of the parameters.
    """

    def __init__(self, context: Context = nullcontext, precision: torch.dtype | None = None) -> None:
        self._context, self.precision = context, precision

    def context(self, step: str) -> Context:
        """Make the context in which the modules of a step compute, on all ranks."""
        return self._context

    def around(self, step: str, batch: int | None = None) -> Callable[[int, float], AbstractContextManager[Any]]:
        """A function that makes the context of a run of the user's step from its number of samples and what they count
        for, on the rank that runs it.

        `batch`: number of the mini-batch in training, which may run before its turn.
        """
        context = self.context(step)
        return lambda num_samples, share: context()

    def unheard(self) -> AbstractContextManager[Any]:
        """A context in which what the user's step tells loggers gets lost, for runs besides those of training."""
        return nullcontext()

    def forget(self, batches: range) -> None:
        """Forget mini-batches of training that were dropped before their turn; the step may have run on them."""

    def stand_ins(self, module: nn.Module) -> dict[str, Any]:
        """Attributes of a copy of the module that are replaced while its step runs without training: on fake tensors to
        find network calls, or again to compare losses.
        """
        return {}

    def facts(self) -> dict[str, str]:
        """Settings of training that all ranks must have alike, by the name under which users know them."""
        return {}

    def combine(self, reductions: Mapping[str, str]) -> None:
        """Combine the micro-batches' logged values of these names by a reduction, not as those of batches."""

    def received(self, batch: Any) -> None:
        """Note a mini-batch of a step as a whole, on all ranks, which had a placeholder of it before."""

    def inform(self, text: str) -> None:
        """Show the user a message that is not a warning. Called on global rank 0."""
        log.info(spoken(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A module on the ranks of a job, before there is a plan for it.

    Args:
        module: the user's module.
        control: the side channel of this rank.
        options: the user's options.
        device: the device of this rank.
        seed: seed of the random streams; the same on all ranks.
        num_nodes: number of machines of the job.
        host: the program that runs the engine.
        known: the plan of an earlier run, which evaluation keeps.
        stored: the state dict of a checkpoint folder, for tensors without memory.
        whole: whether the step that the engine is set up for runs as a whole, on all ranks.
        evaluates_whole: whether validation in training does, too.
        cuts_calls: whether network calls of a step as a whole may be cut into micro-batches.
        parallel: the tensor parallelism inside stages; None without.
        bubbles: has work for the time in which this rank waits for messages.
    """

    module: nn.Module
    control: Control
    options: Options
    device: torch.device
    seed: int
    num_nodes: int = 1
    host: Host = field(default_factory=Host)
    known: Plan | None = None
    stored: StoredValues | None = None
    whole: bool = False
    evaluates_whole: bool = False
    cuts_calls: bool = True
    parallel: TensorParallel | None = None
    bubbles: Bubbles = field(default_factory=Bubbles)

    @property
    def division(self) -> Division | None:
        """The division of mini-batches of training; None if it is into equal numbers of samples alone."""
        options = self.options
        if self.whole or (options.micro_batch_by == SAMPLES and not options.batch_rows):
            return None
        return Division(
            by=options.micro_batch_by,
            owners=owners_of(options.batch_rows or {}),
            number=options.num_micro_batches or _PER_DEVICE * self.control.num_devices,
            dims=options.batch_dims or GUESSED,
        )

    def dims_in(self, step: str) -> BatchDims:
        """The dimensions that count samples where a step is captured; none in micro-batches of their own sizes."""
        if step == TRAINING and self.division is not None:
            return UNCOUNTED
        return self.options.batch_dims or GUESSED

    def in_device(self, tree: Any) -> Any:
        """A structure of tensors that only the first member of a device has, such as a mini-batch, on all members."""
        return Mirror(self.control, self.device).in_device(tree)

    def shown(self) -> AbstractContextManager[None]:
        """Inside, tensors of which this process has a part are DTensors in the module."""
        return nullcontext() if self.parallel is None else self.parallel.shown(self.module)

    @property
    def precision(self) -> torch.dtype:
        """The least precise type that modules compute in."""
        kinds = [parameter.dtype for parameter in self.module.parameters() if parameter.is_floating_point()]
        return self.host.precision or min(kinds, key=lambda dtype: torch.finfo(dtype).bits, default=torch.float32)
