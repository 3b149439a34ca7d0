"""Groups of devices that share the work inside stages (tensor parallelism), as the devices of a cluster.

The members of a group are adjacent devices. A group has the memory and the speed of one of its members, so
that all figures of it are those of one process.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from lightning_gpp.cluster.cluster import Cluster, Device, Link

PROBE_BYTES = 1e6
"""The message by which links are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroup(Device):
    """Several devices of one kind that share the work of a stage. `link`: the slowest one between neighbours."""

    num_members: int
    link: Link

    def all_reduce_seconds(self, num_bytes: float) -> float:
        """Seconds in which the members add up values of this size, in a ring (see `Cluster.all_reduce_seconds`)."""
        return 2 * (self.num_members - 1) * self.link.seconds(num_bytes / self.num_members)


def num_members(device: Device) -> int:
    """Number of processes of a device of a plan."""
    return device.num_members if isinstance(device, DeviceGroup) else 1


def num_processes(cluster: Cluster) -> int:
    """Number of devices of a cluster, with all members of groups."""
    return cluster.num_devices * num_members(cluster.devices[0])


def grouped(cluster: Cluster, number: int) -> Cluster:
    """The cluster of groups of `number` adjacent devices; the cluster itself if its devices are such.

    Devices that are left over are in no group. A message between groups is one of each member to the member with the
    same number; those of a node share its port.
    """
    if num_members(cluster.devices[0]) == number:
        return cluster
    heads = range(0, cluster.num_devices - number + 1, number)
    firsts = cluster.subset(heads)
    return replace(
        firsts,
        devices=tuple(_group(cluster, head, number) for head in heads),
        levels=tuple(replace(level, link=_between_groups(level.link, number)) for level in firsts.levels),
        links={pair: _between_groups(link, number) for pair, link in firsts.links.items()},
    )


def _group(cluster: Cluster, head: int, number: int) -> DeviceGroup:
    device, ring = cluster.devices[head], [*range(head, head + number), head]
    links = [cluster.link(*pair) for pair in zip(ring, ring[1:], strict=False)]
    slowest = max(links, key=lambda link: link.seconds(PROBE_BYTES))
    return DeviceGroup(
        **{field.name: getattr(device, field.name) for field in fields(Device)}, num_members=number, link=slowest
    )


def _between_groups(link: Link, number: int) -> Link:
    """The link for the message of one of `number` members."""
    return replace(link, bytes_per_second=link.bytes_per_second / number) if link.shared == "node" else link
