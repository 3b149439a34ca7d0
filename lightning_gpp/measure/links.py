"""Measures the links between the processes of a job by messages to and fro, as pipelines send them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

from lightning_gpp.cluster import Link

LARGE: Final = 16 * 2**20
"""Bytes of the messages that measure bandwidth; those that measure latency have one byte."""
REPEATS: Final = 13
MOST: Final = 8
"""Ranks of which all pairs are measured; further ones are taken to be like these."""
SLOWER: Final = 1.5
"""Messages at once that take so many times as long as one alone share its bandwidth."""


def measure_link(ranks: Sequence[int], device: torch.device, abreast: Sequence[Sequence[int]] = ()) -> Link | None:
    """The median link between these ranks, None if there is one; all ranks of the job call it together.

    Args:
        ranks: ranks of one node, or the first ranks of all nodes.
        device: device of this rank, on which its messages are.
        abreast: pairs of ranks of two nodes. The link is shared ("node") if messages of all of them at once are slower.
    """
    pairs = list(combinations(ranks[:MOST], 2))
    if not pairs:
        return None
    latency, whole = (median(_seconds([pair], size, device) for pair in pairs) for size in (1, LARGE))
    shared = len(abreast) > 1 and _seconds(abreast, LARGE, device) > SLOWER * whole
    bandwidth = LARGE / max(whole - latency, whole / 2)
    return Link(latency=latency, bytes_per_second=bandwidth, shared="node" if shared else "pair")


def _seconds(pairs: Sequence[Sequence[int]], num_bytes: int, device: torch.device) -> float:
    """Seconds of one message in one direction, of the slowest of disjoint pairs that send at once; on all ranks."""
    rank, found = dist.get_rank(), list[Any]([None] * dist.get_world_size())
    dist.barrier()
    own = [_to_and_fro(sum(pair) - rank, rank == pair[0], num_bytes, device) for pair in pairs if rank in pair]
    dist.all_gather_object(found, max(own, default=0.0))
    return float(max(found))


def _to_and_fro(peer: int, begins: bool, num_bytes: int, device: torch.device) -> float:
    tensor, times = torch.zeros(num_bytes, dtype=torch.uint8, device=device), list[float]()
    for _ in range(REPEATS):
        start = time.perf_counter()
        for call in (dist.send, dist.recv) if begins else (dist.recv, dist.send):
            call(tensor, peer)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - start) / 2)
    return median(times[2:])  # the first ones connect
