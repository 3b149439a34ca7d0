"""Clusters from YAML: a preset by its name, or nodes and links written out.

    preset: dgx_h100              name: lab
    num_nodes: 4                  nodes:
                                    - {device: a100_sxm_80gb, count: 8, link: {latency: 15e-6, bytes_per_second: 300e9}}
                                    - {device: t4, count: 4, num: 2, link: {bytes_per_second: 15.75e9}}
                                  between: {latency: 20e-6, bytes_per_second: 25e9}
                                  links:
                                    - {devices: [0, 8], bytes_per_second: 1e9}

A device is the name of a preset, or a mapping with the fields of `Device`; with `like`, a preset's name, it gives only
the fields that differ. `num` is the number of such nodes, `num_nodes` repeats the list of nodes. A link under `links`
holds in both directions, unless `one_way: true`. `num_devices` keeps only the first devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final, TypeAlias

import yaml

from lightning_gpp.cluster.cluster import Cluster, Node
from lightning_gpp.cluster.device import Device
from lightning_gpp.cluster.link import Link
from lightning_gpp.cluster.names import check_keys, one_of
from lightning_gpp.cluster.presets import DEVICES, check_counts, first, preset_cluster
from lightning_gpp.errors import ConfigError

Settings: TypeAlias = Mapping[str, Any]

_OF_PRESET: Final = ("preset", "num_nodes", "num_devices")
_WRITTEN_OUT: Final = ("name", "nodes", "between", "links", "num_nodes", "num_devices")
_OF_NODE: Final = ("device", "count", "link", "num")
_OF_LINK: Final = ("latency", "bytes_per_second", "shared")
_OF_DEVICE: Final = tuple(field.name for field in fields(Device))
_TEXTS: Final = ("name", "source")


def load_cluster(path: str | Path) -> Cluster:
    """The cluster that a YAML file describes. Without a `name` it gets the name of the file.

    Raises:
        ConfigError: the file cannot be read, or its settings are wrong (see `cluster_of`).
    """
    try:
        settings = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cluster: {path} cannot be read as YAML: {error}") from error
    with _at(str(path)):
        settings = _mapping(settings, "cluster")
        named = settings if "preset" in settings else {"name": Path(path).stem, **settings}
        return cluster_of(named)


def cluster_of(settings: Settings) -> Cluster:
    """The cluster that these settings describe (see the top of this file).

    Raises:
        ConfigError: a setting is wrong. Names it as `cluster.<key>`, with its value and the allowed ones.
    """
    settings = _mapping(settings, "cluster")
    if "preset" not in settings and "nodes" not in settings:
        raise ConfigError("cluster: give `preset` (the name of a cluster) or `nodes` (a list of nodes).")
    check_keys(settings, _OF_PRESET if "preset" in settings else _WRITTEN_OUT, "cluster")
    num_nodes = 1 if settings.get("num_nodes") is None else _integer(settings["num_nodes"], "cluster.num_nodes")
    num_devices = settings.get("num_devices")
    num_devices = None if num_devices is None else _integer(num_devices, "cluster.num_devices")
    check_counts(num_nodes, num_devices)
    if "preset" in settings:
        return preset_cluster(settings["preset"], num_nodes, num_devices)
    cluster = _written_out(settings, num_nodes)
    return cluster if num_devices is None else first(cluster, num_devices)


def _written_out(settings: Settings, num_nodes: int) -> Cluster:
    entries = _sequence(settings["nodes"], "cluster.nodes")
    if not entries:
        raise ConfigError("cluster.nodes is empty; give at least one node.")
    nodes = [node for index, entry in enumerate(entries) for node in _nodes(entry, f"cluster.nodes[{index}]")]
    nodes = nodes * num_nodes
    between = _optional_link(settings.get("between"), "cluster.between")
    links = dict(_links(settings.get("links") or (), sum(node.count for node in nodes)))
    with _at("cluster.nodes"):
        return Cluster.of_nodes(str(settings.get("name", "cluster")), nodes, between, links)


def _nodes(entry: object, key: str) -> list[Node]:
    settings = _mapping(entry, key)
    check_keys(settings, _OF_NODE, key)
    if "device" not in settings:
        raise ConfigError(f"{key}.device is missing: give the name of a device, or its figures.")
    num = _integer(settings.get("num", 1), f"{key}.num")
    if num < 1:
        raise ConfigError(f"{key}.num={num} must be 1 or more.")
    device = _device(settings["device"], f"{key}.device")
    link = _optional_link(settings.get("link"), f"{key}.link") or Link()
    count = _integer(settings.get("count", 1), f"{key}.count")
    if count > 1 and settings.get("link") is None:
        raise ConfigError(f"{key}.link is missing: give the link that joins the {count} devices of this node.")
    with _at(f"{key}.count"):
        return [Node(device=device, count=count, link=link)] * num


def _device(value: object, key: str) -> Device:
    if isinstance(value, str):
        return one_of(DEVICES, value, key, "device")
    settings = _mapping(value, key)
    check_keys(settings, (*_OF_DEVICE, "like"), key)
    like = one_of(DEVICES, settings["like"], f"{key}.like", "device") if "like" in settings else None
    given = {name: _figure(name, value, f"{key}.{name}") for name, value in settings.items() if name != "like"}
    figures = {**(asdict(like) if like else {}), **given}
    missing = [name for name in ("name", "memory_bytes", "peak_flops", "peak_bytes_per_second") if name not in figures]
    if missing:
        raise ConfigError(f"{key}.{missing[0]} is missing: give it, or a preset to take it from (`like`).")
    with _at(key):
        return Device(**figures)


def _figure(name: str, value: object, key: str) -> object:
    if name in _TEXTS:
        return str(value)
    if name == "peak_flops":
        return {str(dtype): _number(peak, f"{key}.{dtype}") for dtype, peak in _mapping(value, key).items()}
    return _number(value, key)


def _optional_link(value: object, key: str) -> Link | None:
    return None if value is None else _link(_mapping(value, key), key)


def _link(settings: Settings, key: str) -> Link:
    check_keys(settings, _OF_LINK, key)
    with _at(key):
        figures = {name: _number(value, f"{key}.{name}") for name, value in settings.items() if name != "shared"}
        return Link(**figures, shared=str(settings.get("shared", "pair")))


def _links(entries: object, num_devices: int) -> Iterator[tuple[tuple[int, int], Link]]:
    for index, entry in enumerate(_sequence(entries, "cluster.links")):
        key = f"cluster.links[{index}]"
        settings = dict(_mapping(entry, key))
        check_keys(settings, (*_OF_LINK, "devices", "one_way"), key)
        one_way = settings.pop("one_way", False)
        if not isinstance(one_way, bool):
            raise ConfigError(f"{key}.one_way={one_way!r} must be true or false.")
        src, dst = _pair(settings.pop("devices", None), num_devices, f"{key}.devices")
        link = _link(settings, key)
        yield (src, dst), link
        if not one_way:
            yield (dst, src), link


def _pair(value: object, num_devices: int, key: str) -> tuple[int, int]:
    pair = [_integer(device, key) for device in _sequence(value, key)]
    if len(pair) != 2 or pair[0] == pair[1] or not all(0 <= device < num_devices for device in pair):
        raise ConfigError(f"{key}={pair} must be two different devices between 0 and {num_devices - 1}.")
    return pair[0], pair[1]


def _mapping(value: object, key: str) -> Settings:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a mapping of settings, not {value!r}.")
    return value


def _sequence(value: object, key: str) -> Sequence[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{key} must be a list, not {value!r}.")
    return value


def _integer(value: object, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}={value!r} must be a whole number.")
    return value


def _number(value: object, key: str) -> float:
    """A number, also one in text: YAML 1.1 reads 1e9 as text."""
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
    raise ConfigError(f"{key}={value!r} must be a number.")


@contextmanager
def _at(key: str) -> Iterator[None]:
    """Inside, a ConfigError gets the key in front of its message."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
