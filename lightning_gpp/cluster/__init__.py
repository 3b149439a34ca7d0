"""The machine a plan is made for: devices, the links between them, and well-known machines by name."""

from __future__ import annotations

from lightning_gpp.cluster.cluster import Cluster, Level, Node
from lightning_gpp.cluster.device import Device
from lightning_gpp.cluster.link import Link

__all__ = ["Cluster", "Device", "Level", "Link", "Node"]
