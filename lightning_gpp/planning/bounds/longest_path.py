"""The longest path of units along which gradients return, and the bound from its stages (`path`)."""

from __future__ import annotations

import networkx as nx
import numpy as np

from lightning_gpp.plan import STEP
from lightning_gpp.planning.bounds.path import PathBound, PathShare
from lightning_gpp.planning.bounds.replica_costs import best_bandwidth, equally_fast, fastest, least_share, range_costs
from lightning_gpp.planning.problem.problem import Array, Problem

PATH_CELLS = 128
"""The least number of cells in which the devices of stages on a path are counted, if there are so many devices."""


def path_bound(problem: Problem, size: int) -> PathBound | None:
    """The bound from the longest path; None if devices differ, or if most of the work is elsewhere."""
    units, total = _longest_path(problem, size), np.add(*fastest(problem, size))
    if not equally_fast(problem, size) or 2 * float(total[units].sum()) < float(total.sum()):
        return None
    weights = _summed_at_the_end(problem) * distinct_weights(problem)
    return PathBound(
        shares=[_path_share(problem, size, *pair, units, weights) for pair in _equal_shares(problem, size)],
        number=-(-problem.batch_size // size),
        num_devices=problem.num_devices,
        cell=max(1, min(2 * size, problem.num_devices) // PATH_CELLS),
    )


LIGHT = 0.01
"""Units that take less than this share of their path, all together, are left out of it."""


def _longest_path(problem: Problem, size: int) -> list[int]:
    """The units of the path that takes longest, in order, without the lightest ones."""
    total = np.add(*fastest(problem, size))
    ahead, parent = paths_ahead(returning(problem), total)
    units = [int(np.argmax(ahead + total))]
    while parent[units[-1]] >= 0:
        units.append(parent[units[-1]])
    ascending = sorted(units, key=lambda unit: float(total[unit]))
    light = np.cumsum(total[ascending]) < LIGHT * float(total[units].sum())
    return sorted({*ascending[int(light.sum()) :]}, key=units[::-1].index)


def _path_share(problem: Problem, size: int, fewest: int, most: int, units: list[int], weights: Array) -> PathShare:
    choice = range_costs(problem, size, fewest, most)
    smallest = problem.batch_size // -(-problem.batch_size // size)
    forward, backward = fastest(problem, least_share(problem, smallest, most))
    summing = 2 * (fewest - 1) / fewest * weights / best_bandwidth(problem, fewest)
    return PathShare(
        fewest=fewest,
        busy=problem.batch_size / size * choice.busy[units],
        forward=choice.forward[units],
        backward=backward[units],
        way=(forward + backward)[units],
        summing=summing[units],
    )


def _summed_at_the_end(problem: Problem) -> float:
    """The part of the sums of gradients that follows the last backward: with `fsdp`, weights are gathered before."""
    return 0.0 if not problem.footprint.training else 1.0 if problem.sharding in ("none", "zero1", "auto") else 0.5


def distinct_weights(problem: Problem) -> Array:
    """Bytes of the weights of every unit that no unit ahead of it has, nor the user's step."""
    graph = problem.graph
    weights = problem.parameter_bytes.copy()
    known = {name for operator in graph if operator.module == STEP for name in operator.parameters}
    for index, unit in enumerate(problem.units.units):
        inside = {parameter for name in unit.operators for parameter in graph[name].parameters}
        weights[index] -= sum(graph.parameter_bytes[name] for name in inside & known)
        known |= inside
    least: Array = np.maximum(weights, 0.0)
    return least


MAX_SHARE_RANGES, SHARE_RANGE = 8, 1.15
"""Ranges of numbers of replicas, from `MAX_SHARE_RANGES` replicas on, are at least of this ratio."""


def _equal_shares(problem: Problem, size: int) -> list[tuple[int, int]]:
    """Numbers of replicas whose largest shares have as many samples, smallest and largest; close ones are together."""
    limit = int(min(problem.max_replicas, problem.num_devices))
    ranges = [(1, 1)]
    while ranges[-1][1] < limit:
        fewest = ranges[-1][1] + 1
        share = -(-size // fewest)
        most = limit if share == 1 else min(limit, -(-size // (share - 1)) - 1)
        joins = fewest > MAX_SHARE_RANGES and most <= SHARE_RANGE * ranges[-1][0]
        ranges[-1:] = [(ranges[-1][0], most)] if joins else [ranges[-1], (fewest, most)]
    return ranges


def returning(problem: Problem) -> nx.DiGraph:
    """The graph of units with only the edges along which gradients come back: along others, no backward waits."""
    graph = nx.DiGraph()
    graph.add_nodes_from(range(problem.num_units))
    for value in problem.units.values:
        if value.num_directions == 2 and value.bytes.at(1) > 0:
            graph.add_edges_from((value.src, dst) for dst in value.dsts)
    return graph


def paths_ahead(order: nx.DiGraph, total: Array) -> tuple[Array, list[int]]:
    """For every unit the seconds of its longest path of ancestors, and that path's last unit; -1 for sources."""
    ahead, parent = np.zeros(len(total)), [-1] * len(total)
    for unit in range(len(total)):
        preceding = list(order.predecessors(unit))
        if preceding:
            parent[unit] = max(preceding, key=lambda other: float(ahead[other] + total[other]))
            ahead[unit] = ahead[parent[unit]] + total[parent[unit]]
    return ahead, parent
