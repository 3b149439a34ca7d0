"""Common parts of partitioners for chains of stages: their view of the problem, spans of units, the choice of a draft.

They are published for one profile per layer and one kind of device; on a mixed cluster they assume the slowest kind and
the smallest memory for all devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import product
from math import inf

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from lightning_gpp.planning.problem.draft import Draft, DraftStage, unreplicated
from lightning_gpp.planning.problem.evaluate import Evaluation, Evaluator
from lightning_gpp.planning.problem.partitioner import Alternative, Answer
from lightning_gpp.planning.problem.problem import Array, Problem

OBJECTIVE = "seconds per sample of the slowest stage"

NUM_ALTERNATIVES = 5


@dataclass(frozen=True, slots=True)
class ChainCandidate:
    """A draft, and the value of the search's objective for it."""

    objective: float
    draft: Draft


def slowest_seconds(problem: Problem, num_samples: int) -> tuple[Array, Array]:
    """Seconds of every unit on the slowest kind of device: of a forward, and of a forward and its backward together."""
    kinds = [problem.seconds(num_samples, kind) for kind in range(len(problem.cluster.kinds))]
    return reduce(np.maximum, [kind.forward for kind in kinds]), reduce(np.maximum, [kind.total for kind in kinds])


def precedence(problem: Problem) -> nx.DiGraph:
    """The graph of units, with edges to the last one, the user's step, from all others without successors."""
    order = problem.order.copy()
    last = problem.num_units - 1
    order.add_edges_from((unit, last) for unit in range(last) if not order.out_degree(unit))
    return order


def gradient_seconds(num_replicas: int, num_bytes: Array, bytes_per_second: float) -> Array:
    """Seconds of a ring all-reduce over the replicas of a stage: every device sends 2(n - 1)/n of the bytes."""
    return 2 * (num_replicas - 1) / num_replicas * num_bytes / bytes_per_second


def levels_of(problem: Problem) -> list[tuple[int, float]]:
    """The levels of the cluster, innermost first: how many groups of the level below form one, and bytes per second.

    If groups differ in size or do not consist of neighbours, or single pairs of devices have links of their own, all
    devices form one level with the slowest of all links.
    """
    cluster, levels, inner = problem.cluster, [], 1
    for level in cluster.levels if not cluster.links else ():
        size = max(level.groups.count(group) for group in set(level.groups))
        blocks = [set(level.groups[start : start + size]) for start in range(0, cluster.num_devices, size)]
        if cluster.num_devices % size or size % inner or any(len(block) > 1 for block in blocks):
            return [(cluster.num_devices, slowest_link(problem))]
        if size > inner:
            levels.append((size // inner, level.link.bytes_per_second))
        inner = size
    if levels and inner == cluster.num_devices:
        return levels
    return [(cluster.num_devices, slowest_link(problem))]


def slowest_link(problem: Problem) -> float:
    """Bytes per second of the slowest link between any two devices."""
    cluster = problem.cluster
    pairs = ((src, dst) for src, dst in product(range(cluster.num_devices), repeat=2) if src != dst)
    return min((cluster.link(*pair).bytes_per_second for pair in pairs), default=inf)


def chained(problem: Problem, stages: Sequence[DraftStage]) -> Draft | None:
    """The stages as a chain; None if that would be pipeline replicas and the problem allows none."""
    draft = Draft(stages=tuple(stages), schedule=problem.schedules[0], chained=True)
    return draft if problem.replicable or unreplicated(problem, draft)[1] == 1 else None


def choose(problem: Problem, candidates: Sequence[ChainCandidate], states: int) -> Answer:
    """The answer with the candidate whose simulated step is the shortest among those that fit."""
    evaluate = Evaluator(problem)
    judged = sorted(((evaluate(candidate.draft), candidate) for candidate in candidates), key=lambda pair: pair[0].rank)
    if not judged or not judged[0][0].fits:
        return Answer(draft=None, objective_name=OBJECTIVE, states=states, notes=(_reason(judged),))
    (best, chosen), *others = judged
    return Answer(
        draft=chosen.draft,
        objective=chosen.objective,
        objective_name=OBJECTIVE,
        states=states,
        alternatives=tuple(_alternatives(best, others[:NUM_ALTERNATIVES])),
    )


def _alternatives(best: Evaluation, others: Sequence[tuple[Evaluation, ChainCandidate]]) -> Iterator[Alternative]:
    for evaluation, candidate in others:
        if evaluation.fits:
            reason = f"a step takes {100 * (evaluation.seconds / best.seconds - 1):.1f} % longer"
        else:
            reason = _lack(evaluation)
        yield Alternative(draft=candidate.draft, seconds=evaluation.seconds, reason=reason)


def _reason(judged: Sequence[tuple[Evaluation, ChainCandidate]]) -> str:
    least = [evaluation for evaluation, _ in judged if evaluation.seconds < inf]
    if least:
        return f"The most frugal plan found does not fit: {_lack(least[0])}."
    return "No chain of stages uses all devices within their memory and the limits on replicas."


def _lack(evaluation: Evaluation) -> str:
    return f"a device lacks {evaluation.excess_bytes / 2**30:.2f} GiB of memory"


class Spans:
    """Units in their topological order, for one micro-batch size.

    Tables are indexed by [start, stop]: the units start..stop-1. If start >= stop, seconds are infinite.
    """

    def __init__(self, problem: Problem, size: int) -> None:
        self.problem, self.size, self.num_units = problem, size, problem.num_units
        self.recompute = problem.recompute is True
        self._seconds: dict[int, Array] = {}

    def seconds(self, num_samples: int) -> Array:
        """Seconds of a forward and a backward for a share of `num_samples` samples, recomputation included."""
        if num_samples not in self._seconds:
            forward, total = slowest_seconds(self.problem, num_samples)
            table = _sums(total)
            if self.recompute:
                table[:, :-1] += _sums(forward)[:, :-1]
            self._seconds[num_samples] = np.where(self.valid, table, np.inf)
        return self._seconds[num_samples]

    def kept_bytes(self, num_samples: int) -> Array:
        """Bytes of a micro-batch in flight: the tensors that autograd saves, or the inputs with recomputation."""
        saved = _sums(self.problem.saved_bytes(num_samples))
        if self.recompute:
            per_sample, fixed = self._received
            saved[:, :-1] = (per_sample * num_samples + fixed)[:, :-1]
        return saved

    def working_bytes(self, num_samples: int) -> Array:
        """Bytes that a backward recomputes; 0 without recomputation, and for spans with the user's step."""
        saved = _sums(self.problem.saved_bytes(num_samples))
        saved[:, -1] = 0
        return saved if self.recompute else np.zeros_like(saved)

    @cached_property
    def valid(self) -> NDArray[np.bool_]:
        positions = np.arange(self.num_units + 1)
        return positions[:, None] < positions[None, :]

    @cached_property
    def static_bytes(self) -> Array:
        return _sums(self.problem.static_bytes)

    @cached_property
    def parameter_bytes(self) -> Array:
        return _sums(self.problem.parameter_bytes)

    @cached_property
    def crossing_bytes(self) -> Array:
        """Bytes per micro-batch that cross each position, values forward and gradients backward."""
        crossing = np.zeros(self.num_units + 1)
        for value in self.problem.units.values:
            crossing[value.src + 1 : max(value.dsts) + 1] += value.num_directions * value.bytes.at(self.size)
        return crossing

    @cached_property
    def rigid(self) -> NDArray[np.bool_]:
        """Mask of spans without replicas, because data or values that enter or leave cannot be cut into shares."""
        units, values = self.problem.units.units, self.problem.units.values
        rigid = _sums(np.array([not unit.divisible for unit in units], dtype=float)) > 0
        for value in values:
            if not value.sliceable:
                makes = self._holding([value.src])
                reads = self._holding(value.dsts)
                alone = makes & self._within(value.src, max(value.dsts))
                rigid |= (makes | reads) & ~alone
        return rigid

    @cached_property
    def _received(self) -> tuple[Array, Array]:
        """Bytes that enter each span, per sample and fixed."""
        sums = np.zeros((2, self.num_units + 1, self.num_units + 1))
        for value in self.problem.units.values:
            enters = self._holding(value.dsts) & ~self._holding([value.src])
            sums[0] += enters * value.bytes.per_sample
            sums[1] += enters * value.bytes.fixed
        return sums[0], sums[1]

    def _holding(self, units: list[int] | tuple[int, ...]) -> NDArray[np.bool_]:
        """Mask of the spans with at least one of these units."""
        count = np.zeros(self.num_units)
        count[list(units)] = 1
        return self.valid & (_sums(count) > 0)

    def _within(self, first: int, last: int) -> NDArray[np.bool_]:
        positions = np.arange(self.num_units + 1)
        return (positions[:, None] <= first) & (positions[None, :] > last)


def _sums(values: Array) -> Array:
    prefix = np.concatenate([[0.0], np.cumsum(values)])
    sums: Array = prefix[None, :] - prefix[:, None]
    return sums
