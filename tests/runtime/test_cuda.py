"""CUDA graphs are recorded by torch's rules for their memory, which a stand-in for its allocator follows here."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch

from lightning_gpp.runtime import cuda

DEVICE = torch.device("cpu")


class Allocator:
    """The part of torch that keeps account of pools: how many graphs use each, and which captures are under way."""

    def __init__(self) -> None:
        self.users: dict[int, int] = {}
        self.under_way: list[int] = []
        self.draws = True

    def new(self) -> int:
        return len(self.users) + 1

    def leave(self, device: torch.device, pool: int) -> None:
        self.under_way.remove(pool)
        self.users[pool] -= 1


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    allocator: ClassVar[Allocator]

    def __init__(self) -> None:
        self.pool, self.is_valid = 0, True

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        users = self.allocator.users
        assert users.get(pool, 1) > 0, "torch refuses a pool whose graphs are all gone"
        assert pool not in self.allocator.under_way, "torch is already recording to this pool"
        users[pool] = users.get(pool, 0) + 1
        self.pool, self.allocator.draws = pool, False
        self.allocator.under_way.append(pool)
        Graph.current = weakref.ref(self)

    def capture_end(self) -> None:
        if not self.is_valid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.allocator.under_way.remove(self.pool)
        self.allocator.draws = True

    def replay(self) -> None:
        assert self.is_valid

    def __del__(self) -> None:
        if self.pool and self.is_valid:
            self.allocator.users[self.pool] -= 1

    current: ClassVar[Callable[[], Graph | None]]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    Graph.allocator = made = Allocator()
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": lambda device: None,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "graph_pool_handle": made.new,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(cuda, "leave_pool", made.leave)
    return made


def reads() -> None:
    graph = Graph.current()
    assert graph is not None
    graph.is_valid = False
    raise RuntimeError("operation not permitted when stream is capturing")


def refuses() -> None:
    raise ValueError("an error that has nothing to do with the GPU")


def test_records_are_made_again_after_all_of_them_are_gone(allocator: Allocator) -> None:
    graphs = cuda.CudaGraphs(DEVICE)
    for _ in range(3):
        records = [graphs.record(lambda: None) for _ in range(2)]
        assert list(allocator.users.values()) == [3]
        records.clear()
    assert allocator.users == {1: 1}


def test_a_record_that_fails_spoils_no_others(allocator: Allocator) -> None:
    graphs = cuda.CudaGraphs(DEVICE)
    before = graphs.record(lambda: None)
    with pytest.raises(RuntimeError, match="not permitted"):
        graphs.record(reads)
    assert allocator.under_way == []
    assert allocator.draws, "random numbers can be drawn although nothing more is recorded"
    assert allocator.users == {1: 1, 2: 1}, "only good records keep pools"
    graphs.record(lambda: None)()
    before()


def test_an_error_in_python_keeps_the_pool(allocator: Allocator) -> None:
    graphs = cuda.CudaGraphs(DEVICE)
    with pytest.raises(ValueError, match="nothing to do"):
        graphs.record(refuses)
    assert allocator.users == {1: 1}
    assert allocator.under_way == []


def test_recorders_that_are_apart_share_no_pool(allocator: Allocator) -> None:
    graphs = cuda.CudaGraphs(DEVICE)
    records = [graphs.record(lambda: None), graphs.apart().record(lambda: None)]
    assert len(allocator.users) == len(records)


def test_gradients_are_added_in_the_stream_of_a_capture(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(torch.autograd.graph, "set_override_stale_capture_stream", told.append, raising=False)
    cuda.CudaGraphs(DEVICE).record(lambda: None)
    assert told == [True]
    monkeypatch.delattr(torch.autograd.graph, "set_override_stale_capture_stream")
    cuda.CudaGraphs(DEVICE).record(lambda: None)


def test_only_torchs_own_allocator_keeps_the_memory_of_records(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda", 0)
    for backend, records in {"native": True, "cudaMallocAsync": False}.items():
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        assert (cuda.recorder_of(device) is not None) is records
    assert cuda.recorder_of(DEVICE) is None
