"""Profiles in the form that the planner Piper reads (J. Tarnawski et al., NeurIPS 2021; github.com/msr-fiddle/piper).

One JSON object: limits of the machine (`maxMemoryPerDevice`, `maxDevices`, `bandwidth`, `mbsInBatch`), which are not
part of a graph and are left alone; `edges` from `sourceId` to `destId` that carry `communicationCost` bytes; and
`nodes`, one per layer, with an `id` and often a `name`. `TMPCs` of a node maps degrees of tensor parallelism to the
ways to run the layer: usually one that keeps everything ("vanilla") and one that recomputes activations. Each has

* `timePerSample`: forward and backward together;
* `parameterSize`: bytes of the weights;
* `memoryUsageA`: bytes that every micro-batch in flight occupies, and `memoryUsageB`: bytes that are always occupied;
* `syncTimeFw`, `syncTimeBw`: bytes that tensor parallelism adds to edges.

Read is the way that keeps everything, without tensor parallelism; recomputation is for the planner to decide, and
`memoryUsageB` follows from the weights. A third of the time is taken for the forward: both gradients are a product of
the forward's size. What Piper calls a sample is one micro-batch of the profile, and is one sample here.
"""

from __future__ import annotations

from dataclasses import replace

from lightning_gpp.costs.table import CostTable
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.planning.readers.entries import (
    Entry,
    assemble,
    edges_of,
    name_of,
    nodes_of,
    own_parameter,
    read_by_step,
    unique_names,
)
from lightning_gpp.planning.readers.located import Located

FORWARD_SHARE = 1 / 3
"""Of the time for forward and backward."""


def recognises(content: Located) -> bool:
    return "maxMemoryPerDevice" in content or "mbsInBatch" in content


def read(content: Located, time_unit: float) -> tuple[OperatorGraph, CostTable]:
    """See `lightning_gpp.planning.readers.read_graph`."""
    nodes = nodes_of(content)
    names = unique_names({number: name_of(node) for number, node in nodes.items()})
    edges = edges_of(content, nodes)
    sent = dict.fromkeys(nodes, 0.0)
    for (source, _), edge in edges.items():
        sent[source] = max(sent[source], edge["communicationCost"].number())
    entries = {number: _entry(node, names[number], sent[number], time_unit) for number, node in nodes.items()}
    for number in read_by_step(entries, edges):
        entries[number] = replace(entries[number], feeds_step=True)
    return assemble(entries, edges, name=content.file)


def _entry(node: Located, name: str, sent: float, time_unit: float) -> Entry:
    way = _way(node)
    seconds = way["timePerSample"].number() * time_unit
    entry = Entry(
        name=name,
        forward=FORWARD_SHARE * seconds,
        backward=(1 - FORWARD_SHARE) * seconds,
        output_bytes=sent,
        saved_bytes=way["memoryUsageA"].number(),
    )
    return own_parameter(entry, way["parameterSize"].number())


def _way(node: Located) -> Located:
    """How the node runs on one device: keeping everything where the file says so, else the first way listed."""
    ways = list(node["TMPCs"]["1"])
    if not ways:
        raise node["TMPCs"]["1"].error("must list at least one way to run the node")
    plain = [way for way in ways if "id" in way and way["id"].value == "vanilla"]
    return (plain or ways)[0]
