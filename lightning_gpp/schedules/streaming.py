"""The period of inference: forwards of mini-batch after mini-batch, without a bubble in between.

Nothing comes back from the sink, so devices wait only for data. The order of forwards follows from their nominal times:
one sample leaves the source per unit of time, and a stage starts on a micro-batch after the time that its inputs need
to be computed and sent. All periods end when the sink ends a mini-batch.

    4 stages, 2 micro-batches per mini-batch; ' is the next mini-batch

    stage 0   F0''' F1'''
    stage 1   F0''  F1''        messages take as long as a forward, so that neighbours are two micro-batches apart
    stage 2   F0'   F1'
    stage 3   F0    F1
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace

from lightning_gpp.plan import SOURCE, Plan
from lightning_gpp.schedules.actions import Action, Kind, Schedule
from lightning_gpp.schedules.lowering import derive_messages, reads_data, required_actions
from lightning_gpp.schedules.periods import SETTLED, Row, local, settled, with_sends, written_out
from lightning_gpp.schedules.program import Message


def streaming_period(plan: Plan, total: int) -> list[Row]:
    """The instructions of every device between the ends of two mini-batches of `total` samples.

    Raises:
        Unsettled: the order does not repeat.
    """
    times = _Turns(plan, total)
    many = replace(plan, period=total)

    def written(number: int) -> list[Row]:
        schedule = Schedule(tuple(_order(many, times, device, number) for device in range(plan.num_devices)))
        return written_out(many, total, schedule, number, training=False)

    number = 2 * (times.lead + SETTLED + 1)
    return settled(number, 8 * number, written, lambda row, number: _ends(row, times, number))


@dataclass(slots=True)
class _Turns:
    """Nominal times of forwards and data actions, in samples of the mini-batch that leave the source.

    Attributes:
        end: the time at which the actions of the first mini-batch have started.
        lead: the most mini-batches by which an action is ahead of that.
    """

    plan: Plan
    total: int
    end: float = field(init=False)
    lead: int = field(init=False)
    _offsets: dict[int, float] = field(init=False)

    def __post_init__(self) -> None:
        self._offsets = _offsets(self.plan, self.total)
        stages = [SOURCE] * reads_data(self.plan) + list(range(len(self.plan.stages)))
        starts = [self._offsets[stage] + self.plan.intervals(stage, self.total)[-1][0] for stage in stages]
        self.end = max(starts)
        self.lead = int(self.end // self.total)

    def of(self, action: Action, batch: int) -> float:
        """The time at which an action, numbered inside its mini-batch, starts."""
        stage = SOURCE if action.kind is Kind.DATA else action.stage
        start, _ = self.plan.intervals(stage, self.total)[action.micro_batch]
        return batch * self.total + start + self._offsets[stage]


def _offsets(plan: Plan, total: int) -> dict[int, float]:
    """The time between a sample's turn at the source and its turn at every stage, from longest paths."""
    offsets: dict[int, float] = dict.fromkeys((SOURCE, *range(len(plan.stages))), 0.0)
    messages = derive_messages(plan, total, training=False)
    for message in sorted(messages, key=lambda message: plan.edges[message.edge].dst):
        edge = plan.edges[message.edge]
        offsets[edge.dst] = max(offsets[edge.dst], offsets[edge.src] + _gap(plan, total, message))
    return offsets


def _gap(plan: Plan, total: int, message: Message) -> float:
    """Time between the turns at the ends of a message, in which the producer ends and the message travels.

    Both take as long as they have samples; data take no time.
    """
    edge = plan.edges[message.edge]
    begin, end = plan.intervals(edge.src, total)[message.producer.micro_batch]
    reads, _ = plan.intervals(edge.dst, total)[message.consumer.micro_batch]
    travels = message.stop - message.start if message.src != message.dst else 0
    return (begin if edge.src == SOURCE else end) + travels - reads


def _order(plan: Plan, times: _Turns, device: int, number: int) -> tuple[Action, ...]:
    """The actions of a device in `number` mini-batches by time.

    At equal times, the earlier mini-batch comes first, and inside a mini-batch actions whose results others read.
    """

    def key(action: Action) -> tuple[float, ...]:
        here, batch = local(action, plan, times.total)
        return times.of(here, batch), batch, -1 if action.kind is Kind.DATA else action.stage, here.micro_batch

    return tuple(sorted(required_actions(plan, device, number * times.total, training=False), key=key))


def _ends(row: Row, times: _Turns, number: int) -> list[int]:
    """Number of instructions before the first action that starts after the end of each mini-batch."""
    places = [(times.of(what.action, batch), index) for index, (what, batch) in enumerate(row) if what.action]
    starts = [time for time, _ in places]
    counts = [bisect_right(starts, times.end + batch * times.total) for batch in range(number)]
    return [with_sends(row, places[count - 1][1] + 1) if count else 0 for count in counts]
