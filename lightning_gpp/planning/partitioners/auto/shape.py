"""Shapes, and the changes by which `auto` improves them: stages, as groups of units, with numbers of replicas, in an
order of the devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from lightning_gpp.planning.problem.draft import Devices, Draft, DraftStage, copies, flows, side_by_side, stage_of_units
from lightning_gpp.planning.problem.evaluate import topological_order
from lightning_gpp.planning.problem.problem import Problem

SLACKENED: Final = "1f1b"
"""The schedule under which slack counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Stages in the order of their devices, from the last one down to device 0, which runs the user's step.

    Args:
        groups: the units of every stage, ascending.
        replicas: number of replicas of every stage.
        size: samples of a micro-batch.
        schedule: name of the schedule.
        spread: replicas of a stage are one pipeline apart instead of side by side; requires equal numbers of replicas.
        slack: the slack of every stage; empty: none.
        places: the devices to use, in the order in which stages take them, device 0 among those of the last stage;
            empty: the first devices, in ascending order. Only for replicas side by side.
    """

    groups: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...]
    size: int
    schedule: str
    spread: bool = False
    slack: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Normalise what makes no difference, so that equal drafts have equal shapes."""
        if self.spread and (len(self.groups) == 1 or max(self.replicas) == 1 or len(set(self.replicas)) > 1):
            object.__setattr__(self, "spread", False)
        if self.slack and (not any(self.slack) or self.schedule != SLACKENED):
            object.__setattr__(self, "slack", ())
        if self.places:
            self._normalise_places()

    def _normalise_places(self) -> None:
        places = () if self.spread else flat(self.devices())
        same = len(self.groups) > 1 and len(set(self.replicas)) == 1 < self.replicas[0]
        spread = same and places == flat(copies(len(self.groups), self.replicas[0]))
        object.__setattr__(self, "spread", self.spread or spread)
        object.__setattr__(self, "places", () if spread or places == tuple(range(len(places))) else places)

    @property
    def num_devices(self) -> int:
        """Number of devices that have a stage; a problem may have more, which stay idle."""
        return sum(self.replicas)

    @property
    def slacks(self) -> tuple[int, ...]:
        """The slack of every stage."""
        return self.slack or (0,) * len(self.groups)

    def devices(self) -> Devices:
        """The devices of every stage, ascending."""
        if self.spread:
            return copies(len(self.groups), self.replicas[0])
        positions = side_by_side(self.replicas)
        if not self.places:
            return positions
        return [tuple(sorted(self.places[position] for position in entry)) for entry in positions]

    def draft(self) -> Draft:
        """The shape as a draft, with devices; what is recomputed stays open."""
        stages = zip(self.groups, self.devices(), self.slacks, strict=True)
        return Draft(
            stages=tuple(
                DraftStage(units=units, devices=where, micro_batch_size=self.size, slack=slack)
                for units, where, slack in stages
            ),
            schedule=self.schedule,
        )

    @classmethod
    def of(cls, draft: Draft) -> Shape | None:
        """The shape of a draft; None if its stages have different micro-batch sizes."""
        if len({stage.micro_batch_size for stage in draft.stages}) > 1:
            return None
        stages = sorted(draft.stages, key=lambda stage: -stage.devices[0])
        stages.sort(key=lambda stage: 0 in stage.devices)
        shape = cls(
            groups=tuple(tuple(sorted(stage.units)) for stage in stages),
            replicas=tuple(len(stage.devices) for stage in stages),
            slack=tuple(stage.slack for stage in stages),
            size=stages[0].micro_batch_size,
            schedule=draft.schedule,
        )
        return replace(shape, places=flat([tuple(sorted(stage.devices)) for stage in stages]))

    def moved(self, units: Sequence[int], src: int, dst: int) -> Shape:
        """Move units from one stage to another; they must not be all of the stage's units."""
        groups = list(self.groups)
        groups[src] = tuple(unit for unit in groups[src] if unit not in units)
        groups[dst] = tuple(sorted((*groups[dst], *units)))
        return replace(self, groups=tuple(groups))

    def with_replicas(self, changes: dict[int, int]) -> Shape:
        """Change the number of replicas of some stages. Devices no longer needed are the last ones."""
        replicas = tuple(changes.get(i, count) for i, count in enumerate(self.replicas))
        return replace(self, replicas=replicas, places=self._places_for(sum(replicas)))

    def _places_for(self, number: int) -> tuple[int, ...]:
        """The places for another number of devices: the first of them, or all and the first others."""
        others = (device for device in range(number) if device not in self.places)
        more = max(0, number - len(self.places))
        return (*self.places[:number], *islice(others, more)) if self.places else ()

    def at(self, places: Sequence[int]) -> Shape:
        """The same stages on other devices."""
        return replace(self, places=tuple(places), spread=False)

    def merged(self, first: int, second: int, num_replicas: int | None = None) -> Shape:
        """Merge two stages, at the position of the second, on the devices of both or on fewer."""
        groups, replicas, slack = self._lists()
        groups[second] = tuple(sorted((*groups[first], *groups[second])))
        replicas[second] = num_replicas or replicas[first] + replicas[second]
        for entries in (groups, replicas, slack):
            del entries[first]
        return self._with(groups, replicas, slack)

    def divided(self, stage: int, upper: Sequence[int], num_upper: int, num_lower: int) -> Shape:
        """Divide a stage: the units `upper` on `num_upper` devices, in front of the rest on `num_lower`."""
        groups, replicas, slack = self._lists()
        rest = tuple(unit for unit in groups[stage] if unit not in set(upper))
        groups[stage : stage + 1] = [tuple(sorted(upper)), rest]
        replicas[stage : stage + 1] = [num_upper, num_lower]
        slack[stage : stage + 1] = [slack[stage]] * 2
        return self._with(groups, replicas, slack)

    def _lists(self) -> tuple[list[tuple[int, ...]], list[int], list[int]]:
        return list(self.groups), list(self.replicas), list(self.slacks)

    def _with(self, groups: list[tuple[int, ...]], replicas: list[int], slack: list[int]) -> Shape:
        return replace(
            self,
            groups=tuple(groups),
            replicas=tuple(replicas),
            slack=tuple(slack),
            places=self._places_for(sum(replicas)),
        )

    def swapped(self, first: int, second: int) -> Shape:
        """Swap the positions of two stages on the devices."""
        groups, replicas, slack = self._lists()
        groups[first], groups[second] = groups[second], groups[first]
        replicas[first], replicas[second] = replicas[second], replicas[first]
        slack[first], slack[second] = slack[second], slack[first]
        return self._with(groups, replicas, slack)


def flat(devices: Devices) -> tuple[int, ...]:
    """All devices, those of the last stage first."""
    return tuple(device for entry in reversed(devices) for device in entry)


FOCUS = 4
"""Number of stages that moves begin with: those with the most work."""


def moves(problem: Problem, shape: Shape, loads: list[float]) -> Iterator[Shape]:
    """Shapes one change away. `loads`: seconds of every stage's own work in a step.

    Units leave the stages that take longest, alone or with all that follow or precede them there; these stages get
    devices of others, or idle ones; stages are merged and divided; micro-batch size and positions on the devices
    change, and micro-batches in flight; and if the problem allows it, devices become idle.
    """
    slow = sorted(range(len(loads)), key=loads.__getitem__, reverse=True)[:FOCUS]
    fast = sorted(range(len(loads)), key=loads.__getitem__)
    yield from _sizes(problem, shape)
    for stage in slow:
        yield from _unit_moves(problem, shape, stage, fast)
        yield from _device_moves(problem, shape, stage, fast)
    for stage in slow:
        yield from _divisions(problem, shape, stage)
    yield from _joins(problem, shape)
    yield from _places(problem, shape)
    yield from _slack(problem, shape, slow)
    if problem.idle_devices:
        yield from _releases(problem, shape, fast)


def _sizes(problem: Problem, shape: Shape) -> Iterator[Shape]:
    place = problem.sizes.index(shape.size)
    for size in problem.sizes[max(0, place - 1) : place + 2]:
        if size != shape.size:
            yield replace(shape, size=size)
    for schedule in problem.schedules:
        if schedule != shape.schedule:
            yield replace(shape, schedule=schedule)


def _unit_moves(problem: Problem, shape: Shape, stage: int, fast: list[int]) -> Iterator[Shape]:
    if len(shape.groups[stage]) == 1:
        return
    owner = stage_of_units(problem.num_units, shape.groups)
    least = [fast[0]] if fast[0] != stage else fast[1:2]
    for units, targets in _bundles(problem, shape.groups[stage], owner, stage):
        if len(units) < len(shape.groups[stage]):
            for target in dict.fromkeys([*targets, *least]):
                yield _step_last(problem, shape.moved(units, stage, target))


def _step_last(problem: Problem, shape: Shape) -> Shape:
    """The shape with the stage of the user's step on device 0."""
    step, last = problem.num_units - 1, len(shape.groups) - 1
    place = next(index for index, group in enumerate(shape.groups) if step in group)
    return shape.swapped(place, last) if place != last else shape


def _bundles(
    problem: Problem, group: tuple[int, ...], owner: list[int], stage: int
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Sets of units to move together, and the stages next to them."""
    for bundle in _sets(problem, group):
        targets = sorted({owner[other] for other in _neighbours(problem, bundle)} - {stage})
        if targets:
            yield tuple(sorted(bundle)), targets


def _sets(problem: Problem, group: tuple[int, ...]) -> Iterator[set[int]]:
    """Single units, then each unit with all that follow or all that precede it in the stage."""
    yield from ({unit} for unit in group)
    for unit in group:
        for step in (problem.order.successors, problem.order.predecessors):
            bundle = _closure(unit, set(group), step)
            if 1 < len(bundle) < len(group):
                yield bundle


def _neighbours(problem: Problem, units: Iterable[int]) -> Iterator[int]:
    for unit in units:
        yield from problem.order.successors(unit)
        yield from problem.order.predecessors(unit)


def _closure(unit: int, inside: set[int], step: Callable[[int], Iterable[int]]) -> set[int]:
    found, waiting = {unit}, [unit]
    while waiting:
        for other in step(waiting.pop()):
            if other in inside and other not in found:
                found.add(other)
                waiting.append(other)
    return found


def _device_moves(problem: Problem, shape: Shape, stage: int, fast: list[int]) -> Iterator[Shape]:
    """The stage takes one device, or half of the devices, from another stage with several, or idle devices."""
    own = shape.replicas[stage]
    for other in fast:
        count = shape.replicas[other]
        for moved in {1, count // 2} if other != stage and count > 1 else ():
            if own + moved <= problem.max_replicas:
                yield shape.with_replicas({stage: own + moved, other: count - moved})
    for taken in _idle_numbers(problem, shape):
        if own + taken <= problem.max_replicas:
            yield shape.with_replicas({stage: own + taken})


def _idle_numbers(problem: Problem, shape: Shape) -> list[int]:
    """Numbers of idle devices to take at once: one, and all."""
    idle = problem.num_devices - shape.num_devices
    return sorted({1, idle}) if idle else []


def _releases(problem: Problem, shape: Shape, fast: list[int]) -> Iterator[Shape]:
    """Stages run on fewer devices: one stage on one less, all on half; two stages on the devices of one."""
    for stage in fast:
        if shape.replicas[stage] > 1:
            yield shape.with_replicas({stage: shape.replicas[stage] - 1})
    if min(shape.replicas) > 1:
        yield shape.with_replicas({stage: count // 2 for stage, count in enumerate(shape.replicas)})
    for first, second in _neighbouring_stages(problem, shape):
        for number in {shape.replicas[first], shape.replicas[second]}:
            yield shape.merged(first, second, number)


def _divisions(problem: Problem, shape: Shape, stage: int) -> Iterator[Shape]:
    """Divide the stage, in topological order, with work in proportion to devices: its own, or idle ones in addition."""
    count, group = shape.replicas[stage], shape.groups[stage]
    if len(group) < 2:
        return
    own = {(upper, count - upper) for upper in {count // 2, 1, count - 1} if 0 < upper < count}
    more = {(idle, count) for idle in _idle_numbers(problem, shape) if idle <= problem.max_replicas}
    for upper, lower in (*sorted(own), *sorted(more)):
        position = _position(problem, group, shape.size, upper, lower)
        yield shape.divided(stage, group[:position], upper, lower)


def _position(problem: Problem, group: tuple[int, ...], size: int, upper: int, lower: int) -> int:
    """Number of the first units whose work is at least the share of `upper` devices, but not all units."""
    seconds = problem.seconds(-(-size // (upper + lower))).total[list(group)].cumsum()
    share = upper / (upper + lower) * float(seconds[-1])
    return min(int(seconds.searchsorted(share)) + 1, len(group) - 1)


def _joins(problem: Problem, shape: Shape) -> Iterator[Shape]:
    for first, second in _neighbouring_stages(problem, shape):
        if shape.replicas[first] + shape.replicas[second] <= problem.max_replicas:
            yield shape.merged(first, second)


def _neighbouring_stages(problem: Problem, shape: Shape) -> list[tuple[int, int]]:
    """Pairs of stages that exchange tensors, the one whose position a merged stage gets second."""
    last = len(shape.groups) - 1
    owner = stage_of_units(problem.num_units, shape.groups)
    pairs = {(owner[value.src], owner[dst]) for value in problem.units.values for dst in value.dsts}
    ordered = sorted(pair for pair in pairs if pair[0] != pair[1])
    return [(a, b) if b == last or a < b else (b, a) for a, b in ordered]


MAX_SLACK = 2
"""Most micro-batches of slack of a stage, besides what makes a chain's warm-up."""


def _slack(problem: Problem, shape: Shape, slow: list[int]) -> Iterator[Shape]:
    """More or fewer micro-batches in flight: on all stages, as in a chain of the same stages, on one of the slowest."""
    if not may_have_slack(problem, shape):
        return
    last, slack = len(shape.groups) - 1, shape.slacks
    for change in (1, -1):
        everywhere = tuple(_changed(entry, change) for entry in slack)
        singles = (_with_entry(slack, stage, _changed(slack[stage], change)) for stage in slow if stage != last)
        for other in ((*everywhere[:-1], 0), *singles):
            if other != slack:
                yield replace(shape, slack=other)
    chain = slack_of_chain(problem, shape.groups)
    if chain != slack:
        yield replace(shape, slack=chain)


def may_have_slack(problem: Problem, shape: Shape) -> bool:
    flushes = not problem.continuous and problem.num_slices == 1
    return problem.slack and flushes and shape.schedule == SLACKENED and len(shape.groups) > 1


def _changed(slack: int, change: int) -> int:
    return slack if change > 0 and slack >= MAX_SLACK else max(0, slack + change)


def _with_entry(entries: tuple[int, ...], index: int, value: int) -> tuple[int, ...]:
    return (*entries[:index], value, *entries[index + 1 :])


def slack_of_chain(problem: Problem, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The slack with which every stage holds as many micro-batches as in a chain of the stages in topological order."""
    pairs = list(flows(problem, stage_of_units(problem.num_units, groups)))
    order = topological_order(pairs, len(groups))
    held, slack = dict[int, int](), [0] * len(groups)
    for number, stage in enumerate(reversed(order), start=1):
        least = max((held[dst] + 1 for src, dst in pairs if src == stage), default=1)
        slack[stage] = number - least if least > 1 else 0
        held[stage] = least + slack[stage]
    return tuple(slack)


MAX_SWAPPED = 16
"""Most devices of a cluster for which single devices are swapped."""


def _places(problem: Problem, shape: Shape) -> Iterator[Shape]:
    """Other positions on the devices, if links or devices differ; the stage of the user's step stays on device 0."""
    if len(shape.groups) > 1 and len(set(shape.replicas)) == 1 and shape.replicas[0] > 1:
        yield replace(shape, spread=not shape.spread, places=())
    if problem.uniform:
        return
    for first in range(len(shape.groups) - 1):
        for second in range(first + 1, len(shape.groups) - 1):
            yield shape.swapped(first, second)
    if not shape.spread and problem.num_devices <= MAX_SWAPPED:
        yield from _swapped_devices(problem, shape)


def _swapped_devices(problem: Problem, shape: Shape) -> Iterator[Shape]:
    """Two stages, or a stage and the idle devices, swap one device."""
    used = flat(shape.devices())
    idle = [device for device in range(problem.num_devices) if device not in used]
    places, number = [*used, *idle], len(used)
    for first in range(1, number):
        for second in range(first + 1, len(places)):
            swapped = list(places)
            swapped[first], swapped[second] = swapped[second], swapped[first]
            other = shape.at(swapped[:number])
            if other != shape:
                yield other
