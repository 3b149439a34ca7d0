"""Building blocks: the cells of one micro-batch's actions, repeated with a fixed period, then compacted.

A cell is the time of one action. In every period a device starts all actions of one micro-batch: with two stages, the
forward, input gradients and weight gradients of each, six cells. The block alone decides how long activations live:
forwards and backwards advance by fixed numbers of cells per stage, and the sum of both, on the way down the V and on
the way up, is the same for every device. This sum divided by 6 is the memory relative to 1F1B.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362). There a block is a
table of a chain's cells. Here cells follow from a stage's level, so that a block serves any graph; if devices hold
more or fewer stages than two, passes over the devices count as down and up in turn.

Compaction closes the gaps of an order by list scheduling: actions move up if a device would idle. An action may
overtake others if it is ready and leaves enough memory for them, so the rest can always run in order and nothing
deadlocks. Weight gradients fill the remaining gaps, and free memory. The paper moves actions of equal length to free
cells of a chain's table; here the durations are the plan's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.list_scheduling import (
    SLACK,
    Clock,
    DeviceOrders,
    FixedOrder,
    TaskGraph,
    in_order,
    list_schedule,
)
from lightning_gpp.schedules.nominal_times import TimedRows, actions, by_nominal_time, coarse_numbers, levels
from lightning_gpp.schedules.work import Work, is_extra, turns, work_of

WINDOWS: Final = (0, 1, 2, 4)
"""Numbers of actions that an action may overtake. The best depends on the pipeline: wide windows fill more gaps at
first, and may leave larger ones later.
"""


def fastest(work: Work, trials: Iterable[FixedOrder]) -> FixedOrder:
    """The trial whose slowest device finishes first, because the next mini-batch waits for it.

    Trials run one after the other until one has no gaps.
    """
    most = max(work.loads()) * SLACK
    tried: list[FixedOrder] = []
    for trial in trials:
        tried.append(trial)
        if trial.busy <= most:
            break
    return min(tried, key=lambda trial: (trial.busy, trial.makespan))


def compacted(work: Work, rows: DeviceOrders, limits: Sequence[float]) -> Iterator[FixedOrder]:
    """Compact an order in several ways.

    Args:
        work: the plan's work.
        rows: for every device its forwards and input gradients, in an order that cannot deadlock.
        limits: memory limit of every device; the order must fit.
    """
    return (compact(work, rows, limits, window) for window in WINDOWS)


def compaction_limits(work: Work, peaks: Sequence[float]) -> list[float]:
    """Memory limit of every device for the compaction of an order with these peaks.

    It is the highest peak or, if lower, the plan's limit, but at least the device's own peak.
    """
    limits = work.limits or (max(peaks),) * len(peaks)
    return [max(peak, min(limit, max(peaks))) for peak, limit in zip(peaks, limits, strict=True)]


def compact(work: Work, rows: DeviceOrders, limits: Sequence[float], window: int = 0) -> FixedOrder:
    """Compact an order.

    Args:
        work: the plan's work.
        rows: for every device its actions. Weight gradients that are listed keep their place.
        limits: memory limit of every device.
        window: number of actions that one may overtake.
    """
    clock = Clock(len(rows), work.tasks)
    list_schedule(clock, Compaction(clock, rows, limits, window))
    return in_order(work.tasks, clock.rows)


@dataclass(slots=True)
class Compaction:
    """The policy of `compact`."""

    clock: Clock
    rows: DeviceOrders
    limits: Sequence[float]
    window: int
    takes: Sequence[float] = field(init=False)
    rest: list[list[int]] = field(init=False)
    held: list[float] = field(init=False)
    freeable: list[float] = field(init=False)
    weights: list[deque[int]] = field(init=False)
    """Weight gradients of every device that are ready and not listed."""
    follows: dict[int, int] = field(init=False)
    """The weight gradients of each input gradients, unless they are listed."""
    unlisted: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        devices, tasks = range(len(self.rows)), self.clock.tasks
        self.takes = tasks.takes
        self.rest = [[tasks.numbers[device, action] for action in row] for device, row in enumerate(self.rows)]
        self.weights = [deque() for _ in devices]
        self.held, self.freeable = [0.0 for _ in devices], [0.0 for _ in devices]
        self.follows = _unlisted_weights(tasks, {task for row in self.rest for task in row})
        self.unlisted = frozenset(self.follows.values())

    def choose(self, device: int) -> int | None:
        place, weights = self._place(device), self.weights[device]
        if place is not None and not (weights and self._is_full(device, self.rest[device][place])):
            return self._started(device, self.rest[device].pop(place))
        return self._started(device, weights.popleft()) if weights else None

    def force(self) -> int | None:
        """Never force a task: the given order fits the memory."""
        return None

    def _place(self, device: int) -> int | None:
        """Index of the first action that is ready and leaves enough memory for the actions it overtakes; None if there
        is none."""
        slack = least = self.limits[device] * SLACK - self.held[device] + self.freeable[device]
        for place, task in enumerate(self.rest[device][: self.window + 1]):
            kept = self._kept(task)
            if (place == 0 or kept <= least) and self.clock.is_ready(task):
                return place
            slack -= kept
            least = min(least, slack)
        return None

    def _kept(self, task: int) -> float:
        """Bytes that a task allocates, including unlisted weight gradients that follow it."""
        weight = self.follows.get(task)
        return self.takes[task] if weight is None else self.takes[task] + self.takes[weight]

    def _is_full(self, device: int, task: int) -> bool:
        return self.held[device] + self._kept(task) > self.limits[device] * SLACK

    def _started(self, device: int, task: int) -> int:
        self.held[device] += self.takes[task]
        weight = self.follows.get(task)
        if weight is not None:
            self.weights[device].append(weight)
            self.freeable[device] -= self.takes[weight]
        elif task in self.unlisted:
            self.freeable[device] += self.takes[task]
        return task


def _unlisted_weights(tasks: TaskGraph, listed: set[int]) -> dict[int, int]:
    pairs = (
        (number, tasks.numbers[device, action.of_kind(Kind.WEIGHT)])
        for (device, action), number in tasks.numbers.items()
        if action.kind is Kind.INPUT
    )
    return {first: second for first, second in pairs if second not in listed}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildingBlock:
    """Cells between the actions of neighbouring stages, on the way down the V and on the way up.

    `gaps`: candidates for the cells between the last forward and the first backward of a micro-batch. The number of
    devices decides which of them put no two actions of a device into one cell.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]
    gaps: tuple[int, ...]


_ROUNDING: Final = 0.1
"""Cells by which nominal times may be off, because each is slightly later than those of the action's inputs."""


def compacted_blocks(plan: Plan, batch_size: int, blocks: Sequence[BuildingBlock]) -> Schedule:
    """The compacted order of a building block.

    Args:
        plan: the plan; its seconds count if it has any.
        batch_size: samples of the mini-batch.
        blocks: candidates; the first whose activations fit `plan.memory_bytes` is used, otherwise the last.
    """
    work = work_of(plan, batch_size)
    for block in blocks:
        orders = _leanest(work, block)
        if work.fits(orders[0].peaks):
            break
    trials = (trial for order in orders for trial in compacted(work, order.rows, compaction_limits(work, order.peaks)))
    return work.order(fastest(work, trials).rows)


@dataclass(frozen=True, slots=True)
class _BlockOrder:
    """An order without weight gradients, and its peak memory if these are in free cells."""

    rows: list[list[Action]]
    peaks: list[float]


def _leanest(work: Work, block: BuildingBlock) -> list[_BlockOrder]:
    """The orders with the gaps that need the least memory."""
    orders = []
    for gap in block.gaps:
        rows = by_nominal_time(work, _Cells(work, block, gap).time)
        orders.append(_BlockOrder(actions(rows, weights=False), work.peaks(_in_free_cells(work.plan, rows))))
    least = min(max(order.peaks) for order in orders)
    return [order for order in orders if max(order.peaks) <= least * (1 + 1e-9)]


class _Cells:
    """The nominal times of a block's actions, in cells."""

    def __init__(self, work: Work, block: BuildingBlock, gap: int) -> None:
        plan = work.plan
        places = [[s for s in plan.stages_on(i) if not is_extra(plan, s)] for i in range(plan.num_devices)]
        self._numbers = coarse_numbers(plan, work.batch_size)
        self._level, length = levels(plan)
        self._period = 3 * max(sum(1 / turns(plan.stages[stage]) for stage in stages) for stages in places)
        self._forward, self._backward = _offsets(block, gap, length, max(1, *map(len, places)))

    def time(self, action: Action) -> float:
        offsets = self._forward if action.kind is Kind.FORWARD else self._backward
        number = self._numbers[action.stage][action.micro_batch]
        return number * self._period + offsets[self._level[action.stage]]


def _offsets(block: BuildingBlock, gap: int, length: int, laps: int) -> tuple[list[int], list[int]]:
    """The cells of the first micro-batch's forward and of its input gradients, by level."""
    up = [level * laps // length % 2 for level in range(length)]
    forward = [0] * length
    for level in range(1, length):
        forward[level] = forward[level - 1] + block.forward[up[level]]
    backward = [forward[-1] + 1 + gap] * length
    for level in reversed(range(length - 1)):
        backward[level] = backward[level + 1] + block.backward[up[level + 1]]
    return forward, backward


def _in_free_cells(plan: Plan, rows: TimedRows) -> list[list[Action]]:
    """The order with weight gradients in free cells, the oldest first, and the rest at the end."""
    largest = max(stage.micro_batch_size for stage in plan.stages)
    cells = [0 if is_extra(plan, i) else stage.micro_batch_size / largest for i, stage in enumerate(plan.stages)]
    full: list[list[Action]] = []
    for row in rows:
        done: list[Action] = []
        waiting: list[Action] = []
        cell = 0.0
        for entry in row:
            if entry.action.kind is Kind.WEIGHT:
                waiting.append(entry.action)
                continue
            while waiting and cell + cells[waiting[0].stage] <= entry.time + _ROUNDING:
                cell += cells[waiting[0].stage]
                done.append(waiting.pop(0))
            done.append(entry.action)
            cell = max(cell, round(entry.time, 1)) + cells[entry.action.stage]
        full.append(done + waiting)
    return full
