"""Operator graphs and seconds from profiles in the form that the planner Piper reads (github.com/msr-fiddle/piper).

Source: J. Tarnawski et al., NeurIPS 2021. One JSON object: limits of the machine (`maxMemoryPerDevice`, `maxDevices`,
`bandwidth`, `mbsInBatch`), which are not part of a graph and are ignored; `edges` from `sourceId` to `destId` that
carry `communicationCost` bytes; and `nodes`, one per layer, with an `id` and often a `name`. `TMPCs` of a node maps
degrees of tensor parallelism to modes of the layer: usually one that keeps everything ("vanilla") and one that
recomputes activations. Each has

* `timePerSample`: forward and backward together;
* `parameterSize`: bytes of the weights;
* `memoryUsageA`: bytes that every micro-batch in flight occupies, and `memoryUsageB`: bytes that are always occupied;
* `syncTimeFw`, `syncTimeBw`: bytes that tensor parallelism adds to edges.

Only the mode that keeps everything, without tensor parallelism, is used: recomputation is the planner's decision, and
`memoryUsageB` follows from the weights. A third of the time counts as the forward, because each of the two gradients is
a product of the forward's size. Piper's sample is one micro-batch of the profile, and one sample here.

Layers that read nothing, take no time and have no weights are the data; other layers that read nothing read data of 0
bytes, because profiles do not contain the size of their data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import networkx as nx
from annotated_types import Ge, MinLen
from pydantic import Field

from lightning_gpp.costs.table import CostTable, OperatorSeconds
from lightning_gpp.errors import PlanError
from lightning_gpp.files import read_json
from lightning_gpp.graph import Affine, Operator, OperatorGraph, TensorSpec
from lightning_gpp.plan import STEP
from lightning_gpp.planning.assignment.modules import DATA
from lightning_gpp.validation import validated

FORWARD_SHARE = 1 / 3
"""Share of the forward in the time for forward and backward."""

FLOAT_BYTES = 4
"""Bytes of an element of a parameter; the profiles were taken in single precision."""

Amount = Annotated[float, Ge(0)]
"""A number of a profile: seconds or bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mode:
    """A mode in which a layer can run."""

    seconds: Annotated[Amount, Field(alias="timePerSample")]
    parameter_bytes: Annotated[Amount, Field(alias="parameterSize")]
    saved_bytes: Annotated[Amount, Field(alias="memoryUsageA")]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Modes:
    """The modes of a layer without tensor parallelism."""

    alone: Annotated[tuple[_Mode, ...], MinLen(1), Field(alias="1")]

    @property
    def keeping(self) -> _Mode:
        """The mode that keeps everything if the file has it, otherwise the first."""
        return next((mode for mode in self.alone if mode.id == "vanilla"), self.alone[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    id: int
    modes: Annotated[_Modes, Field(alias="TMPCs")]
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Edge:
    source: Annotated[int, Field(alias="sourceId")]
    target: Annotated[int, Field(alias="destId")]
    bytes: Annotated[Amount, Field(alias="communicationCost")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Profile:
    nodes: tuple[_Node, ...]
    edges: tuple[_Edge, ...]


def read_profile(path: str | Path, *, time_unit: float = 1e-3) -> tuple[OperatorGraph, CostTable]:
    """Read the operators of a JSON file, and their seconds.

    Args:
        path: the file.
        time_unit: the time unit of the file in seconds, which the format does not state. Most published inputs are in
            milliseconds; Piper's BERT is in seconds (1.0).

    Raises:
        PlanError: the file cannot be read, lacks a key, or its edges form a cycle.
    """
    file = str(path)
    profile = validated(_Profile, read_json(path, error=PlanError), place=file, error=PlanError, extra="ignore")
    nodes = {node.id: node for node in profile.nodes}
    names = unique_names({node.id: f"node{node.id}" if node.name is None else node.name for node in profile.nodes})
    order = _ordered(nodes, profile.edges, file)
    build = _Build()
    for number in nx.lexicographical_topological_sort(order, key=list(nodes).index):
        sent = max((size for _, _, size in order.out_edges(number, data="size")), default=0.0)
        sources = [names[source] for source in nodes if order.has_edge(source, number)]
        build.add(names[number], nodes[number].modes.keeping, sent, sources, time_unit)
    unread = [number for number in nodes if not order.out_degree(number)]
    build.add_step([names[number] for number in unread])
    return build.graph, CostTable(name=file, operators=build.seconds)


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


def _ordered(nodes: Iterable[int], edges: Sequence[_Edge], file: str) -> nx.DiGraph:
    """The ids of layers, and edges with their bytes.

    Raises:
        PlanError: an edge names a layer that does not exist, or the edges form a cycle.
    """
    order = nx.DiGraph()
    order.add_nodes_from(nodes)
    for index, edge in enumerate(edges):
        for key, end in (("sourceId", edge.source), ("destId", edge.target)):
            if end not in order:
                raise PlanError(f"{file}: edges[{index}].{key} is {end}; it must be the id of a node.")
        order.add_edge(edge.source, edge.target, size=edge.bytes)
    if not nx.is_directed_acyclic_graph(order):
        raise PlanError(f"{file}: edges form a cycle: {nx.find_cycle(order)}. Remove one of them.")
    return order


class _Build:
    """The graph and the seconds built so far."""

    def __init__(self) -> None:
        self.graph = OperatorGraph()
        self.seconds: dict[str, OperatorSeconds] = {}

    def add(self, name: str, mode: _Mode, sent: float, sources: list[str], time_unit: float) -> None:
        if not sources and not (mode.seconds or mode.parameter_bytes):
            self._add_data(name, sent)
            return
        if not sources:
            self._add_data(f"data.{name}", 0.0)
        parameter, size = f"{name}.weight", mode.parameter_bytes
        self.graph.add(
            Operator(
                name=name,
                target="profiled",
                module=name,
                parameters=(parameter,) if size else (),
                outputs=(_spec(sent, grad=True),),
                saved_bytes=Affine(mode.saved_bytes),
            )
        )
        self._connect(name, sources or [f"data.{name}"])
        if size:
            self.graph.parameter_bytes[parameter] = round(size)
            self.graph.parameter_sizes[parameter] = round(size / FLOAT_BYTES)
        wanted = any(self.graph[source].outputs[0].requires_grad for source in sources)
        share = (0.5 if wanted else 1.0) if size else 0.0  # gradients of inputs and of weights are of equal size
        backward = (1 - FORWARD_SHARE) * mode.seconds * time_unit
        self.seconds[name] = OperatorSeconds(
            forward=Affine(FORWARD_SHARE * mode.seconds * time_unit),
            input_gradient=Affine(backward - share * backward),
            weight_gradient=Affine(share * backward),
        )

    def add_step(self, sources: list[str]) -> None:
        self.graph.add(Operator(name="step", target="step", module=STEP))
        self._connect("step", [name for name in sources if self.graph[name].target != "input"] or sources)
        self.seconds["step"] = OperatorSeconds()

    def _add_data(self, name: str, num_bytes: float) -> None:
        self.graph.add(Operator(name=name, target="input", module=DATA, outputs=(_spec(num_bytes, grad=False),)))
        self.seconds[name] = OperatorSeconds()

    def _connect(self, target: str, sources: list[str]) -> None:
        for source in sources:
            self.graph.connect(source, target, 0)


def _spec(num_bytes: float, grad: bool) -> TensorSpec:
    return TensorSpec(shape=(Affine(1), Affine(0, round(num_bytes))), dtype="uint8", requires_grad=grad)
