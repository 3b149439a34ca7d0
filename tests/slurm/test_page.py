"""Every command of docs/tutorials/slurm.md works, one after the other, in the repository's folder of a user."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.slurm.cluster import REPOSITORY, Cluster, Job

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(3600)]

PAGE = (REPOSITORY / "docs/tutorials/slurm.md").read_text()
COMMANDS = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_every_command(cluster: Cluster, tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "examples/slurm", tmp_path / "examples/slurm")
    job: Job | None = None
    preempted: Job | None = None
    ends = "COMPLETED"
    for command in COMMANDS:
        if "multirun" in command:
            pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
        if job is not None and "$job" not in command:
            assert job.wait(900)["JobState"] == ends, job.output
        ends = "CANCELLED" if command.startswith("scancel $job") else "COMPLETED"
        if job is not None and "scancel" in command:
            job.wait_for("One mini-batch, simulated", 300)
            preempted = job if "--signal=USR1" in command else preempted
        print(command, flush=True)
        job = run(cluster, command, tmp_path, job)
    assert preempted is not None
    assert "Received SIGUSR1: saved" in preempted.output
    assert "Restored all states from the checkpoint" in preempted.output


def run(cluster: Cluster, command: str, folder: Path, job: Job | None) -> Job | None:
    """Run a block of the page; the job that it submitted, or the one before."""
    before = f"job={job.number}\n" if job is not None else ""
    told = cluster.run("bash", "-ec", f"{before}{command}\necho job: $job", folder=folder, timeout=900)
    numbers = re.findall(r"job: (\d+)", told)
    return Job(cluster, int(numbers[-1]), folder) if numbers else job
