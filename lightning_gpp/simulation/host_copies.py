"""The copies between a device and its host in a simulation: the link has one lane in each direction.

device   F0  F1  F2  ......B0          copies are twice as long as actions
out        O0------O1------            F2 waits for the end of O0, B0 for that of L0 and of O1
in                 L0------
"""

from __future__ import annotations

from lightning_gpp.schedules import Action, Kind
from lightning_gpp.schedules.work import Leaving
from lightning_gpp.simulation.timeline import HostCopy


class HostCopies:
    """The copies of one device.

    Attributes:
        copies: all so far, in the order in which they were started.
    """

    def __init__(self, device: int) -> None:
        self.copies: list[HostCopy] = []
        self._device = device
        self._free = {Kind.OFFLOAD: 0.0, Kind.LOAD: 0.0}
        self._leaving: Leaving[Action, float] = Leaving()
        self._ends: dict[Action, float] = {}
        self._left = 0.0  # the time at which the latest tensors left the device

    def start(self, action: Action, time: float, seconds: float, num_bytes: float) -> tuple[float, float]:
        """Start an OFFLOAD or LOAD when the device comes to it.

        Returns:
            When it has its memory, and when it ends; both are now if the tensors are still on the device.
        """
        offload = action.of_kind(Kind.OFFLOAD)
        if action.kind is Kind.LOAD and self._leaving.keep(offload):
            self._ends[action] = time
            return time, time
        if action.kind is Kind.LOAD:
            time = self._left = max((time, self._left, *self._leaving.release()))
        start = max(time, self._free[action.kind], self._ends.get(offload, 0.0))
        stop = self._ends[action] = self._free[action.kind] = start + seconds
        if seconds:
            self.copies.append(HostCopy(self._device, action, start, stop, num_bytes))
        if action.kind is Kind.OFFLOAD:
            self._leaving.add(action, stop)
        return time, stop

    def ready(self, action: Action) -> float:
        """The time from which a computing action may start."""
        self._left = max((self._left, *self._leaving.compute()))
        return max(self._left, self._ends.get(action.of_kind(Kind.LOAD), 0.0))
