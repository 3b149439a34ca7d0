"""A plan's work in figures, for schedules that weigh actions: what takes how long, keeps how much and waits for what.

A lane is a replica of a stage: it takes its micro-batches one after the other, so that a position says which.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from lightning_gpp.graph import Affine
from lightning_gpp.plan import SOURCE, Figures, Plan, Stage
from lightning_gpp.schedules.messages import derive_messages, samples_of
from lightning_gpp.schedules.one_f_one_b import in_flight_samples, warm_up

FORWARD: Final = 0
INPUT: Final = 1
WEIGHT: Final = 2

Reader = tuple[int, int, int, float]
"""Lane, FORWARD or INPUT, and position of who waits; seconds that the message is on its way."""

Readers = tuple[tuple[tuple[tuple[Reader, ...], ...], ...], ...]
"""By FORWARD or INPUT, lane and position."""

Counts = tuple[tuple[tuple[int, ...], ...], ...]
"""By FORWARD or INPUT, lane and position."""

_SENT: Final = (FORWARD, INPUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A replica of a stage, and what each of its micro-batches costs, by position.

    Args:
        stage: its index.
        device: where it is.
        depth: of the stage.
        numbers: of its micro-batches.
        split: whether the gradients of the parameters are an action of their own: not where they take no time.
        seconds: of FORWARD, INPUT and WEIGHT.
        kept: bytes from the forward to the gradients of the inputs.
        pending: bytes from there to the gradients of the parameters.
        working: bytes that a recomputation takes in addition, one at a time.
    """

    stage: int
    device: int
    depth: int
    numbers: tuple[int, ...]
    split: bool
    seconds: tuple[tuple[float, ...], ...]
    kept: tuple[float, ...]
    pending: tuple[float, ...]
    working: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """All lanes of a plan.

    Args:
        lanes: by stage, then by device.
        on: for every device the indices of its lanes.
        missing: how many messages an action waits for.
        readers: who waits for what an action makes.
        room: for every lane the bytes that it may keep.
    """

    lanes: tuple[Lane, ...]
    on: tuple[tuple[int, ...], ...]
    missing: Counts
    readers: Readers
    room: tuple[float, ...]


def work_of(plan: Plan, batch_size: int, share: float = 1) -> Work:
    """The work of one mini-batch.

    A device keeps at most `plan.memory_bytes`; where they are not known, `share` times what the device that needs most
    keeps under 1F1B. Several lanes of a device divide that as their needs under 1F1B are.
    """
    return _Builder(plan, batch_size).build(share)


def samples_ahead(plan: Plan, lead: float) -> dict[int, float]:
    """For every stage the samples by which its forwards are ahead: a micro-batch, and `lead` times the rest of 1F1B's.

    With one size of micro-batches these are 1 + lead (d - 1) micro-batches on a stage of depth d.
    """
    sizes = [stage.micro_batch_size for stage in plan.stages]
    return {stage: sizes[stage] + lead * (usual - sizes[stage]) for stage, usual in in_flight_samples(plan).items()}


def counts_of(plan: Plan, work: Work, samples: Mapping[int, float]) -> list[int]:
    """For every lane how many micro-batches make so many samples of its stage; at least one."""
    counts = []
    for lane in work.lanes:
        stage = plan.stages[lane.stage]
        step = stage.micro_batch_size * _turns(stage)
        counts.append(max(1, int(samples[lane.stage] / step + 1e-9)))
    return counts


@dataclass(slots=True)
class _Builder:
    plan: Plan
    batch_size: int
    known: bool = field(init=False)
    lanes: list[Lane] = field(init=False)

    def __post_init__(self) -> None:
        self.known = any(_timed(stage.figures) for stage in self.plan.stages)
        depths = self.plan.depths()
        self.lanes = [
            self._lane(stage, device, depths[stage])
            for stage in range(len(self.plan.stages))
            for device in self.plan.devices_of(stage)
        ]

    def build(self, share: float) -> Work:
        missing, readers = self._links()
        devices = range(self.plan.num_devices)
        return Work(
            lanes=tuple(self.lanes),
            on=tuple(tuple(i for i, lane in enumerate(self.lanes) if lane.device == device) for device in devices),
            missing=missing,
            readers=readers,
            room=self._room(share),
        )

    def _lane(self, stage: int, device: int, depth: int) -> Lane:
        samples = samples_of(self.plan, stage, device, self.batch_size)
        numbers = tuple(self.plan.micro_batches(stage, device, self.batch_size))
        seconds = self._seconds(stage)
        kept, pending, working = self._bytes(stage)
        if seconds[WEIGHT] == Affine():
            pending = Affine()
        return Lane(
            stage=stage,
            device=device,
            depth=depth,
            numbers=numbers,
            split=seconds[WEIGHT] != Affine(),
            seconds=tuple(tuple(_cost(entry, samples[number]) for number in numbers) for entry in seconds),
            kept=tuple(_cost(kept, samples[number]) for number in numbers),
            pending=tuple(_cost(pending, samples[number]) for number in numbers),
            working=max((_cost(working, samples[number]) for number in numbers), default=0),
        )

    def _seconds(self, index: int) -> tuple[Affine, Affine, Affine]:
        """Where nothing is known, a sample takes one unit in every action."""
        figures = self.plan.stages[index].figures
        if not self.known:
            return (Affine(1), Affine(1), Affine(1))
        again = figures.forward_seconds if self.plan.stages[index].recompute else Affine()
        return figures.forward_seconds, again + figures.input_seconds, figures.weight_seconds

    def _bytes(self, index: int) -> tuple[Affine, Affine, Affine]:
        """Where nothing is known, a sample takes one unit until the gradients of the parameters are there."""
        stage = self.plan.stages[index]
        if all(entry.figures.activation_bytes == Affine() for entry in self.plan.stages):
            return Affine(1), Affine(1), Affine()
        kept = stage.figures.activation_bytes
        if not stage.recompute:
            return kept, stage.figures.pending_bytes, Affine()
        received = sum((edge.bytes for edge in self.plan.edges if edge.dst == index), Affine())
        return received, stage.figures.pending_bytes, kept

    def _links(self) -> tuple[Counts, Readers]:
        find = {
            (lane.stage, lane.device, number): (index, position)
            for index, lane in enumerate(self.lanes)
            for position, number in enumerate(lane.numbers)
        }
        missing: dict[tuple[int, int, int], int] = defaultdict(int)
        readers: dict[tuple[int, int, int], list[Reader]] = defaultdict(list)
        for message in derive_messages(self.plan, self.batch_size, training=True):
            edge = self.plan.edges[message.edge]
            if edge.src == SOURCE:
                continue
            kind = INPUT if message.gradient else FORWARD
            maker, at = find[message.producer.stage, message.src, message.producer.micro_batch]
            reader, position = find[message.consumer.stage, message.dst, message.consumer.micro_batch]
            travel = (
                _cost(edge.seconds, message.stop - message.start) if self.known and message.src != message.dst else 0
            )
            missing[kind, reader, position] += 1
            readers[kind, maker, at].append((reader, kind, position, travel))
        sizes = [len(lane.numbers) for lane in self.lanes]
        counts = tuple(tuple(tuple(missing[k, i, at] for at in range(n)) for i, n in enumerate(sizes)) for k in _SENT)
        who = tuple(
            tuple(tuple(tuple(readers[k, i, at]) for at in range(n)) for i, n in enumerate(sizes)) for k in _SENT
        )
        return counts, who

    def _room(self, share: float) -> tuple[float, ...]:
        flying = warm_up(self.plan, self.batch_size)
        counts = [-(-flying[lane.stage] // _turns(self.plan.stages[lane.stage])) for lane in self.lanes]
        usual = [sum(sorted(lane.kept)[-count:]) for lane, count in zip(self.lanes, counts, strict=True)]
        needs: dict[int, float] = defaultdict(float)
        reserved: dict[int, float] = defaultdict(float)
        for lane, need in zip(self.lanes, usual, strict=True):
            needs[lane.device] += need
            reserved[lane.device] = max(reserved[lane.device], lane.working)
        most = share * max(needs.values())
        limits = self.plan.memory_bytes or (most,) * self.plan.num_devices
        return tuple(
            (limits[lane.device] - reserved[lane.device]) * (need / needs[lane.device] if need else 0)
            for lane, need in zip(self.lanes, usual, strict=True)
        )


def _turns(stage: Stage) -> int:
    """How many replicas take micro-batches in turn."""
    return len(stage.devices) if stage.round_robin else 1


def _timed(figures: Figures) -> bool:
    return any(cost != Affine() for cost in (figures.forward_seconds, figures.input_seconds, figures.weight_seconds))


def _cost(cost: Affine, num_samples: int) -> float:
    """A replica that gets no sample of a micro-batch takes and keeps nothing."""
    return cost.at(num_samples) if num_samples else 0.0
