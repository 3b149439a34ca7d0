"""Whatever happens to a job over several nodes of a real SLURM, it ends soon, or goes on to the same values."""

from __future__ import annotations

import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.slurm.cluster import REPOSITORY, Cluster, Job
from tests.slurm.test_preemption import SCRIPT, TRAIN, on_one_node, submit, told

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]

PREEMPTIONS = 5
"""Of each job."""
SLOW, QUICK = {"STEP_SECONDS": 0.2, "EPOCHS": 16}, {"STEP_SECONDS": 0.005, "EPOCHS": 60}
MOMENTS = ("start", "step", "step", "validation", "saving")


def ask(cluster: Cluster, job: Job, whom: str) -> None:
    """Send SIGUSR1 to the script, to all tasks, or to the task of one node."""
    if whom == "one":
        cluster.hosts.run("node2", "pkill", "-USR1", "-f", f"{' '.join(TRAIN)}$", check=True)
    else:
        job.ask("USR1", everyone=whom == "everyone")


def disturb(cluster: Cluster, job: Job, chance: random.Random) -> str:
    """Ask the job to stop, at a random moment of its present run."""
    moment, whom = chance.choice(MOMENTS), chance.choice(("script", "everyone", "one"))
    if moment == "start":  # while Python starts, there is only the script to ask
        time.sleep(chance.uniform(0, 20))
        job.ask("USR1")
        return moment
    seen = "validating" if moment == "validation" else "trained"
    job.wait_for(seen, 300, times=job.output.count(seen) + chance.randint(1, 4))
    saved = job.output.count("saving")
    time.sleep(chance.uniform(0, 0.3))
    ask(cluster, job, whom)
    if moment == "saving":
        job.wait_for("saving", 60, times=saved + 1)
        ask(cluster, job, whom)
    return f"{moment}, {whom}"


@pytest.mark.parametrize("pace", [SLOW, QUICK], ids=["200ms", "5ms"])
@pytest.mark.parametrize("seed", range(5))
def test_preempted_at_any_moments(cluster: Cluster, tmp_path: Path, seed: int, pace: dict[str, object]) -> None:
    chance = random.Random(f"{seed} {pace}")
    job = submit(cluster, tmp_path, SAVE_SECONDS=0.3, **pace)
    for time_ in range(PREEMPTIONS):
        job.until(lambda run=time_: (job.state, job.shown()["Restarts"]) == ("RUNNING", str(run)), 120, "a run")
        print(time_, disturb(cluster, job, chance), flush=True)
        job.until(lambda run=time_: int(job.shown()["Restarts"]) > run or job.ended, 120, "requeue")
        assert not job.ended, job.output
    assert job.wait(600)["JobState"] == "COMPLETED", job.output
    assert told(job.output) == on_one_node(2, pace["EPOCHS"])


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


def test_a_rank_that_fails_before_the_ranks_have_met(cluster: Cluster, tmp_path: Path) -> None:
    """The other one waits for it, with a handler for signals."""
    fails = (
        f"until grep -q started slurm-$SLURM_JOB_ID.out; do sleep 0.1; done; sleep 3; {TRAIN[0]} -c 'import nothing'"
    )
    job = cluster.submit(
        "--nodes=2",
        "--ntasks-per-node=1",
        SCRIPT,
        "bash",
        "-c",
        f"if [ $SLURM_NODEID = 1 ]; then {fails}; else exec {' '.join(TRAIN)}; fi",
        folder=tmp_path,
    )
    job.wait_for("ModuleNotFoundError", 120)
    began = time.monotonic()
    job.until(lambda: job.ended, 60, "end")
    print(f"ended {time.monotonic() - began:.1f} s after the error")
    assert time.monotonic() - began < 5.0
    assert job.state == "FAILED"


def test_other_numbers_of_nodes(large_cluster: Cluster, tmp_path: Path) -> None:
    """4 -> 2 -> 4 nodes."""
    job = large_cluster.submit("--nodes=4", "--ntasks-per-node=1", SCRIPT, *TRAIN, folder=tmp_path, STEP_SECONDS=0.2)
    for run, nodes in enumerate((2, 4)):
        job.wait_for("trained", 300, times=3 + 4 * run)
        job.ask("USR1")
        job.until(lambda run=run: job.shown()["Restarts"] == str(run + 1), 120, "requeue")
        large_cluster.run("scontrol", "update", f"JobId={job.number}", f"NumNodes={nodes}")
    assert job.wait(300)["JobState"] == "COMPLETED", job.output
    expected = on_one_node(4)
    assert [line.split()[:3] for line in told(job.output)] == [line.split()[:3] for line in expected]
    for line, undisturbed in zip(told(job.output), expected, strict=True):
        assert numbers(line) == pytest.approx(numbers(undisturbed), rel=1e-12, abs=1e-12)


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
