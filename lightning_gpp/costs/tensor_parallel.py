"""Costs of tensor parallelism inside stages: what the members of a device divide, and what they tell each other.

The model: a member has 1/n of the divided parameters, and of the work and the activations of the modules that have
them. Wherever a matrix is divided along its input, the members add up its results in the forward; for each such sum
there is one in the backward, of the gradients of a module's inputs, which are as large (Shoeybi et al., "Megatron-LM",
2019, section 3: two of each per layer). A module with divided parameters has at least one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import networkx as nx

from lightning_gpp.cluster import Cluster, Device
from lightning_gpp.costs.model import CostModel, Seconds, has_backward
from lightning_gpp.graph import Operator, OperatorGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """The division of a model among the members of a device.

    Args:
        degree: number of members.
        parameters: names of the divided parameters.
        summed: those of them with which members compute terms of a sum: matrices that are cut along their input.
        members: the members of a device.
    """

    degree: int
    parameters: frozenset[str]
    summed: frozenset[str] = frozenset()
    members: Cluster

    def graph(self, graph: OperatorGraph) -> OperatorGraph:
        """The part of one member."""
        part = replace(
            graph,
            nx=nx.DiGraph(),
            parameter_bytes={name: self._share(name, size) for name, size in graph.parameter_bytes.items()},
            parameter_sizes={name: self._share(name, size) for name, size in graph.parameter_sizes.items()},
        )
        for operator in graph:
            part.add(self._part(operator) if self.divides(operator) else operator)
        part.nx.add_edges_from(graph.nx.edges(data=True))
        return part

    def divides(self, operator: Operator) -> bool:
        """True if the members divide the work of an operator."""
        return not self.parameters.isdisjoint(operator.parameters)

    def num_sums(self, operator: Operator) -> int:
        """Number of sums over the members in the forward of an operator that they divide."""
        return max(1, len(self.summed.intersection(operator.parameters)))

    def _share(self, name: str, size: int) -> int:
        return -(-size // self.degree) if name in self.parameters else size

    def _part(self, operator: Operator) -> Operator:
        share = 1 / self.degree
        return replace(operator, flops=operator.flops * share, saved_bytes=operator.saved_bytes * share)


@dataclass(frozen=True, slots=True)
class WithCollectives:
    """The costs of a member's part, with the sums over the members. `costs`: those without."""

    costs: CostModel
    divided: Divided

    @property
    def name(self) -> str:
        """The origin of the figures."""
        return self.costs.name

    def seconds(self, operator: Operator, num_samples: int, device: Device) -> Seconds:
        """See `CostModel`."""
        known = self.costs.seconds(operator, num_samples, device)
        if not self.divided.divides(operator):
            return known
        size = sum(spec.bytes(num_samples) for spec in operator.outputs)
        added = self.divided.members.all_reduce_seconds(tuple(range(self.divided.degree)), size)
        added *= self.divided.num_sums(operator)
        backward = added if has_backward(operator) else 0.0
        return known._replace(forward=known.forward + added, input_gradient=known.input_gradient + backward)
