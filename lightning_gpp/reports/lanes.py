"""What a picture shows beside computing: the collectives of a device, in a lane below it; and what letters mean."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.schedules import Action, Kind
from lightning_gpp.schedules.actions import COLLECTIVES
from lightning_gpp.simulation import Timeline

MEANINGS = {
    Kind.DATA: "user's step up to the network",
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "forward again",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradients of inputs",
    Kind.WEIGHT: "gradients of parameters",
    Kind.UNSHARD: "gather parameters",
    Kind.RESHARD: "drop them",
    Kind.REDUCE: "sum gradients",
}

PLAIN = (Kind.DATA, Kind.FORWARD, Kind.BACKWARD)
"""Kinds that need no explanation."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A collective of a stage from `start` to `stop`, in seconds; where it was measured, the start of one."""

    stage: int
    kind: Kind
    start: float
    stop: float


def collectives(timeline: Timeline, device: int) -> list[Entry]:
    """Those that a device takes part in, by their start."""
    spans = [
        Entry(span.action.stage, span.action.kind, span.start, span.stop)
        for span in timeline.devices[device]
        if span.action.kind in COLLECTIVES
    ]
    meetings = [
        Entry(meeting.stage, kind, meeting.start, meeting.stop)
        for kind, entries in ((Kind.REDUCE, timeline.reductions), (Kind.UNSHARD, timeline.gatherings))
        for meeting in entries
        if device in meeting.devices
    ]
    return sorted([*spans, *meetings], key=lambda entry: (entry.start, entry.stop))


def computes(action: Action) -> bool:
    """Whether it is drawn in the lane of the device itself."""
    return action.kind not in COLLECTIVES


def kinds_of(timeline: Timeline) -> list[Kind]:
    """All that the timeline has, in their usual order."""
    found = {span.action.kind for device in timeline.devices for span in device}
    found |= {entry.kind for device in range(len(timeline.devices)) for entry in collectives(timeline, device)}
    return [kind for kind in Kind if kind in found]
