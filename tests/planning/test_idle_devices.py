"""Fewer devices where that is faster: plans that leave some idle, and the remark where they may not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpp.cluster import Cluster, Device, Link, Node
from lightning_gpp.errors import PlanError
from lightning_gpp.planning import Request, best_plan
from lightning_gpp.schedules import compile_program, verify
from tests.planning import graphs

DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e10}, peak_bytes_per_second=1e10)
FAST, SLOW = Link(latency=1e-6, bytes_per_second=1e12), Link(latency=1e-2, bytes_per_second=1e5)


def request(link: Link, num_devices: int = 3, **settings: Any) -> Request:
    return Request(
        cluster=Cluster.uniform(DEVICE, num_devices, link), **{"batch_size": 12, "seconds": 30.0, **settings}
    )


def test_behind_slow_links_one_device_is_best() -> None:
    everything, free = (best_plan("auto", graphs.chain(6), request(SLOW, idle_devices=idle)) for idle in (False, True))
    assert everything.used_devices == 3
    assert free.used_devices == 1
    assert free.plan.num_devices == 3
    assert free.plan.unused == (1, 2)
    verify(compile_program(free.plan))
    assert free.samples_per_second > 2 * everything.samples_per_second
    assert "devices" not in everything.plan.notes
    assert free.plan.notes["devices"].startswith("2 of 3 devices are idle: ")


@pytest.mark.parametrize("idle", [False, True])
def test_more_devices_than_pieces(idle: bool) -> None:
    """Idle devices that are not allowed are better than no plan."""
    settings = {"max_replicas": 1, "num_pipelines": 1}
    prediction = best_plan("auto", graphs.chain(2), request(FAST, 4, idle_devices=idle, **settings))
    assert prediction.plan.unused == (2, 3)
    assert prediction.plan.notes["devices"] == (
        "2 of 4 devices are idle: no plan that uses all of them was found to be faster."
    )


def test_a_slow_device_in_the_middle_stays_idle() -> None:
    """Devices that are used need not be the first ones."""
    slow = replace(DEVICE, name="slow", peak_flops={"float32": 1e7}, peak_bytes_per_second=1e7)
    nodes = [Node(device=device, count=1) for device in (DEVICE, slow, DEVICE)]
    cluster = Cluster.of_nodes("mixed", nodes, FAST)
    prediction = best_plan("auto", graphs.chain(6), replace(request(FAST, idle_devices=True), cluster=cluster))
    assert prediction.plan.unused == (1,)
    assert prediction.used_devices == 2


def test_a_layout_that_needs_all_devices_gets_no_plan_on_fewer() -> None:
    asked = request(FAST, 4, schedules=("interleaved",), num_pipelines=1)
    with pytest.raises(PlanError, match="With that many stages there is no plan"):
        best_plan("auto", graphs.chain(2), asked)
