"""What is said where nothing fits, and that what is suggested does fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_gpp.cluster import Cluster, Device, Link
from lightning_gpp.errors import PlanError
from lightning_gpp.planning import Answer, Problem, Request, SearchControl, best_plan, register_partitioner
from tests.planning import graphs

MEGABYTE = 1e6


def request(memory_bytes: float, num_devices: int = 2, **settings: Any) -> Request:
    device = Device(name="small", memory_bytes=memory_bytes, peak_flops={"float32": 1e12}, peak_bytes_per_second=1e11)
    cluster = Cluster.uniform(device, num_devices, Link(latency=1e-6, bytes_per_second=1e10))
    return Request(cluster=cluster, **{"batch_size": 64, "seconds": 1.0, **settings})


def refused(request: Request) -> str:
    with pytest.raises(PlanError) as caught:
        best_plan("auto", graphs.chain(8), request)
    return str(caught.value)


def test_what_is_missing_and_where() -> None:
    """8 blocks of 16384 bytes of weights (4 copies with Adam), and 256 bytes per sample of activations each."""
    text = refused(request(0.2 * MEGABYTE, recompute=False, micro_batch_size=32))
    assert "stage 'blocks." in text
    assert "(small), which has 200 kB" in text
    assert "too much" in text
    assert "weights, gradients and the state of the optimizer (adam)" in text


def test_a_module_that_no_device_can_hold() -> None:
    assert "alone takes 65.5 kB" in refused(request(0.05 * MEGABYTE))


def test_a_plan_that_fits_only_by_the_estimate_is_refused() -> None:
    """The search sees the devices of the first pipeline; those of the second have less memory."""
    asked = request(MEGABYTE, 4, num_pipelines=2, max_replicas=1)
    first, second = asked.cluster.devices[:2], request(0.1 * MEGABYTE).cluster.devices
    text = refused(replace(asked, cluster=replace(asked.cluster, devices=first + second)))
    assert "which has 100 kB" in text


def test_another_partitioner_that_finds_one() -> None:
    @register_partitioner("finds nothing")
    def finds_nothing(problem: Problem, control: SearchControl) -> Answer:
        return Answer(draft=None, states=0, notes=("It never looked.",))

    with pytest.raises(PlanError, match=r"'finds nothing' found no plan. It never looked. .*strategy.partitioner=auto"):
        best_plan("finds nothing", graphs.chain(4), request(1e9))
