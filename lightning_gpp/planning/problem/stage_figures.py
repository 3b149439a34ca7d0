"""The figures of a draft's stages on their devices: seconds and bytes of one member of a replica."""

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

    `again`: seconds before the backward, of running the forward again, or of copies to and from the host that neither
    the forward nor the backward hides. `offloaded_bytes`: bytes besides `kept_bytes`, in host memory in between.
    """

    forward: float
    again: float
    backward: float
    kept_bytes: float
    working_bytes: float
    static_bytes: float
    all_reduce: float
    offloaded_bytes: float = 0.0

    def peak(self, in_flight: int) -> float:
        """The most bytes that the replica holds at a time."""
        return warm_up_peak(
            self.static_bytes, self.kept_bytes, self.working_bytes, in_flight, offloaded=self.offloaded_bytes
        )


def stage_figures(problem: Problem, stage: DraftStage) -> StageFigures:
    """The costs of one replica of a stage, of one member of it, on the slowest kind of its devices."""
    problem, units = problem.of_members(stage.members), list(stage.units)
    kinds = {problem.cluster.kind(device) for device in stage.devices}
    seconds = [problem.seconds(stage.share, kind) for kind in kinds]
    forward = max(float(entry.forward[units].sum()) for entry in seconds)
    backward = max(float((entry.input_gradient + entry.weight_gradient)[units].sum()) for entry in seconds)
    saved = float(problem.saved_bytes(stage.share)[units].sum())
    late, kept, working, offloaded = 0.0, saved, 0.0, 0.0
    again = forward if stage.recompute is True else 0.0
    if stage.offload:
        kept = input_bytes(problem, stage, trained=True)
        offloaded = max(0.0, saved - kept)
        again = max(_not_hidden(problem, kind, offloaded, (forward, backward)) for kind in kinds)
    elif stage.recompute is True:
        kept, working = input_bytes(problem, stage), saved
    elif stage.recompute:
        late, kept, working = _with_blocks(problem, stage, stage.recompute, kinds, saved)
    return StageFigures(
        forward=forward,
        again=again,
        backward=backward + late,
        kept_bytes=kept,
        working_bytes=working,
        static_bytes=static_bytes(problem, stage, "none"),
        all_reduce=all_reduce_seconds(problem, stage),
        offloaded_bytes=offloaded,
    )


def _not_hidden(problem: Problem, kind: int, num_bytes: float, computing: Iterable[float]) -> float:
    """Seconds by which copies of these bytes to the host and back take longer than the computing that hides them."""
    link = problem.cluster.kinds[kind].host_bytes_per_second
    return sum(max(0.0, num_bytes / link - seconds) for seconds in computing) if link else 0.0


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
    return weight_bytes(problem, stage) * problem.copies(len(stage.devices), sharding)


def weight_bytes(problem: Problem, stage: DraftStage) -> float:
    """Bytes of the weights of one member of a stage's replica."""
    return float(problem.of_members(stage.members).parameter_bytes[list(stage.units)].sum())


def loaded_bytes(problem: Problem, stage: DraftStage, num_pipelines: int) -> float:
    """Bytes of the mini-batch of one of these pipelines, if the stage is on the device that loads it."""
    if 0 not in stage.devices:
        return 0.0
    return problem.data_bytes.at(problem.batch_size // problem.num_slices // num_pipelines)


def all_reduce_seconds(problem: Problem, stage: DraftStage) -> float:
    """Seconds of the all-reduce of a stage's gradients over its replicas."""
    if len(stage.devices) == 1 or not problem.footprint.training:
        return 0.0
    cluster = problem.of_members(stage.members).cluster
    return cluster.all_reduce_seconds(stage.devices, weight_bytes(problem, stage))


def input_bytes(problem: Problem, stage: DraftStage, *, trained: bool = False) -> float:
    """Bytes, data included, that a replica of a stage receives per micro-batch. `trained`: those that get gradients."""
    inside = set(stage.units)
    values = [value for value in problem.units.values if value.num_directions == 2 or not trained]
    values += problem.units.data if not trained else ()
    read = (value for value in values if value.src not in inside and read_by(value, inside))
    return sum(value.bytes.at(stage.share) for value in read)


def read_by(value: Value, units: Set[int]) -> bool:
    """True if one of the units reads the value."""
    return not units.isdisjoint(value.dsts)
