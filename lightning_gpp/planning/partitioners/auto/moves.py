"""The changes by which `auto` improves shapes: of stages, of their devices, and of their slack.

Slack of a stage under 1F1B is a number of micro-batches in flight besides those of the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_gpp.plan import topological
from lightning_gpp.planning.partitioners.auto.shape import SLACKENED, Shape, flat
from lightning_gpp.planning.problem.draft import flows, stage_of_units
from lightning_gpp.planning.problem.problem import Problem

FOCUS = 4
"""Number of stages that moves begin with: those with the most work."""


def moves(problem: Problem, shape: Shape, loads: list[float]) -> Iterator[Shape]:
    """Shapes one change away. `loads`: seconds of every stage's own work in a step.

    Units leave the stages that take longest, alone or with all that follow or precede them there; these stages get
    devices of others, or idle ones; stages are merged and divided; micro-batch size and positions
    on the devices change, and micro-batches in flight; and if the problem allows it, devices become idle.
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
    yield from other_slack(problem, shape, slow)
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
        for number in {1, shape.replicas[other] // 2} if other != stage and shape.replicas[other] > 1 else ():
            if own + number <= problem.max_replicas:
                yield shape.with_replicas({stage: own + number, other: shape.replicas[other] - number})
    for number in _idle_numbers(problem, shape):
        if own + number <= problem.max_replicas:
            yield shape.with_replicas({stage: own + number})


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
    more = {(number, count) for number in _idle_numbers(problem, shape) if number <= problem.max_replicas}
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


MAX_SLACK = 2
"""Most micro-batches of slack of a stage, besides what makes a chain's warm-up."""


def other_slack(problem: Problem, shape: Shape, slow: list[int]) -> Iterator[Shape]:
    """More or fewer micro-batches in flight: on all stages, on one of the slowest, as in a chain, to fill waits."""
    if not may_have_slack(problem, shape):
        return
    last, slack = len(shape.groups) - 1, shape.slacks
    for change in (1, -1):
        everywhere = tuple(_changed(entry, change) for entry in slack)
        singles = (_with_entry(slack, stage, _changed(slack[stage], change)) for stage in slow if stage != last)
        for other in ((*everywhere[:-1], 0), *singles):
            if other != slack:
                yield replace(shape, slack=other)
    for other in (slack_of_chain(problem, shape.groups), *waits_filled(problem, shape)):
        if other != slack:
            yield replace(shape, slack=other)


def with_slack(problem: Problem, shapes: Iterable[Shape]) -> Iterator[Shape]:
    """The shapes with the most slack on all stages but the last, and with as much as fills waits."""
    for shape in shapes:
        if may_have_slack(problem, shape):
            most = (*[MAX_SLACK] * (len(shape.groups) - 1), 0)
            yield from (replace(shape, slack=slack) for slack in (most, *waits_filled(problem, shape)))


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
    order = topological(pairs, len(groups))
    wanted = [0] * len(groups)
    for number, stage in enumerate(reversed(order), start=1):
        wanted[stage] = number
    return _slack_for(wanted, pairs, order, len(groups))


FILLED: Final = (0.5, 0.75, 1.0)
"""Shares of a stage's wait for its first gradient that forwards are to fill; by 1F1B's rule it is about a third."""


def waits_filled(problem: Problem, shape: Shape) -> Iterator[tuple[int, ...]]:
    """Slack with which forwards fill a share of the time in which a stage waits for its first gradient.

    Stages that get lighter towards the sink are busy all the time only if those in front have so many forwards.
    """
    pairs = list(flows(problem, stage_of_units(problem.num_units, shape.groups)))
    order = topological(pairs, len(shape.groups))
    forward, behind = _forwards_and_waits(problem, shape, pairs, order)
    for share in FILLED:
        wanted = [1 + int(share * wait / each) if each else 1 for each, wait in zip(forward, behind, strict=True)]
        yield _slack_for(wanted, pairs, order, -(-problem.batch_size // shape.size))


def _forwards_and_waits(
    problem: Problem, shape: Shape, pairs: Sequence[tuple[int, int]], order: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Seconds of a forward of every stage, and of a micro-batch's way through the stages behind it."""
    forward, total, behind = ([0.0] * len(shape.groups) for _ in range(3))
    for stage, (group, count) in enumerate(zip(shape.groups, shape.replicas, strict=True)):
        table, units = problem.seconds(-(-shape.size // count)), list(group)
        forward[stage], total[stage] = float(table.forward[units].sum()), float(table.total[units].sum())
    for stage in reversed(order):
        behind[stage] = max((total[dst] + behind[dst] for src, dst in pairs if src == stage), default=0.0)
    return forward, behind


def _slack_for(
    wanted: Sequence[int], pairs: Sequence[tuple[int, int]], order: Sequence[int], number: int
) -> tuple[int, ...]:
    """The slack with which stages have at least the wanted micro-batches in flight, but not more than all."""
    held, slack = dict[int, int](), [0] * len(wanted)
    for stage in reversed(order):
        least = max((held[dst] + 1 for src, dst in pairs if src == stage), default=1)
        slack[stage] = max(0, min(wanted[stage], number) - least) if least > 1 else 0
        held[stage] = least + slack[stage]
    return tuple(slack)
