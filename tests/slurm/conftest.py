"""Clusters for tests; without SLURM, or where hosts cannot be made, their tests are skipped."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, why_not_here


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two nodes."""
    yield from _cluster(2)


@pytest.fixture(scope="session")
def large_cluster() -> Iterator[Cluster]:
    """Four nodes."""
    yield from _cluster(4)


def _cluster(num_nodes: int) -> Iterator[Cluster]:
    reason = why_not_here()
    if reason:
        pytest.skip(f"no SLURM here: {reason}")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), num_nodes) as running:
        yield running
