"""Reads clusters from YAML: a preset by its name, or nodes and links written out.

    preset: dgx_h100              name: lab
    num_nodes: 4                  nodes:
                                    - {device: a100_sxm_80gb, count: 8, link: {latency: 15e-6, bytes_per_second: 300e9}}
                                    - {device: t4, count: 4, num: 2, link: {bytes_per_second: 15.75e9}}
                                  between: {latency: 20e-6, bytes_per_second: 25e9}
                                  links:
                                    - {devices: [0, 8], bytes_per_second: 1e9}

A device is the name of a preset, or a mapping with the fields of `Device`; with `like`, a preset's name, only those
that differ are needed. `num` is the number of such nodes, `num_nodes` repeats the list of nodes. With `count: null` a
node has as many devices as `num_devices` needs, otherwise that keeps only the first devices. A link under `links` is
for both directions, unless `one_way: true`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from annotated_types import Ge, MinLen

from lightning_gpp.cluster.cluster import Cluster, Device, Link, Node
from lightning_gpp.cluster.presets import DEVICES, MAX_DEVICES, first, one_of, preset_cluster
from lightning_gpp.errors import ConfigError
from lightning_gpp.files import read_yaml, with_numbers

Settings: TypeAlias = Mapping[str, Any]

Count = Annotated[int, Ge(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    """The keys of a cluster that is a preset."""

    preset: str
    num_nodes: Count | None = None
    num_devices: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _WrittenOut:
    """The keys of a cluster that is written out."""

    nodes: Annotated[tuple[Any, ...], MinLen(1)]
    name: str = "cluster"
    between: Any = None
    links: tuple[Any, ...] | None = None
    num_nodes: Count | None = None
    num_devices: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Nodes:
    """The keys of nodes of one kind."""

    device: Any
    count: Count | None = 1
    link: Any = None
    num: Count = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _PairLink(Link):
    """The keys of a link between two devices."""

    devices: tuple[int, int]
    one_way: bool = False


def load_cluster(path: str | Path) -> Cluster:
    """The cluster that a YAML file describes. Without a `name` it gets the name of the file.

    Raises:
        ConfigError: the file cannot be read, or its settings are wrong (see `cluster_of`).
    """
    settings = read_yaml(path, error=ConfigError)
    if settings is None:
        raise ConfigError(f"{path}: the file is empty. Give `preset` or `nodes`.")
    with _at(str(path)):
        unnamed = isinstance(settings, Mapping) and "preset" not in settings
        return cluster_of({"name": Path(path).stem, **settings} if unnamed else settings)


def cluster_of(settings: Settings) -> Cluster:
    """The cluster that these settings describe (see the top of this file).

    Raises:
        ConfigError: names the setting, as `cluster.<key>`, its value and the allowed ones.
    """
    settings = with_numbers(settings)
    if isinstance(settings, Mapping) and "preset" in settings:
        known = _checked(_Preset, settings, "cluster")
        return preset_cluster(known.preset, known.num_nodes or 1, known.num_devices)
    if isinstance(settings, Mapping) and "nodes" not in settings:
        given = f" There is only {', '.join(map(str, settings))}." if settings else ""
        raise ConfigError(f"cluster: give `preset` (the name of a cluster) or `nodes` (a list of nodes).{given}")
    content = _checked(_WrittenOut, settings, "cluster")
    cluster = _written_out(content)
    return cluster if content.num_devices is None else first(cluster, content.num_devices)


def _checked(kind: Any, settings: object, key: str, remedy: str = "") -> Any:
    from lightning_gpp.validation import validated

    return validated(kind, settings, error=ConfigError, key=key, remedy=remedy)


def _written_out(content: _WrittenOut) -> Cluster:
    num_nodes = content.num_nodes or 1
    usual = None if content.num_devices is None else -(-content.num_devices // num_nodes)
    nodes = [_nodes(entry, f"cluster.nodes[{index}]", usual) for index, entry in enumerate(content.nodes)]
    num_devices = num_nodes * sum(node.count * num for node, num in nodes)
    if num_devices > MAX_DEVICES:
        raise ConfigError(f"cluster.nodes: these are {num_devices} devices; a cluster has at most {MAX_DEVICES}.")
    repeated = [node for node, num in nodes for _ in range(num)] * num_nodes
    between = None if content.between is None else _checked(Link, content.between, "cluster.between")
    links = dict(_links(content.links or (), num_devices))
    with _at("cluster.nodes"):
        return Cluster.of_nodes(content.name, repeated, between, links)


def _nodes(settings: object, key: str, usual: int | None) -> tuple[Node, int]:
    """A node, with the usual number of devices if it has no other, and the number of such nodes."""
    content: _Nodes = _checked(_Nodes, settings, key)
    count = content.count or usual
    if count is None:
        raise ConfigError(f"{key}.count is null: a node has as many devices as cluster.num_devices needs. Give one.")
    if count > 1 and content.link is None:
        raise ConfigError(f"{key}.link is missing: give the link that joins the {count} devices of this node.")
    link = Link() if content.link is None else _checked(Link, content.link, f"{key}.link")
    return Node(device=_device(content.device, f"{key}.device"), count=count, link=link), content.num


def _device(settings: Any, key: str) -> Device:
    if isinstance(settings, str):
        return one_of(DEVICES, settings, key, "device")
    if isinstance(settings, Mapping) and "like" in settings:
        like = one_of(DEVICES, settings["like"], f"{key}.like", "device")
        settings = {**asdict(like), **{name: value for name, value in settings.items() if name != "like"}}
    device: Device = _checked(Device, settings, key, "A preset gives the figures that are left out: `like: t4`.")
    return device


def _links(entries: Sequence[object], num_devices: int) -> Iterator[tuple[tuple[int, int], Link]]:
    for index, entry in enumerate(entries):
        key = f"cluster.links[{index}]"
        content: _PairLink = _checked(_PairLink, entry, key)
        link = Link(**{field.name: getattr(content, field.name) for field in fields(Link)})
        src, dst = content.devices
        if src == dst or not all(0 <= device < num_devices for device in content.devices):
            raise ConfigError(
                f"{key}.devices is {list(content.devices)}; it must be two different devices between 0 and "
                f"{num_devices - 1}."
            )
        yield (src, dst), link
        if not content.one_way:
            yield (dst, src), link


@contextmanager
def _at(key: str) -> Iterator[None]:
    """Prefix the messages of errors that do not know the key with it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
