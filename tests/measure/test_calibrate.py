from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_gpp.errors import ConfigError
from lightning_gpp.measure import calibrate as module
from lightning_gpp.measure import memory
from lightning_gpp.measure.calibrate import calibrate
from lightning_gpp.measure.memory import memory_bytes

CPU = torch.device("cpu")


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONG_ENOUGH", 1e-4)
    monkeypatch.setattr(module, "COPIED_BYTES", 2**20)
    monkeypatch.setattr(module, "SECONDS_PER_FIGURE", 0.02)


def test_the_figures_are_those_of_a_computer() -> None:
    device = calibrate(CPU)
    assert device.name == "cpu"
    assert 1e8 < device.flops_per_second("float32") < 1e13
    assert 1e8 < device.bytes_per_second < 1e12
    assert 1e-8 < device.seconds_per_operator < 1e-3
    assert (device.flops_efficiency, device.bytes_efficiency) == (1, 1)
    assert device.memory_bytes == memory_bytes(CPU)
    assert torch.__version__ in device.source


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_peaks_go_by_the_name_of_the_data_type(dtype: torch.dtype) -> None:
    assert list(calibrate(CPU, dtype).peak_flops) == [str(dtype).split(".")[1]]


def test_a_copy_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COPIED_BYTES", 1000)
    monkeypatch.setattr(module, "seconds_of", lambda call, at_most: 0.5)
    assert module._bytes_per_second(CPU) == 4000


@pytest.mark.parametrize(("device", "dtype"), [(CPU, torch.int64), (torch.device("meta"), torch.float32)])
def test_what_cannot_be_measured(device: torch.device, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"device={device}, dtype={dtype}.*give a CPU or CUDA device"):
        calibrate(device, dtype)


@pytest.mark.parametrize(("content", "limited"), [("1000000\n", True), ("max\n", False), (None, False)])
def test_a_container_has_less_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, limited: bool
) -> None:
    path = tmp_path / "memory.max"
    if content is not None:
        path.write_text(content)
    monkeypatch.setattr(memory, "CONTAINER_LIMIT", path)
    assert (memory_bytes(CPU) == 1_000_000) == limited
    assert memory_bytes(CPU) > 0
