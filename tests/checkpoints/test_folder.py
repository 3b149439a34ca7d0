"""Checkpoint folders: written by all ranks or not at all, read in parts, and replaced without a moment without one."""

from __future__ import annotations

import io
import os
import random
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_gpp.checkpoints import atomic
from lightning_gpp.checkpoints.convert import convert, opened, ordinary
from lightning_gpp.checkpoints.folder import META, METADATA, is_folder, write_folder
from lightning_gpp.checkpoints.layout import dumped, entry_of
from lightning_gpp.checkpoints.stored import Folder
from lightning_gpp.errors import CheckpointError
from lightning_gpp.strategy.checkpoints import AtomicCheckpointIO
from tests.checkpoints.differences import differences
from tests.distributed import run_distributed

Tree = dict[str, Any]


def write(path: Path, number: int) -> None:
    write_folder({"model": {"w": torch.full((3,), number)}}, dumped({"number": number}), path, None)


def visible(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_folder_takes_the_place_of_a_folder_a_file_and_a_link(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    for number in range(2):
        write(path, number)
        assert ordinary(path)["number"] == number
    convert(path, tmp_path / "file.ckpt")
    path.rename(tmp_path / "target.ckpt")
    for target in (tmp_path / "file.ckpt", path):
        path.unlink(missing_ok=True)
        path.symlink_to("target.ckpt")
        write(target, 7)
        assert ordinary(target)["number"] == 7
    assert ordinary(tmp_path / "target.ckpt")["number"] == 1
    assert visible(tmp_path) == ["file.ckpt", "last.ckpt", "target.ckpt"]


def test_between_two_renames_the_previous_folder_is_found(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1)
    (tmp_path / ".saving").mkdir()
    path.rename(tmp_path / ".saving" / "last.ckpt.previous")
    assert is_folder(path)
    assert opened(path)["number"] == 1
    write(path, 2)
    assert visible(tmp_path) == ["last.ckpt"]


def test_half_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "last.ckpt", 1)
    (tmp_path / "last.ckpt" / ".metadata").unlink()
    with pytest.raises(
        CheckpointError, match="last.ckpt is not a whole checkpoint: a folder needs the files .metadata"
    ):
        Folder(tmp_path / "last.ckpt")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", [META, METADATA, "__0_0.distcp"])
@pytest.mark.parametrize("damage", [cut, Path.unlink])
def test_a_damaged_folder_is_refused_with_the_name_of_its_file(
    damage: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1)
    damage(path / name)
    with pytest.raises(CheckpointError, match=re.escape(name)) as raised:
        convert(path, tmp_path / "copy.ckpt")
    assert str(path) in str(raised.value)
    assert visible(tmp_path) == ["last.ckpt"]


def zipped(entry: bytes) -> bytes:
    """A file of torch, whose pickle is replaced."""
    file = io.BytesIO()
    torch.save({"state_dict": {}}, file)
    return file.getvalue().replace(b"state_dict", entry)


JUNK = {
    "nothing": b"",
    "a megabyte": random.Random(1).randbytes(1 << 20),
    "an opcode that overflows": b"\x8e" + b"\xff" * 8,
    "changed": zipped(b"\xff" * 10),
}


@pytest.mark.parametrize("content", JUNK.values(), ids=JUNK)
def test_a_file_that_is_no_checkpoint_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(content)
    for read in (AtomicCheckpointIO().load_checkpoint, opened):
        with pytest.raises(CheckpointError, match=r"last.ckpt is not a checkpoint that can be read: .* it is damaged"):
            read(path, **({} if read is opened else {"weights_only": content == JUNK["a megabyte"]}))


@pytest.mark.parametrize("meta", [[1], {"gpp": "text"}, {"gpp": {"names": 3}}, {"gpp": {"pipeline": [1]}}], ids=str)
def test_a_folder_whose_facts_are_of_wrong_types_is_refused(meta: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1)
    torch.save(meta, path / META)
    with pytest.raises(CheckpointError, match=r"last.ckpt"):
        entry_of(AtomicCheckpointIO().load_checkpoint(path), path)


def test_a_file_that_does_not_exist_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.ckpt") as raised:
        convert(tmp_path / "none.ckpt", tmp_path / "copy.ckpt")
    assert isinstance(raised.value, CheckpointError)


def test_a_removed_checkpoint_loses_its_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "last.ckpt", 1)
    removed = []
    monkeypatch.setattr(atomic, "discard", removed.append)
    atomic.remove(tmp_path / "last.ckpt")
    assert visible(tmp_path) == [".saving"]
    assert removed[-1] == tmp_path / ".saving" / "last.ckpt"


# -- full disks -------------------------------------------------------------------------------------------------------


def write_too_much(rank: int, path: Path, limit: int) -> str:
    """Rank 1 has too little room."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        write_folder({"model": {f"w{rank}": torch.ones(1 << 20)}}, dumped({}), path, dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_write_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    write(path, 1)
    messages = run_distributed(2, write_too_much, path, 1 << 16)
    told = f"The checkpoint {path} cannot be written: File too large (rank 1). An older one of this name is as it was."
    assert messages == [f"{told} (gpp-doctor explain checkpoint)"] * 2
    assert ordinary(path)["number"] == 1
    assert visible(tmp_path) == ["last.ckpt"]


# -- conversion -------------------------------------------------------------------------------------------------------


def lightning_file(path: Path) -> Tree:
    """A file as plain Lightning writes it, whose optimizer knows parameters by number, with values of all kinds."""
    weight = torch.randn(5, 4, dtype=torch.float64)
    state = {0: {"step": torch.tensor(3.0), "exp_avg": weight.clone()}, 2: {"buffers": [torch.ones(2)], "note": None}}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}, {"lr": 0.2, "betas": (0.9, 0.9), "params": [2]}]
    without = {"state": {}, "param_groups": [{"params": [0]}]}
    checkpoint = {
        "epoch": 1,
        "global_step": 7,
        "state_dict": {"b.weight": weight, "a.bias": torch.ones(3, dtype=torch.bfloat16), "empty": torch.ones(0)},
        "optimizer_states": [
            {"state": state, "param_groups": groups},
            without,
        ],
        "callbacks": {"Some": {"best": torch.ones(())}},
    }
    torch.save(checkpoint, path)
    return checkpoint


def test_a_file_becomes_a_folder_and_a_file_again(tmp_path: Path) -> None:
    checkpoint = lightning_file(tmp_path / "plain.ckpt")
    convert(tmp_path / "plain.ckpt", tmp_path / "folder.ckpt")
    convert(tmp_path / "folder.ckpt", tmp_path / "again.ckpt")
    assert visible(tmp_path / "folder.ckpt") == [".metadata", "__0_0.distcp", "meta.pt"]
    again = torch.load(tmp_path / "again.ckpt")
    assert not list(differences({key: again[key] for key in checkpoint}, checkpoint))
    assert again.keys() - checkpoint.keys() == {"gpp"}


def test_a_hook_may_change_a_state_dict_before_it_is_read(tmp_path: Path) -> None:
    lightning_file(tmp_path / "plain.ckpt")
    convert(tmp_path / "plain.ckpt", tmp_path / "folder.ckpt")
    state = opened(tmp_path / "folder.ckpt")["state_dict"]
    state["new"] = state.pop("a.bias")
    assert list(state) == ["b.weight", "empty", "new"]
    assert state["new"].tolist() == [1, 1, 1]
    assert state.outline("b.weight").shape == (5, 4)
