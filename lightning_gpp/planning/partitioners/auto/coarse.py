"""A problem with fewer, larger units, for a quick first search whose result a second one refines."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpp.planning.partitioners.auto.seeds import orders
from lightning_gpp.planning.problem.draft import Draft
from lightning_gpp.planning.problem.problem import Problem
from lightning_gpp.planning.problem.units import described


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
    units = problem.units.units
    modules = [tuple(path for unit in group for path in units[unit].modules) for group in members]
    return Coarse(problem.on(described(problem.graph, modules)), tuple(map(tuple, members)))
