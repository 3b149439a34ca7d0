"""What it costs to send bytes from one device to another."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from lightning_gpp.errors import ConfigError

SHARED: Final = ("pair", "device", "node")
"""Who shares a link's bandwidth: nobody but the pair; all that a device sends (and receives); all that a node does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed connection of two devices: seconds until a message's first byte arrives, then bytes per second.

    Args:
        latency: seconds.
        bytes_per_second: of one direction.
        shared: who shares them, a name of SHARED: "pair" for a cable of its own, "device" for a port into a switch,
            "node" for a network card of several devices.

    Raises:
        ConfigError: the latency is below 0, the bandwidth is not above 0, or `shared` is none of these.
    """

    latency: float = 0
    bytes_per_second: float = inf
    shared: str = "pair"

    def __post_init__(self) -> None:
        if self.shared not in SHARED:
            raise ConfigError(f"Link: shared={self.shared!r} must be one of {', '.join(SHARED)}.")
        if not (self.latency >= 0 and self.bytes_per_second > 0):
            raise ConfigError(
                f"Link: latency={self.latency:g} s must not be below 0, "
                f"bytes_per_second={self.bytes_per_second:g} must be above 0."
            )

    def seconds(self, num_bytes: float) -> float:
        """From the start of sending until the last of `num_bytes` bytes arrived."""
        return self.latency + num_bytes / self.bytes_per_second
