"""Private names of Lightning around processes do what the library needs of them. Processes are real ones."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only as shared_rank_zero_only

from lightning_gpp._compat import lightning_processes as compat
from tests.distributed import run_distributed
from tests.interpreter import Program

LAUNCHED = """
import os, pathlib, sys
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning_gpp._compat.lightning_processes import LAUNCHER, subprocess_launcher

if "LOCAL_RANK" in os.environ:
    pathlib.Path(sys.argv[1]).write_text(f"{os.environ['LOCAL_RANK']} {os.environ[LAUNCHER]}")
else:
    launcher = subprocess_launcher(LightningEnvironment(), 2, 1)
    launcher.launch(lambda: [process.wait() for process in launcher.procs])
    print(os.getpid(), LAUNCHER in os.environ)
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], list[str]]:
    """Local rank and parent that the second process found; process id of the first, and what it kept of the launch."""
    folder = tmp_path_factory.mktemp("launched")
    script, note = folder / "script.py", folder / "note"
    script.write_text(LAUNCHED)
    code, output = Program(str(script), str(note)).outcome(50)
    assert code == 0, output
    return note.read_text().split(), output.split()


def test_subprocess_launcher(launched: tuple[list[str], list[str]]) -> None:
    (local_rank, _), _ = launched
    assert local_rank == "1"


def test_multiprocessing_launcher() -> None:
    launcher = compat.multiprocessing_launcher(None, "fork")
    assert launcher.is_interactive_compatible
    assert not compat.multiprocessing_launcher(None, "spawn").is_interactive_compatible


def test_launcher(launched: tuple[list[str], list[str]]) -> None:
    (_, parent), (process_id, kept) = launched
    assert parent == process_id
    assert kept == "False"


@pytest.fixture
def no_group_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("no_group_left")
def test_init_process_group() -> None:
    compat.init_process_group(LightningEnvironment(), "gloo", global_rank=0, world_size=1)
    assert dist.get_backend() == "gloo"
    assert os.environ["MASTER_PORT"]


def test_default_backend() -> None:
    assert compat.default_backend(torch.device("cpu")) == "gloo"
    assert compat.default_backend(torch.device("cuda", 1)) == "nccl"


def test_set_rank_zero() -> None:
    before = [function.rank for function in (rank_zero_only, shared_rank_zero_only)]
    compat.set_rank_zero(3)
    try:
        assert [function(lambda: "ran")() for function in (rank_zero_only, shared_rank_zero_only)] == [None, None]
    finally:
        compat.set_rank_zero(0)
    assert [function(lambda: "ran")() for function in (rank_zero_only, shared_rank_zero_only)] == ["ran", "ran"]
    for function, rank in zip((rank_zero_only, shared_rank_zero_only), before, strict=True):
        function.rank = rank


def reduced_and_gathered(rank: int) -> tuple[list[float], list[float], list[float]]:
    tensor = torch.tensor([float(rank)], requires_grad=True)
    group = dist.group.WORLD
    means = compat.reduce_over(torch.tensor([float(rank)]), group, "mean")
    gathered = compat.gather_over(tensor, group, sync_grads=True)
    (gathered.sum() * (rank + 1)).backward()
    assert tensor.grad is not None
    return means.tolist(), gathered.flatten().tolist(), tensor.grad.tolist()


def test_reduce_over() -> None:
    assert [means for means, _, _ in run_distributed(2, reduced_and_gathered)] == [[0.5], [0.5]]


def test_gather_over() -> None:
    results = run_distributed(2, reduced_and_gathered)
    assert [(gathered, gradient) for _, gathered, gradient in results] == [([0, 1], [3]), ([0, 1], [3])]
