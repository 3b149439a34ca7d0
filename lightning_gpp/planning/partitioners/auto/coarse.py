"""A problem with fewer, larger units, for a quick first search whose result a second one refines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_gpp.graph import Affine
from lightning_gpp.plan import SOURCE
from lightning_gpp.planning.partitioners.auto.seeds import orders
from lightning_gpp.planning.problem.draft import Draft
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.units import Unit, UnitGraph


@dataclass(frozen=True, slots=True)
class Coarse:
    """A problem whose units are pieces made of another problem's units: `members` lists these for every piece."""

    problem: Problem
    members: tuple[tuple[int, ...], ...]

    def refined(self, draft: Draft) -> Draft:
        """The draft in the units of the other problem."""
        groups = (sorted(unit for piece in group for unit in self.members[piece]) for group in draft.groups)
        return draft.with_stages(units=map(tuple, groups))


def coarse(problem: Problem, num_pieces: int) -> Coarse:
    """Merge units into about `num_pieces` connected pieces of equal weight; branches stay together."""
    weights = problem.seconds(problem.sizes[len(problem.sizes) // 2]).total
    limit = float(weights.sum()) / num_pieces
    members: list[list[int]] = []
    weight = 0.0
    for unit in orders(problem, weights)[0]:
        near = {*problem.order.predecessors(unit), *problem.order.successors(unit)}
        if not members or weight + float(weights[unit]) > limit or near.isdisjoint(members[-1]):
            members.append([])
            weight = 0.0
        members[-1].append(unit)
        weight += float(weights[unit])
    return Coarse(problem.on(_units(problem.units, members)), tuple(map(tuple, members)))


def _units(units: UnitGraph, members: Sequence[Sequence[int]]) -> UnitGraph:
    piece = {unit: index for index, group in enumerate(members) for unit in group}
    piece[SOURCE] = SOURCE
    values = []
    for value in (*units.values, *units.data):
        readers = tuple(sorted({piece[unit] for unit in value.dsts} - {piece[value.src]}))
        if readers:
            values.append(replace(value, src=piece[value.src], dsts=readers))
    joined = tuple(_joined([units.units[unit] for unit in group]) for group in members)
    data = tuple(value for value in values if value.src == SOURCE)
    return UnitGraph(units=joined, values=tuple(value for value in values if value.src != SOURCE), data=data)


def _joined(units: Sequence[Unit]) -> Unit:
    return Unit(
        modules=tuple(path for unit in units for path in unit.modules),
        operators=tuple(name for unit in units for name in unit.operators),
        saved_bytes=sum((unit.saved_bytes for unit in units), Affine()),
        parameter_bytes=sum(unit.parameter_bytes for unit in units),
        divisible=all(unit.divisible for unit in units),
    )
