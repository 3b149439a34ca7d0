"""The costs of stages in the planner that was released with Piper, for the same search over downsets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.piper import Crossing, Fitting
from lightning_gpp.planning.problem.problem import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """Layers that keep or recompute their activations, each for itself, and the machine, as in a released profile.

    Args:
        seconds: of a forward and a backward of one micro-batch, by [mode, layer]: keeping activations, recomputing.
        kept: bytes of a micro-batch in flight, likewise.
        fixed: bytes that are always occupied, likewise.
        parameters: bytes of the weights, by layer.
        memory: bytes of a device.
        bytes_per_second: of every link.
        num_micro_batches: of a mini-batch.
    """

    seconds: Array
    kept: Array
    fixed: Array
    parameters: Array
    memory: float
    bytes_per_second: float
    num_micro_batches: int


@dataclass(slots=True)
class LayerCosts:
    """The costs of the released planner: replicas take micro-batches in turn, and layers recompute where that saves the
    most bytes per second, until the stage fits.

    Gradients are reduced by a parameter server: 4(d - 1)/d of the bytes.
    """

    layers: LayerProfile
    members: NDArray[np.bool_]
    num_devices: int
    sums: Array = field(init=False)

    def __post_init__(self) -> None:
        layers = self.layers
        columns = (layers.seconds[0], layers.parameters, layers.kept[0], layers.fixed[0])
        self.sums = self.members.astype(float) @ np.stack(columns, axis=1)

    def stages(self, index: int, rests: NDArray[np.intp], crossing: Crossing) -> Iterator[Fitting]:
        """The stages that fit, for every number of replicas."""
        seconds, parameters, kept, fixed = (self.sums[index] - self.sums[rests]).T
        moved = (crossing.both[0] + crossing.both[1]) / self.layers.bytes_per_second
        again: dict[int, Array] = {}
        for replicas in self._degrees():
            in_flight = -(-np.arange(replicas, self.num_devices + 1) // replicas)
            for number in in_flight.tolist():
                if number not in again:
                    again[number] = self._again(index, rests, kept * number + fixed - self.layers.memory, number)
            share = 4 * (replicas - 1) / replicas / self.layers.num_micro_batches
            plain = (seconds + moved) / replicas + share * parameters / self.layers.bytes_per_second
            more = np.stack([again[number] for number in in_flight.tolist()], axis=1)
            rows = np.flatnonzero(np.isfinite(more[:, 0]))
            yield Fitting(replicas, rows, plain[rows, None] + more[rows] / replicas, more[rows] == 0)

    def _degrees(self) -> list[int]:
        number = self.layers.num_micro_batches
        return [degree for degree in range(1, min(self.num_devices, number) + 1) if number % degree == 0]

    def _again(self, index: int, rests: NDArray[np.intp], lacking: Array, number: int) -> Array:
        """Seconds of recomputation that make up for the bytes that stages lack; infinite if they cannot."""
        layers = self.layers
        saved = (layers.kept[0] - layers.kept[1]) * number + layers.fixed[0] - layers.fixed[1]
        longer = layers.seconds[1] - layers.seconds[0]
        useful = np.flatnonzero(saved > 0)
        order = useful[np.argsort(longer[useful] / saved[useful], kind="stable")]
        found, short = np.where(lacking > 0, np.inf, 0.0), np.flatnonzero(lacking > 0)
        inside = (self.members[index] & ~self.members[rests[short]])[:, order]
        freed, seconds = (inside * saved[order]).cumsum(axis=1), (inside * longer[order]).cumsum(axis=1)
        enough = freed >= lacking[short, None]
        able = np.flatnonzero(enough.any(axis=1))
        found[short[able]] = seconds[able, enough[able].argmax(axis=1)] if len(able) else np.inf
        return found
