"""The link: the cost of sending bytes from one device to another."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Final

from lightning_gpp.errors import ConfigError

SHARED: Final = ("pair", "device", "node")
"""The sharing of a link's bandwidth: by the pair alone, by all messages of a device, or by all messages of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A directed connection of two devices: latency of a message's first byte, then bandwidth.

    Args:
        latency: seconds.
        bytes_per_second: bandwidth in one direction.
        shared: the users of the bandwidth, one of SHARED: "pair" for a cable of its own, "device" for a port into a
            switch, "node" for a network card of several devices.

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
        """Seconds from the start of sending to the arrival of the last of `num_bytes` bytes."""
        return self.latency + num_bytes / self.bytes_per_second
