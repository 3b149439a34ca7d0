"""The lower bound against every plan of small problems, and the cases in which a plan reaches it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.graph import Affine, Operator, OperatorGraph
from lightning_gpp.planning import Problem, Request, SearchControl, best_plan
from lightning_gpp.planning.bounds import bound
from lightning_gpp.planning.bounds.bound import bound_of_size, lower_bound
from lightning_gpp.planning.bounds.capacity import bottleneck_units
from lightning_gpp.planning.partitioners.exhaustive import exhaustive
from lightning_gpp.planning.problem.evaluate import Evaluator
from lightning_gpp.planning.problem.units import Unit, UnitGraph, Value
from tests.planning import graphs
from tests.planning.problems import DEVICE, Given, random_problem

SLACK = 1 + 1e-9


def optimum_of(problem: Problem) -> float:
    """Seconds of the best of all plans that fit the memory; infinite if there is none."""
    draft = exhaustive(problem, SearchControl(seconds=float("inf"))).draft
    evaluation = None if draft is None else Evaluator(problem)(draft)
    return evaluation.seconds if evaluation and evaluation.fits else float("inf")


def _with_memory(problem: Problem, *memory_bytes: float) -> Problem:
    """The same on devices with this memory, the last one's for all others."""
    number = problem.cluster.num_devices
    sizes = [*memory_bytes, *memory_bytes[-1:] * number][:number]
    pairs = zip(problem.cluster.devices, sizes, strict=True)
    devices = tuple(replace(device, memory_bytes=size) for device, size in pairs)
    return replace(problem, cluster=replace(problem.cluster, devices=devices))


def _mixed(problem: Problem, seed: int) -> Problem:
    """Every device its own kind, up to 8 times slower than the first."""
    random = Random(seed)
    devices = tuple(
        replace(device, name=f"kind {index}", peak_flops={"float32": 1e9 / random.choice((1, 2, 8))})
        for index, device in enumerate(problem.cluster.devices)
    )
    return replace(problem, cluster=replace(problem.cluster, devices=devices), recompute=False)


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_beats_the_bound(seed: int) -> None:
    problem = random_problem(seed, num_units=2 + seed % 4)
    assert 0 < lower_bound(problem) <= optimum_of(problem) * SLACK


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_without_replicas_beats_the_bound(seed: int) -> None:
    problem = replace(random_problem(seed, num_units=4 + seed % 2, num_devices=2 + seed % 3), max_replicas=1)
    bound = lower_bound(problem)
    assert bound <= optimum_of(problem) * SLACK
    assert bound >= lower_bound(replace(problem, max_replicas=float("inf")))


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_on_unequal_devices_beats_the_bound(seed: int) -> None:
    problem = _mixed(random_problem(seed, num_units=2 + seed % 3, num_devices=2 + seed % 2), seed)
    assert lower_bound(problem) <= optimum_of(problem) * SLACK


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_with_all_forwards_first_beats_the_bound(seed: int) -> None:
    problem = replace(random_problem(seed, num_units=4), schedules=("1f1b", "gpipe"))
    assert lower_bound(problem) <= optimum_of(problem) * SLACK


@pytest.mark.parametrize("seed", range(60))
def test_no_plan_that_fits_beats_the_bound(seed: int) -> None:
    """Memory for a part of what one device would need for everything, so that replicas are scarce."""
    problem = random_problem(seed, num_units=2 + seed % 4)
    needed = float((problem.static_bytes + problem.saved_bytes(problem.sizes[0])).sum())
    random = Random(seed)
    problem = _with_memory(problem, *(random.uniform(0.3, 0.9) * needed for _ in range(random.choice((1, 4)))))
    ample = lower_bound(_with_memory(problem, 1e18))
    assert ample * (1 - 1e-6) <= lower_bound(problem) <= optimum_of(problem) * SLACK


@pytest.mark.parametrize("seed", range(10))
def test_less_memory_never_lowers_the_bound(seed: int) -> None:
    problem = random_problem(seed)
    needed = float((problem.static_bytes + problem.saved_bytes(problem.sizes[0])).sum())
    bounds = [lower_bound(_with_memory(problem, share * needed)) for share in (10, 1, 0.8, 0.5, 0.3, 0.1)]
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("seed", range(15))
def test_more_devices_never_raise_the_bound(seed: int) -> None:
    problem = random_problem(seed, num_units=6, num_devices=2)
    link = Link(latency=1e-3, bytes_per_second=1e2)
    bounds = [
        lower_bound(replace(problem, cluster=Cluster.uniform(DEVICE, number, link))) for number in (1, 2, 3, 4, 8, 16)
    ]
    assert bounds == sorted(bounds, reverse=True)


def test_the_bound_is_that_of_the_best_size() -> None:
    for seed in range(10):
        problem = random_problem(seed)
        assert lower_bound(problem) == min(bound_of_size(problem, size) for size in problem.sizes)


def _problem(
    seconds: list[float],
    values: list[tuple[int, int]],
    num_devices: int,
    *,
    fixed: float = 0.0,
    batch_size: int = 8,
    size: int = 1,
    parameter_bytes: int = 0,
    ratio: float = 2.0,
) -> Problem:
    """Units of so many seconds per sample in the forward, on devices with free links."""
    graph = OperatorGraph()
    for index in range(len(seconds)):
        graph.add(Operator(name=f"op{index}", target="call"))
    units = tuple(
        Unit(modules=(f"m{index}",), operators=(f"op{index}",), parameter_bytes=parameter_bytes)
        for index in range(len(seconds))
    )
    flows = tuple(Value(src=src, dsts=(dst,), bytes=Affine(1)) for src, dst in values)
    costs = Given({f"op{index}": Affine(value, fixed) for index, value in enumerate(seconds)}, ratio)
    return Problem(
        graph=graph,
        costs=costs,
        units=UnitGraph(units=units, values=flows),
        cluster=Cluster.uniform(DEVICE, num_devices, Link(bytes_per_second=100)),
        batch_size=batch_size,
        sizes=(size,),
        recompute=False,
    )


def test_reached_on_one_device() -> None:
    problem = _problem([1.0, 2.0, 0.5], [(0, 1), (1, 2)], 1)
    assert lower_bound(problem) == pytest.approx(8 * 3.5 * 3)
    assert optimum_of(problem) == pytest.approx(lower_bound(problem))


def test_reached_where_copies_share_all_work_for_free() -> None:
    """No weights to sum, no fixed seconds: two devices take half as long as one."""
    problem = _problem([1.0, 2.0], [(0, 1)], 2, size=2)
    assert lower_bound(problem) == pytest.approx(8 * 3 * 3 / 2)
    assert optimum_of(problem) == pytest.approx(lower_bound(problem))


def test_reached_where_one_unit_takes_longest() -> None:
    """A unit that neither shares its micro-batches nor waits for anything."""
    problem = replace(_problem([10.0, 0.001], [], 2), max_replicas=1)
    assert lower_bound(problem) == pytest.approx(8 * 30)
    assert optimum_of(problem) == pytest.approx(lower_bound(problem))


def test_independent_branches_do_not_wait() -> None:
    """Two equal units without an edge: each device is busy all the time."""
    problem = replace(_problem([1.0, 1.0], [], 2), max_replicas=1)
    assert lower_bound(problem) == pytest.approx(8 * 3)
    assert optimum_of(problem) == pytest.approx(lower_bound(problem))


def test_a_chain_waits_for_warm_up_and_drain() -> None:
    """Eight equal units on 4 devices and M micro-batches take M + 3 slots; the bound sees a part of the 3."""
    problem = replace(_problem([1.0] * 8, [(unit, unit + 1) for unit in range(7)], 4), max_replicas=1)
    balance = 8 * 6
    assert optimum_of(problem) == pytest.approx(balance * 11 / 8, rel=0.02)  # and the links
    assert 1.05 * balance < lower_bound(problem) < balance * 11 / 8


def test_stages_behind_others_have_less_time_for_their_work() -> None:
    """Sixteen equal units on as many devices, and eight micro-batches."""
    problem = replace(_problem([1.0] * 16, [(unit, unit + 1) for unit in range(15)], 16), max_replicas=1)
    assert 0.99 * 23 * 3 < lower_bound(problem) <= 23 * 3  # stages of two units would take longer


def test_the_largest_share_counts() -> None:
    """Five samples on four devices, two of them on one."""
    problem = _problem([1.0] * 4, [(unit, unit + 1) for unit in range(3)], 4, batch_size=5, size=5)
    assert 0.999 * 2 * 4 * 3 < lower_bound(problem) <= optimum_of(problem) * SLACK


@pytest.mark.parametrize(
    ("num_units", "num_devices", "each"), [(5, 2, 3), (7, 3, 3), pytest.param(9, 4, 3, marks=pytest.mark.acceptance)]
)
def test_units_are_not_divided(num_units: int, num_devices: int, each: int) -> None:
    """Without replicas some device runs more than its share of equal units that nothing connects."""
    values = [(unit, num_units) for unit in range(num_units)]
    problem = replace(_problem([1.0] * num_units + [1e-6], values, num_devices), max_replicas=1)
    assert 8 * 3 * each * 0.99 <= lower_bound(problem) <= optimum_of(problem) * SLACK


def test_what_replicas_gain_is_what_sums_of_gradients_cost() -> None:
    """One unit on two devices: with large weights it stays on one, whatever balance would say."""
    light, heavy = (_problem([1.0], [], 2, size=2, parameter_bytes=size) for size in (100, 100_000))
    assert lower_bound(light) == pytest.approx(8 * 3 / 2 + 100 / 100, rel=1e-2)
    assert lower_bound(heavy) == pytest.approx(8 * 3, rel=1e-2)


def test_branches_wait_for_the_way_through_the_join() -> None:
    """Two micro-batches, and a trunk behind two branches that takes as long as both: there is no balance."""
    problem = _problem([1.0, 1.0, 2.0], [(0, 2), (1, 2)], 4, batch_size=2, size=1)
    assert lower_bound(problem) > 1.2 * (2 * 4 * 3 / 4)
    assert lower_bound(problem) <= optimum_of(problem) * SLACK


def _bottlenecks(problem: Problem) -> list[int]:
    return bottleneck_units(problem, problem.seconds(problem.sizes[0]).total)


def test_without_a_last_unit_that_all_others_lead_to_there_are_no_bottlenecks() -> None:
    assert _bottlenecks(_problem([1.0, 1.0], [], 2)) == []


def test_bottlenecks_are_where_all_branches_meet() -> None:
    """The one that takes longest first, and the step's unit last."""
    values = [(0, 2), (1, 2), (2, 3), (3, 4)]
    assert _bottlenecks(_problem([1.0, 3.0, 1.0, 2.0, 1.0], values, 2)) == [3, 4]


def test_bottlenecks_with_much_behind_them_are_left_out() -> None:
    values = [(0, 2), (1, 2), (2, 3), (3, 4)]
    assert _bottlenecks(_problem([1.0, 1.0, 9.0, 8.0, 1.0], values, 8)) == [3, 4]


def test_without_returning_gradients_nothing_is_said_of_bottlenecks() -> None:
    problem = _problem([1.0, 1.0, 1.0], [(0, 2), (1, 2)], 2)
    one_way = tuple(replace(value, num_directions=1) for value in problem.units.values)
    assert _bottlenecks(problem) == [2]
    assert _bottlenecks(replace(problem, units=replace(problem.units, values=one_way))) == []


def _without_bottlenecks(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> float:
    with monkeypatch.context() as patch:
        patch.setattr(bound, "bottleneck_units", lambda *_: [])
        patch.setattr(bound, "path_bound", lambda *_: None)
        return lower_bound(problem)


def test_the_bottleneck_s_stage_waits_for_the_slowest_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two branches and a join on three devices, three micro-batches: without waits they would take 9 seconds each."""
    problem = _problem([1.0, 1.0, 1.0], [(0, 2), (1, 2)], 3, batch_size=3, parameter_bytes=100_000)
    problem = replace(problem, max_replicas=1)
    assert _without_bottlenecks(problem, monkeypatch) < 10
    assert 11.5 < lower_bound(problem) <= optimum_of(problem) * SLACK  # one more micro-batch, but for the links


def test_what_follows_the_bottleneck_waits_for_it() -> None:
    """The last of three units waits for one micro-batch of the others, there and back: 3 * 5.7 + 6 + 3 seconds."""
    problem = _problem([1.0, 2.0, 1.9], [(0, 1), (1, 2)], 3, batch_size=3, parameter_bytes=100_000)
    problem = replace(problem, max_replicas=1)
    assert 25.5 < lower_bound(problem) <= optimum_of(problem) * SLACK


def test_with_all_forwards_first_branches_wait_less(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = _problem([1.0] * 4, [(0, 1), (1, 2), (2, 3)], 2, batch_size=4, parameter_bytes=100_000)
    problem = replace(problem, max_replicas=1)
    both = replace(problem, schedules=("1f1b", "gpipe"))
    assert (
        _without_bottlenecks(both, monkeypatch)
        < lower_bound(both)
        <= lower_bound(problem)
        <= optimum_of(problem) * SLACK
    )


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_of_a_size_beats_the_bound_of_the_size(seed: int) -> None:
    """Backwards from half as long as forwards to three times; with and without a stage for the step."""
    random = Random(seed)
    problem = random_problem(seed, num_units=3 + seed % 3, num_devices=2 + seed % 3)
    costs = Given(problem.costs.forward, random.choice((0.5, 1.0, 3.0)))  # type: ignore[attr-defined]
    problem = replace(problem, costs=costs, single_step=random.random() < 0.5, recompute=False)
    for size in problem.sizes:
        of_size = replace(problem, sizes=(size,))
        assert bound_of_size(problem, size) <= optimum_of(of_size) * SLACK


def test_backwards_do_not_wait_where_gradients_do_not_return() -> None:
    """Three units in a row on three devices: only their forwards follow each other."""
    problem = replace(_problem([1.0] * 3, [(0, 1), (1, 2)], 3, batch_size=1), max_replicas=1)
    one_way = tuple(replace(value, num_directions=1) for value in problem.units.values)
    alone = replace(problem, units=replace(problem.units, values=one_way))
    assert optimum_of(alone) == pytest.approx(3 + 2, rel=0.01)
    assert lower_bound(alone) == pytest.approx(3)
    assert lower_bound(problem) > 5.5


@pytest.mark.parametrize("seed", range(20))
def test_no_plan_beats_the_bound_where_gradients_do_not_return(seed: int) -> None:
    random = Random(seed)
    problem = random_problem(seed, num_units=3 + seed % 3, num_devices=2 + seed % 3)
    values = tuple(replace(value, num_directions=random.choice((1, 2))) for value in problem.units.values)
    problem = replace(problem, units=replace(problem.units, values=values), recompute=False)
    assert lower_bound(problem) <= optimum_of(problem) * SLACK


def test_glue_that_units_repeat_counts_once() -> None:
    """One device runs the mask of this model once, although every unit that reads it has a copy."""
    for batch_size in (1, 8):
        request = Request(cluster=Cluster.uniform(DEVICE, 1), batch_size=batch_size, seconds=1.0)
        plan = best_plan("auto", graphs.gpt(), request)
        assert plan.lower_bound <= plan.seconds * (1 + 1e-9)
        assert plan.lower_bound == pytest.approx(plan.seconds, rel=1e-3)
