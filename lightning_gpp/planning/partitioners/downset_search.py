"""Piper's recurrence over downsets, for any costs of stages; `piper` has its meaning.

    A[D, k] = min over downsets D' in D, d of max( A[D', k - d], seconds(D - D', d, k) )

`Border` has the bytes that cross the border of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem.problem import Array

Rows = NDArray[np.intp] | slice


class Crossing(NamedTuple):
    """Bytes that cross the border of stages D - D', for a D and many D': rows per sample and fixed.

    `both`: bytes in both directions; `received`: bytes that forwards receive; `uncut`: whether any tensor is rigid.
    """

    both: Array
    received: Array
    uncut: NDArray[np.bool_]


class Fitting(NamedTuple):
    """Stages with `replicas` that fit: their rows, seconds per sample, and whether they keep all activations.

    The last two are by stage and by devices of later stages; one column if they do not depend on the latter.
    """

    replicas: int
    rows: Rows
    seconds: Array
    keeps: NDArray[np.bool_]


class DownsetCosts(Protocol):
    """Costs of stages D - D' for one micro-batch size."""

    def stages(self, index: int, rests: NDArray[np.intp], crossing: Crossing) -> Iterator[Fitting]:
        """The stages that fit, for every number of replicas."""


@dataclass(frozen=True, slots=True)
class FirstStage:
    """A first stage of a downset: its units and replicas, whether it recomputes, and the downset of later stages."""

    units: tuple[int, ...]
    replicas: int
    recompute: bool
    rest: int


class DownsetSearch:
    """A for several costs: `best[costs, downset, devices]`.

    Args:
        members: whether downsets, the smaller ones first, contain units.
        border: the bytes that cross borders.
        costs: tables of costs.
        num_devices: all of which are used.
        idle: whether devices may be left over instead.
    """

    def __init__(
        self,
        members: NDArray[np.bool_],
        border: Border,
        costs: Sequence[DownsetCosts],
        num_devices: int,
        *,
        idle: bool = False,
    ) -> None:
        self.members, self.border, self.costs, self.num_devices = members, border, costs, num_devices
        self.words = np.packbits(members, axis=1, bitorder="little")
        self.best = np.full((len(costs), len(members), num_devices + 1), np.inf)
        self.best[:, 0, slice(None) if idle else 0] = 0
        self.states = 0

    def fill(self, index: int) -> None:
        """Compute A of a downset from A of all smaller ones."""
        rests = self._rests(index)
        crossing = self.border(index, rests)
        for number, costs in enumerate(self.costs):
            before = self.best[number][rests]
            for replicas, rows, seconds, _ in costs.stages(index, rests, crossing):
                width = before.shape[1] - replicas
                self.states += len(rests) * width
                if len(seconds):
                    row = self.best[number, index, replicas:]
                    np.minimum(row, np.maximum(before[rows, :width], seconds).min(axis=0), out=row)
            self.states += self.num_devices

    def seconds(self, number: int) -> float:
        """A of all units on all devices."""
        return float(self.best[number, -1, self.num_devices])

    def stages(self, number: int) -> Iterator[FirstStage]:
        """The stages of the best solution, first to last."""
        index, devices = len(self.members) - 1, self.num_devices
        while index:
            choice = self._choice(index, number, devices)
            yield choice
            index, devices = choice.rest, devices - choice.replicas

    def _choice(self, index: int, number: int, devices: int) -> FirstStage:
        """The first stage of the best solution, recomputed rather than stored for all cells."""
        rests = self._rests(index)
        options: list[tuple[float, int, int, bool]] = []
        for replicas, rows, seconds, keeps in self.costs[number].stages(index, rests, self.border(index, rests)):
            if replicas <= devices and len(seconds):
                left = devices - replicas
                tried = np.maximum(self.best[number, rests[rows], left], seconds[:, left % seconds.shape[1]])
                least = int(tried.argmin())
                again = not keeps[least % len(keeps), left % keeps.shape[1]]
                options.append((float(tried[least]), int(rests[rows][least]), replicas, again))
        _, rest, replicas, again = min(options, key=lambda option: option[0])
        units = np.flatnonzero(self.members[index] & ~self.members[rest])
        return FirstStage(tuple(units.tolist()), replicas, again, rest)

    def _rests(self, index: int) -> NDArray[np.intp]:
        """The proper subsets of a downset that are downsets."""
        return np.flatnonzero(~(self.words[:index] & ~self.words[index]).any(axis=1))


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes per sample, and fixed, that a unit sends to another, and perhaps gets a gradient for."""

    src: int
    dst: int
    per_sample: float
    fixed: float = 0.0
    num_directions: int = 2
    sliceable: bool = True


class Border:
    """Bytes that cross the borders of stages D - D', for a D and many D'."""

    def __init__(self, carried: Iterable[Carried], members: NDArray[np.bool_]) -> None:
        size = members.shape[1]
        both, sent, uncut = np.zeros((2, size, size)), np.zeros((2, size, size)), np.zeros((1, size, size))
        for entry in carried:
            num_bytes = np.array([entry.per_sample, entry.fixed])
            both[:, entry.src, entry.dst] += num_bytes * entry.num_directions
            sent[:, entry.src, entry.dst] += num_bytes
            uncut[0, entry.src, entry.dst] += not entry.sliceable
        self.inside = members.astype(float)
        self.both, self.sent, self.uncut = both, sent, uncut
        self.read_from = self._read_from(both), self._read_from(uncut)

    def __call__(self, index: int, rests: NDArray[np.intp]) -> Crossing:
        stages = self.inside[index] - self.inside[rests]
        outside = 1 - self.inside[index]
        both, uncut = (
            (outside @ matrix @ stages.T) + np.einsum("vru,ru->vr", read[:, rests], stages)
            for matrix, read in zip((self.both, self.uncut), self.read_from, strict=True)
        )
        return Crossing(both, outside @ self.sent @ stages.T, uncut[0] > 0)

    def _read_from(self, matrix: Array) -> Array:
        """Bytes that downsets read from units, by downset and unit."""
        read: Array = np.matmul(matrix, self.inside.T).transpose(0, 2, 1)
        return read


def members_of(sets: Sequence[int], num_units: int) -> NDArray[np.bool_]:
    """A mask of the units that each downset contains."""
    width = -(-num_units // 8)
    words = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in sets), dtype=np.uint8)
    return np.unpackbits(words.reshape(len(sets), width), axis=1, count=num_units, bitorder="little").astype(bool)
