"""The part of a step that one of several processes computes which share its work (tensor parallelism).

Members divide some parameters, the work and the results of operators that use them, and of those that compute with
such results. Regions are modules inside of which results are divided; they are one operator each, so that no stage ends
there. The detail of a graph shows what is inside:

    region:   norm      up        gelu      down       add
    result:   whole     divided   divided   whole      whole      `down` is cut along its input: members add up results
    saved:    whole     whole     divided   divided    whole      what an operator saves is as divided as what it reads
"""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.graph.operator_graph import Affine, Operator, OperatorGraph, TensorSpec


def part_of(graph: OperatorGraph, num_members: int) -> OperatorGraph:
    """The part of one of the members of a device. It divides nothing further, so it is its own part."""
    if num_members == 1 or not graph.divided:
        return graph
    if num_members not in graph.parts:
        graph.parts[num_members] = _part(graph, num_members)
    return graph.parts[num_members]


def divides(graph: OperatorGraph, operator: Operator) -> bool:
    """True if the members of a device divide parameters of an operator."""
    return not graph.divided.keys().isdisjoint(operator.parameters)


def inside(graph: OperatorGraph, operator: Operator) -> list[Operator]:
    """The operators inside of a region, by the graph's detail; none if the operator is not a region."""
    if graph.detail is None or operator.module not in graph.regions or operator.target in ("input", "step"):
        return []
    return [each for each in graph.detail if region_of(graph, each) == operator.module]


def region_of(graph: OperatorGraph, operator: Operator) -> str:
    """The path of the region around an operator; empty if there is none."""
    path = operator.module
    while path and path not in graph.regions:
        path = path.rpartition(".")[0]
    return path


def num_calls(graph: OperatorGraph, operator: Operator) -> int:
    """Number of calls of a region; the graph's detail has the operators inside of all of them."""
    return sum(other.module == operator.module for other in graph)


def _part(graph: OperatorGraph, number: int) -> OperatorGraph:
    detail = None if graph.detail is None else _detail(graph.detail, graph, number)
    part = replace(
        graph,
        parameter_bytes=_shares(graph.parameter_bytes, graph, number),
        parameter_sizes=_shares(graph.parameter_sizes, graph, number),
        divided={},
        detail=detail,
    )
    return part.with_operators(_operator(graph, part, operator, number) for operator in graph)


def _shares(sizes: dict[str, int], graph: OperatorGraph, number: int) -> dict[str, int]:
    return {name: -(-size // number) if name in graph.divided else size for name, size in sizes.items()}


def _operator(graph: OperatorGraph, part: OperatorGraph, operator: Operator, number: int) -> Operator:
    """The part of an operator, whose results are undivided."""
    if own := inside(part, operator):
        share = 1 / num_calls(graph, operator)
        flops, saved = sum((each.flops for each in own), Affine()), sum((each.saved_bytes for each in own), Affine())
        return replace(operator, flops=flops * share, saved_bytes=saved * share)
    if not divides(graph, operator):
        return operator
    saved = operator.saved_bytes if graph.detail is not None else operator.saved_bytes * (1 / number)
    return replace(operator, flops=operator.flops * (1 / number), saved_bytes=saved)


def _detail(detail: OperatorGraph, graph: OperatorGraph, number: int) -> OperatorGraph:
    """The part of the detail: inside of regions results are divided, too."""
    parts, results = list[Operator](), set[str]()
    for operator in detail:
        reads = not results.isdisjoint(detail.nx.predecessors(operator.name))
        if region_of(graph, operator) and _has_divided_result(graph, operator, reads):
            results.add(operator.name)
        makes = operator.name in results
        parts.append(_inner(operator, number, reads=reads, uses=divides(graph, operator), makes=makes))
    return replace(detail, parameter_bytes=_shares(detail.parameter_bytes, graph, number)).with_operators(parts)


def _has_divided_result(graph: OperatorGraph, operator: Operator, reads: bool) -> bool:
    """Matrices that are cut along their output make divided results, those that are cut along their input do not."""
    dims = [graph.divided[name] for name in operator.parameters if name in graph.divided]
    return not any(dims) if dims else reads


def _inner(operator: Operator, number: int, *, reads: bool, uses: bool, makes: bool) -> Operator:
    share = 1 / number
    return replace(
        operator,
        flops=operator.flops * share if reads or uses else operator.flops,
        saved_bytes=operator.saved_bytes * share if reads else operator.saved_bytes,
        outputs=tuple(_divided(spec, share) for spec in operator.outputs) if makes else operator.outputs,
    )


def _divided(spec: TensorSpec, share: float) -> TensorSpec:
    """A tensor of as many bytes as a member's part; along which dimension it is cut makes no difference here."""
    largest = max(range(len(spec.shape)), key=lambda dim: spec.shape[dim].fixed, default=None)
    if largest is None:
        return spec
    return replace(spec, shape=tuple(size * share if dim == largest else size for dim, size in enumerate(spec.shape)))
