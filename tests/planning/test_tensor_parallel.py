"""Plans for devices of several processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.planners.common import simulated
from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.cluster.groups import grouped
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.graph.parts import part_of
from lightning_gpp.planning import Draft, DraftStage, Evaluator, Request
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


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_estimates_of_seconds_and_memory_are_those_of_programs(sharding: str) -> None:
    graph, question = part_of(chain(4, 10, 2), 2), request(8, micro_batch_size=2, sharding=sharding, recompute=False)
    problem = replace(question, cluster=grouped(question.cluster, 2)).problem(graph)
    stages = zip(((0,), (1,), (2,)), ((2, 3), (1,), (0,)), strict=True)
    draft = Draft(stages=tuple(DraftStage(units=units, devices=where, micro_batch_size=2) for units, where in stages))
    found, program = Evaluator(problem)(draft), simulated(problem, draft)
    assert program.plan.num_processes == 8
    assert program.seconds == pytest.approx(found.seconds, rel=0.02)
    devices = [stage.devices[0] for stage in program.plan.stages]
    assert [program.peak_bytes[device] for device in devices] == pytest.approx(found.peak_bytes)
