"""Operator graphs from files that this library wrote (`OperatorGraph.to_json`)."""

from __future__ import annotations

import json
from pathlib import Path

from lightning_gpp.errors import PlanError
from lightning_gpp.files import read_json
from lightning_gpp.graph import Operator, OperatorGraph
from lightning_gpp.graph.operator_graph import REMEDY


def read_graph(path: str | Path) -> OperatorGraph:
    """Read a graph, and check all that planning relies on.

    Raises:
        PlanError: the file cannot be read, a key is missing, an edge or a parameter does not exist, or the order is not
            that of a run.
    """
    file = str(path)
    graph = OperatorGraph.from_json(json.dumps(read_json(path, error=PlanError)), place=file)
    if not len(graph):
        raise PlanError(f"{file}: operators is empty. {REMEDY}")
    _check_edges(graph, file)
    for operator in graph:
        _check_operator(graph, operator, file)
    return graph


def _check_edges(graph: OperatorGraph, file: str) -> None:
    for name, operator in graph.nx.nodes(data="operator"):
        if operator is None:
            raise PlanError(f"{file}: edges: operator {name!r} is not among operators. Add it, or remove its edges.")
    position = {name: index for index, name in enumerate(graph.nx)}
    for source, target, outputs in graph.nx.edges(data="outputs"):
        if not all(0 <= output < len(graph[source].outputs) for output in outputs):
            raise PlanError(
                f"{file}: edges: {target!r} reads outputs {list(outputs)} of {source!r}, which has "
                f"{len(graph[source].outputs)}, counted from 0. Correct the edge."
            )
        if position[source] >= position[target]:
            raise PlanError(
                f"{file}: operators: {target!r} comes before {source!r}, which it reads. List operators in the order "
                "in which they run; no edges may form a cycle."
            )


def _check_operator(graph: OperatorGraph, operator: Operator, file: str) -> None:
    sizes = [size for spec in operator.outputs for size in spec.shape]
    if any(figure.per_sample < 0 for figure in (operator.flops, operator.saved_bytes, *sizes)):
        raise PlanError(
            f"{file}: operator {operator.name!r} has a per_sample below 0. Sizes and costs must not fall with the "
            f"samples of a micro-batch. {REMEDY}"
        )
    missing = set(operator.parameters) - (graph.parameter_bytes.keys() & graph.parameter_sizes.keys())
    if missing:
        raise PlanError(
            f"{file}: operator {operator.name!r} reads parameters {sorted(missing)}, which parameter_bytes or "
            "parameter_sizes does not list. Add them there."
        )
