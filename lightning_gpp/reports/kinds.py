"""The kinds of actions in pictures and text: their meanings, and those that a device computes."""

from __future__ import annotations

from typing import Final

from lightning_gpp.schedules import Action, Kind
from lightning_gpp.schedules.actions import COLLECTIVES, COPIES
from lightning_gpp.simulation import Timeline

MEANINGS: Final = {
    Kind.DATA: "user's step up to the network",
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "forward again",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradients",
    Kind.WEIGHT: "weight gradients",
}

PLAIN: Final = (Kind.DATA, Kind.FORWARD, Kind.BACKWARD)
"""Kinds that need no legend."""


def computes(action: Action) -> bool:
    """True if an action occupies its device; collectives and copies do not."""
    return action.kind not in (*COLLECTIVES, *COPIES)


def computed_kinds(timeline: Timeline) -> list[Kind]:
    """The kinds of actions that the timeline's devices compute."""
    kinds = {span.action.kind for device in timeline.devices for span in device}
    return [kind for kind in MEANINGS if kind in kinds]
