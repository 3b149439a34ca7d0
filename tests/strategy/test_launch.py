"""Processes started by Lightning, by torchrun, and by SLURM train the same; when one ends early, all end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from tests.distributed import PATIENCE, free_port
from tests.interpreter import PATH, Program
from tests.sampling import sample
from tests.strategy import harness
from tests.strategy.harness import TwoTowers, loader

SCRIPT = str(Path(__file__).with_name("script.py"))


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PL_", "LOCAL_RANK"))}
    path = os.pathsep.join([PATH, clean.get("PYTHONPATH", "")])
    return {**clean, "PYTHONPATH": path, "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", **variables}


def start(arguments: list[str], **variables: str) -> Program:
    return Program(*arguments, environment=environment(**variables))


def outcome(program: Program) -> tuple[int, str]:
    return program.outcome(PATIENCE)


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"rank \d of 2 ended with ([\d.]+)", output)]


def by_lightning(folder: Path) -> str:
    return succeeded(start([SCRIPT, str(folder), "trace", "0"]))


def by_torchrun(folder: Path) -> str:
    torchrun = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    return succeeded(start([*torchrun, SCRIPT, str(folder), "default", "0"]))


def by_slurm(folder: Path) -> str:
    common = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_JOB_ID": "4711"}
    common |= {"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port())}
    ranks = [{**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    processes = [start([SCRIPT, str(folder), "default", "0"], **variables) for variables in ranks]
    return "".join([succeeded(process) for process in processes])


def succeeded(program: Program) -> str:
    code, output = outcome(program)
    assert code == 0, output
    return output


def plain_loss() -> float:
    """The last loss of the script's training on one process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl.seed_everything(1, verbose=False)
        module = TwoTowers().double()
        harness.trainer().fit(module, loader(), loader(10, seed=2))
    return module.losses[-1]


@pytest.mark.parametrize("launch", sample([by_lightning, by_torchrun, by_slurm], [by_torchrun, by_slurm]))
def test_started_by(tmp_path: Path, launch: Callable[[Path], str]) -> None:
    output = launch(tmp_path)
    assert losses(output) == pytest.approx([plain_loss()] * 2, rel=1e-10)
    assert output.count("| parameters | FLOPs |") == 1  # the plan's table, printed once
    checkpoint = next(tmp_path.rglob("*.ckpt"))
    assert "left.0.weight" in torch.load(checkpoint, weights_only=True)["state_dict"]
    if launch is by_lightning:
        assert output.count("Simulated and measured, mean of") == 1
        check_trace(tmp_path)


def check_trace(folder: Path) -> None:
    events = json.loads((folder / "gpp-trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    for rank in range(2):
        assert {event["args"]["mini_batch"] for event in spans if event["pid"] == rank} == set(range(6))


@pytest.mark.acceptance
@pytest.mark.parametrize(("kind", "rank", "cause"), [("raise", 0, "the fault of this test"), ("kill", 1, "SIGKILL")])
def test_a_failure_of_one_rank_ends_all(tmp_path: Path, kind: str, rank: int, cause: str) -> None:
    started = time.monotonic()
    code, output = outcome(start([SCRIPT, str(tmp_path), kind, str(rank)]))
    assert code != 0
    assert time.monotonic() - started < PATIENCE
    assert cause in output
    assert re.search(rf"[Rr]ank {rank}", output)
    assert not running(tmp_path)
    if kind == "raise":  # the user's line, and no frames of this library
        banner = output.split("=" * 100)[1]
        assert re.search(r"raised \w+: .*\(/.*script\.py:\d+\)", banner)
        assert "Traceback" in banner
        assert "lightning_gpp/" not in banner


@pytest.mark.acceptance
def test_a_rank_whose_launcher_has_gone_ends_before_it_waits(tmp_path: Path) -> None:
    program = start([SCRIPT, str(tmp_path), "orphan", "0"])
    wait_for(lambda: (tmp_path / "started").exists())
    assert running(tmp_path)
    program.send_signal(signal.SIGKILL)
    outcome(program)  # comes when the last holder of the output has ended
    assert not running(tmp_path)


def running(folder: Path) -> str:
    return subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True, check=False).stdout


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
