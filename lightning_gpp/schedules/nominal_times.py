"""Orders by nominal time: the times of actions in an ideal pipeline, in cells, rank the actions of every device.

Stages are treated by their level, the distance to the sink: all stages of a level act like one stage of a chain.
Nominal times grow along every dependency, so orders sorted by them cannot deadlock, in any layout.

Published orders of a V are such times, too: stages take theirs from the chain for which the order is made (`Template`).
A chain of 2p stages turns back at device p, so rank i of the V holds stages i and 2p - 1 - i. An order is a list of
actions per rank. Run with unit durations, it gives the time at which a level works on a micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from lightning_gpp.plan import STEP, Edge, Plan, Stage
from lightning_gpp.schedules.actions import Action, Kind
from lightning_gpp.schedules.list_scheduling import TaskGraph, in_order
from lightning_gpp.schedules.work import Work, halved, is_extra, work_of

_STEP: Final = 1e-3
"""Minimum difference between the nominal times of an action and its inputs, in cells."""


@dataclass(frozen=True, slots=True)
class Timed:
    """An action with its nominal time, in cells."""

    time: float
    action: Action


TimedRows = list[list[Timed]]
"""The actions of every device, in order."""


def by_nominal_time(work: Work, time: Callable[[Action], float]) -> TimedRows:
    """The actions of every device by nominal time, which is raised where dependencies demand it."""
    depths = work.plan.depths()
    rows: TimedRows = [[] for _ in range(work.plan.num_devices)]
    for (device, action), nominal in zip(work.tasks.numbers, _raised(work.tasks, time), strict=True):
        rows[device].append(Timed(nominal, action))
    for row in rows:
        row.sort(key=lambda entry: (entry.time, depths[entry.action.stage], entry.action.micro_batch))
    return rows


def _raised(tasks: TaskGraph, time: Callable[[Action], float]) -> Sequence[float]:
    nominal, missing = [time(action) for action in tasks.actions], list(tasks.missing)
    ready = [task for task, count in enumerate(missing) if not count]
    while ready:
        task = ready.pop()
        for reader, _ in tasks.readers[task]:
            nominal[reader] = max(nominal[reader], nominal[task] + _STEP)
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    return nominal


def levels(plan: Plan) -> tuple[dict[int, int], int]:
    """The level of every stage, and the number of levels: the positions in a chain as long as the graph's depth.

    The number is even, for a chain that turns back halfway; if the depth is odd, no stage is at level 0. An extra stage
    with only the user's step shares the last level with those before it.
    """
    step = int(is_extra(plan, plan.step_stage))
    depths = {stage: max(1, depth - step) for stage, depth in plan.depths().items()}
    length = max(depths.values())
    length += length % 2
    return {stage: length - depth for stage, depth in depths.items()}, length


def coarse_numbers(plan: Plan, batch_size: int) -> list[list[int]]:
    """Number that each micro-batch of each stage would have if all stages had the largest micro-batch size.

    The parts of one large micro-batch share its number, and so its place in an order for micro-batches of one size.
    """
    number, stages = partial(plan.micro_batch_of, stage_of_largest(plan)), range(len(plan.stages))
    return [[number(start, batch_size) for start, _ in plan.intervals(stage, batch_size)] for stage in stages]


def stage_of_largest(plan: Plan) -> int:
    """A stage with the largest micro-batches."""
    return max(range(len(plan.stages)), key=lambda stage: plan.stages[stage].micro_batch_size)


def actions(rows: TimedRows, *, weights: bool = True) -> list[list[Action]]:
    """The order of every device without times, with or without weight gradients."""
    return [[entry.action for entry in row if weights or entry.action.kind is not Kind.WEIGHT] for row in rows]


RankOrder = Callable[[int, int, int], Sequence[Action]]
"""A function from rank, number of ranks and number of micro-batches to the rank's order, in stages of the chain."""


class Template:
    """A published order, run on a chain as long as the plan's depth.

    Args:
        plan: the plan whose stages take the times.
        batch_size: samples of the mini-batch.
        order: the order of the V's ranks.
    """

    def __init__(self, plan: Plan, batch_size: int, order: RankOrder) -> None:
        self._levels, length = levels(plan)
        self._numbers = coarse_numbers(plan, batch_size)
        # An order needs enough micro-batches to fill the pipeline; the times of additional ones are never read.
        ranks, enough = length // 2, max(length, *(row[-1] + 1 for row in self._numbers))
        rows = [list(order(rank, ranks, enough)) for rank in range(ranks)]
        self._split = frozenset(action for row in rows for action in row if action.kind is Kind.INPUT)
        tasks = self._whole_backwards(work_of(_chain(length, enough), enough).tasks)
        self._start = dict(zip(tasks.actions, in_order(tasks, halved(rows)).start, strict=True))

    def time(self, action: Action) -> float:
        """Start of an action in the template."""
        return self._start[self._place(action)]

    def is_split(self, action: Action) -> bool:
        """True if the template splits the backward of the action's stage and micro-batch."""
        return self._place(action).of_kind(Kind.INPUT) in self._split

    def _whole_backwards(self, tasks: TaskGraph) -> TaskGraph:
        """The tasks in which a full backward sends its gradients at its end, as if its first half took all the time."""
        units = {Kind.INPUT: 2.0, Kind.WEIGHT: 0.0}
        known = zip(tasks.actions, tasks.seconds, strict=True)
        return replace(
            tasks,
            seconds=[unit if a.of_kind(Kind.INPUT) in self._split else units.get(a.kind, unit) for a, unit in known],
        )

    def _place(self, action: Action) -> Action:
        """The action of the chain that corresponds to an action of the plan."""
        number = self._numbers[action.stage][action.micro_batch]
        return Action(self._levels[action.stage], action.kind, number)


def _chain(length: int, num_micro_batches: int) -> Plan:
    """A chain that turns back halfway, in which all actions of a stage take one unit."""
    stages = tuple(
        Stage(
            name=str(level),
            modules=(str(level), STEP) if level == length - 1 else (str(level),),
            devices=(min(level, length - 1 - level),),
            micro_batch_size=1,
        )
        for level in range(length)
    )
    edges = tuple(Edge(src=level, dst=level + 1) for level in range(length - 1))
    return Plan(stages=stages, edges=edges, batch_size=num_micro_batches)


def actions_of(steps: Sequence[str], stages: tuple[int, int]) -> list[Action]:
    """The actions of steps: the n-th of each kind and stage is for micro-batch n.

    `F0` is a forward of the first stage, `I` and `W` are the halves of a backward, `B` is a full one; `W` without a
    stage is the oldest pending one.
    """
    counts: Counter[tuple[str, str]] = Counter()
    waiting: list[Action] = []
    done: list[Action] = []
    for step in steps:
        kind, stage = step[0], step[1:]
        if kind == "W":
            done.append(next(action for action in waiting if not stage or action.stage == stages[int(stage)]))
            waiting.remove(done[-1])
            continue
        count = (kind.replace("I", "B"), stage)
        done.append(Action(stages[int(stage)], Kind(kind), counts[count]))
        counts[count] += 1
        if kind == "I":
            waiting.append(done[-1].of_kind(Kind.WEIGHT))
    return done
