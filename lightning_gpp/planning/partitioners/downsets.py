"""Downsets: sets of units that contain all successors of their members. The later stages of a chain run a downset."""

from __future__ import annotations

from dataclasses import dataclass

import networkx as nx


@dataclass(frozen=True, slots=True)
class Downsets:
    """Downsets as bits, one per unit, smaller ones first; `complete` is false if counting ended at the limit."""

    sets: tuple[int, ...]
    complete: bool


def downsets(order: nx.DiGraph, limit: int) -> Downsets:
    """All downsets of a graph with nodes 0..n-1, the empty set and the full one included, or the first `limit`.

    A chain of n nodes has n + 1, k chains of m nodes side by side have (m + 1)^k. Downsets of one size are made from
    those with one unit less, so only downsets are ever stored.
    """
    followers = [sum(1 << after for after in order.successors(unit)) for unit in range(len(order))]
    found, layer = [0], {0}
    while layer:
        layer = {bits | 1 << unit for bits in layer for unit in _addable(bits, followers)}
        found += sorted(layer)[: limit - len(found)]
        if len(found) >= limit:
            return Downsets(tuple(found), complete=False)
    return Downsets(tuple(found), complete=True)


def _addable(bits: int, followers: list[int]) -> list[int]:
    """Units outside of a downset that make it another downset."""
    return [unit for unit, after in enumerate(followers) if not bits >> unit & 1 and not after & ~bits]
