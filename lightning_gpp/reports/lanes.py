"""The lane of collectives below each device in pictures, and the meanings of the letters."""

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
    Kind.INPUT: "input gradients",
    Kind.WEIGHT: "weight gradients",
    Kind.UNSHARD: "gather parameters",
    Kind.RESHARD: "free parameters",
    Kind.REDUCE: "reduce gradients",
}

PLAIN = (Kind.DATA, Kind.FORWARD, Kind.BACKWARD)
"""Kinds that need no legend."""


@dataclass(frozen=True, slots=True)
class CollectiveSpan:
    """A collective of a stage from `start` to `stop`, in seconds; measured ones include only the launch."""

    stage: int
    kind: Kind
    start: float
    stop: float


def collectives(timeline: Timeline, device: int) -> list[CollectiveSpan]:
    """The collectives of a device, by their start."""
    spans = [
        CollectiveSpan(span.action.stage, span.action.kind, span.start, span.stop)
        for span in timeline.devices[device]
        if span.action.kind in COLLECTIVES
    ]
    simulated = [
        CollectiveSpan(entry.stage, kind, entry.start, entry.stop)
        for kind, entries in ((Kind.REDUCE, timeline.reductions), (Kind.UNSHARD, timeline.all_gathers))
        for entry in entries
        if device in entry.devices
    ]
    return sorted([*spans, *simulated], key=lambda entry: (entry.start, entry.stop))


def computes(action: Action) -> bool:
    """True if an action is drawn in the lane of the device itself."""
    return action.kind not in COLLECTIVES


def kinds_of(timeline: Timeline) -> list[Kind]:
    """All kinds in the timeline, in the order of `Kind`."""
    kinds = {span.action.kind for device in timeline.devices for span in device}
    kinds |= {entry.kind for device in range(len(timeline.devices)) for entry in collectives(timeline, device)}
    return [kind for kind in Kind if kind in kinds]
