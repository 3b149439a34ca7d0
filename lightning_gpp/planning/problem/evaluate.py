"""The evaluator: step time of a draft, with warm-up, drain and all-reduces of gradients, and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from lightning_gpp.errors import ScheduleError
from lightning_gpp.plan import topological
from lightning_gpp.planning.problem.draft import (
    Draft,
    DraftStage,
    Flow,
    Recompute,
    flows,
    stage_of_units,
    unreplicated,
    with_chain,
)
from lightning_gpp.planning.problem.pipeline_clock import ClockedStages, period_seconds, step_seconds
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.stage_figures import (
    Recomputation,
    StageFigures,
    StageMemory,
    Transfers,
    all_reduce_seconds,
    contend,
    input_bytes,
    loaded_bytes,
    stage_figures,
    static_bytes,
    weight_bytes,
)
from lightning_gpp.planning.problem.units import Value
from lightning_gpp.schedules.one_f_one_b import samples_in_flight

_Anywhere = tuple[tuple[int, ...], int, Recompute, bool, frozenset[int]]
"""Units, samples of a share, what is recomputed, whether the rest is offloaded, and kinds of devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The evaluation of a draft.

    Args:
        seconds: step time, or the period of a pipeline that does not flush; infinite if the stages form a cycle,
            or are further ahead than the weight policy allows.
        excess_bytes: the most bytes by which a device exceeds its memory; 0 if all fit.
        peak_bytes: peak memory of a device of each stage.
        in_flight: micro-batches in flight on each stage.
    """

    seconds: float
    excess_bytes: float = 0.0
    peak_bytes: tuple[float, ...] = ()
    in_flight: tuple[int, ...] = ()

    @property
    def fits(self) -> bool:
        return self.excess_bytes <= 0 and self.seconds < inf

    @property
    def rank(self) -> tuple[float, float]:
        """The objective of searches: excess of memory first, then time."""
        return (max(0.0, self.excess_bytes), self.seconds) if self.seconds < inf else (inf, inf)


@dataclass(slots=True, kw_only=True, eq=False)
class _Fitted:
    """The stages of a draft in topological order, with the measures with which they fit their devices, or come closest
    to it.

    Args:
        position: the place of each of the draft's stages in this order.
        stages: the stages.
        edges: the data flow between them.
        copies: pipeline replicas that they are.
        number: number of micro-batches.
        counts: micro-batches in flight on each stage.
        limits: memory of each stage's smallest device.
        besides: bytes on each stage for the data, and for weights that are not computed with.
        sharding: what replicas split.
        figures: of each stage.
        peaks: bytes on each stage for the rest.
    """

    position: list[int]
    stages: list[DraftStage]
    edges: Mapping[tuple[int, int], Flow]
    copies: int
    number: int
    counts: list[int]
    limits: list[float]
    besides: list[float] = field(default_factory=list)
    sharding: str = "none"
    figures: list[StageFigures] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)

    def excess(self, stage: int) -> float:
        """Bytes that a stage needs beyond its memory; negative if some are left."""
        return self.peaks[stage] + self.besides[stage] - self.limits[stage]


@dataclass(slots=True, eq=False)
class Evaluator:
    """Evaluates drafts of one problem, and caches the costs of stages.

    Where a draft leaves it open, replicas split the optimizer's state only if stages would not fit otherwise, and
    stages then recompute as little as makes them fit, or keep activations in host memory if that takes less time.
    """

    problem: Problem
    evaluations: int = 0
    _figures: dict[tuple[DraftStage, str], StageFigures] = field(default_factory=dict)
    _anywhere: dict[_Anywhere, StageFigures] = field(default_factory=dict)
    _chosen: dict[tuple[DraftStage, StageMemory], Recompute] = field(default_factory=dict)
    _edges: tuple[list[tuple[int, ...]], dict[tuple[int, int], Flow]] = field(default_factory=lambda: ([], {}))
    _recomputation: Recomputation = field(init=False)
    _memory: list[float] = field(init=False)
    _transfers: Transfers = field(init=False)
    _rigid_units: list[int] = field(init=False)
    _rigid_values: list[Value] = field(init=False)

    def __post_init__(self) -> None:
        units = self.problem.units
        self._memory = self.problem.memory_bytes.tolist()
        self._recomputation, self._transfers = Recomputation(self.problem), Transfers(self.problem)
        self._rigid_units = [index for index, unit in enumerate(units.units) if not unit.divisible]
        self._rigid_values = [value for value in units.values if not value.sliceable]

    def __call__(self, draft: Draft) -> Evaluation:
        """Evaluate a draft; all stages must have the same micro-batch size."""
        self.evaluations += 1
        found = self._fitted(draft) if self._divisible(draft) else None
        if found is None:
            return Evaluation(seconds=inf)
        pipeline, busiest = self._pipeline(found)
        peaks = [peak + more for peak, more in zip(found.peaks, found.besides, strict=True)]
        return Evaluation(
            seconds=max(found.number * busiest, self._seconds(pipeline, found)),
            excess_bytes=float(max(0.0, *(peak - room for peak, room in zip(peaks, found.limits, strict=True)))),
            peak_bytes=tuple(peaks[index] for index in found.position),
            in_flight=tuple(found.counts[index] for index in found.position),
        )

    def fitted(self, draft: Draft) -> Draft:
        """The draft with what it leaves open: what its stages recompute or offload, and what replicas split."""
        found = self._fitted(draft)
        if found is None:
            return replace(draft, sharding="none")
        stages = (found.stages[index] for index in found.position)
        closed = tuple(replace(stage, recompute=stage.recompute or False) for stage in stages)
        return replace(draft, stages=closed, sharding=found.sharding)

    def _num_pipelines(self, draft: Draft) -> int:
        return unreplicated(self.problem, draft)[1] if self.problem.replicable else 1

    def _divisible(self, draft: Draft) -> bool:
        """True if every value that has to be cut into shares can be; pipeline replicas cut none."""
        if (not self._rigid_values and not self._rigid_units) or self._num_pipelines(draft) > 1:
            return True
        owner = stage_of_units(self.problem.num_units, draft.groups)
        replicas = [len(stage.devices) for stage in draft.stages]
        return all(replicas[owner[unit]] == 1 for unit in self._rigid_units) and all(
            replicas[owner[value.src]] == replicas[owner[dst]] for value in self._rigid_values for dst in value.dsts
        )

    def edges(self, draft: Draft) -> dict[tuple[int, int], Flow]:
        """Data flow between the stages of a draft, on any devices. Cached for the most recent set of stages."""
        units = [stage.units for stage in draft.stages]
        if units != self._edges[0]:
            self._edges = units, flows(self.problem, units)
        return self._edges[1]

    def _fitted(self, draft: Draft) -> _Fitted | None:
        """The stages with the cheapest measures; None if they form a cycle, or are too far ahead for their weights.

        A last stage with replicas gives the user's step to a stage of its own, unless these are pipeline replicas. That
        adds one to the depth; what the stage sends there takes no time here.
        """
        edges = self.edges(draft)
        order = topological(edges, len(draft.stages))
        if not order:
            return None
        position = sorted(range(len(order)), key=order.__getitem__)
        stages = [draft.stages[index] for index in order]
        edges = {(position[a], position[b]): flow for (a, b), flow in edges.items()}
        if draft.chained:
            edges = with_chain(edges, len(stages))
        copies, number = self._num_pipelines(draft), -(-self.problem.batch_size // stages[0].micro_batch_size)
        apart = self.problem.single_step and len(stages[-1].devices) > 1 and copies == 1
        counts = self._in_flight([stage.slack for stage in stages], edges, draft.schedule, number, apart)
        limits = [min(self._memory[device] for device in stage.devices) for stage in stages]
        found = _Fitted(
            position=position, stages=stages, edges=edges, copies=copies, number=number, counts=counts, limits=limits
        )
        try:
            found.besides = [self._besides(*entry, found) for entry in zip(stages, counts, strict=True)]
        except ScheduleError:
            return None
        self._fit(found, draft.sharding or self.problem.sharding)
        return found

    def _besides(self, stage: DraftStage, in_flight: int, found: _Fitted) -> float:
        """Bytes of the data, and of the weights that a stage keeps besides the newest.

        Its delay follows from the micro-batches by which its forwards are ahead of its backwards.
        """
        loaded = loaded_bytes(self.problem, stage, found.copies)
        if self.problem.weight_copies is None:
            return loaded
        delay = -(-(in_flight - 1) // found.number)
        return self.problem.weight_copies(delay) * weight_bytes(self.problem, stage) + loaded

    def _fit(self, found: _Fitted, sharding: str) -> None:
        """Choose the cheapest measures."""
        self._close(found, "none" if sharding == "auto" else sharding)
        stages = range(len(found.stages))
        if sharding == "auto" and any(found.excess(stage) > 0 for stage in stages):
            self._close(found, "zero1")
        if None in (self.problem.recompute, self.problem.offload):
            for stage in stages:
                if found.excess(stage) > 0 and found.stages[stage].recompute is None:
                    self._reduce(found, stage)

    def _close(self, found: _Fitted, sharding: str) -> None:
        """Let stages recompute and offload only what drafts or the problem demand."""
        last, stages = self.problem.num_units - 1, found.stages
        if self.problem.recompute is True:
            again = (last not in stage.units if stage.recompute is None else stage.recompute for stage in stages)
            stages = [replace(stage, recompute=value) for stage, value in zip(stages, again, strict=True)]
        if self.problem.offload is True:
            stages = [replace(stage, offload=True) if self._may_offload(stage) else stage for stage in stages]
        found.stages, found.sharding = stages, sharding
        found.figures = [self.figures(stage, sharding) for stage in stages]
        found.peaks = [entry.peak(count) for entry, count in zip(found.figures, found.counts, strict=True)]

    def _may_offload(self, stage: DraftStage) -> bool:
        """True if a stage neither runs the user's step nor runs again, and the links to its hosts are known."""
        devices = (self.problem.cluster.devices[device] for device in stage.devices)
        known = self.problem.offload is True or all(device.host_bytes_per_second for device in devices)
        return known and not stage.recompute and self.problem.num_units - 1 not in stage.units

    def _reduce(self, found: _Fitted, index: int) -> None:
        """Let a stage that does not fit recompute or offload, whichever makes it fit in less time."""
        stage, in_flight, room = found.stages[index], found.counts[index], found.limits[index] - found.besides[index]
        ways = []
        if self.problem.recompute is None and not stage.offload:
            ways.append(self._recomputing(stage, found.figures[index], in_flight, room))
        if self.problem.offload is None and self._may_offload(stage):
            ways.append(replace(stage, recompute=False, offload=True))

        def rank(way: DraftStage) -> tuple[float, float]:
            figures = self.figures(way, found.sharding)
            return max(0.0, figures.peak(in_flight) - room), figures.again + figures.backward

        stage = found.stages[index] = min(ways, key=rank, default=stage)
        figures = found.figures[index] = self.figures(stage, found.sharding)
        found.peaks[index] = figures.peak(in_flight)

    def _recomputing(self, stage: DraftStage, figures: StageFigures, in_flight: int, room: float) -> DraftStage:
        """The stage with as little recomputation as makes it fit."""
        saved, room = figures.kept_bytes, room - figures.static_bytes
        may_rerun = self.problem.num_units - 1 not in stage.units
        rerun = in_flight * input_bytes(self.problem, stage) + saved - room if may_rerun else inf
        memory = StageMemory(in_flight * saved - room, rerun, in_flight)
        key = stage, memory
        if key not in self._chosen:
            blocks = self.problem.block_figures(stage.share, self.problem.cluster.kind(stage.devices[0]))
            self._chosen[key] = self._recomputation.cheapest(stage.units, memory, blocks)
        return replace(stage, recompute=self._chosen[key])

    def _in_flight(
        self, slack: Sequence[int], edges: Mapping[tuple[int, int], Flow], schedule: str, number: int, apart: bool
    ) -> list[int]:
        """The most micro-batches in flight on each stage; without a flush, of several mini-batches."""
        most = len(slack) + 1 if self.problem.continuous else number
        if schedule == "gpipe":
            return [most] * len(slack)
        successors: list[list[int]] = [[] for _ in slack]
        waiting = {src for (src, _), flow in edges.items() if flow.differentiable}
        for src, dst in edges:
            if src in waiting:
                successors[src].append(dst)
        samples = samples_in_flight([1] * len(slack), successors, slack=slack)
        return [min(most, count + apart) for count in samples]

    def _seconds(self, pipeline: ClockedStages, found: _Fitted) -> float:
        """Seconds of a mini-batch: without a flush those of the busiest stage or link, else of the whole step."""
        all_reduce = [entry.all_reduce for entry in found.figures]
        if self.problem.continuous:
            return period_seconds(pipeline, found.number, all_reduce)
        return step_seconds(pipeline, found.counts, found.number, all_reduce)

    def _pipeline(self, found: _Fitted) -> tuple[ClockedStages, float]:
        """The pipeline to simulate, and the seconds per micro-batch for which the busiest port is occupied."""
        stages, figures, between = found.stages, found.figures, self._transfers.between
        forwards = {(a, b): between(stages[a], stages[b], flow.forward) for (a, b), flow in found.edges.items()}
        differentiable = ((pair, flow) for pair, flow in found.edges.items() if flow.differentiable)
        backwards = {(a, b): between(stages[b], stages[a], flow.backward) for (a, b), flow in differentiable}
        sent, returned = ({pair: entry.seconds for pair, entry in way.items()} for way in (forwards, backwards))
        busiest = 0.0
        if self.problem.cluster.contended:
            busiest = contend(((forwards, sent), (backwards, returned)))
        pipeline = ClockedStages(
            forward=[entry.forward for entry in figures],
            again=[entry.again for entry in figures],
            backward=[entry.backward for entry in figures],
            data=[self._transfers.of_data(stage, found.copies > 1) for stage in stages],
            sent=sent,
            returned=returned,
        )
        return pipeline, busiest

    def figures(self, stage: DraftStage, sharding: str = "none") -> StageFigures:
        """The costs of one replica of a stage on the slowest kind of its devices."""
        key = stage, sharding
        if key not in self._figures:
            kinds = frozenset(map(self.problem.cluster.kind, stage.devices))
            place = stage.units, stage.share, stage.recompute or False, stage.offload, kinds
            if place not in self._anywhere:
                self._anywhere[place] = stage_figures(self.problem, stage)
            self._figures[key] = replace(
                self._anywhere[place],
                static_bytes=static_bytes(self.problem, stage, sharding),
                all_reduce=all_reduce_seconds(self.problem, stage),
            )
        return self._figures[key]
