"""What actions and messages cost, in seconds and bytes: the simulator's whole knowledge of the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gpp.cluster import Cluster, Link, Port
from lightning_gpp.graph import Affine
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import Action, Kind, Message
from lightning_gpp.schedules.held_bytes import HeldBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One replica of a stage.

    Args:
        forward: seconds of a forward, or of a recomputation; affine in the samples of the replica's share.
        backward: seconds of a full backward, without the recomputation of the forward.
        weight: seconds of the gradients of the parameters alone; those of the inputs take the rest of `backward`.
        activation_bytes: what a micro-batch in flight keeps.
        working_bytes: what it keeps in addition from its recomputation on.
        pending_bytes: what is left of both from the gradients of the inputs to those of the parameters; None: all.
        parameter_bytes: the stage's parameters.
    """

    forward: Affine = Affine(0, 1)
    backward: Affine = Affine(0, 1)
    weight: Affine = Affine()
    activation_bytes: Affine = Affine()
    working_bytes: Affine = Affine()
    pending_bytes: Affine | None = None
    parameter_bytes: float = 0

    @property
    def held(self) -> HeldBytes:
        """Memory of a micro-batch in flight."""
        return HeldBytes(kept=self.activation_bytes, working=self.working_bytes, pending=self.pending_bytes)

    def seconds(self, kind: Kind, num_samples: int) -> float:
        """Duration of an action of the stage."""
        if kind is Kind.BACKWARD:
            return self.backward.at(num_samples)
        if kind is Kind.INPUT:
            return self.backward.at(num_samples) - self.weight.at(num_samples)
        return (self.weight if kind is Kind.WEIGHT else self.forward).at(num_samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of all stages and links of a plan.

    Args:
        stages: one for each stage of the plan.
        replicas: by (stage, device); for replicas that differ from the others of their stage.
        cluster: tells the links, by the plan's device numbers; None joins all devices by `default_link`.
        default_link: between any two devices where there is no cluster.
        all_reduce: for every stage the seconds that its replicas, in this and in other pipelines, take to sum their
            gradients; empty where nothing is summed. A gathering of sharded parameters, and a sum of gradients of which
            every replica gets a shard, take half of it.
        ranks: for every stage the ranks that hold it, over all pipelines; empty: those of the plan.
        data: seconds of a data action, affine in samples.
        parameter_copies: how many times a device keeps each parameter's bytes: itself, its gradient, the optimizer's
            state. 4 is Adam's figure, 2 plain gradient descent's, 1 inference's.
    """

    stages: tuple[StageCost, ...]
    replicas: Mapping[tuple[int, int], StageCost] = field(default_factory=dict)
    cluster: Cluster | None = None
    default_link: Link = Link()
    all_reduce: tuple[float, ...] = ()
    ranks: tuple[int, ...] = ()
    data: Affine = Affine()
    parameter_copies: float = 4

    @classmethod
    def uniform(cls, plan: Plan, forward: float = 1, backward: float = 1, weight: float = 0) -> StageCosts:
        """Every micro-batch of every stage takes the same seconds, `weight` of the backward; communication is free."""
        cost = StageCost(
            forward=Affine(0, forward),
            backward=Affine(0, backward),
            weight=Affine(0, weight),
            activation_bytes=Affine(0, 1),
        )
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
            backward_ratio: a backward's FLOPs in those of its forward; half of them for the parameters.
        """
        second = 1 / flops_per_second
        stages = tuple(
            StageCost(
                forward=_scaled(stage.figures.flops, second, overhead),
                backward=_scaled(stage.figures.flops, second * backward_ratio, overhead),
                weight=_scaled(stage.figures.flops, second * backward_ratio / 2, 0),
                activation_bytes=stage.figures.activation_bytes,
                pending_bytes=stage.figures.pending_bytes,
                parameter_bytes=stage.figures.parameter_bytes,
            )
            for stage in plan.stages
        )
        return cls(stages=stages, default_link=link or Link())

    def replica(self, stage: int, device: int) -> StageCost:
        """What a stage costs on one of its devices."""
        return self.replicas.get((stage, device), self.stages[stage])

    def seconds(self, action: Action, device: int, num_samples: int) -> float:
        """Duration of an action on a replica whose share is `num_samples`; an empty share takes none."""
        if not num_samples:
            return 0
        if action.kind is Kind.DATA:
            return self.data.at(num_samples)
        return self.replica(action.stage, device).seconds(action.kind, num_samples)

    def meeting(self, action: Action, sharded: bool) -> float:
        """Seconds of a gathering of parameters, or of a sum of gradients."""
        if not self.all_reduce:
            return 0
        return self.all_reduce[action.stage] * (0.5 if sharded else 1)

    def transfer(self, plan: Plan, message: Message) -> tuple[float, float]:
        """Seconds until a message's first byte arrives, and those in which its bytes flow."""
        num_bytes = plan.edges[message.edge].bytes.at(message.stop - message.start)
        link = self.cluster.link(message.src, message.dst) if self.cluster else self.default_link
        return link.latency, link.seconds(num_bytes) - link.latency

    def ports(self, message: Message) -> tuple[Port, ...]:
        """What else a message occupies while its bytes flow, beside its pair of devices."""
        if self.cluster is None or not self.cluster.contended:
            return ()
        return tuple(port for port in self.cluster.ports(message.src, message.dst) if port[0] != "pair")


def _scaled(cost: Affine, factor: float, offset: float) -> Affine:
    return Affine(cost.per_sample * factor, cost.fixed * factor + offset)
