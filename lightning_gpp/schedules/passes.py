"""Passes that every schedule gets: recomputation, offload, data actions just in time, and the collectives of replicas.

Offload: a copy of what a forward keeps has the time of one computing action. An OFFLOAD follows its forward; its
tensors leave the device before the second computing action after it, which waits for the end of the copy. A LOAD comes
one computing action before the backward that waits for it, into memory that what leaves by then has freed. If its own
tensors are still on the device, they stay there.

Sharded parameters (fsdp): a device keeps the unsharded parameters of two stages, the one that it computes and the next
one, which is unsharded meanwhile, and the unsharded gradients of one. A device that visits its stages in sequence
(breadth-first) unshards each once per direction, whatever the number of micro-batches; one that jumps between them pays
for every jump. Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, MLSys 2023.

Unsharded parameters (none, zero1): gradients are reduced once, after a stage's last backward, while its device goes on.
Devices that share several stages may complete them in different orders; then a reduction waits for those before it in
a common order.

    breadth-first, 2 stages of 1 device, 2 micro-batches:
    0U0 1U0 0F0 0F1 1F0 1F1 1B0 1B1 1G0 0B0 0B1 0G0 1S0 0S0
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import Final

import networkx as nx

from lightning_gpp.errors import VerificationError
from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import COMPUTING, Action, Kind, Schedule
from lightning_gpp.schedules.list_scheduling import Task
from lightning_gpp.schedules.lowering import derive_messages, reads_data

_Actions = list[Action]

LEAD: Final = 2
"""Micro-batches by which data actions are ahead of the first stage that reads them."""


def with_recomputation(plan: Plan, schedule: Schedule) -> Schedule:
    """Insert recomputations right before the backwards of stages that run again, unless the schedule states them.

    They run before the backward waits for its gradients, and so fill that wait.
    """
    again = {stage for stage in range(len(plan.stages)) if plan.stages[stage].reruns}
    placed = {action for actions in schedule.devices for action in actions if action.kind is Kind.RECOMPUTE}

    def expanded(action: Action) -> tuple[Action, ...]:
        first = action.of_kind(Kind.RECOMPUTE)
        needs = action.kind in (Kind.BACKWARD, Kind.INPUT) and action.stage in again and first not in placed
        return (first, action) if needs else (action,)

    if not again:
        return schedule
    return Schedule(tuple(tuple(new for old in actions for new in expanded(old)) for actions in schedule.devices))


def with_offload(plan: Plan, schedule: Schedule) -> Schedule:
    """Insert the copies of stages that offload: each OFFLOAD right after its forward, each LOAD one computing action
    before the backward, but after its OFFLOAD."""
    stages = {index for index, stage in enumerate(plan.stages) if stage.offload}
    if not stages:
        return schedule
    return Schedule(tuple(tuple(_with_copies(actions, stages)) for actions in schedule.devices))


_BACKWARDS: Final = (Kind.BACKWARD, Kind.INPUT)
"""Kinds that read what a forward has kept."""


def _with_copies(actions: Sequence[Action], stages: Collection[int]) -> _Actions:
    kept = {action[::2] for action in actions if action.kind in _BACKWARDS and action.stage in stages}
    result: list[Action] = []
    latest = 0  # position of the latest computing action
    for action in actions:
        moved = action[::2] in kept
        if moved and action.kind in _BACKWARDS:
            is_own = result[latest] == action.of_kind(Kind.FORWARD)
            result.insert(latest + 2 if is_own else latest, action.of_kind(Kind.LOAD))
        if action.kind in COMPUTING:
            latest = len(result)
        result.append(action)
        if moved and action.kind is Kind.FORWARD:
            result.append(action.of_kind(Kind.OFFLOAD))
    return result


def with_data(
    plan: Plan, schedule: Schedule, started: Mapping[Task, float], batch_size: int, training: bool
) -> Schedule:
    """Insert the data action of every micro-batch a little before the first stage reads it.

    All actions in front of a data action start before those that read its data, so none of them waits for it.
    """
    if not reads_data(plan):
        return schedule
    rows = list(schedule.devices)
    for device, deadlines in _deadlines(plan, started, batch_size, training).items():
        rows[device] = _woven(device, rows[device], deadlines, started)
    return Schedule(tuple(rows))


def _deadlines(
    plan: Plan, started: Mapping[Task, float], batch_size: int, training: bool
) -> dict[int, dict[Action, float]]:
    """The data actions of every device of the user's step in order, each with its latest nominal time."""
    step, latest = plan.step_stage, max(started.values(), default=0)
    lead = LEAD * plan.stages[step].micro_batch_size
    deadlines: dict[int, dict[Action, float]] = {
        device: {Action(step, Kind.DATA, number): latest for number in plan.micro_batches(step, device, batch_size)}
        for device in plan.devices_of(SOURCE)
    }
    for message in derive_messages(plan, batch_size, training=False):
        if plan.edges[message.edge].src == SOURCE:
            row = deadlines[message.src]
            row[message.producer] = min(row[message.producer], started[message.dst, message.consumer] - lead)
    return {device: _monotone(row) for device, row in deadlines.items()}


def _monotone(row: dict[Action, float]) -> dict[Action, float]:
    """The same times, none later than those after it."""
    return dict(zip(row, [*accumulate(reversed(row.values()), min)][::-1], strict=True))


def _woven(
    device: int, actions: tuple[Action, ...], deadlines: Mapping[Action, float], started: Mapping[Task, float]
) -> tuple[Action, ...]:
    result: list[Action] = []
    waiting = list(deadlines)
    for action in actions:
        while waiting and deadlines[waiting[0]] <= started.get((device, action), 0):
            result.append(waiting.pop(0))
        result.append(action)
    return (*result, *waiting)


_Pass = Callable[[_Actions, Collection[int]], _Actions]

BUFFERS: Final = 2
"""Number of stages whose unsharded parameters a device keeps: the one that it computes, and the next."""

_MAKE_GRADIENTS: Final = (Kind.BACKWARD, Kind.WEIGHT)


def with_collectives(
    plan: Plan, schedule: Schedule, replicated: Collection[int], training: bool = True, *, apart: bool = False
) -> Schedule:
    """Insert UNSHARD, RESHARD and REDUCE for the stages that several ranks hold.

    Args:
        plan: its `sharding` decides.
        schedule: the computing actions of every device.
        replicated: stages with more than one rank, over all pipeline replicas.
        training: whether there are gradients.
        apart: unshard parameters before all actions and reduce gradients after them, whatever the cost, so that no
            replica waits for another one in between.
    """
    held = [sorted(set(replicated) & set(plan.stages_on(device))) for device in range(plan.num_devices)]
    rows = [list(actions) for actions in schedule.devices]
    sharded = plan.sharding == "fsdp"
    if sharded:
        rows = _first_consistent(plan, (_gathered, _gathered_once)[apart:], rows, held)
    if training:
        rows = (
            _first_consistent(plan, (_reduced_often, _reduced_last)[apart:], rows, held)
            if sharded
            else _reduced(rows, held)
        )
    return _schedule(rows)


def _first_consistent(
    plan: Plan, passes: Iterable[_Pass], rows: Sequence[_Actions], held: Sequence[Sequence[int]]
) -> list[_Actions]:
    """The first placement under which all replicas of a stage call its collectives in the same order."""
    outcomes = ([run(*pair) for pair in zip(rows, held, strict=True)] for run in passes)
    return next(outcome for outcome in outcomes if not _problem(plan, outcome))


def _schedule(rows: Sequence[Sequence[Action]]) -> Schedule:
    return Schedule(tuple(map(tuple, rows)))


def check_collectives(plan: Plan, rows: Sequence[Sequence[Action]]) -> None:
    """Check that replicas call collectives in one order, on complete gradients, and that actions read unsharded
    parameters.

    Args:
        plan: the plan.
        rows: the actions of every device.

    Raises:
        VerificationError: names stage and device.
    """
    problem = _problem(plan, rows)
    if problem:
        raise VerificationError(problem)
    for device, actions in enumerate(rows):
        _check_unsharded(device, actions)
        _check_complete(device, actions)


_WHAT: Final = "collectives (U, G)"


def _problem(plan: Plan, rows: Sequence[Sequence[Action]]) -> str:
    """The reason why collectives do not match, in words; empty if they do."""
    collectives = [_collectives(actions) for actions in rows]
    for stage, entry in enumerate(plan.stages):
        called = {tuple(action for action in collectives[device] if action.stage == stage) for device in entry.devices}
        if len(called) > 1:
            return f"The replicas of stage {entry.name!r} do not all take part in the same {_WHAT}."
    order = nx.DiGraph()
    for actions in collectives:
        nx.add_path(order, actions)
    agree = nx.is_directed_acyclic_graph(order)
    return "" if agree else f"Devices that share several stages run their {_WHAT} in different orders."


def _collectives(actions: Sequence[Action]) -> list[Action]:
    return [action for action in actions if action.kind in (Kind.UNSHARD, Kind.REDUCE)]


def _check_unsharded(device: int, actions: Sequence[Action]) -> None:
    sharded = {action.stage for action in actions if action.kind is Kind.UNSHARD}
    unsharded: set[int] = set()
    for action in actions:
        if action.kind is Kind.UNSHARD:
            unsharded.add(action.stage)
        elif action.kind is Kind.RESHARD:
            unsharded.discard(action.stage)
        elif action.kind in COMPUTING and action.stage in sharded - unsharded:
            raise VerificationError(f"Device {device} runs {action} while the stage's parameters are sharded.")


def _check_complete(device: int, actions: Sequence[Action]) -> None:
    reduced = {action.stage for action in actions if action.kind is Kind.REDUCE}
    pending: set[int] = set()
    for action in actions:
        if action.kind in _MAKE_GRADIENTS and action.stage in reduced:
            pending.add(action.stage)
        elif action.kind is Kind.REDUCE:
            pending.discard(action.stage)
    if pending:
        raise VerificationError(
            f"Device {device} computes gradients of stages {sorted(pending)} after their last reduction."
        )


def _gathered(actions: _Actions, sharded: Collection[int]) -> _Actions:
    """Unshard each stage one visit ahead; reshard the stage that is needed again last."""
    readers = [action.stage for action in actions if action.kind in COMPUTING and action.stage in sharded]
    visits = [stage for stage, _ in groupby(readers)]
    result: list[Action] = []
    parameters, current = _Parameters(result), -1
    for action in actions:
        reads = action.kind in COMPUTING and action.stage in sharded
        if reads and (current < 0 or visits[current] != action.stage):
            current += 1
            parameters.provide(visits[current:])
        result.append(action)
    parameters.clear()
    return result


def _gathered_once(actions: _Actions, sharded: Collection[int]) -> _Actions:
    """Unshard all stages at the start, reshard them at the end, if devices visit shared stages in different orders."""
    first, last = ([Action(stage, kind, 0) for stage in sorted(sharded)] for kind in (Kind.UNSHARD, Kind.RESHARD))
    return [*first, *actions, *last]


class _Parameters:
    """Stages whose parameters are currently unsharded on a device."""

    def __init__(self, actions: list[Action]) -> None:
        self._actions = actions
        self._count: Counter[Action] = Counter()
        self._unsharded: list[int] = []

    def provide(self, visits: Sequence[int]) -> None:
        """Unshard the first of these stages, and start to unshard the next."""
        for stage in visits[:BUFFERS]:
            if stage not in self._unsharded:
                if len(self._unsharded) == BUFFERS:
                    self._drop(next(stage for stage in self._unsharded if stage != visits[0]))
                self._unsharded.append(stage)
                self._add(stage, Kind.UNSHARD)

    def clear(self) -> None:
        for stage in list(self._unsharded):
            self._drop(stage)

    def _drop(self, stage: int) -> None:
        self._unsharded.remove(stage)
        self._add(stage, Kind.RESHARD)

    def _add(self, stage: int, kind: Kind) -> None:
        action = Action(stage, kind, 0)
        self._actions.append(action.at(self._count[action]))
        self._count[action] += 1


def _reduced_often(actions: _Actions, sharded: Collection[int]) -> _Actions:
    """Reduce a stage's gradients when they are complete, and whenever another stage's gradients need the memory."""
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


def _reduced_last(actions: _Actions, sharded: Collection[int]) -> _Actions:
    """Reduce all gradients at the end, stage by stage, if devices complete shared stages in different orders."""
    return [*actions, *(Action(stage, Kind.REDUCE, 0) for stage in sorted(sharded, reverse=True))]


def _reduced(rows: Sequence[_Actions], held: Sequence[Sequence[int]]) -> list[_Actions]:
    """Reduce each stage's gradients when they are complete, in one order of stages for all devices.

    The order is that in which the last replicas complete their gradients, counted in remaining actions.
    """
    ends = [_ends(*pair) for pair in zip(rows, held, strict=True)]
    left: dict[int, int] = {}
    for actions, own in zip(rows, ends, strict=True):
        for stage, end in own.items():
            left[stage] = min(left.get(stage, len(actions)), len(actions) - end)
    order = sorted(left, key=lambda stage: (left[stage], stage), reverse=True)
    return [_in_order(actions, own, order) for actions, own in zip(rows, ends, strict=True)]


def _ends(actions: _Actions, stages: Collection[int]) -> dict[int, int]:
    """Number of actions after which every stage's gradients are complete; 0 if it has none."""
    makers = (entry for entry in enumerate(actions, 1) if entry[1].kind in _MAKE_GRADIENTS)
    return dict.fromkeys(stages, 0) | {action.stage: end for end, action in makers if action.stage in stages}


def _in_order(actions: _Actions, ends: Mapping[int, int], order: Sequence[int]) -> _Actions:
    waiting = [stage for stage in order if stage in ends]
    result: list[Action] = []
    for index in range(len(actions) + 1):
        while waiting and ends[waiting[0]] <= index:
            result.append(Action(waiting.pop(0), Kind.REDUCE, 0))
        result += actions[index : index + 1]
    return result
