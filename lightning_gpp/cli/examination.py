"""The findings of `gpp-doctor` on all processes of a job: what they have, and what is between them."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import yaml
from lightning.fabric.plugins import ClusterEnvironment

from lightning_gpp.cluster import Device, Link, cluster_of
from lightning_gpp.errors import ConfigError
from lightning_gpp.measure.detect import measured
from lightning_gpp.measure.links import measure_link
from lightning_gpp.runtime.mesh import open_queues
from lightning_gpp.strategy.meeting import meeting_point
from lightning_gpp.strategy.processes import start_process_group

PATIENCE: Final = timedelta(seconds=60)


class Examination:
    """The examination of a job: all its processes construct it and exhaust its findings together.

    Args:
        environment: how the launcher numbers the processes.

    Raises:
        GPPError: the processes do not find each other, or share a GPU.
    """

    def __init__(self, environment: ClusterEnvironment) -> None:
        self.rank, self._index = environment.global_rank(), environment.local_rank() % max(1, torch.cuda.device_count())
        open_queues()
        store = meeting_point(environment, PATIENCE)
        assert store is not None  # there is no process group yet
        store.set(f"facts {self.rank}", json.dumps((socket.gethostname(), _gpu(self._index))))
        facts = [json.loads(store.get(f"facts {rank}")) for rank in range(environment.world_size())]
        self._hosts, self._gpus = map(list[str], zip(*facts, strict=True))
        self._nodes = [list(ranks) for _, ranks in groupby(range(len(facts)), self._hosts.__getitem__)]
        self._device = self._own_device()
        start_process_group(environment, None, self._device, PATIENCE, store)

    def _own_device(self) -> torch.device:
        """The GPU of this process; the CPU if no process has a GPU."""
        if not any(self._gpus):
            return torch.device("cpu")
        if "" in self._gpus or len({*self._gpus}) < len(self._gpus):
            raise ConfigError("Not every process has a GPU of its own: start one process for each GPU.")
        torch.cuda.set_device(self._index)
        return torch.device("cuda", self._index)

    def findings(self, output: Path | None) -> Iterator[tuple[str, str]]:
        """Titles and findings. `output`: the path of a cluster file to be written."""
        yield "Processes", ", ".join(f"ranks {node[0]}-{node[-1]} on {self._hosts[node[0]]}" for node in self._nodes)
        kinds = self._measured_devices()
        yield "Devices", "; ".join(_told_device(kind) for kind in dict.fromkeys(kinds))
        inside, between = self._measured_links()
        named = [(f"inside {self._hosts[node[0]]}", link) for node, link in zip(self._nodes, inside, strict=True)]
        yield "Links", "; ".join(_told_link(*each) for each in [*named, ("between machines", between)])
        if output is not None and self.rank == 0:
            nodes = [(kinds[node[0]], len(node), link) for node, link in zip(self._nodes, inside, strict=True)]
            output.write_text(_cluster_file(nodes, between), encoding="utf-8")
            yield "Cluster", f"{output}, for strategy.cluster={output}"

    def _measured_devices(self) -> list[Device]:
        """The device of every rank; the slowest of each name stands for all."""
        users = Counter(self._hosts)[self._hosts[self.rank]] if self._device.type == "cpu" else 1
        own = measured(self._device)
        found: list[Device] = _gathered(replace(own, memory_bytes=own.memory_bytes / users))
        slowest = {device.name: device for device in sorted(found, key=Device.flops_per_second, reverse=True)}
        return [slowest[device.name] for device in found]

    def _measured_links(self) -> tuple[list[Link | None], Link | None]:
        """The link inside each machine, and that between them."""
        inside = [measure_link(node, self._device) for node in self._nodes]
        abreast = list(zip(*self._nodes[:2], strict=False)) if len(self._nodes) > 1 else []
        return inside, measure_link([node[0] for node in self._nodes], self._device, abreast)


def _gpu(index: int) -> str:
    """The id of a GPU; empty if there is none."""
    return str(torch.cuda.get_device_properties(index).uuid) if torch.cuda.is_available() else ""


def _gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _told_device(device: Device) -> str:
    speed = f"{device.flops_per_second() / 1e12:.3g} TFLOP/s in float32"
    return f"{device.name} with {device.memory_bytes / 2**30:.3g} GiB for each process, {speed}"


def _told_link(where: str, link: Link | None) -> str:
    if link is None:
        return f"{where} none"
    shared = ", shared by a machine" * (link.shared == "node")
    return f"{where} {link.latency * 1e6:.3g} us, {link.bytes_per_second / 1e9:.3g} GB/s{shared}"


def _cluster_file(nodes: list[tuple[Device, int, Link | None]], between: Link | None) -> str:
    """The cluster as YAML: the device, the number and the link of each node, and the link between nodes."""
    entries = [
        {"device": asdict(device), "count": count, "link": link and asdict(link)} for device, count, link in nodes
    ]
    content = {"nodes": entries, "between": between and asdict(between)}
    cluster_of(content)  # refuses what cannot be read
    return f"# measured by gpp-doctor\n{yaml.safe_dump(content, sort_keys=False)}"
