"""Several stages per device: how stages are laid, and plans that partitioners make for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.graph import Affine, OperatorGraph
from lightning_gpp.plan import STEP, Plan
from lightning_gpp.planning import Request, best_plan, manual
from lightning_gpp.planning.assignment.complete import check_sharding
from lightning_gpp.planning.assignment.estimate import timed, with_figures_of
from lightning_gpp.planning.assignment.layout import both_ways, laid_out, lay_out_by_hand
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, simulate
from tests.planning import graphs
from tests.strategies import chain

SLOW = Device(name="slow", memory_bytes=1e9, peak_flops={"float32": 1e10}, peak_bytes_per_second=1e11)


def request(num_devices: int, **settings: Any) -> Request:
    cluster = Cluster.uniform(SLOW, num_devices, Link(latency=1e-6, bytes_per_second=1e10))
    return Request(cluster=cluster, **{"batch_size": 32, "seconds": 0.5, "num_pipelines": 1, **settings})


def blocks(graph: OperatorGraph) -> list[str]:
    return list(dict.fromkeys(operator.module for operator in graph if operator.parameters))


def with_head(plan: Plan) -> Plan:
    """The last stage computes something beside the step."""
    *others, last = plan.stages
    return replace(plan, stages=(*others, replace(last, modules=("head", STEP))))


def devices_of(plan: Plan) -> list[int]:
    return [stage.devices[0] for stage in plan.stages]


def test_loops_and_zigzags_end_on_device_0() -> None:
    plan = with_head(chain((1,) * 8, 4))
    assert devices_of(laid_out(plan, 4, "looped")) == [3, 2, 1, 0, 3, 2, 1, 0]
    assert devices_of(laid_out(plan, 4, "zigzag")) == [0, 1, 2, 3, 3, 2, 1, 0]
    assert devices_of(laid_out(with_head(chain((1,) * 6, 4)), 2, "zigzag")) == [1, 0, 0, 1, 1, 0]


def test_fewer_stages_than_devices() -> None:
    with pytest.raises(ConfigError, match=r"2 stages cannot be laid out over 4 devices.*Give more stages"):
        laid_out(with_head(chain((1, 1), 2)), 4, "looped")


def test_both_ways() -> None:
    graph = graphs.chain(4)
    names = blocks(graph)
    plan = manual(graph, [{"modules": [name]} for name in names], batch_size=8, num_micro_batches=4)
    mirrored = both_ways(graph, plan)
    assert [stage.devices for stage in mirrored.stages] == [(3, 0), (2, 1), (1, 2), (0, 3), (0,)]
    assert [stage.round_robin for stage in mirrored.stages] == [True] * 4 + [False]
    assert mirrored.stages[-1].modules == (STEP,)
    program = compile_program(mirrored)
    simulate(program, StageCosts.uniform(mirrored))
    assert program.reduced == {0, 1, 2, 3}


def test_stages_by_hand_are_laid_out_as_the_schedule_wants() -> None:
    graph = graphs.chain(4)
    names = blocks(graph)
    plan = manual(graph, [{"modules": [name]} for name in names], batch_size=8, num_micro_batches=4)
    assert lay_out_by_hand(plan, graph) == plan
    assert devices_of(lay_out_by_hand(plan, graph, stages_per_device=2)) == [1, 0, 1, 0]


@pytest.mark.parametrize("number", [2, 3])
def test_a_partitioner_cuts_for_so_many_stages_per_device(number: int) -> None:
    found = best_plan("auto", graphs.chain(12), request(2, stages_per_device=number))
    assert found.plan.num_devices == 2
    assert [len(found.plan.stages_on(device)) for device in range(2)] == [number, number]
    assert found.fits
    assert 0 < found.lower_bound < found.seconds
    assert found.plan.stages[0].figures.forward_seconds.at(1) > 0


def test_figures_travel_with_the_plan() -> None:
    plan = chain((2, 2), 8)
    costs = StageCosts.uniform(plan, 3, 5, 2)
    known = timed(plan, costs, (100.0, 100.0))
    assert known.stages[0].figures.forward_seconds == Affine(0, 3)
    assert known.stages[0].figures.input_seconds == Affine(0, 3)
    assert known.stages[0].figures.weight_seconds == Affine(0, 2)
    assert known.memory_bytes == (100.0, 100.0)
    other = with_figures_of(known, replace(plan, batch_size=6))
    assert other.stages[1].figures == known.stages[1].figures
    assert other.memory_bytes == known.memory_bytes


def test_tied_parameters_are_not_sharded() -> None:
    graph = graphs.Builder()
    x = graph.linear("first", graph.data(), parameter="table")
    y = graph.linear("second", x)
    graph.linear("third", y, parameter="table")
    whole = graph.graph
    plan = manual(whole, {"first": 0, "second": 1, "third": 2}, batch_size=4)
    check_sharding(replace(plan, sharding="zero1"), whole)
    with pytest.raises(PlanError, match=r"fsdp: parameter 'table' is used by the stages 'first' and 'third'.*zero1"):
        check_sharding(replace(plan, sharding="fsdp"), whole)
