"""Measures what 8-bit edges save, and how they change the network's results, on the first micro-batch of a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpp.capture.batch import GUESSED, slice_batch
from lightning_gpp.capture.record import step_arguments
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.reports.units import size
from lightning_gpp.runtime.boundary import DTYPES
from lightning_gpp.runtime.codecs import Form
from lightning_gpp.runtime.stage import MicroBatch, Slot
from lightning_gpp.stages.step import Invocation
from lightning_gpp.training.host import Job
from lightning_gpp.training.measured.eight_bit import Slots, edge_name, matching
from lightning_gpp.training.session import Session


@dataclass(slots=True, eq=False)
class NetworkResults:
    """A stage that stands in for the user's step, and keeps what the step would read: the results of the network."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    uses_random: bool = False
    parts: Sequence[nn.Module] = ()

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Keep the values; there is no result."""
        self.tensors = dict(values)
        return {}


MakeSession = Callable[[Sequence[str], NetworkResults], Session]
"""Makes a session with 8-bit edges of these patterns, in which a stage replaces the user's step."""


def tell_error(
    job: Job, step: str, plan: Plan, patterns: Sequence[str], make: MakeSession, batch: Any, batch_size: int
) -> None:
    """Tell the user what 8-bit edges save, and how they change the network's results for a micro-batch.

    All ranks of a pipeline call this together. The stages run twice, the user's step only up to its network calls.

    Args:
        job: the job of the run.
        step: name of the evaluation step.
        plan: its stages.
        patterns: patterns of the edges.
        make: makes the sessions to compare.
        batch: a mini-batch; used only on the rank that runs the step.
        batch_size: its samples.
    """
    edges = [index for index in matching(plan, patterns) if _between_devices(plan, index)]
    control = job.control
    if not edges or control.pipeline != 0 or job.options.self_check is False:
        return
    if reason := _refusal(plan):
        if control.runs_step:
            job.host.inform(f"The error of 8-bit edges in {step} is not measured: {reason}.")
        return
    samples = min(batch_size, *(stage.micro_batch_size for stage in plan.stages))
    part = slice_batch(batch, 0, samples, batch_size, job.options.batch_dims or GUESSED) if control.runs_step else None
    exact, changed = NetworkResults(), NetworkResults()
    sessions = make((), exact), make(patterns, changed)
    for session in sessions:
        _run(job, step, session, part, samples)
    if control.runs_step:
        names = ", ".join(edge_name(plan, plan.edges[index]) for index in edges)
        sent, otherwise = (size(_bytes(session.slots, edges, samples)) for session in reversed(sessions))
        job.host.inform(
            f"8-bit edges ({names}) send {sent} instead of {otherwise} for a micro-batch of {samples} samples in "
            f"{step}; {_error(exact.tensors, changed.tensors)}."
        )


def _between_devices(plan: Plan, index: int) -> bool:
    edge = plan.edges[index]
    return plan.devices_of(edge.src) != plan.devices_of(edge.dst)


def _refusal(plan: Plan) -> str:
    """Why a measurement is impossible; empty if it can be made."""
    if plan.sharding == "fsdp":
        return "with sharding=fsdp other pipelines would have to take part"
    if plan.stages[plan.step_stage].modules != (STEP,):
        return "the step is part of the last stage, so it cannot be left out"
    return ""


def _run(job: Job, step: str, session: Session, part: Any, samples: int) -> None:
    function = getattr(job.module, step)
    invoke = Invocation(function=function, rest=step_arguments(function, 0), around=job.host.around(step))
    session.run(part, invoke, samples, loss_weight=1.0, step=0)


def _bytes(slots: Slots, edges: Sequence[int], samples: int) -> int:
    return sum(_bytes_of(slot, samples) for edge in edges for slot in slots[edge])


def _bytes_of(slot: Slot, samples: int) -> int:
    spec = slot.spec
    shape, dtype, _ = slot.codec.travels(Form(spec.sizes(samples), DTYPES[spec.dtype], spec.batch_dim))
    return prod(shape) * dtype.itemsize


def _error(exact: Mapping[str, Tensor], changed: Mapping[str, Tensor]) -> str:
    pairs = [(tensor, changed[name]) for name, tensor in exact.items() if tensor.is_floating_point()]
    if not pairs:
        return "the network has no results in floating-point numbers to compare"
    expected, found = (torch.cat([tensor.double().flatten() for tensor in side]) for side in zip(*pairs, strict=True))
    same = found.isclose(expected, rtol=0, atol=0, equal_nan=True)
    difference = (found - expected).masked_fill(same, 0).nan_to_num(torch.inf)
    relative = difference.norm() / expected.norm()
    return f"the network's results change by at most {difference.abs().max():.2g}, in their norm by {relative:.2%}"
