"""Shapes, which `auto` changes step by step, and the changes that it tries, the most promising first.

A shape consists of stages, as groups of units, and their numbers of replicas; it names no devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_gpp.planning.problem.draft import Draft, DraftStage, copies, side_by_side, stage_of_units
from lightning_gpp.planning.problem.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Stages in the order of their devices, from the last one down to device 0, which runs the user's step.

    Args:
        groups: the units of every stage, ascending.
        replicas: number of replicas of every stage.
        recompute: whether each stage recomputes.
        size: samples of a micro-batch.
        schedule: name of the schedule.
        spread: replicas of a stage are one pipeline apart instead of side by side; requires equal numbers of replicas.
    """

    groups: tuple[tuple[int, ...], ...]
    replicas: tuple[int, ...]
    recompute: tuple[bool, ...]
    size: int
    schedule: str
    spread: bool = False

    def __post_init__(self) -> None:
        """Normalise `spread` if it makes no difference, so that equal drafts have equal shapes."""
        if self.spread and (len(self.groups) == 1 or len(set(self.replicas)) > 1):
            object.__setattr__(self, "spread", False)

    def draft(self) -> Draft:
        """The shape as a draft, with devices."""
        devices = copies(len(self.groups), self.replicas[0]) if self.spread else side_by_side(self.replicas)
        stages = zip(self.groups, devices, self.recompute, strict=True)
        return Draft(
            stages=tuple(
                DraftStage(units=units, devices=where, micro_batch_size=self.size, recompute=again)
                for units, where, again in stages
            ),
            schedule=self.schedule,
        )

    @classmethod
    def of(cls, draft: Draft) -> Shape | None:
        """The shape of a draft; None if no shape has the draft's devices."""
        stages = sorted(draft.stages, key=lambda stage: -stage.devices[0])
        shape = cls(
            groups=tuple(tuple(sorted(stage.units)) for stage in stages),
            replicas=tuple(len(stage.devices) for stage in stages),
            recompute=tuple(stage.recompute for stage in stages),
            size=stages[0].micro_batch_size,
            schedule=draft.schedule,
        )
        for candidate in (shape, replace(shape, spread=True)):
            if [stage.devices for stage in candidate.draft().stages] == [stage.devices for stage in stages]:
                return candidate
        return None

    def moved(self, units: Sequence[int], src: int, dst: int) -> Shape:
        """Move units from one stage to another; they must not be all of the stage's units."""
        groups = list(self.groups)
        groups[src] = tuple(unit for unit in groups[src] if unit not in units)
        groups[dst] = tuple(sorted((*groups[dst], *units)))
        return replace(self, groups=tuple(groups))

    def with_replicas(self, changes: dict[int, int]) -> Shape:
        """Change the number of replicas of some stages."""
        return replace(self, replicas=tuple(changes.get(i, count) for i, count in enumerate(self.replicas)))

    def merged(self, first: int, second: int) -> Shape:
        """Merge two stages, at the position of the second, on the devices of both."""
        groups, replicas, again = list(self.groups), list(self.replicas), list(self.recompute)
        groups[second] = tuple(sorted((*groups[first], *groups[second])))
        replicas[second] += replicas[first]
        again[second] = again[first] and again[second]
        for entries in (groups, replicas, again):
            del entries[first]
        return replace(self, groups=tuple(groups), replicas=tuple(replicas), recompute=tuple(again))

    def divided(self, stage: int, upper: Sequence[int], num_upper: int) -> Shape:
        """Divide a stage: the units `upper` on `num_upper` of its devices, in front of the rest."""
        groups, replicas, again = list(self.groups), list(self.replicas), list(self.recompute)
        rest = tuple(unit for unit in groups[stage] if unit not in set(upper))
        groups[stage : stage + 1] = [tuple(sorted(upper)), rest]
        replicas[stage : stage + 1] = [num_upper, replicas[stage] - num_upper]
        again[stage : stage + 1] = [again[stage]] * 2
        return replace(self, groups=tuple(groups), replicas=tuple(replicas), recompute=tuple(again))

    def swapped(self, first: int, second: int) -> Shape:
        """Swap the positions of two stages on the devices."""
        order = list(range(len(self.groups)))
        order[first], order[second] = order[second], order[first]
        return replace(
            self,
            groups=tuple(self.groups[i] for i in order),
            replicas=tuple(self.replicas[i] for i in order),
            recompute=tuple(self.recompute[i] for i in order),
        )


FOCUS = 4
"""Number of stages that moves begin with: those with the most work."""


def moves(problem: Problem, shape: Shape, loads: list[float]) -> Iterator[Shape]:
    """Shapes one change away. `loads`: seconds of every stage's own work in a step.

    Units leave the stages that take longest, alone or with all that follow or precede them there; these stages get
    devices of others; stages are merged and divided; micro-batch size, recomputation and positions on the devices
    change.
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
    yield from _recomputation(problem, shape)
    yield from _places(problem, shape)


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
    return _flags_kept(problem, shape.swapped(place, last) if place != last else shape)


def _flags_kept(problem: Problem, shape: Shape) -> Shape:
    """Set recomputation as the problem prescribes; the stage of the user's step never recomputes."""
    step = problem.num_units - 1
    wanted = shape.recompute if problem.recompute is None else [problem.recompute] * len(shape.groups)
    flags = tuple(again and step not in group for again, group in zip(wanted, shape.groups, strict=True))
    return replace(shape, recompute=flags)


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
    """The stage takes one device, or half of the devices, from another stage with several."""
    if shape.replicas[stage] >= problem.max_replicas:
        return
    for other in fast:
        count = shape.replicas[other]
        for moved in {1, count // 2} if other != stage and count > 1 else ():
            if shape.replicas[stage] + moved <= problem.max_replicas:
                yield shape.with_replicas({stage: shape.replicas[stage] + moved, other: count - moved})


def _divisions(problem: Problem, shape: Shape, stage: int) -> Iterator[Shape]:
    """Divide the stage, in topological order, with work in proportion to devices."""
    count, group = shape.replicas[stage], shape.groups[stage]
    if count < 2 or len(group) < 2:
        return
    total = problem.seconds(-(-shape.size // count)).total[list(group)]
    for upper in {count // 2, 1, count - 1}:
        share, done = upper / count * float(total.sum()), 0.0
        for position, seconds in enumerate(total[:-1], start=1):
            done += float(seconds)
            if done >= share or position == len(group) - 1:
                yield _flags_kept(problem, shape.divided(stage, group[:position], upper))
                break


def _joins(problem: Problem, shape: Shape) -> Iterator[Shape]:
    last = len(shape.groups) - 1
    owner = stage_of_units(problem.num_units, shape.groups)
    pairs = {(owner[value.src], owner[dst]) for value in problem.units.values for dst in value.dsts}
    for first, second in sorted(pair for pair in pairs if pair[0] != pair[1]):
        if shape.replicas[first] + shape.replicas[second] <= problem.max_replicas:
            yield shape.merged(first, second) if second == last or first < second else shape.merged(second, first)


def _recomputation(problem: Problem, shape: Shape) -> Iterator[Shape]:
    if problem.recompute is not None:
        return
    step = problem.num_units - 1
    for stage, again in enumerate(shape.recompute):
        if step not in shape.groups[stage]:
            flags = list(shape.recompute)
            flags[stage] = not again
            yield replace(shape, recompute=tuple(flags))


def _places(problem: Problem, shape: Shape) -> Iterator[Shape]:
    """Other positions on the devices, if links or devices differ; the stage of the user's step stays on device 0."""
    if len(shape.groups) > 1 and len(set(shape.replicas)) == 1 and shape.replicas[0] > 1:
        yield replace(shape, spread=not shape.spread)
    if len(problem.cluster.levels) < 2 and problem.cluster.homogeneous and not problem.cluster.links:
        return
    for first in range(len(shape.groups) - 1):
        for second in range(first + 1, len(shape.groups) - 1):
            yield shape.swapped(first, second)
