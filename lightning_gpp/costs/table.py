"""A cost model from a table: seconds of operators by name, measured elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lightning_gpp.cluster import Device
from lightning_gpp.costs.model import Seconds
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import Affine, Operator


@dataclass(frozen=True, slots=True)
class OperatorSeconds:
    """Seconds of one operator, affine in the samples of the micro-batch: the forward and both halves of the backward.

    `input_gradient` and `weight_gradient` are 0 if there is no such gradient. `again`: what another forward takes more
    than the first one, if a module around the operator runs again in its backward.
    """

    forward: Affine = Affine()
    input_gradient: Affine = Affine()
    weight_gradient: Affine = Affine()
    again: Affine = Affine()

    @property
    def backward(self) -> Affine:
        return self.input_gradient + self.weight_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Seconds of every operator of a graph, as a cost model.

    Args:
        name: states their origin.
        operators: seconds by name of the operator.
        seconds_per_rerun: of every module that runs again, whatever its operators.
    """

    name: str
    operators: Mapping[str, OperatorSeconds] = field(hash=False)
    seconds_per_rerun: float = 0.0

    def seconds(self, operator: Operator, num_samples: int, device: Device) -> Seconds:
        """Seconds for a micro-batch on the device of the measurement, whatever `device` is.

        Raises:
            PlanError: the table does not list the operator.
        """
        listed = self._listed(operator)
        parts = (listed.forward, listed.input_gradient, listed.weight_gradient)
        return Seconds(*(part.at(num_samples) for part in parts))

    def rerun_seconds(self, operators: Iterable[Operator], num_samples: int, device: Device) -> float:
        """See `costs.model.rerun_seconds`."""
        listed = map(self._listed, operators)
        return self.seconds_per_rerun + sum((entry.forward + entry.again).at(num_samples) for entry in listed)

    def _listed(self, operator: Operator) -> OperatorSeconds:
        if operator.name not in self.operators:
            raise PlanError(
                f"Costs of {self.name}: operator {operator.name!r} is not listed. Use the costs that came with "
                "the graph, or measure them for it."
            )
        return self.operators[operator.name]
