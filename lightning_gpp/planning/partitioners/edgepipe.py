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

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from math import inf
from typing import Final

from lightning_gpp.planning.partitioners.piper import downsets
from lightning_gpp.planning.problem.draft import Draft, DraftStage
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.units import Value

BUFFERS: Final = 2
"""Copies of what a stage receives, and of what it sends: one is computed with while the next is on its way."""

MAX_SETS: Final = 300
"""Sets of units to choose cuts from; where there are more, cuts are those of one topological order."""


@register_partitioner("edgepipe")
def edgepipe(problem: Problem, control: SearchControl) -> Answer:
    """The stages with the shortest period of all micro-batch sizes; no stage has replicas."""
    best, period, states = None, inf, 0
    notes: tuple[str, ...] = ()
    for size in problem.sizes:
        table = _StageTable(problem, size)
        seconds, stages = table.solve(control)
        states += sum(map(len, table.best.values()))
        total = seconds * -(-problem.batch_size // size)
        if total < period:
            best, period = Draft(stages=tuple(stages), schedule=problem.schedules[0]), total
        if control.expired:
            notes = (f"Not all plans were tried in strategy.search_seconds={control.seconds:g} seconds.",)
            break
    return Answer(draft=best, objective=period, states=states, notes=notes)


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


@dataclass(slots=True)
class StageCosting:
    """Costs of sets of units (bits) for one micro-batch size."""

    problem: Problem
    size: int
    _known: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)

    def cost(self, units: int, device: int) -> tuple[float, float]:
        """Seconds per micro-batch, and the most micro-batches in flight that the device's memory has room for.

        Data come from device 0.
        """
        kind = self.problem.cluster.kind(device)
        if (units, kind) not in self._known:
            self._known[units, kind] = self._cost(units, kind)
        seconds, most = self._known[units, kind]
        data = self._bytes(value for value in self.problem.units.data if _reads(units, value))
        sent = self.problem.cluster.link(0, device).seconds(data) if device and data else 0.0
        return max(seconds, sent), most

    def _cost(self, units: int, kind: int) -> tuple[float, float]:
        members, problem = members_of(units), self.problem
        values, table, again = problem.units.values, problem.seconds(self.size, kind), problem.recompute is True
        entering = [value for value in (*values, *problem.units.data) if _enters(units, value)]
        leaving = [v for v in values if _holds(units, v.src) and not all(_holds(units, dst) for dst in v.dsts)]
        received, saved = self._bytes(entering), float(problem.saved_bytes(self.size)[members].sum())
        kept, working = (received, saved) if again else (saved, 0.0)
        held = float(problem.static_bytes[members].sum()) + working + BUFFERS * (received + self._bytes(leaving))
        room = problem.cluster.kinds[kind].memory_bytes - held
        most = -1.0 if room < 0 else inf if not kept else room // kept
        seconds = float(table.total[members].sum() + (table.forward[members].sum() if again else 0.0))
        return seconds, inf if most >= -(-problem.batch_size // self.size) else most

    def crossing(self, behind: int) -> tuple[float, float]:
        """Bytes per micro-batch that cross the cut in front of some units, and those that come back."""
        values = [value for value in self.problem.units.values if _enters(behind, value)]
        return self._bytes(values), self._bytes(value for value in values if value.num_directions == 2)

    def _bytes(self, values: Iterable[Value]) -> float:
        return sum(value.bytes.at(self.size) for value in values)


def members_of(units: int) -> list[int]:
    """The numbers of the units in a set of bits."""
    return [unit for unit in range(units.bit_length()) if _holds(units, unit)]


def _holds(units: int, unit: int) -> bool:
    return unit >= 0 and bool(units >> unit & 1)


def _reads(units: int, value: Value) -> bool:
    return any(_holds(units, dst) for dst in value.dsts)


def _enters(units: int, value: Value) -> bool:
    return not _holds(units, value.src) and _reads(units, value)


Chain = tuple[tuple[int, ...], int]
"""The devices of a chain of stages: their number for each class but the first, and the class of the first stage."""

Origin = tuple[int, Chain] | None
"""The units and devices behind the first stage of a chain."""


class _StageTable:
    """The table h for one micro-batch size: for units behind a cut and their devices, seconds and the origin."""

    def __init__(self, problem: Problem, size: int) -> None:
        self.problem, self.size, self.costs = problem, size, StageCosting(problem, size)
        self.classes = device_classes(problem)
        found, count = downsets(problem.order, MAX_SETS + 1), problem.num_units
        in_order = [((1 << count) - 1) ^ ((1 << start) - 1) for start in reversed(range(count + 1))]
        self.sets = found if len(found) <= MAX_SETS else in_order
        self.best: dict[int, dict[Chain, tuple[float, Origin]]] = {units: {} for units in self.sets}

    def solve(self, control: SearchControl) -> tuple[float, list[DraftStage]]:
        """The least period, and its stages from the source to the sink; infinite where nothing fits."""
        for index, units in enumerate(self.sets[1:], start=1):
            if control.expired:
                break
            self._end(units)
            sent = self._sent(units)
            for more in self.sets[index + 1 :]:
                if not units & ~more:
                    self._grow(units, more, sent)
        ends = self.best[self.sets[-1]]
        if not ends:
            return inf, []
        chain = min(ends, key=lambda chain: ends[chain][0])
        return ends[chain][0], list(self._stages(chain))

    def _end(self, units: int) -> None:
        """The last stage, on device 0."""
        seconds, most = self.costs.cost(units, 0)
        if _holds(units, self.problem.num_units - 1) and most >= 1:
            self._keep(units, ((0,) * (len(self.classes) - 1), 0), seconds, None)

    def _grow(self, behind: int, units: int, sent: dict[tuple[int, int], float]) -> None:
        """A stage in front of all chains that have the units `behind`, so that together they have `units`."""
        for group in range(1, len(self.classes)):
            own, most = self.costs.cost(units & ~behind, self.classes[group][0])
            for chain, (seconds, _) in self.best[behind].items():
                used, following = chain
                if used[group - 1] < len(self.classes[group]) and sum(used) + 2 <= most and (group, following) in sent:
                    more = (*used[: group - 1], used[group - 1] + 1, *used[group:])
                    longest = max(seconds, own, sent[group, following])
                    self._keep(units, (more, group), longest, (behind, chain))

    def _keep(self, units: int, chain: Chain, seconds: float, origin: Origin) -> None:
        if seconds < self.best[units].get(chain, (inf, None))[0]:
            self.best[units][chain] = seconds, origin

    def _sent(self, behind: int) -> dict[tuple[int, int], float]:
        """Seconds in which what crosses a cut is sent, and comes back, for the classes on both sides of it. The only
        device of a class cannot follow itself."""
        there, back = self.costs.crossing(behind)
        cluster, found, groups = self.problem.cluster, dict[tuple[int, int], float](), range(len(self.classes))
        for group, following in product(groups[1:], groups):
            src, dst = self.classes[group][0], self.classes[following][-1]
            if src != dst:
                ways = ((cluster.link(src, dst), there), (cluster.link(dst, src), back))
                found[group, following] = max((link.seconds(size) for link, size in ways if size), default=0.0)
        return found

    def _stages(self, chain: Chain) -> Iterator[DraftStage]:
        """The stages of a chain of all units, from the source on."""
        free = [list(reversed(devices)) for devices in self.classes]
        origin: Origin = self.sets[-1], chain
        while origin is not None:
            units, (_, group) = origin
            origin = self.best[units][origin[1]][1]
            own = units if origin is None else units & ~origin[0]
            again = self.problem.recompute is True and not _holds(own, self.problem.num_units - 1)
            device = free[group].pop()
            yield DraftStage(
                units=tuple(members_of(own)), devices=(device,), micro_batch_size=self.size, recompute=again
            )
