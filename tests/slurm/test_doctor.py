"""`srun gpp-doctor` examines all tasks of a job on two nodes."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from lightning_gpp.cluster import load_cluster
from tests.slurm.cluster import Cluster

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]


def test_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    doctor = (sys.executable, "-m", "lightning_gpp.cli.doctor", "--output=lab.yaml")
    told = cluster.run("srun", "--nodes=2", "--ntasks-per-node=2", *doctor, folder=tmp_path, timeout=300)
    assert re.search(r"ranks 0-1 on (\S+), ranks 2-3 on (?!\1)", told)
    assert re.search(r"between machines [\d.e+]+ us", told)
    assert [load_cluster(tmp_path / "lab.yaml").node_of(device) for device in range(4)] == [0, 0, 1, 1]
