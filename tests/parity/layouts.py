"""Layouts: how the stages of a subject lie on devices, and what plan that gives."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.capture import Capture
from lightning_gpp.plan import STEP, Plan, Stage
from lightning_gpp.planning.assignment.assign import make_plan
from tests.parity.models import Subject


@dataclass(frozen=True, kw_only=True)
class Layout:
    """`num_stages` of 2, 3 or 4 (joined from the subject's), each on its devices with its micro-batch size.

    `recompute`: all stages but the step's.
    """

    devices: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    num_pipelines: int = 1
    recompute: bool = False

    @property
    def world_size(self) -> int:
        return self.num_pipelines * (1 + max(device for devices in self.devices for device in devices))


TWO = {
    "2 ranks": Layout(devices=((1,), (0,)), sizes=(2, 2)),
    "2 ranks, recomputed": Layout(devices=((1,), (0,)), sizes=(2, 2), recompute=True),
    "uneven last micro-batch": Layout(devices=((1,), (0,)), sizes=(3, 3)),
    "unequal micro-batch sizes": Layout(devices=((1,), (0,)), sizes=(4, 2)),
}
FOUR = {
    "replicated stage": Layout(devices=((2, 3), (1,), (0,)), sizes=(4, 2, 2)),
    "replicated pipeline": Layout(devices=((1,), (0,)), sizes=(2, 2), num_pipelines=2),
    "4 ranks": Layout(devices=((3,), (2,), (1,), (0,)), sizes=(2, 2, 2, 2)),
    "replicated stage, recomputed": Layout(devices=((2, 3), (1,), (0,)), sizes=(4, 2, 2), recompute=True),
}


def joined(subject: Subject, count: int) -> list[list[str]]:
    """The subject's stages as `count` of them; one with three stages has two of them on one device of four."""
    stages = subject.stages
    if count >= len(stages):
        return stages
    if count == 2:
        return subject.halves()
    return [stages[0], sum(stages[1:-1], []), stages[-1]]


def plan_of(captured: Capture, subject: Subject, layout: Layout, schedule: str) -> Plan:
    modules = [tuple(part) for part in joined(subject, len(layout.devices))]
    skipped = len(layout.devices) - len(modules)
    devices, sizes = list(layout.devices), list(layout.sizes)
    if skipped:  # a subject of three stages on four devices: the first is replicated
        devices, sizes = [(3, 2), (1,), (0,)], [2, 2, 2]
    if subject.whole_batch:
        sizes[-1] = captured.batch_size
    modules[-1] = (*modules[-1], STEP)
    drafts = [
        Stage(name=f"s{i}", modules=m, devices=d, micro_batch_size=b, recompute=layout.recompute and STEP not in m)
        for i, (m, d, b) in enumerate(zip(modules, devices, sizes, strict=True))
    ]
    return make_plan(captured.graph, drafts, batch_size=captured.batch_size, schedule=schedule)
