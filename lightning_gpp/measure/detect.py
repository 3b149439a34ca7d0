"""Detects the devices and links of this machine, as a cluster."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import replace
from typing import Final

import torch

from lightning_gpp.cluster import CLUSTERS, DEVICES, HOST, Cluster, Device
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

LINKS: Final = {known.devices[0].name: known.levels[0].link for known in CLUSTERS.values()} | {
    "a100_sxm_40gb": CLUSTERS["dgx_a100"].levels[0].link,
    "v100_sxm2_32gb": CLUSTERS["summit"].levels[0].link,
}
"""Links between devices of a kind, in the preset that consists of them."""

PCIE: Final = CLUSTERS["pcie_a100"].levels[0].link
"""The link between devices of unknown or different kinds."""


def detect(num_processes: int | None = None) -> Cluster:
    """The CUDA devices of this machine, or the CPU if it has none, as processes that share its memory.

    A GPU without a preset is measured (`calibrate`), which takes a few seconds. Memory is that of the machine. Links
    are those of the preset of such devices; the real ones are not measured.

    Args:
        num_processes: number of processes; by default one for each GPU, or for every CPU core. If there are fewer GPUs,
            process p uses GPU p modulo their number, and has a part of it.

    Raises:
        ConfigError: num_processes is below 1.
    """
    if num_processes is not None and num_processes < 1:
        raise ConfigError(f"num_processes={num_processes} must be 1 or more.")
    if not torch.cuda.is_available():
        return processes(num_processes or os.cpu_count() or 1)
    return _gpus(num_processes or torch.cuda.device_count())


def processes(number: int) -> Cluster:
    """Processes on this machine's CPU, which share its memory."""
    share = memory_bytes(torch.device("cpu")) / number
    host = CLUSTERS[HOST]
    device = replace(host.devices[0], memory_bytes=share)
    return Cluster.uniform(device, number, host.levels[0].link, name="this machine")


def _gpus(number: int) -> Cluster:
    there_are = torch.cuda.device_count()
    known: dict[str, Device] = {}
    gpus = [_gpu(torch.device("cuda", index), known) for index in range(min(number, there_are))]
    users = Counter(process % there_are for process in range(number))
    devices = tuple(_part(gpus[process % there_are], users[process % there_are]) for process in range(number))
    alike = len({device.name for device in devices}) == 1 and there_are > 1
    link = LINKS.get(devices[0].name, PCIE) if alike else PCIE
    return replace(Cluster.uniform(devices[0], number, link, name="this machine"), devices=devices)


def _part(device: Device, users: int) -> Device:
    """The part of a device that one of several processes has."""
    return replace(
        device.part(users),
        memory_bytes=device.memory_bytes / users,
        peak_host_bytes_per_second=device.peak_host_bytes_per_second / users,
    )


def _gpu(device: torch.device, known: dict[str, Device]) -> Device:
    """The device of a GPU. Products without a preset are measured once, and kept in `known`."""
    product = torch.cuda.get_device_properties(device).name
    if product not in known:
        known[product] = _preset(product) or measured(device)
    return replace(known[product], memory_bytes=memory_bytes(device))


def measured(device: torch.device) -> Device:
    """A device of this machine as `calibrate` finds it, a GPU in bfloat16, too. A known GPU's link to the host is its
    preset's.
    """
    full = calibrate(device)
    if device.type == "cpu":
        return full
    half, preset = calibrate(device, torch.bfloat16), _preset(full.name)
    to_host = 0.0 if preset is None else preset.host_bytes_per_second
    peaks = {**full.peak_flops, **half.peak_flops}
    return replace(full, peak_flops=peaks, peak_host_bytes_per_second=to_host)


def _preset(product: str) -> Device | None:
    short = re.sub(r"^(NVIDIA|Tesla) ", "", product)
    return next((DEVICES[name] for pattern, name in PRODUCTS if re.fullmatch(pattern, short)), None)
