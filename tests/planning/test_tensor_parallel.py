"""The search for one number of processes per device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpp.cluster import Cluster, Device, Link, Node
from lightning_gpp.cluster.groups import grouped
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.graph.parts import part_of
from lightning_gpp.planning import Draft, DraftStage, Evaluator, Request
from lightning_gpp.planning.problem.prediction import simulated
from lightning_gpp.planning.tensor_parallel import best_sizes
from tests.planning.graphs import Builder

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e10)


def chain(*work: float) -> OperatorGraph:
    """Layers of these sizes, all of which members divide."""
    build = Builder()
    x = build.data()
    for index, size in enumerate(work):
        x = build.linear(f"m{index}", x, work=size)
    graph = build.step(x)
    return replace(graph, divided=dict.fromkeys(graph.parameter_sizes, 0))


def request(num_devices: int, memory_bytes: float = 1e9, **settings: Any) -> Request:
    device = replace(DEVICE, memory_bytes=memory_bytes)
    cluster = Cluster.uniform(device, num_devices, Link(latency=1e-6, bytes_per_second=1e8, shared="device"))
    return Request(cluster=cluster, **{"batch_size": 16, "num_pipelines": 1, "seconds": 3.0, **settings})


def test_the_fastest_number_is_the_answer() -> None:
    graph = chain(3, 10, 3, 3)
    found = best_sizes("auto", request(4), dict.fromkeys((1, 2, 4), graph))
    assert sorted(found.plans) == [1, 2, 4]
    assert found.prediction.samples_per_second == max(plan.samples_per_second for plan in found.plans.values())
    assert found.prediction.lower_bound == min(plan.lower_bound for plan in found.plans.values())
    for number, prediction in found.plans.items():
        assert {stage.tensor_parallel_size for stage in prediction.plan.stages} == {number}
        assert prediction.used_devices <= 4


def test_a_layer_that_is_too_large_for_one_device_is_divided() -> None:
    """The second layer takes 0.66 MB with its gradient and Adam's state."""
    graph = chain(3, 10, 3, 3)
    found = best_sizes("auto", request(4, 0.6e6, recompute=False), dict.fromkeys((1, 2, 4), graph))
    assert 1 in found.failures
    assert found.prediction.fits
    with pytest.raises(PlanError, match="Module 'm1' alone takes"):
        best_sizes("auto", request(4, 0.1e6, recompute=False), {1: graph})


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_estimates_of_seconds_and_memory_are_those_of_programs(sharding: str) -> None:
    graph, question = part_of(chain(4, 10, 2), 2), request(8, micro_batch_size=2, sharding=sharding, recompute=False)
    problem = replace(question, cluster=grouped(question.cluster, [2] * 4)).problem(graph)
    stages = zip(((0,), (1,), (2,)), ((2, 3), (1,), (0,)), strict=True)
    draft = Draft(stages=tuple(DraftStage(units=units, devices=where, micro_batch_size=2) for units, where in stages))
    found, program = Evaluator(problem)(draft), simulated(problem, draft)
    assert program.plan.members == (2, 2, 2, 2)
    assert program.seconds == pytest.approx(found.seconds, rel=0.02)
    devices = [stage.devices[0] for stage in program.plan.stages]
    assert [program.peak_bytes[device] for device in devices] == pytest.approx(found.peak_bytes)


def test_groups_that_would_be_on_two_nodes_are_none() -> None:
    graph, cluster = chain(4, 10), Cluster.of_nodes("two", [Node(device=DEVICE, count=2)] * 2, Link())
    found = best_sizes("auto", replace(request(4), cluster=cluster), dict.fromkeys((1, 2, 4), graph))
    assert "would be on several nodes" in str(found.failures[4])
