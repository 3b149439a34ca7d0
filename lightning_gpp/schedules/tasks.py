"""Tasks, which are actions on devices, and their numbers: clocks look them up by the hundred thousand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_gpp.schedules.actions import Action

Task = tuple[int, Action]
"""An action on one device."""

Rows = Sequence[Sequence[Action]]
"""For every device its actions, in order."""

Readers = Mapping[Task, Sequence[tuple[Task, float]]]
"""For every task those that wait for it, and the seconds that its message is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """All tasks, in lists by their numbers.

    Args:
        numbers: of the tasks, 0 first.
        devices: on which they run.
        actions: that they are.
        seconds: that they take.
        readers: who waits for a task, and the seconds until its message is there.
        missing: for every task how many it waits for.
    """

    numbers: Mapping[Task, int]
    devices: Sequence[int]
    actions: Sequence[Action]
    seconds: Sequence[float]
    readers: Sequence[Sequence[tuple[int, float]]]
    missing: Sequence[int]


def numbered(seconds: Mapping[Task, float], readers: Readers, missing: Mapping[Task, int]) -> Numbered:
    """Number the tasks in the order in which `seconds` has them."""
    numbers = {task: number for number, task in enumerate(seconds)}
    return Numbered(
        numbers=numbers,
        devices=[device for device, _ in numbers],
        actions=[action for _, action in numbers],
        seconds=list(seconds.values()),
        readers=[[(numbers[reader], travel) for reader, travel in readers[task]] for task in numbers],
        missing=[missing[task] for task in numbers],
    )
