"""Every schedule on random plans: none may deadlock, break a promise, or compute other gradients than one process."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest

from lightning_gpp.errors import ConfigError, PlanError, ScheduleError, VerificationError
from lightning_gpp.graph import Affine
from lightning_gpp.plan import Plan
from lightning_gpp.schedules import compile_program, schedule_names
from lightning_gpp.simulation import StageCost, StageCosts, simulate
from lightning_gpp.simulation.simulator import changes
from tests.schedules import promises
from tests.schedules.mirrored import round_robin
from tests.schedules.random_plans import Limits, case_of
from tests.schedules.random_runs import NUM_PROCESSES, Workers, execute
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
    with Workers(NUM_PROCESSES) as workers:
        for number in range(len(NAMES)):
            execute(workers, number)


@pytest.mark.acceptance
@pytest.mark.timeout(3600)
def test_many_random_plans_in_real_processes() -> None:
    with Workers(NUM_PROCESSES) as workers:
        for number in range(len(NAMES), 480):
            execute(workers, number)


def test_random_plans_are_diverse() -> None:
    cases = [case_of(number) for number in range(400)]
    plans = [case.plan for case in cases]
    seen = Counter[str]()
    for plan in plans:
        seen.update(_features(plan))
    assert all(seen[feature] >= 10 for feature in FEATURES), seen
    assert len({plan.batch_size for plan in plans}) > 20
    assert {plan.sharding for plan in plans} == {"none", "zero1", "fsdp"}
    assert {case.copies for case in cases} == {1, 2, 3}
    assert {case.training for case in cases} == {case.reduce for case in cases} == {True, False}
    assert cases == [case_of(number) for number in range(400)]


FEATURES = (
    "replicas",
    "in turn",
    "several stages",
    "recomputed",
    "offloaded",
    "known",
    "room",
    "sizes",
    "branches",
    "artificial",
    "slices",
    "some in slices",
)


def _features(plan: Plan) -> set[str]:
    stages = plan.stages
    found = {
        "replicas": any(len(stage.devices) > 1 and not stage.round_robin for stage in stages),
        "in turn": any(stage.round_robin for stage in stages),
        "several stages": any(len(plan.stages_on(device)) > 1 for device in range(plan.num_devices)),
        "recomputed": any(stage.recompute for stage in stages),
        "offloaded": any(stage.offload for stage in stages),
        "known": any(stage.figures.forward_seconds != Affine() for stage in stages),
        "room": bool(plan.memory_bytes),
        "sizes": len({stage.micro_batch_size for stage in stages}) > 1,
        "branches": plan.depth < len(stages),
        "artificial": any(edge.artificial for edge in plan.edges),
        "slices": plan.is_sliced,
        "some in slices": plan.is_sliced and sum(stage.tokens is None for stage in stages) > 1,
    }
    return {feature for feature, present in found.items() if present}


def test_tensors_that_cannot_be_cut_are_refused_with_the_remedy() -> None:
    """The one refusal that random plans meet."""
    plan = chain([2, 3], 6)
    edges = tuple(replace(edge, sliceable=False) for edge in plan.edges)
    with pytest.raises(PlanError, match="Give both stages the same micro_batch_size and the same number of devices"):
        compile_program(replace(plan, edges=edges))


def test_a_broken_promise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = next(case for case in map(case_of, range(50)) if case.training and case.plan.edges)
    promises.check(case)
    monkeypatch.setattr(promises, "in_flight", lambda *_: {})
    with pytest.raises(AssertionError, match="promised {}"):
        promises.check(case)


def test_the_longest_path_of_a_chain() -> None:
    """Two stages, forward 1, backward 2, on their own devices: the first micro-batch's way down and up."""
    program = compile_program(chain([1, 1], 4, "gpipe"))
    costs = StageCosts.uniform(program.plan, 1, 2)
    assert promises.critical_path(program, costs) == 6
    assert promises.works(program, costs) == [12, 12]


def test_the_memory_of_sharded_inference() -> None:
    """Gatherings of parameters are no micro-batches whose activations end."""
    plan = replace(chain([1, 1], 4), sharding="fsdp")
    program = compile_program(plan, training=False, copies=2)
    cost = StageCost(activation_bytes=Affine(3, 0), parameter_bytes=8)
    costs = StageCosts(stages=(cost, cost), ranks=(2, 2), parameter_copies=1)
    assert simulate(program, costs).peak_bytes == (4 + 8 + 3,) * 2


def test_sharded_replicas_without_a_micro_batch_sum_no_gradients_of_their_own() -> None:
    """One micro-batch for two replicas that take turns: the second has nothing to give back."""
    plan = round_robin(chain([1, 1], 1, "breadth_first"), [(0, 1), (0, 1)])
    program = compile_program(replace(plan, sharding="fsdp"))
    costs = StageCosts(stages=(StageCost(activation_bytes=Affine(3, 0), parameter_bytes=8),) * 2)
    for device in range(2):
        released = [change for _, change in changes(program, costs, device)]
        assert sum(released) == 0
        assert min(accumulate(released)) == 0


def _sleep(rank: int, seconds: float) -> int:
    time.sleep(seconds if rank == 1 else 0)
    return rank


def test_a_case_that_hangs_is_reported_and_the_next_one_runs() -> None:
    with Workers(2) as workers:
        with pytest.raises(RuntimeError, match=r"rank 1 did not end:\n(?s:.*)in _sleep"):
            workers.run(2, 4, _sleep, 100.0)
        assert workers.run(2, 30, _sleep, 0.0) == [0, 1]
