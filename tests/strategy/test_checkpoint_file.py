"""Checkpoint files: whole or not at all, whatever happens to the process or the disk."""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

from lightning_gpp.errors import CheckpointError
from lightning_gpp.strategy.checkpoints import AtomicCheckpointIO
from tests.distributed import run_distributed

WRITER = """
import sys, torch
from pathlib import Path
from lightning_gpp.checkpoints.file import write_file
for number in range(10**6):
    write_file({"number": torch.full((1 << 19,), number)}, Path(sys.argv[1]))
    print(number, flush=True)
"""


def contents(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_saved_and_loaded(tmp_path: Path) -> None:
    io, path = AtomicCheckpointIO(), tmp_path / "new" / "last.ckpt"
    io.save_checkpoint({"x": torch.ones(3)}, path)
    io.save_checkpoint({"x": torch.zeros(3)}, path)
    assert io.load_checkpoint(path)["x"].tolist() == [0, 0, 0]
    assert contents(path.parent) == ["last.ckpt"]


def killed_while_writing(folder: Path, times: int, seed: int) -> None:
    chance = random.Random(seed)
    path = folder / "last.ckpt"
    for _ in range(times):
        with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = int(process.stdout.readline())
            time.sleep(chance.uniform(0, 0.1))
            process.kill()
            last = [first, *map(int, process.stdout.read().split())][-1]
        saved = torch.load(path, weights_only=True)["number"]
        assert saved.unique().tolist() in ([last], [last + 1])
        assert {name for name in contents(folder) if not name.startswith(".")} == {"last.ckpt"}
    AtomicCheckpointIO().save_checkpoint({}, path)
    assert contents(folder) == ["last.ckpt"]


def test_a_killed_writer_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    killed_while_writing(tmp_path, times=2, seed=0)


def write_too_much(rank: int, path: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
    try:
        AtomicCheckpointIO().save_checkpoint({"x": torch.ones(1 << 20)}, path)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint({"x": 1}, path)
    (message,) = run_distributed(1, write_too_much, path)
    assert f"The checkpoint {path} cannot be written: File too large. An older one of this name" in message
    assert torch.load(path, weights_only=True) == {"x": 1}
    assert contents(tmp_path) == ["last.ckpt"]


def peak_of_saving(rank: int, path: Path) -> int:
    checkpoint = {"x": torch.ones(1 << 25)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    AtomicCheckpointIO().save_checkpoint(checkpoint, path)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


def test_saving_takes_no_memory_for_a_copy(tmp_path: Path) -> None:
    (more,) = run_distributed(1, peak_of_saving, tmp_path / "large.ckpt")
    assert more < os.path.getsize(tmp_path / "large.ckpt") / 8
