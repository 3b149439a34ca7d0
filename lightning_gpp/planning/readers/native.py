"""Operator graphs that this library wrote (`OperatorGraph.to_json`)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import networkx as nx

from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning.readers.entries import cyclic
from lightning_gpp.planning.readers.located import Located


def recognises(content: Located) -> bool:
    return "operators" in content


def read(content: Located) -> OperatorGraph:
    """The graph, checked as far as planning relies on it.

    Raises:
        PlanError: a key is missing, an edge or a parameter leads nowhere, or the order is not that of a run.
    """
    _check_figures(content)
    try:
        graph = OperatorGraph.from_json(json.dumps(content.value))
    except KeyError as error:
        raise PlanError(f"{content.file}: key {error} is missing. {_REMEDY}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise PlanError(f"{content.file}: {error}. {_REMEDY}") from error
    if not len(graph):
        raise PlanError(f"{content.file}: operators is empty. {_REMEDY}")
    _check_edges(graph, content.file)
    _check_parameters(graph, content.file)
    return graph


def _check_figures(content: Located) -> None:
    """Sizes of the model are numbers that are not below 0, those of a micro-batch do not fall with its samples."""
    for key in ("parameter_bytes", "parameter_sizes", "buffer_bytes"):
        for entry in content[key].entries():
            entry.number()
    names: set[str] = set()
    for operator in content["operators"]:
        if (name := operator["name"].text()) in names:
            raise operator["name"].error("must be a name that no other operator has")
        names.add(name)
        for figure in (operator["flops"], operator["saved_bytes"], *_dimensions(operator)):
            figure["per_sample"].number()
            figure["fixed"].finite()


def _dimensions(operator: Located) -> Iterator[Located]:
    for output in operator["outputs"]:
        yield from output["shape"]


_REMEDY = "Write the graph again with OperatorGraph.to_json()."


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
                f"{file}: operators: {target!r} stands before {source!r}, which it reads. List operators in the order "
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
