"""Whatever happens to a job over several nodes of a real SLURM, it ends soon, or goes on to the same values."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slurm.cluster import REPOSITORY, Cluster
from tests.slurm.test_preemption import on_one_node, submit, told

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]


SLOW = {"STEP_SECONDS": 0.2, "EPOCHS": 16}
BOOT = 90
"""Seconds until a lost node is back. For over a minute SLURM goes on trying to tell it that the first run's step ends,
by the step's number, which the second run's step has, too.
"""


def test_a_lost_node(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, SAVE_EVERY=3, **SLOW)
    job.wait_for("trained 1 3", 200)
    began = time.monotonic()
    cluster.crash("node2")
    job.until(lambda: job.state != "RUNNING" or job.shown()["Restarts"] != "0", 120, "the loss is noticed")
    print(f"noticed after {time.monotonic() - began:.1f} s")
    time.sleep(BOOT)
    cluster.start("node2")
    back = time.monotonic()
    job.until(lambda: (job.state, job.shown()["Restarts"]) == ("RUNNING", "1"), 180, "the second run")
    print(f"runs again {time.monotonic() - back:.1f} s after the node is back")
    assert job.wait(600)["JobState"] == "COMPLETED", job.output
    values = told(job.output)
    expected = on_one_node(2, SLOW["EPOCHS"])
    assert set(values) == set(expected)
    assert values[-1] == expected[-1]
    assert len(values) - len(expected) <= 6, "steps are repeated from the newest checkpoint only"


def test_torchrun_goes_on_with_the_nodes_that_are_left(cluster: Cluster, tmp_path: Path) -> None:
    """Four processes, then two."""
    script = REPOSITORY / "examples/slurm/torchrun.sbatch"
    job = cluster.submit("--nodes=2", script, "-m", "tests.slurm.train", folder=tmp_path, SAVE_EVERY=3, **SLOW)
    job.wait_for("trained 1 3", 200)
    before = told(job.output)
    began = time.monotonic()
    cluster.crash("node2")
    try:
        job.wait_for("First cause: rank", 60)
        print(f"noticed after {time.monotonic() - began:.1f} s")
        job.wait_for("Restoring states", 200)
        print(f"processes are there again after {time.monotonic() - began:.1f} s")
        job.wait_for("Restored all states", 60)
        print(f"planned and loaded after {time.monotonic() - began:.1f} s")
        assert job.wait(300)["JobState"] == "COMPLETED", job.output
    finally:
        cluster.start("node2")
    assert told(job.output)[: len(before)] == before
    expected = {line.rpartition(" ")[0]: line for line in on_one_node(4, SLOW["EPOCHS"])}
    for line in told(job.output):
        if line.startswith("trained"):
            assert numbers(line) == pytest.approx(numbers(expected[line.rpartition(" ")[0]]), rel=1e-12, abs=1e-12)


def numbers(line: str) -> list[float]:
    return [float.fromhex(number) for number in re.findall(r"-?0x[\w.+-]+", line)]


SWEEP = (
    *("gpp-train", "--multirun", "hydra/launcher=slurm", "hydra.launcher.tasks_per_node=2", "hydra.sweep.dir=sweep"),
    *("experiment=two_tower", "trainer=slurm", "trainer.max_epochs=8", "test=false", "model.learning_rate=1e-3,2e-3"),
)


def test_a_preempted_job_of_a_sweep(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    with ThreadPoolExecutor() as pool:
        sweep = pool.submit(cluster.run, *SWEEP, folder=tmp_path, timeout=1200)
        folder = tmp_path / "sweep/0/checkpoints"  # made before the ranks meet
        cluster.until(lambda: sweep.done() or bool(list(folder.glob("*.ckpt"))), 300, "a checkpoint")
        assert not sweep.done(), sweep.result()
        job = cluster.run("squeue", "--noheader", "--format=%A", "--sort=i").split()[0]
        cluster.run("scancel", "--signal=USR2", job)
        sweep.result()
    assert (tmp_path / "sweep/0/hpc_ckpt_1.ckpt").exists()
    logs = "".join(log.read_text() for log in tmp_path.glob("sweep/.submitit/*/*_0_log.*"))
    assert logs.count("Restoring states from the checkpoint path at") == 1, logs
    for number in range(2):
        assert (tmp_path / f"sweep/{number}/checkpoints/last.ckpt").exists(), logs
