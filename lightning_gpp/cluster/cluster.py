"""Clusters: devices of any kind, and the links between them, in nested groups such as nodes and racks.

A cluster has devices, numbered from 0, and levels, from the innermost outwards. A level assigns every device to a
group, and has the link that joins the devices of a group:

    device                       0  1  2  3  4  5  6  7
    level 0, link NVLink         0  0  0  0  1  1  1  1     the groups are nodes
    level 1, link InfiniBand     0  0  0  0  0  0  0  0

Devices 2 and 3 communicate over NVLink, 3 and 4 over InfiniBand: the innermost level with both in one group decides. A
link given for a single pair, in one direction, takes precedence over all levels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import inf
from typing import Final

from lightning_gpp.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device: the manufacturer's peaks, and the fractions of them that real operators reach.

    Args:
        name: the kind of device, such as "a100_sxm_80gb".
        memory_bytes: bytes that a process can allocate on it.
        peak_flops: FLOP/s by the name of the data type ("float32", "bfloat16", ...); at least one.
        peak_bytes_per_second: bandwidth of its memory.
        flops_efficiency: fraction of `peak_flops` that large matrix products reach, above 0 and at most 1.
        bytes_efficiency: fraction of both peaks of bytes per second that large copies reach, above 0 and at most 1.
        seconds_per_operator: cost of calling an operator, however small its tensors.
        peak_host_bytes_per_second: bandwidth of its link to its host, in one direction; 0 if unknown.
        source: where the peaks come from.

    Raises:
        ConfigError: a figure is out of its range.
    """

    name: str
    memory_bytes: float
    peak_flops: Mapping[str, float] = field(hash=False)  # a mapping has no hash, but equality compares it
    peak_bytes_per_second: float
    flops_efficiency: float = 0.5
    bytes_efficiency: float = 0.7
    seconds_per_operator: float = 6e-6
    peak_host_bytes_per_second: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", dict(self.peak_flops))
        if not self.peak_flops:
            raise ConfigError(f"Device {self.name!r}: peak_flops is empty; give at least float32: FLOP/s.")
        for dtype, peak in self.peak_flops.items():
            self._require(peak > 0, f"peak_flops[{dtype!r}]", peak, "above 0 FLOP/s")
        self._require(self.memory_bytes > 0, "memory_bytes", self.memory_bytes, "above 0")
        self._require(self.peak_bytes_per_second > 0, "peak_bytes_per_second", self.peak_bytes_per_second, "above 0")
        for name in ("flops_efficiency", "bytes_efficiency"):
            self._require(0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0 and at most 1")
        for name in ("seconds_per_operator", "peak_host_bytes_per_second"):
            self._require(getattr(self, name) >= 0, name, getattr(self, name), "0 or above")

    def _require(self, holds: bool, name: str, value: float, must: str) -> None:
        if not holds:
            raise ConfigError(f"Device {self.name!r}: {name}={value:g} must be {must}.")

    def flops_per_second(self, dtype: str = "float32") -> float:
        """Sustained FLOP/s for `dtype`; if its peak is unknown, those of float32, or of the slowest known type."""
        peak = self.peak_flops.get(dtype, self.peak_flops.get("float32", min(self.peak_flops.values())))
        return peak * self.flops_efficiency

    def part(self, number: int) -> Device:
        """The device as one of so many that share it evenly has it; the memory and the link to the host are whole."""
        peaks = {name: peak / number for name, peak in self.peak_flops.items()}
        return replace(self, peak_flops=peaks, peak_bytes_per_second=self.peak_bytes_per_second / number)

    @property
    def bytes_per_second(self) -> float:
        """Sustained bandwidth of the memory, reading and writing together."""
        return self.peak_bytes_per_second * self.bytes_efficiency

    @property
    def host_bytes_per_second(self) -> float:
        """Sustained bandwidth of copies between the device and pinned memory of its host, in one direction; 0 if
        unknown."""
        return self.peak_host_bytes_per_second * self.bytes_efficiency


SHARED: Final = ("pair", "device", "node")
"""The sharing of a link's bandwidth: by the pair alone, by all messages of a device, or by all messages of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed connection of two devices: latency of a message's first byte, then bandwidth.

    Args:
        latency: seconds.
        bytes_per_second: bandwidth in one direction.
        shared: the users of the bandwidth, one of SHARED: "pair" for a cable of its own, "device" for a port into a
            switch, "node" for a network card of several devices.

    Raises:
        ConfigError: the latency is below 0, the bandwidth is not above 0, or `shared` is not one of SHARED.
    """

    latency: float = 0
    bytes_per_second: float = inf
    shared: str = "pair"

    def __post_init__(self) -> None:
        if self.shared not in SHARED:
            raise ConfigError(f"Link: shared={self.shared!r} must be one of {', '.join(SHARED)}.")
        if not self.latency >= 0:
            raise ConfigError(f"Link: latency={self.latency:g} s must not be below 0.")
        if not self.bytes_per_second > 0:
            raise ConfigError(f"Link: bytes_per_second={self.bytes_per_second:g} must be above 0.")

    def seconds(self, num_bytes: float) -> float:
        """Seconds from the start of sending to the arrival of the last of `num_bytes` bytes."""
        return self.latency + num_bytes / self.bytes_per_second


Port = tuple[str, int, int]
"""A cable ("pair", from, to), or one end of a switch or network card ("out" or "in", level, device or node)."""

_NOTHING_TO_CROSS: Final = Link()


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of links: `groups` has the group of every device, `link` joins the devices of a group."""

    link: Link
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine with `count` devices of one kind, every two of them joined by `link`."""

    device: Device
    count: int
    link: Link = field(default_factory=Link)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"Node of {self.device.name!r}: count={self.count} must be 1 or more.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices and the links between them; every two devices are joined in both directions.

    Args:
        name: name for reports.
        devices: the kind of each device.
        levels: the levels, innermost first.
        links: links of single pairs, (from, to), which take precedence over the levels.

    Raises:
        ConfigError: there is no device, a level or link does not fit the devices, or nothing joins two of them.
    """

    name: str
    devices: tuple[Device, ...]
    levels: tuple[Level, ...]
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)
    kinds: tuple[Device, ...] = field(init=False, repr=False, compare=False)
    """The distinct devices, in the order of their first appearance."""
    _kind_of: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", dict(self.links))
        _check(self)
        kinds = tuple(dict.fromkeys(self.devices))
        number = {kind: index for index, kind in enumerate(kinds)}
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "_kind_of", tuple(number[device] for device in self.devices))

    @classmethod
    def uniform(cls, device: Device, num_devices: int, link: Link | None = None, name: str = "") -> Cluster:
        """`num_devices` devices of one kind in one node, every two joined by `link` (free of cost by default)."""
        level = Level(link=link or Link(), groups=(0,) * num_devices)
        return cls(name=name or f"{num_devices} x {device.name}", devices=(device,) * num_devices, levels=(level,))

    @classmethod
    def of_nodes(
        cls,
        name: str,
        nodes: Sequence[Node],
        between: Link | None = None,
        links: Mapping[tuple[int, int], Link] | None = None,
    ) -> Cluster:
        """Nodes one after another, in the order given.

        Args:
            name: name for reports.
            nodes: of any kinds.
            between: the link between devices of different nodes; not needed if `links` joins them all.
            links: links of single pairs, (from, to), which take precedence over all others.
        """
        if not nodes:
            raise ConfigError(f"Cluster {name!r} has no nodes; give at least one.")
        inside = Level(link=nodes[0].link, groups=tuple(i for i, node in enumerate(nodes) for _ in range(node.count)))
        outside = () if between is None else (Level(link=between, groups=(0,) * len(inside.groups)),)
        return cls(
            name=name,
            devices=tuple(node.device for node in nodes for _ in range(node.count)),
            levels=(inside, *outside),
            links={**dict(_links_unlike_the_first(nodes)), **(links or {})},
        )

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def homogeneous(self) -> bool:
        """True if all devices are of one kind, whatever the links."""
        return len(self.kinds) == 1

    def kind(self, device: int) -> int:
        """The index of a device's kind in `kinds`."""
        return self._kind_of[device]

    def node_of(self, device: int) -> int:
        """The group of a device at the innermost level; without levels every device is a node of its own."""
        return self.levels[0].groups[device] if self.levels else device

    def link(self, src: int, dst: int) -> Link:
        """The link from one device to another; free of cost from a device to itself."""
        if src == dst:
            return _NOTHING_TO_CROSS
        if self.links and (src, dst) in self.links:
            return self.links[src, dst]
        return self.levels[self._level(src, dst)].link

    def _level(self, src: int, dst: int) -> int:
        return next(i for i, level in enumerate(self.levels) if level.groups[src] == level.groups[dst])

    @property
    def contended(self) -> bool:
        """True if messages between different pairs of devices share bandwidth."""
        return any(level.link.shared != "pair" for level in self.levels)

    def ports(self, src: int, dst: int) -> tuple[Port, ...]:
        """The ports that a message from `src` to `dst` occupies while its bytes flow: a cable, or one at either end."""
        if src == dst:
            return ()
        if (src, dst) in self.links:
            return (("pair", src, dst),)
        index = self._level(src, dst)
        shared = self.levels[index].link.shared
        if shared == "pair":
            return (("pair", src, dst),)
        ends = (src, dst) if shared == "device" else (self.node_of(src), self.node_of(dst))
        return ("out", index, ends[0]), ("in", index, ends[1])

    def all_reduce_seconds(self, devices: Sequence[int], num_bytes: float) -> float:
        """Seconds to all-reduce `num_bytes` bytes over the devices, in a ring in the given order; 0 for one device.

        Each of the 2(n - 1) steps sends an n-th of the bytes to the next device, so the slowest link sets the pace.
        Source: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        JPDC 69(2), 2009, section 4.
        """
        num_devices = len(devices)
        if num_devices < 2:
            return 0.0
        ring = zip(devices, [*devices[1:], devices[0]], strict=True)
        return 2 * (num_devices - 1) * max(self.link(*pair).seconds(num_bytes / num_devices) for pair in ring)

    def repeated(self, times: int, memory_parts: int) -> Cluster:
        """The cluster repeated `times` times, with its memory divided: device i is device i modulo `num_devices`.

        It serves to plan several stages per device. The link of a device to itself costs as much as that to a
        neighbour.
        """
        number = self.num_devices
        copies = range(0, times * number, number)
        links = {(a + src, b + dst): link for (src, dst), link in self.links.items() for a in copies for b in copies}
        levels = [replace(level, groups=level.groups * times) for level in self.levels]
        if not any(len(set(level.groups)) == 1 for level in levels):  # nothing joins a device to itself
            levels.append(Level(link=_NOTHING_TO_CROSS, groups=(0,) * (times * number)))
        parts = [replace(device, memory_bytes=device.memory_bytes / memory_parts) for device in self.devices]
        return replace(
            self,
            devices=tuple(parts) * times,
            levels=tuple(levels),
            links=links,
        )

    def shared(self, times: int) -> Cluster:
        """The cluster with every device as `times` devices that share it evenly; for their numbers, see `repeated`."""
        parts = self.repeated(times, times)
        return replace(parts, devices=tuple(device.part(times) for device in parts.devices))

    def with_headroom(self, share: float) -> Cluster:
        """The cluster with this share of every device's memory left out."""
        devices = tuple(replace(device, memory_bytes=device.memory_bytes * (1 - share)) for device in self.devices)
        return replace(self, devices=devices)

    def subset(self, devices: Sequence[int]) -> Cluster:
        """The cluster of these devices alone, renumbered from 0 in the order given; groups keep their numbers.

        Raises:
            ConfigError: a device is not of this cluster, or is named twice.
        """
        if len(set(devices)) < len(devices) or not set(devices) <= set(range(self.num_devices)):
            raise ConfigError(
                f"Devices {list(devices)} of cluster {self.name!r}: each must be named once and be between 0 and "
                f"{self.num_devices - 1}."
            )
        number = {old: new for new, old in enumerate(devices)}
        return replace(
            self,
            devices=tuple(self.devices[device] for device in devices),
            levels=tuple(
                Level(link=level.link, groups=tuple(level.groups[device] for device in devices))
                for level in self.levels
            ),
            links={
                (number[src], number[dst]): link
                for (src, dst), link in self.links.items()
                if src in number and dst in number
            },
        )


def _links_unlike_the_first(nodes: Sequence[Node]) -> Iterator[tuple[tuple[int, int], Link]]:
    """Links of pairs inside nodes that differ from the first node's link, which is that of the level."""
    start = 0
    for node in nodes:
        if node.link != nodes[0].link:
            yield from ((pair, node.link) for pair in permutations(range(start, start + node.count), 2))
        start += node.count


def _check(cluster: Cluster) -> None:
    name, num_devices = cluster.name, cluster.num_devices
    if not num_devices:
        raise ConfigError(f"Cluster {name!r} has no devices; give at least one.")
    for index, level in enumerate(cluster.levels):
        if len(level.groups) != num_devices:
            raise ConfigError(
                f"Cluster {name!r}: levels[{index}].groups has {len(level.groups)} numbers for {num_devices} devices; "
                "give one number for every device."
            )
    for src, dst in cluster.links:
        if src == dst or not (0 <= src < num_devices and 0 <= dst < num_devices):
            raise ConfigError(
                f"Cluster {name!r}: links[{src}, {dst}] must join two different devices between 0 and "
                f"{num_devices - 1}."
            )
    _check_connected(cluster)


def _check_connected(cluster: Cluster) -> None:
    if any(len(set(level.groups)) == 1 for level in cluster.levels):
        return  # avoids the million pairs of a thousand devices
    for src, dst in permutations(range(cluster.num_devices), 2):
        joined = any(level.groups[src] == level.groups[dst] for level in cluster.levels)
        if not joined and (src, dst) not in cluster.links:
            raise ConfigError(
                f"Cluster {cluster.name!r}: no link joins device {src} to device {dst}. "
                "Give `between` (the link of devices of different nodes), or a link of this pair under `links`."
            )
