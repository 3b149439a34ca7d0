"""Jobs over several nodes of a real SLURM: preempted, requeued and resumed to the same values."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import pytest

from tests.failure.pipeline_rank import processes_running
from tests.failure.program import as_torchrun_would
from tests.slurm.cluster import REPOSITORY, Cluster, Job

SCRIPT = REPOSITORY / "examples/slurm/requeue.sbatch"
TRAIN = ("python", "-m", "tests.slurm.train")


def told(output: str) -> list[str]:
    """The values that rank 0 printed, in all runs of a job."""
    return re.findall("^(?:trained|validated) .*$", output, re.MULTILINE)


@functools.cache
def on_one_node(world_size: int, epochs: int = 2) -> list[str]:
    """The values of an undisturbed run without SLURM."""
    with (
        tempfile.TemporaryDirectory() as folder,
        processes_running(Path(folder), world_size, as_torchrun_would, folder, (), {"max_epochs": epochs}) as running,
    ):
        running.wait(300)
        assert running.codes == [0] * world_size, running.output()
        return told(running.output(0))


def submit(cluster: Cluster, folder: Path, world_size: int = 2, **variables: object) -> Job:
    shape = ("--nodes=2", f"--ntasks-per-node={world_size // 2}")
    return cluster.submit(*shape, SCRIPT, *TRAIN, folder=folder, **variables)


@pytest.mark.acceptance
@pytest.mark.timeout(400)
def test_a_preempted_job_over_two_nodes_ends_with_the_values_of_one_node(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, STEP_SECONDS=0.05)
    job.wait_for("trained 0 4", 150)
    job.ask("USR1")
    assert job.wait(200)["JobState"] == "COMPLETED", job.output
    assert job.shown()["Restarts"] == "1"
    assert told(job.output) == on_one_node(2)
