from __future__ import annotations

import pytest

from lightning_gpp.cluster import CLUSTERS, DEVICES, Cluster, preset_cluster
from lightning_gpp.errors import ConfigError


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_every_device_has_a_source_and_plausible_peaks(device: object) -> None:
    assert device.source
    peaks = device.peak_flops
    assert peaks["float64"] < peaks["float32"] < max(peaks.values())
    assert 2 < peaks["float32"] / device.peak_bytes_per_second < 110  # FLOP per byte: catches a slip of three digits


@pytest.mark.parametrize("name", CLUSTERS)
def test_links_within_a_node_are_better_than_between_nodes(name: str) -> None:
    cluster = preset_cluster(name, num_nodes=3)
    count = cluster.num_devices // 3
    inside, between = cluster.link(0, count - 1), cluster.link(count - 1, count)
    assert cluster.name == name
    assert cluster.homogeneous
    assert [cluster.node_of(device) for device in (0, count, 3 * count - 1)] == [0, 1, 2]
    assert inside.bytes_per_second > between.bytes_per_second
    assert inside.latency < between.latency


def test_only_the_first_devices() -> None:
    cluster = preset_cluster("dgx_h100", num_nodes=2, num_devices=10)
    assert [cluster.node_of(device) for device in range(10)] == [0] * 8 + [1] * 2


def test_a_host_has_as_many_processes_as_asked_for() -> None:
    def nodes(cluster: Cluster) -> list[int]:
        return [cluster.node_of(device) for device in range(cluster.num_devices)]

    assert nodes(preset_cluster("cpu_host", num_devices=6)) == [0] * 6
    assert nodes(preset_cluster("cpu_host", num_nodes=2, num_devices=5)) == [0, 0, 0, 1, 1]


def test_a_thousand_devices_take_no_time() -> None:
    assert preset_cluster("dgx_h100", num_nodes=128).link(0, 1023).bytes_per_second == 50e9


def test_what_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.preset='dgx_h10': .* Did you mean dgx_h100 or .*There are: cpu_"):
        preset_cluster("dgx_h10")
    with pytest.raises(ConfigError, match=r"cluster\.num_nodes=0 must be 1 or more"):
        preset_cluster("summit", num_nodes=0)
    with pytest.raises(ConfigError, match=r"cluster\.num_devices=0 must be 1 or more"):
        preset_cluster("summit", num_devices=0)
    with pytest.raises(ConfigError, match=r"cluster\.num_devices=5, but 'summit' has 4 devices. Raise cluster.num_n"):
        preset_cluster("summit", num_devices=5)
