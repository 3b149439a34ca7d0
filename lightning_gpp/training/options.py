"""The options of the strategy: each is defined here, and only here.

To add one, add a field. The argument of `GPPStrategy` with its documentation and the check of what is given follow from
it; `python -m lightning_gpp.cli.strategy_file` writes the key and its comment into configs/strategy/gpp.yaml. Options
that cannot be combined are refused in `option_checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from annotated_types import Ge, Gt, Lt, MinLen

from lightning_gpp.cluster import Cluster
from lightning_gpp.option import Converted, option, settle
from lightning_gpp.plan import Plan
from lightning_gpp.planning.assignment.manual import StagesSpec
from lightning_gpp.planning.assignment.slices import Slicing
from lightning_gpp.planning.request import Count, SearchOptions
from lightning_gpp.schedules.registry import schedule_names
from lightning_gpp.training.option_values import (
    AUTO,
    ClusterSpec,
    check_together,
    cluster_given,
    dims_given,
    division_given,
    duration,
    loaded_plan,
    partitioner_given,
    reduction_given,
    rows_given,
    schedule_given,
    stages_given,
    weights_given,
)

StageSpec = StagesSpec
"""A stages spec, see `StagesSpec`."""

Context = Callable[[], AbstractContextManager[Any]]
"""Makes a context to compute in, for example autocast."""

DEFAULT: Final = "1f1b"
"""The schedule if neither the settings nor a plan name one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SearchOptions):
    """The options of the strategy: those of searches for plans, and its own.

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
        "name, devices (numbers inside one pipeline), micro_batch_size, recompute, offload, round_robin (replicas take "
        "micro-batches in turn instead of a share of each) and slack (micro-batches in flight beyond 1f1b's rule). "
        'The path "@step" is the training step itself (the loss); without it the step joins the last stage.',
        convert=stages_given,
    )
    partitioner: str = option(
        "auto",
        "name of the algorithm that finds the stages if neither plan nor stages is given (docs/howto/planning.md).",
        convert=partitioner_given,
    )
    search_seconds: Annotated[float, Gt(0)] = option(
        40.0,
        "time limit of the partitioner's search. It evaluates a number of drafts for each of these seconds, which most "
        "machines do in less time, so that the plan depends neither on the machine nor on its load; it ends "
        "earlier if nothing can be gained.",
        allowed="more than 0 seconds",
    )
    cluster: Converted[ClusterSpec, Cluster | str | None] = option(
        None,
        "the devices and links to plan for: the name of a preset (dgx_h100), the path of a YAML file, or the keys of "
        "such a file (configs/cluster). Rank r of the job is device r of the cluster. Default: the present machine.",
        convert=cluster_given,
    )
    memory_headroom: Annotated[float, Ge(0), Lt(1)] = option(
        0.1,
        "share of every device's memory that plans leave free: for fragmentation, for communication buffers, for the "
        "workspaces of kernels.",
        allowed="0 or more, and less than 1",
    )
    costs: Literal["roofline", "measured"] = option(
        "roofline",
        "source of the operators' seconds: roofline computes them from the devices' peak figures, measured times the "
        "model's blocks on the device of rank 0.",
    )
    num_pipelines: Count | None = option(
        None,
        "number of pipeline replicas (data parallelism). Default: number of processes / devices of the plan.",
    )

    tensor_parallel_size: Count = option(
        1,
        "number of processes of every device of the plan: they share the work inside its stages, as the module's "
        'configure_model divides it (parallelize_module with self.device_mesh["tensor_parallel"]). Default: the '
        "plan's, otherwise 1.",
    )

    schedule: str | None = option(
        None,
        "name of the order of actions (docs/reference/schedules.md); auto simulates every schedule and takes the "
        "fastest that fits. Default: the plan's, otherwise 1f1b.",
        section="In which order",
        convert=schedule_given,
    )
    chain_baseline: bool = option(
        False, "run the same stages one after the other, as a pipeline without branches would, for comparison."
    )

    weights: str = option(
        "synchronous",
        "policy for the weights with which mini-batches are computed (docs/howto/asynchronous.md). synchronous flushes "
        "the pipeline after every mini-batch; stash (PipeDream), double_buffer (PipeDream-2BW), error_feedback, "
        "latest, corrected (PipeMare) and predicted (PipeOptim) do not, but train with older weights.",
        section="Asynchronous training",
        convert=weights_given,
    )
    weight_options: Mapping[str, Any] | None = option(
        None,
        "options of the weight policy, for example {vertical_sync: true} for stash.",
        allowed="a mapping from the names of the policy's options to values",
    )
    synchronous_steps: Annotated[int, Ge(0)] = option(
        0, "number of mini-batches at the beginning that are trained with a flush after each (PipeMare's T3)."
    )
    flush_every: Count | None = option(
        None,
        "number of mini-batches after which the pipeline flushes. Default: only at the end of an epoch.",
    )
    streaming: bool | Literal["auto"] = option(
        "auto",
        "validate, test and predict without a flush between mini-batches (docs/howto/evaluate.md), whose results are "
        "the same: true, false, or auto, which does so where it is possible.",
        section="Evaluation and inference",
    )

    recompute: bool | Sequence[str] | None = option(
        None,
        "what is computed again for the backward instead of being kept: a list of paths of modules, each of which "
        "keeps only its inputs and runs again when the backward reaches it, or of names of stages, which run again as "
        "a whole; true for all stages but the one that runs the training step, false for none. Default: what the plan "
        "or the stages say; a search recomputes the blocks that make its plan fit in the least time.",
        section="Memory for time",
        allowed="true, false, a list of names of stages and paths of modules, or null for what the plan says",
    )
    offload: bool | Literal["auto"] | Sequence[str] | None = option(
        None,
        "stages that keep their activations in host memory between forward and backward; they are copied there and "
        "back while the device computes. A list of names of stages, true for all stages but the one that runs the "
        "training step, false for none. Default: what the plan or the stages say; with auto, a search also offloads "
        "stages that would not fit otherwise, where the cluster gives the speed of the link to the host and this takes "
        "less time than recomputation.",
        allowed="true, false, auto, a list of names of stages, or null for what the plan says",
    )

    slices: Count | Annotated[Sequence[Count], MinLen(1)] | None = option(
        None,
        "number of slices into which micro-batches are cut along the sequence, or a list with the tokens of each; "
        "for models that declare what they carry from token to token (lightning_gpp.sequence). Default: the plan's, "
        "otherwise none.",
        section="Slices of sequences (docs/howto/slicing.md)",
        allowed="a whole number >= 1, or the tokens of each slice as a list",
    )
    slice_modules: Sequence[str] | None = option(
        None,
        "paths of the modules that may be sliced. Default: all that can be.",
        allowed="a list of paths of modules, or null",
    )

    step: Literal["auto", "micro_batches", "whole"] = option(
        "auto",
        "how the training step runs: micro_batches runs it once per micro-batch, on the rank that loads the data; "
        "whole runs it once per mini-batch, on all ranks, and pipelines each of its network calls over micro-batches, "
        "so that the loss may combine all samples, and the step may run backwards and optimizers "
        "(docs/howto/contrastive.md); auto is whole for manual optimization, an overridden backward, and steps that "
        "cannot run on micro-batches.",
        section="Correctness",
    )
    batch_dims: Converted[int | Mapping[str, int | None] | None, Mapping[str, int | None] | None] = option(
        None,
        "the dimension that counts samples, by the path of a tensor or list in the mini-batch, and null for what every "
        "micro-batch gets undivided, for example {tokens: 1, class_weights: null, 0.boxes: 0}; a single number is for "
        "all tensors. Default: the first dimension, see docs/reference/capture.md.",
        convert=dims_given,
    )
    batch_rows: Mapping[str, str] | None = option(
        None,
        "the samples to which the rows of a tensor belong, by its path, so that micro-batches get their own rows: the "
        "path of the number of rows of each sample, or of the sample of each row ({boxes: num_boxes}); or "
        "path:onlyN for rows in proportion to a sample's entries N ({pixel_values: input_ids:only32000}), and "
        "path:product for products of another tensor's rows ({pixel_values: image_grid_thw:product}).",
        convert=rows_given,
    )
    micro_batch_by: str | Callable[..., Any] = option(
        "samples",
        "how training divides mini-batches: samples into equal numbers of samples; documents at the boundaries of "
        "documents that are packed in one row, into about equal numbers of tokens; the entries of a mask, such as "
        "attention_mask:except0, by the lengths of samples, which are sorted, and lose padding that a micro-batch does "
        "not need, so that micro-batches take about equal time; or a function of the mini-batch and a number that "
        "returns at most that many micro-batches.",
        convert=division_given,
    )
    loss_reduction: Converted[str, str] = option(
        "mean",
        "how the loss combines over samples: mean, sum, or the tensor of the mini-batch over whose entries it is a "
        "mean, for example labels (those that are not -100), labels:shifted (without the first of each sample, as "
        "language models shift them) or mask:except0. Then micro-batches, and all mini-batches of an optimizer step, "
        "count by these entries, also in what the step logs.",
        convert=reduction_given,
    )
    local_losses: Sequence[str] | None = option(
        None,
        "paths of modules that return losses of their own, which the step only adds up (docs/howto/local_learning.md). "
        "Their stages start backwards at once, and wait for no gradient of theirs.",
        allowed="a list of paths of modules, or null",
    )
    on_nonfinite: Literal["stop", "skip", "ignore"] | None = option(
        None,
        "reaction to a loss or a gradient that is not finite: stop ends the run on all ranks before the optimizer "
        "step, with an error that names stage and parameter, skip leaves out the step on all ranks (in synchronous "
        "training), and ignore does not look. Default: stop in asynchronous training, where other stages would train "
        "on with it, otherwise ignore.",
    )
    self_check: bool | Literal["auto"] = option(
        "auto",
        "before training compare the split model with the unsplit one, and a few samples in micro-batches with the "
        "same undivided: true, false, or auto (if the first device has memory for the undivided model and gradient).",
    )
    example_batch: Any = option(
        None,
        "mini-batch to capture the step with (in a configuration a node with _target_). Default: the first one of the "
        "data loader.",
    )
    seed: int | None = option(
        None,
        "seed of the stages' random streams (dropout). Default: the one of seed_everything, otherwise drawn by rank 0.",
    )

    state_dict_type: Literal["auto", "full", "sharded"] = option(
        "auto",
        "kind of checkpoints: full is an ordinary file of Lightning, for which rank 0 gathers everything; sharded is a "
        "folder, to which every rank writes what it holds, so that no rank needs memory for the full model; auto is "
        "sharded on several processes for models of more than 4 GiB and with async_save. Both can be resumed under any "
        "plan.",
        section="Checkpoints (docs/howto/checkpoints.md)",
    )
    async_save: bool = option(
        False,
        "write checkpoints in the background while training goes on, from a copy in the host's memory. The next "
        "checkpoint, and the end of the run, wait for it.",
    )

    cuda_graphs: bool | Literal["auto"] = option(
        False,
        "record what each stage launches on its GPU for a micro-batch, and launch it at once from the third mini-batch "
        "on (docs/howto/cuda_graphs.md), for micro-batches that are bound by launches. true warns of each stage that "
        "cannot be recorded, and says why; auto does not.",
        section="Running",
    )
    compile: bool = option(
        False,
        "compile modules that repeat, such as the layers of a transformer, by torch.compile, once for all of a kind "
        "(docs/reference/capture.md#compiled-modules). A plan that cuts through one runs it as it is.",
    )
    concurrent_stages: Count = option(
        1,
        "number of stages that a GPU computes at the same time, if they do not depend on each other "
        "(docs/howto/cuda_graphs.md#branches-at-the-same-time): branches of small layers then share one GPU. A search "
        "for a plan gives each of them a share of the GPU. CPUs compute one after the other.",
    )
    trace: bool = option(
        False,
        "write the measured timeline of all devices to the trainer's default_root_dir, as JSON for https://ui.perfetto.dev.",
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
        if self.batch_rows:  # which do not count samples
            dims = {**(self.batch_dims or {}), **dict.fromkeys(self.batch_rows)}
            object.__setattr__(self, "batch_dims", dims)
        check_together(self)

    @property
    def members(self) -> int:
        """Number of processes of every device.

        Raises:
            ConfigError: the plan says otherwise.
        """
        number = self.tensor_parallel_size
        return number if self.plan is None else self.plan.with_members(number).tensor_parallel_size

    @property
    def slicing(self) -> Slicing | None:
        """The slicing of stages along the sequence; None keeps the plan's, if there is one."""
        if self.slices is None or self.slices == 1 or (isinstance(self.slices, Sequence) and len(self.slices) == 1):
            return None
        return Slicing(
            slices=self.slices if isinstance(self.slices, int) else tuple(self.slices),
            modules=None if self.slice_modules is None else tuple(self.slice_modules),
        )


def schedules_of(options: Options) -> tuple[str, ...]:
    """The schedules to choose from, for stages that no plan gives."""
    return schedule_names() if options.schedule == AUTO else (options.schedule or DEFAULT,)
