"""Plans whose devices are groups of processes that share the work inside stages, and the best size of these groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpp.cluster import Cluster, Device, Link, Node
from lightning_gpp.cluster.groups import grouped
from lightning_gpp.errors import PlanError
from lightning_gpp.graph import OperatorGraph
from lightning_gpp.graph.parts import part_of
from lightning_gpp.plan import STEP, Stage
from lightning_gpp.planning import Draft, DraftStage, Evaluator, Request, best_plan, best_sizes, estimate
from lightning_gpp.planning.assignment.assign import make_plan
from lightning_gpp.planning.problem.prediction import simulated
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


def test_the_best_size_is_that_of_the_fastest_plan() -> None:
    """The second layer takes 0.66 MB with its gradient and Adam's state, more than a device has."""
    graph = chain(3, 10, 3, 3)
    found = best_sizes("auto", request(4, 0.6e6, recompute=False), dict.fromkeys((1, 2, 4), graph), {2: "two"})
    assert isinstance(found.failures[1], PlanError)
    assert "The model does not fit the devices" not in str(found.failures[1])  # its explanation takes time
    assert found.prediction.plan == max(found.plans.values(), key=lambda plan: plan.samples_per_second).plan
    assert {stage.tensor_parallel_size for stage in found.plans[2].plan.stages} == {2}
    assert {number: plan.plan.num_processes for number, plan in found.plans.items()} == {2: 4, 4: 4}
    assert found.plans[2].plan.model == "two"
    assert found.prediction.lower_bound <= found.prediction.seconds


def test_without_a_plan_of_any_size_the_reason_is_explained() -> None:
    tiny = request(2, 1e3, recompute=False)
    with pytest.raises(PlanError, match="The partitioner 'auto' found no plan"):
        best_sizes("auto", tiny, dict.fromkeys((1, 2), chain(3, 3)))


def test_groups_that_would_be_on_two_nodes_are_none() -> None:
    graph, cluster = chain(4, 10), Cluster.of_nodes("two", [Node(device=DEVICE, count=2)] * 2, Link())
    found = best_sizes("auto", replace(request(4), cluster=cluster), dict.fromkeys((1, 2, 4), graph))
    assert "would be on several nodes" in str(found.failures[4])


@pytest.mark.parametrize("sharding", ["none", "zero1"])
def test_estimates_of_seconds_and_memory_are_those_of_programs(sharding: str) -> None:
    graph, wanted = chain(4, 10, 2), request(8, micro_batch_size=2, sharding=sharding, recompute=False)
    problem = replace(wanted, cluster=grouped(wanted.cluster, (2,) * 4)).problem(part_of(graph, 2))
    groups = zip([(0,), (1,), (2,)], [(3,), (1, 2), (0,)], strict=True)
    draft = Draft(
        stages=tuple(
            DraftStage(units=units, devices=devices, micro_batch_size=2, recompute=False) for units, devices in groups
        )
    )
    found, program = Evaluator(problem)(draft), simulated(problem, draft)
    assert program.plan.members == (2, 2, 2, 2)
    assert program.seconds == pytest.approx(found.seconds, rel=0.02)
    devices = [stage.devices[0] for stage in program.plan.stages]
    assert [program.peak_bytes[device] for device in devices] == pytest.approx(found.peak_bytes)


def test_gradients_and_messages_of_members() -> None:
    """Each member adds up its part of the gradients; a device of four gets four copies, one of its sender's each."""
    graph, cluster = chain(4, 10), request(6).cluster
    stages = [
        Stage(name="a", modules=("m0",), devices=(1, 2), micro_batch_size=2),
        Stage(name="b", modules=("m1", STEP), devices=(0,), micro_batch_size=2, tensor_parallel_size=4),
    ]
    costs = estimate(graph, make_plan(graph, stages, batch_size=16), cluster)
    assert costs.cluster is not None
    assert costs.cluster.link(1, 0).bytes_per_second == 1e8 / 4
    assert costs.cluster.link(0, 1).bytes_per_second == 1e8
    assert costs.stages[1].parameter_bytes == graph.parameter_bytes["m1.weight"] / 4
    assert costs.all_reduce[0] == cluster.all_reduce_seconds([4, 5], graph.parameter_bytes["m0.weight"])


def test_a_plan_for_groups_has_their_processes() -> None:
    wanted = request(4)
    found = best_plan("auto", part_of(chain(4, 10), 2), replace(wanted, cluster=grouped(wanted.cluster, (2, 2))))
    assert found.plan.num_processes == 4
