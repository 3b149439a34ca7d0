"""Slack of stages under 1F1B: micro-batches in flight besides those of the rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Final

from lightning_gpp.planning.partitioners.auto.shape import SLACKENED, Shape
from lightning_gpp.planning.problem.draft import flows, stage_of_units
from lightning_gpp.planning.problem.evaluate import topological_order
from lightning_gpp.planning.problem.problem import Problem

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
    order = topological_order(pairs, len(groups))
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
    order = topological_order(pairs, len(shape.groups))
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
