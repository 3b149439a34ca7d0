"""Lightning's view of pipeline parallelism: owns the processes, the placement of parameters, and the running of steps."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy

from lightning_gpp.plan import Plan
from lightning_gpp.strategy.options import Options, StageSpec, load_plan, seconds


class GPPStrategy(ParallelStrategy):
    """Train an unmodified LightningModule as a pipeline of stages that form a directed acyclic graph.

    Args:
        schedule: name of the order of actions, e.g. "gpipe" or "1f1b". A `plan` brings its own.
        num_micro_batches: into how many micro-batches a mini-batch is cut. Default: twice the stages on the longest
            path, at most one per sample.
        micro_batch_size: samples of a micro-batch; instead of `num_micro_batches`.
        stages: manual placement. A mapping from module path to stage number, or a list of mappings with the keys
            `modules` (paths), and if wanted `name`, `devices` (numbers inside one pipeline) and `micro_batch_size`.
            The module "@step" stands for the user's step (the loss); without it the step joins the sink.
        plan: a Plan, or the path of a saved one; instead of `stages` and `partitioner`.
        partitioner: name of the algorithm that finds stages where neither `stages` nor `plan` is given.
        num_pipelines: copies of the whole pipeline (data parallel). Default: number of processes / devices of the plan.
        chain_baseline: force the stages to run as a chain, the sequential baseline.
        loss_reduction: how the user's loss combines over samples: "mean" or "sum".
        self_check: compare one micro-batch of the split model with the unsplit one before training. "auto": for models
            below 50 million parameters.
        example_batch: a mini-batch to capture the step with. Default: the first one of the data loader.
        trace: write what each device did and when, as Perfetto JSON, into `trainer.default_root_dir`.
        seed: of the random streams of the stages. Default: `seed_everything`'s, else drawn by rank zero.
        timeout: seconds (or timedelta) until a collective operation gives up.
        failure_timeout: seconds (or timedelta) until all processes have ended after one of them failed.
        process_group_backend: of torch.distributed. Default: NCCL for CUDA devices, gloo for CPUs.

    Raises:
        ConfigError: a setting cannot work, whatever the model.
        PlanError: the plan's file cannot be read.
    """

    strategy_name = "gpp"

    def __init__(
        self,
        schedule: str = "1f1b",
        num_micro_batches: int | None = None,
        micro_batch_size: int | None = None,
        stages: StageSpec | None = None,
        plan: Plan | str | Path | None = None,
        partitioner: str = "balanced",
        num_pipelines: int | None = None,
        chain_baseline: bool = False,
        loss_reduction: Literal["mean", "sum"] = "mean",
        self_check: bool | Literal["auto"] = "auto",
        example_batch: Any = None,
        trace: bool = False,
        seed: int | None = None,
        timeout: float | timedelta = 1800.0,
        failure_timeout: float | timedelta = 60.0,
        process_group_backend: str | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self.options = Options(
            schedule=schedule,
            num_micro_batches=num_micro_batches,
            micro_batch_size=micro_batch_size,
            stages=stages,
            plan=load_plan(plan),
            partitioner=partitioner,
            num_pipelines=num_pipelines,
            chain_baseline=chain_baseline,
            loss_reduction=loss_reduction,
            self_check=self_check,
            example_batch=example_batch,
            trace=trace,
            seed=seed,
            timeout=seconds("timeout", timeout),
            failure_timeout=seconds("failure_timeout", failure_timeout),
        )
        self.process_group_backend = process_group_backend
