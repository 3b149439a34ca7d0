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
* With the release's own costs, which have neither difference, the search finds the release's optimum on its inputs
  (`benchmarks/planners/released_piper.py`).
* Links: Piper knows one bandwidth, here that of the slowest level. Gradients are reduced in a ring, 2(d - 1)/d of the
  bytes, as in the simulation; the release counts the 4(d - 1)/d of a parameter server.
* Graphs with more than MAX_DOWNSETS downsets are refused, as in the release; counting ends at MAX_COUNTED.
* Every device is used, and of all micro-batch sizes of the problem the one with the shortest simulated step is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.partitioners.chains import (
    OBJECTIVE,
    ChainCandidate,
    chained,
    choose,
    gradient_seconds,
    precedence,
    slowest_link,
    slowest_seconds,
)
from lightning_gpp.planning.partitioners.downset_search import (
    Border,
    Carried,
    Crossing,
    DownsetCosts,
    DownsetSearch,
    Fitting,
    Rows,
    members_of,
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
    found = downsets(precedence(problem), MAX_COUNTED)
    if len(found.sets) > MAX_DOWNSETS:
        notes = (_too_many(found, problem.num_units),)
        return Answer(draft=None, objective_name=OBJECTIVE, states=len(found.sets), notes=notes)
    members = members_of(found.sets, problem.num_units)
    return solved(problem, control, members, [ChainCosts(problem, size, members) for size in problem.sizes])


def solved(
    problem: Problem, control: SearchControl, members: NDArray[np.bool_], costs: Sequence[DownsetCosts]
) -> Answer:
    """The answer for downsets with these `members`, and `costs` for every micro-batch size."""
    filled = DownsetSearch(members, Border(_carried(problem), members), costs, problem.num_devices)
    for index in range(1, len(members)):
        filled.fill(index)
        if index % 100 == 0:
            control.report(index / len(members), np.inf)
    return choose(problem, list(_candidates(problem, filled)), filled.states)


def _too_many(found: Downsets, num_units: int) -> str:
    count = f"{len(found.sets):,}" if found.complete else f"at least {MAX_COUNTED:,}, counted no further"
    return (
        f"The graph of {num_units} units has more than {MAX_DOWNSETS:,} downsets ({count}), the most that Piper's "
        "dynamic program takes. Models with fewer branches have fewer of them."
    )


def _carried(problem: Problem) -> Iterator[Carried]:
    for value in problem.units.values:
        for dst in value.dsts:
            yield Carried(
                src=value.src,
                dst=dst,
                per_sample=value.bytes.per_sample,
                fixed=value.bytes.fixed,
                num_directions=value.num_directions,
                sliceable=value.sliceable,
            )


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
