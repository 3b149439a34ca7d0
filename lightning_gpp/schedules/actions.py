"""Actions and schedules: for every device an ordered list of computing steps, with torch's text notation (`2F0`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from lightning_gpp.errors import ScheduleError


class Kind(Enum):
    """What an action computes."""

    DATA = "D"
    """Run the user's step up to the inputs of the network (on the sink's devices)."""
    FORWARD = "F"
    BACKWARD = "B"

    __hash__ = object.__hash__
    """Members are single objects; programs look actions up by the hundred thousand, and the default is slow."""


class Action(NamedTuple):
    """`2F0`: stage 2, forward, micro-batch 0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = re.fullmatch(r"(\d+)([DFB])(\d+)", text)
        if not match:
            raise ScheduleError(f"{text!r} is not an action; write stage, kind (D, F or B) and micro-batch: 2F0.")
        return cls(int(match[1]), Kind(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of actions on every device of one pipeline replica. Replicas of a stage run the same actions."""

    devices: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"{i}: {' '.join(map(str, actions))}" for i, actions in enumerate(self.devices))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read the text form: one line per device, `device: action action ...`."""
        rows: dict[int, tuple[Action, ...]] = {}
        for line in filter(None, map(str.strip, text.splitlines())):
            device, _, actions = line.partition(":")
            if not device.isdigit():
                raise ScheduleError(f"Schedule line {line!r} must start with a device number and a colon.")
            rows[int(device)] = tuple(map(Action.parse, actions.split()))
        return cls.of(rows)

    @classmethod
    def of(cls, rows: Mapping[int, tuple[Action, ...]]) -> Schedule:
        if sorted(rows) != list(range(len(rows))):
            raise ScheduleError(f"A schedule needs one line for each device 0..n-1, got {sorted(rows)}.")
        return cls(tuple(rows[device] for device in range(len(rows))))
