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
  layer; here entire stages recompute. The last stage never does.
* d divides the micro-batch, which the replicas share here; in Piper they take turns.
* With the release's own costs, which have neither difference, the search found the release's optimum on its inputs
  (benchmarks/results/planners.md).
* Links: Piper knows one bandwidth, here that of the slowest level. Gradients are reduced in a ring, 2(d - 1)/d of the
  bytes, as in the simulation; the release counts the 4(d - 1)/d of a parameter server.
* Graphs with more than MAX_DOWNSETS downsets are refused, as in the release.
* Every device is used, and of all micro-batch sizes of the problem the one with the shortest simulated step is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.chains import (
    ChainCandidate,
    chained,
    choose,
    gradient_seconds,
    precedence,
    slowest_link,
    slowest_seconds,
)
from lightning_gpp.planning.problem.draft import DraftStage, side_by_side
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl, register_partitioner
from lightning_gpp.planning.problem.problem import Array, Problem
from lightning_gpp.planning.problem.units import Value

MAX_DOWNSETS: Final = 40_000


@register_partitioner("piper")
def piper(problem: Problem, control: SearchControl) -> Answer:
    """The chain of stages whose slowest stage is the fastest. States are cells of A, and what each was compared to."""
    found = downsets(precedence(problem), MAX_DOWNSETS + 1)
    if len(found) > MAX_DOWNSETS:
        reason = (
            f"The graph of {problem.num_units} units has more than {MAX_DOWNSETS:,} downsets, the most that Piper's "
            "dynamic program takes. Models with fewer branches have fewer of them."
        )
        return Answer(draft=None, states=len(found), notes=(reason,))
    members = members_of(found, problem.num_units)
    costs = [ChainCosts(problem, size, members) for size in problem.sizes]
    filled = DownsetSearch(members, Border(problem.units.values, members), costs, problem.num_devices)
    for index in range(1, len(members)):
        filled.fill(index)
    return choose(problem, list(_candidates(problem, filled)), filled.states)


def _candidates(problem: Problem, filled: DownsetSearch) -> Iterator[ChainCandidate]:
    for number, size in enumerate(problem.sizes):
        if filled.seconds(number) < np.inf:
            found = list(filled.stages(number))
            layout = side_by_side([stage.replicas for stage in found])
            stages = [
                DraftStage(units=stage.units, devices=places, micro_batch_size=size, recompute=stage.recompute)
                for stage, places in zip(found, layout, strict=True)
            ]
            draft = chained(problem, stages)
            if draft is not None:
                yield ChainCandidate(filled.seconds(number), draft)


class ChainCosts:
    """Seconds and bytes of stages for one micro-batch size.

    Args:
        problem: the question.
        size: samples of a micro-batch.
        members: whether downsets contain units.
    """

    def __init__(self, problem: Problem, size: int, members: NDArray[np.bool_]) -> None:
        self.problem, self.size, self.members = problem, size, members
        self.degrees = self._degrees(int(min(problem.num_devices, problem.max_replicas, size)))
        self.seconds: dict[int, tuple[Array, Array]] = {}
        self.saved: dict[int, Array] = {}
        for degree in self.degrees:
            forward, total = slowest_seconds(problem, -(-size // degree))
            self.seconds[degree] = members @ forward, members @ total
            self.saved[degree] = members @ problem.saved_bytes(-(-size // degree))
        self.static = members @ problem.static_bytes
        self.parameters = members @ problem.parameter_bytes
        self.rigid = members @ np.array([not unit.divisible for unit in problem.units.units], dtype=float)
        self.bytes_per_second = slowest_link(problem)

    def _degrees(self, most: int) -> list[int]:
        return [degree for degree in range(1, most + 1) if self.size % degree == 0]

    def stages(self, index: int, rests: NDArray[np.intp], crossing: Crossing) -> Iterator[Fitting]:
        """The stages that fit, for every number of replicas."""
        moved = (crossing.both[0] * self.size + crossing.both[1]) / self.size / self.bytes_per_second
        parameters = self.parameters[index] - self.parameters[rests]
        alone = self._alone(index, rests, crossing)
        for degree in self.degrees:
            synced = gradient_seconds(degree, parameters, self.bytes_per_second) / self.problem.batch_size
            added = moved / degree + synced
            if degree > 1:
                added = np.where(alone, np.inf, added)
            yield Fitting(degree, *self._with_memory(index, rests, degree, added, crossing.received))

    def _alone(self, index: int, rests: NDArray[np.intp], crossing: Crossing) -> NDArray[np.bool_]:
        """True if stages have one replica: something cannot be cut into shares, or it would be a pipeline replica."""
        whole = (rests == 0) & (index == len(self.members) - 1 and not self.problem.replicable)
        alone: NDArray[np.bool_] = crossing.uncut | (self.rigid[index] - self.rigid[rests] > 0) | whole
        return alone

    def _with_memory(
        self, index: int, rests: NDArray[np.intp], degree: int, added: Array, received: Array
    ) -> tuple[Rows, Array, NDArray[np.bool_]]:
        forward, total = (column[index] - column[rests] for column in self.seconds[degree])
        saved = self.saved[degree][index] - self.saved[degree][rests]
        limit = self.problem.memory_bytes.min() - (self.static[index] - self.static[rests])
        inputs = received[0] * -(-self.size // degree) + received[1]
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


# -- the recurrence over downsets -------------------------------------------------------------------------------------

Rows = NDArray[np.intp] | slice


def downsets(order: nx.DiGraph, limit: int) -> list[int]:
    """The first `limit` downsets of a graph with nodes 0..n-1, smaller ones first, as bits, the empty one included.

    A chain of n nodes has n + 1, k chains of m nodes side by side have (m + 1)^k. Downsets of one size are made from
    those with one unit less, so only downsets are ever stored.
    """
    followers = [sum(1 << after for after in order.successors(unit)) for unit in range(len(order))]
    found, layer = [0], {0}
    while layer and len(found) < limit:
        layer = {bits | 1 << unit for bits in layer for unit in _addable(bits, followers)}
        found += sorted(layer)
    return found[:limit]


def _addable(bits: int, followers: list[int]) -> list[int]:
    """Units outside of a downset that make it another downset."""
    return [unit for unit, after in enumerate(followers) if not bits >> unit & 1 and not after & ~bits]


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
        costs: those of every micro-batch size.
        num_devices: all of which are used.
    """

    def __init__(
        self, members: NDArray[np.bool_], border: Border, costs: Sequence[ChainCosts], num_devices: int
    ) -> None:
        self.members, self.border, self.costs, self.num_devices = members, border, costs, num_devices
        self.words = np.packbits(members, axis=1, bitorder="little")
        self.best = np.full((len(costs), len(members), num_devices + 1), np.inf)
        self.best[:, 0, 0] = 0
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


class Border:
    """Bytes that cross the borders of stages D - D', for a D and many D'."""

    def __init__(self, values: Iterable[Value], members: NDArray[np.bool_]) -> None:
        size = members.shape[1]
        both, sent, uncut = np.zeros((2, size, size)), np.zeros((2, size, size)), np.zeros((1, size, size))
        for value in values:
            num_bytes = np.array([value.bytes.per_sample, value.bytes.fixed])
            for dst in value.dsts:
                both[:, value.src, dst] += num_bytes * value.num_directions
                sent[:, value.src, dst] += num_bytes
                uncut[0, value.src, dst] += not value.sliceable
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
