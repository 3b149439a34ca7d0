"""What it costs to send bytes from one device to another."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from lightning_gpp.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed connection of two devices: seconds until a message's first byte arrives, then bytes per second.

    Raises:
        ConfigError: the latency is below 0, or the bandwidth is not above 0.
    """

    latency: float = 0
    bytes_per_second: float = inf

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bytes_per_second > 0):
            raise ConfigError(
                f"Link: latency={self.latency:g} s must not be below 0, "
                f"bytes_per_second={self.bytes_per_second:g} must be above 0."
            )

    def seconds(self, num_bytes: float) -> float:
        """From the start of sending until the last of `num_bytes` bytes arrived."""
        return self.latency + num_bytes / self.bytes_per_second
