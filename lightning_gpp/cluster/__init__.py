"""The machine that a plan is made for: devices, links between them, and well-known machines by name."""

from __future__ import annotations

from lightning_gpp.cluster.cluster import Cluster, Device, Level, Link, Node, Port
from lightning_gpp.cluster.load import cluster_of, load_cluster
from lightning_gpp.cluster.presets import CLUSTERS, DEVICES, HOST, preset_cluster

__all__ = [
    "CLUSTERS",
    "DEVICES",
    "HOST",
    "Cluster",
    "Device",
    "Level",
    "Link",
    "Node",
    "Port",
    "cluster_of",
    "load_cluster",
    "preset_cluster",
]
