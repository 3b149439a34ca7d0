"""Costs of a plan's stages against those of the units that they consist of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.planners.common import simulated
from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.costs.model import Roofline
from lightning_gpp.graph import Affine, OperatorGraph
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Draft, DraftStage, Evaluator, Request, estimate, manual
from lightning_gpp.simulation import StageCosts
from tests.planning import graphs

DEVICE = Device(
    name="test",
    memory_bytes=1e9,
    peak_flops={"float32": 1e6},
    peak_bytes_per_second=1e6,
    flops_efficiency=1,
    bytes_efficiency=1,
    seconds_per_operator=0.25,
)
LINK = Link(latency=1, bytes_per_second=100)


def _cluster(num_devices: int = 3) -> Cluster:
    return Cluster.uniform(DEVICE, num_devices, LINK)


def _costs(graph: OperatorGraph, plan: Plan, cluster: Cluster | None = None, **options: object) -> StageCosts:
    return estimate(graph, plan, cluster or _cluster(), Roofline(graph), **options)  # type: ignore[arg-type]


def _towers() -> tuple[OperatorGraph, Plan]:
    graph = graphs.two_towers()
    placement = {"image_tower": 0, "text_tower": 1, "head": 2}
    return graph, manual(graph, placement, batch_size=32, micro_batch_size=8)


def test_stage_costs_are_those_of_the_units_they_consist_of() -> None:
    graph, plan = _towers()
    costs = _costs(graph, plan)
    problem = Request(cluster=_cluster(), batch_size=32, micro_batch_size=8).problem(graph)
    modules = ["image_tower", "text_tower", "head"]
    for stage, module in zip(costs.stages, modules, strict=True):
        units = [index for index, unit in enumerate(problem.units.units) if unit.modules[0].startswith(module)]
        for size in (1, 8):
            table = problem.seconds(size)
            assert stage.forward_seconds.at(size) == pytest.approx(table.forward[units].sum())
            backward = stage.input_seconds.at(size) + stage.weight_seconds.at(size)
            assert backward == pytest.approx((table.input_gradient + table.weight_gradient)[units].sum())
            assert stage.activation_bytes.at(size) == pytest.approx(problem.saved_bytes(size)[units].sum())
        assert stage.parameter_bytes == problem.parameter_bytes[units].sum()
        assert stage.working_bytes == Affine()
    assert costs.cluster == _cluster()
    assert costs.replicas == {}


def test_replicas_and_pipelines_sum_their_gradients() -> None:
    graph = graphs.chain(2)
    plan = manual(
        graph,
        [
            {"modules": ["blocks.0"], "devices": [1, 2], "micro_batch_size": 4},
            {"modules": ["blocks.1", "@step"], "devices": [0], "micro_batch_size": 4},
        ],
        batch_size=8,
    )
    num_bytes = plan.stages[0].figures.parameter_bytes
    assert num_bytes == 4 * 64 * 64
    assert _costs(graph, plan).all_reduce == (pytest.approx(2 * (1 + num_bytes / 2 / 100)), 0)
    twice = _costs(graph, plan, _cluster(6), num_pipelines=2).all_reduce
    assert twice == pytest.approx((6 * (1 + num_bytes / 4 / 100), 2 * (1 + num_bytes / 2 / 100)))


def test_the_slowest_of_all_pipelines_counts() -> None:
    """Two pipelines of one device each: the simulation of one tells the step of both."""
    graph = graphs.chain(2)
    slow = replace(DEVICE, name="slow", peak_flops={"float32": 5e5}, memory_bytes=1e8)
    cluster = replace(_cluster(2), devices=(DEVICE, slow))
    problem = Request(cluster=cluster, batch_size=8, micro_batch_size=4).problem(graph)
    stage = DraftStage(units=tuple(range(problem.num_units)), devices=(0, 1), micro_batch_size=4)
    prediction = simulated(problem, Draft(stages=(stage,)))
    assert (prediction.num_pipelines, prediction.plan.num_devices) == (2, 1)
    assert prediction.seconds == pytest.approx(Evaluator(problem)(Draft(stages=(stage,))).seconds)
    assert prediction.memory_bytes == (1e8,)
