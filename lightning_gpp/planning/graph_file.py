"""Operator graphs from files that this library wrote (`OperatorGraph.to_json`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import networkx as nx

from lightning_gpp.errors import PlanError
from lightning_gpp.files import read_json
from lightning_gpp.graph import Affine, Operator, OperatorGraph
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
    _check_figures(graph, file)
    _check_parameters(graph, file)
    return graph


def cyclic(file: str, names: Sequence[str]) -> PlanError:
    """The error for operators that wait for each other."""
    return PlanError(
        f"{file}: edges form a cycle: {' -> '.join([*names, names[0]])}. "
        "No operator of it could ever start; remove one of these edges."
    )


def _check_figures(graph: OperatorGraph, file: str) -> None:
    """Refuse sizes and costs that fall with the samples of a micro-batch."""
    for index, operator in enumerate(graph):
        for key, figure in _figures(operator):
            if figure.per_sample < 0:
                raise PlanError(
                    f"{file}: operators[{index}].{key}.per_sample is {figure.per_sample}; it must not be below 0."
                )


def _figures(operator: Operator) -> Iterator[tuple[str, Affine]]:
    yield "flops", operator.flops
    yield "saved_bytes", operator.saved_bytes
    for output, spec in enumerate(operator.outputs):
        for dim, size in enumerate(spec.shape):
            yield f"outputs[{output}].shape[{dim}]", size


def _check_edges(graph: OperatorGraph, file: str) -> None:
    for name, operator in graph.nx.nodes(data="operator"):
        if operator is None:
            raise PlanError(f"{file}: edges: operator {name!r} is not among operators. Add it, or remove its edges.")
    for source, target, outputs in graph.nx.edges(data="outputs"):
        if not all(0 <= output < len(graph[source].outputs) for output in outputs):
            raise PlanError(
                f"{file}: edges: {target!r} reads outputs {list(outputs)} of {source!r}, which has "
                f"{len(graph[source].outputs)}, counted from 0. Correct the edge."
            )
    if not nx.is_directed_acyclic_graph(graph.nx):
        raise cyclic(file, [source for source, *_ in nx.find_cycle(graph.nx)])
    position = {name: index for index, name in enumerate(graph.nx)}
    for source, target in graph.nx.edges:
        if position[source] > position[target]:
            raise PlanError(
                f"{file}: operators: {target!r} comes before {source!r}, which it reads. List operators in the order "
                "in which they run."
            )


def _check_parameters(graph: OperatorGraph, file: str) -> None:
    for operator in graph:
        for name in operator.parameters:
            if name not in graph.parameter_bytes or name not in graph.parameter_sizes:
                raise PlanError(
                    f"{file}: operator {operator.name!r} reads parameter {name!r}, which parameter_bytes or "
                    "parameter_sizes does not list. Add it there."
                )
