"""EdgePipe's partitioner: the chain of stages with the shortest period on devices of any kinds, which may stay unused.

A pipeline that does not flush is as fast as its slowest stage or link. Which devices take part, in which order, with
which units, is found by dynamic programming over

    h[D, S, u]   the least possible maximum of the seconds of all stages and links behind a cut, where the units D are
                 behind it, on devices S (how many of each class), the first of them on a device of class u.

Devices of a class have the same kind and the same links, so it does not matter which of them takes part. Device 0,
which loads the data and runs the user's step, is a class of its own and has the last stage. From there the chain grows
towards the source, so that the micro-batches that a stage has in flight in training, one for each stage behind it and
one more, are known.

Units of any graph: D are all sets that hold the successors of their members (those of one topological order, where
there are too many), and all values that cross a cut take its link. For a chain of units this is exact; for other graphs
it is exact for what it counts, and no less than the period, because values that skip a stage have links of their own.

Source: Hu et al., "Pipeline Parallelism for Inference on Heterogeneous Edge Computing", arXiv 2110.14895, section III.
The released scheduler takes the number of a class for that of a device, and so misses better plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Final

import numpy as np

from lightning_gpp.planning.partitioners.downsets import downsets
from lightning_gpp.planning.problem.draft import Draft, DraftStage
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Array, Problem

BUFFERS: Final = 2
"""Copies of what a stage receives, and of what it sends: one is computed with while the next is on its way."""

MAX_SETS: Final = 300
"""Sets of units to choose cuts from; where there are more, cuts are those of one topological order."""

_OBJECTIVE: Final = "seconds of a period"


@register_partitioner("edgepipe")
def edgepipe(problem: Problem, control: SearchControl) -> Answer:
    """The stages with the shortest period of all micro-batch sizes; no stage has replicas."""
    best, period, states = None, inf, 0
    notes: tuple[str, ...] = ()
    for size in problem.sizes:
        table = _StageTable(problem, size)
        seconds, stages = table.solve(control)
        states += table.states
        total = seconds * -(-problem.batch_size // size)
        if total < period:
            best, period = Draft(stages=tuple(stages), schedule=problem.schedules[0]), total
        if control.expired:
            notes = (f"Not all plans were tried in strategy.search_seconds={control.seconds:g} seconds.",)
            break
    return Answer(draft=best, objective=period, objective_name=_OBJECTIVE, states=states, notes=notes)


def device_classes(problem: Problem) -> list[list[int]]:
    """Devices that may take each other's place; device 0 alone first."""
    found: list[list[int]] = [[0]]
    for device in range(1, problem.num_devices):
        alike = next((group for group in found[1:] if _alike(problem, group[0], device)), None)
        found.append([device]) if alike is None else alike.append(device)
    return found


def _alike(problem: Problem, one: int, other: int) -> bool:
    cluster = problem.cluster
    if cluster.kind(one) != cluster.kind(other) or cluster.link(one, other) != cluster.link(other, one):
        return False
    third = (device for device in range(problem.num_devices) if device not in (one, other))
    return all(
        cluster.link(one, device) == cluster.link(other, device)
        and cluster.link(device, one) == cluster.link(device, other)
        for device in third
    )


@dataclass(slots=True, kw_only=True)
class StageOnDevice:
    """The cost of a stage on a device of a kind: seconds per micro-batch, and the most micro-batches in
    flight that its memory has room for."""

    seconds: float
    most: float


class StageCosting:
    """Costs of sets of units (bits) for one micro-batch size."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.problem, self.size = problem, size
        self.number = -(-problem.batch_size // size)
        self._known: dict[tuple[int, int], StageOnDevice] = {}

    def cost(self, units: int, device: int) -> StageOnDevice:
        """The cost of a stage on a device; data come from device 0."""
        kind = self.problem.cluster.kind(device)
        if (units, kind) not in self._known:
            self._known[units, kind] = self._cost(units, kind)
        found, data = self._known[units, kind], self.data_bytes(units)
        if device and data:
            sent = self.problem.cluster.link(0, device).seconds(data)
            return StageOnDevice(seconds=max(found.seconds, sent), most=found.most)
        return found

    def _cost(self, units: int, kind: int) -> StageOnDevice:
        members, problem = members_of(units), self.problem
        table = problem.seconds(self.size, kind)
        again = problem.recompute is True
        seconds = float(table.total[members].sum() + (table.forward[members].sum() if again else 0.0))
        received, saved = self.received(units), float(problem.saved_bytes(self.size)[members].sum())
        kept, working = (received, saved) if again else (saved, 0.0)
        buffers = BUFFERS * (received + self.sent(units))
        room = problem.cluster.kinds[kind].memory_bytes - float(problem.static_bytes[members].sum()) - working - buffers
        most = -1.0 if room < 0 else inf if not kept else room // kept
        return StageOnDevice(seconds=seconds, most=inf if most >= self.number else most)

    def data_bytes(self, units: int) -> float:
        """Bytes that a stage receives of the user's step."""
        data = self.problem.units.data
        return sum(value.bytes.at(self.size) for value in data if any(units >> dst & 1 for dst in value.dsts))

    def received(self, units: int) -> float:
        """Bytes that a stage receives per micro-batch."""
        values = (value for value in self.problem.units.values if not units >> value.src & 1)
        return self.data_bytes(units) + sum(
            value.bytes.at(self.size) for value in values if any(units >> dst & 1 for dst in value.dsts)
        )

    def sent(self, units: int) -> float:
        """Bytes per micro-batch that a stage sends to other stages."""
        values = (value for value in self.problem.units.values if units >> value.src & 1)
        return sum(value.bytes.at(self.size) for value in values if not all(units >> dst & 1 for dst in value.dsts))

    def crossing(self, behind: int) -> tuple[float, float]:
        """Bytes per micro-batch that cross the cut in front of some units, and those that come back."""
        values = [value for value in self.problem.units.values if not behind >> value.src & 1]
        values = [value for value in values if any(behind >> dst & 1 for dst in value.dsts)]
        there = sum(value.bytes.at(self.size) for value in values)
        return there, sum(value.bytes.at(self.size) for value in values if value.num_directions == 2)


def members_of(units: int) -> list[int]:
    """The numbers of the units in a set of bits."""
    return [unit for unit in range(units.bit_length()) if units >> unit & 1]


@dataclass(slots=True)
class _StageTable:
    """The table h for one micro-batch size."""

    problem: Problem
    size: int
    states: int = 0
    costs: StageCosting = field(init=False)
    classes: list[list[int]] = field(init=False)
    sets: tuple[int, ...] = field(init=False)
    best: dict[tuple[int, int], Array] = field(init=False)
    origin: dict[tuple[int, int], Array] = field(init=False)

    def __post_init__(self) -> None:
        self.costs = StageCosting(self.problem, self.size)
        self.classes = device_classes(self.problem)
        found = downsets(self.problem.order, MAX_SETS)
        count = self.problem.num_units
        in_order = tuple(((1 << count) - 1) ^ ((1 << start) - 1) for start in reversed(range(count + 1)))
        self.sets = found.sets if found.complete else in_order
        self.best, self.origin = {}, {}

    def solve(self, control: SearchControl) -> tuple[float, list[DraftStage]]:
        """The least period, and its stages from the source to the sink; infinite where nothing fits."""
        for units in self.sets[1:]:
            self._end(units)
        for index, behind in enumerate(self.sets):
            if control.expired:
                break
            sent = self._sent(behind) if behind else {}
            for units in self.sets[index + 1 :]:
                if behind and not behind & ~units:
                    self._grow(index, units, sent)
        ends = {group: self.best[self.sets[-1], group] for group in self._groups if self._known(self.sets[-1], group)}
        group = min(ends, key=lambda group: float(ends[group].min()), default=0)
        if not ends or ends[group].min() == inf:
            return inf, []
        place = np.unravel_index(int(ends[group].argmin()), self._shape)
        return float(ends[group].min()), self._stages(group, tuple(map(int, place)))

    @property
    def _groups(self) -> range:
        return range(len(self.classes))

    @property
    def _shape(self) -> tuple[int, ...]:
        """One entry for every number of devices of each class but the first, which is always taken."""
        return tuple(len(group) + 1 for group in self.classes[1:])

    @property
    def _counts(self) -> Array:
        """Stages of the chain for every entry."""
        return 1 + np.indices(self._shape).sum(axis=0) if self._shape else np.array(1)

    def _known(self, units: int, group: int) -> bool:
        return (units, group) in self.best

    def _end(self, units: int) -> None:
        """The last stage, on device 0."""
        cost = self.costs.cost(units, 0)
        if units >> (self.problem.num_units - 1) & 1 and cost.most >= 1:
            table = np.full(self._shape, inf)
            table[(0,) * len(self._shape)] = cost.seconds
            self.best[units, 0], self.origin[units, 0] = table, np.full(self._shape, -1)

    def _grow(self, index: int, units: int, sent: dict[tuple[int, int], float]) -> None:
        """Stages in front of those of set number `index`, so that together they have these units."""
        behind, counts = self.sets[index], self._counts
        for group in self._groups[1:]:
            cost = self.costs.cost(units & ~behind, self.classes[group][0])
            for following in self._groups:
                if self._known(behind, following) and (group, following) in sent:
                    self.states += counts.size
                    tried = np.maximum(self.best[behind, following], max(cost.seconds, sent[group, following]))
                    self._keep(units, group, np.where(counts + 1 <= cost.most, tried, inf), (index, following))

    def _sent(self, behind: int) -> dict[tuple[int, int], float]:
        """Seconds in which what crosses a cut is sent, and comes back, for the classes on both sides of it. The only
        device of a class cannot follow itself."""
        there, back = self.costs.crossing(behind)
        cluster, found = self.problem.cluster, {}
        for group, following in product(self._groups[1:], self._groups):
            src, dst = self.classes[group][0], self.classes[following][-1]
            if src != dst:
                ways = ((cluster.link(src, dst), there), (cluster.link(dst, src), back))
                found[group, following] = max((link.seconds(size) for link, size in ways if size), default=0.0)
        return found

    def _keep(self, units: int, group: int, tried: Array, origin: tuple[int, int]) -> None:
        """Note what is better, with one more device of the class."""
        if not self._known(units, group):
            self.best[units, group] = np.full(self._shape, inf)
            self.origin[units, group] = np.full(self._shape, -1)
        axis = group - 1
        without, more = (tuple(s if a == axis else slice(None) for a in range(len(self._shape))) for s in _SHIFT)
        best, tried = self.best[units, group][more], tried[without]
        better = tried < best
        best[better] = tried[better]
        self.origin[units, group][more][better] = origin[0] * len(self.classes) + origin[1]

    def _stages(self, group: int, place: tuple[int, ...]) -> list[DraftStage]:
        free = [list(reversed(devices)) for devices in self.classes]
        return [
            DraftStage(
                units=tuple(members_of(units)),
                devices=(free[group].pop(),),
                micro_batch_size=self.size,
                recompute=self.problem.recompute is True and not units >> (self.problem.num_units - 1) & 1,
            )
            for units, group in self._chain(group, place)
        ]

    def _chain(self, group: int, place: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """The units and the class of every stage, from the source on."""
        units = self.sets[-1]
        while group:
            index, following = divmod(int(self.origin[units, group][place]), len(self.classes))
            yield units & ~self.sets[index], group
            place = tuple(count - (axis == group - 1) for axis, count in enumerate(place))
            units, group = self.sets[index], following
        yield units, group


_SHIFT: Final[Sequence[slice]] = (slice(None, -1), slice(1, None))
"""Along the axis of a class: with all but the last number of devices, and with one device more."""
