"""The order of the stages of a draft, and how many micro-batches each has in flight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush

from lightning_gpp.planning.problem.draft import Flow
from lightning_gpp.schedules.one_f_one_b import samples_in_flight


def topological_order(edges: Iterable[tuple[int, int]], num_stages: int) -> list[int]:
    """Stages in a topological order that keeps the given one where edges allow it; empty if they form a cycle."""
    following: list[list[int]] = [[] for _ in range(num_stages)]
    missing = [0] * num_stages
    for src, dst in edges:
        following[src].append(dst)
        missing[dst] += 1
    ready = [stage for stage in range(num_stages) if not missing[stage]]
    order = []
    while ready:
        stage = heappop(ready)
        order.append(stage)
        for other in following[stage]:
            missing[other] -= 1
            if not missing[other]:
                heappush(ready, other)
    return order if len(order) == num_stages else []


def in_flight_counts(
    slack: Sequence[int], edges: Mapping[tuple[int, int], Flow], schedule: str, num_micro_batches: int
) -> list[int]:
    """The most micro-batches in flight on each stage, in topological order. `slack`: that of each stage."""
    num_stages = len(slack)
    if schedule == "gpipe":
        return [num_micro_batches] * num_stages
    successors: list[list[int]] = [[] for _ in range(num_stages)]
    for src, dst in edges:
        successors[src].append(dst)
    samples = samples_in_flight([1] * num_stages, successors, slack=slack)
    return [min(count, num_micro_batches) for count in samples]
