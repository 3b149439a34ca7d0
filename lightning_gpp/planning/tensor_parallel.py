"""The search for the number of processes that share the work inside stages (tensor parallelism), one for all stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from lightning_gpp.cluster.groups import fits_node, grouped
from lightning_gpp.costs.model import CostModel, ForwardOnly
from lightning_gpp.costs.tensor_parallel import roofline_of
from lightning_gpp.errors import ConfigError, GPPError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.graph.parts import part_of
from lightning_gpp.planning.problem.prediction import Prediction
from lightning_gpp.planning.request import Request
from lightning_gpp.planning.search import best_plan

SIZES: Final = (1, 2, 4, 8)
"""Numbers of processes per device that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesFound:
    """The best plan of all, and what was found for each number of processes per device.

    Args:
        prediction: the best plan. Its lower bound is one for all of these numbers.
        plans: the best plan with each number.
        failures: the reasons why there is no plan with a number.
    """

    prediction: Prediction
    plans: Mapping[int, Prediction]
    failures: Mapping[int, GPPError] = field(default_factory=dict)


def best_sizes(
    partitioner: str, request: Request, graphs: Mapping[int, OperatorGraph], models: Mapping[int, str] = {}
) -> SizesFound:
    """The fastest plan that fits the memory, with the best number of processes per device.

    For each number, a device of the search is a group of that many devices. All searches together take the time of one.

    Args:
        partitioner: its name.
        request: the question for single devices.
        graphs: for each number the undivided graph, which says what members divide (`OperatorGraph.divided`), and does
            not cut where they do. For one process it may be cut everywhere.
        models: fingerprints of the graphs, which are written into plans; by default that of the request.

    Raises:
        GPPError: there is no plan with any number; the error is that of the first.
    """
    plans, failures = dict[int, Prediction](), dict[int, GPPError]()
    for number, graph in graphs.items():
        try:
            question = _question(request, graph, number)
            question = replace(question, model=models.get(number, request.model), seconds=request.seconds / len(graphs))
            plans[number] = best_plan(partitioner, part_of(graph, number), question)
        except GPPError as error:
            failures[number] = error
    if not plans:
        raise next(iter(failures.values()))
    best = min(plans.values(), key=lambda plan: plan.rank)
    best = replace(best, lower_bound=min(plan.lower_bound for plan in plans.values()))
    return SizesFound(prediction=best, plans=plans, failures=failures)


def _question(request: Request, graph: OperatorGraph, number: int) -> Request:
    """The request for groups of this many devices."""
    cluster = request.cluster
    heads = range(0, cluster.num_devices, number)
    if not all(fits_node(cluster, head, number) for head in heads):
        raise ConfigError(f"The {number} processes of a device would be on several nodes.")
    costs = request.costs if number == 1 else _costs(request, graph)
    return replace(request, cluster=grouped(cluster, (number,) * len(heads)), costs=costs)


def _costs(request: Request, graph: OperatorGraph) -> CostModel:
    costs = roofline_of(graph)
    return costs if request.footprint.training else ForwardOnly(costs)
