"""Piper's partitioner: dynamic programming over the downsets of the graph of units.

Sources: J. Tarnawski, D. Narayanan, A. Phanishayee, "Piper: multidimensional planner for DNN parallelization", NeurIPS
2021; the planner released with it. A downset contains all successors of its members; the later stages run one. Let A[D,
k] be the slowest stage's seconds per sample if k devices run the downset D,

    A[D, k] = min over downsets D' in D, d of max( A[D', k - d], seconds(D - D', d, k) )

where one stage with d replicas runs D - D'. Its seconds are the sum of compute, of the transfers across its border in
both directions, and of reducing its gradients. A stage may span branches, but the stages run as a chain.

* The paper's A has a third index s, the replicas of all stages in D, for the micro-batches in flight: ceil(s / d). No
  stage is split by tensors here (t = 1), so s is always k.
* If the problem leaves it open, a stage recomputes its activations if they do not fit. Piper decides this for each
  layer; the runtime recomputes entire stages. The last stage never does.
* d divides the micro-batch, which the replicas share here; in Piper they take turns.
* Links: Piper knows one bandwidth, here that of the slowest level. Gradients are reduced in a ring, 2(d - 1)/d of the
  bytes, as in the simulation; the release counts the 4(d - 1)/d of a parameter server.
* Graphs with more than MAX_DOWNSETS downsets are refused, as in the release; counting ends at MAX_COUNTED.
* Every device is used, and of all micro-batch sizes of the problem the one with the shortest simulated step is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.chains import (
    OBJECTIVE,
    ChainCandidate,
    chained,
    choose,
    gradient_seconds,
    levels_of,
    precedence,
    slowest_seconds,
)
from lightning_gpp.planning.partitioners.downsets import Downsets, downsets
from lightning_gpp.planning.problem.draft import DraftStage, side_by_side
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Array, Problem

MAX_DOWNSETS: Final = 40_000
MAX_COUNTED: Final = 200_000


@register_partitioner("piper")
def piper(problem: Problem, control: SearchControl) -> Answer:
    """The chain of stages whose slowest stage is the fastest. States are cells of A, and what each was compared to."""
    return search(problem, control, PiperSearch)


def search(problem: Problem, control: SearchControl, kind: type[PiperSearch]) -> Answer:
    """The same with a `kind` of search that fills A in its own way."""
    found = downsets(precedence(problem), MAX_COUNTED)
    if len(found.sets) > MAX_DOWNSETS:
        notes = (_too_many(found, problem.num_units),)
        return Answer(draft=None, objective_name=OBJECTIVE, states=len(found.sets), notes=notes)
    filled = kind(problem, found)
    for index in range(1, len(found.sets)):
        filled.fill(index)
        if index % 100 == 0:
            control.report(index / len(found.sets), np.inf)
    return choose(problem, list(filled.candidates()), filled.states)


def _too_many(found: Downsets, num_units: int) -> str:
    count = f"{len(found.sets):,}" if found.complete else f"at least {MAX_COUNTED:,}, counted no further"
    return (
        f"The graph of {num_units} units has more than {MAX_DOWNSETS:,} downsets ({count}), the most that Piper's "
        "dynamic program takes. Models with fewer branches have fewer of them."
    )


Rows = NDArray[np.intp] | slice


@dataclass(slots=True)
class _FirstStage:
    """A first stage of a downset: the downset left to later stages, its replicas, and whether it recomputes."""

    rest: int
    replicas: int
    recompute: bool


class PiperSearch:
    """A for all micro-batch sizes: `best[size, downset, devices]`."""

    def __init__(self, problem: Problem, found: Downsets) -> None:
        self.problem, self.downsets = problem, found
        self.members = _members(found.sets, problem.num_units)
        self.words = np.packbits(self.members, axis=1, bitorder="little")
        self.border = _Border(problem, self.members)
        self.costs = [_PiperCosts(problem, size, self.members) for size in problem.sizes]
        self.best = np.full((len(problem.sizes), len(found.sets), problem.num_devices + 1), np.inf)
        self.best[:, 0, 0] = 0
        self.states = 0

    def fill(self, index: int) -> None:
        """Compute A of a downset from A of all smaller ones."""
        rests = self._rests(index)
        crossing, received, rigid = self.border(index, rests)
        for number, costs in enumerate(self.costs):
            before = self.best[number][rests]
            for replicas, fitting, seconds, _ in costs.stages(index, rests, crossing, received, rigid):
                width = before.shape[1] - replicas
                self.states += len(rests) * width
                if len(seconds):
                    self.extend(self.best[number, index, replicas:], before[fitting, :width], seconds)
            self.states += self.problem.num_devices

    def extend(self, row: Array, before: Array, seconds: Array) -> None:
        """Try first stages with one number of replicas: `row` is A by devices, `before` is A of the rest by [stage,
        devices].

        `seconds`: seconds of the stages, by [stage, devices]; one column if they do not depend on the devices.
        """
        np.minimum(row, np.maximum(before, seconds).min(axis=0), out=row)

    def candidates(self) -> Iterator[ChainCandidate]:
        full = len(self.downsets.sets) - 1
        for number, size in enumerate(self.problem.sizes):
            seconds = self.best[number, full, self.problem.num_devices]
            if seconds < np.inf:
                draft = chained(self.problem, self._stages(number, size))
                if draft is not None:
                    yield ChainCandidate(float(seconds), draft)

    def _stages(self, number: int, size: int) -> Sequence[DraftStage]:
        index, devices = len(self.downsets.sets) - 1, self.problem.num_devices
        found: list[tuple[tuple[int, ...], _FirstStage]] = []
        while index:
            choice = self._choice(index, number, devices)
            units = np.flatnonzero(self.members[index] & ~self.members[choice.rest])
            found.append((tuple(units.tolist()), choice))
            index, devices = choice.rest, devices - choice.replicas
        layout = side_by_side([choice.replicas for _, choice in found])
        return [
            DraftStage(units=units, devices=places, micro_batch_size=size, recompute=choice.recompute)
            for (units, choice), places in zip(found, layout, strict=True)
        ]

    def _choice(self, index: int, number: int, devices: int) -> _FirstStage:
        """The first stage of the best solution, recomputed rather than stored for all cells."""
        rests = self._rests(index)
        options: list[tuple[float, _FirstStage]] = []
        for replicas, fitting, seconds, keeps in self.costs[number].stages(index, rests, *self.border(index, rests)):
            if replicas <= devices and len(seconds):
                left = devices - replicas
                tried = np.maximum(self.best[number, rests[fitting], left], seconds[:, left % seconds.shape[1]])
                least = int(tried.argmin())
                recompute = not keeps[least % len(keeps), left % keeps.shape[1]]
                options.append((float(tried[least]), _FirstStage(int(rests[fitting][least]), replicas, recompute)))
        return min(options, key=lambda option: option[0])[1]

    def _rests(self, index: int) -> NDArray[np.intp]:
        """The proper subsets of a downset that are downsets."""
        return np.flatnonzero(~(self.words[:index] & ~self.words[index]).any(axis=1))


class _Border:
    """Bytes that cross the borders of stages D - D', for a D and many D', affine in samples: rows per sample, fixed."""

    def __init__(self, problem: Problem, members: NDArray[np.bool_]) -> None:
        size = problem.num_units
        both, sent, uncut = np.zeros((2, size, size)), np.zeros((2, size, size)), np.zeros((1, size, size))
        for value in problem.units.values:
            for dst in value.dsts:
                entry = np.array([value.bytes.per_sample, value.bytes.fixed])
                both[:, value.src, dst] += entry * value.num_directions
                sent[:, value.src, dst] += entry
                uncut[0, value.src, dst] += not value.sliceable
        self.inside = members.astype(float)
        self.both, self.sent, self.uncut = both, sent, uncut
        self.read_from = self._read_from(both), self._read_from(uncut)

    def __call__(self, index: int, rests: NDArray[np.intp]) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Bytes that cross the border of each stage, those received in forwards, and whether any tensor is rigid."""
        stages = self.inside[index] - self.inside[rests]
        outside = 1 - self.inside[index]
        crossing, uncut = (
            (outside @ matrix @ stages.T) + np.einsum("vru,ru->vr", read[:, rests], stages)
            for matrix, read in zip((self.both, self.uncut), self.read_from, strict=True)
        )
        return crossing, outside @ self.sent @ stages.T, uncut[0] > 0

    def _read_from(self, matrix: Array) -> Array:
        """Bytes that downsets read from units, by downset and unit."""
        read: Array = np.matmul(matrix, self.inside.T).transpose(0, 2, 1)
        return read


@dataclass(slots=True)
class _PiperCosts:
    """Seconds and bytes of stages for one micro-batch size."""

    problem: Problem
    size: int
    members: NDArray[np.bool_]
    bytes_per_second: float = field(init=False)
    degrees: list[int] = field(init=False)
    seconds: dict[int, tuple[Array, Array]] = field(default_factory=dict, init=False)
    saved: dict[int, Array] = field(default_factory=dict, init=False)
    static: Array = field(init=False)
    parameters: Array = field(init=False)
    rigid: Array = field(init=False)

    def __post_init__(self) -> None:
        problem, size = self.problem, self.size
        self.bytes_per_second = min(speed for _, speed in levels_of(problem))
        most = min(problem.num_devices, problem.max_replicas, size)
        self.degrees = [degree for degree in range(1, size + 1) if degree <= most and size % degree == 0]
        for degree in self.degrees:
            forward, total = slowest_seconds(problem, size // degree)
            self.seconds[degree] = self.members @ forward, self.members @ total
            self.saved[degree] = self.members @ problem.saved_bytes(size // degree)
        self.static = self.members @ problem.static_bytes
        self.parameters = self.members @ problem.parameter_bytes
        self.rigid = self.members @ np.array([not unit.divisible for unit in problem.units.units], dtype=float)

    def stages(
        self, index: int, rests: NDArray[np.intp], crossing: Array, received: Array, uncut: NDArray[np.bool_]
    ) -> Iterator[tuple[int, Rows, Array, NDArray[np.bool_]]]:
        """For every number of replicas: the stages that fit, their seconds per sample, and whether they keep
        activations.

        The last two are by stage and by devices of later stages; one column if they do not depend on the latter.
        """
        alone = uncut | (self.rigid[index] - self.rigid[rests] > 0)
        whole = (rests == 0) & (index == len(self.members) - 1 and not self.problem.replicable)
        moved = (crossing[0] * self.size + crossing[1]) / self.size / self.bytes_per_second
        parameters = self.parameters[index] - self.parameters[rests]
        for degree in self.degrees:
            synced = gradient_seconds(degree, parameters, self.bytes_per_second) / self.problem.batch_size
            added = moved / degree + synced
            if degree > 1:
                added = np.where(alone | whole, np.inf, added)
            yield degree, *self._with_memory(index, rests, degree, added, received)

    def _with_memory(
        self, index: int, rests: NDArray[np.intp], degree: int, added: Array, received: Array
    ) -> tuple[Rows, Array, NDArray[np.bool_]]:
        forward, total = (column[index] - column[rests] for column in self.seconds[degree])
        saved = self.saved[degree][index] - self.saved[degree][rests]
        limit = self.problem.memory_bytes.min() - (self.static[index] - self.static[rests])
        inputs = received[0] * (self.size // degree) + received[1]
        most_kept, most_again = _most(limit, saved), _most(limit - saved, inputs)
        last = rests == 0
        if self.problem.recompute is True:
            most_kept[~last] = -1
        most_again[last if self.problem.recompute is not False else slice(None)] = -1
        in_flight = self._in_flight(degree)
        plain, again = (total / self.size + added)[:, None], (forward / self.size)[:, None]
        if most_kept.min() >= in_flight[-1]:
            return slice(None), plain, np.ones((1, 1), dtype=bool)
        fitting = np.flatnonzero(np.maximum(most_kept, most_again) >= in_flight[0])
        plain, again, most_kept, most_again = plain[fitting], again[fitting], most_kept[fitting], most_again[fitting]
        keeps = in_flight <= most_kept[:, None]
        recomputed = np.where(in_flight <= most_again[:, None], plain + again, np.inf)
        return fitting, np.where(keeps, plain, recomputed), keeps

    def _in_flight(self, degree: int) -> Array:
        """Micro-batches in flight, by the devices of later stages."""
        devices = np.arange(degree, self.problem.num_devices + 1)
        return np.minimum(np.ceil(devices / degree), -(-self.problem.batch_size // self.size))


def _most(limit: Array, kept: Array) -> Array:
    """Micro-batches in flight that fit into memory."""
    return np.floor(limit / np.maximum(kept, 1e-9))


def _members(sets: Sequence[int], num_units: int) -> NDArray[np.bool_]:
    width = -(-num_units // 8)
    words = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in sets), dtype=np.uint8)
    return np.unpackbits(words.reshape(len(sets), width), axis=1, count=num_units, bitorder="little").astype(bool)
