"""Python's collector during searches."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lightning_gpp.cluster import Cluster, Link
from lightning_gpp.planning import Request, best_plan, search
from lightning_gpp.planning.garbage import collected_rarely
from tests.planning import graphs
from tests.planning.drafts import DEVICE


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_it_runs_rarely_inside_and_as_before_afterwards(thresholds: tuple[int, int, int]) -> None:
    with collected_rarely():
        assert gc.get_threshold()[0] > 100 * thresholds[0] > 0
    assert gc.get_threshold() == thresholds
    with suppress(KeyboardInterrupt), collected_rarely():
        raise KeyboardInterrupt
    assert gc.get_threshold() == thresholds


@pytest.mark.usefixtures("thresholds")
@pytest.mark.parametrize("first", [0, 10_000_000])
def test_it_does_not_run_more_often_than_the_user_wants(first: int) -> None:
    gc.set_threshold(first, 10, 10)
    with collected_rarely():
        assert gc.get_threshold()[0] == first


def test_searches_and_trials_are_inside(monkeypatch: pytest.MonkeyPatch, thresholds: tuple[int, int, int]) -> None:
    seen: list[int] = []
    predicted = search.predicted
    monkeypatch.setattr(
        search, "predicted", lambda *a, **k: (seen.append(gc.get_threshold()[0]), predicted(*a, **k))[1]
    )
    cluster = Cluster.uniform(DEVICE, 2, Link(bytes_per_second=1e9))
    best_plan("auto", graphs.two_towers(), Request(cluster=cluster, batch_size=8, seconds=1.0))
    assert seen
    assert min(seen) > 100 * thresholds[0]
    assert gc.get_threshold() == thresholds
