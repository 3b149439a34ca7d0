"""Transfers between the stages of a draft: their seconds, and the ports that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from lightning_gpp.cluster import Link, Port
from lightning_gpp.cluster.groups import link_of_groups
from lightning_gpp.graph import Affine
from lightning_gpp.plan import share_of
from lightning_gpp.planning.problem.draft import DraftStage
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.stage_figures import read_by

_TransferKey = tuple[tuple[int, ...], tuple[int, ...], Affine, int, tuple[int, int]]
"""Senders, receivers, bytes, samples, and members of both."""


class DraftTransfer(NamedTuple):
    """One micro-batch's transfer between two stages without contention: seconds until the last replica has it, and busy
    seconds of each port.

    The transfer goes from all replicas of the one stage to all replicas of the other. `sending` and `receiving`: the
    most seconds that it takes from the computing of a sender, and of a receiver; `seconds` are without these.
    """

    seconds: float
    ports: dict[Port, float]
    sending: float = 0.0
    receiving: float = 0.0


Route: TypeAlias = Callable[[int, int], tuple[Link, tuple[Port, ...]]]
"""The link and the ports from one device to another."""


def transfer(
    route: Route,
    src: Sequence[int],
    dst: Sequence[int],
    size: Affine,
    num_samples: int,
    members: tuple[int, int] = (1, 1),
) -> DraftTransfer:
    """The transfer of `num_samples` samples from the replicas `src` to the replicas `dst`.

    `members`: the processes of each sender, and of each receiver.
    """
    seconds, ports = 0.0, dict[Port, float]()
    busy: tuple[dict[int, float], dict[int, float]] = {}, {}
    for i, j, samples in overlaps(src, dst, num_samples):
        link, passed = route(i, j)
        link = link_of_groups(link, *members)
        num_bytes = size.at(samples)
        seconds = max(seconds, link.hidden_seconds(num_bytes))
        for device, side in zip((i, j), busy, strict=True):
            side[device] = side.get(device, 0.0) + link.busy_seconds(num_bytes)
        for port in passed:
            ports[port] = ports.get(port, 0.0) + num_bytes / link.bytes_per_second
    return DraftTransfer(seconds, ports, *(max(side.values(), default=0.0) for side in busy))


def overlaps(src: Sequence[int], dst: Sequence[int], num_samples: int) -> Iterator[tuple[int, int, int]]:
    """Pairs of devices whose shares of a micro-batch overlap, and by how many samples."""
    i = j = 0
    while i < len(src) and j < len(dst):
        starts, ends = zip(share_of(num_samples, i, len(src)), share_of(num_samples, j, len(dst)), strict=True)
        if min(ends) > max(starts):
            yield src[i], dst[j], min(ends) - max(starts)
        i, j = i + (ends[0] <= ends[1]), j + (ends[1] <= ends[0])


@dataclass(slots=True, eq=False)
class Transfers:
    """The transfers of one problem's drafts, which are cached."""

    problem: Problem
    _between: dict[_TransferKey, DraftTransfer] = field(default_factory=dict)
    _routes: dict[tuple[int, int], tuple[Link, tuple[Port, ...]]] = field(default_factory=dict)
    _data_seconds: dict[tuple[DraftStage, bool, int], float] = field(default_factory=dict)

    def longest(self, ways: Iterable[tuple[int, int]], num_bytes: float, members: tuple[int, int]) -> float:
        """Seconds of the longest message between devices. `members`: of each sender, and of each receiver."""
        links = (link_of_groups(self._route(*way)[0], *members) for way in ways)
        return max((link.seconds(num_bytes) for link in links), default=0.0)

    def of_data(self, stage: DraftStage, copies: bool, senders: int) -> float:
        """Seconds until a micro-batch's data have come from device 0; each pipeline replica loads its own."""
        key = stage, copies, senders
        if key not in self._data_seconds:
            inside = set(stage.units)
            size = sum(value.bytes.at(stage.share) for value in self.problem.units.data if read_by(value, inside))
            devices = stage.devices[:1] if copies else stage.devices
            ways = [(0, device) for device in devices if device and size]
            self._data_seconds[key] = self.longest(ways, size, (senders, stage.members))
        return self._data_seconds[key]

    def between(self, src: DraftStage, dst: DraftStage, size: Affine) -> DraftTransfer:
        """The transfer of this many bytes per micro-batch from one stage to another."""
        key = src.devices, dst.devices, size, src.micro_batch_size, (src.members, dst.members)
        if key not in self._between:
            self._between[key] = transfer(self._route, *key)
        return self._between[key]

    def _route(self, src: int, dst: int) -> tuple[Link, tuple[Port, ...]]:
        if (src, dst) not in self._routes:
            cluster = self.problem.cluster
            self._routes[src, dst] = cluster.link(src, dst), cluster.ports(src, dst)
        return self._routes[src, dst]


def contend(ways: Iterable[tuple[Mapping[tuple[int, int], DraftTransfer], dict[tuple[int, int], float]]]) -> float:
    """Delay transfers to one stage that share a port; returns the busiest port's seconds per micro-batch.

    `ways`: for forward and backward, the transfers without contention and their seconds, to which waiting is added.
    """
    total: dict[Port, float] = {}
    for direction, (transfers, seconds) in enumerate(ways):
        together: dict[tuple[int, Port], float] = {}
        for pair, (_, ports, *_) in transfers.items():
            dst = pair[1 - direction]
            for port, busy in ports.items():
                together[dst, port] = together.get((dst, port), 0.0) + busy
                total[port] = total.get(port, 0.0) + busy
        for pair, (_, ports, *_) in transfers.items():
            dst = pair[1 - direction]
            waits = [together[dst, port] - busy for port, busy in ports.items()]
            seconds[pair] += max(waits, default=0.0)
    return max(total.values(), default=0.0)


def take_time(transfers: Mapping[tuple[int, int], DraftTransfer], seconds: list[float], *, direction: int) -> None:
    """Add to the seconds of stages what transfers take from their computing.

    Args:
        transfers: by the sending and the receiving stage; for backward (`direction` 1) the other way round.
        seconds: of every stage.
        direction: 0 for forward, 1 for backward.
    """
    for pair, transfer in transfers.items():
        seconds[pair[direction]] += transfer.sending
        seconds[pair[1 - direction]] += transfer.receiving
