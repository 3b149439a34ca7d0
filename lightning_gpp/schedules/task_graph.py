"""The task graph of a mini-batch: actions on devices, their durations and memory, and the dependencies between them.

Lists by number beside mappings by name: schedulers look tasks up by the hundred thousand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gpp.schedules.actions import Action

Task = tuple[int, Action]
"""An action on one device."""

DeviceOrders = Sequence[Sequence[Action]]
"""For every device its actions, in order."""

Readers = Mapping[Task, Sequence[tuple[Task, float]]]
"""For every task those that wait for it, and the seconds that its message takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """All tasks, in lists by their numbers.

    Args:
        numbers: number of every task, from 0.
        devices: device of every task.
        actions: action of every task.
        seconds: duration of every task.
        takes: bytes that a task allocates, negative if it frees more.
        readers: tasks that wait for a task, and the seconds that its message takes.
        missing: number of tasks that a task waits for.
    """

    numbers: Mapping[Task, int]
    devices: Sequence[int]
    actions: Sequence[Action]
    seconds: Sequence[float]
    takes: Sequence[float]
    readers: Sequence[Sequence[tuple[int, float]]]
    missing: Sequence[int]


def task_graph(
    seconds: Mapping[Task, float],
    readers: Readers,
    missing: Mapping[Task, int],
    takes: Mapping[Task, float] | None = None,
) -> TaskGraph:
    """Number the tasks in the order of `seconds`. Without `takes` no task needs memory."""
    numbers = {task: number for number, task in enumerate(seconds)}
    return TaskGraph(
        numbers=numbers,
        devices=[device for device, _ in numbers],
        actions=[action for _, action in numbers],
        seconds=list(seconds.values()),
        takes=[takes[task] for task in numbers] if takes is not None else [0.0] * len(numbers),
        readers=[[(numbers[reader], travel) for reader, travel in readers[task]] for task in numbers],
        missing=[missing[task] for task in numbers],
    )
