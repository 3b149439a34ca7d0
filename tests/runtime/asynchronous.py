"""Runs of continuous programs by real processes, and by one process with the same delays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gpp.plan import Plan
from lightning_gpp.runtime import DistributedTransport, Executor, GradientSync, Mesh, MicroBatch, pairs_of
from lightning_gpp.runtime.weights import Counting, make_policy
from lightning_gpp.runtime.weights.context import update, weights_of
from lightning_gpp.schedules.continuous import continuous_program
from lightning_gpp.schedules.delayed import on_one_device
from lightning_gpp.schedules.program import Program
from tests.distributed import run_distributed
from tests.runtime.stages import (
    Data,
    all_slots,
    holders_of,
    local_parameters,
    make_data,
    make_stages,
    named_parameters,
)

OPTIMIZERS: Mapping[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9),
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.02, momentum=0.9, nesterov=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
}


@dataclass(frozen=True)
class AsyncCase:
    """A run of `segments` (numbers of mini-batches between flushes) under a weight policy."""

    plan: Plan
    policy: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "momentum"
    segments: tuple[int, ...] = (7, 3)
    every: int = 1
    num_pipelines: int = 1


@dataclass
class AsyncOutcome:
    """What a process saw."""

    weights: dict[str, Tensor]
    losses: dict[int, dict[int, tuple[float, int]]]
    log: list[tuple[int, int, int, str, int]]
    most_bytes: int = 0
    own_bytes: int = 0


@dataclass
class Stream:
    """The mini-batches that are open, by lane."""

    open: dict[int, Data] = field(default_factory=dict)

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Tensor]:
        return self.open[micro_batch.lane].inputs(micro_batch)


def on_rank(rank: int, case: AsyncCase) -> AsyncOutcome:
    """The case's part of one process."""
    plan = case.plan
    mesh = Mesh(plan.num_devices, case.num_pipelines, rank)
    program = continuous_program(plan, num_pipelines=case.num_pipelines)
    stages = make_stages(plan)
    parameters = local_parameters(plan, stages, mesh.device)
    sync = GradientSync(parameters, holders_of(plan, stages, case.num_pipelines), mesh)
    transport = DistributedTransport(mesh, pairs_of(plan))
    return _train(case, program, mesh.device, stages, parameters, transport, sync.sync, mesh.pipeline)


def delayed(case: AsyncCase) -> AsyncOutcome:
    """The whole case in this process, on one device."""
    program = on_one_device(continuous_program(case.plan))
    stages = make_stages(program.plan)
    parameters = local_parameters(program.plan, stages, 0)
    return _train(case, program, 0, stages, parameters, None, lambda: None, 0)


def _train(
    case: AsyncCase,
    program: Program,
    device: int,
    stages: list[Any],
    parameters: dict[str, nn.Parameter],
    transport: Any,
    sync: Callable[[], None],
    pipeline: int,
) -> AsyncOutcome:
    plan = program.plan
    optimizer = OPTIMIZERS[case.optimizer](list(parameters.values()))
    here = {stage: list(named_parameters(stages)[stage].values()) for stage in plan.stages_on(device)}
    weights = weights_of(program, device, here, lambda: [optimizer])
    policy = make_policy(case.policy, weights, **case.options)
    policy.log = []
    source = Stream()
    executor = Executor(
        program,
        device,
        stages=stages,
        slots=all_slots(plan),
        transport=transport,
        source=source,
        pipeline=pipeline,
        weights=policy,
    )
    outcome = AsyncOutcome({}, {}, [], own_bytes=sum(p.nbytes for p in parameters.values()))
    weight = 1 / (program.batch_size * case.num_pipelines * case.every)
    step = 0
    for number in case.segments:
        first, last = step, step + number
        policy.begin(_updates_before(first, policy.updates, case.every), first)
        for step in range(first, last):
            for batch in range(step, min(step + program.lead + 1, last)):
                source.open[batch % (program.lead + 1)] = _data(case, batch, pipeline)
            stages[plan.step_stage].losses.clear()
            executor.run(loss_weight=weight, step=step, first=first, last=last)
            outcome.losses[step] = dict(stages[plan.step_stage].losses)
            if (step + 1 - first) % case.every == 0 or step + 1 == last:
                sync()
                with update(policy, list(parameters.values())):
                    optimizer.step()
                optimizer.zero_grad()
                outcome.most_bytes = max(outcome.most_bytes, policy.bytes_kept)
        step = last
    outcome.weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    outcome.log = [(use.stage, use.mini_batch, use.micro_batch, kind, version) for use, kind, version in policy.log]
    return outcome


def _updates_before(first: int, updates: int, every: int) -> Callable[[int], int]:
    return lambda batch: updates + (batch - first) // every


def _data(case: AsyncCase, batch: int, pipeline: int) -> Data:
    return make_data(case.plan.batch_size, seed=1000 * pipeline + batch)


def run_async(case: AsyncCase) -> list[AsyncOutcome]:
    """The case by its own processes."""
    return run_distributed(case.plan.num_devices * case.num_pipelines, on_rank, case)


def run_all(cases: list[AsyncCase]) -> list[list[AsyncOutcome]]:
    """Cases that need the same number of processes, by the same processes; for each case what every rank saw."""
    by_rank = run_distributed(cases[0].plan.num_devices * cases[0].num_pipelines, _all_on_rank, cases)
    return [list(outcomes) for outcomes in zip(*by_rank, strict=True)]


def _all_on_rank(rank: int, cases: list[AsyncCase]) -> list[AsyncOutcome]:
    return [on_rank(rank, case) for case in cases]


__all__ = ["AsyncCase", "AsyncOutcome", "Counting", "delayed", "run_all", "run_async"]
