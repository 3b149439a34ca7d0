"""The mini-batch takes memory on the device that loads it, in searches, simulations and the room of schedules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.graph import Affine, Operator, OperatorGraph, TensorSpec
from lightning_gpp.plan import Plan
from lightning_gpp.planning import Request, best_plan
from lightning_gpp.planning.assignment.estimate import estimate, timed
from lightning_gpp.planning.problem.draft import DraftStage
from lightning_gpp.planning.problem.stage_figures import loaded_bytes
from lightning_gpp.schedules import compile_program
from lightning_gpp.simulation import StageCosts, simulate
from tests.planning import graphs

SIZE = 64 * 256
"""Bytes of a mini-batch of 64 samples."""


def request(**settings: Any) -> Request:
    device = Device(name="small", memory_bytes=1e6, peak_flops={"float32": 1e12}, peak_bytes_per_second=1e11)
    cluster = Cluster.uniform(device, 2, Link(latency=1e-6, bytes_per_second=1e10))
    return Request(cluster=cluster, batch_size=64, micro_batch_size=8, **settings)


def pipeline() -> tuple[Plan, tuple[StageCosts, StageCosts]]:
    """Two stages, with their costs and the costs without a mini-batch. The last one is on device 0, which loads."""
    asked = request(max_replicas=1, num_pipelines=1, idle_devices=False)
    plan = best_plan("graphpipe", graphs.chain(4), asked).plan
    costs = estimate(graphs.chain(4), plan, asked.cluster)
    return plan, (costs, replace(costs, mini_batch_bytes=0))


def test_data_that_are_read_count_once() -> None:
    """Two operators read the same output of the data, and nobody the other one."""
    graph, number = OperatorGraph(), TensorSpec(shape=(Affine(1),), dtype="float32")
    graph.add(Operator(name="data", target="input", module="@source", outputs=(number, number)))
    for name in "ab":
        graph.add(Operator(name=name, target="linear", module=name))
        graph.connect("data", name, 0)
    assert graph.input_bytes == Affine(4)


def test_programs_hold_it_on_the_device_that_loads_it() -> None:
    plan, costs = pipeline()
    peaks = [simulate(compile_program(plan), entry).peak_bytes for entry in costs]
    assert [more - less for more, less in zip(*peaks, strict=True)] == [SIZE, 0]


def test_schedules_have_less_room_there() -> None:
    plan, costs = pipeline()
    less, more = (timed(plan, entry, (1e6, 1e6)).memory_bytes for entry in costs)
    assert [before - now for before, now in zip(more, less, strict=True)] == [SIZE, 0]


@pytest.mark.parametrize(("devices", "expected"), [(((1,), (0,)), [0, SIZE]), (((0, 1),), [SIZE / 2])])
def test_searches_count_it(devices: tuple[tuple[int, ...], ...], expected: list[float]) -> None:
    """Two stages, and two pipelines of one stage, of which each loads its half."""
    problem = request(recompute=False).problem(graphs.chain(4))
    cut = problem.num_units // 2 if len(devices) == 2 else 0
    parts = [part for part in (range(cut), range(cut, problem.num_units)) if part]
    stages = [
        DraftStage(units=tuple(part), devices=on, micro_batch_size=8) for part, on in zip(parts, devices, strict=True)
    ]
    pipelines = 1 if len(stages) == 2 else len(devices[0])
    assert [loaded_bytes(problem, stage, pipelines) for stage in stages] == expected
