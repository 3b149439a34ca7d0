"""Builds an operator graph, as capture would record it, and a cost table from the entries of a profile."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol, TypeVar

import networkx as nx
from annotated_types import Ge

from lightning_gpp.costs.measured import CostTable, OperatorSeconds
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine, Operator, OperatorGraph, TensorSpec
from lightning_gpp.plan import STEP
from lightning_gpp.planning.assignment.assign import DATA
from lightning_gpp.planning.graph_file import cyclic

FLOAT_BYTES = 4
"""Bytes of an element of a parameter; the profiles were taken in single precision."""


Amount = Annotated[float, Ge(0)]
"""A number of a profile: seconds or bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOperator:
    """An operator of a profile: seconds and bytes per sample, and the bytes of its parameters by name.

    `name` is unique and can be the path of a module (`unique_names`). Entries with the same non-empty `cluster` stay
    together. `feeds_step`: the user's step reads the result.
    """

    name: str
    forward: float = 0.0
    backward: float = 0.0
    has_backward: bool = True
    output_bytes: float = 0.0
    saved_bytes: float = 0.0
    parameters: Mapping[str, float] = field(default_factory=dict)
    cluster: str = ""
    feeds_step: bool = False

    @property
    def idle(self) -> bool:
        """True if it takes no time and has no parameters: it represents a given value."""
        return not (self.forward or self.backward or self.parameters)


ProfileEdge = tuple[int, int]


def unique_names(names: Mapping[int, str]) -> dict[int, str]:
    """Names that can be paths of modules: without dots, and with a number added to repeated ones."""
    taken = {"step"}
    unique: dict[int, str] = {}
    for number, name in names.items():
        name = name.replace(".", "_").replace("@", "_") or "operator"
        name = f"{name}_{number}" if name in taken else name
        while name in taken:
            name += "_"
        taken.add(name)
        unique[number] = name
    return unique


class NodeContent(Protocol):
    """Fields common to the nodes of all profiles."""

    @property
    def id(self) -> int: ...

    @property
    def name(self) -> str | None: ...


class EdgeContent(Protocol):
    """Fields common to the edges of all profiles: the ids of the nodes at their ends."""

    @property
    def source(self) -> int: ...

    @property
    def target(self) -> int: ...


AnyNode = TypeVar("AnyNode", bound=NodeContent)
AnyEdge = TypeVar("AnyEdge", bound=EdgeContent)


def name_of(node: NodeContent) -> str:
    """The node's name, or one made of its id."""
    return f"node{node.id}" if node.name is None else node.name


def nodes_of(nodes: Sequence[AnyNode], file: str) -> dict[int, AnyNode]:
    """The nodes of a file by their ids.

    Raises:
        PlanError: two nodes have one id.
    """
    known: dict[int, AnyNode] = {}
    for index, node in enumerate(nodes):
        if node.id in known:
            raise PlanError(f"{file}: nodes[{index}].id is {node.id}; it must be an id that no other node has.")
        known[node.id] = node
    return known


def edges_of(edges: Sequence[AnyEdge], ids: Iterable[int], file: str) -> dict[ProfileEdge, AnyEdge]:
    """The edges of a file, by the ids of the nodes at their ends.

    Raises:
        PlanError: an edge names a node that does not exist, or the edges form a cycle.
    """
    known = set(ids)
    for index, edge in enumerate(edges):
        for key, end in (("sourceId", edge.source), ("destId", edge.target)):
            if end not in known:
                raise PlanError(f"{file}: edges[{index}].{key} is {end}; it must be the id of a node.")
    joined = {(edge.source, edge.target): edge for edge in edges}
    graph = nx.DiGraph(list(joined))
    if not nx.is_directed_acyclic_graph(graph):
        raise cyclic(file, [str(source) for source, *_ in nx.find_cycle(graph)])
    return joined


def read_by_step(entries: Mapping[int, ProfileOperator], pairs: Iterable[ProfileEdge]) -> set[int]:
    """Entries without readers that take time: others are discarded results, and count only if there is nothing else."""
    read = {source for source, _ in pairs}
    unread = {number for number in entries if number not in read}
    return {number for number in unread if not entries[number].idle} or unread


def assemble(
    entries: Mapping[int, ProfileOperator], pairs: Iterable[ProfileEdge], *, name: str, step_backward: float = 0.0
) -> tuple[OperatorGraph, CostTable]:
    """A graph with one module per entry, and its costs.

    Entries that read nothing and represent a value are the data; an entry that reads nothing but computes reads data of
    0 bytes, because profiles do not contain the size of their data.

    Args:
        entries: entries by number.
        pairs: (entry, reader), without cycles.
        name: of the cost table.
        step_backward: seconds per sample of the backward of the user's step, the loss.
    """
    order = nx.DiGraph()
    order.add_nodes_from(entries)
    order.add_edges_from(pairs)
    position = {number: index for index, number in enumerate(entries)}
    sequence = list(nx.lexicographical_topological_sort(order, key=position.__getitem__))
    build = _Build()
    for number in sequence:
        sources = sorted(order.predecessors(number), key=position.__getitem__)
        build.add(entries[number], [entries[source].name for source in sources])
    build.add_step([entries[number].name for number in sequence if entries[number].feeds_step], step_backward)
    return build.graph, CostTable(name=name, operators=build.seconds)


class _Build:
    """The graph and the seconds built so far."""

    def __init__(self) -> None:
        self.graph = OperatorGraph()
        self.seconds: dict[str, OperatorSeconds] = {}

    def add(self, entry: ProfileOperator, sources: list[str]) -> None:
        name = entry.name
        if not sources and entry.idle and not entry.cluster:
            self._add_data(name, entry.output_bytes)
            return
        if not sources:
            self._add_data(f"data.{name}", 0.0)
        self.graph.add(_operator(entry))
        self._connect(name, sources or [f"data.{name}"])
        for parameter, size in entry.parameters.items():
            self.graph.parameter_bytes[parameter] = round(size)
            self.graph.parameter_sizes[parameter] = round(size / FLOAT_BYTES)
        wanted = any(self.graph[source].outputs[0].requires_grad for source in sources)
        self.seconds[name] = _seconds(entry, wanted)

    def add_step(self, sources: list[str], backward: float) -> None:
        self.graph.add(Operator(name="step", target="step", module=STEP))
        self._connect("step", sources)
        self.seconds["step"] = OperatorSeconds(input_gradient=Affine(backward))

    def _add_data(self, name: str, num_bytes: float) -> None:
        self.graph.add(Operator(name=name, target="input", module=DATA, outputs=(_spec(num_bytes, grad=False),)))
        self.seconds[name] = OperatorSeconds()

    def _connect(self, target: str, sources: list[str]) -> None:
        for source in sources:
            self.graph.connect(source, target, 0)


def _operator(entry: ProfileOperator) -> Operator:
    return Operator(
        name=entry.name,
        target="profiled",
        module=entry.name,
        parameters=tuple(entry.parameters),
        outputs=(_spec(entry.output_bytes, grad=entry.has_backward),),
        saved_bytes=Affine(entry.saved_bytes),
        cluster=entry.cluster,
    )


def _spec(num_bytes: float, grad: bool) -> TensorSpec:
    return TensorSpec(shape=(Affine(1), Affine(0, round(num_bytes))), dtype="uint8", requires_grad=grad)


def _seconds(entry: ProfileOperator, input_gradient_wanted: bool) -> OperatorSeconds:
    """Seconds of an entry. Gradients of inputs and of parameters are products of equal size, so each takes half."""
    share = (0.5 if input_gradient_wanted else 1.0) if entry.parameters else 0.0
    weight = share * entry.backward
    return OperatorSeconds(
        forward=Affine(entry.forward),
        input_gradient=Affine(entry.backward - weight),
        weight_gradient=Affine(weight),
    )


def own_parameter(entry: ProfileOperator, num_bytes: float) -> ProfileOperator:
    """The entry with one parameter of its own, unless that has no bytes."""
    return replace(entry, parameters={f"{entry.name}.weight": num_bytes}) if num_bytes else entry
