"""Groups of devices as the devices of a cluster: where they are, what joins them, and how long messages take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gpp.cluster import Cluster, Device, Link, Node, preset_cluster
from lightning_gpp.cluster.groups import (
    grouped,
    link_of_groups,
    num_members,
    num_processes,
)
from lightning_gpp.errors import ConfigError

NODES = preset_cluster("dgx_h100", 2)
DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e9)


def members_of(cluster: Cluster) -> list[int]:
    return [num_members(device) for device in cluster.devices]


def test_groups_are_where_the_first_of_their_members_is() -> None:
    found = grouped(NODES.subset([0, 1, 2, 8, 9, 10]), [1, 2, 1, 2])
    assert [found.node_of(device) for device in range(4)] == [0, 0, 1, 1]
    assert members_of(found) == [1, 2, 1, 2]
    assert found.devices[0] == NODES.devices[0]
    assert num_processes(found) == 6
    split = grouped(NODES.subset([6, 7, 8]), [2, 1])
    assert [split.node_of(device) for device in (0, 1)] == [0, 1]


def test_devices_that_are_such_groups_already_stay() -> None:
    assert grouped(NODES, [1, 1]) is NODES
    pairs = grouped(NODES, [2] * 8)
    assert grouped(pairs, [2] * 4) is pairs
    assert members_of(grouped(pairs, [2, 1, 1])) == [2, 1, 1]


def test_a_subset_of_groups_has_all_their_members() -> None:
    found = grouped(NODES, [2, 1, 1, 4]).subset([3, 0])
    assert members_of(found) == [4, 2]
    assert members_of(grouped(found, [2, 2, 2])) == [2, 2, 2]


def test_headroom_is_that_of_members() -> None:
    assert grouped(NODES, [2]).with_headroom(0.5).devices[0].memory_bytes == NODES.devices[0].memory_bytes / 2


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Groups of \[2\] processes need 4 devices; the cluster '3 x test' has 3"):
        grouped(Cluster.uniform(DEVICE, 3), [2, 2])


def test_members_add_up_over_their_slowest_link() -> None:
    near, far = Link(latency=1e-6, bytes_per_second=1e9), Link(latency=1e-3, bytes_per_second=1e6)
    cluster = Cluster.of_nodes("two", [Node(device=DEVICE, count=2, link=near)] * 2, far)
    inside, across = grouped(cluster, [2, 2]).devices[0], grouped(cluster, [1, 2, 1]).devices[1]
    assert inside.all_reduce_seconds(1000) == pytest.approx(2 * (1e-6 + 500 / 1e9))
    assert across.all_reduce_seconds(1000) == pytest.approx(2 * (1e-3 + 500 / 1e6))


@pytest.mark.parametrize(
    ("shared", "senders", "receivers", "copies"),
    [("pair", 1, 4, 1), ("device", 4, 4, 1), ("device", 1, 4, 4), ("device", 4, 1, 1), ("node", 2, 4, 4)],
)
def test_every_receiver_gets_a_copy(shared: str, senders: int, receivers: int, copies: int) -> None:
    """A sender's port has one copy for each of its receivers, the card of a node all of them."""
    link = Link(latency=1e-6, bytes_per_second=1e9, shared=shared)
    assert link_of_groups(link, senders, receivers) == replace(link, bytes_per_second=1e9 / copies)
    cluster = grouped(Cluster.uniform(DEVICE, 8, link), [senders, receivers])
    assert cluster.link(0, 1).seconds(1000) == pytest.approx(1e-6 + copies * 1000 / 1e9)
