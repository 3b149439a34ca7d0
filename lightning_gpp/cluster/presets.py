"""Well-known clusters and devices by name: those of `configs/cluster`, which have every figure with its source.

Peaks are the manufacturer's: dense (without structured sparsity), tensor cores for float16 and bfloat16. "float32" is
without tensor cores, as PyTorch multiplies by default; where TF32 is allowed, "tf32" is its peak. "float64" is without
tensor cores. Data types without hardware support are left out. Memory is the nominal decimal size, a few per cent
below what the driver reports, which leaves some for the CUDA context and fragmentation. Bandwidths are peaks of one
direction; GPUs behind one switch of PCIe share its bandwidth to the host, which a `Device` does not say.

Assumptions, not published figures: the efficiencies (half of the arithmetic, 70 % of the bandwidths to memory and
host), 6 microseconds to call an operator, and latencies (of starting an NCCL send). Measurements
(`lightning_gpp.measure.calibrate`) replace the efficiencies and the call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

from lightning_gpp.cluster.cluster import Cluster, Device, Link, Node
from lightning_gpp.config_files import config_folder
from lightning_gpp.errors import ConfigError, did_you_mean
from lightning_gpp.files import read_yaml

Named = TypeVar("Named")


def _written_in(path: Path) -> Cluster:
    content = read_yaml(path, error=ConfigError)
    (node,) = content["nodes"]
    count = node["count"] or content["num_devices"]
    machine = Node(device=Device(**node["device"]), count=count, link=Link(**node["link"]))
    return Cluster.of_nodes(content["name"], [machine], Link(**content["between"]))


CLUSTERS: Final = {path.stem: _written_in(path) for path in sorted((config_folder() / "cluster").glob("*.yaml"))}
"""Clusters by name, each of one node; their second level is the link between several."""

HOST: Final = "cpu_host"
"""The cluster whose nodes have as many devices (processes) as are asked for."""


def _devices() -> dict[str, Device]:
    """The devices of the clusters, and others of their kinds."""
    known = {device.name: device for cluster in CLUSTERS.values() for device in cluster.kinds}
    v100 = replace(known["v100_sxm2_16gb"], name="v100_sxm2_32gb", memory_bytes=32e9)
    a100 = replace(
        known["a100_sxm_80gb"],
        name="a100_sxm_40gb",
        memory_bytes=40e9,
        peak_bytes_per_second=1555e9,
        source="NVIDIA A100 Tensor Core GPU datasheet, 40GB SXM",
    )
    tensor_cores = {"bfloat16": 121e12, "float16": 121e12, "tf32": 60e12}  # half of the sheet's figures with sparsity
    l4 = Device(
        name="l4",
        memory_bytes=24e9,
        peak_flops={**tensor_cores, "float32": 30.3e12, "float64": 30.3e12 / 64},  # 1/64: Ada architecture whitepaper
        peak_bytes_per_second=300e9,
        peak_host_bytes_per_second=31.5e9,
        source="NVIDIA L4 Tensor Core GPU datasheet",
    )
    return known | {device.name: device for device in (v100, a100, l4)}


DEVICES: Final = _devices()
"""Devices by name."""

MAX_DEVICES: Final = 2**17
"""Devices of the largest cluster that can be described."""


def preset_cluster(name: str, num_nodes: int = 1, num_devices: int | None = None) -> Cluster:
    """The preset of this name with `num_nodes` nodes, or only its first `num_devices` devices.

    Hosts with CPUs have as many devices (processes) as asked for, spread evenly over the nodes.

    Raises:
        ConfigError: the name is unknown, num_nodes or num_devices is below 1, or the preset has fewer devices.
    """
    one = one_of(CLUSTERS, name, "cluster.preset", "cluster")
    check_counts(num_nodes, num_devices)
    count = one.num_devices if name != HOST or num_devices is None else -(-num_devices // num_nodes)
    inside, between = (level.link for level in one.levels)
    nodes = [Node(device=one.devices[0], count=count, link=inside)] * num_nodes
    cluster = Cluster.of_nodes(one.name, nodes, between)
    return cluster if num_devices is None else first(cluster, num_devices)


def one_of(known: Mapping[str, Named], name: object, key: str, what: str) -> Named:
    """The entry with this name.

    Raises:
        ConfigError: there is none. Names the configuration key and the known names.
    """
    if isinstance(name, str) and name in known:
        return known[name]
    raise ConfigError(f"{key}={name!r}: there is no such {what}.{did_you_mean(name, known)}")


def check_counts(num_nodes: int, num_devices: int | None) -> None:
    for key, value in (("num_nodes", num_nodes), ("num_devices", num_devices)):
        if value is not None and not 1 <= value <= MAX_DEVICES:
            raise ConfigError(f"cluster.{key}={value} must be 1 or more, and at most {MAX_DEVICES}.")


def first(cluster: Cluster, num_devices: int) -> Cluster:
    """The first `num_devices` devices of the cluster."""
    if num_devices > cluster.num_devices:
        raise ConfigError(
            f"cluster.num_devices={num_devices}, but {cluster.name!r} has {cluster.num_devices} devices. "
            "Raise cluster.num_nodes, or lower cluster.num_devices."
        )
    return cluster.subset(range(num_devices))
