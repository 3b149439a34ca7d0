"""The helper of all tests with several processes does what it says."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_distributed


def _sum_of_ranks(rank: int, offset: int) -> int:
    total = torch.tensor([rank + offset])
    dist.all_reduce(total)
    return int(total)


def _fail_on(rank: int, failing: int) -> None:
    if rank == failing:
        raise ValueError("the cause")
    dist.barrier()


def _sleep_on(rank: int, sleeping: int) -> None:
    if rank == sleeping:
        time.sleep(60)


def test_returns_results_by_rank() -> None:
    assert run_distributed(3, _sum_of_ranks, 10) == [33, 33, 33]


def test_reports_the_failing_rank() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1:.*ValueError: the cause"):
        run_distributed(2, _fail_on, 1)


def test_reports_where_a_rank_hangs() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 0 did not end.*_sleep_on"):
        run_distributed(1, _sleep_on, 0, timeout=4)
