"""The device: the speed of its arithmetic and memory, and its capacity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_gpp.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device: peaks as its manufacturer states them, and the fractions of them that real operators reach.

    Args:
        name: the kind of device, such as "a100_sxm_80gb".
        memory_bytes: bytes that a process can allocate on it.
        peak_flops: FLOP/s by the name of the data type ("float32", "bfloat16", ...); at least one.
        peak_bytes_per_second: bandwidth of its memory.
        flops_efficiency: fraction of `peak_flops` that large matrix products reach, above 0 and at most 1.
        bytes_efficiency: fraction of `peak_bytes_per_second` that large copies reach, above 0 and at most 1.
        seconds_per_operator: cost of calling an operator, however small its tensors.
        source: where the peaks come from.

    Raises:
        ConfigError: a figure is out of its range.
    """

    name: str
    memory_bytes: float
    peak_flops: Mapping[str, float] = field(hash=False)  # a mapping has no hash; equality does compare it
    peak_bytes_per_second: float
    flops_efficiency: float = 0.5
    bytes_efficiency: float = 0.7
    seconds_per_operator: float = 6e-6
    source: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "peak_flops", dict(self.peak_flops))
        if not self.peak_flops:
            raise ConfigError(f"Device {self.name!r}: peak_flops is empty; give at least float32: FLOP/s.")
        for dtype, peak in self.peak_flops.items():
            self._require(peak > 0, f"peak_flops[{dtype!r}]", peak, "above 0 FLOP/s")
        self._require(self.memory_bytes > 0, "memory_bytes", self.memory_bytes, "above 0")
        self._require(self.peak_bytes_per_second > 0, "peak_bytes_per_second", self.peak_bytes_per_second, "above 0")
        for name in ("flops_efficiency", "bytes_efficiency"):
            self._require(0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0 and at most 1")
        self._require(self.seconds_per_operator >= 0, "seconds_per_operator", self.seconds_per_operator, "0 or above")

    def _require(self, holds: bool, name: str, value: float, must: str) -> None:
        if not holds:
            raise ConfigError(f"Device {self.name!r}: {name}={value:g} must be {must}.")

    def flops_per_second(self, dtype: str = "float32") -> float:
        """Sustained FLOP/s for `dtype`; if its peak is unknown, those of float32, or of the slowest known type."""
        peak = self.peak_flops.get(dtype, self.peak_flops.get("float32", min(self.peak_flops.values())))
        return peak * self.flops_efficiency

    @property
    def bytes_per_second(self) -> float:
        """Sustained bandwidth of the memory, reading and writing together."""
        return self.peak_bytes_per_second * self.bytes_efficiency
