"""Which devices of the cluster a stage gets: layouts for drafts whose stages and numbers of replicas are known."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

Devices = list[tuple[int, ...]]
"""For every stage, in topological order, its devices."""


def side_by_side(replicas: Sequence[int]) -> Devices:
    """Replicas of a stage are neighbours: their all-reduce stays inside a node. The last stage is on device 0."""
    stops = list(accumulate(reversed(replicas)))
    starts = [0, *stops][: len(stops)]
    return [tuple(range(start, stop)) for start, stop in zip(starts, stops, strict=True)][::-1]


def copies(num_stages: int, num_copies: int) -> Devices:
    """Whole pipelines one after the other, so that stages that talk to each other are neighbours."""
    return [tuple(range(num_stages - 1 - stage, num_stages * num_copies, num_stages)) for stage in range(num_stages)]


def layouts(replicas: Sequence[int]) -> list[Devices]:
    """All that apply."""
    found = [side_by_side(replicas)]
    if len(set(replicas)) == 1 and replicas[0] > 1:
        found.append(copies(len(replicas), replicas[0]))
    return found
