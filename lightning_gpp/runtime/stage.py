"""Interfaces for the executor: stages and the user's step, which `stages` implements, and the data parallelism inside
stages, which `sharding` does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

from torch import Tensor, nn

from lightning_gpp.graph import TensorSpec

LOSS: Final = "@loss"
"""Name under which the step's stage returns the loss of a micro-batch (a scalar that requires grad)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor that crosses a border between stages: its name, unique in the captured graph, and its spec."""

    name: str
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples `[start, stop)` of the mini-batch of `total` samples, as micro-batch number `index` of a stage.

    `lane` distinguishes the mini-batches that a pipeline works on at the same time.
    """

    index: int
    start: int
    stop: int
    total: int
    lane: int = 0
    num_samples: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_samples", self.stop - self.start)


@dataclass(frozen=True, kw_only=True, eq=False)  # without slots: executors refer to it weakly
class Binding:
    """The stages and the tensors of a micro-batch that has other sizes than others of its mini-batch.

    `stages`, `source`, `slots`: see `Executor`; the shapes in `slots` are those of its `num_samples` samples. The
    user's step has it as a mini-batch of its own, in the lane of its number.
    """

    stages: Sequence[StageModule]
    slots: Sequence[Sequence[Slot]]
    source: DataSource | None
    num_samples: int

    def micro_batch(self, index: int) -> MicroBatch:
        """It as micro-batch number `index`."""
        return MicroBatch(index, 0, self.num_samples, self.num_samples, index)


StageForward = Callable[[Mapping[str, Tensor], MicroBatch], dict[str, Tensor]]
"""`StageModule.forward`, with what belongs around it."""


class StageModule(Protocol):
    """Computes one stage. Parameters and buffers stay in the user's module; gradients go to their `.grad`."""

    uses_random: bool
    """True if the forward draws random numbers, and so needs the stage's own stream."""

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The user's modules whose buffers and attributes the forward may change, each without its submodules."""
        ...

    def forward(self, values: Mapping[str, Tensor], micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Compute values of the out-edges' slots (and LOSS, on the step's stage) from those of the in-edges."""
        ...


@runtime_checkable
class Recordable(StageModule, Protocol):
    """A stage whose forward is `with_step` of what it computes; what `compute` launches may be recorded."""

    def compute(self, values: Mapping[str, Tensor], num_samples: int) -> dict[str, Tensor]:
        """The results of the stage's modules."""
        ...

    def with_step(
        self, micro_batch: MicroBatch, values: Mapping[str, Tensor], results: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The results of `compute` and of the user's step, on the step's stage."""
        ...


@dataclass(slots=True, eq=False)
class StageWrapper:
    """Base class of wrappers around a stage; has the modules of the wrapped stage."""

    stage: StageModule
    uses_random: bool = field(init=False)

    def __post_init__(self) -> None:
        self.uses_random = self.stage.uses_random

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The modules of the wrapped stage."""
        return self.stage.parts


class DataSource(Protocol):
    """The user's step up to the inputs of the network, on the devices of the step's stage."""

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        """Values of the slots of all SOURCE edges for these samples."""
        ...


class StageSync(Protocol):
    """Unshards a stage's parameters before its work, and reduces its gradients over the replicas after it.

    All replicas of a stage make the same calls for it in the same order, because collectives match by order alone. The
    number of micro-batches that a replica computes in between does not matter.

    Attributes:
        gathers: whether actions must wait for their parameters (`ready`); it never changes.
    """

    gathers: bool

    def unshard(self, stage: int) -> None:
        """Start to unshard the stage's parameters; returns at once."""
        ...

    def ready(self, stage: int) -> None:
        """Wait until the stage's parameters are unsharded; start it if necessary. Called before every action."""
        ...

    def reshard(self, stage: int) -> None:
        """Free the other replicas' shards of the stage's parameters."""
        ...

    def arm(self, stage: int) -> None:
        """Announce that the next backward of the stage is its last one of this mini-batch."""
        ...

    def reduce(self, stage: int) -> None:
        """Start to reduce the stage's gradients, after all its backwards."""
        ...
