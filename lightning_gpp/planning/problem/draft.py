"""A draft: a plan as partitioners write it, in numbers of units and of the cluster's devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import networkx as nx

from lightning_gpp.cluster import Link, Port
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine
from lightning_gpp.plan import share_of, topological
from lightning_gpp.planning.problem.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStage:
    """Units on devices; each device takes an equal share of every micro-batch of `micro_batch_size` samples."""

    units: tuple[int, ...]
    devices: tuple[int, ...]
    micro_batch_size: int
    recompute: bool = False

    @property
    def share(self) -> int:
        """Samples of the largest share."""
        return -(-self.micro_batch_size // len(self.devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Stages in any order, and the schedule's name.

    `chained`: the stages run as a chain in their topological order, even where they do not need each other, as
    partitioners have it that know only chains.
    """

    stages: tuple[DraftStage, ...]
    schedule: str = "1f1b"
    chained: bool = False

    def __str__(self) -> str:
        stages = [f"{len(stage.units)}u x{len(stage.devices)}{'r' * stage.recompute}" for stage in self.stages]
        sizes = sorted({stage.micro_batch_size for stage in self.stages})
        chain = ", a chain" * self.chained
        return f"{len(stages)} stages ({', '.join(stages)}), b={'/'.join(map(str, sizes))}, {self.schedule}{chain}"


@dataclass(frozen=True, slots=True)
class Flow:
    """The data flow between two stages of a draft: bytes per micro-batch in the forward and in the backward."""

    forward: Affine
    backward: Affine
    differentiable: bool


def stage_of_units(num_units: int, stages: Sequence[Iterable[int]]) -> list[int]:
    """For every unit the number of its stage; -1 where no stage has it."""
    owner = [-1] * num_units
    for index, units in enumerate(stages):
        for unit in units:
            owner[unit] = index
    return owner


def flows(problem: Problem, owner: Sequence[int]) -> dict[tuple[int, int], Flow]:
    """The edges of the stage graph. A value travels once to each stage that reads it."""
    sums: dict[tuple[int, int], list[float]] = {}
    for src_unit, readers, sizes in problem.flow_table:
        src = owner[src_unit]
        for dst in {owner[unit] for unit in readers} if len(readers) > 1 else (owner[readers[0]],):
            if dst != src:
                entry = sums.get((src, dst))
                sums[src, dst] = [a + b for a, b in zip(entry, sizes, strict=True)] if entry else list(sizes)
    return {pair: Flow(Affine(a, b), Affine(c, d), bool(c or d)) for pair, (a, b, c, d) in sorted(sums.items())}


def with_chain(edges: Mapping[tuple[int, int], Flow], num_stages: int) -> dict[tuple[int, int], Flow]:
    """The edges of stages in topological order, and those that make a chain of them: nothing but a token each way.

    The counterpart of `Plan.chained`.
    """
    token = Flow(Affine(), Affine(), differentiable=True)
    return {**{(index, index + 1): token for index in range(num_stages - 1)}, **edges}


class DraftTransfer(NamedTuple):
    """One micro-batch's transfer between two stages without contention: seconds until the last replica has it, and busy
    seconds of each port.

    The former last until it has gone from all replicas of the one stage to all of the other.
    """

    seconds: float
    ports: dict[Port, float]


Route: TypeAlias = Callable[[int, int], tuple[Link, tuple[Port, ...]]]
"""The link and the ports from one device to another."""


def transfer(route: Route, src: Sequence[int], dst: Sequence[int], size: Affine, num_samples: int) -> DraftTransfer:
    """The transfer of `num_samples` samples from the replicas `src` to the replicas `dst`."""
    seconds, ports = 0.0, dict[Port, float]()
    for i, j, samples in overlaps(src, dst, num_samples):
        link, passed = route(i, j)
        num_bytes = size.at(samples)
        seconds = max(seconds, link.seconds(num_bytes))
        for port in passed:
            ports[port] = ports.get(port, 0.0) + num_bytes / link.bytes_per_second
    return DraftTransfer(seconds, ports)


def overlaps(src: Sequence[int], dst: Sequence[int], num_samples: int) -> Iterator[tuple[int, int, int]]:
    """Pairs of devices whose shares of a micro-batch overlap, and by how many samples."""
    i = j = 0
    while i < len(src) and j < len(dst):
        starts, ends = zip(share_of(num_samples, i, len(src)), share_of(num_samples, j, len(dst)), strict=True)
        if min(ends) > max(starts):
            yield src[i], dst[j], min(ends) - max(starts)
        i, j = i + (ends[0] <= ends[1]), j + (ends[1] <= ends[0])


def in_topological_order(problem: Problem, draft: Draft) -> Draft:
    """The same draft with its stages in topological order, in the given one where they do not need each other.

    Raises:
        PlanError: the stages form a cycle.
    """
    pairs = list(flows(problem, stage_of_units(problem.num_units, [stage.units for stage in draft.stages])))
    try:
        order = topological(pairs, len(draft.stages))
    except nx.NetworkXUnfeasible:
        cycle = " -> ".join(str(src) for src, _ in nx.find_cycle(nx.DiGraph(pairs)))
        raise PlanError(f"The stages {cycle} of the draft form a cycle: each needs a result of the next.") from None
    return replace(draft, stages=tuple(draft.stages[index] for index in order))
