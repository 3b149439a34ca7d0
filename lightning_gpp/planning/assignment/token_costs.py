"""Costs of tokens by position: attention reads all earlier tokens, so later slices of a sequence take longer.

If a share q of the work grows with the number of earlier tokens, the first fraction x of a sequence takes the fraction
(1 - q) x + q x^2 of the work. Slices of equal cost end where that is 1/n, 2/n ..., as in Seq1F1B (arXiv:2406.03488) and
TeraPipe (arXiv:2102.07988).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from lightning_gpp.graph import OperatorGraph


def growing_share(graph: OperatorGraph, carriers: Iterable[str]) -> float:
    """Share of a model's FLOPs that read carried tensors, directly or through operators without arithmetic.

    Args:
        graph: the model's operators.
        carriers: names of the operators that carry.
    """
    found: set[str] = set()
    waiting = list(carriers)
    while waiting:
        for reader in graph.nx.successors(waiting.pop()):
            if reader not in found:
                found.add(reader)
                waiting += [] if graph[reader].flops.at(1) else [reader]
    total = sum(operator.flops.at(1) for operator in graph)
    return sum(graph[name].flops.at(1) for name in found) / total if total else 0.0


def equal_parts(number: int, length: int, growing: float) -> list[tuple[int, int]]:
    """Cut `length` tokens into slices of equal cost, of at least one token each.

    Args:
        number: number of slices; at most `length`.
        length: tokens of a sequence.
        growing: share of the work that grows with the number of earlier tokens.
    """
    stops = [0]
    for index in range(1, number + 1):
        wanted = round(length * _place(index / number, growing))
        stops.append(min(max(wanted, stops[-1] + 1), length - (number - index)))
    return list(zip(stops, stops[1:], strict=False))


def cost_of(tokens: tuple[int, int], length: int, growing: float) -> float:
    """The fraction of a sequence's work that these tokens take."""
    start, stop = (place / length for place in tokens)
    return (1 - growing) * (stop - start) + growing * (stop**2 - start**2)


def _place(part: float, growing: float) -> float:
    """The position in a sequence (0..1) before which a fraction (0..1) of its work is done."""
    if growing < 1e-9:
        return part
    rest = 1 - growing
    return (sqrt(rest * rest + 4 * growing * part) - rest) / (2 * growing)
