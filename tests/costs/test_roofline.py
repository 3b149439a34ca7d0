from math import inf

import pytest

from lightning_gpp.costs.roofline import CPU, H100, LOOPBACK, NVLINK, Device, Link, link_of, operator_seconds, through
from lightning_gpp.errors import ConfigError
from tests.planning.graphs import Builder

DEVICE = Device(name="test", flops_per_second=1e6, bytes_per_second=1e6, seconds_per_operator=0.25)


def test_arithmetic_bound() -> None:
    build = Builder()
    name = build.call("a", build.data(width=1), width=1, flops=3e6)
    assert operator_seconds(build.graph, build.graph[name], 2, DEVICE) == pytest.approx(0.25 + 6)


def test_memory_bound_counts_inputs_outputs_and_parameters() -> None:
    build = Builder()
    name = build.linear("a", build.data(width=100), width=100, work=0)
    build.graph.parameter_bytes["a.weight"] = 40_000
    moved = 4 * 100 * 5 + 4 * 100 * 5 + 40_000
    assert operator_seconds(build.graph, build.graph[name], 5, DEVICE) == pytest.approx(0.25 + moved / 1e6)


def test_data_cost_nothing() -> None:
    build = Builder()
    name = build.data()
    assert operator_seconds(build.graph, build.graph[name], 5, DEVICE) == 0


def test_affine_through_two_points() -> None:
    line = through(3.0, 7.0, 5)
    assert (line.at(1), line.at(5)) == (3.0, 7.0)


def test_links() -> None:
    assert Link(latency=1, bytes_per_second=100).seconds(50) == 1.5
    assert Link().seconds(1e9) == 0
    assert link_of(CPU) is LOOPBACK
    assert link_of(H100) is NVLINK


def test_devices_and_links_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="Device 'x': flops_per_second=0"):
        Device(name="x", flops_per_second=0, bytes_per_second=1, seconds_per_operator=0)
    with pytest.raises(ConfigError, match=r"Link: latency=-1 s must not be below 0"):
        Link(latency=-1, bytes_per_second=inf)
