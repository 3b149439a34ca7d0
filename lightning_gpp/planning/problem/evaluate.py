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
        recompute: what each stage recomputes.
        offload: whether each stage keeps activations in host memory.
        sharding: what replicas split.
    """

    seconds: float
    excess_bytes: float = 0.0
    peak_bytes: tuple[float, ...] = ()
    in_flight: tuple[int, ...] = ()
    recompute: tuple[Recompute, ...] = ()
    offload: tuple[bool, ...] = ()
    sharding: str = "none"

    @property
    def fits(self) -> bool:
        return self.excess_bytes <= 0 and self.seconds < inf

    @property
    def rank(self) -> tuple[float, float]:
        """The objective of searches: excess of memory first, then time."""
        return (max(0.0, self.excess_bytes), self.seconds) if self.seconds < inf else (inf, inf)


@dataclass(slots=True, eq=False)
class _Fitted:
    """Stages with the measures with which they fit their devices, or come closest to it."""

    stages: list[DraftStage]
    figures: list[StageFigures]
    peaks: list[float]
    sharding: str


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
        return self._of(draft, simulated=True)

    def fitted(self, draft: Draft) -> Draft:
        """The draft with what it leaves open: what its stages recompute or offload, and what replicas split."""
        found = self._of(draft, simulated=False)
        stages = draft.stages
        if found.recompute:
            measures = zip(stages, found.recompute, found.offload, strict=True)
            stages = tuple(replace(stage, recompute=again, offload=moved) for stage, again, moved in measures)
        return replace(draft, stages=stages, sharding=found.sharding)

    def _of(self, draft: Draft, *, simulated: bool) -> Evaluation:
        edges = self.edges(draft)
        order = topological(edges, len(draft.stages))
        if not order or (simulated and not self._divisible(draft)):
            return Evaluation(seconds=inf)
        position = {stage: index for index, stage in enumerate(order)}
        stages = [draft.stages[index] for index in order]
        edges = {(position[a], position[b]): flow for (a, b), flow in edges.items()}
        if draft.chained:
            edges = with_chain(edges, len(stages))
        return self._evaluate(stages, edges, draft, order, simulated, self._num_pipelines(draft))

    def _num_pipelines(self, draft: Draft) -> int:
        return unreplicated(self.problem, draft)[1] if self.problem.replicable else 1

    def _divisible(self, draft: Draft) -> bool:
        """True if every value that has to be cut into shares can be; pipeline replicas cut none."""
        if (not self._rigid_values and not self._rigid_units) or self._num_pipelines(draft) > 1:
            return True
        owner = stage_of_units(self.problem.num_units, [stage.units for stage in draft.stages])
        replicas = [len(stage.devices) for stage in draft.stages]
        return all(replicas[owner[unit]] == 1 for unit in self._rigid_units) and all(
            replicas[owner[value.src]] == replicas[owner[dst]] for value in self._rigid_values for dst in value.dsts
        )

    def edges(self, draft: Draft) -> dict[tuple[int, int], Flow]:
        """Data flow between the stages of a draft, on any devices. Cached for the most recent set of stages."""
        units = [stage.units for stage in draft.stages]
        if units != self._edges[0]:
            self._edges = units, flows(self.problem, stage_of_units(self.problem.num_units, units))
        return self._edges[1]

    def _evaluate(
        self,
        stages: Sequence[DraftStage],
        edges: Mapping[tuple[int, int], Flow],
        draft: Draft,
        order: Sequence[int],
        simulated: bool,
        num_pipelines: int,
    ) -> Evaluation:
        """Evaluate stages of `num_pipelines` pipeline replicas.

        If there is one, a last stage with replicas gives the user's step to a stage of its own, which adds one to the
        depth, and whose one device holds a whole micro-batch; what it sends there takes no time here.
        """
        apart = self.problem.single_step and len(stages[-1].devices) > 1 and num_pipelines == 1
        size = stages[0].micro_batch_size
        number = -(-self.problem.batch_size // size)
        counts = self._in_flight([stage.slack for stage in stages], edges, draft.schedule, number, apart)
        try:
            copied = [self._copied_bytes(stage, count, number) for stage, count in zip(stages, counts, strict=True)]
        except ScheduleError:
            return Evaluation(seconds=inf)
        loaded = [loaded_bytes(self.problem, stage, num_pipelines) for stage in stages]
        besides = [sum(entry) for entry in zip(copied, loaded, strict=True)]
        if apart:
            step, held = self.problem.step_bytes, counts[-1] if draft.schedule == "gpipe" else 1
            besides[-1] += held * step.at(size) - counts[-1] * step.at(stages[-1].share)
        limits = [min(self._memory[device] for device in stage.devices) for stage in stages]
        fitted = self._fit(stages, counts, [room - more for room, more in zip(limits, besides, strict=True)], draft)
        pipeline, busiest = self._pipeline(stages, fitted.figures, edges, num_pipelines > 1)
        peaks = [peak + more for peak, more in zip(fitted.peaks, besides, strict=True)]
        place = sorted(range(len(order)), key=order.__getitem__)
        return Evaluation(
            seconds=max(number * busiest, self._seconds(pipeline, counts, number, fitted.figures))
            if simulated
            else 0.0,
            excess_bytes=float(max(0.0, *(peak - room for peak, room in zip(peaks, limits, strict=True)))),
            peak_bytes=tuple(peaks[index] for index in place),
            in_flight=tuple(counts[index] for index in place),
            recompute=tuple(fitted.stages[index].recompute or False for index in place),
            offload=tuple(fitted.stages[index].offload for index in place),
            sharding=fitted.sharding,
        )

    def _fit(
        self, stages: Sequence[DraftStage], counts: Sequence[int], rooms: Sequence[float], draft: Draft
    ) -> _Fitted:
        """The cheapest measures. `rooms`: bytes for the weights that are computed with, and for micro-batches."""
        wanted = draft.sharding or self.problem.sharding
        found = self._sharded(stages, counts, "none" if wanted == "auto" else wanted)
        excess = [peak > room for peak, room in zip(found.peaks, rooms, strict=True)]
        if wanted == "auto" and any(excess):
            found = self._sharded(stages, counts, "zero1")
            excess = [peak > room for peak, room in zip(found.peaks, rooms, strict=True)]
        if any(excess) and None in (self.problem.recompute, self.problem.offload):
            for index, room in enumerate(rooms):
                if excess[index] and found.stages[index].recompute is None:
                    self._reduce(found, index, counts[index], room)
        return found

    def _sharded(self, stages: Sequence[DraftStage], counts: Sequence[int], sharding: str) -> _Fitted:
        """Stages that recompute and offload only what drafts or the problem demand."""
        if self.problem.recompute is True:
            last = self.problem.num_units - 1
            stages = [
                replace(stage, recompute=last not in stage.units) if stage.recompute is None else stage
                for stage in stages
            ]
        if self.problem.offload is True:
            stages = [replace(stage, offload=True) if self._may_offload(stage) else stage for stage in stages]
        figures = [self.figures(stage, sharding) for stage in stages]
        peaks = [entry.peak(count) for entry, count in zip(figures, counts, strict=True)]
        return _Fitted([*stages], figures, peaks, sharding)

    def _may_offload(self, stage: DraftStage) -> bool:
        """True if a stage neither runs the user's step nor runs again, and the links to its hosts are known."""
        devices = (self.problem.cluster.devices[device] for device in stage.devices)
        known = self.problem.offload is True or all(device.host_bytes_per_second for device in devices)
        return known and not stage.recompute and self.problem.num_units - 1 not in stage.units

    def _reduce(self, fitted: _Fitted, index: int, in_flight: int, room: float) -> None:
        """Let a stage that does not fit recompute or offload, whichever makes it fit in less time."""
        stage = fitted.stages[index]
        ways = []
        if self.problem.recompute is None and not stage.offload:
            ways.append(self._recomputing(fitted, index, in_flight, room))
        if self.problem.offload is None and self._may_offload(stage):
            ways.append(replace(stage, recompute=False, offload=True))

        def rank(way: DraftStage) -> tuple[float, float]:
            figures = self.figures(way, fitted.sharding)
            return max(0.0, figures.peak(in_flight) - room), figures.again + figures.backward

        stage = fitted.stages[index] = min(ways, key=rank, default=stage)
        figures = fitted.figures[index] = self.figures(stage, fitted.sharding)
        fitted.peaks[index] = figures.peak(in_flight)

    def _recomputing(self, fitted: _Fitted, index: int, in_flight: int, room: float) -> DraftStage:
        """The stage with as little recomputation as makes it fit."""
        stage, figures = fitted.stages[index], fitted.figures[index]
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

    def _copied_bytes(self, stage: DraftStage, in_flight: int, number: int) -> float:
        """Bytes of the weights that a stage keeps besides the newest.

        Its delay follows from the micro-batches by which its forwards are ahead of its backwards.
        """
        if self.problem.weight_copies is None:
            return 0.0
        delay = -(-(in_flight - 1) // number)
        return self.problem.weight_copies(delay) * weight_bytes(self.problem, stage)

    def _seconds(
        self,
        pipeline: ClockedStages,
        counts: Sequence[int],
        number: int,
        figures: Sequence[StageFigures],
    ) -> float:
        """Seconds of a mini-batch: without a flush those of the busiest stage or link, else of the whole step."""
        all_reduce = [entry.all_reduce for entry in figures]
        if self.problem.continuous:
            return period_seconds(pipeline, number, all_reduce)
        return step_seconds(pipeline, counts, number, all_reduce)

    def _pipeline(
        self,
        stages: Sequence[DraftStage],
        figures: Sequence[StageFigures],
        edges: Mapping[tuple[int, int], Flow],
        copies: bool,
    ) -> tuple[ClockedStages, float]:
        """The pipeline to simulate, and the seconds per micro-batch for which the busiest port is occupied."""
        forwards = {
            (a, b): self._transfers.between(stages[a], stages[b], flow.forward) for (a, b), flow in edges.items()
        }
        backwards = {
            (a, b): self._transfers.between(stages[b], stages[a], flow.backward)
            for (a, b), flow in edges.items()
            if flow.differentiable
        }
        sent, returned = ({pair: entry.seconds for pair, entry in way.items()} for way in (forwards, backwards))
        busiest = 0.0
        if self.problem.cluster.contended:
            busiest = contend(((forwards, sent), (backwards, returned)))
        pipeline = ClockedStages(
            forward=[entry.forward for entry in figures],
            again=[entry.again for entry in figures],
            backward=[entry.backward for entry in figures],
            data=[self._transfers.of_data(stage, copies) for stage in stages],
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
