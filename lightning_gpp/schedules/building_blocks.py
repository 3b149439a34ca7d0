"""Building blocks: what one micro-batch does in which cell, repeated with a fixed period, then squeezed.

A cell is the time of one action. In every period a device starts all that it has to do for one micro-batch: with two
stages a forward, gradients of inputs and gradients of parameters of each, six cells. The block alone decides how long
activations live: forwards move on by so and so many cells per stage, backwards by others, and the sum of both, on the
way down the V and on the way up, is the same for every device. This sum over 6 is the memory in that of 1F1B.

Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362). There a block is a
table of a chain's cells. Here cells follow from a stage's level, so that a block serves any graph; where devices hold
other numbers of stages than two, laps count as down and up in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpp.plan import Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.compaction import compacted, fastest
from lightning_gpp.schedules.memory import fits, peaks_of, rooms
from lightning_gpp.schedules.nominal_times import DueRows, actions, by_due_times, coarse_numbers, levels
from lightning_gpp.schedules.work import Work, is_extra, turns, work_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Cells from a stage's action to its neighbour's: on the way down the V, and on the way up.

    `gaps`: cells between the last forward and the first backward of a micro-batch, to choose from: the right ones for
    the number of devices leave no two actions of a device in one cell.
    """

    forward: tuple[int, int]
    backward: tuple[int, int]
    gaps: tuple[int, ...]


_ROUNDING: Final = 0.1
"""Cells by which due times may be off, for those of an action are raised by a little after those that it waits for."""


def squeezed_blocks(plan: Plan, batch_size: int, blocks: Sequence[Block]) -> Schedule:
    """The order of a building block, squeezed.

    Args:
        plan: its figures' seconds count where they are known.
        batch_size: samples of the mini-batch.
        blocks: the first whose activations fit into `plan.memory_bytes` is taken, otherwise the last one.
    """
    work = work_of(plan, batch_size)
    for block in blocks:
        layouts = _leanest(work, block)
        if fits(work, layouts[0].peaks):
            break
    runs = (run for layout in layouts for run in compacted(work, layout.rows, rooms(work, layout.peaks)))
    return work.order(fastest(work, runs).rows)


@dataclass(frozen=True, slots=True)
class _Layout:
    """An order without gradients of parameters, and the peaks with them in free cells."""

    rows: list[list[Action]]
    peaks: list[float]


def _leanest(work: Work, block: Block) -> list[_Layout]:
    """The orders, by gaps, that need the least memory."""
    layouts = []
    for gap in block.gaps:
        rows = by_due_times(work, _Cells(work, block, gap).time)
        layouts.append(_Layout(actions(rows, weights=False), peaks_of(work, _in_free_cells(work.plan, rows))))
    least = min(max(layout.peaks) for layout in layouts)
    return [layout for layout in layouts if max(layout.peaks) <= least * (1 + 1e-9)]


class _Cells:
    """When a block's actions are due, in cells."""

    def __init__(self, work: Work, block: Block, gap: int) -> None:
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


def _offsets(block: Block, gap: int, length: int, laps: int) -> tuple[list[int], list[int]]:
    """For every level the cells of the first micro-batch's forward and of its gradients of inputs."""
    up = [level * laps // length % 2 for level in range(length)]
    forward = [0] * length
    for level in range(1, length):
        forward[level] = forward[level - 1] + block.forward[up[level]]
    backward = [forward[-1] + 1 + gap] * length
    for level in reversed(range(length - 1)):
        backward[level] = backward[level + 1] + block.backward[up[level + 1]]
    return forward, backward


def _in_free_cells(plan: Plan, rows: DueRows) -> list[list[Action]]:
    """The order with gradients of parameters in the cells that are free, the oldest first, and the rest at the end."""
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
