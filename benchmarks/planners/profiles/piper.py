"""Profiles in the form that the planner Piper reads (J. Tarnawski et al., NeurIPS 2021; github.com/msr-fiddle/piper).

One JSON object: limits of the machine (`maxMemoryPerDevice`, `maxDevices`, `bandwidth`, `mbsInBatch`), which are not
part of a graph and are ignored; `edges` from `sourceId` to `destId` that carry `communicationCost` bytes; and `nodes`,
one per layer, with an `id` and often a `name`. `TMPCs` of a node maps degrees of tensor parallelism to modes of the
layer: usually one that keeps everything ("vanilla") and one that recomputes activations. Each has

* `timePerSample`: forward and backward together;
* `parameterSize`: bytes of the weights;
* `memoryUsageA`: bytes that every micro-batch in flight occupies, and `memoryUsageB`: bytes that are always occupied;
* `syncTimeFw`, `syncTimeBw`: bytes that tensor parallelism adds to edges.

Only the mode that keeps everything, without tensor parallelism, is used: recomputation is the planner's decision, and
`memoryUsageB` follows from the weights. A third of the time counts as the forward, because each of the two gradients is
a product of the forward's size. Piper's sample is one micro-batch of the profile, and one sample here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from annotated_types import MinLen
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
from lightning_gpp.costs.measured import CostTable
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.validation import validated

FORWARD_SHARE = 1 / 3
"""Share of the forward in the time for forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceMode:
    """A mode in which a layer can run."""

    seconds: Annotated[Amount, Field(alias="timePerSample")]
    parameter_bytes: Annotated[Amount, Field(alias="parameterSize")]
    saved_bytes: Annotated[Amount, Field(alias="memoryUsageA")]
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """The modes of a layer without tensor parallelism."""

    alone: Annotated[tuple[_DeviceMode, ...], MinLen(1), Field(alias="1")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PiperNode:
    id: int
    ways: Annotated[_Ways, Field(alias="TMPCs")]
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _PiperEdge:
    source: Annotated[int, Field(alias="sourceId")]
    target: Annotated[int, Field(alias="destId")]
    bytes: Annotated[Amount, Field(alias="communicationCost")]


@dataclass(frozen=True, slots=True, kw_only=True)
class _PiperContent:
    nodes: tuple[_PiperNode, ...]
    edges: tuple[_PiperEdge, ...]


def recognises(content: Mapping[str, Any]) -> bool:
    return "maxMemoryPerDevice" in content or "mbsInBatch" in content


def read(content: Mapping[str, Any], file: str, time_unit: float) -> tuple[OperatorGraph, CostTable]:
    """See `benchmarks.planners.profiles.read_graph`."""
    profile = validated(_PiperContent, content, place=file, error=PlanError, extra="ignore")
    nodes = nodes_of(profile.nodes, file)
    names = unique_names({number: name_of(node) for number, node in nodes.items()})
    edges = edges_of(profile.edges, nodes, file)
    sent = dict.fromkeys(nodes, 0.0)
    for (source, _), edge in edges.items():
        sent[source] = max(sent[source], edge.bytes)
    entries = {number: _entry(node, names[number], sent[number], time_unit) for number, node in nodes.items()}
    for number in read_by_step(entries, edges):
        entries[number] = replace(entries[number], feeds_step=True)
    return assemble(entries, edges, name=file)


def _entry(node: _PiperNode, name: str, sent: float, time_unit: float) -> ProfileOperator:
    way = _way(node.ways.alone)
    entry = ProfileOperator(
        name=name,
        forward=FORWARD_SHARE * way.seconds * time_unit,
        backward=(1 - FORWARD_SHARE) * way.seconds * time_unit,
        output_bytes=sent,
        saved_bytes=way.saved_bytes,
    )
    return own_parameter(entry, way.parameter_bytes)


def _way(ways: Sequence[_DeviceMode]) -> _DeviceMode:
    """The mode of a node on one device: the one that keeps everything if the file has it, otherwise the first."""
    return next((way for way in ways if way.id == "vanilla"), ways[0])
