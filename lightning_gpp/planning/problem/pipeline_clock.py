"""A quick simulator for search: stages instead of devices, one number of micro-batches, 1F1B or all forwards first.

It follows the rules of `simulation.simulate` for programs of `1f1b` and `gpipe` with one stage per device: a transfer
starts when it has been sent, its buffer has been posted (LOOKAHEAD actions before it is read) and the link is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

LOOKAHEAD = 2
"""Actions between posting a buffer and reading it, as `schedules.lower` places them."""

EXACT_ACTIONS = 2_000
"""Runs with more actions are extrapolated from their period instead of simulated to the end."""


@dataclass(slots=True, kw_only=True)
class ClockedStages:
    """Stages in topological order, per micro-batch: seconds of compute, and of transfers by (producer, consumer).

    `again`: seconds of running the forward again before a backward, without waiting for a gradient; 0 for stages that
    do not recompute. `data`: seconds until a stage's data have come from the device that loads them; 0 if there are
    none.
    """

    forward: list[float]
    again: list[float]
    backward: list[float]
    data: list[float]
    sent: dict[tuple[int, int], float]
    returned: dict[tuple[int, int], float]
    """Seconds of the transfers of gradients, by (producer, consumer) of the forward."""


def end_times(pipeline: ClockedStages, warm_up: Sequence[int], num_micro_batches: int) -> list[float]:
    """The end of every stage's last backward. `warm_up`: forwards before the first backward, at least 1."""
    num_stages, short = len(pipeline.forward), max(24, 3 * max(warm_up))
    if 2 * num_stages * num_micro_batches <= EXACT_ACTIONS or num_micro_batches <= short + 8:
        return _play(pipeline, warm_up, num_micro_batches)
    forwards_first = min(warm_up) == num_micro_batches
    ends = [
        _play(pipeline, [number] * num_stages if forwards_first else warm_up, number) for number in (short, short + 8)
    ]
    rest = (num_micro_batches - short) / 8
    return [first + (second - first) * rest for first, second in zip(*ends, strict=True)]


def step_seconds(pipeline: ClockedStages, counts: Sequence[int], number: int, all_reduce: Sequence[float]) -> float:
    """Seconds of a step with a flush.

    Args:
        pipeline: the stages.
        counts: forwards of every stage before its first backward.
        number: number of micro-batches.
        all_reduce: seconds that every stage needs after its last backward.
    """
    return max(end + last for end, last in zip(end_times(pipeline, counts, number), all_reduce, strict=True))


def period_seconds(pipeline: ClockedStages, number: int, all_reduce: Sequence[float]) -> float:
    """Seconds from one mini-batch to the next without a flush: those of the busiest stage or link."""
    links = (*pipeline.sent.values(), *pipeline.returned.values(), *pipeline.data)
    stages = zip(pipeline.forward, pipeline.again, pipeline.backward, strict=True)
    computing = (number * sum(stage) + last for stage, last in zip(stages, all_reduce, strict=True))
    return max(*computing, number * max(links, default=0.0))


def _play(pipeline: ClockedStages, warm_up: Sequence[int], num_micro_batches: int) -> list[float]:
    stages = _stages(pipeline, warm_up, num_micro_batches)
    waiting = list(reversed(stages))
    while waiting:
        waiting.pop().run(waiting)
    return [stage.time for stage in stages]


@dataclass(slots=True, eq=False)
class _ClockEdge:
    """A channel in one direction: when each micro-batch was sent, and when the link is free again."""

    seconds: float
    free: float = 0.0
    sent: list[float] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _ClockStage:
    """The order of one stage: `warm_up` forwards, then a backward and a forward in turn, then backwards.

    Pairs of channels and neighbours are those of forwards and of backwards.
    """

    forward: float
    again: float
    backward: float
    warm_up: int
    number: int
    done: list[int] = field(default_factory=lambda: [0, 0])  # forwards, backwards
    time: float = 0.0
    ends: list[float] = field(default_factory=lambda: [0.0] * (LOOKAHEAD + 1))
    incoming: tuple[list[_ClockEdge], list[_ClockEdge]] = field(default_factory=lambda: ([], []))
    outgoing: tuple[list[_ClockEdge], list[_ClockEdge]] = field(default_factory=lambda: ([], []))
    neighbours: tuple[list[_ClockStage], list[_ClockStage]] = field(default_factory=lambda: ([], []))

    def run(self, waiting: list[_ClockStage]) -> None:
        """Advance as far as inputs allow; stages that can go on because of it are appended to `waiting`."""
        forwards, backwards = self.done
        while backwards < self.number:
            direction = 0 if forwards < self.number and forwards < backwards + self.warm_up else 1
            index = backwards if direction else forwards
            for edge in self.incoming[direction]:
                if len(edge.sent) <= index:
                    return self._pause(forwards, backwards, waiting)
            self._execute(direction, index)
            if direction:
                backwards += 1
            else:
                forwards += 1
        return self._pause(forwards, backwards, waiting)

    def _pause(self, forwards: int, backwards: int, waiting: list[_ClockStage]) -> None:
        if forwards > self.done[0]:
            waiting.extend(self.neighbours[0])
        if backwards > self.done[1]:
            waiting.extend(self.neighbours[1])
        self.done[:] = forwards, backwards

    def _execute(self, direction: int, index: int) -> None:
        if direction and self.again:
            self.time += self.again
            self.ends.append(self.time)
        start, posted = self.time, self.ends[-1 - LOOKAHEAD]
        for edge in self.incoming[direction]:
            begin, free = edge.sent[index], edge.free
            if free > begin:
                begin = free
            if posted > begin:
                begin = posted
            edge.free = begin = begin + edge.seconds
            if begin > start:
                start = begin
        self.time = start + (self.backward if direction else self.forward)
        self.ends.append(self.time)
        for edge in self.outgoing[direction]:
            edge.sent.append(self.time)


def _stages(pipeline: ClockedStages, warm_up: Sequence[int], number: int) -> list[_ClockStage]:
    stages = [
        _ClockStage(forward, again, backward, warm, number)
        for forward, again, backward, warm in zip(
            pipeline.forward, pipeline.again, pipeline.backward, warm_up, strict=True
        )
    ]
    for stage, seconds in zip(stages, pipeline.data, strict=True):
        if seconds:
            edge = _ClockEdge(seconds)
            edge.sent = [0.0] * number
            stage.incoming[0].append(edge)
    for direction, channels in enumerate((pipeline.sent, pipeline.returned)):
        for (first, second), seconds in channels.items():
            src, dst = (stages[second], stages[first]) if direction else (stages[first], stages[second])
            edge = _ClockEdge(seconds)
            src.outgoing[direction].append(edge)
            src.neighbours[direction].append(dst)
            dst.incoming[direction].append(edge)
    return stages
