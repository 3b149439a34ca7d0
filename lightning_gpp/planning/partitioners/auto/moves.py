"""The changes by which `auto` improves drafts: of stages, of their devices, and of their slack.

The stages of such a draft stand in the order of their devices, from the last one down to device 0, which runs the
user's step; what they recompute is open. Replicas are side by side, or one pipeline apart, or anywhere.

Slack of a stage under 1F1B is a number of micro-batches in flight besides those of the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Final

from lightning_gpp.plan import topological
from lightning_gpp.planning.problem.draft import (
    Devices,
    Draft,
    DraftStage,
    copies,
    flows,
    side_by_side,
    stage_of_units,
)
from lightning_gpp.planning.problem.problem import Problem

SLACKENED: Final = "1f1b"
"""The schedule under which slack counts."""

FOCUS = 4
"""Number of stages that moves begin with: those with the most work."""


def moves(problem: Problem, draft: Draft, loads: list[float]) -> Iterator[Draft]:
    """Drafts one change away. `loads`: seconds of every stage's own work in a step.

    Units leave the stages that take longest, alone or with all that follow or precede them there; these stages get
    devices of others, or idle ones; stages are merged and divided; micro-batch size and positions
    on the devices change, and micro-batches in flight; and if the problem allows it, devices become idle.
    """
    slow = sorted(range(len(loads)), key=loads.__getitem__, reverse=True)[:FOCUS]
    fast = sorted(range(len(loads)), key=loads.__getitem__)
    yield from _sizes(problem, draft)
    for stage in slow:
        yield from _unit_moves(problem, draft, stage, fast)
        yield from _device_moves(problem, draft, stage, fast)
    for stage in slow:
        yield from _divisions(problem, draft, stage)
    yield from _joins(problem, draft)
    yield from _other_places(problem, draft)
    yield from other_slack(problem, draft, slow)
    if problem.idle_devices:
        yield from _releases(problem, draft, fast)


# -- stages and devices -----------------------------------------------------------------------------------------------

Parts = tuple[list[tuple[int, ...]], list[int], list[int]]
"""Units, numbers of replicas and slack of all stages."""


def arranged(draft: Draft) -> Draft:
    """A draft with its stages in the order that moves expect, and its measures open."""
    stages = sorted(draft.stages, key=lambda stage: (0 in stage.devices, -stage.devices[0]))
    return replace(draft, stages=tuple(stages)).opened()


def spread(draft: Draft) -> Draft:
    """The draft with its equal numbers of replicas one pipeline apart instead of side by side."""
    return draft.with_stages(devices=copies(len(draft.stages), draft.replicas[0]))


def _parts(draft: Draft) -> Parts:
    return list(draft.groups), list(draft.replicas), list(draft.slack)


def _changed(draft: Draft, parts: Parts) -> Draft:
    """The draft with other stages, on devices that are placed like its own. Those no longer needed are the last."""
    devices = _placed(draft, parts[1])
    stages = (
        DraftStage(units=units, devices=where, micro_batch_size=draft.size, slack=slack)
        for units, where, slack in zip(parts[0], devices, parts[2], strict=True)
    )
    return replace(draft, stages=tuple(stages))


def _placed(draft: Draft, replicas: Sequence[int]) -> Devices:
    is_spread = _is_spread(draft)
    if is_spread and len(set(replicas)) == 1:
        return copies(len(replicas), replicas[0])
    known = () if is_spread else _places(draft)
    others = (device for device in count() if device not in known)
    return _at([*known, *islice(others, max(0, sum(replicas) - len(known)))], replicas)


def _is_spread(draft: Draft) -> bool:
    number, replicas = len(draft.stages), draft.replicas
    regular = number > 1 and len(set(replicas)) == 1 < replicas[0]
    return regular and [stage.devices for stage in draft.stages] == copies(number, replicas[0])


def _places(draft: Draft) -> tuple[int, ...]:
    """All devices, those of the last stage first."""
    return tuple(device for stage in reversed(draft.stages) for device in stage.devices)


def _at(places: Sequence[int], replicas: Sequence[int]) -> Devices:
    """Devices of stages that take these places in turn, the last stage first."""
    return [tuple(sorted(places[position] for position in entry)) for entry in side_by_side(replicas)]


def _with_replicas(draft: Draft, changes: dict[int, int]) -> Draft:
    groups, replicas, slack = _parts(draft)
    return _changed(draft, (groups, [changes.get(stage, number) for stage, number in enumerate(replicas)], slack))


def _moved(draft: Draft, units: Sequence[int], src: int, dst: int) -> Draft:
    """Move units from one stage to another; they must not be all of the stage's units."""
    stages, moving = list(draft.stages), set(units)
    kept = tuple(unit for unit in stages[src].units if unit not in moving)
    stages[src] = replace(stages[src], units=kept)
    stages[dst] = replace(stages[dst], units=tuple(sorted((*stages[dst].units, *units))))
    return replace(draft, stages=tuple(stages))


def _merged(draft: Draft, first: int, second: int, num_replicas: int | None = None) -> Draft:
    """Merge two stages, at the position of the second, on the devices of both or on fewer."""
    groups, replicas, slack = _parts(draft)
    groups[second] = tuple(sorted((*groups[first], *groups[second])))
    replicas[second] = num_replicas or replicas[first] + replicas[second]
    del groups[first], replicas[first], slack[first]
    return _changed(draft, (groups, replicas, slack))


def _divided(draft: Draft, stage: int, upper: Sequence[int], num_upper: int, num_lower: int) -> Draft:
    """Divide a stage: the units `upper` on `num_upper` devices, in front of the rest on `num_lower`."""
    groups, replicas, slack = _parts(draft)
    rest = tuple(unit for unit in groups[stage] if unit not in set(upper))
    groups[stage : stage + 1] = [tuple(sorted(upper)), rest]
    replicas[stage : stage + 1] = [num_upper, num_lower]
    slack[stage : stage + 1] = [slack[stage]] * 2
    return _changed(draft, (groups, replicas, slack))


def _swapped(draft: Draft, first: int, second: int) -> Draft:
    """Swap the positions of two stages on the devices."""
    order = list(range(len(draft.stages)))
    order[first], order[second] = second, first
    groups, replicas, slack = _parts(draft)
    return _changed(draft, ([groups[i] for i in order], [replicas[i] for i in order], [slack[i] for i in order]))


# -- the changes ------------------------------------------------------------------------------------------------------


def _sizes(problem: Problem, draft: Draft) -> Iterator[Draft]:
    place = problem.sizes.index(draft.size)
    for size in problem.sizes[max(0, place - 1) : place + 2]:
        if size != draft.size:
            yield draft.with_stages(micro_batch_size=[size] * len(draft.stages))
    for schedule in problem.schedules:
        if schedule != draft.schedule:
            yield replace(draft, schedule=schedule).with_stages(slack=[0] * len(draft.stages))


def _unit_moves(problem: Problem, draft: Draft, stage: int, fast: list[int]) -> Iterator[Draft]:
    if len(draft.groups[stage]) == 1 or len(draft.groups) == 1:
        return
    owner = stage_of_units(problem.num_units, draft.groups)
    least = [fast[0]] if fast[0] != stage else fast[1:2]
    for units, targets in _bundles(problem, draft.groups[stage], owner, stage):
        if len(units) < len(draft.groups[stage]):
            for target in dict.fromkeys([*targets, *least]):
                yield _step_last(problem, _moved(draft, units, stage, target))


def _step_last(problem: Problem, draft: Draft) -> Draft:
    """The draft with the stage of the user's step on device 0."""
    step, last = problem.num_units - 1, len(draft.groups) - 1
    place = next(index for index, group in enumerate(draft.groups) if step in group)
    return _swapped(draft, place, last) if place != last else draft


def _bundles(
    problem: Problem, group: tuple[int, ...], owner: list[int], stage: int
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Sets of units to move together, and the stages next to them."""
    for bundle, around in _sets(problem, group):
        targets = sorted({owner[other] for other in _numbers(around)} - {stage})
        if targets:
            yield _numbers(bundle), targets


def _sets(problem: Problem, group: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Single units, then each unit with all that follow or all that precede it in the stage, each as the bits of its
    numbers; and the bits of the units next to them outside of the stage.
    """
    inside = sum(1 << unit for unit in group)
    before, after = problem.neighbours
    around = {unit: (before[unit] | after[unit]) & ~inside for unit in group}
    yield from ((1 << unit, around[unit]) for unit in group)
    follow, precede = _closures(reversed(group), after, around), _closures(group, before, around)
    for unit in group:
        for bundle, others in (follow[unit], precede[unit]):
            if 1 < bundle.bit_count() < len(group):
                yield bundle, others


def _closures(units: Iterable[int], steps: Sequence[int], around: dict[int, int]) -> dict[int, tuple[int, int]]:
    """Each unit with all that can be reached inside the stage, and the units around them. Units come after those that
    they reach.
    """
    found: dict[int, tuple[int, int]] = {}
    for unit in units:
        bundle, others = 1 << unit, around[unit]
        for other in _numbers(steps[unit]):
            if other in around:
                bundle, others = bundle | found[other][0], others | found[other][1]
        found[unit] = bundle, others
    return found


def _numbers(bits: int) -> tuple[int, ...]:
    found: list[int] = []
    while bits:
        found.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return tuple(found)


def _device_moves(problem: Problem, draft: Draft, stage: int, fast: list[int]) -> Iterator[Draft]:
    """The stage takes one device, or half of the devices, from another stage with several, or idle devices."""
    own = draft.replicas[stage]
    for other in fast:
        for number in {1, draft.replicas[other] // 2} if other != stage and draft.replicas[other] > 1 else ():
            if own + number <= problem.max_replicas:
                yield _with_replicas(draft, {stage: own + number, other: draft.replicas[other] - number})
    for number in _idle_numbers(problem, draft):
        if own + number <= problem.max_replicas:
            yield _with_replicas(draft, {stage: own + number})


def _idle_numbers(problem: Problem, draft: Draft) -> list[int]:
    """Numbers of idle devices to take at once: one, and all."""
    idle = problem.num_devices - draft.num_devices
    return sorted({1, idle}) if idle else []


def _releases(problem: Problem, draft: Draft, fast: list[int]) -> Iterator[Draft]:
    """Stages run on fewer devices: one stage on one less, all on half; two stages on the devices of one."""
    for stage in fast:
        if draft.replicas[stage] > 1:
            yield _with_replicas(draft, {stage: draft.replicas[stage] - 1})
    if min(draft.replicas) > 1:
        yield _with_replicas(draft, {stage: count // 2 for stage, count in enumerate(draft.replicas)})
    for first, second in _neighbouring_stages(problem, draft):
        for number in {draft.replicas[first], draft.replicas[second]}:
            yield _merged(draft, first, second, number)


def _divisions(problem: Problem, draft: Draft, stage: int) -> Iterator[Draft]:
    """Divide the stage, in topological order, with work in proportion to devices: its own, or idle ones in addition."""
    count, group = draft.replicas[stage], draft.groups[stage]
    if len(group) < 2:
        return
    own = {(upper, count - upper) for upper in {count // 2, 1, count - 1} if 0 < upper < count}
    more = {(number, count) for number in _idle_numbers(problem, draft) if number <= problem.max_replicas}
    for upper, lower in (*sorted(own), *sorted(more)):
        position = _position(problem, group, draft.size, upper, lower)
        yield _divided(draft, stage, group[:position], upper, lower)


def _position(problem: Problem, group: tuple[int, ...], size: int, upper: int, lower: int) -> int:
    """Number of the first units whose work is at least the share of `upper` devices, but not all units."""
    seconds = problem.seconds(-(-size // (upper + lower))).total[list(group)].cumsum()
    share = upper / (upper + lower) * float(seconds[-1])
    return min(int(seconds.searchsorted(share)) + 1, len(group) - 1)


def _joins(problem: Problem, draft: Draft) -> Iterator[Draft]:
    for first, second in _neighbouring_stages(problem, draft):
        if draft.replicas[first] + draft.replicas[second] <= problem.max_replicas:
            yield _merged(draft, first, second)


def _neighbouring_stages(problem: Problem, draft: Draft) -> list[tuple[int, int]]:
    """Pairs of stages that exchange tensors, the one whose position a merged stage gets second."""
    last = len(draft.groups) - 1
    owner = stage_of_units(problem.num_units, draft.groups)
    pairs = {(owner[value.src], owner[dst]) for value in problem.units.values for dst in value.dsts}
    ordered = sorted(pair for pair in pairs if pair[0] != pair[1])
    return [(a, b) if b == last or a < b else (b, a) for a, b in ordered]


MAX_SWAPPED = 16
"""Most devices of a cluster for which single devices are swapped."""


def _other_places(problem: Problem, draft: Draft) -> Iterator[Draft]:
    """Other positions on the devices, if links or devices differ; the stage of the user's step stays on device 0."""
    if len(draft.groups) > 1 and len(set(draft.replicas)) == 1 and draft.replicas[0] > 1:
        yield draft.with_stages(devices=side_by_side(draft.replicas)) if _is_spread(draft) else spread(draft)
    if problem.uniform:
        return
    for first in range(len(draft.groups) - 1):
        for second in range(first + 1, len(draft.groups) - 1):
            yield _swapped(draft, first, second)
    if not _is_spread(draft) and problem.num_devices <= MAX_SWAPPED:
        yield from _swapped_devices(problem, draft)


def _swapped_devices(problem: Problem, draft: Draft) -> Iterator[Draft]:
    """Two stages, or a stage and the idle devices, swap one device."""
    used = _places(draft)
    idle = [device for device in range(problem.num_devices) if device not in used]
    places, number = [*used, *idle], len(used)
    for first in range(1, number):
        for second in range(first + 1, len(places)):
            swapped = list(places)
            swapped[first], swapped[second] = swapped[second], swapped[first]
            other = draft.with_stages(devices=_at(swapped[:number], draft.replicas))
            if other != draft:
                yield other


MAX_SLACK = 2
"""Most micro-batches of slack of a stage, besides what makes a chain's warm-up."""


def other_slack(problem: Problem, draft: Draft, slow: list[int]) -> Iterator[Draft]:
    """More or fewer micro-batches in flight: on all stages, on one of the slowest, as in a chain, to fill waits."""
    if not may_have_slack(problem, draft):
        return
    last, slack = len(draft.groups) - 1, draft.slack
    for change in (1, -1):
        everywhere = tuple(_more(entry, change) for entry in slack)
        singles = (_with_entry(slack, stage, _more(slack[stage], change)) for stage in slow if stage != last)
        for other in ((*everywhere[:-1], 0), *singles):
            if other != slack:
                yield draft.with_stages(slack=other)
    for other in (slack_of_chain(problem, draft.groups), *waits_filled(problem, draft)):
        if other != slack:
            yield draft.with_stages(slack=other)


def with_slack(problem: Problem, drafts: Iterable[Draft]) -> Iterator[Draft]:
    """The drafts with the most slack on all stages but the last, and with as much as fills waits."""
    for draft in drafts:
        if may_have_slack(problem, draft):
            most = (*[MAX_SLACK] * (len(draft.groups) - 1), 0)
            yield from (draft.with_stages(slack=slack) for slack in (most, *waits_filled(problem, draft)))


def may_have_slack(problem: Problem, draft: Draft) -> bool:
    flushes = not problem.continuous and problem.num_slices == 1
    return problem.slack and flushes and draft.schedule == SLACKENED and len(draft.groups) > 1


def _more(slack: int, change: int) -> int:
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


def waits_filled(problem: Problem, draft: Draft) -> Iterator[tuple[int, ...]]:
    """Slack with which forwards fill a share of the time in which a stage waits for its first gradient.

    Stages that get lighter towards the sink are busy all the time only if those in front have so many forwards.
    """
    pairs = list(flows(problem, stage_of_units(problem.num_units, draft.groups)))
    order = topological(pairs, len(draft.groups))
    forward, behind = _forwards_and_waits(problem, draft, pairs, order)
    for share in FILLED:
        wanted = [1 + int(share * wait / each) if each else 1 for each, wait in zip(forward, behind, strict=True)]
        yield _slack_for(wanted, pairs, order, -(-problem.batch_size // draft.size))


def _forwards_and_waits(
    problem: Problem, draft: Draft, pairs: Sequence[tuple[int, int]], order: Sequence[int]
) -> tuple[list[float], list[float]]:
    """Seconds of a forward of every stage, and of a micro-batch's way through the stages behind it."""
    forward, total, behind = ([0.0] * len(draft.groups) for _ in range(3))
    for stage, (group, replicas) in enumerate(zip(draft.groups, draft.replicas, strict=True)):
        table, units = problem.seconds(-(-draft.size // replicas)), list(group)
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
