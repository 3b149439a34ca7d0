"""What actions and messages cost, in seconds and bytes: the simulator's whole knowledge of the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gpp.costs.roofline import Link
from lightning_gpp.graph import Affine
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Action, Kind, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One replica of a stage.

    Args:
        forward: seconds of a forward, affine in the samples of the replica's share.
        backward: seconds of a full backward.
        activation_bytes: what a micro-batch in flight keeps.
        parameter_bytes: the stage's parameters.
    """

    forward: Affine = Affine(0, 1)
    backward: Affine = Affine(0, 1)
    activation_bytes: Affine = Affine()
    parameter_bytes: float = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of all stages and links of a plan.

    Args:
        stages: one for each stage of the plan.
        links: by (sending device, receiving device); for those that differ from `default_link`.
        default_link: all other pairs.
        data: seconds of a data action, affine in samples.
        parameter_copies: how many times a device keeps each parameter's bytes: itself, its gradient, the optimizer's
            state. 4 is Adam's figure, 2 plain gradient descent's, 1 inference's.
    """

    stages: tuple[StageCost, ...]
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    default_link: Link = Link()
    data: Affine = Affine()
    parameter_copies: float = 4

    @classmethod
    def uniform(cls, plan: Plan, forward: float = 1, backward: float = 1) -> StageCosts:
        """Every micro-batch of every stage takes the same seconds; communication is free."""
        cost = StageCost(forward=Affine(0, forward), backward=Affine(0, backward), activation_bytes=Affine(0, 1))
        return cls(stages=(cost,) * len(plan.stages))

    @classmethod
    def from_figures(
        cls,
        plan: Plan,
        *,
        flops_per_second: float,
        overhead: float = 0,
        link: Link | None = None,
        backward_ratio: float = 2,
    ) -> StageCosts:
        """From the plan's own figures and the speed of a device.

        Args:
            plan: its stages' `figures` count.
            flops_per_second: what a device really reaches.
            overhead: seconds that every action takes in addition.
            link: between every two devices; free by default.
            backward_ratio: a backward's FLOPs in those of its forward.
        """
        second = 1 / flops_per_second
        stages = tuple(
            StageCost(
                forward=_scaled(stage.figures.flops, second, overhead),
                backward=_scaled(stage.figures.flops, second * backward_ratio, overhead),
                activation_bytes=stage.figures.activation_bytes,
                parameter_bytes=stage.figures.parameter_bytes,
            )
            for stage in plan.stages
        )
        return cls(stages=stages, default_link=link or Link())

    def seconds(self, action: Action, num_samples: int) -> float:
        """Duration of an action on a replica whose share is `num_samples`; an empty share takes none."""
        if not num_samples:
            return 0
        stage = self.stages[action.stage]
        cost = {Kind.DATA: self.data, Kind.FORWARD: stage.forward, Kind.BACKWARD: stage.backward}[action.kind]
        return cost.at(num_samples)

    def transfer_seconds(self, plan: Plan, message: Message) -> float:
        num_bytes = plan.edges[message.edge].bytes.at(message.stop - message.start)
        return self.links.get((message.src, message.dst), self.default_link).seconds(num_bytes)


def _scaled(cost: Affine, factor: float, offset: float) -> Affine:
    return Affine(cost.per_sample * factor, cost.fixed * factor + offset)
