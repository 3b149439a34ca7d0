"""Cuts: borders at which one part of an order is put after another, although the order itself does not.

A connected part that is not series-parallel becomes so only by a cut: into a first half, whose predecessors are all
inside it, and the rest, which then waits for all of the first half. Neither half's own order changes, nor that of the
nodes around the part. The critical path is at least the sum of both halves' critical paths: the bound of the cut.

Weights are integers here, so that equal bounds compare as equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

from lightning_gpp.planning.partitioners.series_parallel.tree import Order, OrderedPart, mask_of, pairs_across

W = TypeVar("W", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The first `size` numbers of a topological order.

    Args:
        ordered: the part in a topological order.
        size: number of nodes in the first half.
        bound: lower bound of the critical path.
        num_new: unordered pairs of nodes that the cut puts in order.
    """

    ordered: Sequence[int]
    size: int
    bound: int
    num_new: int

    def halves(self) -> tuple[OrderedPart, OrderedPart]:
        return tuple(sorted(self.ordered[: self.size])), tuple(sorted(self.ordered[self.size :]))

    def by_share(self) -> tuple[float, ...]:
        """Sorts by bound, then by the share of pairs across the cut that are new."""
        return self.bound, self.num_new / (self.size * (len(self.ordered) - self.size))

    def by_number(self) -> tuple[float, ...]:
        """Sorts by bound, then by the number of new pairs."""
        return self.bound, self.num_new

    def by_balance(self) -> tuple[float, ...]:
        """Sorts by bound, then by how far the cut is from the middle."""
        return self.bound, abs(2 * self.size - len(self.ordered))


def cuts(order: Order, part: OrderedPart, weights: Sequence[int]) -> Iterator[Cut]:
    """The cuts after each position of two orders.

    The orders are by earliest end and by latest start, so no cut of the part has a lower bound than the best of these.
    """
    heads, tails = longest_paths(order, part, weights)
    mask = mask_of(part)
    for ordered in (
        sorted(part, key=lambda number: (heads[number], number)),
        sorted(part, key=lambda number: (-tails[number], number)),
    ):
        until = list(accumulate((heads[number] for number in ordered), max))
        after = list(accumulate((tails[number] for number in reversed(ordered)), max))[::-1]
        across = pairs_across(order, ordered, mask)
        for size in range(1, len(ordered)):
            yield Cut(
                ordered=ordered,
                size=size,
                bound=until[size - 1] + after[size],
                num_new=size * (len(ordered) - size) - across[size - 1],
            )


def longest_paths(order: Order, part: OrderedPart, weights: Sequence[W]) -> tuple[dict[int, W], dict[int, W]]:
    """Weights of the heaviest paths inside the part that end at, and that start at, every number, itself included."""
    heads: dict[int, W] = {}
    for number in part:
        heads[number] = weights[number] + max(
            (heads[other] for other in order.below[number] if other in heads), default=0
        )
    tails: dict[int, W] = {}
    for number in reversed(part):
        tails[number] = weights[number] + max(
            (tails[other] for other in order.above[number] if other in tails), default=0
        )
    return heads, tails
