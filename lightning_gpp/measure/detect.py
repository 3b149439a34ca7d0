"""Detects the devices and links of this machine, as a cluster."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Final

import torch

from lightning_gpp.cluster import CLUSTERS, DEVICES, Cluster, Device
from lightning_gpp.errors import ConfigError
from lightning_gpp.measure.calibrate import calibrate
from lightning_gpp.measure.memory import memory_bytes

PRODUCTS: Final = (
    (r"V100-SXM[23]-16GB", "v100_sxm2_16gb"),
    (r"V100-SXM[23]-32GB", "v100_sxm2_32gb"),
    (r"A100-SXM4?-40GB", "a100_sxm_40gb"),
    (r"A100-SXM4?-80GB", "a100_sxm_80gb"),
    (r"A100 80GB PCIe", "a100_pcie_80gb"),
    (r"H100 80GB HBM3", "h100_sxm"),
    (r"H200", "h200_sxm"),
    (r"T4", "t4"),
    (r"L4", "l4"),
)
"""Devices by the driver's names for them, without "NVIDIA" or "Tesla"; a name must match entirely."""

LINKS: Final = {machine.device.name: machine.link for machine in CLUSTERS.values()} | {
    "a100_sxm_40gb": CLUSTERS["dgx_a100"].link,
    "v100_sxm2_32gb": CLUSTERS["summit"].link,
}
"""Links between devices of a kind, in the preset that consists of them."""

PCIE: Final = CLUSTERS["pcie_a100"].link
"""The link between devices of unknown or different kinds."""


def detect(num_devices: int | None = None) -> Cluster:
    """The CUDA devices of this machine, or the CPU if it has none, as processes that share its memory.

    A GPU without a preset is measured (`calibrate`), which takes a few seconds. Memory is that of the machine. Links
    are those of the preset of such devices; the real ones are not measured.

    Args:
        num_devices: number of devices to use; by default all GPUs, or one process for every CPU core.

    Raises:
        ConfigError: num_devices is below 1 or above the number of GPUs.
    """
    if num_devices is not None and num_devices < 1:
        raise ConfigError(f"num_devices={num_devices} must be 1 or more.")
    if not torch.cuda.is_available():
        return _processes(num_devices or os.cpu_count() or 1)
    there_are = torch.cuda.device_count()
    if num_devices is not None and num_devices > there_are:
        raise ConfigError(f"num_devices={num_devices}, but this machine has {there_are} CUDA devices.")
    return _gpus(num_devices or there_are)


def _processes(num_devices: int) -> Cluster:
    share = memory_bytes(torch.device("cpu")) / num_devices
    host = CLUSTERS["cpu_host"]
    return Cluster.uniform(replace(host.device, memory_bytes=share), num_devices, host.link, name="this machine")


def _gpus(num_devices: int) -> Cluster:
    known: dict[str, Device] = {}
    devices = tuple(_gpu(torch.device("cuda", index), known) for index in range(num_devices))
    names = {device.name for device in devices}
    link = LINKS.get(devices[0].name, PCIE) if len(names) == 1 else PCIE
    return replace(Cluster.uniform(devices[0], num_devices, link, name="this machine"), devices=devices)


def _gpu(device: torch.device, known: dict[str, Device]) -> Device:
    """The device of a GPU. Products without a preset are measured once, and kept in `known`."""
    product = torch.cuda.get_device_properties(device).name
    if product not in known:
        known[product] = _preset(product) or _measured(device)
    return replace(known[product], memory_bytes=memory_bytes(device))


def _measured(device: torch.device) -> Device:
    full, half = calibrate(device), calibrate(device, torch.bfloat16)
    return replace(full, peak_flops={**full.peak_flops, **half.peak_flops})


def _preset(product: str) -> Device | None:
    short = re.sub(r"^(NVIDIA|Tesla) ", "", product)
    return next((DEVICES[name] for pattern, name in PRODUCTS if re.fullmatch(pattern, short)), None)
