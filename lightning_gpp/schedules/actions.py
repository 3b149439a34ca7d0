"""Actions and schedules. A schedule is the order of actions on every device, in torch's text notation (`2F0`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple


class Kind(Enum):
    """The kind of an action.

    Actions of the last three kinds belong to a stage rather than a micro-batch; their number counts them on a device.
    """

    DATA = "D"
    """Run the user's step up to the inputs of the network (on the sink's devices)."""
    FORWARD = "F"
    RECOMPUTE = "R"
    """Run the forward again, for the backward of a stage that keeps only its inputs."""
    BACKWARD = "B"
    """The full backward: input and weight gradients in one."""
    INPUT = "I"
    """Input gradients: those of a stage's inputs, which other stages wait for."""
    WEIGHT = "W"
    """Weight gradients: those of a stage's parameters, which can wait until the end of the step."""
    OFFLOAD = "O"
    """Start to copy what a forward keeps for the backward to host memory."""
    LOAD = "L"
    """Start to copy it back."""
    UNSHARD = "U"
    """Start the all-gather of a stage's parameters."""
    RESHARD = "S"
    """Free the unsharded parameters."""
    REDUCE = "G"
    """Start the all-reduce, or reduce-scatter, of a stage's gradients."""

    __hash__ = object.__hash__
    """Hash by identity: programs look up actions hundreds of thousands of times, and the default is slow."""


COLLECTIVES: Final = (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE)
"""Kinds in which all replicas of a stage take part, outside of micro-batches."""

COPIES: Final = (Kind.OFFLOAD, Kind.LOAD)
"""Kinds that start a copy between a device and its host, and do not occupy the device."""

COMPUTING: Final = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)
"""Kinds that compute with a stage's parameters."""

RELEASES: Final = (Kind.BACKWARD, Kind.WEIGHT)
"""Kinds after which a micro-batch is no longer in flight on its stage."""


class Action(NamedTuple):
    """`2F0`: stage 2, forward, micro-batch 0."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"

    def of_kind(self, kind: Kind) -> Action:
        """The action of another kind on the same micro-batch."""
        return Action(self.stage, kind, self.micro_batch)

    def at(self, micro_batch: int) -> Action:
        """The same kind of action on another micro-batch."""
        return Action(self.stage, self.kind, micro_batch)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of actions on every device of one pipeline replica. Replicas of a stage run the same actions."""

    devices: tuple[tuple[Action, ...], ...]

    def __str__(self) -> str:
        return "\n".join(f"{i}: {' '.join(map(str, actions))}" for i, actions in enumerate(self.devices))

    def without(self, kind: Kind) -> Schedule:
        """The same schedule without the actions of one kind."""
        return Schedule(tuple(tuple(a for a in actions if a.kind is not kind) for actions in self.devices))
