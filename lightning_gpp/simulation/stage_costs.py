"""Costs of actions and messages in seconds and bytes: all that the simulator knows about the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gpp.cluster import Cluster, Link, Port
from lightning_gpp.graph import Affine
from lightning_gpp.plan import Figures, Plan
from lightning_gpp.schedules import Action, Kind, Message
from lightning_gpp.schedules.work import duration


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Costs of all stages and links of a plan.

    Args:
        stages: figures of a replica of each stage; seconds and bytes are affine in the samples of its share.
        replicas: figures of replicas that differ from the others of their stage, by (stage, device).
        cluster: links between the plan's devices and to their hosts; None: `default_link` between any two, and copies
            to and from hosts take no time.
        default_link: link between any two devices without a cluster.
        all_reduce: seconds of the all-reduce of every stage's gradients over all replicas, in this and in other
            pipelines; empty if there are none. An all-gather or reduce-scatter takes half of it.
        tied: groups of stages on several devices that share parameters.
        ranks: number of ranks that hold every stage, over all pipelines; empty: those of the plan.
        data: seconds of a data action, affine in samples.
        mini_batch_bytes: bytes of the mini-batch, which device 0 loads.
        parameter_copies: copies of each parameter's bytes on a device: parameter, gradient, optimizer states. 4 for
            Adam, 2 for plain gradient descent, 1 for inference.
        work: of each micro-batch beside that of one with as many samples; empty: 1.
    """

    stages: tuple[Figures, ...]
    replicas: Mapping[tuple[int, int], Figures] = field(default_factory=dict)
    cluster: Cluster | None = None
    default_link: Link = Link()
    all_reduce: tuple[float, ...] = ()
    tied: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[int, ...] = ()
    data: Affine = Affine()
    mini_batch_bytes: float = 0
    parameter_copies: float = 4
    work: tuple[float, ...] = ()

    def loaded_bytes(self, device: int) -> float:
        """Bytes of the mini-batch on a device; the others receive the parts that their stages read."""
        return 0.0 if device else self.mini_batch_bytes

    @classmethod
    def uniform(cls, plan: Plan, forward: float = 1, backward: float = 1, weight: float = 0) -> StageCosts:
        """Equal seconds for every micro-batch of every stage; messages are free. `weight` is a part of `backward`."""
        figures = Figures(
            forward_seconds=Affine(0, forward),
            input_seconds=Affine(0, backward - weight),
            weight_seconds=Affine(0, weight),
            activation_bytes=Affine(0, 1),
            pending_bytes=Affine(0, 1),
        )
        return cls(stages=(figures,) * len(plan.stages))

    def replica(self, stage: int, device: int) -> Figures:
        """The figures of a stage on one of its devices."""
        return self.replicas.get((stage, device), self.stages[stage])

    def seconds(self, action: Action, device: int, num_samples: int) -> float:
        """Duration of an action on a replica whose share is `num_samples`; an empty share takes none."""
        if not num_samples:
            return 0
        if action.kind is Kind.DATA:
            return self.data.at(num_samples)
        work = self.work[action.micro_batch] if action.micro_batch < len(self.work) else 1.0
        return work * duration(self.replica(action.stage, device), action.kind, num_samples)

    def host_copy(self, action: Action, device: int, num_samples: int) -> tuple[float, float]:
        """Seconds and bytes of an OFFLOAD or LOAD of a micro-batch share; no seconds if the host link is unknown."""
        if not num_samples:
            return 0.0, 0.0
        num_bytes = self.replica(action.stage, device).offloaded_bytes.at(num_samples)
        link = self.cluster.devices[device].host_bytes_per_second if self.cluster else 0.0
        return (num_bytes / link if link else 0.0), num_bytes

    def collective_seconds(self, action: Action, sharded: bool) -> float:
        """Seconds of an UNSHARD or REDUCE."""
        if not self.all_reduce:
            return 0
        return self.all_reduce[action.stage] * (0.5 if sharded else 1)

    def transfer(self, plan: Plan, message: Message) -> tuple[float, float]:
        """Seconds from the start of a message to its end, and the first of them in which it occupies its ports.

        If its bytes take the time of devices, those are part of their actions; its ports are occupied as long.
        """
        edge = plan.edges[message.edge]
        num_bytes = edge.bytes.at(message.stop - message.start)
        link = self.cluster.link(message.src, message.dst) if self.cluster else self.default_link
        seconds = link.seconds(num_bytes)
        return seconds, link.seconds(num_bytes) - link.latency

    def ports(self, message: Message) -> tuple[Port, ...]:
        """Ports that a message occupies while its bytes flow, besides its pair of devices."""
        if self.cluster is None or not self.cluster.contended:
            return ()
        return tuple(port for port in self.cluster.ports(message.src, message.dst) if port[0] != "pair")
