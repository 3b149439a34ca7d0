"""Processes started by Lightning, by torchrun, and by SLURM train the same; when one ends early, all end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = str(Path(__file__).with_name("script.py"))
LIMIT = 100.0

pytestmark = pytest.mark.timeout(150)  # each process of a script imports torch and Lightning anew


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PL_", "LOCAL_RANK"))}
    path = os.pathsep.join([str(ROOT), clean.get("PYTHONPATH", "")])
    return {**clean, "PYTHONPATH": path, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **variables}


def start(arguments: list[str], **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def outcome(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    return process.returncode, output


def losses(output: str) -> list[str]:
    return re.findall(r"rank \d of 2 ended with ([\d.]+)", output)


def slurm(folder: Path) -> str:
    port, outputs = str(free_port()), []
    common = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "4711"}
    common |= {"SLURM_JOB_NAME": "train", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    processes = [start([SCRIPT, str(folder), "default", "0"], **variables) for variables in ranks]
    for process in processes:
        code, output = outcome(process)
        assert code == 0, output
        outputs.append(output)
    return "".join(outputs)


def test_lightning_torchrun_and_slurm_train_the_same(tmp_path: Path) -> None:
    code, lightning = outcome(start([SCRIPT, str(tmp_path / "lightning"), "trace", "0"]))
    assert code == 0, lightning
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}", SCRIPT]
    code, elastic = outcome(start([*torchrun, str(tmp_path / "torchrun"), "default", "0"]))
    assert code == 0, elastic
    found = [losses(output) for output in (lightning, elastic, slurm(tmp_path / "slurm"))]
    assert [len(entries) for entries in found] == [2, 2, 2]
    assert len({loss for entries in found for loss in entries}) == 1
    check_trace(tmp_path / "lightning")
    assert "in flight" in lightning  # the plan's table, printed once
    assert lightning.count("| stage") == 1
    checkpoint = next((tmp_path / "torchrun").rglob("*.ckpt"))
    assert "left.0.weight" in torch.load(checkpoint, weights_only=True)["state_dict"]


def check_trace(folder: Path) -> None:
    for rank in range(2):
        events = json.loads((folder / f"gpp-trace-rank{rank}.json").read_text())["traceEvents"]
        assert {event["tid"] for event in events} == {rank}
        assert {event["args"]["mini_batch"] for event in events} == set(range(6))


@pytest.mark.parametrize(("kind", "rank", "cause"), [("raise", 0, "the fault of this test"), ("kill", 1, "SIGKILL")])
def test_a_failure_of_one_rank_ends_all(tmp_path: Path, kind: str, rank: int, cause: str) -> None:
    started = time.monotonic()
    code, output = outcome(start([SCRIPT, str(tmp_path), kind, str(rank)]))
    assert code != 0
    assert time.monotonic() - started < LIMIT
    assert cause in output
    assert re.search(rf"[Rr]ank {rank}", output)
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True, check=False)
    assert left.stdout == ""
