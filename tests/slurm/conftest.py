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
    reason = why_not_here()
    if reason:
        pytest.skip(f"no SLURM here: {reason}")
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), 2) as running:
        yield running
