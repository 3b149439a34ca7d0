from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_gpp.cluster import CLUSTERS, DEVICES, Link, cluster_of, load_cluster, preset_cluster
from lightning_gpp.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs" / "cluster"

LAB = yaml.safe_load("""
name: lab
nodes:
  - {device: a100_sxm_80gb, count: 8, link: {latency: 15e-6, bytes_per_second: 300e9}}
  - {device: t4, count: 4, num: 2, link: {bytes_per_second: 15.75e9}}
  - device: {like: l4, name: tuned, flops_efficiency: 0.7}
between: {latency: 20e-6, bytes_per_second: 25e9}
links:
  - {devices: [0, 8], bytes_per_second: 1e9}
  - {devices: [1, 9], bytes_per_second: 2e9, one_way: true}
""")


@pytest.mark.parametrize("name", CLUSTERS)
def test_files_are_read_like_presets(name: str) -> None:
    assert load_cluster(CONFIGS / f"{name}.yaml") == preset_cluster(name)
    settings = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    assert cluster_of({**settings, "num_nodes": 2, "num_devices": 5}) == preset_cluster(name, 2, 5)


def test_a_node_has_as_many_devices_as_are_needed_or_a_number() -> None:
    settings = yaml.safe_load((CONFIGS / "cpu_host.yaml").read_text())
    assert [len(cluster_of({**settings, "num_devices": number}).devices) for number in (1, 7)] == [1, 7]
    with pytest.raises(ConfigError, match=r"cluster.nodes\[0\].count is null: .* cluster.num_devices"):
        cluster_of({**settings, "num_devices": None})


def test_a_cluster_of_many_kinds() -> None:
    lab = cluster_of(LAB)
    assert (lab.name, lab.num_devices) == ("lab", 17)
    assert [kind.name for kind in lab.kinds] == ["a100_sxm_80gb", "t4", "tuned"]
    assert [lab.node_of(device) for device in (7, 8, 12, 16)] == [0, 1, 2, 3]
    assert lab.devices[16].flops_efficiency == 0.7
    assert lab.devices[16].peak_flops == DEVICES["l4"].peak_flops
    assert lab.link(0, 7) == Link(latency=15e-6, bytes_per_second=300e9)
    assert lab.link(14, 15) == Link(bytes_per_second=15.75e9)
    assert lab.link(8, 0) == lab.link(0, 8) == Link(bytes_per_second=1e9)
    assert lab.link(1, 9) == Link(bytes_per_second=2e9)
    assert lab.link(9, 1) == lab.link(8, 12) == Link(latency=20e-6, bytes_per_second=25e9)


def test_links_alone_can_join_the_nodes() -> None:
    settings = {"nodes": [{"device": "t4"}, {"device": "l4"}], "links": [{"devices": [0, 1], "latency": 1}]}
    assert cluster_of(settings).link(1, 0).latency == 1
    settings["nodes"].append({"device": "t4"})
    with pytest.raises(ConfigError, match=r"cluster\.nodes: .* no link joins device 0 to device 2\. Give `between`"):
        cluster_of(settings)


def test_a_file_names_its_cluster(tmp_path: Path) -> None:
    path = tmp_path / "desk.yaml"
    path.write_text("nodes: [{device: l4}]")
    assert load_cluster(path).name == "desk"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nodes: [", "is not YAML that can be read: .* line 2"),
        ("", r"desk\.yaml: the file is empty\. Give `preset`"),
        ("- 1", r"desk\.yaml: cluster is \[1\]; it must be a mapping"),
        ("preset: nothing", r"desk\.yaml: cluster\.preset='nothing'"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "desk.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_cluster(path)


DEVICE = {"name": "x", "memory_bytes": 1e9, "peak_flops": {"float32": 1e12}, "peak_bytes_per_second": 1e9}

# where in LAB, what is put there, and the message
MISTAKES: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("nodes", 1, "device"), "t5", "cluster.nodes[1].device='t5': there is no such device. Did you mean t4"),
    (("nodes", 1, "device"), {**DEVICE, "memory": 1}, "cluster.nodes[1].device.memory is not a key. Did you mean"),
    (("nodes", 1, "device"), {**DEVICE, "memory_bytes": -1}, "cluster.nodes[1].device: Device 'x': memory_bytes=-1 mu"),
    (("nodes", 1, "count"), 10**9, "cluster.nodes: these are 2000000009 devices; a cluster has at most 131072"),
    (
        ("nodes", 1, "link"),
        None,
        "cluster.nodes[1].link is missing: give the link that joins the 4 devices of this node",
    ),
    (("nodes", 1, "link"), {"latency": -1}, "cluster.nodes[1].link: Link: latency=-1 s must not be below 0"),
    (("between",), None, "cluster.nodes: Cluster 'lab': no link joins device 0 to device 9. Give `between`"),
    (
        ("links", 1, "devices"),
        [0, 17],
        "cluster.links[1].devices is [0, 17]; it must be two different devices between 0 and",
    ),
    (("num_devices",), 99, "cluster.num_devices=99, but 'lab' has 17 devices"),
    (("node",), [], "cluster.node is not a key. Did you mean nodes"),
    (("preset",), "summit", "cluster.name is not a key. There are: num_devices, num_nodes, preset"),
]


@pytest.mark.parametrize(("where", "value", "message"), MISTAKES, ids=[mistake[2][:50] for mistake in MISTAKES])
def test_mistakes_are_named(where: tuple[str | int, ...], value: object, message: str) -> None:
    settings = copy.deepcopy(LAB)
    target = settings
    for key in where[:-1]:
        target = target[key]
    target[where[-1]] = value
    with pytest.raises(ConfigError, match=re.escape(message)):
        cluster_of(settings)


def test_nothing_to_go_by() -> None:
    with pytest.raises(ConfigError, match="cluster: give `preset` .* or `nodes`"):
        cluster_of({"num_nodes": 2})
