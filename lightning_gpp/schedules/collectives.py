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
from collections.abc import Collection, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Final

import networkx as nx

from lightning_gpp.errors import VerificationError
from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule

BUFFERS: Final = 2
"""Stages whose gathered parameters a device has room for: the one that it computes, and the next."""

_READ_PARAMETERS: Final = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT)
_MAKE_GRADIENTS: Final = (Kind.BACKWARD, Kind.WEIGHT)


def with_collectives(plan: Plan, schedule: Schedule, replicated: Collection[int], training: bool = True) -> Schedule:
    """Insert UNSHARD, RESHARD and REDUCE for the stages that several ranks hold.

    Args:
        plan: its `sharding` counts.
        schedule: the computing actions of every device.
        replicated: stages with more than one rank, over all copies of the pipeline.
        training: whether gradients are made.
    """
    rows = [list(actions) for actions in schedule.devices]
    sharded = plan.sharding == "fsdp"
    if sharded:
        rows = [_gathered(actions, replicated) for actions in rows]
    if not training:
        return _schedule(rows)
    summed = [_summed(actions, replicated, sharded) for actions in rows]
    if not _agree(summed):
        summed = (
            [_summed_last(actions, replicated) for actions in rows] if sharded else _summed_in_order(rows, replicated)
        )
    return _schedule(summed)


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
    meetings = [_meetings(actions) for actions in rows]
    for stage, entry in enumerate(plan.stages):
        met = {tuple(action for action in meetings[device] if action.stage == stage) for device in entry.devices}
        if len(met) > 1:
            raise VerificationError(f"The replicas of stage {entry.name!r} do not all take part in the same {_WHAT}.")
    if not _agree(rows):
        raise VerificationError(f"Devices that share several stages run their {_WHAT} in different orders.")
    for device, actions in enumerate(rows):
        _check_whole(device, actions)
        _check_complete(device, actions)


_WHAT: Final = "gatherings of parameters (U) and sums of gradients (G)"


def _meetings(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action.kind in (Kind.UNSHARD, Kind.REDUCE)]


def _agree(rows: Sequence[Sequence[Action]]) -> bool:
    """Whether there is one order of all meetings that every device follows."""
    order = nx.DiGraph()
    for actions in rows:
        nx.add_path(order, _meetings(actions))
    return bool(nx.is_directed_acyclic_graph(order))


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


def _gathered(actions: Sequence[Action], sharded: Collection[int]) -> list[Action]:
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


def _summed(actions: Sequence[Action], replicated: Collection[int], often: bool) -> list[Action]:
    """Sum gradients when a stage's are complete; `often`: whenever another stage's gradients need the room."""
    makers = [i for i, action in enumerate(actions) if action.kind in _MAKE_GRADIENTS and action.stage in replicated]
    last = set({actions[index].stage: index for index in makers}.values())
    turns = {index for index, following in pairwise(makers) if actions[index].stage != actions[following].stage}
    ends = last | turns if often else last
    result: list[Action] = []
    count: Counter[int] = Counter()
    for index, action in enumerate(actions):
        result.append(action)
        if index in ends:
            result.append(Action(action.stage, Kind.REDUCE, count[action.stage]))
            count[action.stage] += 1
    return result


def _summed_in_order(rows: Sequence[Sequence[Action]], replicated: Collection[int]) -> list[list[Action]]:
    """Sum gradients when a stage's are complete, and those of all stages before it in one order for all devices.

    A stage is as early in this order as its last replica is done, in actions that are left to do.
    """
    ends = [_ends(actions, replicated) for actions in rows]
    left = {stage: len(actions) for actions, found in zip(rows, ends, strict=True) for stage in found}
    for actions, found in zip(rows, ends, strict=True):
        left |= {stage: min(left[stage], len(actions) - end) for stage, end in found.items()}
    order = sorted(left, key=lambda stage: (left[stage], stage), reverse=True)
    return [_in_order(actions, found, order) for actions, found in zip(rows, ends, strict=True)]


def _ends(actions: Sequence[Action], replicated: Collection[int]) -> dict[int, int]:
    """For every stage the index of the action that completes its gradients."""
    makers = (entry for entry in enumerate(actions) if entry[1].kind in _MAKE_GRADIENTS)
    return {action.stage: index for index, action in makers if action.stage in replicated}


def _in_order(actions: Sequence[Action], ends: Mapping[int, int], order: Sequence[int]) -> list[Action]:
    waiting = [stage for stage in order if stage in ends]
    result: list[Action] = []
    for index, action in enumerate(actions):
        result.append(action)
        while waiting and ends[waiting[0]] <= index:
            result.append(Action(waiting.pop(0), Kind.REDUCE, 0))
    return result


def _summed_last(actions: Sequence[Action], replicated: Collection[int]) -> list[Action]:
    """Where devices would meet in different orders: sum all gradients at the end, stage by stage."""
    stages = {action.stage for action in actions if action.kind in _MAKE_GRADIENTS} & set(replicated)
    return [*actions, *(Action(stage, Kind.REDUCE, 0) for stage in sorted(stages, reverse=True))]
