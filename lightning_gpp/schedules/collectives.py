"""Where the replicas of a stage meet: parameters are gathered and dropped, gradients are summed.

Sharded parameters (fsdp): a device has room for the whole parameters of two stages, the one that it computes and the
next one, which is gathered meanwhile, and for the whole gradients of one. So a device that visits its stages one after
the other (breadth-first) gathers each once per direction, whatever the number of micro-batches; one that jumps between
them pays for every jump. Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023.

Whole parameters (none, zero1): gradients are summed once, after a stage's last backward, while its device goes on.
Devices that share several stages may complete them in different orders; then a sum waits for those before it in a
common order.

    breadth-first, 2 stages of 1 device, 2 micro-batches:
    0U0 1U0 0F0 0F1 1F0 1F1 1B0 1B1 1G0 0B0 0B1 0G0 1S0 0S0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final

import networkx as nx

from lightning_gpp.errors import VerificationError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule

_Row = list[Action]
_Pass = Callable[[_Row, Collection[int]], _Row]

BUFFERS: Final = 2
"""Stages whose gathered parameters a device has room for: the one that it computes, and the next."""

_READ_PARAMETERS: Final = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
"""The gradients of parameters are computed through what a module makes of them, and summed where these are whole."""
_MAKE_GRADIENTS: Final = (Kind.BACKWARD, Kind.WEIGHT)


def with_collectives(
    plan: Plan, schedule: Schedule, replicated: Collection[int], training: bool = True, *, apart: bool = False
) -> Schedule:
    """Insert UNSHARD, RESHARD and REDUCE for the stages that several ranks hold.

    Args:
        plan: its `sharding` counts.
        schedule: the computing actions of every device.
        replicated: stages with more than one rank, over all copies of the pipeline.
        training: whether gradients are made.
        apart: gather sharded parameters before all work, and sum their gradients after it, whatever that costs: then
            no replica waits for another one in between.
    """
    held = [sorted(set(replicated) & set(plan.stages_on(device))) for device in range(plan.num_devices)]
    rows = [list(actions) for actions in schedule.devices]
    sharded = plan.sharding == "fsdp"
    if sharded:
        rows = _first_that_meets(plan, (_gathered, _gathered_once)[apart:], rows, held)
    if training:
        rows = (
            _first_that_meets(plan, (_summed_often, _summed_last)[apart:], rows, held)
            if sharded
            else _summed(rows, held)
        )
    return _schedule(rows)


def _first_that_meets(
    plan: Plan, passes: Iterable[_Pass], rows: Sequence[_Row], held: Sequence[Sequence[int]]
) -> list[_Row]:
    """The outcome of the first of the passes with which the replicas of all stages meet."""
    outcomes = ([run(*pair) for pair in zip(rows, held, strict=True)] for run in passes)
    return next(outcome for outcome in outcomes if not _problem(plan, outcome))


def _schedule(rows: Sequence[Sequence[Action]]) -> Schedule:
    return Schedule(tuple(map(tuple, rows)))


def check_collectives(plan: Plan, rows: Sequence[Sequence[Action]]) -> None:
    """Replicas meet in one order; parameters are whole when they are read; gradients are complete when summed.

    Args:
        plan: whose stages they are.
        rows: the actions of every device.

    Raises:
        VerificationError: names stage and device.
    """
    problem = _problem(plan, rows)
    if problem:
        raise VerificationError(problem)
    for device, actions in enumerate(rows):
        _check_whole(device, actions)
        _check_complete(device, actions)


_WHAT: Final = "gatherings of parameters (U) and sums of gradients (G)"


def _problem(plan: Plan, rows: Sequence[Sequence[Action]]) -> str:
    """Why replicas do not meet; empty if they do."""
    meetings = [_meetings(actions) for actions in rows]
    for stage, entry in enumerate(plan.stages):
        met = {tuple(action for action in meetings[device] if action.stage == stage) for device in entry.devices}
        if len(met) > 1:
            return f"The replicas of stage {entry.name!r} do not all take part in the same {_WHAT}."
    order = nx.DiGraph()
    for actions in meetings:
        nx.add_path(order, actions)
    agree = nx.is_directed_acyclic_graph(order)
    return "" if agree else f"Devices that share several stages run their {_WHAT} in different orders."


def _meetings(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action.kind in (Kind.UNSHARD, Kind.REDUCE)]


def _check_whole(device: int, actions: Sequence[Action]) -> None:
    sharded = {action.stage for action in actions if action.kind is Kind.UNSHARD}
    whole: set[int] = set()
    for action in actions:
        if action.kind is Kind.UNSHARD:
            whole.add(action.stage)
        elif action.kind is Kind.RESHARD:
            whole.discard(action.stage)
        elif action.kind in _READ_PARAMETERS and action.stage in sharded - whole:
            raise VerificationError(f"Device {device} runs {action} while the stage's parameters are sharded.")


def _check_complete(device: int, actions: Sequence[Action]) -> None:
    summed = {action.stage for action in actions if action.kind is Kind.REDUCE}
    pending: set[int] = set()
    for action in actions:
        if action.kind in _MAKE_GRADIENTS and action.stage in summed:
            pending.add(action.stage)
        elif action.kind is Kind.REDUCE:
            pending.discard(action.stage)
    if pending:
        raise VerificationError(f"Device {device} makes gradients of stages {sorted(pending)} after their last sum.")


def _gathered(actions: _Row, sharded: Collection[int]) -> _Row:
    """Gather each stage one visit ahead; drop the stage that is needed last."""
    readers = [action.stage for action in actions if action.kind in _READ_PARAMETERS and action.stage in sharded]
    visits = [stage for stage, _ in groupby(readers)]
    result: list[Action] = []
    room, current = _Room(result), -1
    for action in actions:
        reads = action.kind in _READ_PARAMETERS and action.stage in sharded
        if reads and (current < 0 or visits[current] != action.stage):
            current += 1
            room.provide(visits[current:])
        result.append(action)
    room.clear()
    return result


def _gathered_once(actions: _Row, sharded: Collection[int]) -> _Row:
    """Where devices visit shared stages in different orders: gather all at the start, and drop them at the end."""
    first, last = ([Action(stage, kind, 0) for stage in sorted(sharded)] for kind in (Kind.UNSHARD, Kind.RESHARD))
    return [*first, *actions, *last]


class _Room:
    """The stages whose parameters are whole on a device."""

    def __init__(self, actions: list[Action]) -> None:
        self._actions = actions
        self._count: Counter[Action] = Counter()
        self._whole: list[int] = []

    def provide(self, visits: Sequence[int]) -> None:
        """Have the first of these stages whole, and start to gather the next."""
        for stage in visits[:BUFFERS]:
            if stage not in self._whole:
                if len(self._whole) == BUFFERS:
                    self._drop(self._last_needed(visits))
                self._whole.append(stage)
                self._add(stage, Kind.UNSHARD)

    def clear(self) -> None:
        for stage in list(self._whole):
            self._drop(stage)

    def _last_needed(self, visits: Sequence[int]) -> int:
        def next_use(stage: int) -> int:
            return visits.index(stage) if stage in visits else len(visits)

        return max((stage for stage in self._whole if stage != visits[0]), key=next_use)

    def _drop(self, stage: int) -> None:
        self._whole.remove(stage)
        self._add(stage, Kind.RESHARD)

    def _add(self, stage: int, kind: Kind) -> None:
        action = Action(stage, kind, 0)
        self._actions.append(action._replace(micro_batch=self._count[action]))
        self._count[action] += 1


def _summed_often(actions: _Row, sharded: Collection[int]) -> _Row:
    """Sum gradients when a stage's are complete, and whenever another stage's gradients need the room."""
    makers = [i for i, action in enumerate(actions) if action.kind in _MAKE_GRADIENTS and action.stage in sharded]
    last = set({actions[index].stage: index for index in makers}.values())
    turns = {index for index, following in pairwise(makers) if actions[index].stage != actions[following].stage}
    result: list[Action] = []
    count: Counter[int] = Counter()
    for index, action in enumerate(actions):
        result.append(action)
        if index in last | turns:
            result.append(Action(action.stage, Kind.REDUCE, count[action.stage]))
            count[action.stage] += 1
    return result


def _summed_last(actions: _Row, sharded: Collection[int]) -> _Row:
    """Where devices would meet in different orders: sum all gradients at the end, stage by stage."""
    sums = [Action(stage, Kind.REDUCE, 0) for stage in sorted(sharded, reverse=True)]
    return [*actions, *sums]


def _summed(rows: Sequence[_Row], held: Sequence[Sequence[int]]) -> list[_Row]:
    """Sum gradients when a stage's are complete, and those of all stages before it in one order for all devices.

    A stage is as early in this order as its last replica is done, in actions that are left to do.
    """
    ends = [_ends(*pair) for pair in zip(rows, held, strict=True)]
    left: dict[int, int] = {}
    for actions, found in zip(rows, ends, strict=True):
        for stage, end in found.items():
            left[stage] = min(left.get(stage, len(actions)), len(actions) - end)
    order = sorted(left, key=lambda stage: (left[stage], stage), reverse=True)
    return [_in_order(actions, found, order) for actions, found in zip(rows, ends, strict=True)]


def _ends(actions: _Row, stages: Collection[int]) -> dict[int, int]:
    """For every stage the number of actions after which its gradients are complete; 0 if it makes none."""
    makers = (entry for entry in enumerate(actions, 1) if entry[1].kind in _MAKE_GRADIENTS)
    return dict.fromkeys(stages, 0) | {action.stage: end for end, action in makers if action.stage in stages}


def _in_order(actions: _Row, ends: Mapping[int, int], order: Sequence[int]) -> _Row:
    waiting = [stage for stage in order if stage in ends]
    result: list[Action] = []
    for index in range(len(actions) + 1):
        while waiting and ends[waiting[0]] <= index:
            result.append(Action(waiting.pop(0), Kind.REDUCE, 0))
        result += actions[index : index + 1]
    return result
