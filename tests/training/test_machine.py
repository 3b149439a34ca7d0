"""The devices that a job is planned for, and what their memory holds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_gpp.cluster import preset_cluster
from lightning_gpp.errors import ConfigError, PlanError
from lightning_gpp.measure.memory import memory_bytes
from lightning_gpp.planning import manual
from lightning_gpp.planning.advice import shortage
from lightning_gpp.training.measured.machine import Machine, footprint_of, predicted, present, resolved, simulated
from lightning_gpp.training.option_values import cluster_given
from tests.planning import graphs


def optimizers(*kinds: Any) -> list[torch.optim.Optimizer]:
    parameters = nn.Linear(1, 1).parameters()
    return [kind(parameters) for kind in kinds]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("kinds", "expected"), [((), "adam"), ((torch.optim.SGD,), "sgd"), ((momentum,), "sgd_momentum")]
)
def test_the_optimizer_tells_the_memory(kinds: tuple[Any, ...], expected: str) -> None:
    assert footprint_of(optimizers(*kinds), "32-true").optimizer == expected


def test_the_hungriest_of_several_optimizers_counts() -> None:
    some = [*optimizers(torch.optim.SGD), *optimizers(torch.optim.Adam)]
    assert footprint_of(some, "bf16-mixed").optimizer == "adam"
    assert footprint_of(some, "bf16-mixed").precision == "bf16-mixed"
    assert footprint_of(some, "transformer-engine").precision == "32-true"


def test_a_preset_gets_the_nodes_that_the_job_needs() -> None:
    cluster = resolved(cluster_given("dgx_h100"), 12)
    assert [cluster.node_of(device) for device in range(12)] == [0] * 8 + [1] * 4
    host = resolved(cluster_given("cpu_host"), 6, num_nodes=2)
    assert [host.node_of(device) for device in range(6)] == [0, 0, 0, 1, 1, 1]


def test_a_cluster_is_a_file_a_mapping_or_itself(tmp_path: Path) -> None:
    (tmp_path / "lab.yaml").write_text("preset: t4_box\nnum_nodes: 2\n")
    wanted = preset_cluster("t4_box", 2)
    for given in (tmp_path / "lab.yaml", str(tmp_path / "lab.yaml"), {"preset": "t4_box", "num_nodes": 2}, wanted):
        assert cluster_given(given) == wanted
    assert resolved(wanted, 8) is wanted
    assert resolved(wanted, 5) == wanted.subset(range(5))
    assert cluster_given(None) is None


def test_a_cluster_with_fewer_devices_than_the_job() -> None:
    with pytest.raises(ConfigError, match=r"'summit' \(strategy.cluster\) has 4 devices, the job needs 5"):
        resolved(preset_cluster("summit"), 5)


def test_the_present_machine_shares_its_memory_among_processes() -> None:
    machine = present(4)
    assert machine.num_devices == 4
    assert machine.devices[0].memory_bytes == pytest.approx(memory_bytes(torch.device("cpu")) / 4, rel=0.1)
    nodes = present(6, num_nodes=2)
    assert [nodes.node_of(device) for device in range(6)] == [0, 0, 0, 1, 1, 1]
    assert nodes.link(0, 1).bytes_per_second > nodes.link(0, 3).bytes_per_second


def test_a_plan_by_hand_that_does_not_fit_is_told() -> None:
    graph = graphs.two_towers()
    plan = manual(graph, {"image_tower": 0, "text_tower": 1, "head": 2}, batch_size=4)
    small = preset_cluster("t4_box", num_devices=4).with_headroom(0.9999999)
    for cluster, fits in ((preset_cluster("t4_box"), True), (small, False)):
        machine = Machine(cluster=cluster)
        found = predicted(plan, graph, machine, 1, "synchronous")
        assert found.fits == fits
    assert re.match("The model does not fit .*kB too much", shortage(found, small, machine.footprint))


def test_a_plan_is_not_simulated_on_fewer_devices() -> None:
    graph = graphs.two_towers()
    plan = manual(graph, {"image_tower": 0, "text_tower": 1, "head": 2}, batch_size=4)
    machine = Machine(cluster=preset_cluster("t4_box", num_devices=2))
    with pytest.raises(PlanError, match="The plan needs 3 devices, the cluster 't4_box' has 2"):
        simulated(plan, graph, machine)
    twice = simulated(plan, graph, Machine(cluster=preset_cluster("t4_box", 2)), num_pipelines=2)
    assert twice.makespan > simulated(plan, graph, Machine(cluster=preset_cluster("t4_box"))).makespan
