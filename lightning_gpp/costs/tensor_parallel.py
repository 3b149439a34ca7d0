"""Costs of tensor parallelism inside stages: what the members of a device divide, and what they tell each other.

A member computes its part of the graph (`graph.parts`). Wherever a matrix is divided along its input, the members add
up its results in the forward; for each such sum there is one in the backward, of the gradients of a module's inputs,
which are as large (Shoeybi et al., "Megatron-LM", 2019, section 3: two of each per layer). A module with divided
parameters has at least one.
"""

from __future__ import annotations

from lightning_gpp.cluster import Device
from lightning_gpp.cluster.groups import DeviceGroup, num_members
from lightning_gpp.costs.model import CostModel, Roofline, Seconds, has_backward
from lightning_gpp.graph import Operator, OperatorGraph
from lightning_gpp.graph.parts import divides, inside, num_calls, part_of


class MemberCosts:
    """The roofline of a member's part of a graph on devices that may be groups, with the sums over the members.

    Regions take as long as the operators inside, where these are known. Operators are those of the graph, or of its
    parts.
    """

    name = Roofline.name

    def __init__(self, graph: OperatorGraph) -> None:
        self.graph = graph
        self._parts: dict[int, _PartCosts] = {}

    def seconds(self, operator: Operator, num_samples: int, device: Device) -> Seconds:
        """See `CostModel`."""
        number = num_members(device)
        if number not in self._parts:
            self._parts[number] = _PartCosts(part_of(self.graph, number))
        known = self._parts[number].seconds(operator.name, num_samples, device)
        if not isinstance(device, DeviceGroup) or not divides(self.graph, operator):
            return known
        size = sum(spec.bytes(num_samples) for spec in operator.outputs)
        added = num_sums(self.graph, operator) * device.all_reduce_seconds(size)
        backward = added if has_backward(operator) else 0.0
        return known._replace(forward=known.forward + added, input_gradient=known.input_gradient + backward)


class _PartCosts:
    """Seconds of the operators of one part."""

    def __init__(self, part: OperatorGraph) -> None:
        self._part, self._roofline = part, Roofline(part)
        self._detail = None if part.detail is None else Roofline(part.detail)
        self._inside: dict[str, tuple[list[Operator], int]] = {}
        self._known: dict[tuple[str, int, Device], Seconds] = {}

    def seconds(self, name: str, num_samples: int, device: Device) -> Seconds:
        """Seconds of an operator, or of all operators inside of it."""
        key = name, num_samples, device
        if key not in self._known:
            self._known[key] = self._seconds(*key)
        return self._known[key]

    def _seconds(self, name: str, num_samples: int, device: Device) -> Seconds:
        operator = self._part[name]
        if name not in self._inside:
            self._inside[name] = inside(self._part, operator), num_calls(self._part, operator)
        own, calls = self._inside[name]
        if not own or self._detail is None:
            return self._roofline.seconds(operator, num_samples, device)
        columns = zip(*(self._detail.seconds(each, num_samples, device) for each in own), strict=True)
        return Seconds(*(sum(column) / calls for column in columns))


def num_sums(graph: OperatorGraph, operator: Operator) -> int:
    """Number of sums over the members in the forward of an operator that they divide.

    Members compute terms of a sum with matrices that are cut along their input.
    """
    return max(1, sum(graph.divided.get(name, 0) > 0 for name in operator.parameters))


def roofline_of(graph: OperatorGraph) -> CostModel:
    """The roofline of a graph, on groups of devices, too, if they divide any of its parameters."""
    return MemberCosts(graph) if graph.divided or graph.detail is not None else Roofline(graph)
