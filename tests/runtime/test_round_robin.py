"""Replicas that take whole micro-batches in turn, in real processes: pipelines in both directions and others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.plan import Plan
from lightning_gpp.runtime import DistributedTransport, Executor, GradientSync, Mesh, pairs_of
from lightning_gpp.schedules import compile_program, in_flight
from tests.distributed import run_distributed
from tests.runtime.cases import Case, Outcome, check, part_of
from tests.runtime.stages import all_slots, holders_of, local_parameters, make_stages, named_parameters
from tests.schedules.mirrored import mirrored_chain, round_robin, step_alone
from tests.strategies import plan_of, towers


def run_on_rank(rank: int, case: Case) -> Outcome:
    """A case with gradients that are summed where the program says so."""
    plan = case.plan
    mesh = Mesh(plan.num_devices, case.num_pipelines, rank)
    stages = make_stages(plan)
    parameters = local_parameters(plan, stages, mesh.device)
    stage_of = {name: (stage,) for stage, named in named_parameters(stages).items() for name in named}
    sync = GradientSync(parameters, holders_of(plan, stages, case.num_pipelines), mesh, stages=stage_of)
    executor = Executor(
        compile_program(plan, case.batch_size, copies=case.num_pipelines),
        mesh.device,
        stages=stages,
        slots=all_slots(plan),
        transport=DistributedTransport(mesh, pairs_of(plan)),
        source=part_of(case, mesh.pipeline),
        pipeline=mesh.pipeline,
        sharding=sync,
    )
    executor.run(loss_weight=1 / (case.batch_size * case.num_pipelines))
    sync.sync()
    return Outcome(
        losses=stages[plan.step_stage].losses,
        gradients={name: parameter.grad for name, parameter in parameters.items()},
        norm=float(sync.grad_norm()),
        peak_in_flight=executor.peak_in_flight,
        peak_alive={stage: stages[stage].peak_alive for stage in plan.stages_on(mesh.device)},
        warm_up=executor.warm_up,
    )


def run_cases(rank: int, cases: list[Case]) -> list[Outcome]:
    return [run_on_rank(rank, case) for case in cases]


def _chimera(number: int, **options: int) -> Case:
    return Case(step_alone(mirrored_chain(4, number)), number, **options)


UNEVEN = [(0, 1), (0, 2), (1, 3), (2, 3)]


def _uneven(schedule: str, batch_size: int) -> Case:
    """A diamond with two, three and four replicas, sizes that do not divide each other, the step shared."""
    plan = plan_of(UNEVEN, [1, 3, 2, 2], batch_size, schedule=schedule, data=True)
    plan = round_robin(plan, [(0, 1), (1, 2, 3), (3, 2, 1, 0), (0, 2)])
    *others, last = plan.stages
    return Case(replace(plan, stages=(*others, replace(last, round_robin=False))), batch_size)


def _towers() -> Case:
    plan = round_robin(towers(2, 2, 6, schedule="chimera"), [(3, 0), (2, 1), (1, 2), (0, 3), (0,)])
    return Case(plan, 6)


FOUR: dict[str, Case] = {
    "chimera": _chimera(8),
    "chimera, an odd number": _chimera(5),
    "chimera, one micro-batch: idle replicas": _chimera(1),
    "chimera on towers": _towers(),
    "1f1b, two to four replicas": _uneven("1f1b", 11),
    "chimera, two to four replicas": _uneven("chimera", 11),
}


TWO: dict[str, Case] = {
    "bitpipe": Case(step_alone(mirrored_chain(2, 4, "bitpipe")), 4),
    "gpipe in turn": Case(replace(step_alone(mirrored_chain(2, 5)), schedule="gpipe"), 5),
    "two pipelines of two directions": Case(step_alone(mirrored_chain(2, 4)), 4, num_pipelines=2),
}


@pytest.mark.parametrize("cases", [FOUR, TWO], ids=["four devices", "two devices"])
def test_equals_one_process(cases: dict[str, Case]) -> None:
    """Loss and every gradient to 1e-12, and the micro-batches in flight that were promised."""
    for world_size in sorted({_ranks(case) for case in cases.values()}):
        chosen = [case for case in cases.values() if _ranks(case) == world_size]
        by_rank = run_distributed(world_size, run_cases, chosen)
        for case, outcomes in zip(chosen, zip(*by_rank, strict=True), strict=True):
            check(case, list(outcomes))
            _check_in_flight(case.plan, list(outcomes))


def _ranks(case: Case) -> int:
    return case.plan.num_devices * case.num_pipelines


def _check_in_flight(plan: Plan, outcomes: list[Outcome]) -> None:
    most: dict[int, int] = {}
    for outcome in outcomes:
        for stage, peak in outcome.peak_in_flight.items():
            most[stage] = max(most.get(stage, 0), peak)
    assert most == in_flight(plan)
