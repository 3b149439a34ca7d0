"""A rank that hangs: every rank prints where it is and what it waits for, rank 0 says whom to look at first."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_gpp.failure.chair import Chair
from lightning_gpp.failure.hangs import RELIEF, Activity, Wait, conclusion
from lightning_gpp.failure.limits import Limits
from lightning_gpp.failure.monitor import FailureMonitor
from lightning_gpp.failure.processes import ProcessIdentity
from lightning_gpp.failure.report import Cause
from tests.failure.pipeline_rank import Rank, processes_running
from tests.failure.program import as_torchrun_would

WORLD_SIZE = 3


@pytest.mark.parametrize(
    ("rank", "moment"), [(1, "forward 10"), pytest.param(0, "validating", marks=pytest.mark.acceptance)]
)
def test_a_hang_in_user_code_names_its_line(tmp_path: Path, rank: int, moment: str) -> None:
    arguments = (str(tmp_path), (rank, "hang", moment), {"strategy": {"timeout": 10}, "num_sanity_val_steps": 0})
    with processes_running(tmp_path, WORLD_SIZE, as_torchrun_would, *arguments) as running:
        running.wait(50)
    assert all(running.codes), running.codes
    reports = [re.search(r"Hang report: (.*)", running.output(each)) for each in range(WORLD_SIZE)]
    told = [found[1] for found in reports if found]
    assert len(told) == WORLD_SIZE, running.output()
    assert "It waits for no rank" in told[rank]
    assert re.search(r"called from \S*program\.py:\d+ in hang", told[rank])
    assert f"Look at rank {rank} first" in running.output(0)
    assert f"A hang was reported before. Look at rank {rank} first" in running.output(0)
    assert "that was no hang" not in running.output()
    step = "training_step, mini-batch 2" if moment == "forward 10" else "validation_step, mini-batch 3"
    expected = (
        rf"action \w+ \((wait|send)\) of {step}, for [\d.]+ s. It waits for rank {rank} to (send|take) "
        r"(gradients|tensors) \(\w+\) of micro-batch \d, samples \[\d, \d\), on the edge from stage '\w+' to stage "
    )
    assert re.search(expected, told[rank + 1]), told


def wait_in_turn(rank: int, world_size: int, port: int) -> None:
    """Rank 1 takes its time twice: once it was no hang, then nothing follows."""
    store = dist.TCPStore("127.0.0.1", port, world_size, rank == 0, timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    known: list[Rank] = []
    activity = Activity(
        describe=lambda: f"step {known[0].step}" if known else "start",
        wait=lambda: None if rank == 1 else Wait(what="rank 1", ranks=(1,)),
    )
    with FailureMonitor(rank=rank, world_size=world_size, activity=activity, limits=Limits(hang=1.0)) as monitor:
        known.append(Rank(rank, world_size, monitor))
        for _ in range(5):
            known[0].exchange()
            if rank == 1:
                threading.Event().wait(2.5 * (known[0].step == 2))
        for _ in range(round((RELIEF + 1) / 0.2)):
            known[0].exchange()
            time.sleep(0.2)
    dist.destroy_process_group()


def test_what_only_takes_long_goes_on_and_says_so(tmp_path: Path) -> None:
    with processes_running(tmp_path, 3, wait_in_turn) as running:
        running.wait(40)
    assert running.codes == [0, 0, 0], running.output()
    for rank in range(3):
        assert running.output(rank).count("Hang report: step ") == 1, running.output()
        assert re.search(r"It goes on, after \d+ s: that was no hang", running.output(rank)), running.output()
    assert running.output(0).count("Look at rank 1 first: all others wait, and it does not.") == 1


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ({0: (1,), 1: (), 2: (1,)}, "Look at rank 1 first: all others wait, and it does not."),
        ({0: (1,), 1: (0,)}, "All ranks wait for others: 0 for rank 1, 1 for rank 0."),
        ({0: (), 1: ()}, "No rank waits for another one: all of them are busy, or hang in their own code."),
    ],
)
def test_the_conclusion(waits: dict[int, tuple[int, ...]], said: str) -> None:
    assert conclusion(waits).startswith(said)


def test_the_end_of_a_run_that_other_ranks_do_not_reach_ends_the_job() -> None:
    """One rank trains alone in a loop of its own, and the other has left it."""
    cell = {"process": asdict(ProcessIdentity.current()), "round": 0, "told": 0, "stuck": True}
    cells = {0: {**cell, "ranks": [1]}, 1: {**cell, "ranks": [0], "calls": True}}
    proposed = list[Cause]()
    chair = Chair(2, ProcessIdentity.current(), proposed.append, proposed.append)
    for beat in range(2):
        chair.hear(cells, beat, 0.0, ended=False)
        cells = {rank: {**each, "told": chair.board["hang"]} for rank, each in cells.items()}
    assert re.match(r"waits in a call that rank 0 does not make\. Let every rank make it", proposed[0].event)
