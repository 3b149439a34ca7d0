"""The options of the strategy: each is defined here, and only here.

To add one, add a field. The argument of `GPPStrategy` with its documentation and the check of what is given follow from
it; `python -m lightning_gpp.cli.strategy_file` writes the key and its comment into configs/strategy/gpp.yaml.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Gt, MinLen

from lightning_gpp.cluster import Cluster
from lightning_gpp.option import Converted, option, settle
from lightning_gpp.plan import Plan
from lightning_gpp.planning.assignment.placement import Placement
from lightning_gpp.planning.assignment.slices import Slicing
from lightning_gpp.schedules.registry import schedule_names
from lightning_gpp.training.option_checks import check_together
from lightning_gpp.training.option_values import (
    AUTO,
    ClusterSpec,
    cluster_given,
    duration,
    loaded_plan,
    partitioner_given,
    schedule_given,
    stages_given,
)

StageSpec = Placement
"""Manual placement: module path -> stage number, or stages with the keys modules, name, devices, micro_batch_size; with
the key inputs too, where the user declares the edges between stages."""

Context = Callable[[], AbstractContextManager[Any]]
"""Makes a context to compute in, for example autocast."""

Count = Annotated[int, Ge(1)]

DEFAULT: Final = "1f1b"
"""The schedule where neither the settings nor a plan name one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a user asks of the strategy.

    Raises:
        ConfigError: an option cannot work, whatever the model.
        PlanError: the plan's file cannot be read.
    """

    plan: Converted[Plan | str | Path | None, Plan | None] = option(
        None,
        "a plan, or the path of a saved one (gpp-plan ... output=plan.yaml).",
        section="Who computes what: a plan, stages by hand, or stages from a partitioner",
        convert=loaded_plan,
    )
    stages: StageSpec | None = option(
        None,
        "stages by hand, instead of a plan: a mapping from module path to stage number, for example {image_tower: 0, "
        "text_tower: 1, head: 2}, or a list of stages. A stage in the list has the key modules (paths) and, if wanted, "
        "name, devices (numbers inside one pipeline), micro_batch_size, recompute and round_robin (replicas take whole "
        'micro-batches in turn instead of a share of each). The path "@step" stands for the training step itself (the '
        "loss); without it the step joins the last stage.",
        convert=stages_given,
    )
    partitioner: str = option(
        "auto",
        "name of the algorithm that finds the stages if neither plan nor stages is given (docs/planners.md).",
        convert=partitioner_given,
    )
    search_seconds: Annotated[float, Gt(0)] = option(
        10.0,
        "time limit of the partitioner's search, which ends earlier if there is nothing left to gain.",
        allowed="more than 0 seconds",
    )
    cluster: Converted[ClusterSpec, Cluster | str | None] = option(
        None,
        "the devices and links to plan for: the name of a preset (dgx_h100), the path of a YAML file, or the keys of "
        "such a file (configs/cluster). Rank r of the job is device r of the cluster. Default: the present machine.",
        convert=cluster_given,
    )
    costs: Literal["roofline", "measured"] = option(
        "roofline",
        "source of the operators' seconds: roofline computes them from the devices' peak figures, measured times the "
        "model's blocks on the device of rank 0.",
    )
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
    num_pipelines: Count | None = option(
        None,
        "number of replicas of the whole pipeline (data parallelism). Default: number of processes / devices of the "
        "plan.",
    )

    schedule: str | None = option(
        None,
        "name of the order of actions (docs/schedules.md); auto simulates every schedule and takes the fastest that "
        "fits. Default: that of the plan, else 1f1b.",
        section="In which order",
        convert=schedule_given,
    )
    num_micro_batches: Count | None = option(
        None,
        "number of micro-batches into which a mini-batch is cut. Default: what the partitioner finds best; with stages "
        "by hand twice the number of stages on the longest path, at most one per sample.",
    )
    micro_batch_size: Count | None = option(None, "samples of a micro-batch, instead of num_micro_batches.")
    chain_baseline: bool = option(
        False, "run the same stages one after the other, as a pipeline without branches would, for comparison."
    )

    recompute: bool | Sequence[str] | None = option(
        None,
        "stages that keep only their inputs between the forward and the backward of a micro-batch, and run their "
        "forward again: true for all but the one that runs the training step, false for none, or a list of names. "
        "Default: what the plan or the stages say, else none.",
        section="Memory for time",
        allowed="true, false, a list of names of stages, or null for what the plan says",
    )

    slices: Count | Annotated[Sequence[Count], MinLen(1)] | None = option(
        None,
        "number of slices into which micro-batches are cut along the sequence, or a list with the tokens of each; for "
        "models that say what they carry from token to token (lightning_gpp.sequence). Default: those of the plan, "
        "else none.",
        section="Slices of sequences (docs/slicing.md)",
        allowed="a whole number >= 1, or the tokens of each slice as a list",
    )
    slice_dim: Count = option(
        1,
        "the dimension of the tensors between stages that counts tokens.",
        allowed="a whole number >= 1: dimension 0 counts the samples",
    )
    slice_modules: Sequence[str] | None = option(
        None,
        "paths of the modules that may be cut. Default: all that can be.",
        allowed="a list of paths of modules, or null",
    )

    loss_reduction: Literal["mean", "sum"] = option(
        "mean", "how the loss combines over samples: mean or sum.", section="Correctness"
    )
    self_check: bool | Literal["auto"] = option(
        "auto",
        "compare one micro-batch of the split model with the unsplit model before training: true, false, or auto, "
        "which does so for models below 50 million parameters.",
    )
    example_batch: Any = option(
        None,
        "mini-batch to capture the step with (in a configuration a node with _target_). Default: the first one of the "
        "data loader.",
    )
    seed: int | None = option(
        None,
        "seed of the stages' random streams (dropout). Default: that of seed_everything, else drawn by rank 0.",
    )

    trace: bool = option(
        False,
        "write what every device did and when, as Perfetto JSON, into the trainer's default_root_dir.",
        section="Running",
    )
    timeout: Converted[float | timedelta, timedelta] = option(
        1800.0, "seconds (or a timedelta) until a collective operation gives up.", convert=duration("timeout")
    )
    failure_timeout: Converted[float | timedelta, timedelta] = option(
        60.0,
        "seconds (or a timedelta) until all processes have ended after one of them failed.",
        convert=duration("failure_timeout"),
    )
    process_group_backend: str | None = option(
        None, "backend of torch.distributed. Default: nccl for CUDA devices, gloo for CPUs."
    )

    def __post_init__(self) -> None:
        settle(self)
        check_together(self)

    @property
    def slicing(self) -> Slicing | None:
        """How stages are cut along the sequence; None leaves it to the plan, if one is given."""
        if self.slices is None or self.slices == 1 or (isinstance(self.slices, Sequence) and len(self.slices) == 1):
            return None
        return Slicing(
            slices=self.slices if isinstance(self.slices, int) else tuple(self.slices),
            dim=self.slice_dim,
            modules=None if self.slice_modules is None else tuple(self.slice_modules),
        )


def schedules_of(options: Options) -> tuple[str, ...]:
    """The schedules to choose from, for stages that no plan says."""
    return schedule_names() if options.schedule == AUTO else (options.schedule or DEFAULT,)
