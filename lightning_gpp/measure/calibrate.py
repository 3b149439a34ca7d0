"""Calibration: the speed that a device of this machine reaches with PyTorch, measured in a second or two."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Final

import torch

from lightning_gpp.cluster import Device
from lightning_gpp.errors import ConfigError
from lightning_gpp.measure.memory import memory_bytes
from lightning_gpp.measure.timing import seconds_of

SECONDS_PER_FIGURE: Final = 0.4
LARGEST_MATRIX: Final = 8192
LONG_ENOUGH: Final = 0.01
"""Seconds of a matrix product beyond which launching it and reading the clock are negligible."""
COPIED_BYTES: Final = 128 * 2**20  # larger than the caches
OPERATORS_PER_LOOP: Final = 200


def calibrate(device: torch.device, dtype: torch.dtype = torch.float32) -> Device:
    """Measure arithmetic, memory and the cost of calling an operator; takes less than 3 seconds on an idle device.

    The peaks of the result are the measured figures, so that its efficiencies are 1. FLOP/s are those of large matrix
    products, bytes/s those of a copy (reading and writing together), and seconds per operator those of a tiny
    addition that autograd records.

    Args:
        device: a device of this machine, "cpu" or "cuda:0".
        dtype: type of the matrices; a floating-point type.

    Raises:
        ConfigError: the data type is not floating-point, or the device is neither a CPU nor a CUDA device.
    """
    if not dtype.is_floating_point or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"calibrate(device={device}, dtype={dtype}): give a CPU or CUDA device and a floating-point type."
        )
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        return Device(
            name=_name(device),
            memory_bytes=memory_bytes(device),
            peak_flops={str(dtype).removeprefix("torch."): _flops_per_second(device, dtype)},
            peak_bytes_per_second=_bytes_per_second(device),
            flops_efficiency=1.0,
            bytes_efficiency=1.0,
            seconds_per_operator=_seconds_per_operator(device),
            source=f"measured under PyTorch {torch.__version__}",
        )


def _name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_properties(device).name


def _flops_per_second(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s for matrices so large that one product takes long, on a laptop as well as on an H200."""
    size = 128
    while True:
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)

        def multiply(left: torch.Tensor = left, right: torch.Tensor = right, out: torch.Tensor = out) -> None:
            torch.mm(left, right, out=out)

        if size == LARGEST_MATRIX or seconds_of(multiply, LONG_ENOUGH) >= LONG_ENOUGH:
            return 2 * size**3 / seconds_of(multiply, SECONDS_PER_FIGURE)
        size *= 2


def _bytes_per_second(device: torch.device) -> float:
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED_BYTES / seconds_of(lambda: target.copy_(source), SECONDS_PER_FIGURE)


def _seconds_per_operator(device: torch.device) -> float:
    tiny = torch.ones(1, device=device, requires_grad=True)

    def loop() -> None:
        for _ in range(OPERATORS_PER_LOOP):
            tiny + tiny

    with torch.enable_grad():
        return seconds_of(loop, SECONDS_PER_FIGURE) / OPERATORS_PER_LOOP
