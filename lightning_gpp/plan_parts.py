"""The parts of a plan: its stages, the edges between them, and their figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_gpp.graph.operator_graph import Affine

STEP: Final = "@step"
"""The module name of the user's step: loss, metrics, logging. The stage that lists it is the sink."""

SOURCE: Final = -1
"""The stage index of the source: the user's step up to the inputs of the network, on the sink's devices."""

WHOLE: Final = 1 << 30
"""A micro-batch size that no mini-batch exceeds, for steps that run once per mini-batch."""


SHARDINGS: Final = ("none", "zero1", "fsdp")
"""Shardings: replicas of a stage split nothing, the optimizer's state (ZeRO-1), or parameters and gradients, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """Tensors that flow from one stage to another.

    Args:
        src: index of the stage that sends, or SOURCE.
        dst: index of the stage that receives.
        bytes: bytes per micro-batch, affine in its samples.
        differentiable: gradients flow back.
        artificial: no tensor flows, the edge only forces the order (the chain baseline).
        sliceable: intervals of samples can be cut out of every tensor, so both ends may have different micro-batches.
        seconds: duration of the transfer of a micro-batch; 0 if unknown.
    """

    src: int
    dst: int
    bytes: Affine = Affine()
    differentiable: bool = True
    artificial: bool = False
    sliceable: bool = True
    seconds: Affine = Affine()


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The costs of a stage per micro-batch, and its parameters. Seconds are 0 if unknown; schedules may use them.

    Args:
        flops: FLOPs of a forward.
        activation_bytes: bytes kept on the device from the forward to the backward.
        offloaded_bytes: bytes kept in host memory in between, if the stage offloads.
        working_bytes: additional bytes while the stage, or a block of it, is recomputed.
        pending_bytes: the part of these that is kept until the weight gradients, if they are computed separately.
        forward_seconds: seconds of the forward.
        input_seconds: seconds of the input gradients, recomputed blocks included.
        weight_seconds: seconds of the weight gradients.
        num_parameters: number of parameters.
        parameter_bytes: their bytes.
    """

    flops: Affine = Affine()
    activation_bytes: Affine = Affine()
    offloaded_bytes: Affine = Affine()
    working_bytes: Affine = Affine()
    pending_bytes: Affine = Affine()
    forward_seconds: Affine = Affine()
    input_seconds: Affine = Affine()
    weight_seconds: Affine = Affine()
    num_parameters: int = 0
    parameter_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A convex part of the model. Every device in `devices` has a replica, which takes its share of each micro-batch.

    Args:
        name: unique in the plan.
        modules: paths of the modules.
        devices: devices of the replicas, numbered inside one pipeline replica.
        micro_batch_size: the most samples of a micro-batch.
        round_robin: replicas take micro-batches in turn instead of a share of each: number i goes to replica
            i modulo their number.
        recompute: what the stage computes again for the backward instead of keeping it. True: everything but the inputs
            of a micro-batch, in an action of its own before the backward; not for the stage that lists STEP. Paths of
            modules: each of these blocks keeps only its inputs, and runs again when the backward reaches it.
        offload: what the stage's forwards keep for the backwards, but for its inputs, lies in host memory in between.
        slack: micro-batches that the stage holds in flight beyond those that the rule of `1f1b` needs, so that late
            messages do not delay it; its predecessors hold as many more. Other schedules ignore it.
        tokens: interval `[start, stop)` of the sequence if the stage is a slice (`lightning_gpp.slices`); None: all.
        tensor_parallel_size: number of processes of each of its devices, its members, which share the stage's work.
        figures: its costs; those of one process.
    """

    name: str
    modules: tuple[str, ...]
    devices: tuple[int, ...]
    micro_batch_size: int
    round_robin: bool = False
    recompute: bool | tuple[str, ...] = False
    offload: bool = False
    slack: int = 0
    tokens: tuple[int, int] | None = None
    tensor_parallel_size: int = 1
    figures: Figures = Figures()

    @property
    def reruns(self) -> bool:
        """True if the whole stage runs its forward again, as an action of its own."""
        return self.recompute is True

    @property
    def recomputed_blocks(self) -> tuple[str, ...]:
        """The modules that run again inside the backward."""
        return () if isinstance(self.recompute, bool) else self.recompute


def even_parts(total: int, size: int) -> list[tuple[int, int]]:
    """The fewest intervals of at most `size` samples that tile `total`, with sizes that differ by one at most.

    A rest of one sample would be no micro-batch for BatchNorm, and one of few samples uses a GPU badly.
    """
    number = -(-total // size)
    return [(-(-part * total // number), -(-(part + 1) * total // number)) for part in range(number)]


def share_of(num_samples: int, replica: int, num_replicas: int) -> tuple[int, int]:
    """The samples `[start, stop)` of a micro-batch that one of the replicas of a stage computes."""
    return replica * num_samples // num_replicas, (replica + 1) * num_samples // num_replicas
