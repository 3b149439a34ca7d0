"""Options of the strategy that searches for plans read as they are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge

from lightning_gpp.option import option, settle

Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The limits that the strategy and a request for a plan have in common.

    Raises:
        ConfigError: a value is not allowed.
    """

    num_micro_batches: Count | None = option(
        None,
        "number of micro-batches into which a mini-batch is cut. Default: what the partitioner finds best; with stages "
        "by hand twice the number of stages on the longest path, at most one per sample.",
        section="Micro-batches, and limits of plans",
    )
    micro_batch_size: Count | None = option(None, "samples of a micro-batch, instead of num_micro_batches.")
    max_replicas: Count | None = option(
        None, "how many devices may share one stage; 1 puts every stage on one device. Default: any number."
    )
    stages_per_device: Count | None = option(
        None, "number of stages on every device. Default: the number that the schedule is made for."
    )
    sharding: Literal["none", "zero1", "fsdp"] = option(
        "none",
        "what the ranks that hold the same stage split among them, besides the samples: zero1 splits the optimizer's "
        "state, fsdp parameters and gradients too, none leaves it at what the plan says.",
    )
    bound_seconds: Annotated[float, Ge(0)] = option(
        2.0,
        "time limit of gpp-plan for a lower bound of the step time, which it computes after the search to say how much "
        "better a plan could be; 0 leaves only the bound that all devices are busy all the time.",
        allowed="0 seconds or more",
    )

    def __post_init__(self) -> None:
        settle(self)
