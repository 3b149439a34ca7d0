"""Branch and bound for small parts: tries cuts of equal and higher bounds, too, with all that follow from each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lightning_gpp.planning.partitioners.series_parallel.cuts import Cut, cuts
from lightning_gpp.planning.partitioners.series_parallel.tree import (
    Order,
    OrderedPart,
    Tree,
    critical_path,
    expand,
    num_ordered,
    series,
)

SMALL = 32
"""Nodes of the largest part that is searched. Python's recursion limit allows several times as many."""

NUM_TRIALS = 200
"""Number of cuts to try per part; after that, every part below takes its first cut."""


class CutSearch:
    """The lightest trees found so far, for the parts of one order."""

    def __init__(self, order: Order, weights: Sequence[int]) -> None:
        self._order = order
        self._weights = weights
        self._by_node = dict(zip(order.nodes, weights, strict=True))
        self._found: dict[OrderedPart, Tree] = {}
        self._trials_left = 0

    def lightest(self, trees: Iterable[Tree]) -> Tree:
        """The tree with the lightest critical path; among several, the one with the fewest ordered pairs."""
        return min(trees, key=lambda tree: (critical_path(tree, self._by_node), num_ordered(tree)))

    def tree(self, part: OrderedPart) -> Tree:
        """The best tree of a prime part, by branch and bound over its cuts, lowest bounds first."""
        self._trials_left = NUM_TRIALS
        return self._prime(part)

    def _prime(self, part: OrderedPart) -> Tree:
        if part not in self._found:
            self._found[part] = self._cut(part)
        return self._found[part]

    def _cut(self, part: OrderedPart) -> Tree:
        first, *rest = sorted(cuts(self._order, part, self._weights), key=Cut.by_share)
        best = self._after(first)
        for cut in rest:
            if cut.bound > critical_path(best, self._by_node) or self._trials_left <= 0:
                break
            self._trials_left -= 1
            best = self.lightest([best, self._after(cut)])
        return best

    def _after(self, cut: Cut) -> Tree:
        halves = (expand(self._order, half, self._prime) for half in cut.halves())
        return series(tree for tree in halves if tree is not None)
