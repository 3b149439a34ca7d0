"""Timelines, simulated or measured: the times of actions, transfers and collectives of one mini-batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_gpp.schedules import Action
from lightning_gpp.schedules.registry import flights


@dataclass(frozen=True, slots=True)
class Span:
    """An action of a device from `start` to `stop`, in seconds."""

    action: Action
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message (its id in the program) of `num_bytes` from device `src` to device `dst`, from `start` to `stop`, in
    seconds."""

    message: int
    src: int
    dst: int
    producer: Action
    consumer: Action
    start: float
    stop: float
    num_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class HostCopy:
    """An OFFLOAD or LOAD of `num_bytes` between a device and its host, from `start` to `stop`, in seconds."""

    device: int
    action: Action
    start: float
    stop: float
    num_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a stage's replicas on `devices`, from `start` to `stop`, in seconds."""

    stage: int
    devices: tuple[int, ...]
    start: float
    stop: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The timeline of one mini-batch, or of several without a flush in between, which number their micro-batches on.

    Args:
        stages: names of the stages, by index.
        devices: spans of every device, in the order in which they ran.
        transfers: messages between devices.
        reductions: reductions of gradients.
        all_gathers: all-gathers of parameters, each with the one device that waits for it.
        host_copies: copies between devices and their hosts.
        peak_bytes: peak memory of every device.
        num_batches: number of mini-batches.
    """

    stages: tuple[str, ...]
    devices: tuple[tuple[Span, ...], ...]
    transfers: tuple[Transfer, ...] = ()
    reductions: tuple[Collective, ...] = ()
    all_gathers: tuple[Collective, ...] = ()
    host_copies: tuple[HostCopy, ...] = ()
    peak_bytes: tuple[float, ...] = ()
    num_batches: int = 1

    @property
    def start(self) -> float:
        """Start of the first entry."""
        return min((entry.start for entry in self._entries()), default=0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last stop."""
        return max((entry.stop for entry in self._entries()), default=0) - self.start

    def _entries(self) -> Iterator[Span | Collective]:
        yield from (span for device in self.devices for span in device)
        yield from self.reductions
        yield from self.all_gathers

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds in which every device computed."""
        return tuple(sum(span.stop - span.start for span in device) for device in self.devices)

    @property
    def bubble_fractions(self) -> tuple[float, ...]:
        """Fraction of the step time in which every device did not compute."""
        makespan = self.makespan
        return tuple(1 - busy / makespan if makespan else 0.0 for busy in self.busy)

    @property
    def bubble_fraction(self) -> float:
        """Mean bubble of the devices."""
        return sum(self.bubble_fractions) / max(1, len(self.devices))

    @property
    def peak_in_flight(self) -> dict[int, int]:
        """The most micro-batches in flight on a replica of every stage."""
        return flights([[span.action for span in device] for device in self.devices])
