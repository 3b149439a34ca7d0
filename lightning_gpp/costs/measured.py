"""Measured costs: the seconds of a model's blocks, spread over the operators in them.

A block is timed as a unit, because a single operator is too short for a clock, and takes a different time alone than
among its neighbours. An operator gets the share of its block's seconds that it has in the roofline model, which also
says how its backward is divided into both gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_gpp.cluster import Device
from lightning_gpp.costs.model import Roofline, Seconds
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.graph import Affine, Operator, OperatorGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Measured seconds of a group of operators, of a forward and of its backward, by the samples of the micro-batch."""

    operators: tuple[str, ...]
    points: Mapping[int, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class OperatorSeconds:
    """Seconds of one operator, affine in the samples of the micro-batch: the forward and both halves of the backward.

    `input_gradient` and `weight_gradient` are 0 if there is no such gradient.
    """

    forward: Affine = Affine()
    input_gradient: Affine = Affine()
    weight_gradient: Affine = Affine()


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Costs of the operators of one graph on one kind of device (see `CostModel`).

    Args:
        name: states their origin.
        device: name of the kind of device that they hold for.
        operators: seconds by name of the operator.
    """

    name: str
    device: str
    operators: Mapping[str, OperatorSeconds] = field(hash=False)

    def seconds(self, operator: Operator, num_samples: int, device: Device) -> Seconds:
        """Seconds as in `CostModel`; values that come from the data cost nothing.

        Raises:
            ConfigError: the device is of another kind than the measured one.
            PlanError: the costs are those of another model.
        """
        if device.name != self.device:
            raise ConfigError(
                f"The costs ({self.name}) were measured on {self.device!r}, but the cluster has {device.name!r}. Use "
                "strategy.costs=roofline."
            )
        if operator.target == "input":
            return Seconds(0.0)
        if operator.name not in self.operators:
            raise PlanError(
                f"The costs ({self.name}) have no figures for operator {operator.name!r}: they were measured for "
                "another model. Measure this one."
            )
        listed = self.operators[operator.name]
        parts = (listed.forward, listed.input_gradient, listed.weight_gradient)
        return Seconds(*(part.at(num_samples) for part in parts))


def spread(graph: OperatorGraph, blocks: Iterable[BlockSeconds], device: Device, name: str) -> MeasuredCosts:
    """The costs of operators that follow from the seconds of blocks.

    An operator that several blocks compute (cheap glue) gets the mean of its parts in them. One that no block computes,
    because nothing reads it, costs nothing.

    Args:
        graph: the operators.
        blocks: the measured seconds.
        device: the device of the roofline model by which operators share the seconds of a block.
        name: states the origin of the seconds.
    """
    roofline = Roofline(graph)
    found: dict[str, list[OperatorSeconds]] = {}
    for block in blocks:
        ways = ({size: times[part] for size, times in block.points.items()} for part in range(2))
        forward, backward = map(fitted, ways)
        expected = [roofline.seconds(graph[operator], max(block.points), device) for operator in block.operators]
        for operator, part in zip(block.operators, _parts(forward, backward, expected), strict=True):
            found.setdefault(operator, []).append(part)
    operators = {operator.name: _mean(found.get(operator.name, [OperatorSeconds()])) for operator in graph}
    return MeasuredCosts(name=name, device=device.name, operators=operators)


def _parts(forward: Affine, backward: Affine, expected: Sequence[Seconds]) -> Iterator[OperatorSeconds]:
    forwards = _shares([seconds.forward for seconds in expected])
    backwards = _shares([seconds.backward for seconds in expected], forwards)
    for seconds, own, back in zip(expected, forwards, backwards, strict=True):
        weight = seconds.weight_gradient / seconds.backward if seconds.backward else 0.0
        gradients = backward * back
        yield OperatorSeconds(forward * own, gradients * (1 - weight), gradients * weight)


def _shares(weights: Sequence[float], otherwise: Sequence[float] | None = None) -> Sequence[float]:
    """The weights, or `otherwise` if all are 0, scaled to sum to 1; equal shares if those are 0, too."""
    total = sum(weights)
    if total > 0:
        return [weight / total for weight in weights]
    return otherwise or [1 / len(weights) for _ in weights]


def _mean(parts: Sequence[OperatorSeconds]) -> OperatorSeconds:
    def mean(costs: Iterable[Affine]) -> Affine:
        return sum(costs, Affine()) * (1 / len(parts))

    return OperatorSeconds(
        forward=mean(part.forward for part in parts),
        input_gradient=mean(part.input_gradient for part in parts),
        weight_gradient=mean(part.weight_gradient for part in parts),
    )


def fitted(points: Mapping[int, float]) -> Affine:
    """The line through the points of fewest and of most samples, if it neither falls nor is negative at 0 samples.

    Otherwise the seconds of most samples count: as constant, or as proportional to samples. So does a single point.
    """
    small, large = min(points), max(points)
    low, high = points[small], points[large]
    if low > high:
        return Affine(0, high)
    if small == large or low * large < high * small:
        return Affine(high / large, 0)
    slope = (high - low) / (large - small)
    return Affine(slope, max(0.0, low - slope * small))
