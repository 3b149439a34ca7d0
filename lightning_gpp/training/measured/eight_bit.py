"""Edges on which numbers travel as 8-bit integers in evaluation: the patterns of strategy.eight_bit_edges.

Edges are named as gpp-plan shows them, `tower -> head`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

from lightning_gpp.errors import ConfigError, did_you_mean
from lightning_gpp.plan import SOURCE, Edge, Plan
from lightning_gpp.runtime.codecs import EIGHT_BIT
from lightning_gpp.runtime.stage import Slot

DATA: Final = "data"
"""The name of the source in patterns. Wildcards do not match it, so that inputs change only if a user says so."""

Slots = Sequence[Sequence[Slot]]
"""The tensors that every edge of a plan carries."""


def patterns_of(given: bool | Sequence[str]) -> tuple[str, ...]:
    """The patterns of the option; true means every edge between stages."""
    if isinstance(given, bool):
        return ("*",) if given else ()
    return tuple(given)


def check_patterns(plan: Plan, given: bool | Sequence[str]) -> None:
    """Raise ConfigError if a pattern of the option matches no edge of the plan."""
    for pattern in () if isinstance(given, bool) else given:
        if not matching(plan, (pattern,)):
            names = [edge_name(plan, edge) for edge in plan.edges if not edge.artificial]
            raise ConfigError(
                f"strategy.eight_bit_edges: {pattern!r} matches no edge of the plan. Write `stage -> stage`, or a "
                f"stage alone for all edges that leave it; * stands for any name but {DATA!r}."
                f"{did_you_mean(pattern, names)}"
            )


def matching(plan: Plan, patterns: Sequence[str]) -> tuple[int, ...]:
    """Indices of the plan's edges that any of the patterns matches."""
    sides = [[side.strip() for side in pattern.partition("->")[::2]] for pattern in patterns]

    def matches(edge: Edge) -> bool:
        return any(_is(plan, edge.src, src) and _is(plan, edge.dst, dst or "*") for src, dst in sides)

    return tuple(i for i, edge in enumerate(plan.edges) if not edge.artificial and matches(edge))


def _is(plan: Plan, stage: int, pattern: str) -> bool:
    """True if a pattern matches the name of a stage, or the path of one of its modules."""
    if stage == SOURCE:
        return pattern == DATA
    names = (plan.stages[stage].name, *plan.stages[stage].modules)
    return any(name == pattern or fnmatchcase(name, pattern) for name in names)


def edge_name(plan: Plan, edge: Edge) -> str:
    """An edge as gpp-plan shows it."""
    return f"{DATA if edge.src == SOURCE else plan.stages[edge.src].name} -> {plan.stages[edge.dst].name}"


def with_eight_bits(slots: Slots, plan: Plan, patterns: Sequence[str]) -> Slots:
    """The slots of a plan's edges, where the numbers on matching ones travel as 8-bit integers."""
    edges = matching(plan, patterns)
    return [
        [replace(slot, codec=EIGHT_BIT) for slot in row] if index in edges else row for index, row in enumerate(slots)
    ]
