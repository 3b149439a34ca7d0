"""The costs of a draft's stages: seconds and bytes of one replica per micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from lightning_gpp.planning.problem.draft import DraftStage
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.units import Value
from lightning_gpp.schedules.work import warm_up_peak


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """Figures of a stage replica: seconds and bytes per micro-batch, permanent bytes, seconds of its all-reduce.

    `again`: seconds of running the forward again before the backward.
    """

    forward: float
    again: float
    backward: float
    kept_bytes: float
    working_bytes: float
    static_bytes: float
    all_reduce: float

    def peak(self, in_flight: int) -> float:
        """The most bytes that the replica holds at a time."""
        return warm_up_peak(self.static_bytes, self.kept_bytes, self.working_bytes, in_flight)


def stage_figures(problem: Problem, stage: DraftStage) -> StageFigures:
    """The costs of one replica of a stage on the slowest kind of its devices."""
    units = list(stage.units)
    kinds = {problem.cluster.kind(device) for device in stage.devices}
    seconds = [problem.seconds(stage.share, kind) for kind in kinds]
    forward = max(float(entry.forward[units].sum()) for entry in seconds)
    backward = max(float((entry.input_gradient + entry.weight_gradient)[units].sum()) for entry in seconds)
    saved = float(problem.saved_bytes(stage.share)[units].sum())
    late, kept, working = 0.0, saved, 0.0
    if stage.recompute is True:
        kept, working = input_bytes(problem, stage), saved
    elif stage.recompute:
        late, kept, working = _with_blocks(problem, stage, stage.recompute, kinds, saved)
    return StageFigures(
        forward=forward,
        again=forward if stage.recompute is True else 0.0,
        backward=backward + late,
        kept_bytes=kept,
        working_bytes=working,
        static_bytes=static_bytes(problem, stage, "none"),
        all_reduce=all_reduce_seconds(problem, stage),
    )


def _with_blocks(
    problem: Problem, stage: DraftStage, paths: Iterable[str], kinds: Iterable[int], saved: float
) -> tuple[float, float, float]:
    """Seconds of the blocks that run again, and bytes that are kept, and that one block needs."""
    numbers = problem.numbers_of_blocks(paths)
    figures = [problem.block_figures(stage.share, kind).of(numbers) for kind in kinds]
    first = figures[0]
    seconds = max(float(entry.seconds.sum()) for entry in figures)
    return seconds, saved - float(first.freed.sum()), float(first.saved.max(initial=0.0))


def static_bytes(problem: Problem, stage: DraftStage, sharding: str) -> float:
    """Bytes of weights, gradients and the optimizer's state on one of the stage's replicas."""
    parameters = float(problem.parameter_bytes[list(stage.units)].sum())
    return parameters * problem.copies(len(stage.devices), sharding)


def all_reduce_seconds(problem: Problem, stage: DraftStage) -> float:
    """Seconds of the all-reduce of a stage's gradients over its replicas."""
    if len(stage.devices) == 1 or not problem.footprint.training:
        return 0.0
    return problem.cluster.all_reduce_seconds(stage.devices, float(problem.parameter_bytes[list(stage.units)].sum()))


def input_bytes(problem: Problem, stage: DraftStage) -> float:
    """Bytes, data included, that a replica of a stage receives per micro-batch."""
    inside = set(stage.units)
    values = (*problem.units.values, *problem.units.data)
    read = (value for value in values if value.src not in inside and read_by(value, inside))
    return sum(value.bytes.at(stage.share) for value in read)


def read_by(value: Value, units: Set[int]) -> bool:
    """True if one of the units reads the value."""
    return not units.isdisjoint(value.dsts)
