"""Every schedule on random plans: none may deadlock, break a promise, or compute other gradients than one process."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.errors import ConfigError, PlanError, ScheduleError, VerificationError
from lightning_gpp.graph import Affine
from lightning_gpp.plan import Figures
from lightning_gpp.schedules import compile_program, schedule_names
from lightning_gpp.simulation import StageCosts, simulate
from tests.schedules import promises
from tests.schedules.random_plans import Limits, case_of
from tests.schedules.random_runs import execute
from tests.strategies import chain

NAMES = schedule_names()
SMALL = Limits(max_stages=6, max_devices=4, max_batch=10, uncut=False)


@pytest.mark.parametrize("schedule", NAMES)
def test_random_plans_keep_every_promise(schedule: str) -> None:
    """They compile, which verifies them; peaks are those promised, and makespans within the bounds."""
    first, count = NAMES.index(schedule), 8 if schedule == "adaptive" else 30  # it searches for long
    for number in range(first, first + count * len(NAMES), len(NAMES)):
        case = case_of(number, SMALL)
        assert case.plan.schedule == schedule
        promises.check(case)


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
def test_many_random_plans_keep_every_promise() -> None:
    """Refusals of what a schedule does not support are none."""
    for number in range(10_000):
        try:
            promises.check(case_of(number))
        except VerificationError:
            raise
        except (ScheduleError, PlanError, ConfigError):
            continue


def test_random_plans_in_real_processes() -> None:
    """Losses and all gradients of one process, to 1e-12; every schedule, whole and sharded parameters."""
    execute(range(len(NAMES)))


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
def test_many_random_plans_in_real_processes() -> None:
    execute(range(len(NAMES), 480), seconds=3000)


def test_the_memory_of_sharded_inference() -> None:
    """Gatherings of parameters are no micro-batches whose activations end."""
    plan = replace(chain([1, 1], 4), sharding="fsdp")
    program = compile_program(plan, training=False, copies=2)
    cost = Figures(activation_bytes=Affine(3, 0), parameter_bytes=8)
    costs = StageCosts(stages=(cost, cost), ranks=(2, 2), parameter_copies=1)
    assert simulate(program, costs).peak_bytes == (4 + 8 + 3,) * 2
