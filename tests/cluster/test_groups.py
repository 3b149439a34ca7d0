"""Groups of devices as the devices of a cluster: where they are, what joins them, and how long messages take."""

from __future__ import annotations

import pytest

from lightning_gpp.cluster import Cluster, Device, Link, Node, preset_cluster
from lightning_gpp.cluster.groups import DeviceGroup, grouped, num_members, num_processes

NODES = preset_cluster("dgx_h100", 2)
DEVICE = Device(name="test", memory_bytes=1e9, peak_flops={"float32": 1e9}, peak_bytes_per_second=1e9)


def test_groups_are_where_the_first_of_their_members_is() -> None:
    found = grouped(NODES.subset([0, 1, 2, 8, 9, 10]), 3)
    assert [found.node_of(device) for device in range(2)] == [0, 1]
    assert [num_members(device) for device in found.devices] == [3, 3]
    assert num_processes(found) == 6
    assert grouped(NODES.subset(range(7)), 2).num_devices == 3


def test_devices_that_are_such_groups_already_stay() -> None:
    assert grouped(NODES, 1) is NODES
    pairs = grouped(NODES, 2)
    assert grouped(pairs, 2) is pairs
    assert num_processes(pairs.subset([3, 0])) == 4


def test_headroom_is_that_of_members() -> None:
    assert grouped(NODES, 2).with_headroom(0.5).devices[0].memory_bytes == NODES.devices[0].memory_bytes / 2


def test_members_add_up_over_their_slowest_link() -> None:
    near, far = Link(latency=1e-6, bytes_per_second=1e9), Link(latency=1e-3, bytes_per_second=1e6)
    cluster = Cluster.of_nodes("two", [Node(device=DEVICE, count=3, link=near)] * 2, far)
    inside, across, _ = grouped(cluster, 2).devices
    assert isinstance(inside, DeviceGroup)
    assert isinstance(across, DeviceGroup)
    assert inside.all_reduce_seconds(1000) == pytest.approx(2 * (1e-6 + 500 / 1e9))
    assert across.all_reduce_seconds(1000) == pytest.approx(2 * (1e-3 + 500 / 1e6))


@pytest.mark.parametrize(("shared", "copies"), [("pair", 1), ("device", 1), ("node", 4)])
def test_every_member_gets_a_copy(shared: str, copies: int) -> None:
    """Each comes from a device of its own; all of them go through the card of a node."""
    link = Link(latency=1e-6, bytes_per_second=1e9, shared=shared)
    cluster = grouped(Cluster.uniform(DEVICE, 8, link), 4)
    assert cluster.link(0, 1).seconds(1000) == pytest.approx(1e-6 + copies * 1000 / 1e9)
