"""Profiles in the form of dnn-partitioning (github.com/msr-fiddle/dnn-partitioning).

Source: J. Tarnawski et al., "Efficient algorithms for device placement of DNN graph operators", NeurIPS 2020.

One JSON object: limits of the machine (`maxFPGAs`, `maxSizePerFPGA`, `maxCPUs`; "FPGA" stands for any accelerator),
which are ignored; `edges` from `sourceId` to `destId` with a `cost`, the time on a link of the authors, which is
ignored, and often a `size` in bytes; and `nodes` with

* `id`, and often a `name`;
* `fpgaLatency`: time on an accelerator. The time on a processor, `cpuLatency`, is ignored;
* `size`: bytes that the node occupies, for its result and for its parameters;
* `isBackwardNode`: whether it belongs to the backward, the loss or the optimizer;
* `colorClass`, if it must be on the same device as all nodes of this number: forward and backward of a layer.

**Pairing.** An operator of this library has a forward and a backward, so backward nodes are paired with the forward
nodes of their colour class, in proportion to the forward times if there are several (in equal parts if those are 0). A
backward node without a class goes with the first node that reads it: sums of gradients precede the backward that uses
them. Nodes that then belong to no forward node (the loss) form the backward of the user's step.

**Data and parameters.** A forward node that reads nothing and takes no time is a parameter of its readers if other
forward nodes are in its colour class, otherwise it is the data. In files without such nodes, the bytes of a node beyond
those that it sends are its parameters. For a node without readers, all bytes count as activations, as the bytes that it
sends are unknown.

**Activations.** If edges lead from forward to backward nodes, the results that these read are kept for the backward.
Otherwise all results of nodes with a backward are.

The mini-batch that was profiled counts as one sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import networkx as nx
from pydantic import Field

from benchmarks.planners.profiles.entries import (
    Amount,
    ProfileOperator,
    assemble,
    edges_of,
    name_of,
    nodes_of,
    own_parameter,
    read_by_step,
    unique_names,
)
from benchmarks.planners.profiles.pairing import Profile, ProfileNode, paired, profile_of, read_by_loss
from lightning_gpp.costs.measured import CostTable
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.validation import validated


@dataclass(frozen=True, slots=True, kw_only=True)
class _DnnNode:
    id: int
    time: Annotated[Amount, Field(alias="fpgaLatency")]
    size: Amount
    backward: Annotated[bool | Literal[0, 1], Field(alias="isBackwardNode")]
    name: str | None = None
    colour: Annotated[int | None, Field(alias="colorClass")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DnnEdge:
    source: Annotated[int, Field(alias="sourceId")]
    target: Annotated[int, Field(alias="destId")]
    size: Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _DnnContent:
    nodes: tuple[_DnnNode, ...]
    edges: tuple[_DnnEdge, ...]


def recognises(content: Mapping[str, Any]) -> bool:
    return "maxSizePerFPGA" in content or "maxFPGAs" in content


def read(content: Mapping[str, Any], file: str, time_unit: float) -> tuple[OperatorGraph, CostTable]:
    """See `benchmarks.planners.profiles.read_graph`."""
    checked = validated(_DnnContent, content, place=file, error=PlanError, extra="ignore")
    listed = nodes_of(checked.nodes, file)
    names = unique_names({number: name_of(node) for number, node in listed.items()})
    nodes = {number: _node(node, names[number], time_unit) for number, node in listed.items()}
    profile = profile_of(nodes, _graph(edges_of(checked.edges, nodes, file), nodes))
    backward, step_backward = paired(profile)
    entries = {number: _entry(profile, number, backward) for number in profile.operators}
    pairs = list(profile.graph.subgraph(profile.operators).edges)
    for number in read_by_loss(profile) or read_by_step(entries, pairs):
        entries[number] = replace(entries[number], feeds_step=True)
    return assemble(entries, pairs, name=file, step_backward=step_backward)


def _node(node: _DnnNode, name: str, time_unit: float) -> ProfileNode:
    return ProfileNode(
        name=name,
        seconds=node.time * time_unit,
        size=node.size,
        backward=bool(node.backward),
        colour=node.colour,
    )


def _graph(edges: Mapping[tuple[int, int], _DnnEdge], nodes: Mapping[int, ProfileNode]) -> nx.DiGraph:
    """Node ids, and edges with their bytes; an edge without `size` sends all bytes of its node."""
    graph = nx.DiGraph()
    graph.add_nodes_from(nodes)
    for (source, target), edge in edges.items():
        graph.add_edge(source, target, size=nodes[source].size if edge.size is None else edge.size)
    return graph


def _entry(profile: Profile, number: int, backward: Mapping[int, float]) -> ProfileOperator:
    node = profile.nodes[number]
    sizes = [size for _, _, size in profile.graph.out_edges(number, data="size")]
    sent = max(sizes, default=0.0)
    kept = profile.keeps(number) if profile.tells_what_is_kept else number in backward
    entry = ProfileOperator(
        name=node.name,
        forward=node.seconds,
        backward=backward.get(number, 0.0),
        has_backward=number in backward,
        output_bytes=sent,
        saved_bytes=(sent if kept else 0.0) if sizes else node.size,
        cluster=f"colour{node.colour}" if len(profile.partners(number)) > 1 else "",
    )
    if profile.parameters:
        read = [profile.nodes[p] for p in profile.graph.predecessors(number) if p in profile.parameters]
        return replace(entry, parameters={parameter.name: parameter.size for parameter in read})
    return own_parameter(entry, max(0.0, node.size - sent) if sizes else 0.0)
