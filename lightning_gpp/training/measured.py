"""What the ranks measured, put together on one clock."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Action
from lightning_gpp.simulation import Span, Timeline
from lightning_gpp.training.control import Control

Timings: TypeAlias = "Sequence[tuple[Action, float, float]]"
"""What a device did in one mini-batch: action, start and stop, in seconds of its own clock."""


def gathered(timings: Mapping[int, Timings], plan: Plan, control: Control) -> list[Timeline]:
    """The timelines of all mini-batches and pipelines, on all ranks. All ranks must call it.

    Processes of one machine read the same clock. Those of others are set by a barrier, which all leave at about the
    same time: their times are as exact as that.

    Args:
        timings: of this rank, by the number of the mini-batch; the ranks of a pipeline have the same.
        plan: of the stages.
        control: who this rank is.
    """
    control.barrier()
    ranks = control.gather((socket.gethostname(), time.perf_counter(), dict(timings)))
    (host, clock, _), timelines = ranks[0], []
    shifts = [0.0 if other == host else clock - theirs for other, theirs, _ in ranks]
    for pipeline in range(control.num_pipelines):
        members = [control.mesh.global_rank(device, pipeline) for device in range(control.num_devices)]
        for number in sorted(ranks[members[0]][2]):
            spans = (_spans(ranks[rank][2][number], shifts[rank]) for rank in members)
            timelines.append(Timeline(stages=tuple(stage.name for stage in plan.stages), devices=tuple(spans)))
    return timelines


def _spans(timings: Timings, shift: float) -> tuple[Span, ...]:
    return tuple(Span(action, start + shift, stop + shift) for action, start, stop in timings)
