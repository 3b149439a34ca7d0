"""Building blocks: the cells of one micro-batch's actions, repeated with a fixed period, then compacted.

A cell is the time of one action. In every period a device starts all actions of one micro-batch: with two stages, the
forward, input gradients and weight gradients of each, six cells. The block alone decides how long activations live:
forwards and backwards advance by fixed numbers of cells per stage, and the sum of both, on the way down the V and on
the way up, is the same for every device. This sum divided by 6 is the memory relative to 1F1B.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362). There a block is a
table of a chain's cells. Here cells follow from a stage's level, so that a block serves any graph; if devices hold
more or fewer stages than two, passes over the devices count as down and up in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.compaction import compacted, fastest
from lightning_gpp.schedules.memory import compaction_limits, fits, peaks_of
from lightning_gpp.schedules.nominal_times import TimedRows, actions, by_nominal_time, coarse_numbers, levels
from lightning_gpp.schedules.work import Work, is_extra, turns, work_of


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
        if fits(work, orders[0].peaks):
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
        orders.append(_BlockOrder(actions(rows, weights=False), peaks_of(work, _in_free_cells(work.plan, rows))))
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
