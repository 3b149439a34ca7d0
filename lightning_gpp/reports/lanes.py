"""The lanes of collectives and copies below each device in pictures, and the meanings of the letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lightning_gpp.schedules import Action, Kind
from lightning_gpp.schedules.actions import COLLECTIVES, COPIES
from lightning_gpp.simulation import Timeline

MEANINGS = {
    Kind.DATA: "user's step up to the network",
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "forward again",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradients",
    Kind.WEIGHT: "weight gradients",
    Kind.OFFLOAD: "copy to host",
    Kind.LOAD: "copy back",
    Kind.UNSHARD: "gather parameters",
    Kind.RESHARD: "free parameters",
    Kind.REDUCE: "reduce gradients",
}

PLAIN = (Kind.DATA, Kind.FORWARD, Kind.BACKWARD)
"""Kinds that need no legend."""


@dataclass(frozen=True, slots=True)
class StripSpan:
    """A collective or host copy of a stage from `start` to `stop`, in seconds; only the launch if it was measured."""

    stage: int
    kind: Kind
    start: float
    stop: float


def collectives(timeline: Timeline, device: int) -> list[StripSpan]:
    """The collectives of a device, by their start."""
    spans = _measured(timeline, device, COLLECTIVES)
    simulated = [
        StripSpan(entry.stage, kind, entry.start, entry.stop)
        for kind, entries in ((Kind.REDUCE, timeline.reductions), (Kind.UNSHARD, timeline.all_gathers))
        for entry in entries
        if device in entry.devices
    ]
    return sorted([*spans, *simulated], key=_times)


def host_copies(timeline: Timeline, device: int, kind: Kind) -> list[StripSpan]:
    """The copies between a device and its host in one direction, by their start."""
    simulated = [
        StripSpan(entry.action.stage, kind, entry.start, entry.stop)
        for entry in timeline.host_copies
        if entry.device == device and entry.action.kind is kind
    ]
    return sorted([*_measured(timeline, device, (kind,)), *simulated], key=_times)


def lanes(timeline: Timeline, device: int) -> list[list[StripSpan]]:
    """The lanes below a device that are not empty: collectives, and copies in each direction."""
    found = [collectives(timeline, device), *(host_copies(timeline, device, kind) for kind in COPIES)]
    return [lane for lane in found if lane]


def _measured(timeline: Timeline, device: int, kinds: Sequence[Kind]) -> list[StripSpan]:
    spans = (span for span in timeline.devices[device] if span.action.kind in kinds)
    return [StripSpan(span.action.stage, span.action.kind, span.start, span.stop) for span in spans]


def _times(entry: StripSpan) -> tuple[float, float]:
    return entry.start, entry.stop


BESIDE: Final = (*COLLECTIVES, *COPIES)
"""Kinds that do not occupy a device."""


def computes(action: Action) -> bool:
    """True if an action is drawn in the lane of the device itself."""
    return action.kind not in BESIDE


def kinds_of(timeline: Timeline) -> list[Kind]:
    """All kinds in the timeline, in the order of `Kind`."""
    kinds = {span.action.kind for device in timeline.devices for span in device}
    devices = range(len(timeline.devices))
    kinds |= {entry.kind for device in devices for lane in lanes(timeline, device) for entry in lane}
    return [kind for kind in Kind if kind in kinds]
