"""Well-known devices and clusters by name, with the source of every figure.

Peaks are the manufacturer's: dense (without structured sparsity), tensor cores for float16 and bfloat16. "float32" is
without tensor cores, as PyTorch multiplies by default; where TF32 is allowed, "tf32" is its peak. "float64" is without
tensor cores. Data types without hardware support are left out. Memory is the nominal decimal size, a few per cent
below what the driver reports, which leaves some for the CUDA context and fragmentation.

Assumptions, not published figures: the efficiencies (half of the arithmetic, 70 % of the bandwidths to memory and host)
and 6 microseconds to call an operator, which are the defaults of `Device`; and the latencies below. Measurements
(`lightning_gpp.measure.calibrate`) replace the efficiencies and the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_gpp.cluster.cluster import Cluster, Device, Link, Node
from lightning_gpp.cluster.names import one_of
from lightning_gpp.errors import ConfigError

_V100_PEAKS: Final = {"float16": 125e12, "float32": 15.7e12, "float64": 7.8e12}
_A100_PEAKS: Final = {"bfloat16": 312e12, "float16": 312e12, "tf32": 156e12, "float32": 19.5e12, "float64": 9.7e12}
# the data sheet gives 1,979 and 989 TFLOP/s with sparsity, which is twice the dense figure
_HOPPER_PEAKS: Final = {"bfloat16": 989.5e12, "float16": 989.5e12, "tf32": 494.5e12, "float32": 67e12, "float64": 34e12}

# PCIe x16 to the host, one direction: 8, 16 and 32 GT/s on 16 lanes, 128 of 130 bits payload (PCI Express Base
# Specifications 3.0, 4.0 and 5.0); the data sheets name the generation. The V100 of Summit have NVLink to their hosts,
# which is faster. GPUs behind one switch share its bandwidth, which a `Device` does not say.
_PCIE_3, _PCIE_4, _PCIE_5 = 15.75e9, 31.5e9, 63e9

_V100_SHEET: Final = "NVIDIA V100 Tensor Core GPU datasheet (January 2020), SXM2"
_A100_SHEET: Final = "NVIDIA A100 Tensor Core GPU datasheet"

_DEVICES: Final = (
    Device(
        name="v100_sxm2_16gb",
        memory_bytes=16e9,
        peak_flops=_V100_PEAKS,
        peak_bytes_per_second=900e9,
        peak_host_bytes_per_second=_PCIE_3,
        source=_V100_SHEET,
    ),
    Device(
        name="v100_sxm2_32gb",
        memory_bytes=32e9,
        peak_flops=_V100_PEAKS,
        peak_bytes_per_second=900e9,
        peak_host_bytes_per_second=_PCIE_3,
        source=_V100_SHEET,
    ),
    Device(
        name="a100_sxm_40gb",
        memory_bytes=40e9,
        peak_flops=_A100_PEAKS,
        peak_bytes_per_second=1555e9,
        peak_host_bytes_per_second=_PCIE_4,
        source=f"{_A100_SHEET}, 40GB SXM",
    ),
    Device(
        name="a100_sxm_80gb",
        memory_bytes=80e9,
        peak_flops=_A100_PEAKS,
        peak_bytes_per_second=2039e9,
        peak_host_bytes_per_second=_PCIE_4,
        source=f"{_A100_SHEET}, 80GB SXM",
    ),
    Device(
        name="a100_pcie_80gb",
        memory_bytes=80e9,
        peak_flops=_A100_PEAKS,
        peak_bytes_per_second=1935e9,
        peak_host_bytes_per_second=_PCIE_4,
        source=f"{_A100_SHEET}, 80GB PCIe",
    ),
    Device(
        name="h100_sxm",
        memory_bytes=80e9,
        peak_flops=_HOPPER_PEAKS,
        peak_bytes_per_second=3.35e12,
        peak_host_bytes_per_second=_PCIE_5,
        source="NVIDIA H100 Tensor Core GPU datasheet, SXM",
    ),
    Device(
        name="h200_sxm",
        memory_bytes=141e9,
        peak_flops=_HOPPER_PEAKS,
        peak_bytes_per_second=4.8e12,
        peak_host_bytes_per_second=_PCIE_5,
        source="NVIDIA H200 Tensor Core GPU datasheet, SXM",
    ),
    Device(
        name="t4",
        memory_bytes=16e9,
        # float64 at 1/32 of float32: Turing architecture whitepaper
        peak_flops={"float16": 65e12, "float32": 8.1e12, "float64": 8.1e12 / 32},
        peak_bytes_per_second=300e9,
        peak_host_bytes_per_second=_PCIE_3,
        source="NVIDIA T4 Tensor Core GPU datasheet",
    ),
    Device(
        name="l4",
        memory_bytes=24e9,
        # half of the sheet's 242 and 120 TFLOP/s with sparsity; float64 at 1/64 of float32: Ada architecture whitepaper
        peak_flops={
            "bfloat16": 121e12,
            "float16": 121e12,
            "tf32": 60e12,
            "float32": 30.3e12,
            "float64": 30.3e12 / 64,
        },
        peak_bytes_per_second=300e9,
        peak_host_bytes_per_second=_PCIE_4,
        source="NVIDIA L4 Tensor Core GPU datasheet",
    ),
    Device(
        name="cpu",
        memory_bytes=4e9,  # an assumption: the memory of one of several processes of a host
        peak_flops={"bfloat16": 211e9, "float32": 102e9, "float64": 48e9},
        peak_bytes_per_second=23e9,
        # assumptions: layers of small models are slower than large products and copies by these factors
        flops_efficiency=0.3,
        bytes_efficiency=0.35,
        seconds_per_operator=8e-6,
        source="one thread of an AMD EPYC core under PyTorch 2.13, measured with lightning_gpp.measure.calibrate",
    ),
)

DEVICES: Final[dict[str, Device]] = {device.name: device for device in _DEVICES}

# Bandwidths are peaks of one direction. Latencies are assumptions: the cost of starting an NCCL send.
_NCCL: Final = 15e-6
_NCCL_NETWORK: Final = 20e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPreset:
    """A kind of machine; a cluster is any number of them as its nodes.

    Args:
        name: name of its clusters.
        device: kind of all its devices.
        count: devices of a node.
        link: link between two devices of a node.
        between: link between devices of different nodes.
        any_count: True if a node can have more devices than `count`, as a host can have more processes.
    """

    name: str
    device: Device
    count: int
    link: Link
    between: Link
    any_count: bool = False

    def __call__(self, num_nodes: int = 1) -> Cluster:
        return self.of(num_nodes, self.count)

    def of(self, num_nodes: int, count: int) -> Cluster:
        node = Node(device=self.device, count=count, link=self.link)
        return Cluster.of_nodes(self.name, [node] * num_nodes, self.between)


_MACHINES: Final = (
    ClusterPreset(
        # Four of the six V100 of a node, as GraphPipe's evaluation used. Each V100 has six NVLink 2.0 bricks of 25 GB/s
        # in one direction, two for every neighbour: OLCF Summit User Guide. Between the two sockets, NVLink to the host
        # is as wide and the X-Bus wider. Between nodes one EDR InfiniBand port of 100 Gb/s, which the devices of a
        # node share.
        name="summit",
        device=DEVICES["v100_sxm2_16gb"],
        count=4,
        link=Link(latency=_NCCL, bytes_per_second=50e9),
        between=Link(latency=_NCCL_NETWORK, bytes_per_second=12.5e9, shared="node"),
    ),
    ClusterPreset(
        # NVLink 3.0 with NVSwitch, 600 GB/s in both directions together; one HDR InfiniBand adapter of 200 Gb/s for
        # every GPU: DGX A100 User Guide.
        name="dgx_a100",
        device=DEVICES["a100_sxm_80gb"],
        count=8,
        link=Link(latency=_NCCL, bytes_per_second=300e9, shared="device"),
        between=Link(latency=_NCCL_NETWORK, bytes_per_second=25e9, shared="device"),
    ),
    ClusterPreset(
        # NVLink 4.0 with NVSwitch, 900 GB/s in both directions together; one NDR InfiniBand adapter of 400 Gb/s for
        # every GPU: DGX H100/H200 User Guide.
        name="dgx_h100",
        device=DEVICES["h100_sxm"],
        count=8,
        link=Link(latency=_NCCL, bytes_per_second=450e9, shared="device"),
        between=Link(latency=_NCCL_NETWORK, bytes_per_second=50e9, shared="device"),
    ),
    ClusterPreset(
        name="dgx_h200",  # as dgx_h100
        device=DEVICES["h200_sxm"],
        count=8,
        link=Link(latency=_NCCL, bytes_per_second=450e9, shared="device"),
        between=Link(latency=_NCCL_NETWORK, bytes_per_second=50e9, shared="device"),
    ),
    ClusterPreset(
        # PCIe 3.0 x16: 8 GT/s on 16 lanes, 128 of 130 bits payload. Between nodes 10 Gb/s Ethernet, an assumption.
        name="t4_box",
        device=DEVICES["t4"],
        count=4,
        link=Link(latency=_NCCL, bytes_per_second=15.75e9, shared="device"),
        between=Link(latency=50e-6, bytes_per_second=1.25e9, shared="node"),
    ),
    ClusterPreset(
        # PCIe 4.0 x16: 16 GT/s on 16 lanes. Between nodes 100 Gb/s Ethernet, an assumption.
        name="pcie_a100",
        device=DEVICES["a100_pcie_80gb"],
        count=4,
        link=Link(latency=_NCCL, bytes_per_second=31.5e9, shared="device"),
        between=Link(latency=50e-6, bytes_per_second=12.5e9, shared="node"),
    ),
    ClusterPreset(
        # Processes that talk by gloo. An idle pair measured 59 microseconds and 1.6 GB/s over loopback (PyTorch 2.13,
        # AMD EPYC); processes that compute on all cores get less, by an assumed factor. Between
        # nodes 1 Gb/s Ethernet, an assumption too.
        name="cpu_host",
        device=DEVICES["cpu"],
        count=4,
        link=Link(latency=150e-6, bytes_per_second=1e9),
        between=Link(latency=200e-6, bytes_per_second=125e6, shared="node"),
        any_count=True,
    ),
)

MAX_DEVICES: Final = 2**17
"""Devices of the largest cluster that can be described."""

CLUSTERS: Final[dict[str, ClusterPreset]] = {machine.name: machine for machine in _MACHINES}


def preset_cluster(name: str, num_nodes: int = 1, num_devices: int | None = None) -> Cluster:
    """The preset of this name with `num_nodes` nodes, or only its first `num_devices` devices.

    Hosts with CPUs have as many devices (processes) as asked for, spread evenly over the nodes.

    Raises:
        ConfigError: the name is unknown, num_nodes or num_devices is below 1, or the preset has fewer devices.
    """
    machine = one_of(CLUSTERS, name, "cluster.preset", "cluster")
    check_counts(num_nodes, num_devices)
    if num_devices is None:
        return machine(num_nodes)
    count = -(-num_devices // num_nodes) if machine.any_count else machine.count
    return first(machine.of(num_nodes, count), num_devices)


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
