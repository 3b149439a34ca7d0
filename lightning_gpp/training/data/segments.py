"""Segments: mini-batches between two flushes of a pipeline.

Consecutive mini-batches of one form are a segment. At its first one the pipeline fills, at its last one it drains; in
between every rank works on several mini-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_gpp.errors import ScheduleError
from lightning_gpp.schedules import Program


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a mini-batch that all ranks know: its samples, and a fingerprint of its form."""

    batch_size: int
    form: int


class Segments:
    """Divides the mini-batches of a run, or of a pass over data, into segments, equally on all ranks.

    Args:
        first: number of the first mini-batch.

    Attributes:
        current: the segment of the latest mini-batch, as far as it is known.
    """

    def __init__(self, first: int) -> None:
        self.current = range(first, first)

    def begins_at(self, number: int) -> bool:
        """True if a mini-batch is the first one of a segment."""
        return number >= self.current.stop

    def enter(self, number: int, facts: Sequence[Facts], most: int | None = None) -> range:
        """The segment of a mini-batch, as far as it is known.

        Args:
            number: number of the mini-batch.
            facts: facts about this mini-batch and those that follow.
            most: mini-batches until the next flush, this one included; None lets their forms decide.
        """
        alike = next((i for i, other in enumerate(facts) if other != facts[0]), len(facts))
        first = number if self.begins_at(number) else self.current.start
        self.current = range(first, number + (alike if most is None else min(alike, most)))
        return self.current

    def on_their_way(self, number: int, lead: int) -> range:
        """The mini-batches that any device has started, if `number` is the next one."""
        return range(number, min(number + lead, max(number, self.current.stop)))


def flushed_if_need_be(same_size: bool, continuous: Callable[[], Program], flushed: Callable[[], Program]) -> Program:
    """A program that does not flush; for mini-batches of an unusual size, if there is none, one that flushes.

    Raises:
        ScheduleError: mini-batches of the usual size need a flush.
    """
    try:
        return continuous()
    except ScheduleError:
        if same_size:
            raise
        return flushed()


def later(arguments: Sequence[Any], number: int) -> list[Any]:
    """The arguments of the user's step, except the mini-batch, for the one that comes `number` mini-batches later."""
    rest = list(arguments)
    if number and rest and isinstance(rest[0], int):
        rest[0] += number  # batch_idx
    return rest
