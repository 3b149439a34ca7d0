"""Random plans with sliced stages, like those that `planning.assignment.slices` makes of a model."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from lightning_gpp.graph import Affine
from lightning_gpp.plan import SOURCE, STEP, Edge, Plan, Stage
from lightning_gpp.slices import COSTS, part_of, slice_name

LENGTH: Final = 12
"""Tokens of a sample."""


def in_slices(draw: random.Random, plan: Plan) -> Plan:
    """The plan with two to four slices of all or some stages, but never of the user's step.

    Slices of different stages are joined as in a model; most stages carry something from a slice to the next.
    """
    tokens = list(pairwise([0, *sorted(draw.sample(range(1, LENGTH), draw.randint(1, 3))), LENGTH]))
    share = draw.choice((0.6, 1.0))
    numbers: dict[int, list[int]] = {SOURCE: [SOURCE]}
    stages: list[Stage] = []
    for index, stage in enumerate(plan.stages):
        chosen = STEP not in stage.modules and draw.random() < share
        parts = [_part(stage, interval) for interval in tokens] if chosen else [stage]
        numbers[index] = list(range(len(stages), len(stages) + len(parts)))
        stages += parts
    edges = [new for edge in plan.edges for new in _edges(edge, numbers)]
    for parts in (found for index, found in numbers.items() if index != SOURCE and draw.random() < 0.8):
        differentiable = draw.random() < 0.9
        edges += [Edge(src=a, dst=b, bytes=Affine(4, 0), differentiable=differentiable) for a, b in pairwise(parts)]
    return replace(plan, stages=tuple(stages), edges=tuple(edges))


def _part(stage: Stage, tokens: tuple[int, int]) -> Stage:
    share = (tokens[1] - tokens[0]) / LENGTH
    costs = {name: part_of(name, getattr(stage.figures, name), share, share) for name in COSTS}
    figures = replace(stage.figures, **costs)
    if tokens[0]:
        figures = replace(figures, num_parameters=0, parameter_bytes=0)
    return replace(stage, name=slice_name(stage.name, tokens), tokens=tokens, figures=figures)


def _edges(edge: Edge, numbers: Mapping[int, Sequence[int]]) -> Iterator[Edge]:
    """Edges between slices of the same tokens; an unsliced stage has one to or from every slice."""
    above, below = numbers[edge.src], numbers[edge.dst]
    for part in range(max(len(above), len(below))):
        yield replace(edge, src=above[part % len(above)], dst=below[part % len(below)])
