"""Groups of devices that share the work inside stages (tensor parallelism), as the devices of a cluster.

The members of a group are adjacent devices. A group has the memory and the speed of one of its members, so
that all figures of it are those of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate

from lightning_gpp.cluster.cluster import Cluster, Device, Link
from lightning_gpp.errors import ConfigError

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
    return sum(map(num_members, cluster.devices))


def grouped(cluster: Cluster, members: Sequence[int]) -> Cluster:
    """The cluster whose device i is the next `members[i]` devices; the cluster itself if its first devices are such.

    Raises:
        ConfigError: there are fewer devices.
    """
    if all(num_members(device) == number for device, number in zip(cluster.devices, members, strict=False)):
        return cluster
    base = cluster.base if isinstance(cluster, GroupedCluster) else cluster
    heads = [0, *accumulate(members)]
    if heads.pop() > base.num_devices:
        raise ConfigError(
            f"Groups of {sorted(set(members))} processes need {sum(members)} devices; the cluster {base.name!r} has "
            f"{base.num_devices}."
        )
    devices = tuple(group_at(base, *entry) for entry in zip(heads, members, strict=True))
    return _with_groups(base.subset(heads), devices, base)


def _with_groups(cluster: Cluster, devices: tuple[Device, ...], base: Cluster) -> Cluster:
    known = {field.name: getattr(cluster, field.name) for field in fields(Cluster) if field.init}
    return GroupedCluster(**{**known, "devices": devices, "base": base})


def group_at(cluster: Cluster, head: int, number: int) -> Device:
    """The group of `number` devices from `head` on; behind the last device it has members like those in front."""
    if number == 1:
        return cluster.devices[head]
    return group_of(cluster.devices[head], number, _slowest_link(cluster, head, number))


def group_of(device: Device, number: int, link: Link) -> Device:
    """A group of devices of a kind."""
    known = {field.name: getattr(device, field.name) for field in fields(Device)}
    return device if number == 1 else DeviceGroup(**known, num_members=number, link=link)


def _slowest_link(cluster: Cluster, head: int, number: int) -> Link:
    ring = [*range(head, min(head + number, cluster.num_devices)), head]
    links = [cluster.link(*pair) for pair in zip(ring, ring[1:], strict=False)]
    return max(links, key=lambda link: link.seconds(PROBE_BYTES))


@lru_cache(maxsize=1024)
def link_of_groups(link: Link, senders: int, receivers: int) -> Link:
    """The link from one group to another, for one of its messages.

    Every receiver gets a copy, number k from sender k modulo `senders`. Copies share the port of a sender's device, or
    that of its node.
    """
    copies = {"pair": 1, "device": -(-receivers // senders), "node": receivers}[link.shared]
    return link if copies == 1 else replace(link, bytes_per_second=link.bytes_per_second / copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedCluster(Cluster):
    """A cluster with groups among its devices. Messages and sums between groups are those of all members.

    `base`: the devices of which the groups consist.
    """

    base: Cluster

    def link(self, src: int, dst: int) -> Link:
        """See `Cluster`; the bandwidth is that for a message of which each member of `dst` gets a copy."""
        link = Cluster.link(self, src, dst)
        return link_of_groups(link, num_members(self.devices[src]), num_members(self.devices[dst]))

    def subset(self, devices: Sequence[int]) -> Cluster:
        """See `Cluster`."""
        members = [num_members(device) for device in self.devices]
        starts = [0, *accumulate(members)]
        inside = [number for device in devices for number in range(starts[device], starts[device + 1])]
        return grouped(self.base.subset(inside), [members[device] for device in devices])
