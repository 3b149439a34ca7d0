"""The figures of a draft's stages on their devices and of the transfers between them, and what stages recompute.

Figures of a stage are seconds and bytes of one replica. Transfers have seconds, and ports that they share.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.cluster import Link, Port
from lightning_gpp.graph import Affine
from lightning_gpp.plan import share_of
from lightning_gpp.planning.problem.draft import DraftStage, Recompute
from lightning_gpp.planning.problem.problem import Array, BlockFigures, Problem
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
    """The costs of one replica of a stage on the slowest kind of its devices."""
    units = list(stage.units)
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
    """Bytes of the weights of a stage."""
    return float(problem.parameter_bytes[list(stage.units)].sum())


def loaded_bytes(problem: Problem, stage: DraftStage, num_pipelines: int) -> float:
    """Bytes of the mini-batch of one of these pipelines, if the stage is on the device that loads it."""
    if 0 not in stage.devices:
        return 0.0
    return problem.data_bytes.at(problem.batch_size // problem.num_slices // num_pipelines)


def all_reduce_seconds(problem: Problem, stage: DraftStage) -> float:
    """Seconds of the all-reduce of a stage's gradients over its replicas."""
    if len(stage.devices) == 1 or not problem.footprint.training:
        return 0.0
    return problem.cluster.all_reduce_seconds(stage.devices, weight_bytes(problem, stage))


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


# -- the choice of what a stage recomputes: as little time as its memory allows ----------------------------------------
# Every block that is recomputed takes its forward once more per micro-batch, and frees what autograd would save inside
# for each micro-batch in flight; one block at a time is there in full. So this is a knapsack: the blocks that are kept
# are those that save most time per byte (AdaPipe, ASPLOS 2024, with blocks as computation units). If all blocks free
# too little, the stage as a whole keeps only what it receives.

MAX_TRIED: Final = 10
"""Most blocks of a stage for which all sets are tried; of more, blocks are taken by the time that a byte costs."""


class StageMemory(NamedTuple):
    """Bytes that a stage replica needs beyond its room if nothing is recomputed, and if it runs again as a whole.

    `rerun_excess`: infinite if the stage may not run again. `in_flight`: its micro-batches.
    """

    excess: float
    rerun_excess: float
    in_flight: int


@dataclass(slots=True, eq=False)
class Recomputation:
    """Chooses for the stages of one problem."""

    problem: Problem
    _inside: dict[tuple[int, ...], NDArray[np.int64]] = field(default_factory=dict)

    def blocks(self, units: tuple[int, ...]) -> NDArray[np.int64]:
        """Numbers of the blocks that a stage of these units calls as a whole."""
        if units not in self._inside:
            mine = set(units)
            found = [number for number, needed in enumerate(self.problem.units_of_blocks) if needed <= mine]
            self._inside[units] = np.array(found, dtype=np.int64)
        return self._inside[units]

    def cheapest(self, units: tuple[int, ...], memory: StageMemory, figures: BlockFigures) -> Recompute:
        """The recomputation that makes a stage fit in the least time; that with the least memory if none does."""
        if memory.excess <= 0:
            return False
        numbers = self.blocks(units)
        chosen = _cover(memory, figures.of(numbers))
        if chosen is not None:
            return self._paths(numbers[chosen])
        least = memory.excess - _most_freed(memory, figures.of(numbers))
        if memory.rerun_excess <= 0 or memory.rerun_excess < least:
            return True
        return self._paths(numbers)

    def _paths(self, numbers: Sequence[int] | NDArray[np.int64]) -> Recompute:
        return tuple(self.problem.blocks[number].path for number in sorted(numbers)) or False


def _most_freed(memory: StageMemory, blocks: BlockFigures) -> float:
    return memory.in_flight * float(blocks.freed.sum()) - float(blocks.saved.max(initial=0.0))


def _cover(memory: StageMemory, blocks: BlockFigures) -> NDArray[np.int64] | None:
    """The blocks that take least time and free enough; None if all of them do not.

    The largest block is there in full while it runs again; so each size is tried as the largest.
    """
    best, seconds = None, np.inf
    for largest in np.unique(blocks.saved):
        allowed = np.flatnonzero(blocks.saved <= largest)
        needed = (memory.excess + float(largest)) / memory.in_flight
        if float(blocks.freed[allowed].sum()) < needed:
            continue
        taken = allowed[_least(blocks.seconds[allowed], blocks.freed[allowed], needed)]
        total = float(blocks.seconds[taken].sum())
        if total < seconds:
            best, seconds = taken, total
    return best


def _least(seconds: Array, freed: Array, needed: float) -> NDArray[np.int64]:
    """Positions of the entries with the fewest seconds that free the bytes needed."""
    if len(seconds) <= MAX_TRIED:
        sets = (np.arange(1 << len(seconds))[:, None] >> np.arange(len(seconds))) & 1
        enough = sets @ freed >= needed
        totals: Array = np.where(enough, sets @ seconds, np.inf)
        return np.flatnonzero(sets[int(totals.argmin())])
    order = np.argsort(seconds / freed, kind="stable")
    number = int(np.searchsorted(np.cumsum(freed[order]), needed)) + 1
    taken = order[:number]
    spare = float(freed[taken].sum()) - needed
    keep = np.ones(len(taken), dtype=bool)
    for position in np.argsort(-seconds[taken], kind="stable"):  # without those that turn out not to be needed
        if freed[taken[position]] <= spare:
            keep[position], spare = False, spare - float(freed[taken[position]])
    return taken[keep]


# -- transfers --------------------------------------------------------------------------------------------------------

_TransferKey = tuple[tuple[int, ...], tuple[int, ...], Affine, int]
"""Senders, receivers, bytes and samples."""


class DraftTransfer(NamedTuple):
    """One micro-batch's transfer between two stages without contention: seconds until the last replica has it, and busy
    seconds of each port.

    The transfer goes from all replicas of the one stage to all replicas of the other.
    """

    seconds: float
    ports: dict[Port, float]


def overlaps(src: Sequence[int], dst: Sequence[int], num_samples: int) -> Iterator[tuple[int, int, int]]:
    """Pairs of devices whose shares of a micro-batch overlap, and by how many samples."""
    i = j = 0
    while i < len(src) and j < len(dst):
        starts, ends = zip(share_of(num_samples, i, len(src)), share_of(num_samples, j, len(dst)), strict=True)
        if min(ends) > max(starts):
            yield src[i], dst[j], min(ends) - max(starts)
        i, j = i + (ends[0] <= ends[1]), j + (ends[1] <= ends[0])


@dataclass(slots=True, eq=False)
class Transfers:
    """The transfers of one problem's drafts, which are cached."""

    problem: Problem
    _between: dict[_TransferKey, DraftTransfer] = field(default_factory=dict)
    _routes: dict[tuple[int, int], tuple[Link, tuple[Port, ...]]] = field(default_factory=dict)
    _data_seconds: dict[tuple[DraftStage, bool], float] = field(default_factory=dict)

    def longest(self, ways: Iterable[tuple[int, int]], num_bytes: float) -> float:
        """Seconds of the longest message between devices."""
        return max((self._route(*way)[0].seconds(num_bytes) for way in ways), default=0.0)

    def of_data(self, stage: DraftStage, copies: bool) -> float:
        """Seconds until a micro-batch's data have come from device 0; each pipeline replica loads its own."""
        key = stage, copies
        if key not in self._data_seconds:
            inside = set(stage.units)
            size = sum(value.bytes.at(stage.share) for value in self.problem.units.data if read_by(value, inside))
            devices = stage.devices[:1] if copies else stage.devices
            ways = [(0, device) for device in devices if device and size]
            self._data_seconds[key] = self.longest(ways, size)
        return self._data_seconds[key]

    def between(self, src: DraftStage, dst: DraftStage, size: Affine) -> DraftTransfer:
        """The transfer of this many bytes per micro-batch from one stage to another."""
        key = src.devices, dst.devices, size, src.micro_batch_size
        if key not in self._between:
            self._between[key] = self._transfer(*key)
        return self._between[key]

    def _transfer(self, src: Sequence[int], dst: Sequence[int], size: Affine, num_samples: int) -> DraftTransfer:
        seconds, ports = 0.0, dict[Port, float]()
        for i, j, samples in overlaps(src, dst, num_samples):
            link, passed = self._route(i, j)
            num_bytes = size.at(samples)
            seconds = max(seconds, link.seconds(num_bytes))
            for port in passed:
                ports[port] = ports.get(port, 0.0) + num_bytes / link.bytes_per_second
        return DraftTransfer(seconds, ports)

    def _route(self, src: int, dst: int) -> tuple[Link, tuple[Port, ...]]:
        if (src, dst) not in self._routes:
            cluster = self.problem.cluster
            self._routes[src, dst] = cluster.link(src, dst), cluster.ports(src, dst)
        return self._routes[src, dst]


def contend(ways: Iterable[tuple[Mapping[tuple[int, int], DraftTransfer], dict[tuple[int, int], float]]]) -> float:
    """Delay transfers to one stage that share a port; returns the busiest port's seconds per micro-batch.

    `ways`: for forward and backward, the transfers without contention and their seconds, to which waiting is added.
    """
    total: dict[Port, float] = {}
    for direction, (transfers, seconds) in enumerate(ways):
        together: dict[tuple[int, Port], float] = {}
        for pair, (_, ports) in transfers.items():
            dst = pair[1 - direction]
            for port, busy in ports.items():
                together[dst, port] = together.get((dst, port), 0.0) + busy
                total[port] = total.get(port, 0.0) + busy
        for pair, (_, ports) in transfers.items():
            dst = pair[1 - direction]
            waits = [together[dst, port] - busy for port, busy in ports.items()]
            seconds[pair] += max(waits, default=0.0)
    return max(total.values(), default=0.0)
