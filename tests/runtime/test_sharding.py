"""Replicas of a stage train as one process does, whatever each keeps of parameters, gradients and optimizer state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.distributed import run_distributed
from tests.runtime.replicas import (
    OPTIMIZERS,
    Replica,
    accumulate,
    alone,
    assert_close,
    micro_batches,
)

KINDS = ("none", "zero1", "fsdp")
Trained = dict[tuple[str, str, bool], dict[str, Tensor]]


def _trained(rank: int, num_replicas: int) -> Trained:
    results: Trained = {}
    for kind in KINDS:
        for optimizer in OPTIMIZERS:
            clip = optimizer in ("momentum", "adam")
            replica = Replica(kind, rank, num_replicas)
            replica.train(optimizer, clip)
            results[kind, optimizer, clip] = replica.whole()
    return results


@pytest.mark.parametrize("num_replicas", [2, 3])
def test_training_equals_one_process(num_replicas: int) -> None:
    results = run_distributed(num_replicas, _trained, num_replicas)
    for (kind, optimizer, clip), first in results[0].items():
        assert_close(first, alone(num_replicas, optimizer, clip), (kind, optimizer, clip))
        for other in results[1:]:
            assert all(torch.equal(first[name], value) for name, value in other[kind, optimizer, clip].items())
        if kind == "zero1":
            plain = results[0]["none", optimizer, clip]
            assert all(torch.equal(plain[name], value) for name, value in first.items()), "not bit for bit"


def _counted(rank: int) -> list[dict[str, int]]:
    results = []
    for kind in KINDS:
        replica = Replica(kind, rank, 2)
        optimizer = replica.optimizer("adam")
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            accumulate(replica.module, replica.sync, micro_batches(rank, 0))
            replica.sync.sync()
            replica.step(optimizer, clip=False)
        counts = {event.key: event.count for event in profiler.key_averages()}
        results.append({key.removeprefix("c10d::"): n for key, n in counts.items() if key.startswith("c10d::")})
    return results


def test_number_of_collectives() -> None:
    """They do not depend on the number of micro-batches, here 2: that is the point of breadth-first schedules."""
    for none, zero1, fsdp in run_distributed(2, _counted):
        assert none == {"allreduce_": 2}  # one bucket per stage
        assert zero1 == {"allreduce_": 2, "broadcast_": 2}  # and one for each owner
        # Stage 0 is gathered for its forwards and for its backwards, stage 1 once: its backwards follow. Per stage one
        # reduction, and one of the flags; `scale` has no dimension and is all-reduced.
        assert fsdp == {"_allgather_base_": 3, "_reduce_scatter_base_": 2, "allreduce_": 2 + 1}
