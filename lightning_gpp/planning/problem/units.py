"""Planning units: the smallest pieces that a partitioner moves, as coarse as the number of devices allows.

A unit is a set of module paths. Its edges are those of a plan with one unit per stage (`planning.assignment.assign`),
so that partitioners see the same graph as plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from lightning_gpp.graph import Affine, Operator, OperatorGraph, TensorSpec
from lightning_gpp.plan import SOURCE, STEP, topological
from lightning_gpp.planning.assignment.assign import assign, crossing, forced, owner_of, step_owner
from lightning_gpp.planning.assignment.modules import ModuleNode, module_tree, operators_of

Modules = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Module paths that stay together, their operators, saved bytes per micro-batch, and bytes of parameters.

    `divisible`: replicas may each take a share of a micro-batch, because its data can be cut and no operator combines
    samples.
    """

    modules: Modules
    operators: tuple[str, ...] = ()
    saved_bytes: Affine = Affine()
    parameter_bytes: int = 0
    divisible: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that unit `src` makes and the units `dsts` read: its bytes per micro-batch, forward and backward.

    `sliceable`: samples can be cut out of it, so that its ends may have different shares of a micro-batch.
    """

    src: int
    dsts: tuple[int, ...]
    bytes: Affine
    num_directions: int = 2
    sliceable: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGraph:
    """Units in topological order, the values between them, and the data they read (`src` is SOURCE).

    The last unit runs the user's step.
    """

    units: tuple[Unit, ...]
    values: tuple[Value, ...]
    data: tuple[Value, ...] = ()

    def graph(self) -> nx.DiGraph:
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(self.units)))
        graph.add_edges_from((value.src, dst) for value in self.values for dst in value.dsts)
        return graph


def find_units(graph: OperatorGraph, *, num_pieces: float, seconds: Mapping[str, float]) -> UnitGraph:
    """Cut the model at module borders until no piece costs more than 1 / `num_pieces` of the model.

    A module is not divided if it is that light, if none of its submodules has parameters or buffers, or if its
    operators are tied into one cluster. Modules whose borders would form a cycle become one unit.

    Args:
        graph: the captured operators.
        num_pieces: the higher, the finer; infinity cuts wherever possible.
        seconds: time of every operator, in any unit of time: only its share of the model's counts.
    """
    limit = sum(seconds.values()) / num_pieces

    def light(node: ModuleNode) -> bool:
        return sum(seconds[operator.name] for operator in node.all_operators()) <= limit

    modules = _without_cycles(graph, _leaves(module_tree(graph), light) or [("",)])
    modules = _with_step(graph, _with_stateless(graph, modules))
    return described(graph, modules)


def _leaves(root: ModuleNode, light: Callable[[ModuleNode], bool]) -> list[Modules]:
    """Modules with state that are not divided further, in the order of their first call."""
    leaves: list[Modules] = []
    open_nodes = [root]
    while open_nodes:
        node = open_nodes.pop()
        if not node.has_state:
            continue
        if node is not root and (light(node) or _atomic(node)):
            leaves.append((node.path,))
        elif any(child.has_state for child in node.children.values()):
            open_nodes.extend(reversed(node.children.values()))
        elif node is not root:
            leaves.append((node.path,))
    return leaves


def _atomic(node: ModuleNode) -> bool:
    clusters = {operator.cluster for operator in node.all_operators()}
    return len(clusters) == 1 and clusters != {""}


def _without_cycles(graph: OperatorGraph, modules: list[Modules]) -> list[Modules]:
    """Merge modules that share a cluster of operators or whose edges form cycles; returns a topological order."""
    modules = _merge(modules, _shared_clusters(graph, modules))
    while True:
        cycles = _cycles(forced(graph, modules))
        if not cycles:
            modules = [modules[index] for index in topological(forced(graph, modules), len(modules))]
            cycles = _cycles(forced(graph, modules) | _pairs(graph, modules))
        if not cycles:
            return modules
        modules = _merge(modules, cycles)


def _pairs(graph: OperatorGraph, modules: Sequence[Modules]) -> set[tuple[int, int]]:
    return {pair for pair in crossing(graph, assign(graph, modules)) if pair[0] != SOURCE}


def _cycles(pairs: set[tuple[int, int]]) -> list[list[int]]:
    components = nx.strongly_connected_components(nx.DiGraph(sorted(pairs)))
    return [sorted(component) for component in components if len(component) > 1]


def _shared_clusters(graph: OperatorGraph, modules: Sequence[Modules]) -> list[list[int]]:
    owners = _owners(modules)
    members: dict[str, set[int]] = {}
    for operator in graph:
        owner = owner_of(operator.module, owners) if operator.cluster else None
        if owner is not None:
            members.setdefault(operator.cluster, set()).add(owner)
    ties = nx.Graph()
    for group in members.values():
        nx.add_path(ties, sorted(group))
    return [sorted(component) for component in nx.connected_components(ties) if len(component) > 1]


def _owners(modules: Sequence[Modules]) -> dict[str, int]:
    return {path: index for index, paths in enumerate(modules) for path in paths}


def _merge(modules: list[Modules], groups: Iterable[Sequence[int]]) -> list[Modules]:
    """Merge each group into one entry, at the position of its first."""
    merged: dict[int, Modules] = dict(enumerate(modules))
    for group in groups:
        first, *rest = sorted(group)
        merged[first] = tuple(path for index in [first, *rest] for path in modules[index])
        for index in rest:
            del merged[index]
    return list(merged.values())


def _with_stateless(graph: OperatorGraph, modules: list[Modules]) -> list[Modules]:
    """Add modules without parameters (activations, pooling) to the unit that makes all their inputs, if there is one.

    All paths into such a module pass through that unit, so this makes no cycle. The others count as glue.
    """
    owners = _owners(modules)
    for node in _stateless(module_tree(graph), owners):
        producers = _producers(graph, node, owners)
        if len(producers) == 1 and None not in producers:
            owners[node.path] = producers.pop() or 0
    extended: list[list[str]] = [[] for _ in modules]
    for path, owner in owners.items():
        extended[owner].append(path)
    return [tuple(paths) for paths in extended]


def _stateless(node: ModuleNode, owners: dict[str, int]) -> list[ModuleNode]:
    """The largest modules without state that no unit contains, in the order of their first call."""
    if node.path in owners:
        return []
    if node.path and not node.has_state:
        return [node]
    return [found for child in node.children.values() for found in _stateless(child, owners)]


def _producers(graph: OperatorGraph, node: ModuleNode, owners: dict[str, int]) -> set[int | None]:
    """Units that make a module's inputs; None represents glue. The data do not count."""
    inside = {operator.name for operator in node.all_operators()}
    sources = {source for name in inside for source in graph.nx.predecessors(name)} - inside
    return {owner_of(graph[source].module, owners) for source in sources if graph[source].target != "input"}


def _with_step(graph: OperatorGraph, modules: list[Modules]) -> list[Modules]:
    """Add the user's step to the unit without successors that makes most of the step's inputs."""
    last = step_owner(graph, modules)
    rest = [paths for index, paths in enumerate(modules) if index != last]
    return [*rest, (*modules[last], STEP)]


def described(graph: OperatorGraph, modules: Sequence[Modules]) -> UnitGraph:
    """Units of these modules, in topological order, with what the graph tells of them."""
    assignment = assign(graph, modules)
    values = crossing(graph, assignment)
    operators = operators_of(graph, assignment, len(modules))
    units = tuple(
        _unit(graph, paths, operators[index], values.get((SOURCE, index), [])) for index, paths in enumerate(modules)
    )
    found = _values(graph, values)
    data = tuple(value for value in found if value.src == SOURCE)
    return UnitGraph(units=units, values=tuple(value for value in found if value.src != SOURCE), data=data)


def _unit(
    graph: OperatorGraph, modules: Modules, operators: Sequence[Operator], data: Sequence[tuple[str, int]]
) -> Unit:
    read = [graph[name].outputs[output] for name, output in data]
    parameters = {name for operator in operators for name in operator.parameters}
    return Unit(
        modules=modules,
        operators=tuple(operator.name for operator in operators),
        saved_bytes=sum((operator.saved_bytes for operator in operators), Affine()),
        parameter_bytes=sum(graph.parameter_bytes[name] for name in parameters),
        divisible=all(spec.divisible for spec in read) and not any(operator.mixes_samples for operator in operators),
    )


def _values(graph: OperatorGraph, flows: Mapping[tuple[int, int], Iterable[tuple[str, int]]]) -> tuple[Value, ...]:
    readers: dict[tuple[int, str, int], list[int]] = {}
    for (src, dst), flow in flows.items():
        for name, output in flow:
            readers.setdefault((src, name, output), []).append(dst)
    return tuple(_value(src, dsts, graph[name].outputs[output]) for (src, name, output), dsts in readers.items())


def _value(src: int, dsts: Sequence[int], spec: TensorSpec) -> Value:
    return Value(
        src=src,
        dsts=tuple(sorted(dsts)),
        bytes=spec.affine_bytes,
        num_directions=2 if spec.requires_grad else 1,
        sliceable=spec.divisible,
    )
