"""Runs of whole programs by real processes, for comparison with one process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gpp.plan import Plan
from lightning_gpp.runtime import DistributedTransport, Executor, GradientSync, Mesh, pairs_of
from lightning_gpp.schedules import compile_program
from tests.distributed import run_distributed, run_each
from tests.runtime.stages import (
    Data,
    all_slots,
    holders_of,
    local_parameters,
    make_data,
    make_stages,
    reference,
)

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Case:
    """A plan, with what else decides a run. `batch_size` is that of one pipeline replica."""

    plan: Plan
    batch_size: int
    num_pipelines: int = 1
    tied: bool = False
    num_runs: int = 1

    @property
    def num_processes(self) -> int:
        return self.plan.num_devices * self.num_pipelines


@dataclass
class Outcome:
    """What one rank saw."""

    losses: dict[int, tuple[float, int]]
    gradients: dict[str, Tensor | None]
    norm: float
    peak_alive: dict[int, int]


def run_on_rank(rank: int, case: Case) -> Outcome:
    """Run a case on this rank; all ranks of a case must take part."""
    plan = case.plan
    mesh = Mesh(plan.num_devices, case.num_pipelines, rank)
    stages = make_stages(plan, case.tied)
    data = part_of(case, mesh.pipeline)
    executor = Executor(
        compile_program(plan, case.batch_size),
        mesh.device,
        stages=stages,
        slots=all_slots(plan),
        transport=DistributedTransport(mesh, pairs_of(plan)),
        source=data,
        pipeline=mesh.pipeline,
    )
    parameters = local_parameters(plan, stages, mesh.device)
    sync = GradientSync(parameters, holders_of(plan, stages, case.num_pipelines), mesh)
    for _ in range(case.num_runs):
        for parameter in parameters.values():
            parameter.grad = None
        executor.run(loss_weight=1 / (case.batch_size * case.num_pipelines))
    sync.sync()
    return Outcome(
        losses=stages[plan.step_stage].losses,
        gradients={name: parameter.grad for name, parameter in parameters.items()},
        norm=float(sync.grad_norm()),
        peak_alive={stage: stages[stage].peak_alive for stage in plan.stages_on(mesh.device)},
    )


def part_of(case: Case, pipeline: int) -> Data:
    whole = make_data(case.batch_size * case.num_pipelines)
    part = slice(pipeline * case.batch_size, (pipeline + 1) * case.batch_size)
    return Data(whole.x[part], whole.index[part])


def run_cases(cases: list[Case]) -> None:
    """Run cases that need the same number of processes by the same processes, and check them."""
    for case, outcomes in zip(cases, run_each(cases[0].num_processes, run_on_rank, [(c,) for c in cases]), strict=True):
        check(case, outcomes)


def check(case: Case, outcomes: list[Outcome]) -> None:
    """Loss, every gradient on every rank, and the gradient norm equal those of one process."""
    data = make_data(case.batch_size * case.num_pipelines)
    loss, gradients = reference(case.plan, data, case.tied)
    losses = [entry for outcome in outcomes for entry in outcome.losses.values()]
    total = sum(value * count for value, count in losses) / sum(count for _, count in losses)
    assert sum(count for _, count in losses) == len(data.x)
    assert abs(total - loss) <= TOLERANCE * abs(loss)
    for outcome in outcomes:
        for name, gradient in outcome.gradients.items():
            assert_equal(gradient, gradients[name], name)
        norm = torch.stack([g.norm() for g in gradients.values() if g is not None]).norm().item()
        assert abs(outcome.norm - norm) <= TOLERANCE * norm
    assert {name for outcome in outcomes for name in outcome.gradients} == set(gradients)


def assert_equal(actual: Tensor | None, expected: Tensor | None, name: str) -> None:
    if expected is None:
        assert actual is None or not actual.any(), name
        return
    assert actual is not None, name
    error = (actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    assert error <= TOLERANCE, f"{name}: relative error {error:.1e}"


def run_case(case: Case) -> list[Outcome]:
    """Run a case by its own processes, and check it."""
    outcomes = run_distributed(case.num_processes, run_on_rank, case)
    check(case, outcomes)
    return outcomes
