"""Candidates of a request: numbers of pipelines where stages may not have replicas."""

from __future__ import annotations

from typing import Any

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.planning import Request, best_plan
from tests.planning import graphs

SLOW = Device(name="slow", memory_bytes=1e9, peak_flops={"float32": 1e10}, peak_bytes_per_second=1e11)


def request(num_devices: int, **settings: Any) -> Request:
    cluster = Cluster.uniform(SLOW, num_devices, Link(latency=1e-6, bytes_per_second=1e10))
    return Request(cluster=cluster, **{"batch_size": 32, "max_replicas": 1, "seconds": 1.0, **settings})


def test_more_devices_than_pieces_are_filled_with_copies() -> None:
    prediction = best_plan("auto", graphs.chain(4), request(8))
    assert prediction.num_pipelines >= 2
    assert prediction.num_pipelines * prediction.plan.num_devices == 8
    assert prediction.num_pipelines * prediction.plan.batch_size == 32
    assert all(len(stage.devices) == 1 for stage in prediction.plan.stages)
    assert prediction.timeline.reductions


def test_the_fastest_number_is_chosen() -> None:
    prediction = best_plan("auto", graphs.chain(4), request(4))
    alone = best_plan("auto", graphs.chain(4), request(4, num_pipelines=1))
    assert prediction.seconds <= alone.seconds
    assert prediction.gap is not None
