"""The findings of `gpp-doctor` on all processes of a job: what they have, what is between them, and that they train."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import lightning
import torch
import torch.distributed as dist
import yaml
from lightning.fabric.plugins import ClusterEnvironment

import lightning_gpp
from lightning_gpp.cli.self_test import self_test
from lightning_gpp.cluster import Device, Link, cluster_of
from lightning_gpp.measure.detect import measured
from lightning_gpp.measure.links import measure_link
from lightning_gpp.runtime.mesh import open_queues
from lightning_gpp.strategy.meeting import meeting_point
from lightning_gpp.strategy.processes import start_process_group

PATIENCE: Final = timedelta(seconds=60)
TOLERANCE: Final = 1e-12


class Examination:
    """The examination of a job: all its processes construct it and exhaust its findings together.

    Args:
        environment: how the launcher numbers the processes.
        num_nodes: number of machines.
        problems: gets sentences about what is wrong, with remedies, on rank 0.
    """

    def __init__(self, environment: ClusterEnvironment, num_nodes: int, problems: list[str]) -> None:
        self._problems = problems
        self.rank, self._index = environment.global_rank(), environment.local_rank() % max(1, torch.cuda.device_count())
        self._address = f"{environment.main_address}:{environment.main_port}"
        open_queues()
        store = meeting_point(environment, num_nodes, PATIENCE)
        assert store is not None  # there is no process group yet
        store.set(f"facts {self.rank}", json.dumps(_facts(self._index)))
        facts = [json.loads(store.get(f"facts {rank}")) for rank in range(environment.world_size())]
        self._hosts, self._gpus, self._versions = map(list[str], zip(*facts, strict=True))
        self._nodes = [list(ranks) for _, ranks in groupby(range(len(facts)), self._hosts.__getitem__)]
        self._device = self._own_device()
        start_process_group(environment, None, self._device, PATIENCE, store)

    def _own_device(self) -> torch.device:
        """The GPU of this process; the CPU if not every process has one of its own."""
        if "" not in self._gpus and len({*self._gpus}) == len(self._gpus):
            torch.cuda.set_device(self._index)
            return torch.device("cuda", self._index)
        if any(self._gpus):
            self._tell("Not every process has a GPU of its own, so CPUs were examined: start one for each.")
        return torch.device("cpu")

    def findings(self, folder: Path, output: Path | None) -> Iterator[tuple[str, str]]:
        """Titles and findings.

        Args:
            folder: a folder that all ranks are to share.
            output: the path of a cluster file to be written.
        """
        yield "Processes", ", ".join(f"ranks {node[0]}-{node[-1]} on {self._hosts[node[0]]}" for node in self._nodes)
        yield "Versions", self._look_at_versions()
        free = ", ".join([str(port) for port in range(29500, 29600) if _is_free(port)][:3])
        yield "Ports", f"all ranks reach rank 0 at {self._address}; free there: {free or 'none from 29500 to 29599'}"
        yield "Folder", self._look_at(folder)
        kinds = self._measured_devices()
        yield "Devices", "; ".join(_told_device(kind) for kind in dict.fromkeys(kinds))
        inside, between = self._measured_links()
        named = [(f"inside {self._hosts[node[0]]}", link) for node, link in zip(self._nodes, inside, strict=True)]
        yield "Links", "; ".join(_told_link(*each) for each in [*named, ("between machines", between)])
        if output is not None and self.rank == 0:
            nodes = [(kinds[node[0]], len(node), link) for node, link in zip(self._nodes, inside, strict=True)]
            output.write_text(_cluster_file(nodes, between), encoding="utf-8")
            yield "Cluster", f"{output}, for strategy.cluster={output}"
        yield "Training", self._trained()

    def _tell(self, problem: str) -> None:
        if self.rank == 0:
            self._problems.append(problem)

    def _look_at_versions(self) -> str:
        for rank, versions in enumerate(self._versions):
            if versions != self._versions[0]:
                self._tell(f"Rank {rank} ({self._hosts[rank]}) has {versions}: install what rank 0 has.")
        return self._versions[0]

    def _look_at(self, folder: Path) -> str:
        """Look for what rank 0 writes into a folder, on all ranks; network file systems take a moment."""
        mark = folder / f".gpp-doctor-{_gathered(secrets.token_hex(4))[0]}"
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        dist.barrier()
        stop = time.monotonic() + 5
        while not (found := folder.is_dir() and mark.name in os.listdir(folder)) and time.monotonic() < stop:
            time.sleep(0.1)
        seen = _gathered(found)
        if self.rank == 0:
            mark.unlink()
        for host in dict.fromkeys(host for host, sees in zip(self._hosts, seen, strict=True) if not sees):
            self._tell(f"{host} does not see what rank 0 writes into {folder}: give a --folder that all share.")
        return f"{sum(seen)} of {len(seen)} ranks see what rank 0 writes into {folder.resolve()}"

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

    def _trained(self) -> str:
        start, difference = time.perf_counter(), self_test(self._device)
        if difference > TOLERANCE:
            self._tell(f"Training in stages differs from one process by {difference:.1e}.")
        return f"in stages and in one process differs by {difference:.1e} ({time.perf_counter() - start:.0f} s)"


def _facts(index: int) -> tuple[str, str, str]:
    """This process: its machine, its GPU's id (empty if there is none), and versions."""
    there = torch.cuda.is_available()
    gpu = str(torch.cuda.get_device_properties(index).uuid) if there else ""
    nccl = f" (CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))})" if there else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}{nccl}, lightning {lightning.__version__}"
    return socket.gethostname(), gpu, f"{versions}, lightning-gpp {lightning_gpp.__version__}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


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
