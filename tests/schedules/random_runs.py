"""Random cases in real processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_gpp.runtime import DistributedTransport, Executor, GradientSync, Mesh, pairs_of
from lightning_gpp.runtime.sharding import ShardedStages
from lightning_gpp.schedules import Program, compile_program
from tests.distributed import PATIENCE, preload, run_distributed
from tests.runtime import cases
from tests.runtime.cases import Case, part_of
from tests.runtime.stages import Mixer, all_slots, holders_of, local_parameters, make_stages, named_parameters
from tests.schedules.random_plans import Limits, case_of

preload(__name__)

NUM_PROCESSES = 4
LIMITS = Limits(max_stages=7, max_devices=NUM_PROCESSES, max_batch=12, uncut=False)


def real_case(number: int) -> Case:
    """Case `number`, in training, with as many pipeline replicas as there are processes for.

    Every third accumulates two mini-batches; every fourth has, if possible, a parameter that the first and the last
    stage share. The stages here are separate modules, whose parameters cannot be both shared and sharded, so plans with
    slices are not sharded.
    """
    case = case_of(number, LIMITS)
    plan = case.plan
    if plan.is_sliced and plan.sharding == "fsdp":
        plan = replace(plan, sharding="none")
    return Case(
        plan,
        case.batch_size,
        num_pipelines=min(case.copies, NUM_PROCESSES // plan.num_devices),
        tied=plan.sharding != "fsdp" and number % 4 == 0,
        num_runs=1 + (number % 3 == 0),
    )


def execute(numbers: Iterable[int], seconds: float = PATIENCE) -> None:
    """Run cases; losses and gradients are those of one process. Cases with equally many ranks share processes."""
    by_ranks: dict[int, list[tuple[Case, Program]]] = defaultdict(list)
    for case in map(real_case, numbers):
        program = compile_program(case.plan, case.batch_size, copies=case.num_pipelines)
        by_ranks[case.num_processes].append((case, program))
    for num_ranks, group in by_ranks.items():
        by_rank = run_distributed(num_ranks, run_all_on_rank, group, timeout=seconds)
        for (case, _), outcomes in zip(group, zip(*by_rank, strict=True), strict=True):
            check(case, outcomes)


def run_all_on_rank(rank: int, group: Sequence[tuple[Case, Program]]) -> list[cases.Outcome]:
    return [run_on_rank(rank, case, program) for case, program in group]


mesh_of = cache(Mesh)
"""The same process groups for all cases of the same form."""


def run_on_rank(rank: int, case: Case, program: Program) -> cases.Outcome:
    """Run one rank's part of a case; the program's collectives unshard parameters and reduce gradients."""
    plan = case.plan
    mesh = mesh_of(plan.num_devices, case.num_pipelines, rank)
    stages = make_stages(plan, case.tied)
    sync = sync_of(case, stages, mesh)
    executor = Executor(
        program,
        mesh.device,
        stages=stages,
        slots=all_slots(plan),
        transport=DistributedTransport(mesh, pairs_of(plan)),
        source=part_of(case, mesh.pipeline),
        pipeline=mesh.pipeline,
        sharding=sync,
    )
    for step in range(1, case.num_runs + 1):  # the same samples again, with their share of the weight
        sync.last = step == case.num_runs
        executor.run(loss_weight=1 / (case.batch_size * case.num_pipelines * case.num_runs))
    sync.sync()
    assert not executor.not_split, executor.not_split
    return cases.Outcome(
        losses=stages[plan.step_stage].losses,
        gradients={name: shard_of(p.grad) for name, p in local_parameters(plan, stages, mesh.device).items()},
        norm=float(sync.grad_norm()),
        peak_alive={stage: stages[stage].peak_alive for stage in plan.stages_on(mesh.device)},
    )


def sync_of(case: Case, stages: list[Mixer], mesh: Mesh) -> GradientSync | ShardedStages:
    """The `StageSync` of unsharded or sharded replicas. ZeRO-1 reduces gradients like replicas without it."""
    plan = case.plan
    parameters = local_parameters(plan, stages, mesh.device)
    holders = holders_of(plan, stages, case.num_pipelines)
    stage_of: dict[str, tuple[int, ...]] = {}
    for stage, named in named_parameters(stages).items():
        stage_of.update({name: (*stage_of.get(name, ()), stage) for name in named})
    if plan.sharding != "fsdp":
        return GradientSync(parameters, holders, mesh, stages=stage_of)
    module = nn.ModuleDict({f"stage{index}": stage for index, stage in enumerate(stages)})
    return ShardedStages(module, parameters, holders, mesh, stages=stage_of)


@dataclass(frozen=True, slots=True)
class Shard:
    """One replica's rows of a gradient; the caller joins them, as DTensors refer to groups of earlier cases."""

    rows: Tensor


def shard_of(gradient: Tensor | None) -> Tensor | Shard | None:
    return Shard(gradient.to_local()) if isinstance(gradient, DTensor) else gradient


def check(case: Case, outcomes: Sequence[cases.Outcome]) -> None:
    """Compare losses, gradients and their norm with one process."""
    cases.check(case, [replace(outcome, gradients=_whole(case, outcome, outcomes)) for outcome in outcomes])


def _whole(case: Case, outcome: cases.Outcome, outcomes: Sequence[cases.Outcome]) -> dict[str, Tensor | None]:
    """The gradients of a rank, with the rows of other ranks."""

    def joined(name: str, gradient: Tensor | Shard | None) -> Tensor | None:
        if not isinstance(gradient, Shard):
            return gradient
        return torch.cat([other.gradients[name].rows for other in outcomes if name in other.gradients])

    return {name: joined(name, gradient) for name, gradient in outcome.gradients.items()}
