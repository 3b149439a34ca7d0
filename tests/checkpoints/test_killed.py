"""Kills at any instant of saving: there is always a whole checkpoint, and never a wrong one."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_gpp.checkpoints.atomic import remove
from lightning_gpp.checkpoints.convert import ordinary
from lightning_gpp.checkpoints.folder import write_folder
from lightning_gpp.checkpoints.layout import dumped
from lightning_gpp.checkpoints.saver import Saver
from tests import distributed

NUMBERS = 1 << 16


def save_for_ever(rank: int, folder: str, rendezvous: str, mode: str, sender: Connection) -> None:
    """Write checkpoint after checkpoint on two ranks, and tell which ones are there."""
    init = f"file://{rendezvous}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timedelta(seconds=30))
    saver = Saver(background=mode == "background")
    for number in range(10**6):
        tensors = {"model": {f"w{rank}": torch.full((NUMBERS,), number)}}
        path = Path(folder, f"step={number}.ckpt" if mode == "rolling" else "last.ckpt")
        write = lambda t=tensors, n=number, p=path: write_folder(t, dumped({"number": n}), p, dist.group.WORLD)  # noqa: E731
        saver.run(write)
        if rank == 0 and mode == "rolling":
            remove(path.with_name(f"step={number - 1}.ckpt"))
        if rank == 0:
            sender.send(number - (mode == "background"))


def kill_once(folder: Path, mode: str, chance: random.Random) -> int:
    """Kill both ranks, one after the other, at a random instant. Returns the last checkpoint that was told."""
    receiver, sender = distributed.CONTEXT.Pipe(duplex=False)
    rendezvous = str(folder.parent / f"rendezvous{chance.random()}")
    arguments = str(folder), rendezvous, mode, sender
    ranks = [distributed.CONTEXT.Process(target=save_for_ever, args=(rank, *arguments), daemon=True) for rank in (0, 1)]
    for process in ranks:
        process.start()
    told = receiver.recv() if receiver.poll(50) else -2
    while told < 0:
        told = receiver.recv()
    time.sleep(chance.uniform(0, 0.15))
    chance.shuffle(ranks)
    for process in ranks:
        with contextlib.suppress(ProcessLookupError):  # it may have failed because of the other one
            os.kill(process.pid, signal.SIGKILL)
        time.sleep(chance.choice([0, 0.01]))
        process.join()
    while receiver.poll():
        told = receiver.recv()
    return told


def killed(folder: Path, mode: str, times: int, seed: int) -> None:
    chance = random.Random(seed)
    folder.mkdir()
    for _ in range(times):
        told = kill_once(folder, mode, chance)
        whole = sorted(name for name in os.listdir(folder) if not name.startswith(".")) or ["last.ckpt"]
        numbers = [number_in(folder / name) for name in whole]
        assert max(numbers) in (told, told + 1, told + 2), "the newest is there"
        assert len(numbers) <= 2
        for name in whole if mode == "rolling" else ():
            remove(folder / name)


def number_in(path: Path) -> int:
    checkpoint = ordinary(path)
    number = checkpoint["number"]
    assert sorted(checkpoint["state_dict"]) == ["w0", "w1"]
    assert all(value.eq(number).all() and len(value) == NUMBERS for value in checkpoint["state_dict"].values())
    return int(number)


@pytest.mark.parametrize("mode", ["replaced", "background"])
def test_a_killed_writer_leaves_a_whole_checkpoint(mode: str, tmp_path: Path) -> None:
    killed(tmp_path / "checkpoints", mode, times=1, seed=0)


@pytest.mark.acceptance
@pytest.mark.parametrize("mode", ["replaced", "rolling", "background"])
def test_killed_at_a_hundred_moments(mode: str, tmp_path: Path) -> None:
    killed(tmp_path / "checkpoints", mode, times=100, seed=1)
