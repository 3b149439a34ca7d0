"""Slices: micro-batches cut along the sequence, for models in which a token depends only on earlier tokens.

A slice of a stage is itself a stage: it computes tokens `[start, stop)` with the modules and on the devices of the
unsliced stage. So slices of different stages run at the same time, and a device holds the activations of slices instead
of micro-batches. An edge from each slice to the next carries what later tokens need of earlier ones (keys and values),
and their gradients back, which makes backwards run from the last slice to the first.

    chain of two stages in three slices         0[0:4] -> 0[4:8] -> 0[8:12]
                                                   |         |         |
                                                1[0:4] -> 1[4:8] -> 1[8:12]

Sources: Li et al., TeraPipe, ICML 2021 (arXiv:2102.07988), with the order of GPipe; Sun et al., Seq1F1B, 2024
(arXiv:2406.03488), with that of 1F1B.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

from lightning_gpp.graph.operator_graph import Affine
from lightning_gpp.plan import SOURCE, Edge, Figures, Plan, Stage

CARRY: Final = "carry_"
"""Prefix of the names of operators that carry a tensor to later tokens; the dimension of the tokens follows."""

DIM: Final = 1
"""The dimension of tensors between stages that counts tokens; 0 counts samples."""

COSTS: Final = tuple(entry.name for entry in fields(Figures) if entry.type == "Affine")
"""The figures of a stage that its slices share."""


def part_of(name: str, cost: Affine, share: float, work: float) -> Affine:
    """The figure of a slice that has a share of the tokens and a part of the work.

    Seconds that do not depend on samples are those of calling operators; every slice has them all.
    """
    if name.endswith("seconds"):
        return Affine(cost.per_sample * work, cost.fixed)
    return cost * (work if name == "flops" else share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsliced:
    """A plan with its slices joined, and for every stage of the sliced plan its index in this one."""

    plan: Plan
    numbers: tuple[int, ...]

    def parts(self, stage: int) -> list[int]:
        """The slices of a stage, in the order of their tokens; the stage itself if it is not cut."""
        return [part for part, number in enumerate(self.numbers) if number == stage]


def num_slices(plan: Plan) -> int:
    """The number of slices of a stage; 1 if the plan is unsliced."""
    return max(1, len({stage.tokens for stage in plan.stages if stage.tokens is not None}))


def unsliced(plan: Plan) -> Unsliced:
    """Join the slices of a plan. Edges between the slices of a stage disappear."""
    if not plan.is_sliced:
        return Unsliced(plan=plan, numbers=tuple(range(len(plan.stages))))
    first: dict[object, int] = {}
    keys = [(stage.modules if stage.tokens is not None else index) for index, stage in enumerate(plan.stages)]
    numbers = tuple(first.setdefault(key, len(first)) for key in keys)
    groups: list[list[Stage]] = [[] for _ in first]
    for stage, number in zip(plan.stages, numbers, strict=True):
        groups[number].append(stage)
    edges: dict[tuple[int, int], Edge] = {}
    for edge in plan.edges:
        ends = (SOURCE if edge.src == SOURCE else numbers[edge.src]), numbers[edge.dst]
        if ends[0] != ends[1]:
            edges[ends] = _joined_edge(edges.get(ends), replace(edge, src=ends[0], dst=ends[1]))
    stages = tuple(map(_joined_stage, groups))
    return Unsliced(plan=replace(plan, stages=stages, edges=tuple(edges.values())), numbers=numbers)


def slice_name(name: str, tokens: tuple[int, int]) -> str:
    """The name of a slice of a stage or tensor: `name[start:stop]`."""
    return f"{name}[{tokens[0]}:{tokens[1]}]"


def _joined_stage(parts: list[Stage]) -> Stage:
    first = parts[0]
    if first.tokens is None:
        return first
    name = first.name.removesuffix(slice_name("", first.tokens))
    return replace(first, name=name, tokens=None, figures=_joined_figures([part.figures for part in parts]))


def _joined_figures(parts: list[Figures]) -> Figures:
    """The figures of joined slices; the first one has the parameters of all."""
    costs = {name: _joined(name, [getattr(part, name) for part in parts]) for name in COSTS}
    return replace(parts[0], **costs)  # type: ignore[arg-type]


def _joined(name: str, parts: list[Affine]) -> Affine:
    """The inverse of `part_of`: the figure of all slices together."""
    total = sum(parts, Affine())
    return Affine(total.per_sample, parts[0].fixed) if name.endswith("seconds") else total


def _joined_edge(known: Edge | None, edge: Edge) -> Edge:
    if known is None:
        return edge
    return replace(known, bytes=known.bytes + edge.bytes, seconds=known.seconds + edge.seconds)
