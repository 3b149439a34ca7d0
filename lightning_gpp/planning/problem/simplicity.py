"""Simplicity: of two drafts that are nearly as fast, the one that people would draw."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_gpp.planning.problem.draft import Draft, stage_of_units
from lightning_gpp.planning.problem.problem import Problem

Complexity = tuple[int, int, int]
"""Number of stages, of modules whose parts are in different stages, and of different numbers of replicas and members.
"""


def complexity(problem: Problem, draft: Draft) -> Complexity:
    """A sort key, simplest first: few stages, borders between blocks instead of inside them, equal replicas."""
    replicas = {(len(stage.devices), stage.members) for stage in draft.stages}
    return len(draft.stages), _divided_modules(problem, draft), len(replicas)


def _divided_modules(problem: Problem, draft: Draft) -> int:
    owner = stage_of_units(problem.num_units, [stage.units for stage in draft.stages])
    owners: dict[str, set[int]] = {}
    for unit, stage in zip(problem.units.units, owner, strict=True):
        for path in unit.modules:
            for parent in _parents(path):
                owners.setdefault(parent, set()).add(stage)
    return sum(len(stages) > 1 for stages in owners.values())


def _parents(path: str) -> Iterator[str]:
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
