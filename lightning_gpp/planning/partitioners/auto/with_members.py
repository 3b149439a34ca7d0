"""The search of `auto` for plans whose stages have groups of devices of different sizes (tensor parallelism).

It begins with drafts that other searches have found for groups of one size, and changes single stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_gpp.planning.partitioners.auto.search import INTERRUPTED, Search
from lightning_gpp.planning.partitioners.auto.shape import Shape
from lightning_gpp.planning.problem.bound import busy_bound
from lightning_gpp.planning.problem.draft import Draft, DraftStage
from lightning_gpp.planning.problem.partitioner import Answer, SearchControl
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.units import Unit


def auto_with_members(problem: Problem, control: SearchControl, drafts: Mapping[Draft, str]) -> Answer:
    """Improve drafts for this problem; without any, as `auto` for single devices.

    `drafts`: with the names under which they are alternatives in any case, whatever their estimates; empty: none.
    """
    search = Search(problem, control, busy_bound(problem))
    try:
        shapes = {shape: name for draft, name in drafts.items() if (shape := Shape.of(draft)) is not None}
        search.named = {shape: name for shape, name in shapes.items() if name}
        search.take(shapes)
        search.run(search.leaders())
        search.simplify()
        search.save()
        return search.answer()
    except KeyboardInterrupt:
        return replace(search.answer(), notes=(INTERRUPTED,), interrupted=True)


def with_groups(source: Problem, draft: Draft, number: int, target: Problem) -> Draft | None:
    """A draft for groups of `number` devices, in terms of a problem with their members as devices.

    Units of the two problems may be cut differently: each goes where most of it is. None if that leaves a stage empty.
    """
    stage_of = {unit: index for index, stage in enumerate(draft.stages) for unit in stage.units}
    seconds = source.seconds(draft.stages[0].micro_batch_size).total.tolist()
    units: list[list[int]] = [[] for _ in draft.stages]
    for index, unit in enumerate(target.units.units):
        shares = [0.0 for _ in draft.stages]
        for other in _alike(source.units.units, unit):
            shares[stage_of[other]] += seconds[other] + 1e-12
        units[shares.index(max(shares))].append(index)
    if not all(units):
        return None
    pairs = zip(draft.stages, units, strict=True)
    return replace(draft, stages=tuple(_with_group(stage, tuple(own), number) for stage, own in pairs), sharding=None)


def _with_group(stage: DraftStage, units: tuple[int, ...], number: int) -> DraftStage:
    devices = tuple(number * device for device in stage.devices)
    return replace(stage, units=units, devices=devices, members=number, recompute=None, offload=False)


def _alike(units: Sequence[Unit], wanted: Unit) -> list[int]:
    """The units with modules in common with another one, by their paths."""
    return [
        index
        for index, unit in enumerate(units)
        if any(_is_inside(own, path) or _is_inside(path, own) for own in unit.modules for path in wanted.modules)
    ]


def _is_inside(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")
