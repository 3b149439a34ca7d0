from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from lightning_gpp.cluster import CLUSTERS, DEVICES, Device
from lightning_gpp.errors import ConfigError
from lightning_gpp.measure import detect as module
from lightning_gpp.measure.detect import detect
from lightning_gpp.measure.memory import memory_bytes

MEMORY = 85_520_809_984


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the GPUs that the machine seems to have; fill it."""
    names: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(name=names[device.index], total_memory=MEMORY + device.index),
    )
    return names


@pytest.mark.usefixtures("products")
@pytest.mark.parametrize(("asked", "number"), [(None, os.cpu_count()), (5, 5)])
def test_without_gpus_the_processes_share_the_memory(asked: int | None, number: int) -> None:
    cluster = detect(asked)
    share = memory_bytes(torch.device("cpu")) / number
    assert cluster.devices == (replace(DEVICES["cpu"], memory_bytes=share),) * number
    assert {cluster.node_of(device) for device in range(number)} == {0}
    assert number == 1 or cluster.link(0, 1) == CLUSTERS["cpu_host"].levels[0].link


@pytest.mark.parametrize(
    ("product", "name"),
    [
        ("Tesla V100-SXM2-16GB", "v100_sxm2_16gb"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100_pcie_80gb"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("Tesla T4", "t4"),
    ],
)
def test_gpus_are_known_by_name_and_have_their_real_memory(products: list[str], product: str, name: str) -> None:
    products += [product] * 2
    cluster = detect()
    assert cluster.devices == tuple(replace(DEVICES[name], memory_bytes=MEMORY + index) for index in range(2))


@pytest.mark.parametrize(
    ("product", "bandwidth"),
    [("NVIDIA H100 80GB HBM3", 450e9), ("NVIDIA A100-SXM4-40GB", 300e9), ("Tesla T4", 15.75e9), ("NVIDIA L4", 31.5e9)],
)
def test_links_are_those_such_gpus_usually_have(products: list[str], product: str, bandwidth: float) -> None:
    products += [product] * 2
    assert detect().link(0, 1).bytes_per_second == bandwidth


@pytest.mark.parametrize("product", ["NVIDIA H200 NVL", "AMD Instinct MI300X"])
def test_an_unknown_gpu_is_measured_once_for_each_kind(
    monkeypatch: pytest.MonkeyPatch, products: list[str], product: str
) -> None:
    calls: list[tuple[str, torch.dtype]] = []

    def calibrate(device: torch.device, dtype: torch.dtype = torch.float32) -> Device:
        calls.append((str(device), dtype))
        name = str(dtype).removeprefix("torch.")
        return Device(name=product, memory_bytes=1, peak_flops={name: 1e12 * len(calls)}, peak_bytes_per_second=1e9)

    monkeypatch.setattr(module, "calibrate", calibrate)
    products += [product, product]
    cluster = detect()
    assert calls == [("cuda:0", torch.float32), ("cuda:0", torch.bfloat16)]
    assert [device.memory_bytes for device in cluster.devices] == [MEMORY, MEMORY + 1]
    assert cluster.devices[1].peak_flops == {"float32": 1e12, "bfloat16": 2e12}


def test_a_known_gpu_is_measured_but_for_its_link_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    found = Device(name="NVIDIA H200", memory_bytes=1, peak_flops={"float32": 1e12}, peak_bytes_per_second=1e9)
    monkeypatch.setattr(module, "calibrate", lambda device, dtype=torch.float32: found)
    preset = DEVICES["h200_sxm"]
    assert module.measured(torch.device("cuda", 0)).peak_host_bytes_per_second == preset.host_bytes_per_second > 0
    assert module.measured(torch.device("cpu")) is found


def test_only_so_many_gpus(products: list[str]) -> None:
    products += ["NVIDIA L4"] * 3
    assert detect(2).num_devices == 2
    with pytest.raises(ConfigError, match="num_processes=0 must be 1 or more"):
        detect(0)


def test_more_processes_than_gpus_have_parts_of_them(products: list[str]) -> None:
    products += ["NVIDIA L4"] * 2
    whole, shared = DEVICES["l4"], detect(3)
    assert [device.memory_bytes for device in shared.devices] == [MEMORY / 2, MEMORY + 1, MEMORY / 2]
    assert [device.flops_per_second() / whole.flops_per_second() for device in shared.devices] == [0.5, 1, 0.5]


def test_processes_on_one_gpu_talk_through_its_host(products: list[str]) -> None:
    products.append("NVIDIA H200")
    assert detect(2).link(0, 1) == CLUSTERS["pcie_a100"].levels[0].link
